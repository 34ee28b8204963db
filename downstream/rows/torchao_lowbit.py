"""Rows for torchao: float8 and int8 training, NF4, quantization-aware training and low-bit optimizers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.optim import Adam8bit, AdamFp8, AdamW4bit, AdamW8bit, AdamWFp8
from torchao.optim import _AdamW as AdamWStochastic
from torchao.prototype.quantized_training import (
    BitNetTrainingLinearWeight,
    Int8MixedPrecisionTrainingConfig,
    Int8MixedPrecisionTrainingLinearWeight,
    Int8QuantizedTrainingLinearWeight,
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
    precompute_bitnet_scale_for_fsdp,
)
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_, to_nf4
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

from _rows import Rows, Run

# Checkpoints with these classes are loaded with weights_only=True. torchao registers only its stable classes.
torch.serialization.add_safe_globals(
    [
        BitNetTrainingLinearWeight,
        Int8MixedPrecisionTrainingConfig,
        Int8MixedPrecisionTrainingLinearWeight,
        Int8QuantizedTrainingLinearWeight,
    ]
)

rows = Rows("torchao", environment="torchao", versions=("torchao", "torch"))

VOCABULARY, WIDTH, HEADS, LENGTH = 128, 64, 4, 10


class Attention(nn.Module):
    """Causal attention with grouped heads and rotary position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 100.0 ** -(torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.q, self.k, self.v))
        out = functional.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True
        )
        return self.o(out.transpose(1, 2).flatten(-2))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.turns.to(x.dtype)
        one, other = x.chunk(2, dim=-1)
        return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class Block(nn.Module):
    """Attention, then a gated feed-forward layer of width `wide`."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up = nn.Linear(WIDTH, wide, bias=False), nn.Linear(WIDTH, wide, bias=False)
        self.down = nn.Linear(wide, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, wide: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(wide) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def inner(module: nn.Module, name: str) -> bool:
    """Return whether to convert a layer: all linear layers except the head, as torchao recommends."""
    return isinstance(module, nn.Linear) and name != "head"


def build(
    convert: Callable[[nn.Module], object], wide: int = 128, seed: int = 0, dtype: Any = None, **given: Any
) -> nn.Module:
    torch.manual_seed(seed)
    model = Llama(wide).to(dtype)
    convert(model)
    for block in model.blocks:
        fully_shard(block, **given)
    fully_shard(model, **given)
    return model


def batch(run: Run, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + run.rank)
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, after: Callable[[nn.Module], object]
) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(1000 + step)  # for stochastic rounding
        tokens, labels = batch(run, step)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(model)
        losses.append(loss.item())
    return losses


def evaluated(run: Run, model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        output = model(batch(run, 50)[0])
    model.train()
    return output


def nothing(model: nn.Module) -> None:
    """Do nothing: no conversion, or no call after a step."""


ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def life(
    run: Run,
    convert: Callable[[nn.Module], object] = nothing,
    optimize: Callable[..., torch.optim.Optimizer] = ADAMW,
    after: Callable[[nn.Module], object] = nothing,
    saves: bool = True,
    gathers: bool = True,
    **given: Any,
) -> nn.Module:
    """Train, evaluate and train again; then save, load into another model, and train both.

    Args:
        convert: a function that converts the model before it is sharded.
        optimize: a function that returns an optimizer for parameters.
        after: a function that is called with the model after each step.
        saves: whether to save and load a checkpoint.
        gathers: whether to record full weights; otherwise each rank records its shards.
        given: arguments of `build`.
    """

    def note(one: nn.Module, name: str) -> None:
        if gathers:
            run.weights(one, name)
        else:
            run.note(name, {name: value.to_local() for name, value in one.named_parameters()})

    dist.init_process_group("gloo")
    model = build(convert, **given)
    run.sharded(model)
    optimizer = optimize([each for each in model.parameters() if each.requires_grad])
    run.note("losses", train(run, model, optimizer, range(3), after))
    run.note("evaluated", evaluated(run, model))
    run.note("loss after evaluation", train(run, model, optimizer, range(3, 4), after))
    note(model, "weights")
    if saves:
        states, kept = get_state_dict(model, optimizer)
        dcp.save({"model": states, "optimizer": kept}, checkpoint_id="saved")
        other = build(convert, seed=1, **given)
        again = optimize([each for each in other.parameters() if each.requires_grad])
        states, kept = get_state_dict(other, again)
        read = {"model": states, "optimizer": kept}
        dcp.load(read, checkpoint_id="saved")
        set_state_dict(other, again, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
        note(other, "loaded")
        run.note(
            "losses of both",
            [train(run, model, optimizer, range(4, 6), after), train(run, other, again, range(4, 6), after)],
        )
        note(other, "loaded and trained")
    return model


def add(title: str, timeout: float = 180.0, **given: Any) -> None:
    rows.add(title, partial(lived, given=given), timeout=timeout)


def lived(run: Run, given: dict[str, Any]) -> None:
    life(run, **given)


def eager(optimizer: type[torch.optim.Optimizer], **given: Any) -> Callable[..., torch.optim.Optimizer]:
    """Return a function that makes the optimizer without torch.compile, which would compile once per shape."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        torch.compiler.set_stance("force_eager")
        return optimizer(parameters, lr=torch.tensor(1e-2), **given)

    return make


def float8(model: nn.Module, **given: Any) -> None:
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True, **given), module_filter_fn=inner)


GATHERED = partial(float8, enable_fsdp_float8_all_gather=True)
HALF = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}

