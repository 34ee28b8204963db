"""Rows for torchao: float8 and int8 training, NF4, quantization-aware training and low-bit optimizers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _llama import GATHERED, HALF, Llama, Recipe, build, compiled, evaluated, float8, inner, life, nothing, train
from torch import nn
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


for title, recipe in {
    "int8 mixed-precision training": Recipe(int8),
    "BitNet training": Recipe(bitnet, precompute_bitnet_scale_for_fsdp),
    "NF4 base, frozen, with adapters": Recipe(adapted),
}.items():
    rows.add(f"whole graph, {title}", partial(compiled, recipe=recipe, whole=True), timeout=300.0)


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
