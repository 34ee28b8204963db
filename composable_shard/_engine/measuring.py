"""Measures the times that `PrefetchPolicy.auto` needs, in a few steps.

The first training step is not measured: it learns the order, and warms up. In the next ones, every collective is waited
for where it is issued, so that it and the compute around it are timed alone. Of several times the least counts.
"""

from __future__ import annotations

import warnings
from collections import Counter

from .._plan.plan import ShardPlan
from .._plan.record import Record, own_seconds
from .._plan.schedule import ROOT_NAME, Kind
from .._plan.simulation import Costs
from .actions import Actions
from .stopwatch import Stopwatch

STEPS = 2  # how many steps are measured
CHECK_AFTER = 64  # iterations until costs are measured again; then twice as many, and so on
_TRIES = 8  # after so many steps that cannot be measured, measuring is given up

_PARTS: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("forward", (Kind.FORWARD,)),
    ("backward", (Kind.BACKWARD,)),
    ("gather", (Kind.UNSHARD, Kind.WAIT)),
    ("reduce", (Kind.REDUCE, Kind.REDUCED)),
)
Seconds = dict[tuple[str, str], float]  # by part (see `_PARTS`) and FQN of a group


class Measuring:
    """Measures steps of one engine: at first until the plan has costs and later, ever more rarely, to check these.

    When to do so depends on the number of iterations and on no clock, so that all ranks measure the same ones.

    Args:
        actions: what is measured.

    Attributes:
        is_on: whether steps are measured now.
    """

    def __init__(self, actions: Actions) -> None:
        self.is_on = False
        self._do = actions
        self._watch: Stopwatch | None = None  # a user's, which times whatever is not measured
        self._order: tuple[str, ...] = ()  # of the steps that were measured, or given up, last
        self._samples: list[Seconds] = []
        self._tries = 0
        self._every = self._due_in = CHECK_AFTER  # iterations between two checks; until the next one

    def watch(self, on: bool) -> None:
        """Begin to time all actions for a user, or end it. While steps are measured, this takes effect after that."""
        self._watch = Stopwatch(self._do.pool.memory.device) if on else None
        if not self.is_on:
            self._do.time_by(self._watch)

    def _is_due(self, plan: ShardPlan) -> bool:
        """Whether costs are missing, or it is time to check them. Each call counts as one iteration."""
        if plan.prefetch.kind != "auto":
            return False
        if plan.costs is None:
            return self._tries <= _TRIES or plan.order != self._order
        self._due_in -= not self.is_on
        return self._due_in <= 0

    def check_later(self) -> None:
        """The plan's costs hold, or cannot be checked now: check them after twice as many iterations as last time."""
        self._every *= 2
        self._due_in, self._tries = self._every, 0

    def between_steps(self, plan: ShardPlan) -> Seconds | None:
        """An iteration is over: take its times if it was measured, and decide whether to measure the next one.

        Returns:
            the seconds of each part of each group, when enough steps were measured; else None.
        """
        if not self._is_due(plan):
            if self.is_on:  # the user has changed the policy since
                self._end()
            return None
        if plan.order != self._order:
            self._order, self._tries, self._samples = plan.order, 0, []
        self._tries += self.is_on
        record = self._do.history.last
        if record is None or not _is_whole(plan, record):
            if self._tries > _TRIES:
                self._give_up(plan)
        elif self.is_on:
            return self._take(_seconds(plan, record))
        else:
            self.is_on = True
            self._do.time_by(Stopwatch(self._do.pool.memory.device, serial=True))
        return None

    def _take(self, seconds: Seconds) -> Seconds | None:
        self._samples = [each for each in self._samples if each.keys() == seconds.keys()] + [seconds]
        if len(self._samples) < STEPS:
            return None
        least = {part: min(each[part] for each in self._samples) for part in seconds}
        self._end()
        return least

    def _give_up(self, plan: ShardPlan) -> None:
        self._end()
        if plan.costs is None:
            warnings.warn(_given_up(plan), stacklevel=2)
        else:
            self.check_later()

    def _end(self) -> None:
        self.is_on, self._samples = False, []
        self._do.time_by(self._watch)
        if self._watch is not None:
            self._watch.take()  # its spans are of iterations before the measured ones


def _is_whole(plan: ShardPlan, record: Record) -> bool:
    """Whether an iteration was a training step: all planned forwards, in order, and reductions of all that train."""
    trains = {group.fqn for group in plan.groups if group.trains and group.fqn in plan.order}
    reduced = {action.fqn for action in record.actions if action.kind is Kind.REDUCED}
    return record.order == plan.order and trains <= reduced


def _given_up(plan: ShardPlan) -> str:
    forwards = ", ".join(fqn or ROOT_NAME for fqn in plan.order)
    return (
        f"PrefetchPolicy.auto: none of {_TRIES} steps ran the forwards {forwards} "
        "and reduced the gradients of them all, so nothing is known of times; groups are gathered one ahead. Set the "
        "policy when steps are regular, or PrefetchPolicy.depth"
    )


def _seconds(plan: ShardPlan, record: Record) -> Seconds:
    """Seconds of each group: its forward, backward, one gather and one reduction."""
    own, begun = own_seconds(record.spans), Counter((span.kind, span.fqn) for span in record.spans)
    seconds: Seconds = {}
    for fqn in dict.fromkeys(plan.order):
        for name, kinds in _PARTS:
            times = max(1, begun[kinds[0], fqn]) if len(kinds) > 1 else 1
            seconds[name, fqn] = sum(own.get((kind, fqn), 0.0) for kind in kinds) / times
    return seconds


def costs_of(plan: ShardPlan, seconds: Seconds, streams: bool) -> Costs:
    """The costs that follow from measured times.

    Args:
        plan: of the measured steps.
        seconds: as `Measuring.between_steps` returns them.
        streams: as `Actions.streams`.
    """
    parts = {name: {fqn: took for (of, fqn), took in seconds.items() if of == name} for name, _ in _PARTS}
    groups = [plan.group(fqn) for fqn in dict.fromkeys(plan.order)]
    moved = sum(sum(g.moved.gather) * (g.shard_size - 1) / g.shard_size for g in groups)
    taken = sum(parts["gather"].values())
    bandwidth = moved / taken if moved and taken else 1e9
    return Costs.of(latency=0.0, bandwidth=bandwidth, streams=streams, **parts)
