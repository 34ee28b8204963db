"""The schedule with the least waiting, by measured times: a search over sets of groups that keep their weights.

The search climbs from one set to sets that keep more groups, or others, as long as the schedule gets better. The best
schedule of one set comes from `Optimum`, with few states at first and, for the best set, more. Where `Optimum` does not
apply (reductions that come first or last, weights that a few ranks share, groups nested or used again), gathers are
issued as early as memory allows.

For waiting, as early as memory allows is best: no byte is freed later, and no other gather is delayed, because gathers
keep their order. Then each gather is put off to the last event at which it still arrives in time, so that it holds
memory as short as possible and delays reductions on the link as little as possible.

The search is bounded by work, never by a clock: all ranks must come to the same schedule.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from .fitting import SMALL, Bare, bare_step, by_depth, fitting, levels
from .optimum import Found, Optimum, sets_to_keep
from .schedule import MAX_REDUCTIONS, Action, Kind, Schedule, Step, forward_order, kept_by_setting, timed_step
from .simulation import Sizes, Timeline, Times, lifetimes, live_bytes, simulate

_MOST_WORK = 1_200_000  # of all searches for one schedule, in comparisons (see `Optimum.work`): less than a second
_ACTION_WORK = 10  # what an action that is written down costs, in comparisons
_WIDTHS = (16, 64, 512)  # states of a search: at first many sets of groups are tried, then some more closely
_MOST_GROUPS = 12  # that it may keep or not: more have too many sets


class _Try(NamedTuple):
    """A schedule that fits, and what it gives."""

    exposed: float
    peak: int
    held: int  # live bytes, summed over the actions: larger where groups are gathered earlier than needed
    schedule: Schedule
    timeline: Timeline


class Auto:
    """The search for the schedule that waits least, and for the smallest of those that wait hardly longer."""

    def __init__(
        self, steps: Sequence[Step], sizes: Mapping[str, Sizes], times: Mapping[str, Times], budget: int | None
    ) -> None:
        self.steps, self.sizes, self.times = steps, sizes, times
        bare = fitting(steps, sizes, budget)
        self.kept = bare.schedule.kept
        # What settings keep stays, unless the budget has taken some of it: then others may be the better choice.
        fits = self.kept == kept_by_setting(steps)
        self.fixed = {step.fqn for step in steps if step.fqn in self.kept and (fits or step.is_root)}
        self.budget = bare.peak_of(bare.under(by_depth(bare, 1), None)[0]) if budget is None else budget
        self.reduces_first = any(step.reduces_first for step in steps)
        self.work = 0
        self.slack = 0.002 * sum(times[step.fqn].forward + times[step.fqn].backward for step in steps)
        self.gain = self.slack / max(1, len(steps))
        roots, names = {step.fqn for step in steps if step.is_root}, {step.fqn for step in steps}
        chain = len(names) == len(steps) and not any(step.around or step.turn is not None for step in steps)
        self.searches = chain and not (self.reduces_first or any(s.shrinks for s in steps)) and roots <= set(self.kept)
        self.least = Optimum(steps, sizes, times, self.budget, names).least if chain else 0.0

    def best(self) -> _Try:
        """The best schedule that is found."""
        best = self._tried(self.kept)
        assert best is not None
        if not self.searches:
            return self._climbed(best, _MOST_WORK)
        return self._widened(self._climbed(best, 2 * _MOST_WORK // 3))

    def _climbed(self, best: _Try, most_work: int) -> _Try:
        """Climb to a schedule that is better than all its neighbours, or until `most_work` is done."""
        seen = {frozenset(best.schedule.kept)}
        improved = True
        while improved:
            improved = False
            for alike in self._neighbours(best):
                for kept in alike:
                    if self._is_over(best, most_work):
                        return best
                    if kept not in seen:
                        seen.add(kept)
                        found = self._better(kept, best, _WIDTHS[0])
                        best, improved = (best, improved) if found is None else (found, True)
                if improved:
                    break
        return best

    def _widened(self, best: _Try) -> _Try:
        """Search this set, and all sets where there are few groups, with more states."""
        few = len(self.steps) - len(self.fixed) <= _MOST_GROUPS
        sets = sets_to_keep(self.steps, self.sizes, self.times, self.budget, self.fixed) if few else []
        for width in _WIDTHS[1:]:
            for kept in [best.schedule.kept, *sets]:
                if self._is_over(best, _MOST_WORK):
                    return best
                best = self._better(kept, best, width) or best
        return best

    def _is_over(self, best: _Try, most_work: int) -> bool:
        return self.work > most_work or best.exposed - self.gain <= self.least

    def _better(self, kept: Collection[str], best: _Try, width: int) -> _Try | None:
        """The best schedule that keeps these groups, if it is better."""
        listed = [fqn for fqn in self._names() if fqn in kept]
        if self.searches:
            search = Optimum(self.steps, self.sizes, self.times, self.budget, listed)
            found = search.best(best.exposed - self.gain, _MOST_WORK - self.work, width)
            self.work += search.work + _ACTION_WORK * len(self.steps)
            tries = [] if found is None else self._followed(listed, found)
            one = min(tries, key=lambda each: (each.exposed, each.held), default=None)
        else:
            one = self._tried(listed)
        return one if one is not None and one.exposed < best.exposed - 0.5 * self.gain else None

    def _followed(self, kept: Sequence[str], found: Found) -> Iterator[_Try]:
        """The schedule that was found, and the same with gathers as late as possible; those within the budget."""
        fewer = tuple((fqn, number) for fqn, number in found.in_flight if number != MAX_REDUCTIONS)
        bare = Bare(self.steps, self.sizes, Schedule((), (), tuple(kept), in_flight=fewer))
        early = self._judged(bare.scheduled(found.gathers))
        late = self._judged(bare.scheduled(self._put_off(bare, early, found.gathers)))
        yield from (each for each in (early, late) if each.peak <= self.budget)

    def _names(self) -> list[str]:
        """The groups in the order in which their forwards begin first."""
        return list(dict.fromkeys(step.fqn for step in forward_order(self.steps)))

    def _neighbours(self, best: _Try) -> Iterator[Sequence[frozenset[str]]]:
        """Other groups to keep: those first that save most for the bytes that they hold."""
        kept = frozenset(best.schedule.kept)
        waits = best.timeline.waits
        order = self._names()

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

    def _tried(self, kept: Sequence[str]) -> _Try | None:
        """The best schedule that keeps these groups, by few rules; None if that takes more than the budget."""
        tries: list[_Try] = []
        most = float("inf")
        same = all(step.reduces_first for step in self.steps)  # whatever the level says
        for level, (_, first, stays) in enumerate(levels(self.steps)):
            if same and first and stays:
                continue
            bare = bare_step(self.steps, self.sizes, kept, level)
            if bare.peak > self.budget:
                self.work += _ACTION_WORK * bare.work
                continue
            if tries and len(bare.actions) > SMALL:
                break
            one = self._judged(bare.under(by_depth(bare, 1), self.budget)[0])
            most = min(most, one.exposed)  # never worse than one ahead
            schedule, issued = bare.under([bare.first_event(gather) for gather in bare.gathers], self.budget)
            early = self._judged(schedule)
            late = self._put_off(bare, early, issued)
            sooner = [max(event - 1, least) for event, least in zip(late, issued, strict=True)]
            tries += [one, early, *(self._judged(bare.under(each, self.budget)[0]) for each in (late, sooner))]
            self.work += _ACTION_WORK * bare.work
        if not tries:
            return None
        most = min(most, min(each.exposed for each in tries) + self.slack)
        return min((each for each in tries if each.exposed <= most), key=self._price)

    def _price(self, found: _Try) -> tuple[bool, int, int]:
        """What a schedule costs beside time, for comparison.

        Schedules in which reductions come first are the last choice: their waits fall in the middle of a backward, a
        moment that is predicted least well.
        """
        unsure = found.schedule.reduces_first and not self.reduces_first
        return unsure, found.peak, found.held

    def _judged(self, schedule: Schedule) -> _Try:
        actions = timed_step(self.steps, schedule)
        self.work += _ACTION_WORK * len(actions)
        timeline = simulate(actions, self.times)
        live = live_bytes(lifetimes(actions, self.sizes), len(actions))
        return _Try(timeline.exposed, max(live), sum(live), schedule, timeline)

    def _put_off(self, bare: Bare, early: _Try, issued: Sequence[int]) -> list[int]:
        """The last event at which each gather can be issued and still arrive before its event begins in `early`."""
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
