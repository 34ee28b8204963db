"""The scheduler: what each forward and backward gathers ahead, and which groups keep their weights, under a budget.

Everything is decided when the plan is made, from sizes and, where known, from times; the engine only follows. In the
order of precedence, what yields to a budget is: gathers ahead, then reductions in flight, then kept weights. What a
step needs even so, each group alone with the root, is the least budget that works.

A gather is at its best as early as memory allows: that frees no byte later and delays no other gather, for they keep
their order. From there each is put off to the last event that still lets it arrive in time, which takes memory for as
short as possible and the link from reductions as little as possible.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ._errors import PoolBudgetError
from ._optimum import Found, Optimum, sets_to_keep
from ._policies import PrefetchPolicy
from ._schedule import (
    MAX_REDUCTIONS,
    ROOT_NAME,
    Action,
    Kind,
    Schedule,
    Step,
    forward_order,
    kept_by_setting,
    timed_step,
)
from ._simulation import Sizes, Timeline, Times, lifetimes, live_bytes, simulate

_LEVELS = ((MAX_REDUCTIONS, False), (1, False), (1, True))  # reductions in flight; whether they come first
_SMALL = 160  # actions of a step up to which what costs more than it mostly gains is tried as well
_MOST_WORK = 1_500_000  # of all searches for one schedule, in comparisons (see `Optimum.work`): less than a second
_ACTION_WORK = 10  # what an action that is written down costs, in comparisons
_WIDTHS = (16, 64, 512)  # states of a search: at first many sets of groups are tried, then some more closely
_MOST_GROUPS = 12  # that it may keep or not: more have too many sets


class _Gather(NamedTuple):
    """A gather of a step in which nothing is gathered ahead.

    Attributes:
        event: which forward or backward needs it, counted from 0.
        fqn: of its group.
        nbytes: it takes until it is waited for.
        place: of its action.
    """

    event: int
    fqn: str
    nbytes: int
    place: int


class _Bare:
    """A step in which nothing is gathered ahead: what is kept, how many reductions fly, and what memory that takes."""

    def __init__(self, steps: Sequence[Step], sizes: Mapping[str, Sizes], schedule: Schedule) -> None:
        self.steps, self.sizes, self.schedule = steps, sizes, schedule
        self.actions = timed_step(steps, schedule)
        self.live = live_bytes(lifetimes(self.actions, sizes), len(self.actions))
        self.peak = max(self.live, default=0)
        self.events: list[Action] = []
        self.issues: list[int] = []  # behind which action each event gathers ahead
        self.gathers: list[_Gather] = []
        shrunk: set[str] = set()
        for place, action in enumerate(self.actions):
            if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                self.events.append(action)
                self.issues.append(place)
            elif action.kind is Kind.SHRINK:
                shrunk.add(action.fqn)
            elif action.kind is Kind.UNSHARD:
                size = sizes[action.fqn]
                landing = size.small_landing if action.fqn in shrunk else size.landing
                self.gathers.append(_Gather(len(self.events) - 1, action.fqn, size.weights + landing, place))
            elif action.kind is Kind.WAIT:
                self.issues[-1] = place
        self.first_backward = len(self.events) // 2
        self.reduces_first = schedule.reduces_first or any(step.reduces_first for step in steps)
        self.work = len(self.actions)  # actions that were written down

    def first_event(self, gather: _Gather) -> int:
        """The first event at which a gather can be issued: no forward gathers for backward."""
        return self.first_backward if gather.event >= self.first_backward else 0

    def limited(self, wanted: Sequence[int], budget: int | None) -> list[int]:
        """The event at which each gather is issued: the one wanted, or the next one at which there is memory for it."""
        live, issued, least = list(self.live), [], 0
        for gather, want in zip(self.gathers, wanted, strict=True):
            event, place = gather.event, gather.place
            while event > max(want, least):
                before = self.issues[event - 1]
                if budget is not None and max(live[before:place]) + gather.nbytes > budget:
                    break
                if budget is not None:
                    live[before:place] = [each + gather.nbytes for each in live[before:place]]
                event, place = event - 1, before
            issued.append(event)
            least = event
        return issued

    def scheduled(self, issued: Sequence[int]) -> Schedule:
        """The schedule with each gather at its event."""
        edges: dict[int, list[str]] = {}
        for gather, event in zip(self.gathers, issued, strict=True):
            if event < gather.event:
                edges.setdefault(event, []).append(gather.fqn)
        forward: list[tuple[str, tuple[str, ...]]] = []
        backward: list[tuple[str, tuple[str, ...]]] = []
        for event, groups in sorted(edges.items()):
            (forward if event < self.first_backward else backward).append((self.events[event].fqn, tuple(groups)))
        return replace(self.schedule, forward=tuple(forward), backward=tuple(backward))

    def _moved_one_by_one(self, wanted: Sequence[int], budget: int) -> list[int]:
        """`limited`, with the whole step written anew for each change: gathers ahead move the waits for reductions."""
        issued = [gather.event for gather in self.gathers]
        for place, want in enumerate(wanted):
            least = max(want, issued[place - 1] if place else 0)
            for event in range(least, issued[place]):
                tried = [*issued[:place], event, *issued[place + 1 :]]
                if self.peak_of(self.scheduled(tried)) <= budget:
                    issued = tried
                    break
        return issued

    def peak_of(self, schedule: Schedule) -> int:
        """The most bytes that are live at once."""
        actions = timed_step(self.steps, schedule)
        self.work += len(actions)
        return max(live_bytes(lifetimes(actions, self.sizes), len(actions)), default=0)

    def under(self, wanted: Sequence[int], budget: int | None) -> tuple[Schedule, list[int]]:
        """The schedule that comes nearest to what is wanted, within the budget, and the event of each gather."""
        allowed, cut = budget, 0
        if budget is not None and len(self.actions) <= _SMALL and self.reduces_first:
            issued = self._moved_one_by_one(wanted, budget)
            return self.scheduled(issued), issued
        while True:
            issued = self.limited(wanted, allowed)
            schedule = self.scheduled(issued)
            if budget is None or allowed is None:
                return schedule, issued
            over = self.peak_of(schedule) - budget
            if over <= 0:
                return schedule, issued
            # Where reductions come first, gathers ahead move their waits, which `limited` does not see.
            cut = max(over, 2 * cut)
            wanted, allowed = issued, allowed - cut


def scheduled(
    steps: Sequence[Step],
    sizes: Mapping[str, Sizes],
    policy: PrefetchPolicy,
    budget: int | None = None,
    times: Mapping[str, Times] | None = None,
) -> Schedule:
    """The schedule of a training step.

    Args:
        steps: the groups in the order of their forwards, each once.
        sizes: bytes of each.
        policy: how far to gather ahead; `auto` is one ahead as long as there are no times.
        budget: the most bytes that may be live at once: weights, landing buffers and reductions; None for no limit.
        times: seconds of each, where they are known.

    Raises:
        PoolBudgetError: a group does not fit; with the least budget that works.
    """
    if policy.kind == "auto" and times is not None and steps:
        return _Auto(steps, sizes, times, budget).best().schedule
    bare = _fitting(steps, sizes, budget)
    if policy.kind == "bytes":
        wanted = _by_bytes(bare, policy.amount or 0)
    else:
        wanted = _by_depth(bare, 1 if policy.amount is None else policy.amount)
    return bare.under(wanted, budget)[0]


def _by_depth(bare: _Bare, depth: int) -> list[int]:
    """So many groups ahead, those that are there already counted in."""
    return [max(bare.first_event(gather), gather.event - depth) for gather in bare.gathers]


def _by_bytes(bare: _Bare, nbytes: int) -> list[int]:
    """As early as what is gathered ahead, and has not begun, takes no more than so many bytes."""
    wanted, ahead, oldest = [], 0, 0
    for place, gather in enumerate(bare.gathers):
        ahead += gather.nbytes
        while ahead > nbytes:
            ahead -= bare.gathers[oldest].nbytes
            oldest += 1
        # those from `oldest` on may be ahead together: from the event on that needs the one before them
        event = bare.gathers[oldest - 1].event if oldest else 0
        wanted.append(gather.event if oldest > place else max(bare.first_event(gather), event))
    return wanted


def _fitting(steps: Sequence[Step], sizes: Mapping[str, Sizes], budget: int | None) -> _Bare:
    """A bare step within the budget: with what settings keep, or as much of it as fits.

    Raises:
        PoolBudgetError: not even the least one fits.
    """
    kept = list(kept_by_setting(steps))
    if budget is None:
        return _bare(steps, sizes, kept, 0)
    _check_budget(steps, sizes, budget)
    droppable = [fqn for fqn in kept if fqn not in {step.fqn for step in steps if step.is_root}]
    low, high = 0, len(droppable)  # how many to drop: those that would be held longest
    while low < high:
        middle = (low + high) // 2
        less = [fqn for fqn in kept if fqn not in droppable[:middle]]
        low, high = (low, middle) if _bare(steps, sizes, less, -1).peak <= budget else (middle + 1, high)
    kept = [fqn for fqn in kept if fqn not in droppable[:low]]
    tries = (_bare(steps, sizes, kept, level) for level in range(len(_LEVELS)))
    return next(bare for bare in tries if bare.peak <= budget)


def _bare(steps: Sequence[Step], sizes: Mapping[str, Sizes], kept: Sequence[str], level: int) -> _Bare:
    return _Bare(steps, sizes, Schedule((), (), tuple(kept), *_LEVELS[level]))


def _least(steps: Sequence[Step], sizes: Mapping[str, Sizes]) -> _Bare:
    roots = [step.fqn for step in steps if step.is_root and not step.reshard_after_forward]
    return _bare(steps, sizes, roots, -1)


def _check_budget(steps: Sequence[Step], sizes: Mapping[str, Sizes], budget: int) -> None:
    least = _least(steps, sizes)
    if least.peak <= budget:
        return
    fqn = least.actions[least.live.index(least.peak)].fqn
    size = sizes[fqn]
    raise PoolBudgetError(
        f"PoolPolicy(budget={budget}): {fqn or ROOT_NAME} cannot fit. The least budget that works is {least.peak} "
        f"bytes: its weights take {size.weights}, a gather {size.landing} and a reduction {size.reduction} besides, "
        "and the root's weights stay beside it. Raise the budget, or shard the group's modules one by one",
        fqn,
        least.peak,
    )


class _Try(NamedTuple):
    """A schedule that fits, and what it gives."""

    exposed: float
    peak: int
    held: int  # bytes, summed over the actions: what a look-ahead that is longer than needed takes
    schedule: Schedule
    timeline: Timeline


class _Auto:
    """The search for the schedule that waits least, and for the smallest of those that wait hardly longer."""

    def __init__(
        self, steps: Sequence[Step], sizes: Mapping[str, Sizes], times: Mapping[str, Times], budget: int | None
    ) -> None:
        self.steps, self.sizes, self.times = steps, sizes, times
        self.kept = _fitting(steps, sizes, budget).schedule.kept
        # What settings keep stays, unless the budget has taken some of it: then others may be the better choice.
        fits = self.kept == kept_by_setting(steps)
        self.fixed = {step.fqn for step in steps if step.fqn in self.kept and (fits or step.is_root)}
        self.budget = budget
        self.reduces_first = any(step.reduces_first for step in steps)
        self.work, self.most_work = 0, 2 * _MOST_WORK // 3
        self.slack = 0.002 * sum(times[step.fqn].forward + times[step.fqn].backward for step in steps)
        self.gain = self.slack / max(1, len(steps))
        roots = {step.fqn for step in steps if step.is_root}
        self.searches = not self.reduces_first and not any(s.shrinks for s in steps) and roots <= set(self.kept)
        self.least = Optimum(steps, sizes, times, budget, [step.fqn for step in steps]).least

    def best(self) -> _Try:
        """The best schedule that is found; without a budget, keeping weights must not take more memory."""
        best = self._tried(self.kept, self.budget)
        assert best is not None
        limit = best.peak if self.budget is None else self.budget
        best = self._climbed(best, limit)
        if self.searches:
            self.most_work = _MOST_WORK
            best = self._widened(best, limit)
        return best

    def _climbed(self, best: _Try, limit: int) -> _Try:
        """What is better than all its neighbours, or the best one after so much work."""
        seen = {frozenset(best.schedule.kept)}
        improved = True
        while improved:
            improved = False
            for alike in self._neighbours(best):
                for kept in alike:
                    if self.work > self.most_work or best.exposed - self.gain <= self.least:
                        return best
                    if kept in seen:
                        continue
                    seen.add(kept)
                    found = self._better(kept, best, limit, _WIDTHS[0])
                    if found is not None:
                        best, improved = found, True
                if improved:
                    break
        return best

    def _better(self, kept: Collection[str], best: _Try, limit: int, width: int) -> _Try | None:
        """The best schedule that keeps these groups, if it is better."""
        listed = [step.fqn for step in forward_order(self.steps) if step.fqn in kept]
        if not self.searches:
            one = self._tried(listed, limit)
            return one if one is not None and one.exposed < best.exposed - self.gain else None
        search = Optimum(self.steps, self.sizes, self.times, limit, listed)
        self.work += 20 * len(self.steps)
        found = search.best(best.exposed - self.gain, self.most_work - self.work, width)
        self.work += search.work
        self.is_exact = search.is_exact
        if found is None:
            return None
        tries = [each for each in self._followed(listed, found, limit) if each.exposed < best.exposed]
        return min(tries, key=lambda each: (each.exposed, each.held), default=None)

    def _widened(self, best: _Try, limit: int) -> _Try:
        """What more exact searches find in time, if that is better."""
        few = len(self.steps) - len(self.fixed) <= _MOST_GROUPS
        sets = sets_to_keep(self.steps, self.sizes, self.times, limit, self.fixed) if few else []
        for width in _WIDTHS[1:]:
            for kept in [best.schedule.kept, *sets]:
                if self.work > self.most_work or best.exposed - self.gain <= self.least:
                    return best
                best = self._better(kept, best, limit, width) or best
        return best

    def _followed(self, kept: Sequence[str], found: Found, limit: int) -> Iterator[_Try]:
        """A schedule that was found, with gathers as late as they may be."""
        fewer = tuple((fqn, number) for fqn, number in found.in_flight if number != MAX_REDUCTIONS)
        bare = _Bare(self.steps, self.sizes, Schedule((), (), tuple(kept), in_flight=fewer))
        early = self._judged(bare.scheduled(found.gathers))
        late = self._judged(bare.scheduled(self._put_off(bare, early, found.gathers)))
        yield from (each for each in (early, late) if each.peak <= limit)

    def _neighbours(self, best: _Try) -> Iterator[Sequence[frozenset[str]]]:
        """Other groups to keep: those first that save most for the bytes that they hold."""
        kept = frozenset(best.schedule.kept)
        waits = best.timeline.waits
        order = [step.fqn for step in forward_order(self.steps)]

        def saved(fqn: str) -> float:
            waited = waits.get(Action(Kind.BACKWARD, fqn), 0.0) or 1e-3 * self.times[fqn].gather
            return waited / max(1, self.sizes[fqn].weights)

        more = sorted((fqn for fqn in order if fqn not in kept), key=lambda fqn: (-saved(fqn), -order.index(fqn)))
        less = [fqn for fqn in order if fqn in kept and fqn not in self.fixed]
        batches = []
        batch = len(more)
        while batch > 1:  # many at once where there is much to keep
            batches.append(kept | set(more[:batch]))
            batch //= 2
        yield batches
        yield from ([kept | {fqn}] for fqn in more)
        yield from ([kept | set(pair)] for pair in itertools.combinations(more, 2))
        yield from ([kept - {out} | {fqn}] for out in less for fqn in more)

    def _tried(self, kept: Sequence[str], limit: int | None) -> _Try | None:
        """The best schedule that keeps these groups; None if that takes more memory than the limit."""
        tries: list[_Try] = []
        most = float("inf")
        for level in range(len(_LEVELS)):
            bare = _bare(self.steps, self.sizes, kept, level)
            if limit is not None and bare.peak > limit:
                self.work += _ACTION_WORK * bare.work
                continue
            if tries and len(bare.actions) > _SMALL:
                break
            one = self._judged(bare.under(_by_depth(bare, 1), limit)[0])
            most = min(most, one.exposed)  # never worse than one ahead
            schedule, issued = bare.under([bare.first_event(gather) for gather in bare.gathers], limit)
            early = self._judged(schedule)
            late = self._put_off(bare, early, issued)
            sooner = [max(event - 1, least) for event, least in zip(late, issued, strict=True)]
            tries += [one, early, *(self._judged(bare.under(each, limit)[0]) for each in (late, sooner))]
            self.work += _ACTION_WORK * bare.work
        if not tries:
            return None
        most = min(most, min(each.exposed for each in tries) + self.slack)
        return min((each for each in tries if each.exposed <= most), key=self._price)

    def _price(self, found: _Try) -> tuple[bool, int, int]:
        """What a schedule costs beside time.

        Where there is a budget to use, reductions come first last of all: when half of a backward is over, which is
        when they are waited for, is known least.
        """
        unsure = self.budget is not None and found.schedule.reduces_first and not self.reduces_first
        return unsure, found.peak, found.held

    def _judged(self, schedule: Schedule) -> _Try:
        actions = timed_step(self.steps, schedule)
        self.work += _ACTION_WORK * len(actions)
        timeline = simulate(actions, self.times)
        live = live_bytes(lifetimes(actions, self.sizes), len(actions))
        return _Try(timeline.exposed, max(live), sum(live), schedule, timeline)

    def _put_off(self, bare: _Bare, early: _Try, issued: Sequence[int]) -> list[int]:
        """The last event at which each gather can be issued without being later than it is."""
        begins = early.timeline.begins
        found, latest = list(issued), float("inf")
        shrunk = {action.fqn for action in bare.actions if action.kind is Kind.SHRINK}
        for place in reversed(range(len(found))):
            gather = bare.gathers[place]
            times = self.times[gather.fqn]
            small = gather.fqn in shrunk and gather.event >= bare.first_backward
            latest = min(latest, begins[gather.event]) - (times.small_gather if small else times.gather)
            last = bisect_right(begins, latest + 1e-12) - 1
            found[place] = max(issued[place], min(last, gather.event))
        return found
