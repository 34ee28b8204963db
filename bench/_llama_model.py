"""Llama 3 decoders of the benchmarks: sizes, construction on the meta device, selective checkpointing, float8."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# At the end of the path, because modules of tests/ have the names of modules of bench/.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import _device
from _blocks import Transformer, TransformerBlock, rotary

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ROTARY_BASE = 500_000.0  # of Llama 3
DEVIATION = 0.02  # of the initial weights

TORCHAO = "torchao"
CAPABILITY = (8, 9)  # the first NVIDIA GPUs that multiply float8


@dataclass(frozen=True)
class Size:
    """Dimensions of a decoder."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int


SIZES = {
    "8b": Size(128256, 4096, 32, 32, 8, 14336),
    "8b-4-layers": Size(128256, 4096, 4, 32, 8, 14336),
    "tiny": Size(512, 64, 2, 4, 2, 128),
}


def make_decoder(size: Size, length: int) -> Transformer:
    """Build a decoder for sequences of at most `length` tokens on the default device."""
    return Transformer(size.vocabulary, size.width, size.layers, size.heads, size.kv_heads, size.hidden, length)


@torch.no_grad()
def initialize(model: Any, size: Size, rank: int) -> None:
    """Initialize the shards of a decoder after `to_empty`, without building a full parameter.

    Each shard has its own seed, which depends on the parameter and the rank. So implementations that shard in the same
    way start from the same weights.
    """
    for number, (name, parameter) in enumerate(model.named_parameters()):
        shard = parameter.to_local()
        if "norm" in name:
            shard.fill_(1.0)
        else:
            generator = torch.Generator(shard.device).manual_seed(1009 * number + rank)
            shard.normal_(std=DEVIATION, generator=generator)
    tables = rotary(model.cos.shape[0], size.width // size.heads, ROTARY_BASE)
    for buffer, table in zip((model.cos, model.sin), tables, strict=True):
        buffer.copy_(table)


# ------------------------------------------------------------------ activation checkpointing

_aten = torch.ops.aten
SAVED = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten.max.default,  # the largest value of a tensor, from which its scale in float8 is computed
    }
)


def make_selective_contexts() -> Any:
    """Return the contexts of forward and recomputation of a block, with the `selective` policy of torchtitan.

    Results of attention, and of every second matrix product, are saved. All others are recomputed.
    """
    products = {False: 0, True: 0}  # by whether the block is recomputed

    def choose(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        save = operator in SAVED
        if operator is _aten.mm.default:
            products[context.is_recompute] += 1
            save = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


class _CheckpointedBlock(TransformerBlock):
    """A block with selective activation checkpointing. It draws no random numbers."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return checkpoint(  # type: ignore[no-any-return]
            super().forward,
            x,
            cos,
            sin,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=make_selective_contexts,
        )


def checkpoint_blocks(model: nn.Module) -> None:
    """Use selective activation checkpointing for every block. Call this before compiling and sharding."""
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            module.__class__ = _CheckpointedBlock


# ------------------------------------------------------------------ float8


def convert_to_float8(model: nn.Module, emulate: bool) -> None:
    """Convert the linear layers of a model to torchao's float8, with weights that are gathered in float8.

    The head stays as it is, as torchao recommends.
    """
    from torchao.float8 import (  # type: ignore[import-not-found, unused-ignore]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _layer, name: name != "head")


def compute_scales(model: nn.Module) -> None:
    """Compute the scales of the next gathers in float8. Call this after the optimizer step."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def find_float8_obstacle(device: str) -> str | None:
    """Return why the first GPU cannot multiply float8; None if it can, and on a CPU, where products are emulated."""
    if device == _device.CUDA and torch.cuda.get_device_capability() < CAPABILITY:
        return f"{torch.cuda.get_device_name()} cannot multiply float8, which needs compute capability 8.9"
    return None
