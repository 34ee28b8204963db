"""Parts of tensors for engines that fetch weights themselves, without communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from .._plan.boxes import Box, uncovered, whole_box
from ..checkpoint._full.tensors import Holdings
from ..errors import LayoutMismatchError
from ._describe import Parts, Rename, chosen, described, local_tensors
from ._layout import LocalTensor, Piece, WeightLayout, shown
from ._plan import check_patterns, not_taken, problem_with


def local_slices(
    model: nn.Module,
    receivers: WeightLayout | None = None,
    *,
    rename: Rename | None = None,
    adapter: str | None = None,
    dtype: torch.dtype | None = None,
    unused: Sequence[str] = (),
) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Yield the parts of the model's tensors that this rank holds, without communication.

    Use it for engines that fetch weights themselves: from shared memory, by RDMA, or from Ray's object store.

    Args:
        model: the model.
        receivers: cut the parts at the borders of this layout, and omit parts that none of its ranks needs. A part that
            several ranks need comes once for each name and dtype that it has there. Default: the parts as this rank
            holds them, tied ones under their first name.
        rename: as in `layout`.
        adapter: as in `layout`.
        dtype: dtype of floating-point tensors. Default: that of the receivers; without these, that of the model.
        unused: as in `plan_transfer`.

    Returns:
        An iterator over the parts: name of the full tensor, the part of it, and its values. Values are views of the
        parameters, unless they are cast: copy them if they must not change with the next optimizer step.

    Raises:
        LayoutMismatchError: a tensor has another shape at the receivers, cannot be cast to their dtype, or none of them
            takes it. Tensors that are on other ranks only are not checked.
        ShardConfigTypeError: `unused` is a string.
    """
    check_patterns(unused)
    holdings = Holdings(model)
    source = described(holdings, chosen(holdings, rename, adapter))
    own = source.ranks.get(holdings.ranks.rank, {})
    needs = _needs(source, source if receivers is None else receivers, dtype, unused)
    return _slices(own, Parts(local_tensors(holdings, [*own]), own), needs)


Needs = dict[str, list[tuple[str, Box, torch.dtype]]]


def _needs(source: WeightLayout, target: WeightLayout, dtype: torch.dtype | None, unused: Sequence[str]) -> Needs:
    """What receivers need: their name of a tensor, the part, and the dtype, by the sender's name of the tensor.

    Raises:
        LayoutMismatchError: see `local_slices`.
    """
    needs: dict[str, dict[tuple[str, Box, torch.dtype], None]] = {}
    problems: list[str] = []
    for piece, own in _pieces(target):
        name = source.ties.get(piece.name, piece.name)
        info = source.tensors.get(name)
        if info is not None:
            kept = dtype if dtype is not None and info.dtype.is_floating_point else own
            if problem := problem_with(piece, info, target.tensors.get(piece.name), kept):
                problems.append(f"{piece.name}: {problem}")
            needs.setdefault(name, {})[piece.name, piece.box, kept] = None
    problems += not_taken(source, needs.keys(), unused)
    if problems:
        raise LayoutMismatchError(tuple(dict.fromkeys(problems)))
    return {name: [*each] for name, each in needs.items()}


def _pieces(layout: WeightLayout) -> Iterator[tuple[Piece, torch.dtype]]:
    for tensors in layout.ranks.values():
        for local in tensors.values():
            yield from ((piece, local.dtype) for piece in local.pieces)


def _slices(own: Mapping[str, LocalTensor], parts: Parts, needs: Needs) -> Iterator[tuple[str, Box, torch.Tensor]]:
    for local in own.values():
        for piece in local.pieces:
            for name, box, dtype in needs.get(piece.name, ()):
                common = piece.box.common(box)
                if common is not None:
                    yield name, common, next(parts.of(piece.name, common)).to(dtype)


@torch.no_grad()
def fill(
    tensors: Mapping[str, torch.Tensor],
    held: Mapping[str, LocalTensor],
    parts: Iterable[tuple[str, Box, torch.Tensor]],
) -> None:
    """Copy parts that `local_slices` has yielded on several ranks into a receiver's tensors.

    Args:
        tensors: the receiver's tensors by name.
        held: their parts, by the same names. Parts that belong to none of them are ignored.
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
