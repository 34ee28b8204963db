"""Exposed communication and its causes: each wait for a gather or a reduction in the simulation of a plan.

A gather cannot be hidden if nothing computes before it, and a reduction cannot be hidden if nothing computes after it.
In other cases the cause of the wait for a gather is one of these:

- The link was busy and could not run the gather earlier.
- The gather was issued too late, because of the policy, the budget, or memory that was still in use.
- The gather had to wait for the refresh of the node's compute copy, from which it reads.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from .course import COMPUTE, LAUNCHES, WAITS
from .plan import UNBOUNDED, ShardPlan
from .schedule import MARKS, Action, Kind
from .simulation import Trace


class Cause(StrEnum):
    """Why compute waits for a gather or a reduction."""

    FIRST = "first"  # nothing computes before the gather in forward
    TURN = "turn"  # nothing computes before the gather in backward
    LINK = "link"  # the link was busy with other collectives during the compute that could have hidden this one
    LATENCY = "latency"  # as for LINK, and most of the collective's duration does not depend on its bytes
    POLICY = "policy"  # the gather is issued too late, because of the prefetch policy
    BUDGET = "budget"  # the gather is issued too late, because it would not fit into the budget earlier
    REFRESH = "refresh"  # the refresh of the node's compute copy ends only then
    MEMORY = "memory"  # the memory for the collective is in use until then
    LAST = "last"  # nothing computes after the reduction
    IN_FLIGHT = "in flight"  # the next reduction is issued only after this one has ended
    REDUCES_FIRST = "reduces first"  # backward gathers only after reductions have ended


@dataclass(frozen=True, slots=True)
class Wait:
    """A gather or a reduction for which compute waits.

    Attributes:
        kind: `UNSHARD` or `REDUCE`.
        fqn: the group.
        backward: whether the wait is in or after backward; otherwise it is in forward.
        cause: the cause of the wait.
        waited: seconds of exposed communication.
        takes: duration in seconds without contention on the links.
        fixed: the part of `takes`, in seconds, beyond the time of its bytes at the rate of the plan's large
            collectives; 0 for a large collective.
        hidden: seconds of compute between issue and wait.
        queued: seconds for which the collective waits for other collectives on the link.
        idle: for a gather, seconds for which the link is idle before it, in the same forward or backward.
        issued_in: FQN of the group whose forward or backward had begun last when the collective was issued.
        behind: the last collective that it waited for on the link (kind and group); None if it did not wait.
        holds_up: FQN of the group whose gather or reduction is issued right after the wait; None if there is none.
    """

    kind: Kind
    fqn: str
    backward: bool
    cause: Cause
    waited: float
    takes: float
    fixed: float
    hidden: float
    queued: float
    idle: float
    issued_in: str
    behind: Action | None = None
    holds_up: str | None = None


class _Flight(NamedTuple):
    """A collective: the event and time of issue, its begin and end on the link, and the collective before it."""

    action: Action
    event: int
    issued_in: str
    issued: float
    begin: float
    end: float
    behind: Action | None


def waits_of(plan: ShardPlan) -> tuple[Wait, ...]:
    """The waits of compute in a step of a plan, in order. They add up to its exposed communication.

    Args:
        plan: a plan with costs. Without costs the result is empty.
    """
    step = plan.trace()
    return () if step is None else tuple(_Reader(plan, step).waits())


class _Reader:
    """Extracts the waits of a step from its trace."""

    def __init__(self, plan: ShardPlan, step: Trace) -> None:
        self.plan, self.timed = plan, plan.timed()
        self.turn_index = next((at for at, each in enumerate(self.timed) if each.kind is Kind.BACKWARD), -1)
        self.link = [span for span in step.spans if span[0] in LAUNCHES]
        self.compute = [span for span in step.spans if span[0] in COMPUTE]
        self.refreshed, self.outer_reductions = _on_outer_link(step)
        self.began = {(kind, fqn, end): begin for kind, fqn, begin, end in step.spans if kind in WAITS}
        self.done = _times_of(self.timed, step)
        self.turn = _end_of_forward(self.compute, self.done[: max(0, self.turn_index)])
        self.rates = {kind: _rate(plan, kind) for kind in LAUNCHES}
        self.unbounded = _unbounded_events(plan)

    def waits(self) -> Iterator[Wait]:
        flying: dict[tuple[Kind, str], deque[_Flight]] = {}
        uses: Counter[tuple[bool, str]] = Counter()  # gathers of each group, by direction
        for at, flight in enumerate(_flights(self.timed, self.done, self.link)):
            action, now = self.timed[at], self.done[at]
            if flight is not None:
                flying.setdefault((action.kind, action.fqn), deque()).append(flight)
            waited = now - self.began.get((_WAIT_FOR.get(action.kind, action.kind), action.fqn, now), now)
            if action.kind in _ENDS:
                ended = flying[_ENDS[action.kind], action.fqn].popleft()
                use = self._backward(at), action.fqn
                number, uses[use] = uses[use], uses[use] + (action.kind is Kind.WAIT)
                if waited > _NOISE:
                    yield self._wait(at, ended, waited, number)
            elif action.kind is Kind.REDUCE and waited > _NOISE and flight is not None:
                yield replace(self._wait(at, flight, waited, 0), cause=Cause.MEMORY)

    def _backward(self, at: int) -> bool:
        return 0 <= self.turn_index < at

    def _wait(self, at: int, flight: _Flight, waited: float, number: int) -> Wait:
        kind, fqn = flight.action.kind, flight.action.fqn
        needed, takes = self.done[at] - waited, flight.end - flight.begin
        nbytes, (rate, large) = _moved(self.plan, kind, fqn), self.rates[kind]
        queued = flight.begin - flight.issued
        start = self.turn if self._backward(at) else 0.0
        following = self._following(at)
        wait = Wait(
            kind,
            fqn,
            self._backward(at),
            Cause.LINK,
            waited,
            takes,
            max(0.0, takes - nbytes * rate) if nbytes <= large else 0.0,
            _overlap(self.compute, min(flight.issued, flight.begin), needed),
            queued if queued > _NOISE else 0.0,
            max(0.0, flight.begin - start - _overlap(self.link, start, flight.begin)),
            flight.issued_in,
            flight.behind if queued > _NOISE else None,
            following.fqn if following is not None and following.kind in LAUNCHES else None,
        )
        if kind is Kind.REDUCE:
            is_over = not _overlap(self.compute, self.done[at], self.compute[-1][-1] if self.compute else 0.0)
            takes += self.outer_reductions.get(fqn, 0.0)
            return replace(wait, cause=_of_reduction(wait, following, is_over), takes=takes)
        return self._of_gather(wait, flight, needed, number)

    def _following(self, at: int) -> Action | None:
        """The first action after index `at` that is not a wait."""
        return next((each for each in self.timed[at + 1 :] if each.kind not in WAITS), None)

    def _of_gather(self, wait: Wait, flight: _Flight, needed: float, number: int) -> Wait:
        """Add the cause of a wait for a gather."""
        if abs(flight.begin - self.refreshed.get(wait.fqn, -1.0)) < _NOISE:
            return replace(wait, cause=Cause.REFRESH, behind=Action(Kind.REFRESH, wait.fqn))
        return replace(wait, cause=self._cause_of_gather(wait, flight, needed, number))

    def _cause_of_gather(self, wait: Wait, flight: _Flight, needed: float, number: int) -> Cause:
        start = self.turn if wait.backward else 0.0
        if not _overlap(self.compute, start, needed):
            return Cause.TURN if wait.backward else Cause.FIRST
        if wait.idle < 0.5 * wait.waited:
            return Cause.LATENCY if wait.fixed > 0.5 * wait.takes else Cause.LINK
        if self.plan.costs is not None and self.plan.costs.streams:
            return Cause.MEMORY
        free = self.unbounded.get((wait.backward, wait.fqn, number), flight.event)
        return Cause.BUDGET if self.plan.prefetch.kind == "auto" or free < flight.event else Cause.POLICY


def _of_reduction(wait: Wait, following: Action | None, is_over: bool) -> Cause:
    """The cause of a wait for a reduction, from the next action and whether all compute of the step has ended."""
    if is_over:
        return Cause.LINK if wait.hidden and wait.queued > 0.5 * wait.waited else Cause.LAST
    gathers = following is not None and following.kind is Kind.UNSHARD
    return Cause.REDUCES_FIRST if gathers else Cause.IN_FLIGHT


_NOISE = 1e-12  # seconds; rounding errors of differences of sums
_WAIT_FOR = {Kind.REDUCE: Kind.REDUCED}  # how a trace names waits for the memory of a reduction
_ENDS = {Kind.WAIT: Kind.UNSHARD, Kind.REDUCED: Kind.REDUCE}
_Spans = Sequence[tuple[Kind, str, float, float]]


def _on_outer_link(step: Trace) -> tuple[dict[str, float], dict[str, float]]:
    """By group, the time at which its refresh ends, and the seconds of its reduction on the outer link."""
    ended = [(fqn, begin, end) for kind, fqn, begin, end in step.outer if kind is Kind.REFRESH]
    refreshed = {fqn: end for fqn, begin, end in ended if end - begin > _NOISE}
    return refreshed, {fqn: end - begin for kind, fqn, begin, end in step.outer if kind is Kind.REDUCE}


def _times_of(timed: Sequence[Action], step: Trace) -> list[float]:
    """The time in seconds at which each action ended. A mark has the time of the action before it."""
    done, now, times = iter(step.done), 0.0, []
    for action in timed:
        now = now if action.kind in MARKS else next(done)
        times.append(now)
    return times


def _end_of_forward(compute: _Spans, done: Sequence[float]) -> float:
    """The end of forward in seconds: the last compute of forward or the last action before backward."""
    return max([*done, *(end for kind, *_, end in compute if kind is Kind.FORWARD)], default=0.0)


def _flights(timed: Sequence[Action], done: Sequence[float], link: _Spans) -> Iterator[_Flight | None]:
    """For each action, the collective that it issues, or None."""
    spans, event, issued_in = iter(link), -1, ""
    before: Action | None = None
    for action, now in zip(timed, done, strict=True):
        if action.kind in COMPUTE:
            event, issued_in = event + 1, action.fqn
        if action.kind in LAUNCHES:
            _, _, begin, end = next(spans)
            yield _Flight(action, event, issued_in, now, begin, end, before)
            before = action
        else:
            yield None


def _moved(plan: ShardPlan, kind: Kind, fqn: str) -> int:
    moved = plan.group(fqn).moved
    return sum(moved.gather if kind is Kind.UNSHARD else moved.reduce)


def _rate(plan: ShardPlan, kind: Kind) -> tuple[float, int]:
    """Seconds per byte of the fastest large collective of a kind, and the threshold in bytes for large collectives."""
    times = plan.times() or {}
    sent = [
        (_moved(plan, kind, fqn), each.gather if kind is Kind.UNSHARD else each.reduce) for fqn, each in times.items()
    ]
    large = max((nbytes for nbytes, _ in sent), default=0) // 2
    return min((seconds / nbytes for nbytes, seconds in sent if nbytes > large), default=0.0), large


def _unbounded_events(plan: ShardPlan) -> dict[tuple[bool, str, int], int]:
    """The event that would issue each gather under the same policy without a budget.

    Keys: whether the gather is in backward, its group, and its index among the group's gathers there.
    """
    if plan.pool.budget is None or plan.prefetch.kind == "auto":
        return {}
    events: dict[tuple[bool, str, int], int] = {}
    event, backward = -1, False
    uses: Counter[tuple[bool, str]] = Counter()
    for action in plan.with_policies(pool=UNBOUNDED).timed():
        backward |= action.kind is Kind.BACKWARD
        event += action.kind in COMPUTE
        if action.kind is Kind.UNSHARD:
            events[backward, action.fqn, uses[backward, action.fqn]] = event
            uses[backward, action.fqn] += 1
    return events


def _overlap(spans: _Spans, begin: float, end: float) -> float:
    """Seconds of the spans between two times."""
    return sum(max(0.0, min(end, last) - max(begin, first)) for _, _, first, last in spans)
