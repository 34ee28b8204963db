"""Rows for verl: its FSDP2 engine, checkpoints and weight export, on a CPU."""

from __future__ import annotations

import contextlib
from abc import ABC
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_base import PlatformBase


class Host(PlatformBase):
    """A platform without an accelerator; verl has none."""

    device_name, vendor_name = "cpu", "cpu"
    device_module = SimpleNamespace(
        is_available=lambda: False,
        empty_cache=lambda: None,
        mem_get_info=lambda: (0, 0),
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        set_rng_state=torch.set_rng_state,
        synchronize=lambda: None,
    )
    current_device = staticmethod(lambda: "cpu")
    device_count = staticmethod(lambda: 1)
    communication_backend_name = staticmethod(lambda: "gloo")
    is_available = staticmethod(lambda: True)

    def nothing(self, *unused: Any) -> None:
        pass

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = nothing
    get_device_capability = visible_devices_envvar = profiler_start = profiler_stop = nothing
    ray_resource_name = ray_noset_envvars = is_ipc_supported = cudart = nothing
    nvtx_range = staticmethod(contextlib.nullcontext)


set_platform(Host())  # before other modules read the name of the device

import verl.utils.model as verl_models  # noqa: E402
import verl.workers.engine.fsdp.transformer_impl as transformer_impl  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from verl.model_merger.base_model_merger import ModelMergerConfig  # noqa: E402
from verl.model_merger.fsdp_model_merger import FSDPModelMerger  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.fsdp_utils import (  # noqa: E402
    apply_fsdp2,
    collect_merged_lora_params,
    fsdp2_clip_grad_norm_,
    fsdp2_sharded_load_from_cpu,
    fsdp2_sharded_save_to_cpu,
    get_fsdp_full_state_dict,
    set_reshard_after_forward,
)
from verl.workers.config import (  # noqa: E402
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead  # noqa: E402
from verl.workers.engine.utils import prime_delta_snapshots  # noqa: E402
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss  # noqa: E402

from _rows import Rows, Run  # noqa: E402

# Memory cannot be pinned without an accelerator.
transformer_impl.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(pin_memory=False)


def load_values(local_path: str, torch_dtype: torch.dtype, model_config: Any, **rest: Any) -> nn.Module:
    """Load a critic; verl's function asks for FlashAttention, which requires a GPU."""
    return AutoModelForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)


verl_models.load_valuehead_model = load_values

rows = Rows("verl", environment="verl", versions=("verl", "transformers", "peft", "torch"))

VOCABULARY = 61
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 71, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def checkpoint(run: Run, tied: bool = False, values: bool = False) -> str:
    """Save a small model on rank 0, as if downloaded from a hub, and return the folder."""
    where = Path("values" if values else "tied" if tied else "untied").absolute()
    if run.rank == 0 and not where.exists():
        torch.manual_seed(0)
        if tied:
            config: Any = Qwen3Config(**SIZES, **HEADS, **SPECIAL, head_dim=12, tie_word_embeddings=True)
        else:
            config = LlamaConfig(**SIZES, **HEADS, **SPECIAL, num_labels=1 if values else 2)
        auto = AutoModelForTokenClassification if values else AutoModelForCausalLM
        auto.from_config(config).save_pretrained(where)
    dist.barrier()
    return str(where)


FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}


