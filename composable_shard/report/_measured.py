"""The measured times of a record by group, and the costs derived from them for a plan without costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from composable_shard._plan.costs import Costs
from composable_shard._plan.course import COMPUTE, LAUNCHES
from composable_shard._plan.plan import ShardPlan
from composable_shard._plan.record import Record, Span, own_seconds
from composable_shard._plan.schedule import Kind
from composable_shard.errors import ShardConfigValueError

_ENDS = {Kind.WAIT: Kind.UNSHARD, Kind.REDUCED: Kind.REDUCE}
_LEAST_WAIT = 0.1  # fraction of a collective's time; a shorter wait may be copies and does not show when it finished
_SLOWER = 1.25  # a group is slower if it takes longer than this multiple of the planned time,
_MATTERS = 0.01  # and if the difference is at least this fraction of the planned compute of a step


@dataclass(frozen=True, slots=True)
class GroupSeconds:
    """Seconds of a group in a step: compute, and the exposed time of its gathers and reductions."""

    fqn: str
    compute: float
    gathers: float
    reductions: float

    @property
    def all(self) -> float:
        """The sum."""
        return self.compute + self.gathers + self.reductions


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a record.

    Attributes:
        seconds: from the beginning of the first span of the step to the end of the last one.
        groups: the groups, the longest first. The issue of collectives counts as compute.
        elsewhere: seconds outside all groups, for example of the loss.
    """

    seconds: float
    groups: tuple[GroupSeconds, ...]
    elsewhere: float


def check_record(plan: ShardPlan, record: Record) -> None:
    """Check that a record is of the same model as the plan.

    Raises:
        ShardConfigValueError: the record names a group that the plan does not have.
    """
    known = {group.fqn for group in plan.groups}
    named = (*record.order, *(action.fqn for action in record.actions), *(span.fqn for span in record.spans))
    strange = next((fqn for fqn in named if fqn not in known), None)
    if strange is not None:
        raise ShardConfigValueError(
            f"record: names {strange!r}, which is not a group of the plan; give the plan of the same model, "
            "make_plan(model) after the step"
        )


def measured(record: Record) -> Measured | None:
    """The measurements of a record; None if the model was not watched."""
    if not record.spans:
        return None
    own = own_seconds(worked(record))
    by_kind: dict[str, list[float]] = {fqn: [0.0, 0.0, 0.0] for _, fqn in own}
    for (kind, fqn), seconds in own.items():
        by_kind[fqn][_COLUMN[kind]] += seconds
    groups = [GroupSeconds(fqn, *seconds) for fqn, seconds in by_kind.items()]
    groups.sort(key=lambda each: -each.all)
    whole = max(span.end for span in record.spans) - min(span.begin for span in record.spans)
    return Measured(whole, tuple(groups), max(0.0, whole - sum(group.all for group in groups)))


_COLUMN = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.WAIT: 1, Kind.REDUCED: 2}


def worked(record: Record) -> list[Span]:
    """The spans without those that issue collectives, whose time then counts as the compute around them."""
    return [span for span in record.spans if span.kind in _COLUMN]


def slower(planned: tuple[GroupSeconds, ...], seen: Measured) -> tuple[str, ...]:
    """The groups whose compute took longer than planned, by a quarter and by enough to matter in a step."""
    least = _MATTERS * sum(group.compute for group in planned)
    expected = {group.fqn: group.compute for group in planned}
    return tuple(
        group.fqn
        for group in seen.groups
        if group.compute > max(_SLOWER * expected.get(group.fqn, 0.0), expected.get(group.fqn, 0.0) + least)
    )


def costs_of_record(plan: ShardPlan, record: Record) -> Costs:
    """Derive costs from the times of a step.

    If compute waited for a collective, the collective took from its issue, or from the end of the previous collective,
    to the end of the wait. If it finished before the wait, this time is an upper bound, and the median rate of
    the others is used if that gives less.

    Raises:
        ShardConfigValueError: the record has no times, or lacks a group of the plan.
    """
    own = own_seconds(worked(record))
    _check_times(plan, own)
    flights = list(_flights(plan, record))
    rates = [flight.seconds / flight.nbytes for flight in flights if flight.waited and flight.nbytes]
    rate = statistics.median(rates or [0.0])
    forward, backward = ({fqn: own.get((kind, fqn), 0.0) for fqn in plan.order} for kind in COMPUTE)
    return Costs.of(
        latency=0.0,
        bandwidth=1 / rate if rate else 1e12,
        gather=_each(flights, Kind.UNSHARD, rate),
        reduce=_each(flights, Kind.REDUCE, rate),
        forward=forward,
        backward=backward,
    )


def _check_times(plan: ShardPlan, own: Mapping[tuple[Kind, str], float]) -> None:
    missing = next((fqn for fqn in plan.order if (Kind.FORWARD, fqn) not in own), None)
    if missing is not None:
        why = f"has no times of {plan.group(missing).name}" if own else "has no times"
        raise ShardConfigValueError(
            f"record: {why}; call cs.watch(model), run one more iteration, and use its last_record"
        )


class _Flight(NamedTuple):
    """A collective and its seconds, which are an upper bound if compute did not wait for it."""

    kind: Kind
    fqn: str
    nbytes: int
    seconds: float
    waited: bool

    def at_rate(self, rate: float) -> float:
        """Its seconds, at `rate` seconds per byte unless they are known."""
        return self.seconds if self.waited else min(self.seconds, rate * self.nbytes)


def _each(flights: Sequence[_Flight], kind: Kind, rate: float) -> dict[str, float]:
    """Seconds of a collective of each group: the mean of those of the step."""
    seconds: dict[str, list[float]] = {}
    for flight in flights:
        if flight.kind is kind:
            seconds.setdefault(flight.fqn, []).append(flight.at_rate(rate))
    return {fqn: statistics.fmean(each) for fqn, each in seconds.items()}


def _flights(plan: ShardPlan, record: Record) -> Iterator[_Flight]:
    """The collectives of a record, with their times."""
    issued: dict[tuple[Kind, str], list[float]] = {}
    free = 0.0  # the last time at which the link was known to be free
    for span in record.spans:
        if span.kind in LAUNCHES:
            issued.setdefault((span.kind, span.fqn), []).append(span.begin)
        elif span.kind in _ENDS and issued.get((_ENDS[span.kind], span.fqn)):
            kind, moved = _ENDS[span.kind], plan.group(span.fqn).moved
            begin = max(free, issued[kind, span.fqn].pop(0))
            nbytes = sum(moved.gather if kind is Kind.UNSHARD else moved.reduce)
            waited = span.end - span.begin > _LEAST_WAIT * (span.end - begin)
            yield _Flight(kind, span.fqn, nbytes, max(0.0, span.end - begin), waited)
            free = span.end if waited else free
