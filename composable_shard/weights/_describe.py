"""Describe which parts of its tensors each rank of a model holds, and find them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._comm.shardings import sharding_of
from .._plan.boxes import Box, Region, local_shape, whole_box
from .._torch.distributed import local_part
from ..checkpoint._format.boxes import plain
from ..checkpoint._full.names import adapter_name
from ..checkpoint._full.tensors import Held, Holdings
from ..errors import ShardConfigUnsupportedError, ShardConfigValueError
from ._adapters import adapters_in, check_not_tied, merged_name
from ._layout import LocalTensor, Piece, TensorInfo, WeightLayout

Rename = Callable[[str], str | None]


def layout(
    model: nn.Module, *, rename: Rename | None = None, adapter: str | None = None, merge: str | None = None
) -> WeightLayout:
    """Describe which part of each tensor of a model's state dict each rank holds.

    It communicates nothing and reads no values, so it also works on the meta device. It knows the ranks of each
    parameter's mesh. Ranks of other meshes, such as the stages of a pipeline, describe their own tensors:
    `plan_together` combines the layouts of all ranks. Calls ``model.state_dict()``, which reshards the parameters.

    Args:
        model: the model, sharded by `fully_shard`, by torch's FSDP2 or tensor parallelism, or not at all.
        rename: function from a name of the model to the name for receivers; None leaves the tensor out.
        adapter: name of an adapter of peft, for example "default": describe only its tensors, under peft's names.
        merge: name of an adapter of peft that `send` merges into the weights. The names are those of the model without
            adapters. `send` then gathers the matrices of the adapter, and needs memory for the merged shards.

    Returns:
        The layout. Its ranks are those of the default process group.

    Raises:
        ShardConfigUnsupportedError: a parameter is quantized, or has a Partial placement.
        ShardConfigValueError: two tensors get the same name, the model has no such adapter, or several of `rename`,
            `adapter` and `merge` are given.
    """
    holdings = Holdings(model)
    if merge is not None:
        check_not_tied(holdings, adapters_in(model, merge))
    return replace(described(holdings, chosen(holdings, rename, adapter, merge)), merges=merge or "")


def described(holdings: Holdings, names: Mapping[str, str]) -> WeightLayout:
    """The layout of a model's tensors.

    Args:
        holdings: all tensors of the model.
        names: names of those to describe, by their names in the model.

    Raises:
        ShardConfigUnsupportedError: see `layout`.
    """
    everyone = holdings.ranks.everyone
    result = WeightLayout(ranks={rank: {} for rank in everyone})
    spread = _Spread()
    firsts = first_names_of(holdings, names)
    for key, name in sorted(names.items(), key=lambda each: each[1]):
        held = holdings.tensors[key]
        if firsts[held.first] == key:
            check_supported(held)
            is_buffer = not (held.is_param or isinstance(held.tensor, DTensor))
            result.tensors[name] = TensorInfo(tuple(held.tensor.shape), held.tensor.dtype, is_buffer)
            for rank, regions in spread.of(held, everyone):
                result.ranks.setdefault(rank, {})[key] = _local(name, held.tensor.dtype, regions)
        else:
            result.ties[name] = names[firsts[held.first]]
    return replace(result, ranks=dict(sorted(result.ranks.items())))


def first_names_of(holdings: Holdings, names: Mapping[str, str]) -> dict[str, str]:
    """The first of the tied names that are sent, by their first name in the model."""
    firsts: dict[str, str] = {}
    for key in names:
        firsts.setdefault(holdings.tensors[key].first, key)
    return firsts


def _local(name: str, dtype: torch.dtype, regions: tuple[Region, ...]) -> LocalTensor:
    pieces = tuple(Piece(name, box, at) for box, at in regions if box.numel)
    return LocalTensor(local_shape(regions), dtype, pieces)


class _Spread:
    """Regions by rank. Many parameters have the same sharding and shape; their regions are computed once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[int, tuple[Region, ...]]]] = {}

    def of(self, held: Held, everyone: list[int]) -> list[tuple[int, tuple[Region, ...]]]:
        tensor = held.tensor
        if not isinstance(tensor, DTensor):
            return [(rank, (Region(whole_box(tensor.shape), (0,) * tensor.ndim),)) for rank in everyone]
        sharding = sharding_of(tensor.device_mesh, tensor.placements, tensor.ndim)
        key = sharding, tensor.shape
        if key not in self._known:
            self._known[key] = list(zip(sharding.ranks, sharding.regions(tensor.shape), strict=True))
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is not None:
            own = sharding.regions_at(tensor.shape, coordinate)
            if local_shape(own) != tuple(held.local.shape):
                raise ShardConfigUnsupportedError(
                    f"{held.name}: has a local shape of {tuple(held.local.shape)}, but its placements "
                    f"{tensor.placements} mean {local_shape(own)} on this rank; shard it with fully_shard or "
                    "parallelize_module"
                )
        return self._known[key]


