"""The scheduler: choose what each forward and backward prefetches and which groups stay unsharded, under a budget.

The schedule is made together with the plan, from sizes and, if known, times. The engine follows it.

With times, the `auto` policy searches for the schedule with the least exposed communication by hill climbing over sets
of kept groups. `Optimum` finds the best schedule of one set. It does not support reductions before gathers or after
backward, weights that are resharded to a few ranks, and groups that are nested or used again. In these cases, gathers
are issued as early as memory allows.

Issuing gathers as early as memory allows minimizes waits: no memory is freed later, and no other gather is delayed,
because gathers keep their order. Each gather is then delayed to the last event at which it still arrives in time. It
thus holds memory for the shortest time and delays reductions on the link as little as possible.

The search is limited by work, not by time, because all ranks must find the same schedule.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from .._policies import PrefetchPolicy
from ..errors import PoolBudgetError
from .arena import Lifetime, solve
from .costs import Sizes, Times, held
from .fitting import SMALL, Bare, bare_step, by_bytes, by_depth, fitting, levels
from .optimum import Found, Optimum
from .schedule import MARKS, MAX_REDUCTIONS, Action, Kind, Schedule, Step, forward_order, kept_by_setting, timed_step
from .simulation import Timeline, lifetimes, live_bytes, simulate

_MOST_WORK = 1_200_000  # limit for one schedule, in comparisons (see `Optimum.work`): less than a second
_ACTION_WORK = 10  # cost of generating an action, in comparisons
_WIDTH = 16  # states of a search for one set of groups; more states did not help for the models of bench/overlap.py
_REMEMBERED = 16  # cached schedules of `auto`, reused by phases of one order and by plans made from the same times
_made: OrderedDict[object, Schedule] = OrderedDict()


def scheduled(
    steps: Sequence[Step],
    sizes: Mapping[str, Sizes],
    policy: PrefetchPolicy,
    budget: int | None = None,
    times: Mapping[str, Times] | None = None,
) -> Schedule:
    """Make the schedule of a training step.

    Args:
        steps: the uses of groups in the order of their forwards.
        sizes: bytes of each group.
        policy: how far to prefetch. Without times, `auto` prefetches one module.
        budget: limit of live bytes (weights, landing buffers and reductions). None for no limit. `auto` without a
            budget uses at most the bytes that prefetching one module uses if reductions keep their memory to their end.
        times: seconds per use of each group, if known.

    Raises:
        PoolBudgetError: a group does not fit. The error contains the least budget that works.
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
    """The schedule of `auto`, cached by its inputs."""
    asked = tuple((step, sizes[step.fqn], times[step.fqn]) for step in steps), budget
    schedule = _made.pop(asked, None) or _least_exposed(steps, sizes, times, budget)
    _made[asked] = schedule
    while len(_made) > _REMEMBERED:
        _made.popitem(last=False)
    return schedule


def _least_exposed(
    steps: Sequence[Step], sizes: Mapping[str, Sizes], times: Mapping[str, Times], budget: int | None
) -> Schedule:
    """The schedule with the least exposed communication. With streams, the arena's memory reuse is included."""
    auto = Auto(steps, sizes, times, budget)
    best = auto.best()
    if not any(size.queued for size in sizes.values()):
        return best.schedule
    tries = [best]
    with contextlib.suppress(PoolBudgetError):  # it may not fit if reductions keep their memory
        tries.append(Auto(steps, held(sizes, sizes), times, auto.budget).best())
    tries.sort(key=lambda each: each.exposed)
    # The search ignores the offsets of buffers. With streams, compute also waits for memory: it cannot pack gradients
    # into memory that an earlier reduction still reads. Schedules are therefore simulated again, with an arena, until
    # one loses no time by this.
    bare = fitting(steps, sizes, budget)
    schedules = [*(each.schedule for each in tries), bare.under(by_depth(bare, 1), budget)[0]]
    enough = tries[0].exposed + auto.slack
    least: _Try | None = None
    for each in itertools.chain.from_iterable(map(auto.placed, schedules)):
        if least is None or each.exposed < least.exposed:
            least = each
        if least.exposed <= enough:
            break
    assert least is not None
    return least.schedule


class _Try(NamedTuple):
    """A schedule and its simulated results: exposed seconds, and peak of live bytes."""

    exposed: float
    peak: int
    held: int  # live bytes summed over the actions; larger if groups are gathered earlier than needed
    schedule: Schedule
    timeline: Timeline


def _is_chain(steps: Sequence[Step]) -> bool:
    """Whether groups run one after another, each once, and are reduced when they end."""
    plain = not any(step.around or step.turn is not None for step in steps)
    return plain and len({step.fqn for step in steps}) == len(steps)


