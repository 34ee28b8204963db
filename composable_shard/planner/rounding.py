"""Memory of low-precision reductions outside the pool: while values are rounded and added, and between replicas.

Values are rounded in turns (see `_plan/parcel.py`). A CPU processes each turn in parts. The bytes per value are those
of the operators in `_comm/rounding.py` and `_comm/lowbit.py` at their peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .._comm.rounding import CACHED
from .._plan.group_plan import GroupPlan
from .._plan.layout import ReduceLayout
from .._plan.parcel import Parcel

_DRAWN = 2  # bytes of random numbers per value of a turn
_AT_WORK = {"int8": 8, "fp8": 12, "bf16": 11}  # bytes per value while values are rounded
_DECODED = {"int8": 0, "fp8": 2, "bf16": 0}  # bytes per value while values are decoded
_ADDED = 4  # bytes per value of a turn that is added in float32


def passing_bytes(group: GroupPlan, replicas: int, streams: bool) -> int:
    """Largest temporary memory of a reduction of the group while it rounds or adds, in bytes.

    Args:
        group: a group of the plan.
        replicas: number of ranks of the outer axis.
        streams: whether it runs on an accelerator, which rounds a whole turn at a time.
    """
    most = 0
    for layout, sent, to, others in _exchanges(group, replicas):
        for form, numbers in _turns(layout, sent):
            most = max(most, _DRAWN * to * numbers + _AT_WORK[form] * _at_once(to * numbers, streams))
            most = max(most, _ADDED * others * numbers + _DECODED[form] * _at_once(others * numbers, streams))
    return most


def _exchanges(group: GroupPlan, replicas: int) -> Iterator[tuple[ReduceLayout, Parcel | None, int, int]]:
    """The exchanges of the group's reductions: what a rank sends, to how many ranks, and from how many it receives."""
    for each in group.reductions:
        yield each.layout, each.layout.parcel, group.shard_size, group.shard_size
        if group.outer_size == 1:
            yield each.layout, each.between, 1, replicas
    for _, layout in group.outer_reduce_layouts:
        yield layout, layout.parcel, group.outer_size, group.outer_size


def _at_once(numbers: int, streams: bool) -> int:
    return numbers if streams else min(numbers, CACHED)


def _turns(layout: ReduceLayout, sent: Parcel | None) -> Iterator[tuple[str, int]]:
    """For each turn: the format, and the number of values per chunk."""
    parts = [] if sent is None else [part for part in sent.parts if part.form]
    params = layout.result.params
    numbers: Counter[tuple[int, str]] = Counter()
    for part in parts:
        numbers[part.turn, part.form] += sum(params[index].piece for index in part.members)
    for (_, form), count in numbers.items():
        yield form, count


def replica_buffers(group: GroupPlan, replicas: int) -> int:
    """Bytes that a low-precision reduction between replicas sends and receives, until it finishes."""
    if replicas == 1:
        return 0
    return sum((replicas + 1) * each.between.nbytes for each in group.reductions if each.between is not None)
