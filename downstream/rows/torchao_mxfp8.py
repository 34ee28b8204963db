"""Rows for torchao's prototype of MXFP8 training, emulated, and of its float8 training of linear layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from _llama import HALF, Llama, Recipe, batch, build, compiled, evaluated, inner, life
from torch import nn
from torchao.float8.config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8TypeConfig,
    ScalingGranularity,
    ScalingType,
)
from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor, MXFP8TrainingWeightWrapperTensor
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference

from _rows import Rows, Run

# Checkpoints with these classes are loaded with weights_only=True.
torch.serialization.add_safe_globals(
    [
        CastConfig,
        Float8GemmConfig,
        Float8LinearConfig,
        Float8TrainingOpConfig,
        Float8TrainingWeightWrapperTensor,
        Float8TypeConfig,
        KernelPreference,
        LinearMMConfig,
        MXFP8TrainingOpConfig,
        MXFP8TrainingWeightWrapperTensor,
        ScaleCalculationMode,
        ScaledMMConfig,
        ScalingGranularity,
        ScalingType,
    ]
)

rows = Rows("torchao: MXFP8 and NVFP4", environment="torchao", versions=("torchao", "torch"))
EXPERTS = 4


class Grouped(nn.Module):
    """Linear layers of experts, each for a part of the tokens."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, outside, inside) / inside**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1).to(torch.bfloat16)
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (len(tokens) // EXPERTS)
        weight = self.weight.to(torch.bfloat16).transpose(-2, -1)
        return torch._grouped_mm(tokens, weight, offs=ends).unflatten(0, x.shape[:-1]).to(x.dtype)


def emulated(**given: Any) -> MXFP8TrainingOpConfig:
    return MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED, **given)


def linear(model: nn.Module, config: Any) -> None:
    quantize_(model, config, filter_fn=inner)


def experts(model: nn.Module, config: Any) -> None:
    """Replace the feed-forward layers by those of experts, and convert these."""
    for block in model.blocks:
        for name in ("gate", "up", "down"):
            layer = getattr(block, name)
            setattr(block, name, Grouped(layer.in_features, layer.out_features))
    quantize_(model, config, filter_fn=lambda module, _: isinstance(module, Grouped))


# Blocks of 32 along the tokens: 160 tokens, or 160 for each expert.
FEW, MANY = partial(batch, count=16), partial(batch, count=64)
RECIPES: dict[str, tuple[Recipe, Any, dict[str, Any]]] = {
    "MXFP8 linear layers": (Recipe(partial(linear, config=emulated())), FEW, {}),
    "MXFP8 linear layers, bfloat16": (Recipe(partial(linear, config=emulated())), FEW, HALF),
    "MXFP8 linear layers, bfloat16, gradients of weights in bfloat16": (
        Recipe(partial(linear, config=emulated(wgrad_with_hp=True))),
        FEW,
        HALF,
    ),
    "MXFP8 experts, bfloat16": (Recipe(partial(experts, config=emulated())), MANY, HALF),
    "float8 linear layers, bfloat16": (Recipe(partial(linear, config=Float8TrainingOpConfig())), FEW, HALF),
}


def trained(run: Run, recipe: Recipe, given: dict[str, Any]) -> None:
    life(run, recipe.convert, **given)


for title, (recipe, batches, given) in RECIPES.items():
    rows.add(title, partial(trained, recipe=recipe, given={"batches": batches} | given))
    for text, whole in (("compiled blocks", False), ("whole graph", True)):
        program = partial(compiled, recipe=recipe, whole=whole, batches=batches, **given)
        rows.add(f"{text}, {title}", program, timeout=300.0)


def frozen(run: Run, config: Any) -> None:
    """Shard weights in a format for inference. Their classes cannot be split."""

    def convert(model: nn.Module) -> None:
        linear(model, config)
        model.requires_grad_(False)

    torch.distributed.init_process_group("gloo")
    model = build(convert, dtype=torch.bfloat16)
    run.sharded(model)
    torch.manual_seed(0)
    whole = Llama().to(torch.bfloat16)
    convert(whole)
    run.agrees("outputs", evaluated(run, model), evaluated(run, whole), 0.0)


MX = MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED)
rows.add("weights in MXFP8 for inference", partial(frozen, config=MX))
rows.add("weights in NVFP4 for inference", partial(frozen, config=NVFP4WeightOnlyConfig()))