def _one_ahead_bytes(steps: Sequence[Step], sizes: Mapping[str, Sizes]) -> int:
    """Peak bytes of prefetching one module if reductions keep their memory to their end. Independent of the device."""
    bare = fitting(steps, held(sizes, sizes), None)
    return bare.peak_of(bare.under(by_depth(bare, 1), None)[0])


class Auto:
    """The search for the schedule with the least exposed communication; among near-ties, that with the least memory."""

    def __init__(
        self, steps: Sequence[Step], sizes: Mapping[str, Sizes], times: Mapping[str, Times], budget: int | None
    ) -> None:
        self.steps, self.sizes, self.times = steps, sizes, times
        bare = fitting(steps, sizes, budget)
        self.kept = bare.schedule.kept
        # Groups that the settings keep are always kept if all of them fit into the budget. Otherwise, keeping other
        # groups may be better, so only the root is always kept.
        fits = self.kept == kept_by_setting(steps)
        self.fixed = {step.fqn for step in steps if step.fqn in self.kept and (fits or step.is_root)}
        self.budget = _one_ahead_bytes(steps, sizes) if budget is None else budget
        self.reduces_first = any(step.reduces_first for step in steps)
        self.work = 0
        self.slack = 0.002 * sum(times[step.fqn].forward + times[step.fqn].backward for step in steps)
        self.gain = self.slack / max(1, len(steps))
        chain = _is_chain(steps)
        self.searches = chain and all(
            not (step.reduces_first or step.shrinks or (step.is_root and step.fqn not in self.kept)) for step in steps
        )
        self.least = Optimum(steps, sizes, times, self.budget, {step.fqn for step in steps}).least if chain else 0.0

    def best(self) -> _Try:
        """Climb until no variation of the kept groups is better, or until the work limit is reached."""
        best = self._tried(self.kept)
        assert best is not None
        seen = {frozenset(self.kept)}
        while (better := self._better_neighbour(best, seen)) is not None:
            best = better
        return best

    def _better_neighbour(self, best: _Try, seen: set[frozenset[str]]) -> _Try | None:
        """The best schedule of the first batch of variations that improves on `best`. Sets in `seen` are skipped."""
        start = best
        for alike in self._neighbours(start):
            for kept in alike:
                if self._is_over(best):
                    return None if best is start else best
                if kept not in seen:
                    seen.add(kept)
                    best = self._better(kept, best) or best
            if best is not start:
                return best
        return None

    def _is_over(self, best: _Try) -> bool:
        return self.work > _MOST_WORK or best.exposed - self.gain <= self.least

    def _better(self, kept: Collection[str], best: _Try) -> _Try | None:
        """The best schedule that keeps these groups, or None if it is not better than `best`."""
        listed = [fqn for fqn in self._names() if fqn in kept]
        if self.searches:
            search = Optimum(self.steps, self.sizes, self.times, self.budget, listed)
            optimum = search.best(best.exposed - self.gain, _MOST_WORK - self.work, _WIDTH)
            self.work += search.work + _ACTION_WORK * len(self.steps)
            tries = [] if optimum is None else self._followed(listed, optimum)
            one = min(tries, key=lambda each: (each.exposed, each.held), default=None)
        else:
            one = self._tried(listed)
        return one if one is not None and one.exposed < best.exposed - 0.5 * self.gain else None

    def _followed(self, kept: Sequence[str], optimum: Found) -> Iterator[_Try]:
        """The schedule that was found, and a variant with gathers as late as possible, if they fit into the budget."""
        fewer = tuple((fqn, number) for fqn, number in optimum.in_flight if number != MAX_REDUCTIONS)
        bare = Bare(self.steps, self.sizes, Schedule((), (), tuple(kept), in_flight=fewer))
        early = self._judged(bare.scheduled(optimum.gathers))
        late = self._judged(bare.scheduled(self._put_off(bare, early, optimum.gathers)))
        yield from (each for each in (early, late) if each.peak <= self.budget)

    def _names(self) -> list[str]:
        """The groups in the order of their first forwards."""
        return list(dict.fromkeys(step.fqn for step in forward_order(self.steps)))

    def _neighbours(self, best: _Try) -> Iterator[Sequence[frozenset[str]]]:
        """Variations of the kept groups, in batches. Groups that save the most time per byte come first."""
        kept = frozenset(best.schedule.kept)
        order = self._names()
        saved = {fqn: self._saved(best, fqn) for fqn in order}
        more = sorted((fqn for fqn in order if fqn not in kept), key=lambda fqn: (-saved[fqn], -order.index(fqn)))
        less = [fqn for fqn in order if fqn in kept and fqn not in self.fixed]
        batches = []
        batch = len(more)
        while batch > 1:  # first try to keep many groups at the same time
            batches.append(kept | set(more[:batch]))
            batch //= 2
        yield batches
        yield from ([kept | {fqn}] for fqn in more)
        yield from ([kept | set(pair)] for pair in itertools.combinations(more, 2))
        yield from ([kept - {out} | {fqn}] for out in less for fqn in more)

    def _saved(self, best: _Try, fqn: str) -> float:
        """Seconds of wait for the group's gather in backward, per byte that keeping the group would hold."""
        waited = best.timeline.waits.get(Action(Kind.BACKWARD, fqn), 0.0) or 1e-3 * self.times[fqn].gather
        return waited / max(1, self.sizes[fqn].weights)

    def _tried(self, kept: Sequence[str]) -> _Try | None:
        """The best schedule that keeps these groups, by heuristics. None if no schedule fits into the budget."""
        tries: list[_Try] = []
        most = float("inf")
        same = all(step.reduces_first for step in self.steps)  # backward then waits for reductions first at every level
        for level, (_, first, stays) in enumerate(levels(self.steps)):
            if same and first and stays:
                continue
            bare = bare_step(self.steps, self.sizes, kept, level)
            if bare.peak <= self.budget:
                if tries and len(bare.actions) > SMALL:
                    break
                made = self._by_rules(bare)
                most = min(most, made[0].exposed)  # never worse than prefetching one module
                tries += made
            self.work += _ACTION_WORK * bare.work
        if not tries:
            return None
        most = min(most, min(each.exposed for each in tries) + self.slack)
        return min((each for each in tries if each.exposed <= most), key=self._price)

    def _by_rules(self, bare: Bare) -> list[_Try]:
        """Schedules that prefetch one module, as early as memory allows, as late as possible, and one event earlier."""
        one = self._judged(bare.under(by_depth(bare, 1), self.budget)[0])
        schedule, issued = bare.under([bare.first_event(gather) for gather in bare.gathers], self.budget)
        early = self._judged(schedule)
        late = self._put_off(bare, early, issued)
        sooner = [max(event - 1, least) for event, least in zip(late, issued, strict=True)]
        return [one, early, *(self._judged(bare.under(each, self.budget)[0]) for each in (late, sooner))]

    def _price(self, candidate: _Try) -> tuple[bool, int, int]:
        """The cost of a schedule apart from time, for comparison.

        Schedules in which backward waits for reductions before it gathers are the last choice. Their waits are in the
        middle of a backward, and the prediction of that time is the least accurate.
        """
        unsure = candidate.schedule.reduces_first and not self.reduces_first
        return unsure, candidate.peak, candidate.held

    def _judged(self, schedule: Schedule) -> _Try:
        actions = timed_step(self.steps, schedule)
        self.work += _ACTION_WORK * len(actions)
        timeline = simulate(actions, self.times)
        live = live_bytes(lifetimes(actions, self.sizes), len(actions))
        return _Try(timeline.exposed, max(live), sum(live), schedule, timeline)

    def placed(self, schedule: Schedule) -> Iterator[_Try]:
        """A schedule with an arena, and a variant with as many held reductions (`Schedule.holds`) as fit."""
        actions = timed_step(self.steps, schedule)
        leasing = [action for action in actions if action.kind not in MARKS]
        for holds in dict.fromkeys([(), self._holds(leasing)]):
            lives = lifetimes(leasing, held(self.sizes, holds))
            live = live_bytes(lives, len(leasing))
            timeline = simulate(actions, self.times, solve(lives))
            yield _Try(timeline.exposed, max(live), sum(live), replace(schedule, holds=holds), timeline)

    def _holds(self, actions: Sequence[Action]) -> tuple[str, ...]:
        """Groups whose reductions can keep their memory to their end within the budget, chosen greedily in order."""
        live = live_bytes(lifetimes(actions, self.sizes), len(actions))
        longer: dict[str, list[Lifetime]] = {}
        for life in lifetimes(actions, held(self.sizes, self.sizes)):
            what, _, fqn = life.name.partition(" ")
            if what == "reduction" and self.sizes[fqn].queued:
                longer.setdefault(fqn, []).append(life)
        holds = []
        for fqn, lives in longer.items():
            more = list(live)
            for life in lives:
                for at in range(life.opened + 1, life.closed):
                    more[at] += life.nbytes
            if max(more) <= self.budget:
                holds.append(fqn)
                live = more
        return tuple(holds)

    def _put_off(self, bare: Bare, early: _Try, issued: Sequence[int]) -> list[int]:
        """For each gather, the last event that can issue it so that it arrives before its event begins in `early`."""
        begins = early.timeline.begins
        events, latest = list(issued), float("inf")
        shrunk = {action.fqn for action in bare.actions if action.kind is Kind.SHRINK}
        for index in reversed(range(len(events))):
            gather = bare.gathers[index]
            times = self.times[gather.fqn]
            small = gather.fqn in shrunk and gather.event >= bare.first_backward
            latest = min(latest, begins[gather.event]) - (times.small_gather if small else times.gather)
            last = bisect_right(begins, latest + 1e-12) - 1
            events[index] = max(issued[index], min(last, gather.event))
        return events
