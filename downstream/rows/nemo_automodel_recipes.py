"""Rows for NeMo-Automodel: its recipe for language models, with its FSDP2 strategy, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nemo_automodel._transformers.auto_model as auto_model
import nemo_automodel.components.models.qwen3_moe.model as qwen3_moe_model
import torch
import torch.distributed as dist
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.distributed.parallelizer import unshard_fsdp2_model
from nemo_automodel.components.distributed.parallelizer_utils import configure_fsdp_unused_param_reduction
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction as Recipe
from torch import nn
from transformers import GPT2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from _rows import Rows, Run

rows = Rows("NeMo-Automodel", environment="nemo_automodel", versions=("nemo-automodel", "transformers", "torch"))


class OnCpu:
    """A replacement for the name `torch` in the modules that place models on the current CUDA device."""

    cuda = SimpleNamespace(current_device=lambda: torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*name: Any) -> torch.device:
        return torch.device("cpu")


auto_model.torch = qwen3_moe_model.torch = OnCpu()
# A build of torch without CUDA raises an error in these calls.
torch.cuda.reset_peak_memory_stats = lambda *device: None
torch.cuda.empty_cache = lambda: None

VOCABULARY = 61
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 71, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
MODELS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, **HEADS),
    "qwen3": Qwen3Config(**SIZES, **HEADS, head_dim=12, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, **HEADS, head_dim=12, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
    "gpt2": GPT2Config(**GPT2, n_embd=48, n_layer=3, n_head=4, n_positions=64),
    "even": LlamaConfig(**SIZES | {"intermediate_size": 72}, **HEADS),
}
BACKEND = {
    "_target_": "nemo_automodel.components.models.common.BackendConfig",
    "attn": "sdpa",
    "rms_norm": "torch",  # the default is compiled
}


def checkpoint(run: Run, name: str) -> str:
    """Save a small model on rank 0, as if downloaded from a hub, and return the folder."""
    from transformers import AutoModelForCausalLM

    where = Path(name).absolute()
    if run.rank == 0 and not where.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(where)
    return str(where)


def settings(run: Run, name: str = "llama", /, **changes: Any) -> dict[str, Any]:
    """Return the settings of a recipe, as read from a YAML file; nested `changes` replace single values."""
    backend = {} if name == "gpt2" else {"backend": BACKEND}  # only NeMo's own models have one
    made: dict[str, Any] = {
        "seed": 3,
        "dist_env": {"backend": "gloo", "timeout_minutes": 2},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": checkpoint(run, name),
            "torch_dtype": "float32",
            "attn_implementation": "sdpa",
            **backend,
        },
        "distributed": {"strategy": "fsdp2"},
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset",
            "num_sentences": 64,
            "mean_len": 9.0,
            "std_len": 3.0,
            "max_sentence_len": 16,
            "vocab_size": VOCABULARY,
            "tokenizer": None,  # otherwise the recipe loads one from the folder of the model
        },
        "dataloader": {"collate_fn": "nemo_automodel.components.datasets.utils.default_collater", "shuffle": False},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
        "lr_scheduler": {"lr_decay_style": "cosine", "min_lr": 0.001},
        "step_scheduler": {"global_batch_size": 8, "local_batch_size": 2, "max_steps": 3, "ckpt_every_steps": 100},
        "checkpoint": {"enabled": False, "checkpoint_dir": "out"},
        "clip_grad_norm": {"max_norm": 1.0},
    }
    return merged(made, changes)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: merged(base[name], changes[name]) for name in base if isinstance(changes.get(name), dict)}
    return {**base, **changes, **both}


def trains(run: Run, settings: dict[str, Any], name: str = "") -> Recipe:
    """Run NeMo's recipe, record losses, gradient norms, validation losses and weights, and return the recipe."""
    recipe = Recipe(ConfigNode(settings))
    recipe.setup()
    for i, part in enumerate(recipe.model_parts):
        run.sharded(part, f"sharded{name}{i or ''}")
    seen: list[list[float]] = []
    log, log_validation = recipe.log_train_metrics, recipe.log_val_metrics

    def logged(data: Any) -> None:
        seen.append([float(data.metrics[each]) for each in ("loss", "grad_norm", "num_label_tokens")])
        log(data)

    def logged_validation(which: str, data: Any, *rest: Any) -> None:
        seen.append([float(data.metrics["val_loss"])])
        log_validation(which, data, *rest)

    recipe.log_train_metrics, recipe.log_val_metrics = logged, logged_validation
    recipe.run_train_validation_loop()
    run.note(f"losses and norms{name}", seen)
    for i, part in enumerate(recipe.model_parts):
        run.weights(part, f"weights{name}{i or ''}")
    return recipe