def check_supported(held: Held) -> None:
    """Check that a tensor's parts can be described as boxes.

    Raises:
        ShardConfigUnsupportedError: they cannot.
    """
    if held.carried is not None:
        raise ShardConfigUnsupportedError(
            f"{held.name}: is quantized (its {held.carried} would be lost); leave it out with rename, or dequantize it"
        )
    if isinstance(held.tensor, DTensor) and any(placed.is_partial() for placed in held.tensor.placements):
        raise ShardConfigUnsupportedError(
            f"{held.name}: has a Partial placement, so its sum over ranks is pending; call redistribute() first"
        )


def chosen(
    holdings: Holdings, rename: Rename | None = None, adapter: str | None = None, merge: str | None = None
) -> dict[str, str]:
    """The names of the tensors to send, by their names in the model; tied ones, too.

    Raises:
        ShardConfigValueError: several arguments are given, or two tensors get the same name.
    """
    if sum(each is not None for each in (rename, adapter, merge)) > 1:
        raise ShardConfigValueError("rename: cannot be combined with `adapter` or `merge`, which use peft's names")
    named = rename or str
    if adapter is not None:
        named = partial(adapter_name, adapter=adapter)
    elif merge is not None:
        named = partial(merged_name, adapter=merge)
    names = {key: name for key in holdings.tensors if (name := named(key)) is not None}
    _check_unique(names)
    if not names and adapter is not None:
        raise ShardConfigValueError(f"adapter: the model has no tensor of an adapter called {adapter!r}")
    return names


def _check_unique(names: Mapping[str, str]) -> None:
    """Check that no two tensors have the same name.

    Raises:
        ShardConfigValueError: two have.
    """
    by_name: dict[str, str] = {}
    for key, name in names.items():
        if by_name.setdefault(name, key) != key:
            raise ShardConfigValueError(f"rename: {key} and {by_name[name]} both get the name {name}")


class Parts:
    """This rank's memory for the parts of full tensors.

    Args:
        tensors: this rank's tensors, by their names in `held`.
        held: how they consist of parts.
        ties: first names of tied tensors, by their further names.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        held: Mapping[str, LocalTensor],
        ties: Mapping[str, str] | None = None,
    ) -> None:
        self._places: dict[str, list[tuple[Piece, torch.Tensor]]] = {}
        for key, local in held.items():
            for piece in local.pieces:
                name = (ties or {}).get(piece.name, piece.name)
                self._places.setdefault(name, []).append((piece, tensors[key]))

    def of(self, name: str, box: Box) -> Iterator[torch.Tensor]:
        """Yield each view of this rank's memory that is the given part of a full tensor, in the shape of `box`."""
        for piece, tensor in self._places.get(name, ()):
            if piece.box.contains(box):
                yield tensor[piece.within(box).slices(whole_box(tensor.shape))].view(box.shape)


def local_tensors(holdings: Holdings, keys: list[str]) -> dict[str, torch.Tensor]:
    """This rank's plain local tensors, by name in the model.

    Raises:
        ShardConfigValueError: a tensor has no values, or no memory of its own.
    """
    return {key: plain(key, local_part(holdings.tensors[key].tensor)).detach() for key in keys}
