"""Merge an adapter of peft into the base weights that are sent. The model's own weights are not changed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._comm.shardings import own_regions
from .._plan.boxes import Box, whole_box
from .._torch.distributed import local_part
from ..checkpoint._full.names import plain_name
from ..checkpoint._full.tensors import Holdings
from ..checkpoint._full.transfer import Part, gathered
from ..errors import ShardConfigUnsupportedError, ShardConfigValueError

_log = logging.getLogger("composable_shard.weights")

PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoRA:
    """The adapter of one weight: ``scaling * up @ down`` is added to it.

    Attributes:
        down, up: names in the model of its matrices A (rank, in) and B (out, rank).
        scaling: factor.
        transposed: whether the weight is stored as (in, out).
    """

    down: str
    up: str
    scaling: float
    transposed: bool


def merged_name(key: str, adapter: str) -> str | None:
    """The name of a tensor in the model without adapters; None for tensors that belong to adapters or are replaced.

    A module in peft's `modules_to_save` has its own copy for each adapter. That copy gets the name of the module.
    """
    parts = key.removeprefix(PREFIX).split(".")
    if any(part.startswith("lora_") or part == "original_module" for part in parts):
        return None
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        if parts[at + 1] != adapter:
            return None
        del parts[at : at + 2]
    return ".".join(part for part in parts if part != "base_layer")


def adapters_in(model: nn.Module, adapter: str) -> dict[str, LoRA]:
    """The adapters of a model's weights, by the name of the weight in the model.

    Raises:
        ShardConfigValueError: no weight has this adapter.
        ShardConfigUnsupportedError: a layer has an adapter of another kind than a product of two matrices.
    """
    adapters: dict[str, LoRA] = {}
    refused: list[str] = []
    for prefix, module in model.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        name = plain_name(prefix)
        if (kind := _other_kind(module, adapter)) is not None:
            refused.append(f"{name} ({kind})")
        elif adapter in module.lora_A:
            adapters[f"{name}.base_layer.weight"] = LoRA(
                f"{name}.lora_A.{adapter}.weight",
                f"{name}.lora_B.{adapter}.weight",
                float(module.scaling[adapter]),
                bool(getattr(module, "fan_in_fan_out", False)),
            )
    if refused:
        raise ShardConfigUnsupportedError(
            f"merge: cannot merge the adapter {adapter!r} of {', '.join(refused)}; merge it with peft, or send it "
            "alone with layout(model, adapter=...)"
        )
    if not adapters:
        raise ShardConfigValueError(f"merge: no weight of the model has an adapter called {adapter!r}")
    return adapters


def _other_kind(module: Any, adapter: str) -> str | None:
    """Name of the type of adapter, if it is not a plain LoRA of a linear layer."""
    is_linear = hasattr(module, "scaling") and isinstance(getattr(module.base_layer, "weight", None), torch.Tensor)
    if not hasattr(module, "lora_A") or not is_linear or hasattr(module, "parameter_name"):
        return type(module).__name__
    for kind in ("lora_embedding_A", "lora_magnitude_vector", "lora_variant"):
        if adapter in getattr(module, kind, ()):
            return kind
    if adapter in getattr(module, "merged_adapters", ()):
        return "is merged already"
    return _other_matrices(module.lora_A, module.lora_B, adapter)


def _other_matrices(down: Any, up: Any, adapter: str) -> str | None:
    """Name of the type of the matrices of an adapter, if they are not those of linear layers without bias."""
    if adapter in down and not isinstance(down[adapter], nn.Linear):
        return type(down[adapter]).__name__
    if adapter in up and getattr(up[adapter], "bias", None) is not None:
        return "lora_bias"
    return None


def check_not_tied(holdings: Holdings, adapters: Mapping[str, LoRA]) -> None:
    """Check that no weight with an adapter is also another weight, which the adapter must not change.

    Raises:
        ShardConfigUnsupportedError: one is.
    """
    firsts = Counter(each.first for each in holdings.tensors.values())
    tied = [name for name in adapters if firsts[holdings.tensors[name].first] > 1]
    if tied:
        raise ShardConfigUnsupportedError(
            f"merge: {', '.join(tied)} tied to other weights, which the adapter does not change; untie them"
        )


@torch.no_grad()
def merged(holdings: Holdings, adapters: Mapping[str, LoRA], local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's tensors with the adapter merged into copies of the base weights. A collective of the model's ranks.

    It gathers the matrices of the adapter, but not the base weights. It computes each product in full and in the dtype
    that `merge_adapter` of peft uses, so the results are the same bits.

    Args:
        holdings: tensors of the model.
        adapters: the adapters.
        local: this rank's tensors, by name.
    """
    parts = [
        Part.of(name, holdings.tensors[name].tensor) for each in adapters.values() for name in (each.down, each.up)
    ]
    nbytes = sum(part.tensor.numel() * part.tensor.dtype.itemsize for part in parts)
    _log.info("gathering %d matrices of an adapter (%d bytes) to merge them into the weights", len(parts), nbytes)
    whole = dict(gathered(parts, holdings.ranks, limit=holdings.limit, lead_only=False, device=None))
    result = {**local}
    for name, lora in adapters.items():
        change = _product(whole.pop(lora.down), whole.pop(lora.up), lora)
        result[name] = local[name].clone()
        tensor = holdings.tensors[name].tensor
        full = whole_box(change.shape)
        for box, at in own_regions(tensor):
            place = Box(at, box.shape).slices(whole_box(local_part(tensor).shape))
            result[name][place].add_(change[box.slices(full)].to(result[name].device))
    return result


def _product(down: torch.Tensor, up: torch.Tensor, lora: LoRA) -> torch.Tensor:
    """The change of the weight, as peft's `Linear.get_delta_weight` computes it: on a CPU, not in 16 bits."""
    dtype = up.dtype
    if up.is_cpu and dtype in (torch.float16, torch.bfloat16):
        down, up = down.float(), up.float()
    product = up @ down
    return ((product.t() if lora.transposed else product) * lora.scaling).to(dtype)
