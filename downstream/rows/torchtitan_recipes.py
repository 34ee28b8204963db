"""Rows for torchtitan: its trainer, models, parallelisms and checkpoints, on a CPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as tools
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class Processor:
    """A replacement for the accelerator module that torchtitan uses (`torch.cuda`), for machines without one."""

    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    empty_cache = staticmethod(lambda: None)
    get_device_name = staticmethod(lambda device: "CPU")
    get_device_properties = staticmethod(lambda device: SimpleNamespace(total_memory=1 << 30))
    memory_stats = staticmethod(lambda device: {})
    reset_peak_memory_stats = staticmethod(lambda: None)
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda *device: None)
    Stream = torch.cpu.Stream


tools.device_type, tools.device_module = "cpu", Processor  # before other modules import them

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.lora import LoRAConverter  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw  # noqa: E402
from torchtitan.components.optimizer.optimizer import ParamGroupConfig  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.utils import clip_grad_norm_  # noqa: E402
from torchtitan.models import deepseek_v3, llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.deepseek_v3.mtp import MTPLoss  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from _rows import Rows, Run  # noqa: E402

rows = Rows("torchtitan", environment="torchtitan", versions=("torchtitan", "torch"))

VOCABULARY, LENGTH, WIDTH = 61, 12, 48


class Letters(BaseTokenizer):
    """A tokenizer with one token per byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [byte % VOCABULARY for byte in text.encode()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Batches(BaseDataLoader):
    """Random tokens that differ between ranks. The state dict contains the position."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **rest: Any) -> None:
        self.rank, self.shape, self.at = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(100 * self.at + self.rank)
            self.at += 1
            tokens = torch.randint(VOCABULARY, self.shape, generator=generator)
            positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:].clone()

    def state_dict(self) -> dict[str, Any]:
        return {f"at_{self.rank}": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state[f"at_{self.rank}"]


def llama(tied: bool = False, layers: int = 3) -> ModelSpec:
    spec = llama3.model_registry("debugmodel")
    heads = 4
    blocks = llama3._build_llama3_layers(
        n_layers=layers,
        dim=WIDTH,
        n_heads=heads,
        n_kv_heads=2,
        hidden_dim=61,  # uneven shards
        rope=ComplexRoPE.Config(dim=WIDTH // heads, max_seq_len=64, theta=10000, scaling="llama"),
        attn_backend="flex",
    )
    for block in blocks:
        block.attention.inner_attention = ScaledDotProductAttention.Config()  # others require an accelerator
    spec.model = llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY,
            embedding_dim=WIDTH,
            param_init=llama3._EMBEDDING_SKIP_INIT if tied else llama3._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=llama3._output_linear_init(WIDTH)),
        layers=blocks,
    )
    return spec


def config(spec: ModelSpec, **given: Any) -> Trainer.Config:
    training = {"local_batch_size": 2, "seq_len": LENGTH, "steps": 4, "mixed_precision_param": "float32"}
    parallelism = {"spmd_backend": "partial_dtensor"}
    return Trainer.Config(
        model_spec=spec,
        tokenizer=Letters.Config(),
        dataloader=Batches.Config(),
        optimizer=given.pop("optimizer", default_adamw(lr=1e-2)),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(**training | given.pop("training", {}), disable_cuda_graphs=True),
        parallelism=ParallelismConfig(**parallelism | given.pop("parallelism", {})),
        loss=given.pop("loss", CrossEntropyLoss.Config()),
        activation_checkpoint=given.pop("activation_checkpoint", None),
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(seed=0),
        **given,
    )


def trained(run: Run, settings: Trainer.Config, steps: int = 3) -> Trainer:
    """Train `steps`, evaluate, and train one more step; return torchtitan's trainer."""
    trainer = Trainer(settings)
    model = trainer.model_parts[0]
    run.sharded(model)
    seen = watched(trainer)
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(steps):
        trainer.step += 1
        trainer.train_step(batches)
    run.note("evaluated", evaluated(trainer))
    trainer.step += 1
    trainer.train_step(batches)
    run.note("losses and norms", seen)
    run.weights(model)
    return trainer


def watched(trainer: Trainer) -> list[list[float]]:
    """Return a list to which each later step appends its mean loss, maximum loss and gradient norm."""
    seen: list[list[float]] = []
    log = trainer.metrics_processor.log

    def logged(step: int, loss: float, worst: float, norm: float, **rest: Any) -> None:
        seen.append([loss, worst, norm])
        log(step, loss, worst, norm, **rest)

    trainer.metrics_processor.log = logged
    return seen


def evaluated(trainer: Trainer) -> torch.Tensor:
    """Return the output of the model for a batch of this rank, in evaluation mode."""
    model = trainer.model_parts[0]
    model.eval()
    given = next(iter(Batches(Batches.Config(), dp_rank=50 + dist.get_rank(), seq_len=LENGTH, local_batch_size=2)))
    tokens, _, rest = trainer.post_dataloading_process(*given)
    with torch.no_grad(), trainer.train_context():
        output = model(tokens, **rest)
    model.train()
    return output


def alone(
    run: Run, settings: Trainer.Config, steps: int, state: dict[str, torch.Tensor]
) -> tuple[list[float], nn.Module]:
    """Train the unsharded model from `state` on the batches of all ranks; return the losses and the model."""
    model = settings.model_spec.model.build()
    with torch.no_grad():
        model.init_weights()  # initializes the buffers
    model.load_state_dict(state)
    optimizers = settings.optimizer.build(model_parts=[model])
    schedules = settings.lr_scheduler.build(optimizers=optimizers, training_steps=settings.training.steps)
    batches = [
        iter(Batches(Batches.Config(), dp_rank=rank, seq_len=LENGTH, local_batch_size=2)) for rank in range(run.world)
    ]
    losses = []
    for _ in range(steps):
        optimizers.zero_grad()
        given = [next(each) for each in batches]
        tokens = sum(labels.numel() for _, labels in given)
        loss = torch.zeros(())
        for inputs, labels in given:
            output = model(inputs["input"], positions=inputs["positions"])
            loss = loss + nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / tokens).backward()
        losses.append((loss / tokens).item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        schedules.step()
    return losses, model


def as_alone(run: Run, settings: Trainer.Config) -> None:
    """Check that three steps agree with the unsharded model, for settings with which FSDP2 fails."""
    settings.optimizer = GENTLE
    trainer = Trainer(settings)
    model = trainer.model_parts[0]
    run.sharded(model)
    state = {name: value.to("cpu").full_tensor() for name, value in model.state_dict().items()}
    seen = watched(trainer)
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(3):
        trainer.step += 1
        trainer.train_step(batches)
    losses, unsharded = alone(run, settings, 3, state)
    run.agrees("losses", [loss for loss, *_ in seen], losses)
    run.agrees("weights", dict(model.named_parameters()), dict(unsharded.named_parameters()))


# The large epsilon keeps Adam from amplifying small differences in small gradients.
GENTLE = default_adamw(lr=1e-2, eps=1e-2)


@rows("llama3 by its trainer, gradients divided by its own loss (gloo has no scaled sum)")
def unscaled(run: Run) -> None:
    as_alone(run, config(llama()))


# On gloo, FSDP2 requires `set_force_sum_reduction_for_comms` for torchtitan's gradient_divide_factor of 1.
def summed(spec: ModelSpec) -> ModelSpec:
    """Return the spec, changed so that collectives sum gradients without a scaling factor."""
    parallelize = spec.parallelize_fn

    def parallelized(model: nn.Module, **given: Any) -> nn.Module:
        model = parallelize(model, **given)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = parallelized
    return spec


def deepseek(predicted: int = 0, experts: int = 6) -> ModelSpec:
    """Return a DeepSeek-V3 spec: latent attention, one dense block, two blocks with shared and routed experts."""
    spec = deepseek_v3.model_registry("debugmodel")
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=3,
        n_dense_layers=1,
        dim=WIDTH,
        n_heads=4,
        q_lora_rank=0,
        kv_lora_rank=20,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=12,
        mscale=0.70,
        dense_hidden_dim=61,
        moe_hidden_dim=32,
        num_experts=experts,
        num_shared_experts=1,
        router_top_k=2,
        router_score_func="sigmoid",
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=4, max_seq_len=64, theta=10000.0, scaling="none"),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model = deepseek_v3.DeepSeekV3Model.Config(
        vocab_size=VOCABULARY,
        dim=WIDTH,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=deepseek_v3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=deepseek_v3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=WIDTH, out_features=VOCABULARY, param_init=deepseek_v3._output_linear_init(WIDTH)
        ),
        layers=layers,
        mtp_layers=deepseek_v3._build_mtp_layers(layers[-1], dim=WIDTH, num_mtp_layers=predicted),
    )
    return spec