def engine_of(
    run: Run, model: dict[str, Any] | None = None, values: bool = False, tied: bool = False, **given: Any
) -> Any:
    """Return verl's engine with the strategy fsdp2; `model` and `given` are settings of the model and the engine."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = {"path": checkpoint(run, tied, values)} | (model or {})
    saved = given.pop("checkpoint", CheckpointConfig())
    defaults = {"load_tokenizer": False, "use_remove_padding": False, "enable_gradient_checkpointing": False}
    attention = {"override_config": {"attn_implementation": "sdpa"}}
    kind = {"model_type": "value_model"} if values else {}
    engine = (FSDPEngineWithValueHead if values else FSDPEngineWithLMHead)(
        HFModelConfig(**defaults | attention | kind | model),
        FSDPEngineConfig(**{"strategy": "fsdp2", "use_torch_compile": False} | given),
        FSDPOptimizerConfig(lr=0.01, clip_grad=1.0, lr_scheduler_type="cosine", total_training_steps=10),
        saved,
    )
    torch.manual_seed(1)
    engine.initialize()
    run.sharded(engine.module)
    return engine


def batch(run: Run, step: int, size: int = 4) -> TensorDict:
    """Return prompts and responses of different lengths, for two microbatches, as nested tensors without padding."""
    source = torch.Generator().manual_seed(100 * step + run.rank)

    def lengths(low: int, high: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=source).tolist()

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def each(make: Any, counts: list[int]) -> list[torch.Tensor]:
        return [make(count, generator=source) for count in counts]

    tokens = partial(torch.randint, 2, VOCABULARY)
    prompts, responses = ([tokens((n,), generator=source) for n in lengths(*some)] for some in ((2, 5), (3, 8)))
    counts = [len(response) for response in responses]
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.cat([torch.zeros(len(p)), torch.ones(len(r))]) for p, r in zip(prompts, responses, strict=True)]
    tensors = {
        "input_ids": nested(whole),
        "position_ids": nested([torch.arange(len(row)) for row in whole]),
        "loss_mask": nested(masks),
        "prompts": nested(prompts),
        "responses": nested(responses),
        "response_mask": nested([torch.ones(n) for n in counts]),
        **{name: nested(each(torch.randn, counts)) for name in ("advantages", "values", "returns")},
    }
    settings = {"use_remove_padding": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": size // 2}
    return tu.get_tensordict(tensors, settings | {"temperature": 1.0, "global_batch_size": size * run.world})


def trains(run: Run, engine: Any, loss: Any = None, first: int = 0, count: int = 3, name: str = "") -> Any:
    """Train `count` steps, record losses, gradient norms and weights, and return the engine."""
    seen = []
    for step in range(first, first + count):
        with engine.train_mode():
            output = engine.train_batch(batch(run, step), loss or partial(sft_loss, None))
            rate = engine.lr_scheduler_step()
        seen.append([output["loss"], output["metrics"]["grad_norm"], rate])
    run.note(f"losses, norms and rates{name}", seen)
    run.weights(engine.module, f"weights{name}")
    return engine


def infers(run: Run, engine: Any, step: int = 50) -> Any:
    """Return the log probabilities of a batch, in evaluation mode."""
    with engine.eval_mode():
        output = engine.infer_batch(batch(run, step))
    return output["model_output"]["log_probs"]


@rows("bf16 compute, two microbatches with gradient sync in the last, log probabilities")
def full(run: Run) -> None:
    engine = engine_of(run)
    run.note("before", infers(run, engine).values())
    trains(run, engine)
    run.note("after", infers(run, engine).values())


@rows("fp32, gradient sync in all microbatches, forward_prefetch, reshard_after_forward false")
def synchronized(run: Run) -> None:
    given = {"use_no_sync_for_gradient_accumulation": False, "forward_prefetch": True, "reshard_after_forward": False}
    trains(run, engine_of(run, mixed_precision=FP32, **given))


@rows("tied embeddings, gradient checkpointing")
def checkpointed(run: Run) -> None:
    trains(run, engine_of(run, {"enable_gradient_checkpointing": True}, tied=True))


@rows("fp16 with a gradient scaler")
def scaled(run: Run) -> None:
    engine = engine_of(run, mixed_precision={"param_dtype": "fp16", "reduce_dtype": "fp32"})
    trains(run, engine)
    run.note("scale", engine.scaler.get_scale())


@rows("HSDP (fsdp_size 2), four ranks", world=4)
def hsdp(run: Run) -> None:
    trains(run, engine_of(run, fsdp_size=2))


@rows("offload_policy: CPUOffloadPolicy")
def offloaded(run: Run) -> None:
    trains(run, engine_of(run, offload_policy=True))


@rows("param_offload and optimizer_offload around each step")
def moved(run: Run) -> None:
    trains(run, engine_of(run, param_offload=True, optimizer_offload=True))


@rows("PPO: old log probabilities, a reference model that is only run forward, policy updates")
def ppo(run: Run) -> None:
    reference = engine_of(run, forward_only=True)
    run.note("reference", infers(run, reference).values())
    del run.noted["sharded"]
    actor = engine_of(run)
    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, use_kl_loss=True)
    norms = []
    for step in range(3):
        data = batch(run, step)
        for name, engine in (("old_log_probs", actor), ("ref_log_prob", reference)):
            whole, lengths = infers(run, engine, step), data["responses"].offsets().diff().tolist()
            parts = [row[-n - 1 : -1] for row, n in zip(whole.unbind(), lengths, strict=True)]
            data[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        for _ in range(2):
            with actor.train_mode():
                output = actor.train_batch(data.clone(), partial(ppo_loss, config))
            norms.append([output["loss"], output["metrics"]["grad_norm"]])
    run.note("losses and norms", norms)
    run.weights(actor.module)


@rows("a critic")
def critic(run: Run) -> None:
    config = CriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=2)
    trains(run, engine_of(run, values=True), partial(value_loss, config))


@rows("exports weights for an inference engine after each step: full weights, shards and deltas")
def exports(run: Run) -> None:
    engine = trains(run, engine_of(run), count=1, name=" first")
    engine._delta_shard_snap = {}
    for step in range(2):
        weights, _ = engine.get_per_tensor_param()
        run.note(f"full weights {step}", dict(weights))
        shards, _ = engine.get_per_tensor_param_shard()
        run.note(f"shards {step}", {name: [local.clone(), str(spec.placements)] for name, local, spec in shards})
        if step == 0:
            shards, _ = engine.get_per_tensor_param_shard()
            prime_delta_snapshots(shards, engine._delta_shard_snap, pin=False)
        else:
            deltas, _ = engine.get_per_tensor_param_delta_shard()
            run.note("deltas", [[str(slots), where, what] for slots, _, _, where, what, _ in deltas])
        trains(run, engine, first=1 + step, count=1, name=f" {step}")


ADAPTER = {"lora_rank": 3, "lora_alpha": 6, "target_modules": "all-linear"}


@rows("LoRA, exports the adapter, and merged weights while the model keeps the adapter")
def lora(run: Run) -> None:
    engine = trains(run, engine_of(run, ADAPTER))
    for layered in (False, True):
        weights, settings = engine.get_per_tensor_param(layered_summon=layered, base_sync_done=True)
        run.note(f"adapter, layered {layered}", dict(weights))
        run.note(f"rank {layered}", settings["r"])
    weights, _ = engine.get_per_tensor_param(base_sync_done=False)
    run.note("base weights", dict(weights))
    run.note("merged", collect_merged_lora_params(engine.module))
    run.weights(engine.module, "weights afterwards")
    trains(run, engine, first=3, count=1, name=", continued")


@rows("LoRA, lora.merge: streams merged weights")
def lora_merged(run: Run) -> None:
    engine = trains(run, engine_of(run, ADAPTER | {"lora": {"merge": True}}))
    weights, _ = engine.get_per_tensor_param()
    run.note("merged", dict(weights))
    trains(run, engine, first=3, count=1, name=", continued")


@rows("saves and loads a checkpoint, continues, and merges the shards into a Hugging Face model")
def resumed(run: Run) -> None:
    resumes(run, CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]))
    if run.rank == 0:
        words = models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained("saved/huggingface")
        config = ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir="saved",
            target_dir="merged",
            hf_model_config_path="saved/huggingface",
            tie_word_embedding=False,
            trust_remote_code=False,
            is_value_model=False,
        )
        FSDPModelMerger(config).merge_and_save()
        from safetensors.torch import load_file

        for folder in ("merged", "saved/huggingface"):
            run.note(folder, load_file(f"{folder}/model.safetensors"))
    dist.barrier()


@rows("LoRA, saves only the adapter (save_lora_only), loads it, and continues")
def lora_resumed(run: Run) -> None:
    resumes(run, CheckpointConfig(save_lora_only=True), **ADAPTER)


def resumes(run: Run, saved: CheckpointConfig, **model: Any) -> None:
    engine = trains(run, engine_of(run, model, checkpoint=saved), count=2, name=" before")
    engine.save_checkpoint("saved", global_step=2)
    trains(run, engine, first=2, count=2)
    run.noted["sharded first"] = run.noted.pop("sharded")
    again = engine_of(run, model, checkpoint=saved)
    again.load_checkpoint("saved")
    trains(run, again, first=2, count=2, name=", resumed")
    run.agrees("resumed weights", run.noted["weights, resumed"], run.noted["weights"], tolerance=0)


@rows("fsdp2_sharded_save_to_cpu and load, get_fsdp_full_state_dict")
def kept(run: Run) -> None:
    engine = trains(run, engine_of(run), name=" before")
    shards, spec = fsdp2_sharded_save_to_cpu(engine.module)
    run.note("full", get_fsdp_full_state_dict(engine.module, rank0_only=False))
    run.note("shards", {name: value[0].clone() for name, value in shards.items()})
    shards = {name: (value.clone(), each) for name, (value, each) in shards.items()}
    trains(run, engine, first=3, count=1)
    fsdp2_sharded_load_from_cpu(engine.module, shards, spec)
    run.weights(engine.module, "weights, restored")
    run.agrees("restored weights", run.noted["weights, restored"], run.noted["weights before"], tolerance=0)


@rows("set_reshard_after_forward of verl, between training steps")
def resharding(run: Run) -> None:
    engine = trains(run, engine_of(run), count=1, name=" first")
    tokens = torch.arange(12).view(2, 6) + run.rank
    for reshard in (False, True):
        set_reshard_after_forward(engine.module, reshard)
        # With gradients: without them, composable_shard reshards all groups at the end of the forward.
        output = engine.module(input_ids=tokens, use_cache=False).logits
        layers = engine.module.model.layers.parameters()
        run.note(f"sharded parameters {reshard}", sum(isinstance(each, DTensor) for each in layers))
        output.float().logsumexp(-1).mean().backward()
        trains(run, engine, first=1 + reshard, count=1, name=f" {reshard}")
        run.note(f"log probabilities {reshard}", infers(run, engine).values())


class Abstract(nn.Module, ABC):
    """A model whose class has the metaclass ABCMeta, as some models with remote code."""

    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=False)
        self.embed_tokens = nn.Embedding(VOCABULARY, 35)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(35, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(hidden)


class Layer(nn.Module, ABC):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(35), nn.Linear(35, 35)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(self.norm(hidden)).tanh()


@rows("apply_fsdp2 and fsdp2_clip_grad_norm_ for models of abstract classes (ABC)")
def abstract(run: Run) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole = Abstract()
    model = deepcopy(whole)
    apply_fsdp2(model, {}, {"forward_prefetch": True})
    run.sharded(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    norms = []
    for step in range(3):
        tokens = [(torch.arange(12).view(2, 6) + step + rank) % VOCABULARY for rank in range(run.world)]
        model(tokens[run.rank]).logsumexp(-1).mean().backward()
        whole(torch.cat(tokens)).logsumexp(-1).mean().backward()
        norms.append(fsdp2_clip_grad_norm_(model.parameters(), 0.1))
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    run.note("norms", norms)
    run.weights(model)
    run.agrees("weights", dict(model.named_parameters()), dict(whole.named_parameters()))
