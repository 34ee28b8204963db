"""Plan which rank sends which part of which tensor to which rank."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

import torch

from .._plan.boxes import Box, whole_box
from .._plan.transfers import Holders, Loads
from ..errors import LayoutMismatchError, ShardConfigTypeError
from ._layout import LocalTensor, Piece, TensorInfo, WeightLayout, shown


class Transfer(NamedTuple):
    """A part of a tensor that one rank sends to another one, or copies if both are the same.

    Attributes:
        source, target: ranks.
        name: name of the full tensor.
        box: the part of it.
        dtype: dtype in which it is sent: that of the receiver.
    """

    source: int
    target: int
    name: str
    box: Box
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self.box.numel * self.dtype.itemsize


class Identity:
    """An object that is equal to itself only."""


@dataclass(frozen=True)
class Plan:
    """Which rank sends which part of which tensor to which rank. `str` gives the total bytes and links.

    Attributes:
        source, target: the two layouts.
        transfers: what is sent, in the order in which each pair of ranks sends it.
    """

    source: WeightLayout
    target: WeightLayout
    transfers: tuple[Transfer, ...]

    @cached_property
    def identity(self) -> Identity:
        """Distinguishes this plan from equal ones: two models of one architecture have plans of their own."""
        return Identity()

    @cached_property
    def digest(self) -> str:
        """A digest of the plan. Ranks compare it before they send."""
        moves = [(*each[:4], str(each.dtype)) for each in self.transfers]
        text = f"{self.source.digest}|{self.target.digest}|{json.dumps(moves)}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes from each source rank to each target rank, without copies within a rank."""
        links: defaultdict[tuple[int, int], int] = defaultdict(int)
        for each in self.transfers:
            if each.source != each.target:
                links[each.source, each.target] += each.nbytes
        return dict(sorted(links.items()))

    @property
    def total_bytes(self) -> int:
        """Bytes that are sent between ranks: each receiver gets the elements that it holds, once."""
        return sum(self.links.values())

    def sent_by(self, rank: int) -> Iterator[tuple[int, Transfer]]:
        """What a rank sends or copies, with the index in `transfers`."""
        return ((index, each) for index, each in enumerate(self.transfers) if each.source == rank)

    def with_new_parts(self, rank: int, held: Mapping[str, LocalTensor], unchanged: Set[int]) -> dict[str, LocalTensor]:
        """The tensors of a receiver that get a new part, if parts with these indices are not sent."""
        new = {each.name for index, each in enumerate(self.transfers) if each.target == rank and index not in unchanged}
        ties = self.source.ties
        return {
            name: local
            for name, local in held.items()
            if any(ties.get(piece.name, piece.name) in new for piece in local.pieces)
        }

    @property
    def ranks(self) -> list[int]:
        """All ranks that send or receive."""
        return sorted({*self.source.ranks, *self.target.ranks})

    def __str__(self) -> str:
        senders = len({source for source, _ in self.links})
        receivers = len({target for _, target in self.links})
        most = max(self.links.values(), default=0)
        return (
            f"{self.total_bytes:,} bytes from {senders} to {receivers} ranks over {len(self.links)} links, at most "
            f"{most:,} bytes over one"
        )


def plan_transfer(source: WeightLayout, target: WeightLayout, *, unused: Sequence[str] = ()) -> Plan:
    """Plan how the ranks of `target` get all their tensors from the ranks of `source`.

    Every part is sent once to each rank that needs it, in the dtype of the receiver. If several ranks hold it, the one
    that sends least is chosen; for buffers, the first one, because their values may differ. The plan depends on its
    arguments alone, so it is equal wherever it is made.

    Args:
        source: layout of the ranks that send, for example ``layout(model)``.
        target: layout of the ranks that receive.
        unused: patterns, as in `fnmatch`, of names in `source` that no receiver may need. Any other tensor that no
            receiver takes is an error, because it would keep its old value there.

    Raises:
        ShardConfigTypeError: `unused` is a string.
        LayoutMismatchError: the layouts do not match. Its `problems` lists everything that is wrong: names that only
            one of them has, other shapes, dtypes that cannot be cast, and parts that no rank holds or that receivers
            fill twice or not at all.
    """
    check_patterns(unused)
    problems: list[str] = []
    wanted = _wanted(source, target, problems)
    problems += not_taken(source, {name for name, _, _ in wanted}, unused)
    transfers = _transfers(source, wanted, problems)
    if problems:
        raise LayoutMismatchError(tuple(dict.fromkeys(problems)))
    order = {name: index for index, name in enumerate(source.tensors)}
    transfers.sort(key=lambda each: (order[each.name], each.box, each.target))
    return Plan(source, target, tuple(transfers))


def check_patterns(unused: object) -> None:
    """Check that patterns are not one string, whose characters would count as patterns.

    Raises:
        ShardConfigTypeError: they are.
    """
    if isinstance(unused, str):
        raise ShardConfigTypeError(f"unused: is the string {unused!r}; pass a list of patterns, [{unused!r}]")