def add(title: str, make: Any, world: int = 2, timeout: float = 180.0, row: Any = None, **given: Any) -> None:
    """Add a row that runs the trainer with these settings."""

    def program(run: Run) -> None:
        trained(run, config(summed(make()), **given))

    rows.add(title, program, world=world, timeout=timeout, **row or {})


def compiled(backend: str) -> CompileConfig:
    return CompileConfig(enable=True, components=["model"], backend=backend)


ALWAYS, NEVER = ({"fsdp_reshard_after_forward": policy} for policy in ("always", "never"))
CHUNKED = ChunkedLossWrapper.Config(num_chunks=3, loss_fn=CrossEntropyLoss.Config())

add("llama3: blocks, embedding, and norm with head as groups", llama)
add("llama3: fsdp_reshard_after_forward='always'", llama, parallelism=ALWAYS)
add("llama3: fsdp_reshard_after_forward='never'", llama, parallelism=NEVER)
add("llama3: embedding and head tied, in one group with the norm", partial(llama, tied=True))
add("llama3: ChunkedLossWrapper calls the head for each chunk", llama, loss=CHUNKED)
add(
    "llama3: ChunkedLossWrapper, always resharded, over two batches",
    llama,
    loss=CHUNKED,
    parallelism=ALWAYS,
    training={"global_batch_size": 8},
)
add("llama3: full activation checkpoints", llama, activation_checkpoint=FullAC.Config())
add("llama3: activation checkpoints by operator", llama, activation_checkpoint=SelectiveAC.Config())
add("llama3: gradients accumulated over three batches", llama, training={"global_batch_size": 12})
add("llama3: bfloat16 with float32 gradients", llama, training={"mixed_precision_param": "bfloat16"})
add("llama3: all in bfloat16", llama, training={"mixed_precision_param": "bfloat16", "dtype": "bfloat16"})
add("llama3: blocks compiled, aot_eager", llama, compile=compiled("aot_eager"), timeout=400)
add(
    "llama3: blocks compiled over full checkpoints, aot_eager",
    llama,
    compile=compiled("aot_eager"),
    activation_checkpoint=FullAC.Config(),
    timeout=400,
)
add(
    "llama3: blocks compiled over checkpoints by operator",
    llama,
    compile=compiled("inductor"),
    activation_checkpoint=SelectiveAC.Config(),
    timeout=400,
)


