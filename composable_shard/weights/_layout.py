"""Layouts: which part of which tensor each rank holds. Plain data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from .._plan.boxes import Box, overlaps, uncovered, whole_box
from .._plan.codec import read, written
from ..errors import ShardConfigValueError

VERSION = 1


@dataclass(frozen=True)
class TensorInfo:
    """A full tensor.

    Attributes:
        shape, dtype: its shape and its dtype.
        is_buffer: whether it is an unsharded buffer. Its values may differ between ranks (statistics of a batch norm),
            so one rank sends it to all receivers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool = False


class Piece(NamedTuple):
    """Where a part of a full tensor is in the tensor of a rank.

    Attributes:
        name: name of the full tensor.
        box: the part of it.
        at: offset of the part in the rank's tensor. The number of leading dims of size 1 may differ from that of
            `box`, for example for an expert in a stack of experts.
    """

    name: str
    box: Box
    at: tuple[int, ...]

    @property
    def local(self) -> Box:
        """The part as a box of the rank's tensor.

        Raises:
            ValueError: the shapes differ in more than leading dims of size 1.
        """
        return self.within(self.box)

    def within(self, box: Box) -> Box:
        """A box of the full tensor, inside of the part, as a box of the rank's tensor.

        Raises:
            ValueError: see `local`.
        """
        extra = len(self.at) - len(box.shape)
        if extra < 0 and any(size != 1 for size in self.box.shape[:-extra]):
            raise ValueError(f"a part of shape {self.box.shape} of {self.name} does not fit into {len(self.at)} dims")
        by = [begin - base for begin, base in zip(box.offsets, self.box.offsets, strict=True)]
        by, shape = ([0] * extra + by, (1,) * extra + box.shape) if extra >= 0 else (by[-extra:], box.shape[-extra:])
        return Box(self.at, shape).moved(by)


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of one rank.

    Attributes:
        shape, dtype: its shape and its dtype.
        pieces: the parts of full tensors in it. They cover it, without overlap.
        zeros: parts that are filled with zeros, such as the end of a padded vocabulary.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    zeros: tuple[Box, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return whole_box(self.shape).numel * self.dtype.itemsize

    def problems(self) -> Iterator[str]:
        """What is wrong with its pieces: parts outside of it, parts without a piece, and parts with several."""
        outside = [*self.outside()]
        if outside:
            yield from outside
            return
        boxes = [*(piece.local for piece in self.pieces), *self.zeros]
        for box in uncovered(whole_box(self.shape), boxes):
            yield f"no piece fills {shown(box)}"
        for box in overlaps(boxes):
            yield f"several pieces fill {shown(box)}"

    def outside(self) -> Iterator[str]:
        """Pieces that do not fit into it."""
        whole = whole_box(self.shape)
        try:
            for box in (*(piece.local for piece in self.pieces), *self.zeros):
                if len(box.shape) != len(self.shape) or not whole.contains(box):
                    yield f"{shown(box)} is outside of its shape {self.shape}"
        except ValueError as error:
            yield str(error)


def shown(box: Box) -> str:
    """A box as a slice: ``[0:2, 4:8]``."""
    return f"[{', '.join(f'{begin}:{end}' for begin, end in zip(box.offsets, box.ends, strict=True))}]"


@dataclass(frozen=True)
class WeightLayout:
    """Which part of which tensor each rank holds.

    Attributes:
        tensors: the full tensors, by name. Of tied ones, only the first. A receiver may leave them out.
        ties: further names of tensors, and the first name of each.
        ranks: by rank, its tensors by name. For a trainer, these are the names of the full tensors. The tensors of an
            inference engine may have other names, and consist of several parts. Ranks are those of the process group in
            which weights are sent.
        merges: name of the adapter that `send` merges into the weights; empty if there is none.
    """

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    ranks: dict[int, dict[str, LocalTensor]] = field(default_factory=dict)
    merges: str = ""

    def to_json(self) -> str:
        """Convert it to JSON."""
        return written(self, "layout", VERSION, indent=None)

    @classmethod
    def from_json(cls, text: str) -> WeightLayout:
        """The inverse of `to_json`.

        Raises:
            ShardConfigValueError: the text is not such JSON.
        """
        return read(cls, text, "layout", VERSION)

    @cached_property
    def digest(self) -> str:
        """A digest of the layout, equal for equal layouts."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def on(self, ranks: Sequence[int] | Mapping[int, int]) -> WeightLayout:
        """The same layout with other ranks: ``layout.on([4, 5])`` moves ranks 0 and 1 to 4 and 5.

        Raises:
            ShardConfigValueError: a rank of the layout has no new number, or two have the same.
        """
        numbers = ranks if isinstance(ranks, Mapping) else dict(enumerate(ranks))
        missing = sorted(set(self.ranks) - set(numbers))
        moved = {numbers[rank]: held for rank, held in self.ranks.items() if rank in numbers}
        if missing or len(moved) < len(self.ranks):
            raise ShardConfigValueError(
                f"ranks: {missing or 'two of them'} of the layout's ranks {sorted(self.ranks)} have "
                f"{'no new number' if missing else 'the same new number'}; got {ranks}"
            )
        return replace(self, ranks=dict(sorted(moved.items())))

    def only(self, rank: int) -> WeightLayout:
        """The part of the layout that is about one rank."""
        return replace(self, ranks={rank: self.ranks[rank]} if rank in self.ranks else {})

    @classmethod
    def merged(cls, layouts: Iterable[WeightLayout]) -> WeightLayout:
        """Combine what several ranks know.

        Raises:
            ShardConfigValueError: two layouts disagree about a tensor. The message lists all disagreements.
        """
        result, problems = cls(), list[str]()
        layouts = list(layouts)
        for layout in layouts:
            problems += result._add(layout)
        problems += [
            f"{name} is tied to {result.ties[name]} on one rank only" for name in result.ties if name in result.tensors
        ]
        merges = list(dict.fromkeys(layout.merges for layout in layouts))
        if len(merges) > 1:
            problems.append(f"ranks merge different adapters: {', '.join(map(repr, merges))}")
        if problems:
            raise ShardConfigValueError(f"the layouts do not match: {'; '.join(dict.fromkeys(problems))}")
        by_name, by_rank = dict(sorted(result.tensors.items())), dict(sorted(result.ranks.items()))
        return cls(by_name, dict(sorted(result.ties.items())), by_rank, "".join(merges))

    def _add(self, other: WeightLayout) -> Iterator[str]:
        """Add what another layout knows. Yields disagreements."""
        for name, info in other.tensors.items():
            if self.tensors.setdefault(name, info) != info:
                yield f"{name} is both {_text(self.tensors[name])} and {_text(info)}"
        for name, first in other.ties.items():
            if self.ties.setdefault(name, first) != first:
                yield f"{name} is tied both to {self.ties[name]} and to {first}"
        for rank, held in other.ranks.items():
            own = self.ranks.setdefault(rank, {})
            for name, local in held.items():
                if own.setdefault(name, local) != local:
                    yield f"{name} on rank {rank} is split in two ways"


def _text(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {info.shape}"
