"""Collectives in the memory of one process: what the ranks of a group bring, and what each of them gets.

A collective is made when the last rank of its group has come. What a rank reads of its outputs before it has waited is
NaN, so that a wait that was forgotten shows; what it brings is copied at the launch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from .._errors import CollectiveMismatchError, ShardConfigValueError
from .._torch.core import without_dispatch_modes
from ._turns import Turns

Tensors = list[torch.Tensor]
GroupKey = tuple[str, tuple[int, ...]]  # name and members

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


@dataclass(frozen=True)
class Issued:
    """A collective that a rank has launched.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ...
        shapes, dtype: of the tensors that the rank brings.
        details: reduction, root or peer, in words.
        group: name of the process group.
        members: its ranks.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None
    details: str
    group: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        tensors = ", ".join(str(list(shape)) for shape in self.shapes)
        what = f" of {str(self.dtype).removeprefix('torch.')} {tensors}" if self.shapes else ""
        return f"{self.kind}{what}{self.details} in group {self.group!r} of ranks {list(self.members)}"


@dataclass
class Call:
    """What a rank brings to a collective.

    Attributes:
        inputs: copies of what it sends, flat or in pieces, as the kind demands.
        outputs: where to put what it gets, in the same order as the values (see `_VALUES`).
        must_agree: what all ranks of the group must have in common, besides the kind.
        op, root: of those that have one.
    """

    issued: Issued
    inputs: Tensors
    outputs: Tensors
    must_agree: tuple[Any, ...] = ()
    op: Any = None
    root: int = 0


