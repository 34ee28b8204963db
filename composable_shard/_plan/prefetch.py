"""The scheduler: what each forward and backward gathers ahead, and which groups keep their weights, under a budget.

Everything is decided when the plan is made, from sizes and, where known, from times; the engine only follows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from .._policies import PrefetchPolicy
from .fitting import by_bytes, by_depth, fitting
from .schedule import Schedule, Step
from .search import Auto
from .simulation import Sizes, Times

_KEPT = 16  # schedules of `auto` that are remembered: phases of one order, and plans made anew from the same times
_made: OrderedDict[object, Schedule] = OrderedDict()


def scheduled(
    steps: Sequence[Step],
    sizes: Mapping[str, Sizes],
    policy: PrefetchPolicy,
    budget: int | None = None,
    times: Mapping[str, Times] | None = None,
) -> Schedule:
    """The schedule of a training step.

    Args:
        steps: the uses of groups in the order of their forwards.
        sizes: bytes of each group.
        policy: how far to gather ahead; `auto` means one module ahead as long as there are no times.
        budget: the most bytes that may be live at once: weights, landing buffers and reductions. None for no limit,
            except that `auto` then takes no more than one module ahead does.
        times: seconds of a use of each group, where they are known.

    Raises:
        PoolBudgetError: a group does not fit; the error has the least budget that works.
    """
    if policy.kind == "auto" and times is not None and steps:
        return _searched(steps, sizes, times, budget)
    bare = fitting(steps, sizes, budget)
    if policy.kind == "bytes":
        wanted = by_bytes(bare, policy.amount or 0)
    else:
        wanted = by_depth(bare, 1 if policy.amount is None else policy.amount)
    return bare.under(wanted, budget)[0]


def _searched(
    steps: Sequence[Step], sizes: Mapping[str, Sizes], times: Mapping[str, Times], budget: int | None
) -> Schedule:
    """The schedule of `auto`; the same question is searched only once."""
    asked = tuple((step, sizes[step.fqn], times[step.fqn]) for step in steps), budget
    found = _made.pop(asked, None) or Auto(steps, sizes, times, budget).best().schedule
    _made[asked] = found
    while len(_made) > _KEPT:
        _made.popitem(last=False)
    return found
