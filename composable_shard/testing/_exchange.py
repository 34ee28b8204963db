"""Collectives and messages between the ranks of a simulated world, which are threads.

A collective is computed when the last rank of its group has called it. The inputs are copied at the call. Until a rank
has waited, its outputs contain NaN, so a missing wait is noticed.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from .._torch.core import without_dispatch_modes
from ..errors import CollectiveMismatchError, ShardConfigValueError
from ._collectives import Call, Issued, Tensors, Values, Work, fill, values_of
from ._process_group import GroupKey
from ._turns import Turns

BACKEND = "simulated"
_OPS: list[tuple[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = [
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
]


def _reduced(parts: Tensors, op: Any) -> torch.Tensor:
    """Reduce in the order of the ranks."""
    for known, function in _OPS:
        if op == known:
            total = reduce(function, parts[1:], parts[0])
            return total / len(parts) if known == dist.ReduceOp.AVG else total
    raise ShardConfigValueError(
        f"reduction {op}: a simulated world supports SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR"
    )


@dataclass
class _Meeting:
    """One collective of a group: the calls so far, and the results when all ranks have called it."""

    calls: dict[int, Call] = field(default_factory=dict)  # by rank in the group
    values: Values | None = None


class Exchange:
    """Implements the collectives of all groups of a simulated world (see `Medium`).

    Args:
        size: world size.
        turns: the scheduler of the ranks.

    Attributes:
        listeners: for each rank, functions that are called with each collective that it launches.
    """

    backend = BACKEND

    def __init__(self, size: int, turns: Turns) -> None:
        self.turns = turns
        self.listeners: list[list[Callable[[Issued], None]]] = [[] for _ in range(size)]
        self._meetings: dict[tuple[GroupKey, int], _Meeting] = {}
        self._counts: dict[tuple[GroupKey, int], int] = defaultdict(int)
        self._messages: dict[tuple[GroupKey, int, int, int], deque[tuple[torch.Tensor, Issued]]] = defaultdict(deque)

    def launch(self, key: GroupKey, group_rank: int, call: Call) -> Work:
        """Launch a collective as rank `group_rank` of a group."""
        _, members = key
        rank = members[group_rank]
        call.take_inputs()
        self._tell(rank, call.issued)
        number = self._counts[key, group_rank]
        self._counts[key, group_rank] += 1
        meeting = self._meetings.setdefault((key, number), _Meeting())
        for other, earlier in meeting.calls.items():
            if earlier.must_agree != call.must_agree:
                raise CollectiveMismatchError(
                    f"collective {number + 1} of group {call.issued.group!r} differs among its ranks:\n"
                    f"  rank {members[other]} issued {earlier.issued}\n  rank {rank} issues {call.issued}\n"
                    "all ranks of a group must issue the same collectives in the same order"
                )
        meeting.calls[group_rank] = call
        if len(meeting.calls) == len(members):
            with without_dispatch_modes(), torch.no_grad():
                meeting.values = values_of([meeting.calls[at] for at in range(len(members))], _reduced)
            del self._meetings[key, number]

        def values() -> Tensors:
            assert meeting.values is not None
            return meeting.values(group_rank)

        words = f"{call.issued} (number {number + 1} of the group)"
        return self._pending(rank, words, lambda: meeting.values is not None, values, call.outputs)

    def send(self, key: GroupKey, group_rank: int, to: int, tag: int, call: Call) -> Work:
        """Store a message. The sender does not wait for the receiver."""
        call.take_inputs()
        self._tell(key[1][group_rank], call.issued)
        self._messages[key, group_rank, to, tag].append((call.inputs[0], call.issued))
        return Work(lambda: None, lambda: True, [])

    def receive(self, key: GroupKey, group_rank: int, sources: Sequence[int], tag: int, call: Call) -> Work:
        """Receive the next message from one of the sources."""
        _, members = key
        self._tell(members[group_rank], call.issued)
        (out,) = call.outputs

        def waiting() -> list[int]:
            return [source for source in sources if self._messages[key, source, group_rank, tag]]

        def message() -> Tensors:
            source = waiting()[0]
            tensor, sent = self._messages[key, source, group_rank, tag].popleft()
            if tensor.numel() != out.numel() or tensor.dtype != out.dtype:
                raise CollectiveMismatchError(
                    f"a message does not fit: rank {members[source]} sent {sent}, rank {members[group_rank]} issued "
                    f"{call.issued}"
                )
            return [tensor]

        return self._pending(members[group_rank], str(call.issued), lambda: bool(waiting()), message, [out])

    def _pending(
        self, rank: int, words: str, ready: Callable[[], bool], values: Callable[[], Tensors], outputs: Tensors
    ) -> Work:
        """The handle of a collective that is done once `ready()` is true. The first wait fills its outputs."""
        _spoil(outputs)
        filled = False

        def wait() -> None:
            nonlocal filled
            if filled:
                return
            self.turns.wait_for(rank, ready, words)
            with without_dispatch_modes(), torch.no_grad():
                fill(outputs, values())
            filled = True

        def is_done() -> bool:
            if not filled and not ready():
                self.turns.pause(rank)  # a rank that polls must let the others run
            return filled or ready()

        return Work(wait, is_done, outputs)

    def _tell(self, rank: int, issued: Issued) -> None:
        self.turns.check()
        for listener in self.listeners[rank]:
            listener(issued)

    def check_nothing_is_left(self) -> None:
        """Check at the end that no collective or message is incomplete.

        Raises:
            CollectiveMismatchError: only some ranks issued a collective, or a message was not received.
        """
        for (key, number), meeting in self._meetings.items():
            came = [key[1][at] for at in sorted(meeting.calls)]
            call = next(iter(meeting.calls.values()))
            missing = [rank for rank in key[1] if rank not in came]
            raise CollectiveMismatchError(
                f"ranks {came} issued {call.issued} (number {number + 1} of the group) and did not wait for it; ranks "
                f"{missing} have returned without issuing it"
            )
        for (key, _, to, _), messages in self._messages.items():
            if messages:
                raise CollectiveMismatchError(f"rank {key[1][to]} has returned without receiving {messages[0][1]}")


def _spoil(outputs: Tensors) -> None:
    """Fill outputs with NaN, or with the largest integer, so that a read before the wait is noticed."""
    with without_dispatch_modes(), torch.no_grad():
        for out in outputs:
            if out.is_floating_point() or out.is_complex():
                out.data.fill_(float("nan"))
            elif out.dtype != torch.bool:
                out.data.fill_(torch.iinfo(out.dtype).max)


class _Here(threading.local):
    """The simulated world and the rank of the current thread; the world is None in other threads."""

    exchange: Exchange | None = None
    rank: int = 0


HERE = _Here()


def exchange_here(members: tuple[int, ...]) -> Exchange:
    """The exchange for the process groups that this thread creates."""
    assert HERE.exchange is not None, "only a rank of a simulated world can create groups of this backend"
    return HERE.exchange
