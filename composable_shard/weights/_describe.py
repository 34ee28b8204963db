"""Describe which parts of its tensors each rank of a model holds, and find them in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._comm.shardings import own_regions, sharding_of
from .._plan.boxes import Box, Region, local_shape, uncovered, whole_box
from .._torch.distributed import local_part
from ..checkpoint._format.boxes import plain
from ..checkpoint._full.names import adapter_name
from ..checkpoint._full.tensors import Held, Holdings
from ..errors import LayoutMismatchError, ShardConfigUnsupportedError, ShardConfigValueError
from ._adapters import adapters_in, check_not_tied, merged_name
from ._layout import LocalTensor, Piece, TensorInfo, WeightLayout, shown

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
        Its ranks are those of the default process group.

    Raises:
        ShardConfigUnsupportedError: a parameter is quantized, or has a Partial placement.
        ShardConfigValueError: two tensors get the same name, or several of these arguments are given.
    """
    holdings = Holdings(model)
    names = chosen(holdings, rename, adapter, merge)
    if merge is not None:
        check_not_tied(holdings, adapters_in(model, merge))
    everyone = holdings.ranks.everyone
    result = WeightLayout(ranks={rank: {} for rank in everyone}, merges=merge or "")
    spread = _Spread()
    firsts = first_names_of(holdings, names)
    for key, name in sorted(names.items(), key=lambda each: each[1]):
        held = holdings.tensors[key]
        if firsts[held.first] == key:
            check_supported(held)
            result.tensors[name] = TensorInfo(tuple(held.tensor.shape), held.tensor.dtype)
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


@torch.no_grad()
def fill(
    tensors: Mapping[str, torch.Tensor],
    held: Mapping[str, LocalTensor],
    parts: Iterable[tuple[str, Box, torch.Tensor]],
) -> None:
    """Copy parts that `local_slices` has yielded on several ranks into a receiver's tensors.

    Args:
        tensors: the receiver's tensors by name.
        held: how they consist of parts of full tensors. Parts that belong to none of them are ignored.
        parts: name, box and values of each part, in any order. Values are cast to the dtype of the tensor.

    Raises:
        LayoutMismatchError: a tensor was filled only in part. `problems` lists all gaps.
    """
    filled = {name: [*local.zeros] for name, local in held.items()}
    for name, boxes in filled.items():
        for box in boxes:
            tensors[name][box.slices(whole_box(held[name].shape))].zero_()
    for part_name, box, values in parts:
        for name, piece in _pieces_of(held, part_name):
            if (common := piece.box.common(box)) is not None:
                within = piece.within(common)
                place = tensors[name][within.slices(whole_box(held[name].shape))]
                place.view(common.shape).copy_(values[common.slices(box)])
                filled[name].append(within)
    if gaps := [*_gaps(held, filled)]:
        raise LayoutMismatchError(tuple(gaps))


def _gaps(held: Mapping[str, LocalTensor], filled: Mapping[str, Sequence[Box]]) -> Iterator[str]:
    for name, boxes in filled.items():
        for box in uncovered(whole_box(held[name].shape), boxes):
            yield f"{name}: no part fills {shown(box)}"


def _pieces_of(held: Mapping[str, LocalTensor], name: str) -> Iterator[tuple[str, Piece]]:
    """Yield the pieces of one full tensor, with the names of the tensors that they are in."""
    return ((key, piece) for key, local in held.items() for piece in local.pieces if piece.name == name)


def local_tensors(holdings: Holdings, keys: list[str]) -> dict[str, torch.Tensor]:
    """This rank's plain local tensors, by name in the model.

    Raises:
        ShardConfigValueError: a tensor has no values, or no memory of its own.
    """
    return {key: plain(key, local_part(holdings.tensors[key].tensor)) for key in keys}


def local_slices(
    model: nn.Module,
    receivers: WeightLayout | None = None,
    *,
    rename: Rename | None = None,
    adapter: str | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Yield the parts of the model's tensors that this rank holds, without communication.

    This is for engines that fetch weights themselves: from shared memory, by RDMA, or from Ray's object store.

    Args:
        model: the model.
        receivers: cut the parts at the borders of this layout, and omit parts that none of its ranks needs. A part that
            several ranks need is yielded once. Default: the parts as this rank holds them.
        rename: as in `layout`.
        adapter: as in `layout`.
        dtype: dtype of floating-point tensors. Default: that of the receivers; without these, that of the model.

    Yields:
        Name of the full tensor, the part of it, and its values. Values are views of the parameters, unless they are
        cast: copy them if they must not change with the next optimizer step.
    """
    holdings = Holdings(model)
    own = layout_of_rank(holdings, rename, adapter)
    parts = Parts(local_tensors(holdings, [*own]), own)
    wanted = _needed(receivers, _ties_of(holdings, chosen(holdings, rename, adapter)))
    for local in own.values():
        for piece in local.pieces:
            needs = [(piece.box, local.dtype)] if receivers is None else wanted.get(piece.name, [])
            for box, its_dtype in needs:
                common = piece.box.common(box)
                if common is not None:
                    part = next(parts.of(piece.name, common))
                    cast = part.is_floating_point()
                    yield piece.name, common, part.to(dtype or its_dtype) if cast else part


def _ties_of(holdings: Holdings, names: Mapping[str, str]) -> dict[str, str]:
    firsts = first_names_of(holdings, names)
    return {name: names[firsts[holdings.tensors[key].first]] for key, name in names.items()}


def _needed(receivers: WeightLayout | None, ties: Mapping[str, str]) -> dict[str, list[tuple[Box, torch.dtype]]]:
    needed: dict[str, dict[tuple[Box, torch.dtype], None]] = {}
    held = itertools.chain(*(each.values() for each in receivers.ranks.values())) if receivers is not None else ()
    for local in held:
        for piece in local.pieces:
            needed.setdefault(ties.get(piece.name, piece.name), {})[piece.box, local.dtype] = None
    return {name: list(each) for name, each in needed.items()}


def layout_of_rank(holdings: Holdings, rename: Rename | None, adapter: str | None) -> dict[str, LocalTensor]:
    """How this rank's tensors consist of parts of full tensors; tied ones only once."""
    held = {}
    names = chosen(holdings, rename, adapter)
    firsts = first_names_of(holdings, names)
    for key, name in names.items():
        each = holdings.tensors[key]
        if firsts[each.first] == key:
            check_supported(each)
            regions = own_regions(each.tensor)
            pieces = tuple(Piece(name, box, at) for box, at in regions if box.numel)
            held[key] = LocalTensor(tuple(each.local.shape), each.tensor.dtype, pieces)
    return held