@rows("llama3: offload to the CPU")
def offloaded(run: Run) -> None:
    dist.init_process_group("gloo")  # torchtitan would request the CPU backend twice
    as_alone(run, config(summed(llama()), training={"enable_cpu_offload": True}))


add("llama3: replicas of shards", llama, world=4, parallelism={"data_parallel_replicate_degree": 2})
add(
    "llama3: replicas of shards, checkpoints, accumulation, bfloat16",
    llama,
    world=4,
    parallelism={"data_parallel_replicate_degree": 2},
    activation_checkpoint=FullAC.Config(),
    training={"global_batch_size": 16, "mixed_precision_param": "bfloat16"},
)
add("llama3: replicas only", llama, parallelism={"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1})
add("llama3: tensor and sequence parallel", llama, world=4, parallelism={"tensor_parallel_degree": 2})
add("llama3: parameters on the whole mesh (full_dtensor)", llama, parallelism={"spmd_backend": "full_dtensor"})
add(
    "llama3: parameters on the whole mesh, tensor parallel",
    llama,
    world=4,
    parallelism={"spmd_backend": "full_dtensor", "tensor_parallel_degree": 2},
)
add("deepseek v3: latent attention, experts in the blocks' groups", deepseek)
add("deepseek v3: full activation checkpoints", deepseek, activation_checkpoint=FullAC.Config())
# FSDP2 and composable_shard add the gradients of four ranks in different orders on gloo. Rows with this setting need a
# tolerance and a large epsilon.
ORDER = {"tolerance": 1e-5, "why": "on gloo, FSDP2 and ours add the gradients of four ranks in different orders"}
# If a module runs several times in a forward, FSDP2 adds the gradients of all calls and reduces the sum.
USES = {"tolerance": 1e-5, "why": "ours reduces the gradients of each call and then adds them; FSDP2 adds them first"}

add(
    "deepseek v3: more ranks than experts, which are cut along dim 1",
    partial(deepseek, experts=3),
    world=4,
    row=ORDER,
    optimizer=GENTLE,
)
add(
    "deepseek v3: experts on their own mesh, tokens by all-to-all, prefetch lists",
    deepseek,
    parallelism={"expert_parallel_degree": 2},
)
add(
    "deepseek v3: experts on their own mesh, which is sharded too",
    partial(deepseek, experts=4),
    world=4,
    row=ORDER,
    optimizer=GENTLE,
    parallelism={"expert_parallel_degree": 2},
)
add(
    "deepseek v3: experts on their own mesh, chunked loss, checkpoints, bfloat16",
    deepseek,
    loss=CHUNKED,
    parallelism={"expert_parallel_degree": 2},
    activation_checkpoint=SelectiveAC.Config(),
    training={"mixed_precision_param": "bfloat16"},
)


@rows("llama3: checkpoints of its manager, and another trainer that resumes from them")
def checkpoint(run: Run) -> None:
    continued(run, partial(config, checkpoint=saving()))


@rows("llama3: asynchronous checkpoints")
def asynchronous(run: Run) -> None:
    continued(run, partial(config, checkpoint=saving(async_mode="async")))


@rows("llama3: replicas of shards, checkpoints", world=4)
def checkpoint_replicas(run: Run) -> None:
    continued(run, partial(config, checkpoint=saving(), parallelism={"data_parallel_replicate_degree": 2}))


def saving(**given: Any) -> CheckpointManager.Config:
    return CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False, keep_latest_k=0, **given)


def continued(run: Run, make: Any, spec: Any = llama) -> None:
    """Train four steps with checkpoints after steps 2 and 4; then repeat steps 3 and 4 in a new trainer."""
    one = Trainer(make(summed(spec())))
    run.sharded(one.model_parts[0])
    seen = watched(one)
    batches = one.batch_generator(one.dataloader)
    for _ in range(4):
        one.step += 1
        one.train_step(batches)
        one.checkpointer.save(one.step, last_step=one.step == 4)
    one.checkpointer.maybe_wait_for_saving()
    run.files("checkpoint" if (run.folder / "checkpoint").exists() else "outputs")
    two = Trainer(make(summed(spec())))
    two.checkpointer.load(step=2)
    again = watched(two)
    others = two.batch_generator(two.dataloader)
    for _ in range(2):
        two.step += 1
        two.train_step(others)
    run.note("losses and norms", [seen, again])
    run.note("continued as before", again == seen[2:])
    run.weights(one.model_parts[0])
    run.weights(two.model_parts[0], "continued")


@rows("llama3: its last checkpoint in the files of Hugging Face")
def exported(run: Run) -> None:
    given = CheckpointManager.Config(enable=True, last_save_in_hf=True)
    trainer = trained(run, config(summed(llama()), checkpoint=given))
    trainer.checkpointer.save(4, last_step=True)
    run.files("outputs", ignore=(".json",))


@rows("deepseek v3: experts on their own mesh, checkpoints")
def checkpoint_experts(run: Run) -> None:
    continued(run, partial(config, checkpoint=saving(), parallelism={"expert_parallel_degree": 2}), deepseek)


# The embedding and the head run twice, as in USES. In addition, two modules read the hidden states, and FSDP2 adds the
# gradients of these states in another order than the unsharded model. With composable_shard, all parameters except the
# embedding and the head are bitwise identical to those of the unsharded model.
@rows(
    "deepseek v3: it predicts two tokens (MTP), with one embedding and one head",
    tolerance=1e-5,
    why="the embedding and the head run twice, and FSDP2 adds the gradients of activations in a different order",
)
def predicting(run: Run) -> None:
    trained(run, config(summed(deepseek(predicted=1)), loss=MTPLoss.Config(), optimizer=GENTLE))


@rows("llama3: LoRA")
def adapters(run: Run) -> None:
    spec = llama()
    spec.model = LoRAConverter.Config(rank=4, alpha=8.0).build().convert(spec.model)
    trained(run, config(summed(spec)))


@rows("llama3: AdamW for each group of parameters")
def several(run: Run) -> None:
    groups = [
        ParamGroupConfig(
            pattern=r".*norm.*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.0}
        ),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}),
    ]
    settings = config(summed(llama()))
    settings.optimizer = OptimizersContainer.Config(param_groups=groups)
    trained(run, settings)