FP32 = {
    "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
    "param_dtype": "float32",
    "reduce_dtype": "float32",
}


def fsdp2(**given: Any) -> dict[str, Any]:
    return {"distributed": {"strategy": "fsdp2", **given}}


@rows("its Llama, bf16 compute and fp32 master weights, two microbatches per step")
def full(run: Run) -> None:
    trains(run, settings(run))


@rows("fp32, validation after each step, tied embeddings (Qwen3)")
def validated(run: Run) -> None:
    data = {"validation_dataset": settings(run)["dataset"] | {"num_sentences": 8, "seed": 5}}
    loader = {"validation_dataloader": settings(run)["dataloader"]}
    steps = {"step_scheduler": {"val_every_steps": 1}}
    trains(run, settings(run, "qwen3", **fsdp2(mp_policy=FP32), **data, **loader, **steps))


@rows("a model of Transformers (GPT-2), defer_fsdp_grad_sync false, reshard_after_forward false")
def plain(run: Run) -> None:
    given = fsdp2(defer_fsdp_grad_sync=False, reshard_after_forward=False)
    trains(run, settings(run, "gpt2", **given))


@rows("activation_checkpointing, explicit prefetching")
def checkpointed(run: Run) -> None:
    trains(run, settings(run, **fsdp2(activation_checkpointing=True, enable_fsdp2_prefetch=True)))


@rows("selective activation_checkpointing")
def selective(run: Run) -> None:
    trains(run, settings(run, **fsdp2(activation_checkpointing="selective")))