def not_taken(source: WeightLayout, taken: Set[str], unused: Sequence[str]) -> Iterator[str]:
    """Name the tensors with elements that no receiver takes."""
    for name, info in source.tensors.items():
        if name not in taken and 0 not in info.shape and not any(fnmatchcase(name, pattern) for pattern in unused):
            yield f"{name}: no receiver takes it (to leave it out, pass unused=[{name!r}])"


def _transfers(source: WeightLayout, wanted: Wanted, problems: list[str]) -> list[Transfer]:
    """Choose the rank that sends each part. Appends to `problems`."""
    holders = _holders(source, problems)
    transfers: list[Transfer] = []
    loads = Loads()
    # Large parts first, because the small ones then even out the bytes of the senders.
    for name, box, dtype in sorted(wanted, key=lambda each: (-each[1].numel * each[2].itemsize, each[0], each[1])):
        for rank in wanted[name, box, dtype]:
            parts, rest = holders[name].parts(box, rank) if name in holders else ([], [box])
            for part, ranks in parts:
                ranks = ranks[:1] if source.tensors[name].is_buffer else ranks
                chosen = loads.choose(ranks, rank, part.numel * dtype.itemsize)
                transfers.append(Transfer(chosen, rank, name, part, dtype))
            problems += [f"{name}: no sender holds {shown(part)}, which rank {rank} needs" for part in rest]
    return transfers


Wanted = dict[tuple[str, Box, torch.dtype], list[int]]


def _wanted(source: WeightLayout, target: WeightLayout, problems: list[str]) -> Wanted:
    """The boxes that receivers need, and the ranks that need each of them. Appends to `problems`."""
    wanted: Wanted = {}
    for rank, tensors in target.ranks.items():
        for local_name, local in tensors.items():
            problems += [f"{local_name} on rank {rank}: {problem}" for problem in local.problems()]
            for piece in local.pieces:
                name = source.ties.get(piece.name, piece.name)
                problem = problem_with(piece, source.tensors.get(name), target.tensors.get(piece.name), local.dtype)
                if problem:
                    problems.append(f"{piece.name}: {problem}")
                    continue
                if piece.box.numel:
                    ranks = wanted.setdefault((name, piece.box, local.dtype), [])
                    if not ranks or ranks[-1] != rank:
                        ranks.append(rank)
    return wanted


def problem_with(piece: Piece, sent: TensorInfo | None, expected: TensorInfo | None, dtype: torch.dtype) -> str:
    """What is wrong with a piece that receivers need; empty if nothing is.

    Args:
        piece: the piece.
        sent, expected: its tensor as the layouts of the senders and of the receivers describe it, if they do.
        dtype: dtype of the receiver.
    """
    if sent is None:
        return "receivers need it, but the sender has no tensor of this name"
    if expected is not None and expected.shape != sent.shape:
        return f"has shape {sent.shape} at the sender and {expected.shape} at the receivers"
    if len(piece.box.shape) != len(sent.shape) or not whole_box(sent.shape).contains(piece.box):
        return f"receivers need {shown(piece.box)} of it, but it has shape {sent.shape}"
    if not can_be_cast(sent.dtype, dtype):
        return f"cannot be cast from {sent.dtype} to {dtype}"
    return ""


def can_be_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast keeps the meaning of values. Floats of 8 bits have scales, which a cast does not compute."""
    both = (source, target)
    return source == target or all(each.is_floating_point and each.itemsize > 1 for each in both)


def _holders(source: WeightLayout, problems: list[str]) -> dict[str, Holders]:
    """The ranks that hold each part of each tensor. Appends to `problems` what is wrong in a hand-made layout."""
    held: dict[str, dict[Box, list[int]]] = {}
    for rank, tensors in source.ranks.items():
        for local_name, local in tensors.items():
            problems += [f"{local_name} on rank {rank}: {problem}" for problem in local.outside()]
            for piece in local.pieces:
                held.setdefault(piece.name, {}).setdefault(piece.box, []).append(rank)
    return {name: Holders(_of_tensor(name, source.tensors.get(name), boxes, problems)) for name, boxes in held.items()}


def _of_tensor(
    name: str, info: TensorInfo | None, held: dict[Box, list[int]], problems: list[str]
) -> dict[Box, list[int]]:
    """Those boxes that are parts of their tensor. Appends the others to `problems`."""
    if info is None:
        problems.append(f"{name}: senders hold parts of it, but `tensors` of their layout does not have it")
        return {}
    whole = whole_box(info.shape)
    wrong = [box for box in held if len(box.shape) != len(info.shape) or not whole.contains(box)]
    problems += [f"{name}: rank {held[box][0]} holds {shown(box)}, but it has shape {info.shape}" for box in wrong]
    return {box: ranks for box, ranks in held.items() if box not in wrong}
