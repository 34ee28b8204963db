"""Measures the times that `PrefetchPolicy.auto` needs: in a few steps, after which the plan is made anew.

The first training step is not measured: it learns the order, and warms up. In the next ones, every collective is waited
for where it is issued, so that it and the compute around it are timed alone. Of several times the least counts, and of
those of several ranks the largest.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

from .._comm.agreement import Among, agree, slowest
from .._plan.drift import time_drift
from .._plan.plan import ShardPlan
from .._plan.record import Record, own_seconds
from .._plan.schedule import ROOT_NAME, Kind
from .._plan.simulation import Costs
from .actions import Actions
from .order import Order
from .replanning import Learning
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


class Tuning:
    """Measures some steps of one engine, if its plan asks for costs.

    It measures at first until the plan has costs, and later, more and more rarely, whether these still hold. When to do
    so depends on the number of iterations and on no clock, so that all ranks measure the same ones.

    Args:
        learning: its log gets drifts of times.
        order: holds the plan.
        actions: what is measured.
        among: the process groups of the model, whose ranks agree on times and plan.
    """

    def __init__(self, learning: Learning, order: Order, actions: Actions, among: Among) -> None:
        self._learning = learning
        self._order = order
        self._do = actions
        self._among = among
        self._found: list[dict[tuple[str, str], float]] = []
        self._tries = 0
        self._for: tuple[str, ...] = ()  # the order of which times were last measured, or given up
        self._iterations = 0  # since the last measurement
        self._next = CHECK_AFTER
        self._before: Stopwatch | None = None  # the user's stopwatch, while steps are measured

    def _is_due(self) -> bool:
        """Whether costs are missing, or it is time to check them. To be asked once an iteration, as it counts these."""
        plan = self._order.plan
        if plan.prefetch.kind != "auto":
            return False
        if plan.costs is None:
            return self._tries <= _TRIES or plan.order != self._for
        self._iterations += not self.measures
        return self._iterations >= self._next

    def between_steps(self) -> None:
        """An iteration is over: take its times if it was measured, and decide whether to measure the next one."""
        if not self._is_due():
            if self.measures:  # the user has changed the policy since
                self._end()
            return
        plan, record = self._order.plan, self._do.history.last
        if record is None:
            return
        if plan.order != self._for:
            self._for, self._tries, self._found = plan.order, 0, []
        self._tries += self.measures
        if not _is_whole(plan, record):
            if self._tries > _TRIES:
                self._end()
                if plan.costs is None:
                    warnings.warn(_given_up(plan), stacklevel=2)
                else:
                    self._check_later()
            return
        if not self.measures:
            self._before = self._do.watch
            self._do.time_by(Stopwatch(self._do.pool.memory.device, serial=True))
            return
        seconds = _seconds(plan, record)
        self._found = [each for each in self._found if each.keys() == seconds.keys()] + [seconds]
        if len(self._found) == STEPS:
            least = [min(each[part] for each in self._found) for part in seconds]
            agreed = slowest(least, self._among)
            self._end()
            self._compare(plan, dict(zip(seconds, agreed, strict=True)))

    def _compare(self, plan: ShardPlan, seconds: Mapping[tuple[str, str], float]) -> None:
        """Make the plan anew, unless the measured times are those of the plan."""
        costs = _costs(plan, seconds, self._do.streams)
        if plan.costs is not None:
            found = time_drift(plan, replace(plan, costs=costs).times() or {})
            self._check_later()
            if not found:
                return
            self._learning.log.add("time", self._learning.forwards, found)
        measured = plan.with_policies(costs=costs)
        agree(measured, self._among)
        self._order.replan(measured)

    def _check_later(self) -> None:
        self._iterations, self._next, self._tries = 0, 2 * self._next, 0

    @property
    def measures(self) -> bool:
        """Whether steps are measured now."""
        return self._do.watch is not None and self._do.watch.serial

    def watch(self, watch: Stopwatch | None) -> None:
        """Use a user's stopwatch, or none; while steps are measured, only after that."""
        if self.measures:
            self._before = watch
        else:
            self._do.time_by(watch)

    def _end(self) -> None:
        self._do.time_by(self._before)
        self._before, self._found = None, []
        if self._do.watch is not None:
            self._do.watch.take()  # its spans are of iterations before the measured ones


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


def _seconds(plan: ShardPlan, record: Record) -> dict[tuple[str, str], float]:
    """Seconds of each group, by part (see `_PARTS`) and FQN: its forward, backward, one gather and one reduction."""
    own, found = own_seconds(record.spans), {}
    for fqn in dict.fromkeys(plan.order):
        for name, kinds in _PARTS:
            times = max(1, sum(span.fqn == fqn and span.kind is kinds[0] for span in record.spans))
            whole = sum(own.get((kind, fqn), 0.0) for kind in kinds)
            found[name, fqn] = whole / times if len(kinds) > 1 else whole
    return found


def _costs(plan: ShardPlan, seconds: Mapping[tuple[str, str], float], streams: bool) -> Costs:
    parts = {name: {fqn: took for (of, fqn), took in seconds.items() if of == name} for name, _ in _PARTS}
    groups = [plan.group(fqn) for fqn in dict.fromkeys(plan.order)]
    moved = sum(sum(g.moved.gather) * (g.shard_size - 1) / g.shard_size for g in groups)
    taken = sum(parts["gather"].values())
    bandwidth = moved / taken if moved and taken else 1e9
    return Costs.of(latency=0.0, bandwidth=bandwidth, streams=streams, **parts)
