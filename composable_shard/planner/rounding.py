"""Memory of reductions in fewer bits beside the pool: while numbers are rounded and added up, and between replicas.

Numbers are rounded turn by turn (see `_plan/parcel.py`), and on a CPU some of a turn at a time. The bytes for each of
them are those of the operators of `_comm/rounding.py` and `_comm/lowbit.py` when these have most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .._comm.rounding import CACHED
from .._plan.group_plan import GroupPlan
from .._plan.layout import ReduceLayout
from .._plan.parcel import Parcel

_DRAWN = 2  # bytes of the random numbers of a turn, for each number
_AT_WORK = {"int8": 8, "fp8": 12, "bf16": 11}  # where numbers are rounded, for each number
_DECODED = {"int8": 0, "fp8": 2, "bf16": 0}  # where they are numbers again
_ADDED = 4  # of a turn that is added up in float32
_FED_BACK = 8  # of a turn with what earlier ones have left: the sums, and what arrives of them


def passing_bytes(group: GroupPlan, replicas: int, streams: bool) -> int:
    """Most bytes that a reduction of the group takes while it rounds or adds up, and gives back before it goes on.

    Args:
        group: of the plan.
        replicas: number of ranks that have the same shards.
        streams: whether it runs on an accelerator, which rounds all of a turn at once.
    """
    most = 0
    for each in group.reductions:
        for sent, to, others in ((each.sent, group.shard_size, group.shard_size), (each.between, 1, replicas)):
            for form, numbers, joined in _turns(each.layout, sent):
                most = max(most, _rounding(group, form, to * numbers, joined, streams))
                most = max(most, _ADDED * others * numbers + _DECODED[form] * _at_once(others * numbers, streams))
    return most


def _rounding(group: GroupPlan, form: str, numbers: int, joined: bool, streams: bool) -> int:
    at_once = _AT_WORK[form] * _at_once(numbers, streams)
    if not group.comm_policy.error_feedback:
        return _DRAWN * numbers + at_once
    left = 4 * numbers if joined else 0
    return left + max(_FED_BACK * numbers, 4 * numbers + at_once // 2)  # without random numbers half of it


def _at_once(numbers: int, streams: bool) -> int:
    return numbers if streams else min(numbers, CACHED)


def _turns(layout: ReduceLayout, sent: Parcel | None) -> Iterator[tuple[str, int, bool]]:
    """Of each turn the form, how many numbers of a chunk it has, and whether those are of several parameters."""
    parts = [] if sent is None else [part for part in sent.parts if part.form]
    params = layout.result.params
    numbers: Counter[tuple[int, str]] = Counter()
    members: Counter[tuple[int, str]] = Counter()
    for part in parts:
        numbers[part.turn, part.form] += sum(params[index].piece for index in part.members)
        members[part.turn, part.form] += len(part.members)
    for (turn, form), count in numbers.items():
        yield form, count, members[turn, form] > 1


def replica_buffers(group: GroupPlan, replicas: int) -> int:
    """Bytes that a reduction between replicas in fewer bits sends and receives, until it is over."""
    if replicas == 1:
        return 0
    return sum((replicas + 1) * each.between.nbytes for each in group.reductions if each.between is not None)