# Explicit training loops around torchtitan's models, as in its documentation.


def by_hand(
    run: Run, model: nn.Module, accumulate: int = 1, synced: bool = True, chunks: int = 0, divide: float | None = None
) -> None:
    """Train in a loop without the trainer, with torchtitan's `clip_grad_norm_` and AdamW.

    Args:
        accumulate: the number of batches per step.
        synced: whether each backward reduces gradients; otherwise only the last one of a step does.
        chunks: the number of chunks in which the head is called; 0 calls it with the whole sequence.
    """
    run.sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    seen = []
    for step in range(4):
        for part in range(accumulate):
            last = part == accumulate - 1
            if not synced:
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
            generator = torch.Generator().manual_seed(100 * step + 10 * part + run.rank)
            tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
            if chunks:
                model._skip_lm_head = True
                hidden = model(tokens[:, :-1])
                loss = torch.zeros(())
                for some, labels in zip(hidden.chunk(chunks, 1), tokens[:, 1:].chunk(chunks, 1), strict=True):
                    output = model.lm_head(some)
                    loss = loss + nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
            else:
                output = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            (loss / tokens[:, 1:].numel() / accumulate).backward()
            seen.append(loss.item())
        norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
        seen.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            model.eval()
            with torch.no_grad():
                run.note("evaluated", model(tokens[:, :-1]))
            model.train()
    run.note("losses and norms", seen)
    run.weights(model)


