"""The schedule with the least exposed communication, for given kept groups and a budget.

The search runs the simulation (`simulation.py`) from event to event; an event is the forward or the backward of a
group. The choices are how many gathers are issued at each event, in the order in which they are needed, and how many
reductions are waited for before the next one is issued. States that have issued and waited for equally much have the
same live bytes. A state is dropped if another of these is nowhere later, or if it cannot end in time, given the compute
and the transfers still to come. Nothing else is dropped, so the result is the optimum, unless a width bounds how many
states are followed at once (a beam search).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import le
from typing import NamedTuple

from .schedule import MAX_REDUCTIONS, Step, backward_order, forward_order
from .simulation import Sizes, Times

_STATE_WORK = 16  # what a state costs, in comparisons

Path = tuple["Path | None", tuple[str, int]]  # the choices, last one first


class _State(NamedTuple):
    """Times: when compute and the link are free, gathers arrive and reductions are done; `path` has the choices."""

    now: float
    link: float
    gathers: tuple[float, ...]
    reductions: tuple[float, ...]
    path: Path | None


class _Event(NamedTuple):
    """The forward or the backward of a group.

    Attributes:
        seconds: of its compute.
        gather: the index of the gather that it needs; None if the weights are there.
        arrived: how many gathers have been waited for when it computes.
        reduction: the index of the reduction that follows it; None if none does.
        gives_up: bytes of weights that are given up at its end.
    """

    seconds: float
    gather: int | None
    arrived: int
    reduction: int | None
    gives_up: int


class _Gather(NamedTuple):
    event: int
    seconds: float


class _Reduction(NamedTuple):
    event: int
    fqn: str
    seconds: float
    queued: int  # bytes that it takes only until it is queued


class Found(NamedTuple):
    """A schedule: exposed seconds, the event that issues each gather, and by group the most reductions in flight.

    `gathers` has an entry for each gather that the step needs, first in forward, then in backward.
    """

    exposed: float
    gathers: tuple[int, ...]
    in_flight: tuple[tuple[str, int], ...]


def _sums_from(numbers: Sequence[float]) -> list[float]:
    """The sums of the numbers from index 0, 1, 2, ... on; the last one is 0."""
    return list(itertools.accumulate(reversed(numbers), initial=0.0))[::-1]


class _Ahead(NamedTuple):
    """Seconds still to come: of compute, with what follows all compute; and of reductions on the link."""

    compute: float
    reductions: float


_Progress = tuple[int, int]  # gathers that were issued, reductions that were waited for
_States = dict[_Progress, list[_State]]


class Optimum:
    """The search for one set of kept groups.

    Args:
        steps, sizes, times: the groups, each used once, and one after the other but for the root. None of them keeps
            pieces among a few ranks, waits for reductions before it gathers or is reduced only at the end; a root keeps
            its weights until the end. (The memory of the root's own reduction is not counted.)
        budget: the most bytes that may be live at once; None for no limit.
        kept: groups that stay between forward and backward.

    Attributes:
        link_seconds: seconds of all collectives.
        compute: seconds of all events.
        least: a lower bound of the exposed seconds: the transfers that must precede and follow all compute, or the
            link's seconds beyond those of compute.
        work: comparisons of two states so far; making a state counts as `_STATE_WORK` comparisons.
        is_exact: whether no state was left out that might have led to the best schedule.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        sizes: Mapping[str, Sizes],
        times: Mapping[str, Times],
        budget: int | None,
        kept: Collection[str],
    ) -> None:
        self._events: list[_Event] = []
        self._gathers: list[_Gather] = []
        self._reductions: list[_Reduction] = []
        self._weights_up_to, self._landing_up_to, self._reduced_up_to = [0], [0], [0]  # bytes of the first 0, 1, 2, ...
        for step in forward_order(steps):
            self._add_event(step, sizes[step.fqn], times[step.fqn], False, step.is_root or step.fqn in kept)
        self._turn = len(self._events)
        for step in backward_order(steps):
            self._add_event(step, sizes[step.fqn], times[step.fqn], True, step.is_root or step.fqn in kept)
        self._gathers_left = _sums_from([gather.seconds for gather in self._gathers])
        self._reductions_left = _sums_from([reduction.seconds for reduction in self._reductions])
        self._tail = sum(times[step.fqn].reduce for step in steps if step.is_root and step.trains)
        self._budget = float("inf") if budget is None else budget
        self.compute = sum(event.seconds for event in self._events)
        self.link_seconds = self._gathers_left[0] + self._reductions_left[0] + self._tail
        computing = [at for at, event in enumerate(self._events) if event.seconds]
        self._last = computing[-1] if computing else len(self._events)
        self.least = max(self._before(min(computing, default=0)) + self._behind(0), self.link_seconds - self.compute)
        self.work = 0
        self.is_exact = True
        self._most_work = self._width = float("inf")

    def _add_event(self, step: Step, size: Sizes, time: Times, backward: bool, stays: bool) -> None:
        at, gather, reduction = len(self._events), None, None
        if not (backward and stays):
            gather = len(self._gathers)
            self._gathers.append(_Gather(at, time.gather))
            self._weights_up_to.append(self._weights_up_to[-1] + size.weights)
            self._landing_up_to.append(self._landing_up_to[-1] + size.landing)
        if backward and step.trains and not step.is_root:
            reduction = len(self._reductions)
            self._reductions.append(_Reduction(at, step.fqn, time.reduce, size.queued))
            self._reduced_up_to.append(self._reduced_up_to[-1] + size.reduction - size.queued)
        seconds = time.backward if backward else time.forward
        gives_up = 0 if step.is_root or (stays and not backward) else size.weights
        self._events.append(_Event(seconds, gather, len(self._gathers), reduction, gives_up))

    def _before(self, at: int) -> float:
        """Seconds of the gathers that must precede the compute of the event `at`."""
        return sum(gather.seconds for gather in self._gathers if gather.event <= at)

    def _behind(self, at: int) -> float:
        """Seconds of reductions that follow all compute, if the events from `at` on are still to end."""
        late = max(at, self._last)
        return self._tail + sum(reduction.seconds for reduction in self._reductions if reduction.event >= late)

    def best(self, below: float, most_work: float = float("inf"), width: float = float("inf")) -> Found | None:
        """The best schedule if it leaves less than `below` seconds exposed, None else.

        Args:
            below: seconds of a schedule that is known.
            most_work: the search gives up, with None, if `work` exceeds this.
            width: how many states are kept after each event: those that can still end soonest.
        """
        self.work, self.is_exact, self._most_work, self._width = 0, True, most_work, width
        if self.least >= below:
            return None
        latest = below + self.compute
        states: _States = {(0, 0): [_State(0.0, 0.0, (), (), None)]}
        freed, left, reduced = 0, self.compute, 0  # bytes of weights given up; seconds to compute; reductions issued
        for at, event in enumerate(self._events):
            ahead = _Ahead(left + self._behind(at), self._reductions_left[reduced] + self._tail)
            states = self._sifted(self._begun(states, at, freed, reduced), ahead, latest)
            left -= event.seconds
            freed += event.gives_up
            reduced += event.reduction is not None
            ahead = _Ahead(left + self._behind(at + 1), self._reductions_left[reduced] + self._tail)
            states = self._sifted(self._ended(states, at, freed), ahead, latest)
        ends = [(max(s.now, s.link, (max(s.link, s.now) + self._tail) * (self._tail > 0)), s.path)
                for listed in states.values() for s in listed]  # fmt: skip
        end, path = min(ends, key=lambda each: each[0], default=(float("inf"), None))
        return self._outcome(end - self.compute, path) if end < latest else None

    def _outcome(self, exposed: float, path: Path | None) -> Found:
        gathers: list[int] = []
        in_flight: list[int] = []
        while path is not None:
            path, (what, number) = path
            (gathers if what == "gather" else in_flight).append(number)
        reduced = [reduction.fqn for reduction in self._reductions]
        return Found(exposed, tuple(gathers[::-1]), tuple(zip(reduced, in_flight[::-1], strict=True)))

    def _live(self, progress: _Progress, arrived: int, freed: int, reduced: int) -> int:
        """Live bytes: weights of issued gathers, less those freed, landing buffers and reductions in flight."""
        issued, settled = progress
        arrived = min(issued, arrived)
        return (
            self._weights_up_to[issued]
            - freed
            + (self._landing_up_to[issued] - self._landing_up_to[arrived])
            + (self._reduced_up_to[reduced] - self._reduced_up_to[settled])
        )

    def _begun(self, states: _States, at: int, freed: int, reduced: int) -> Iterator[tuple[_Progress, _State]]:
        """An event begins: gather what it needs, wait for that, gather ahead."""
        due = self._events[at].gather
        for start, listed in states.items():
            for state in listed:
                begun = [(start, state)]
                if due is not None:
                    if start[0] == due:
                        begun = list(self._on_demand(start, state, at, freed, reduced))
                    begun = [(p, _State(max(s.now, s.gathers[0]), s.link, s.gathers[1:], *s[3:])) for p, s in begun]
                for progress, after in begun:
                    yield from self._choices(progress, after, at, freed, reduced)

    def _on_demand(
        self, progress: _Progress, state: _State, at: int, freed: int, reduced: int
    ) -> Iterator[tuple[_Progress, _State]]:
        """The states after an event has issued the gather that it needs itself."""
        yield from self._issued(progress, state, at, progress[0], freed, reduced)

    def _ended(self, states: _States, at: int, freed: int) -> Iterator[tuple[_Progress, _State]]:
        """An event's compute is over: weights are given up, and gradients are reduced."""
        event = self._events[at]
        turn = event.reduction
        for start, listed in states.items():
            for before in listed:
                state = _State(before.now + event.seconds, *before[1:])
                if turn is None:
                    yield start, state
                    continue
                for progress, last in self._before_reduction(start, state, at, freed, turn):
                    reduction = self._reductions[turn]
                    if self._live(progress, event.arrived, freed, turn + 1) + reduction.queued <= self._budget:
                        link = max(last.now, last.link) + reduction.seconds
                        flying = (*last.reductions, link)
                        path = last.path, ("reduce", turn + 1 - progress[1])
                        yield progress, _State(last.now, link, last.gathers, flying, path)

    def _before_reduction(
        self, progress: _Progress, state: _State, at: int, freed: int, turn: int
    ) -> Iterator[tuple[_Progress, _State]]:
        """All choices of a number of reductions to wait for before the reduction `turn` is issued."""
        yield from (each for each in self._settled(progress, state, turn) if turn - each[0][1] < MAX_REDUCTIONS)

    def _choices(
        self, progress: _Progress, state: _State, at: int, freed: int, reduced: int
    ) -> Iterator[tuple[_Progress, _State]]:
        """All choices of a number of gathers to issue ahead."""
        arrived = self._events[at].arrived
        following = [(progress, state)]
        while following:
            yield following[0]
            following = list(self._issued(*following[0], at, arrived, freed, reduced))

    def _settled(self, progress: _Progress, state: _State, reduced: int) -> Iterator[tuple[_Progress, _State]]:
        yield progress, state
        while progress[1] < reduced:
            progress = progress[0], progress[1] + 1
            flying = state.reductions
            state = _State(max(state.now, flying[0]), state.link, state.gathers, flying[1:], state.path)
            yield progress, state

    def _issued(
        self, progress: _Progress, state: _State, at: int, arrived: int, freed: int, reduced: int
    ) -> Iterator[tuple[_Progress, _State]]:
        """The state with the next gather issued; none if there is none, or it may not be issued here, or does not fit.

        Args:
            progress, state: before.
            at: the event.
            arrived: how many gathers were waited for.
            freed, reduced: bytes that were given up, reductions that were issued.
        """
        if progress[0] == len(self._gathers):
            return
        gather = self._gathers[progress[0]]
        after = progress[0] + 1, progress[1]
        if gather.event >= self._turn > at or self._live(after, arrived, freed, reduced) > self._budget:
            return  # no forward gathers for backward
        link = max(state.now, state.link) + gather.seconds
        path = state.path, ("gather", at)
        yield after, _State(state.now, link, (*state.gathers, link), state.reductions, path)

    def _sifted(self, reached: Iterable[tuple[_Progress, _State]], ahead: _Ahead, latest: float) -> _States:
        """The states without those that must end too late or that another one dominates; at most `width`."""
        by_progress: dict[_Progress, dict[tuple[float, ...], tuple[float, _State]]] = {}
        for progress, state in reached:
            self.work += _STATE_WORK
            if self.work > self._most_work:
                self.is_exact = False
                return {}
            soonest = max(state.now + ahead.compute, state.link + ahead.reductions + self._gathers_left[progress[0]])
            if soonest < latest:
                times = (state.now, state.link, *state.gathers, *state.reductions)
                by_progress.setdefault(progress, {}).setdefault(times, (soonest, state))
        left = [
            (each[times][0], progress, times, each[times][1])
            for progress, each in by_progress.items()
            for times in self._undominated(sorted(each))
        ]
        if len(left) > self._width:
            self.is_exact = False
            left = sorted(left, key=lambda one: one[:3])[: int(self._width)]
        states: _States = {}
        for _, progress, _, state in left:
            states.setdefault(progress, []).append(state)
        return states

    def _undominated(self, candidates: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
        """The tuples of times, given sorted, that no other one dominates: none is nowhere later than they are."""
        kept: list[tuple[float, ...]] = []
        for times in candidates:
            for other in kept:
                self.work += 1
                if all(map(le, other, times)):
                    break
            else:
                kept.append(times)
            if self.work > self._most_work:
                self.is_exact = False
                break
        return kept
