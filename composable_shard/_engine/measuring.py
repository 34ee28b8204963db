"""Measures the times that `PrefetchPolicy.auto` needs, in a few steps.

The first training step is not measured: it learns the order and warms up. In the measured steps, every collective is
waited for where it is issued, so that collectives and compute are timed separately. The minimum over the steps counts.
"""

from __future__ import annotations

import warnings
from collections import Counter

from .._plan.costs import Costs
from .._plan.plan import ShardPlan
from .._plan.record import Record, own_seconds
from .._plan.schedule import ROOT_NAME, Kind
from .actions import Actions
from .stopwatch import Stopwatch

STEPS = 2  # how many steps are measured
CHECK_AFTER = 64  # iterations until costs are measured again; doubled after each check
_TRIES = 8  # from this step on, measuring stops at the first one that cannot be measured

_PARTS: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("forward", (Kind.FORWARD,)),
    ("backward", (Kind.BACKWARD,)),
    ("gather", (Kind.UNSHARD, Kind.WAIT)),
    ("reduce", (Kind.REDUCE, Kind.REDUCED)),
    ("refresh", (Kind.REFRESH,)),
)
Seconds = dict[tuple[str, str], float]  # by part (see `_PARTS`) and FQN of a group


class Measuring:
    """Measures steps of one engine: first until the plan has costs, later at growing intervals to check the costs.

    The number of iterations decides when to measure, never a clock, so all ranks measure the same iterations.

    Args:
        actions: the actions to measure.

    Attributes:
        is_on: whether steps are being measured.
    """

    def __init__(self, actions: Actions) -> None:
        self.is_on = False
        self._actions = actions
        self._watch: Stopwatch | None = None  # a user's stopwatch, which times all steps that are not measured
        self._order: tuple[str, ...] = ()  # the order of the plan when it was last tried to measure
        self._samples: list[Seconds] = []
        self._tries = 0
        self._every = self._due_in = CHECK_AFTER  # iterations between two checks, and until the next check

    def watch(self, on: bool) -> None:
        """Start or stop timing all actions for a user. While steps are measured, this takes effect afterwards."""
        self._watch = Stopwatch(self._actions.pool.memory.device) if on else None
        if not self.is_on:
            self._actions.recorder.time_by(self._watch)

    def _count_iteration(self, plan: ShardPlan) -> bool:
        """Count one iteration. Returns whether to measure costs now: for the first time, or to check them."""
        if plan.prefetch.kind != "auto":
            return False
        if plan.costs is None:
            return self.is_on or self._tries < _TRIES or plan.order != self._order
        self._due_in -= not self.is_on
        return self._due_in <= 0

    def check_later(self) -> None:
        """Schedule the next check of the costs, after twice as many iterations as the last one."""
        self._every *= 2
        self._due_in, self._tries = self._every, 0

    def between_steps(self, plan: ShardPlan) -> Seconds | None:
        """At the end of an iteration: take its times if it was measured, and decide whether to measure the next one.

        Returns:
            the seconds of each part of each group, once enough steps were measured; otherwise None.
        """
        if not self._count_iteration(plan):
            if self.is_on:  # the user has changed the policy
                self._end()
            return None
        if plan.order != self._order:
            self._order, self._tries, self._samples = plan.order, 0, []
        self._tries += self.is_on
        record = self._actions.recorder.history.last
        if record is None or not _is_whole(plan, record):
            if self._tries >= _TRIES:
                self._give_up(plan)
        elif self.is_on:
            return self._take(_seconds(plan, record))
        else:
            self.is_on = True
            self._actions.recorder.time_by(Stopwatch(self._actions.pool.memory.device, serial=True))
        return None

    def _take(self, seconds: Seconds) -> Seconds | None:
        self._samples = [each for each in self._samples if each.keys() == seconds.keys()] + [seconds]
        if len(self._samples) < STEPS:
            return None
        least = {part: min(each[part] for each in self._samples) for part in seconds}
        self._end()
        return least

    def _give_up(self, plan: ShardPlan) -> None:
        if plan.costs is None:
            warnings.warn(_given_up(plan, len(self._samples), self._tries), stacklevel=2)
        else:
            self.check_later()
        self._end()

    def _end(self) -> None:
        self.is_on, self._samples = False, []
        self._actions.recorder.time_by(self._watch)
        if self._watch is not None:
            self._watch.clear()  # its spans are of iterations before the measured ones


def _is_whole(plan: ShardPlan, record: Record) -> bool:
    """Whether an iteration was a training step: all planned forwards, in order, and reductions of all that train."""
    trains = {group.fqn for group in plan.groups if group.trains and group.fqn in plan.order}
    reduced = {action.fqn for action in record.actions if action.kind is Kind.REDUCED}
    return record.order == plan.order and trains <= reduced


def _given_up(plan: ShardPlan, measured: int, tries: int) -> str:
    forwards = ", ".join(fqn or ROOT_NAME for fqn in plan.order)
    return (
        f"PrefetchPolicy.auto: {measured or 'none'} of {tries} steps ran the forwards {forwards} "
        f"and reduced the gradients of them all ({STEPS} must), so there are no measured times and each group is "
        "prefetched one module ahead. Set the policy when steps are regular, or use PrefetchPolicy.depth"
    )


def _seconds(plan: ShardPlan, record: Record) -> Seconds:
    """Seconds of each group: its forward, its backward, one gather and one reduction."""
    own, begun = own_seconds(record.spans), Counter((span.kind, span.fqn) for span in record.spans)
    seconds: Seconds = {}
    for fqn in dict.fromkeys(plan.order):
        for name, kinds in _PARTS:
            times = max(1, begun[kinds[0], fqn]) if len(kinds) > 1 else 1
            seconds[name, fqn] = sum(own.get((kind, fqn), 0.0) for kind in kinds) / times
    return seconds


def costs_of(plan: ShardPlan, seconds: Seconds, streams: bool) -> Costs:
    """The costs computed from measured times.

    Args:
        plan: the plan of the measured steps.
        seconds: as returned by `Measuring.between_steps`.
        streams: as `Actions.streams`.
    """
    parts = {name: {fqn: took for (of, fqn), took in seconds.items() if of == name} for name, _ in _PARTS}
    groups = [plan.group(fqn) for fqn in dict.fromkeys(plan.order)]
    moved = sum(sum(g.moved.gather) * (g.shard_size - 1) / g.shard_size for g in groups)
    taken = sum(parts["gather"].values())
    bandwidth = moved / taken if moved and taken else 1e9
    return Costs.of(
        latency=0.0,
        bandwidth=bandwidth,
        forward=parts["forward"],
        backward=parts["backward"],
        gather=parts["gather"],
        reduce=parts["reduce"],
        refresh={fqn: took for fqn, took in parts["refresh"].items() if plan.group(fqn).outer_size > 1},
        streams=streams,
    )