@rows("CPUOffloadPolicy")
def offloaded(run: Run) -> None:
    policy = {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy", "pin_memory": False}
    trains(run, settings(run, **fsdp2(offload_policy=policy)))


@rows("per-layer torch.compile", timeout=400.0)
def compiled(run: Run) -> None:
    torch._inductor.config.compile_threads = 1  # a process pool does not work in forked ranks
    trains(run, settings(run, "qwen3", **fsdp2(enable_compile=True)))


@rows("freeze_config: the embeddings")
def frozen(run: Run) -> None:
    trains(run, settings(run, freeze_config={"freeze_modules": [{"path": "model.embed_tokens"}]}))


@rows("ChunkedCrossEntropy, which gathers the head outside of its forward")
def chunked(run: Run) -> None:
    loss = {"_target_": "nemo_automodel.components.loss.chunked_ce.ChunkedCrossEntropy", "compile": False}
    trains(run, settings(run, loss_fn=loss))


@rows("HSDP, four ranks", world=4)
def hsdp(run: Run) -> None:
    trains(run, settings(run, **fsdp2(dp_replicate_size=2)))


@rows("tensor parallelism with sequence_parallel and FSDP2, four ranks", world=4)
def tensor(run: Run) -> None:
    trains(run, settings(run, "even", **fsdp2(tp_size=2, sequence_parallel=True)))


@rows("pipeline parallelism and FSDP2, four ranks", world=4)
def pipeline(run: Run) -> None:
    pipeline = {"pp_schedule": "1f1b", "pp_microbatch_size": 1}
    trains(run, settings(run, **fsdp2(pp_size=2, pipeline=pipeline), step_scheduler={"local_batch_size": 4}))


MOE = {"enable_fsdp_optimizations": True, "experts": "torch", "dispatcher": "torch"}


@rows("experts (Qwen3-MoE) with its optimizations for FSDP2")
def experts(run: Run) -> None:
    trains(run, settings(run, "qwen3_moe", model={"backend": MOE}))


@rows("expert parallelism, experts sharded by FSDP2 as well, four ranks", world=4)
def expert_parallel(run: Run) -> None:
    trains(run, settings(run, "qwen3_moe", **fsdp2(ep_size=2), model={"backend": MOE}))


@rows("experts with pipeline parallelism and its post-backward for FSDP2, four ranks", world=4)
def expert_pipeline(run: Run) -> None:
    given = fsdp2(pp_size=2, ep_size=2, pipeline={"pp_schedule": "1f1b", "pp_microbatch_size": 1})
    trains(run, settings(run, "qwen3_moe", **given, model={"backend": MOE}, step_scheduler={"local_batch_size": 4}))


PEFT = {
    "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
    "match_all_linear": True,
    "dim": 3,
    "alpha": 6,
}
SAVED = {"checkpoint": {"enabled": True, "save_consolidated": "every"}, "step_scheduler": {"ckpt_every_steps": 2}}
VARYING = (".jsonl", ".yaml", ".pt", "config.json", "losses.json")


@rows("LoRA, saves the adapter")
def lora(run: Run) -> None:
    trains(run, settings(run, peft=PEFT, **SAVED))
    run.files("out", ignore=VARYING)


@rows("saves sharded and Hugging Face checkpoints, and resumes")
def resumed(run: Run) -> None:
    resumes(run, settings(run, **SAVED))


@rows("LoRA saves and resumes")
def lora_resumed(run: Run) -> None:
    resumes(run, settings(run, peft=PEFT, **SAVED))


@rows("saves a distributed checkpoint (torch_save) of tied weights, and resumes")
def distributed(run: Run) -> None:
    saved = SAVED | {"checkpoint": {"enabled": True, "model_save_format": "torch_save"}}
    resumes(run, settings(run, "qwen3", **saved))


def resumes(run: Run, settings: dict[str, Any]) -> None:
    trains(run, settings)
    (saved,) = Path("out").glob("epoch_*_step_1")
    run.files(saved, ignore=VARYING)
    again = merged(settings, {"checkpoint": {"restore_from": str(saved), "checkpoint_dir": "again"}})
    model = trains(run, again, ", resumed").model_parts[0]
    # Without buffers: the caches of rotary embeddings depend on the lengths of the sequences seen.
    first, second = run.noted["weights"], run.noted["weights, resumed"]
    for name, _ in model.named_parameters():
        run.agrees(f"resumed {name}", second[name], first[name], tolerance=0)


@rows("unshard_fsdp2_model around an evaluation")
def unsharded(run: Run) -> None:
    model = trains(run, settings(run)).model_parts[0].eval()
    tokens = torch.arange(10).view(2, 5) + run.rank
    with torch.no_grad(), unshard_fsdp2_model(model):
        run.note("full weights", {name: value.detach().clone() for name, value in model.named_parameters()})
        run.note("output", model(input_ids=tokens, use_cache=False).logits)
    run.sharded(model, "sharded afterwards")


@rows("configure_fsdp_unused_param_reduction: one rank does not use a layer")
def unused(run: Run) -> None:
    model = trains(run, settings(run)).model_parts[0]
    configure_fsdp_unused_param_reduction(model)
    layers = list(model.model.layers.values() if isinstance(model.model.layers, nn.ModuleDict) else model.model.layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        skipped = layers[1].mlp if run.rank == step % 2 else None
        forward = skipped.forward if skipped else None
        if skipped:
            skipped.forward = torch.zeros_like
        tokens = torch.arange(10).view(2, 5) + run.rank
        model(input_ids=tokens).logits.float().logsumexp(-1).mean().backward()
        if skipped:
            skipped.forward = forward
        run.gradients(model, f"gradients {step}")
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
