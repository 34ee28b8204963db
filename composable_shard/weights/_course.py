"""The messages in which a rank sends and receives its parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .._comm.parts import aligned
from .._plan.boxes import batches
from ._plan import Plan, Transfer

ROUNDS_AT_ONCE = 2  # while one round is sent, the next one is packed

Part = tuple[int, Transfer]  # with the index of the transfer in the plan


@dataclass(frozen=True)
class Message:
    """Parts that one rank sends to another one together."""

    source: int
    target: int
    parts: list[Part]


@dataclass(frozen=True)
class Course:
    """The messages of one rank, in rounds.

    Round n has the message n of each pair of ranks. A rank begins a round when it has finished the one before the last.
    So ranks never wait for each other in a circle.

    Attributes:
        plan: the plan.
        rank: the rank.
        most: bytes that it sends, and bytes that it receives, at a time.
    """

    plan: Plan
    rank: int
    most: int

    @cached_property
    def bytes_of_message(self) -> int:
        """The most bytes of a message, so that no rank exceeds `most`; equal on all ranks."""
        ends = Counter(end for source, target in self.plan.links for end in ((source, True), (target, False)))
        return max(self.most // (ROUNDS_AT_ONCE * max(ends.values(), default=1)), 1)

    @cached_property
    def rounds(self) -> list[list[Message]]:
        """The messages of this rank in each round."""
        links: defaultdict[tuple[int, int], list[Part]] = defaultdict(list)
        for index, each in enumerate(self.plan.transfers):
            if each.source != each.target and self.rank in (each.source, each.target):
                links[each.source, each.target] += [(index, block) for block in self._blocks(each)]
        rounds: list[list[Message]] = []
        for (source, target), parts in sorted(links.items()):
            messages = batches(parts, lambda part: aligned(part[1].nbytes), self.bytes_of_message)
            for number, some in enumerate(messages):
                rounds += [[]] if number == len(rounds) else []
                rounds[number].append(Message(source, target, some))
        return rounds

    def _blocks(self, transfer: Transfer) -> list[Transfer]:
        """Split a part that is larger than a message."""
        limit = max(self.bytes_of_message // transfer.dtype.itemsize, 1)
        if transfer.box.numel <= limit:
            return [transfer]
        return [transfer._replace(box=box) for box in transfer.box.blocks(limit)]

    @property
    def copies(self) -> Iterator[Part]:
        """The parts that stay on this rank."""
        return (part for part in self.plan.sent_by(self.rank) if part[1].target == self.rank)