add("float8 training, weights gathered in full", convert=float8)
add("float8 training, weights gathered in float8", convert=GATHERED)
add(
    "float8 training, weights gathered in float8, scales computed after each step",
    convert=GATHERED,
    after=precompute_float8_dynamic_scale_for_fsdp,
)
# torchao cannot gather its subclasses with uneven shards, because they do not pad the tensors for FSDP2.
add("float8 training, uneven shards, weights gathered in full", convert=float8, wide=131)
add("float8 training, bfloat16 for the rest", convert=GATHERED, after=precompute_float8_dynamic_scale_for_fsdp, **HALF)
add(
    "float8 training, kept gathered until backward",
    convert=GATHERED,
    reshard_after_forward=False,
    after=precompute_float8_dynamic_scale_for_fsdp,
)


@rows("float8 training by the rowwise recipe")
def rowwise(run: Run) -> None:
    from dataclasses import replace

    recipe = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    life(run, lambda model: convert_to_float8_training(model, config=recipe, module_filter_fn=inner))


def int8(model: nn.Module, **given: Any) -> None:
    quantize_(model, int8_mixed_precision_training(Int8MixedPrecisionTrainingConfig(**given)), filter_fn=inner)


def int8_weights(model: nn.Module) -> None:
    quantize_(model, int8_weight_only_quantized_training(), filter_fn=inner)


def bitnet(model: nn.Module) -> None:
    quantize_(model, bitnet_training(), filter_fn=inner)


add("int8 mixed-precision training", convert=int8)
add("int8 mixed-precision training, float gradients of weights", convert=partial(int8, grad_weight=False))
add("int8 mixed-precision training, bfloat16", convert=int8, **HALF)
STOCHASTIC = eager(AdamWStochastic)

# With this version of torch, torchao can gather these weights only in FSDP2, so each rank records its shards.
OWN = {"convert": int8_weights, "gathers": False, "saves": False}  # distributed checkpoints fail too
add("int8 weights, rounded at random", optimize=STOCHASTIC, **OWN)
add("int8 weights, rounded at random, bfloat16", optimize=STOCHASTIC, dtype=torch.bfloat16, **OWN)
add("int8 weights, AdamW8bit", optimize=eager(AdamW8bit), **OWN)


@rows("int8 weights: each rank's own state dict, saved and loaded")
def int8_states(run: Run) -> None:
    model = life(run, int8_weights, STOCHASTIC, saves=False, gathers=False)
    torch.save(model.state_dict(), f"rank{run.rank}.pt")
    other = build(int8_weights, seed=1)
    other.load_state_dict(torch.load(f"rank{run.rank}.pt", weights_only=False))
    run.note("loaded", {name: value.to_local() for name, value in other.named_parameters()})
    optimizer = STOCHASTIC(list(other.parameters()))
    run.note("evaluated after loading", evaluated(run, other))
    run.note("losses after loading", train(run, other, optimizer, range(4, 6), nothing))


add("BitNet training", convert=bitnet)
add("BitNet training, scales computed after each step", convert=bitnet, after=precompute_bitnet_scale_for_fsdp)


class Adapted(nn.Module):
    """A frozen NF4 layer with a trained low-rank layer in parallel."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        base.weight = nn.Parameter(to_nf4(base.weight.detach(), 32, 2), requires_grad=False)
        self.base = base
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.base.weight) + self.b(self.a(x))


def adapted(model: nn.Module) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        for parent, names in ((block, ("gate", "up", "down")), (block.attention, ("q", "k", "v", "o"))):
            for name in names:
                setattr(parent, name, Adapted(getattr(parent, name)))


add("NF4 base, frozen, with adapters", convert=adapted, saves=False)
add("NF4 base, frozen, with adapters, kept gathered", convert=adapted, saves=False, reshard_after_forward=False)
add("NF4 base, frozen, with adapters and AdamW8bit", convert=adapted, saves=False, optimize=eager(AdamW8bit))


@rows("NF4 base, whose state dict is gathered and loaded into the unsharded model")
def nf4_state(run: Run) -> None:
    model = life(run, adapted, saves=False)
    torch.manual_seed(0)
    whole = Llama()
    adapted(whole)
    whole.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    run.agrees("outputs", evaluated(run, model), evaluated(run, whole))


GROUPED = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))


def prepared(model: nn.Module) -> None:
    given = QATConfig(
        activation_config=IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
        weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32),
        step="prepare",
    )
    quantize_(model, given, filter_fn=inner)


def prepared_of(model: nn.Module) -> None:
    quantize_(model, QATConfig(GROUPED, step="prepare"), filter_fn=inner)


add("quantization-aware training by fake quantization configs", convert=prepared)
add("quantization-aware training, bfloat16", convert=prepared, **HALF)


@rows("quantization-aware training, then converted from the gathered weights")
def converted(run: Run) -> None:
    model = life(run, prepared_of, saves=False)
    whole = Llama()
    prepared_of(whole)
    whole.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    quantize_(whole, QATConfig(GROUPED, step="convert"), filter_fn=inner)
    run.note("converted", evaluated(run, whole))


for each in (AdamW8bit, AdamW4bit, AdamWFp8, Adam8bit, AdamFp8):
    size = 64 if each is not AdamW4bit else 128
    add(f"{each.__name__}", optimize=eager(each, block_size=size))
    add(f"{each.__name__}, uneven shards", optimize=eager(each, block_size=64), wide=129)
add(
    "AdamW of bfloat16 weights, rounded at random",
    optimize=eager(AdamWStochastic, bf16_stochastic_round=True),
    dtype=torch.bfloat16,
)
add(
    "AdamW4bit and float8 weights",
    optimize=eager(AdamW4bit, block_size=64),
    convert=GATHERED,
    after=precompute_float8_dynamic_scale_for_fsdp,
)
