"""Search for the schedule with the least exposed communication, for a given set of kept groups and a budget.

The search runs the simulation (`simulation.py`) event by event. An event is the forward or backward of a group. It
chooses how many gathers to issue at each event, in the order in which they are needed, and how many reductions to wait
for before the next one is issued. States with the same number of issued gathers and finished reductions have the same
live bytes. A state is dropped in two cases:

- In another state with the same numbers, none of the times is later (it dominates the state).
- The state cannot end in time, given the remaining compute and transfers.

The result is therefore optimal, unless a width limits the number of states (a beam search).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import le
from typing import NamedTuple

from .costs import Sizes, Times
from .schedule import MAX_REDUCTIONS, Step, backward_order, forward_order

_STATE_WORK = 16  # cost of creating a state, in comparisons

Path = tuple["Path | None", tuple[str, int]]  # linked list of choices, last choice first


class _State(NamedTuple):
    """Times in seconds at which compute and link become free, gathers arrive and reductions end, and the choices."""

    now: float
    link: float
    gathers: tuple[float, ...]
    reductions: tuple[float, ...]
    path: Path | None


class _Event(NamedTuple):
    """The forward or the backward of a group.

    Attributes:
        seconds: duration of its compute.
        gather: index of the gather that it needs; None if the weights are already unsharded.
        arrived: number of gathers that have been waited for when it computes.
        reduction: index of the reduction that follows it; None if there is none.
        gives_up: bytes of weights that are freed at its end.
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
    queued: int  # bytes that are leased only until the reduction is queued


class Found(NamedTuple):
    """A schedule.

    Attributes:
        exposed: seconds of exposed communication.
        gathers: for each gather of the step, in forward and then in backward, the event that issues it.
        in_flight: by group, the limit of reductions in flight.
    """

    exposed: float
    gathers: tuple[int, ...]
    in_flight: tuple[tuple[str, int], ...]


def _sums_from(numbers: Sequence[float]) -> list[float]:
    """The suffix sums of the numbers, ending with 0."""
    return list(itertools.accumulate(reversed(numbers), initial=0.0))[::-1]


class _Ahead(NamedTuple):
    """Remaining seconds: of compute and the reductions after it, and of reductions on the link."""

    compute: float
    reductions: float


_Progress = tuple[int, int]  # number of issued gathers, number of reductions that have been waited for
_States = dict[_Progress, list[_State]]


class Optimum:
    """The search for one set of kept groups.

    Args:
        steps, sizes, times: the groups. Each is used once, and they run one after another inside the root. No group is
            resharded to a few ranks, waits for reductions before it gathers, or is reduced after the whole backward.
            The root stays unsharded until the end. (The memory of the root's own reduction is not counted.)
        budget: limit of live bytes; None for no limit.
        kept: groups that stay unsharded between forward and backward.

    Attributes:
        link_seconds: total seconds of all collectives.
        compute: total seconds of all events.
        least: a lower bound of the exposed seconds: the transfers that must precede and follow all compute, or the
            excess of `link_seconds` over `compute`.
        work: number of comparisons of two states. Creating a state counts as `_STATE_WORK` comparisons.
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
        """Seconds of the gathers that must end before event `at` computes."""
        return sum(gather.seconds for gather in self._gathers if gather.event <= at)

    def _behind(self, at: int) -> float:
        """Seconds of the reductions after all compute, if the events from index `at` have not ended yet."""
        late = max(at, self._last)
        return self._tail + sum(reduction.seconds for reduction in self._reductions if reduction.event >= late)

    def best(self, below: float, most_work: float = float("inf"), width: float = float("inf")) -> Found | None:
        """Find the best schedule.

        Args:
            below: exposed seconds of a known schedule.
            most_work: limit of `work`. If it is exceeded, the search ends and returns None.
            width: number of states that are kept after each event, ordered by the earliest possible end.

        Returns:
            The best schedule, or None if it does not have less than `below` exposed seconds.
        """
        self.work, self._most_work, self._width = 0, most_work, width
        if self.least >= below:
            return None
        latest = below + self.compute
        states: _States = {(0, 0): [_State(0.0, 0.0, (), (), None)]}
        freed, left, reduced = 0, self.compute, 0  # freed bytes, remaining compute seconds, issued reductions
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
        """Live bytes: unsharded weights, landing buffers and reductions in flight."""
        issued, settled = progress
        arrived = min(issued, arrived)
        return (
            self._weights_up_to[issued]
            - freed
            + (self._landing_up_to[issued] - self._landing_up_to[arrived])
            + (self._reduced_up_to[reduced] - self._reduced_up_to[settled])
        )

    def _begun(self, states: _States, at: int, freed: int, reduced: int) -> Iterator[tuple[_Progress, _State]]:
        """The states after an event has begun: it issues its own gather if needed, waits for it, and prefetches."""
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
        """The states after an event has issued its own gather."""
        yield from self._issued(progress, state, at, progress[0], freed, reduced)

    def _ended(self, states: _States, at: int, freed: int) -> Iterator[tuple[_Progress, _State]]:
        """The states after an event's compute has ended: weights are freed, and gradients are reduced."""
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
        """All choices for the number of reductions to wait for before the reduction `turn` is issued."""
        yield from (each for each in self._settled(progress, state, turn) if turn - each[0][1] < MAX_REDUCTIONS)

    def _choices(
        self, progress: _Progress, state: _State, at: int, freed: int, reduced: int
    ) -> Iterator[tuple[_Progress, _State]]:
        """All choices for the number of gathers to prefetch."""
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
        """Yield the state after the next gather is issued. Yields nothing if there is none, or if it cannot be issued.

        Args:
            progress, state: the state before.
            at: the event.
            arrived: number of gathers that have been waited for.
            freed: bytes of freed weights.
            reduced: number of issued reductions.
        """
        if progress[0] == len(self._gathers):
            return
        gather = self._gathers[progress[0]]
        after = progress[0] + 1, progress[1]
        if gather.event >= self._turn > at or self._live(after, arrived, freed, reduced) > self._budget:
            return  # a forward does not prefetch for backward
        link = max(state.now, state.link) + gather.seconds
        path = state.path, ("gather", at)
        yield after, _State(state.now, link, (*state.gathers, link), state.reductions, path)

    def _sifted(self, reached: Iterable[tuple[_Progress, _State]], ahead: _Ahead, latest: float) -> _States:
        """Remove states that cannot end in time, and dominated states. Keep at most `width` states."""
        by_progress: dict[_Progress, dict[tuple[float, ...], tuple[float, _State]]] = {}
        for progress, state in reached:
            self.work += _STATE_WORK
            if self.work > self._most_work:
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
            left = sorted(left, key=lambda one: one[:3])[: int(self._width)]
        states: _States = {}
        for _, progress, _, state in left:
            states.setdefault(progress, []).append(state)
        return states

    def _undominated(self, candidates: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
        """The tuples of times that no other tuple dominates, from sorted candidates.

        A tuple dominates another if none of its times is later.
        """
        kept: list[tuple[float, ...]] = []
        for times in candidates:
            for other in kept:
                self.work += 1
                if all(map(le, other, times)):
                    break
            else:
                kept.append(times)
            if self.work > self._most_work:
                break
        return kept