def _reduced(parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """The reduction in the order of the ranks."""
    for known, function in _OPS:
        if op == known:
            total = reduce(function, parts[1:], parts[0])
            return total / len(parts) if known == dist.ReduceOp.AVG else total
    raise ShardConfigValueError(
        f"reduction {op}: a simulated world has SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR"
    )


def _all_gather(calls: list[Call]) -> list[Tensors]:
    got = [call.inputs[i] for i in range(len(calls[0].inputs)) for call in calls]
    return [got] * len(calls)


def _reduce_scatter(calls: list[Call]) -> list[Tensors]:
    world = len(calls)
    outputs = range(len(calls[0].inputs) // world)
    return [
        [_reduced([call.inputs[i * world + rank] for call in calls], calls[0].op) for i in outputs]
        for rank in range(world)
    ]


def _all_reduce(calls: list[Call]) -> list[Tensors]:
    got = [_reduced([call.inputs[i] for call in calls], calls[0].op) for i in range(len(calls[0].inputs))]
    return [got] * len(calls)


def _reduce(calls: list[Call]) -> list[Tensors]:
    got = _all_reduce(calls)[0]
    return [got if rank == calls[0].root else [] for rank in range(len(calls))]


def _broadcast(calls: list[Call]) -> list[Tensors]:
    return [calls[calls[0].root].inputs if call.outputs else [] for call in calls]


def _gather(calls: list[Call]) -> list[Tensors]:
    return [[each.inputs[0] for each in calls] if call.outputs else [] for call in calls]


def _scatter(calls: list[Call]) -> list[Tensors]:
    return [[part] for part in calls[calls[0].root].inputs]


def _all_to_all(calls: list[Call]) -> list[Tensors]:
    return [[call.inputs[rank] for call in calls] for rank in range(len(calls))]


def _barrier(calls: list[Call]) -> list[Tensors]:
    return [[] for _ in calls]


# What each rank gets, given what all of them have brought.
_VALUES: dict[str, Callable[[list[Call]], list[Tensors]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


@dataclass
class Meeting:
    """One collective of a group, while its ranks come."""

    calls: dict[int, Call] = field(default_factory=dict)  # by place in the group
    values: list[Tensors] | None = None


class Work(dist.Work):
    """The handle of a launched collective; the outputs are filled by `wait`.

    Args:
        wait: block until it is done, then fill the outputs.
        ready: whether it is done.
        outputs: what the future of it gives.
    """

    def __init__(self, wait: Callable[[], None], ready: Callable[[], bool], outputs: Tensors) -> None:
        super().__init__()
        self._wait: Callable[[], None] | None = wait
        self._ready = ready
        self._outputs = outputs

    def wait(self, timeout: Any = None) -> bool:
        if self._wait is not None:
            self._wait()
            self._wait = None
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._wait is None or self._ready()

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> Tensors:
        return self._outputs

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class Network:
    """What all groups of a world share.

    Args:
        turns: the ranks.

    Attributes:
        listeners: of each rank, who is told of what it launches.
    """

    def __init__(self, size: int, turns: Turns) -> None:
        self.turns = turns
        self.listeners: list[list[Callable[[Issued], None]]] = [[] for _ in range(size)]
        self._meetings: dict[tuple[GroupKey, int], Meeting] = {}
        self._counts: dict[tuple[GroupKey, int], int] = defaultdict(int)
        self._messages: dict[tuple[GroupKey, int, int, int], deque[tuple[torch.Tensor, Issued]]] = defaultdict(deque)

    def join(self, key: GroupKey, place: int, call: Call) -> Work:
        """Launch a collective as the rank at `place` of a group."""
        rank = key[1][place]
        self._tell(rank, call.issued)
        number = self._counts[key, place]
        self._counts[key, place] += 1
        meeting = self._meetings.setdefault((key, number), Meeting())
        for other, theirs in meeting.calls.items():
            if theirs.issued.kind != call.issued.kind or theirs.must_agree != call.must_agree:
                raise CollectiveMismatchError(
                    f"collective {number + 1} of group {call.issued.group!r} differs among its ranks:\n"
                    f"  rank {key[1][other]} issued {theirs.issued}\n  rank {rank} issues {call.issued}\n"
                    "all ranks of a group must issue the same collectives in the same order"
                )
        meeting.calls[place] = call
        if len(meeting.calls) == len(key[1]):
            with without_dispatch_modes(), torch.no_grad():
                meeting.values = _VALUES[call.issued.kind]([meeting.calls[at] for at in range(len(key[1]))])
            del self._meetings[key, number]
        else:
            _spoil(call.outputs)

        def wait() -> None:
            self.turns.wait_for(rank, ready, f"{call.issued} (number {number + 1} of the group)")
            assert meeting.values is not None
            _fill(call.outputs, meeting.values[place])

        def ready() -> bool:
            return meeting.values is not None

        if meeting.values is not None:
            _spoil(call.outputs)
        return Work(wait, lambda: ready() or self._ready_after_pause(rank, ready), call.outputs)

    def _ready_after_pause(self, rank: int, ready: Callable[[], bool]) -> bool:
        self.turns.pause(rank)
        return ready()

    def _tell(self, rank: int, issued: Issued) -> None:
        self.turns.check()
        for listener in self.listeners[rank]:
            listener(issued)

    def send(self, key: GroupKey, place: int, to: int, tag: int, tensor: torch.Tensor, issued: Issued) -> Work:
        """Leave a message; nobody waits for its receiver."""
        self._tell(key[1][place], issued)
        self._messages[key, place, to, tag].append((tensor, issued))
        return Work(lambda: None, lambda: True, [])

    def receive(
        self, key: GroupKey, place: int, sources: Sequence[int], tag: int, to: torch.Tensor, issued: Issued
    ) -> Work:
        """Take the next message of one of the sources."""
        self._tell(key[1][place], issued)
        _spoil([to])

        def waiting() -> list[int]:
            return [source for source in sources if self._messages[key, source, place, tag]]

        def wait() -> None:
            self.turns.wait_for(key[1][place], lambda: bool(waiting()), str(issued))
            source = waiting()[0]
            tensor, sent = self._messages[key, source, place, tag].popleft()
            if tensor.numel() != to.numel() or tensor.dtype != to.dtype:
                raise CollectiveMismatchError(
                    f"a message does not fit: rank {key[1][source]} sent {sent}, rank {key[1][place]} has {issued}"
                )
            _fill([to], [tensor])

        return Work(wait, lambda: bool(waiting()), [to])

    def check_nothing_is_left(self) -> None:
        """All ranks have returned: whatever was launched must have met its counterparts.

        Raises:
            CollectiveMismatchError: a collective or message was issued by some ranks only.
        """
        for (key, number), meeting in self._meetings.items():
            there = [key[1][at] for at in sorted(meeting.calls)]
            call = next(iter(meeting.calls.values()))
            missing = [rank for rank in key[1] if rank not in there]
            raise CollectiveMismatchError(
                f"ranks {there} issued {call.issued} (number {number + 1} of the group) and did not wait for it; ranks "
                f"{missing} have returned without it"
            )
        for (key, _, to, _), messages in self._messages.items():
            if messages:
                raise CollectiveMismatchError(f"nobody received {messages[0][1]}; rank {key[1][to]} has returned")


def _spoil(outputs: Tensors) -> None:
    """Let what is read before the wait be noticed."""
    with without_dispatch_modes(), torch.no_grad():
        for out in outputs:
            if out.is_floating_point() or out.is_complex():
                _unversioned(out).fill_(float("nan"))
            elif out.dtype != torch.bool:
                _unversioned(out).fill_(torch.iinfo(out.dtype).max)


def _fill(outputs: Tensors, values: Tensors) -> None:
    with without_dispatch_modes(), torch.no_grad():
        for out, value in zip(outputs, values, strict=True):
            _unversioned(out).copy_(value.view(out.shape))


def _unversioned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; like those of a real backend, writes are not seen by autograd."""
    return tensor.data
