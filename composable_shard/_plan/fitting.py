"""Fit a step without prefetching into a budget, then add prefetching by number of modules or by bytes.

To fit into a budget, the planner drops the following, in this order:

1. prefetching,
2. reductions in flight,
3. weights that stay unsharded for the next backward of their group,
4. weights that are kept after forward.

The least budget that works is the peak of a step without any of these. In this step, at most one group and the groups
that enclose it are unsharded at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..errors import PoolBudgetError
from .costs import Sizes
from .schedule import (
    MAX_REDUCTIONS,
    ROOT_NAME,
    Action,
    Kind,
    Schedule,
    Step,
    backward_order,
    first_of,
    forward_order,
    kept_by_setting,
    listed,
    modules_of,
    timed_step,
)
from .simulation import lifetimes, live_bytes

# Each level: (1) reductions in flight, (2) whether backward waits for reductions before it gathers, (3) whether weights
# stay unsharded for the next backward of their group.
_LEVELS = ((MAX_REDUCTIONS, False, True), (1, False, True), (1, True, True))
_LEAST = (1, True, False)  # differs from the level before it only if a group has consecutive uses
SMALL = 160  # actions of a step: expensive searches with a small expected gain run only up to this number


class Gather(NamedTuple):
    """A gather of a step without prefetching.

    Attributes:
        event: index of the forward or backward that needs the gather.
        fqn: the group.
        nbytes: bytes of the weights and of the landing buffers.
        action_index: index of the gather's action.
    """

    event: int
    fqn: str
    nbytes: int
    action_index: int


class Bare:
    """A step without prefetching: its actions and its memory, and methods that issue its gathers earlier."""

    def __init__(self, steps: Sequence[Step], sizes: Mapping[str, Sizes], schedule: Schedule) -> None:
        self.steps, self.sizes, self.schedule = steps, sizes, schedule
        self.actions = timed_step(steps, schedule)
        self.live = live_bytes(lifetimes(self.actions, sizes), len(self.actions))
        self.peak = max(self.live, default=0)
        self.events: list[Action] = []
        self.issues: list[int] = []  # for each event, the index of the action after which it prefetches
        self.gathers: list[Gather] = []
        shrunk: set[str] = set()
        for index, action in enumerate(self.actions):
            if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                self.events.append(action)
                self.issues.append(index)
            elif action.kind is Kind.SHRINK:
                shrunk.add(action.fqn)
            elif action.kind is Kind.UNSHARD:
                size = sizes[action.fqn]
                landing = size.small_landing if action.fqn in shrunk else size.landing
                self.gathers.append(Gather(len(self.events) - 1, action.fqn, size.weights + landing, index))
            elif action.kind is Kind.WAIT:
                self.issues[-1] = index
        self.first_backward = len(self.events) // 2
        forward, backward = modules_of(forward_order(steps)), modules_of(backward_order(steps))
        self.modules = forward + [forward[-1] + 1 + number for number in backward]  # the module number of each event
        self.reduces_first = schedule.reduces_first or any(step.reduces_first for step in steps)
        self.work = len(self.actions)  # number of actions generated in all simulations

    def first_event(self, gather: Gather) -> int:
        """The first event at which a gather can be issued. A forward does not prefetch for backward."""
        return self.first_backward if gather.event >= self.first_backward else 0

    def limited(self, wanted: Sequence[int], budget: int | None) -> list[int]:
        """The event that issues each gather: the wanted event, or the first later event with enough memory."""
        live, issued, least, looked_at = list(self.live), [], 0, 0
        for gather, want in zip(self.gathers, wanted, strict=True):
            event, index = gather.event, gather.action_index
            while event > max(want, least):
                before = self.issues[event - 1]
                looked_at += index - before
                if budget is not None and max(live[before:index]) + gather.nbytes > budget:
                    break
                if budget is not None:
                    live[before:index] = [each + gather.nbytes for each in live[before:index]]
                event, index = event - 1, before
            issued.append(event)
            least = event
        self.work += looked_at // 16
        return issued

    def scheduled(self, issued: Sequence[int]) -> Schedule:
        """The schedule that issues each gather at the given event."""
        edges: dict[int, list[str]] = {}
        for gather, event in zip(self.gathers, issued, strict=True):
            if event < gather.event:
                edges.setdefault(event, []).append(gather.fqn)
        turn, names = self.first_backward, [event.fqn for event in self.events]
        later = {event - turn: groups for event, groups in edges.items()}
        return replace(self.schedule, forward=listed(names[:turn], edges), backward=listed(names[turn:], later))

    def _moved_one_by_one(self, wanted: Sequence[int], budget: int) -> list[int]:
        """Exact variant of `limited` for steps in which prefetching moves the waits for reductions.

        It generates the step again for each change.
        """
        issued = [gather.event for gather in self.gathers]
        for index, want in enumerate(wanted):
            least = max(want, issued[index - 1] if index else 0)
            for event in range(least, issued[index]):
                tried = [*issued[:index], event, *issued[index + 1 :]]
                if self.peak_of(self.scheduled(tried)) <= budget:
                    issued = tried
                    break
        return issued

    def peak_of(self, schedule: Schedule) -> int:
        """Peak of live bytes of the step with this schedule."""
        actions = timed_step(self.steps, schedule)
        self.work += len(actions)
        return max(live_bytes(lifetimes(actions, self.sizes), len(actions)), default=0)

    def under(self, wanted: Sequence[int], budget: int | None) -> tuple[Schedule, list[int]]:
        """The schedule closest to the wanted events that fits into the budget, and the event of each gather."""
        allowed, cut = budget, 0
        if budget is not None and len(self.actions) <= SMALL and self.reduces_first:
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
            # If backward waits for reductions before it gathers, prefetching moves these waits. `limited` ignores that.
            cut = max(over, 2 * cut)
            wanted, allowed = issued, allowed - cut


def by_depth(bare: Bare, depth: int) -> list[int]:
    """For each gather, the event `depth` modules earlier. Modules whose weights are already unsharded count as well."""
    modules, first = bare.modules, first_of(bare.modules)
    return [max(bare.first_event(each), first[max(0, modules[each.event] - depth)]) for each in bare.gathers]


def by_bytes(bare: Bare, nbytes: int) -> list[int]:
    """For each gather, the earliest event such that prefetched groups that have not begun take at most `nbytes`."""
    wanted, ahead, oldest = [], 0, 0
    for index, gather in enumerate(bare.gathers):
        ahead += gather.nbytes
        while ahead > nbytes:
            ahead -= bare.gathers[oldest].nbytes
            oldest += 1
        # Gathers from index `oldest` to `index` may be prefetched together, once gather `oldest - 1` has been used.
        event = bare.gathers[oldest - 1].event if oldest else 0
        wanted.append(gather.event if oldest > index else max(bare.first_event(gather), event))
    return wanted


def fitting(steps: Sequence[Step], sizes: Mapping[str, Sizes], budget: int | None) -> Bare:
    """A step without prefetching that fits into the budget.

    It keeps the groups that the settings keep after forward, or as many of them as fit.

    Raises:
        PoolBudgetError: the step that needs the least memory does not fit.
    """
    kept = list(kept_by_setting(steps))
    if budget is None:
        return bare_step(steps, sizes, kept, 0)
    _check_budget(steps, sizes, budget)
    droppable = [fqn for fqn in kept if fqn not in {step.fqn for step in steps if step.is_root}]
    low, high = 0, len(droppable)  # number of groups to drop, starting with those that are held longest
    while low < high:
        middle = (low + high) // 2
        less = [fqn for fqn in kept if fqn not in droppable[:middle]]
        low, high = (low, middle) if bare_step(steps, sizes, less, -1).peak <= budget else (middle + 1, high)
    kept = [fqn for fqn in kept if fqn not in droppable[:low]]
    tries = (bare_step(steps, sizes, kept, level) for level in range(len(levels(steps))))
    return next(bare for bare in tries if bare.peak <= budget)


def levels(steps: Sequence[Step]) -> tuple[tuple[int, bool, bool], ...]:
    """The levels of memory saving of a step, from none to the most possible; see `_LEVELS`."""
    pairs = itertools.pairwise(backward_order(steps))
    return (*_LEVELS, _LEAST) if any(one.fqn == other.fqn for one, other in pairs) else _LEVELS


def bare_step(steps: Sequence[Step], sizes: Mapping[str, Sizes], kept: Sequence[str], level: int) -> Bare:
    """A step without prefetching that keeps these groups, at one of the `levels`."""
    most, first, stays = levels(steps)[level]
    return Bare(steps, sizes, Schedule((), (), tuple(kept), most, first, stays_for_next=stays))


def least_step(steps: Sequence[Step], sizes: Mapping[str, Sizes]) -> Bare:
    """The step that needs the least memory."""
    roots = list(dict.fromkeys(step.fqn for step in steps if step.is_root and not step.reshard_after_forward))
    return bare_step(steps, sizes, roots, -1)


def _check_budget(steps: Sequence[Step], sizes: Mapping[str, Sizes], budget: int) -> None:
    least = least_step(steps, sizes)
    if least.peak <= budget:
        return
    fqn = least.actions[least.live.index(least.peak)].fqn
    size = sizes[fqn]
    around = next((step.around for step in steps if step.fqn == fqn), ())
    others = " and of ".join(("the root", *around))
    raise PoolBudgetError(
        f"PoolPolicy(budget={budget}): group {fqn or ROOT_NAME} does not fit. The least budget that works is "
        f"{least.peak} bytes: its weights take {size.weights} bytes, its gather {size.landing} more and its reduction "
        f"{size.reduction} more, while the weights of {others} are gathered, too. Raise the budget, or shard the "
        "modules of the group individually",
        fqn,
        least.peak,
    )
