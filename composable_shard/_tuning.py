"""The times that `PrefetchPolicy.auto` needs: a few steps are measured, ranks agree, and the plan is made anew.

The first training step is left alone: it learns the order and warms up. In the next ones every collective is waited
for where it is issued, so that it and the compute around it are timed alone; the least of several times counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ._actions import Actions
from ._agreement import Among, agree, slowest
from ._order import Order
from ._plan import ShardPlan
from ._record import Record
from ._schedule import Kind
from ._simulation import Costs
from ._timing import Stopwatch, own_seconds

STEPS = 2  # that are measured

_PARTS: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("forward", (Kind.FORWARD,)),
    ("backward", (Kind.BACKWARD,)),
    ("gather", (Kind.UNSHARD, Kind.WAIT)),
    ("reduce", (Kind.REDUCE, Kind.REDUCED)),
)


class Tuning:
    """Measures the steps of one engine, if its plan asks for it.

    Args:
        order: whose plan is made anew.
        actions: what is measured.
        among: the process groups of the model, with their devices; their ranks decide alike.
    """

    def __init__(self, order: Order, actions: Actions, among: Among) -> None:
        self._order = order
        self._do = actions
        self._among = among
        self._found: list[list[float]] = []
        self._before: Stopwatch | None = None  # a user's, who goes on watching when all is measured

    @property
    def wanted(self) -> bool:
        """Whether the plan waits for costs."""
        plan = self._order.plan
        return plan.prefetch.kind == "auto" and plan.costs is None

    def between_steps(self) -> None:
        """An iteration is over, and nothing of it lives."""
        record = self._do.last_record if self.wanted else None
        plan = self._order.plan
        if record is None or not _is_whole(plan, record):
            return
        if self._do.watch is None or not self._do.watch.serial:
            self._before, self._do.watch = self._do.watch, Stopwatch(self._do.pool.device, serial=True)
            return
        self._found.append(_seconds(plan, record))
        if len(self._found) == STEPS:
            least = [min(each) for each in zip(*self._found, strict=True)]
            costs = _costs(plan, slowest(least, self._among))
            self._do.watch, self._before, self._found = self._before, None, []
            if self._do.watch is not None:
                self._do.watch.take()
            plan = plan.with_policies(costs=costs)
            agree(plan, self._among)
            self._order.follow(plan)
            self._order.replans += 1


def _is_whole(plan: ShardPlan, record: Record) -> bool:
    """Whether an iteration was a training step: the forwards that are planned, and reductions."""
    trains = {group.fqn for group in plan.groups if group.trains and group.fqn in plan.order}
    reduced = {action.fqn for action in record.actions if action.kind is Kind.REDUCED}
    return record.order == plan.order and trains <= reduced


def _seconds(plan: ShardPlan, record: Record) -> list[float]:
    """Forward, backward, one gather and one reduction of each group, one group after the other."""
    own, found = own_seconds(record.spans), []
    for fqn in dict.fromkeys(plan.order):
        for _, kinds in _PARTS:
            times = max(1, sum(span.fqn == fqn and span.kind is kinds[0] for span in record.spans))
            whole = sum(own.get((kind, fqn), 0.0) for kind in kinds)
            found.append(whole / times if len(kinds) > 1 else whole)
    return found


def _costs(plan: ShardPlan, seconds: Sequence[float]) -> Costs:
    fqns = list(dict.fromkeys(plan.order))
    parts = {name: dict(zip(fqns, seconds[at :: len(_PARTS)], strict=True)) for at, (name, _) in enumerate(_PARTS)}
    groups = [plan.group(fqn) for fqn in fqns]
    moved = sum(g.moved_bytes[0] * (g.shard_size - 1) / g.shard_size for g in groups)
    taken = sum(parts["gather"].values())
    bandwidth = moved / taken if moved and taken else 1e9
    return Costs.of(latency=0.0, bandwidth=bandwidth, **parts)
