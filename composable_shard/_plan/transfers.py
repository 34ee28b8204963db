"""Choose which rank sends which part of a tensor to the ranks that need it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .boxes import Box, most_cut, overlaps, uncovered


def sender(holders: Sequence[int], turn: int) -> int:
    """The rank among several with the same values that sends or writes them. Turns are shared out evenly."""
    return holders[turn % len(holders)]


class Holders:
    """The boxes of one tensor that ranks hold.

    Args:
        held: boxes and the ranks that hold them. Empty boxes are ignored.
    """

    def __init__(self, held: Mapping[Box, Sequence[int]]) -> None:
        boxes = [box for box in held if box.numel]
        # Boxes are sorted along the dim that cuts them most often, so that few are compared with a wanted one.
        dim = self._dim = most_cut(boxes)
        if dim is not None:
            boxes.sort(key=lambda box: (box.offsets[dim], box))
        self._boxes = [(box, tuple(sorted(held[box]))) for box in boxes]
        self._begins = [] if dim is None else [box.offsets[dim] for box in boxes]
        self._longest = 0 if dim is None else max(box.shape[dim] for box in boxes)
        self._are_disjoint = next(overlaps(boxes), None) is None

    def near(self, box: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Yield the common parts of a box and held ones, with the ranks that hold them."""
        first, last = 0, len(self._boxes)
        if self._dim is not None:
            first = bisect_left(self._begins, box.offsets[self._dim] - self._longest + 1)
            last = bisect_left(self._begins, box.ends[self._dim])
        for held, ranks in self._boxes[first:last]:
            if (common := held.common(box)) is not None:
                yield common, ranks

    def parts(self, box: Box, rank: int) -> tuple[list[tuple[Box, tuple[int, ...]]], list[Box]]:
        """Split a box into parts that one rank each can send, and the rest that no rank holds.

        Args:
            box: a box that `rank` needs.
            rank: parts that it holds itself are taken from it.
        """
        near = list(self.near(box))
        if self._are_disjoint:
            missing = box.numel - sum(part.numel for part, _ in near)
            return near, uncovered(box, [part for part, _ in near]) if missing else []
        parts: list[tuple[Box, tuple[int, ...]]] = []
        rest = [box]
        for held, ranks in sorted(near, key=lambda each: rank not in each[1]):
            parts += [(common, ranks) for each in rest if (common := each.common(held)) is not None]
            rest = [part for each in rest for part in uncovered(each, [held])]
        return parts, rest


class Loads:
    """Balances bytes over the ranks that can send them."""

    def __init__(self) -> None:
        self._sent: defaultdict[int, int] = defaultdict(int)

    def choose(self, holders: Iterable[int], target: int, nbytes: int) -> int:
        """The rank that sends: the target itself if it is a holder, else the one that sends least so far."""
        holders = tuple(holders)
        if target in holders:
            return target
        chosen = min(holders, key=lambda rank: (self._sent[rank], rank))
        self._sent[chosen] += nbytes
        return chosen