def blocks(run: Run, layered: bool = False, **given: Any) -> nn.Module:
    """Shard the llama of torchtitan explicitly: embedding, blocks, norm and head in one group, then the root."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = llama(layers=4).model.build()
    with torch.no_grad():
        model.init_weights()
    fully_shard(model.tok_embeddings, **given)
    for index, block in enumerate(model.layers.values()):
        again: bool | int = True if not layered else (True, False, 2, True)[index]
        if isinstance(again, int) and not isinstance(again, bool) and run.world == again:
            again = False
        fully_shard(block, reshard_after_forward=again, **given)
    fully_shard([model.norm, model.lm_head], reshard_after_forward=False, **given)
    return fully_shard(model, **given)


@rows("llama3, explicit loop: prefetch lists for forward and backward, two blocks ahead")
def prefetched(run: Run) -> None:
    model = blocks(run)
    layers = list(model.layers.values())
    model.tok_embeddings.set_modules_to_forward_prefetch(layers[:2])
    for index, layer in enumerate(layers):
        ahead = layers[index + 1 : index + 3]
        layer.set_modules_to_forward_prefetch(ahead or [model.lm_head])
        if behind := layers[max(0, index - 2) : index][::-1]:
            layer.set_modules_to_backward_prefetch(behind)
    model.lm_head.set_modules_to_backward_prefetch(layers[:1:-1])
    by_hand(run, model)


@rows("llama3, explicit loop: reshard_after_forward for each block: True, False, 2 of 4 ranks", world=4, **ORDER)
def resharded(run: Run) -> None:
    by_hand(run, blocks(run, layered=True))


@rows("llama3, explicit loop: the head is called for each chunk, one backward", **USES)
def chunked(run: Run) -> None:
    by_hand(run, blocks(run), chunks=3)


@rows("llama3, explicit loop: accumulation without sync (set_requires_gradient_sync)")
def unsynced(run: Run) -> None:
    by_hand(run, blocks(run), accumulate=3, synced=False)


@rows("llama3, explicit loop: accumulation without sync, bfloat16")
def unsynced_half(run: Run) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    by_hand(run, blocks(run, mp_policy=policy), accumulate=2, synced=False)


@rows("llama3, explicit loop: accumulation without sync, the head for each chunk", **USES)
def unsynced_chunked(run: Run) -> None:
    by_hand(run, blocks(run), accumulate=2, synced=False, chunks=2)


@rows("llama3, explicit loop: set_gradient_divide_factor and set_force_sum_reduction_for_comms")
def divided(run: Run) -> None:
    model = blocks(run)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(5.0)
    by_hand(run, model, accumulate=2)


@rows("llama3, explicit loop: replicas of shards, all-reduce only after the last batch", world=4)
def replicated(run: Run) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    by_hand(run, blocks(run, mesh=mesh), accumulate=2, synced=False)


class EveryOther(SelectiveAC):
    """Activation checkpointing of every second block, like the former layer-wise `selective` mode."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def apply(self, model: nn.Module) -> None:
        for name, block in list(model.layers.named_children()):
            if int(name) % 2 == 0:
                model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))


add("llama3: activation checkpoints of every other block", llama, activation_checkpoint=EveryOther.Config())
add(
    "llama3: every other block in a checkpoint, all compiled, aot_eager",
    llama,
    compile=compiled("aot_eager"),
    activation_checkpoint=EveryOther.Config(),
    timeout=400,
)
