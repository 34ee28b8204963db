"""Compute the layout of this rank's file. The last layout is reused as long as the tensors' metadata is unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._plan.boxes import Box
from .._torch.distributed import local_part, local_tensor
from ._collect import Collected
from ._format.boxes import Part, parts_of, plain, writes
from ._format.writing import FileLayout, Laid, lay_out
from ._ranks import Ranks


@dataclass(frozen=True)
class _Kept:
    """A layout without tensors, and the inputs that it depends on."""

    kinds: list[Any]
    holders: dict[str, list[int]]
    name: str
    header: bytes
    places: list[tuple[str, Box, int, int]]
    size: int


_last: dict[tuple[int, int], _Kept] = {}  # by rank and number of ranks


def layout_of(ranks: Ranks, collected: Collected, holders: dict[str, list[int]]) -> FileLayout:
    """Lay out the tensors that this rank writes in its file.

    Args:
        ranks: ranks that save.
        collected: the state.
        holders: ranks that have each key of `collected.tensors`.
    """
    kinds = [_kind(key, tensor) for tensors in (collected.tensors, collected.own) for key, tensor in tensors.items()]
    kept = _last.get((ranks.rank, ranks.size))
    if kept is not None and kept.kinds == kinds and kept.holders == holders:
        return FileLayout(kept.name, kept.header, tuple(_filled(kept, collected)), kept.size)
    layout, again = _new_layout(ranks, collected, holders)
    if again:
        places = [(laid.key, laid.part.box, laid.begin, laid.end) for laid in layout.parts]
        kept = _Kept(kinds, holders, layout.name, layout.header, places, layout.size)
        _last[ranks.rank, ranks.size] = kept
    return layout


def _kind(key: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that a layout depends on."""
    if not isinstance(tensor, DTensor):
        return key, tensor.dtype, tensor.shape, tensor.layout, tensor.device
    local = local_tensor(tensor)
    kind = key, tensor.dtype, tensor.shape, local.layout, local.device
    return *kind, tensor.device_mesh, tensor.placements, local.shape


def _filled(kept: _Kept, collected: Collected) -> Iterator[Laid]:
    for key, box, begin, end in kept.places:
        tensor = collected.tensors[key] if key in collected.tensors else collected.own[key]
        local = local_part(tensor)
        yield Laid(key, Part(box, plain(key, local)), begin, end)


def _new_layout(ranks: Ranks, collected: Collected, holders: dict[str, list[int]]) -> tuple[FileLayout, bool]:
    """A new layout, and whether it can be reused: no tensor has several parts on this rank."""
    laid: list[tuple[str, Part]] = []
    again = True
    turns = {key: turn for turn, key in enumerate(sorted(holders))}  # the same on all ranks, whatever they hold
    for key in sorted(collected.tensors):
        tensor, turn = collected.tensors[key], turns[key]
        parts = parts_of(key, tensor)
        again = again and len(parts) < 2
        if writes(tensor, turn, ranks.rank, holders[key]):
            laid += [(key, part) for part in parts]
    for key, tensor in collected.own.items():
        laid += [(key, part) for part in parts_of(key, tensor)]
    return lay_out(f"rank-{ranks.rank:05d}.safetensors", laid), again
