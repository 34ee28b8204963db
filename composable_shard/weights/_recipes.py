"""How the tensors of an engine consist of chunks of full tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch

from .._plan.boxes import Box
from ._decoder_names import starred
from ._layout import LocalTensor, Piece


@dataclass(frozen=True)
class Part:
    """A box of a full tensor of which each rank holds a chunk.

    Attributes:
        name: name of the full tensor.
        box: the box.
        dim: the dim to split, counted from the last: -1 or less. None if it is not split.
        degree: number of ranks.
        copies: consecutive ranks that hold the same chunk.
        padded: size of the dim with padding; None without.
    """

    name: str
    box: Box
    dim: int | None = None
    degree: int = 1
    copies: int = 1
    padded: int | None = None

    @property
    def problem(self) -> str:
        """Why it cannot be split; empty if it can."""
        if self.dim is None or self._extent * self.copies % self.degree == 0:
            return ""
        padded = "" if self.padded is None else f" (padded to {self.padded})"
        size = self.box.shape[self.dim]
        return f"{starred(self.name)}: {size}{padded} cannot be divided by {self.degree}"

    @property
    def _extent(self) -> int:
        assert self.dim is not None
        return self.box.shape[self.dim] if self.padded is None else self.padded

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of a chunk, with its padding."""
        if self.dim is None:
            return self.box.shape
        return _with_size(self.box.shape, self.dim, self._extent * self.copies // self.degree)

    def on(self, rank: int) -> Box:
        """The chunk of a rank, without padding."""
        if self.dim is None:
            return self.box
        dim = self.dim % len(self.box.shape)
        size, most = self.shape[dim], self.box.shape[dim]
        begin = min(rank // self.copies * size, most)
        return self.box.part(dim, begin, min(size, most - begin))


def _with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    sizes = list(shape)
    if sizes:  # a scalar has no dim
        sizes[dim] = size
    return tuple(sizes)


@dataclass(frozen=True)
class Recipe:
    """How a tensor of an engine consists of parts.

    Attributes:
        local: name of the tensor.
        dtype: its dtype.
        groups: parts that are placed after each other. Of a stack of experts, those of each expert; else one group.
        dim: the dim along which they are placed, counted from the last.
        is_stack: whether it is a stack of experts.
        owners: number of ranks over which the experts of a stack are distributed.
    """

    local: str
    dtype: torch.dtype
    groups: tuple[tuple[Part, ...], ...]
    dim: int = -1
    is_stack: bool = False
    owners: int = 1

    def problems(self) -> Iterator[str]:
        """Why the parts cannot be placed."""
        shapes = {_with_size(part.box.shape, self.dim, 0)[-2:] for part in self.parts}
        rows = {tuple(part.box.shape[self.dim :][:1] for part in parts) for parts in self.groups}
        if len(shapes) > 1 or len(rows) > 1:
            yield f"{starred(self.local)}: the tensors in it have different shapes"
        if self.is_stack and len(self.groups) < self.owners:
            yield f"{starred(self.local)}: {len(self.groups)} experts cannot be distributed over {self.owners} ranks"
        yield from (part.problem for part in self.parts if part.problem)

    @property
    def parts(self) -> list[Part]:
        """All parts."""
        return [part for parts in self.groups for part in parts]

    @property
    def names(self) -> list[str]:
        """Names of the full tensors in it."""
        return [part.name for part in self.parts]

    def on(self, rank: int) -> LocalTensor:
        """The tensor of a rank."""
        pieces, zeros = list[Piece](), list[Box]()
        groups = self._owned(rank)
        for index, parts in enumerate(_merged(groups)):
            for part, at in zip(parts, self._offsets(index), strict=True):
                box = part.on(rank)
                pieces += [Piece(part.name, box, at)] if box.numel else []
                zeros += _padding(part, box, at)
        return LocalTensor(self._shape(len(groups)), self.dtype, tuple(pieces), tuple(zeros))

    @cached_property
    def _begins(self) -> list[int]:
        """Where each part of a group begins along `dim`, and where the last one ends."""
        sizes = (part.shape[self.dim] if part.shape else 1 for part in self.groups[0])
        return [*accumulate(sizes, initial=0)]

    def _shape(self, experts: int) -> tuple[int, ...]:
        shape = _with_size(self.groups[0][0].shape, self.dim, self._begins[-1])
        return (experts, *shape[-2:]) if self.is_stack else shape

    def _offsets(self, index: int) -> Iterator[tuple[int, ...]]:
        """Offsets of the parts of one group."""
        first = (index, 0, 0) if self.is_stack else (0,) * len(self.groups[0][0].shape)
        for begin in self._begins[:-1]:
            yield _with_size(first, self.dim, begin)

    def _owned(self, rank: int) -> tuple[tuple[Part, ...], ...]:
        """The experts of a rank, as in vLLM's `determine_expert_map` with linear placement."""
        if not self.is_stack:
            return self.groups
        each, more = divmod(len(self.groups), self.owners)
        owner = rank if self.owners > 1 else 0
        begin = owner * each + min(owner, more)
        return self.groups[begin : begin + each + (owner < more)]


def _merged(groups: tuple[tuple[Part, ...], ...]) -> tuple[tuple[Part, ...], ...]:
    """Consecutive experts of a stack as one group, if the full tensor is a stack, too."""
    if len(groups) < 2 or len(groups[0][0].box.shape) < 3:
        return groups
    count = len(groups)
    return (tuple(replace(each, box=Box(each.box.offsets, (count, *each.box.shape[1:]))) for each in groups[0]),)


def _padding(part: Part, box: Box, at: tuple[int, ...]) -> Iterator[Box]:
    """The rows of a chunk after those that have values."""
    rows = part.shape[0] - box.shape[0] if part.padded is not None else 0
    if rows:
        yield Box(at, part.shape).part(0, box.shape[0], rows)
