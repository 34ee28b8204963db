"""A training step as a list of actions: their text form, and the list that a plan predicts.

`training_step` predicts the actions of the eager engine for uses of groups in order, nested or not. The engine's record
of such a step is the same list. Tests compare the two. The list is built in passes: forwards and backwards of
the groups first, then reshards, gathers and reductions are added.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from ..errors import ShardConfigValueError

ROOT_NAME = "(root)"


class Kind(StrEnum):
    """The type of an action on a group. Records do not contain `FORWARD`, `BACKWARD` and `ENDED`."""

    REFRESH = "REFRESH"  # the gather of the node's compute copy over the outer axis is issued (`outer_sharding`)
    UNSHARD = "UNSHARD"  # the group's all-gather is issued
    WAIT = "WAIT"  # the all-gather has been waited for: the parameters can be read
    RESHARD = "RESHARD"  # the unsharded parameters are freed
    SHRINK = "SHRINK"  # the unsharded parameters are resharded to a few ranks; backward gathers among these
    REDUCE = "REDUCE"  # the reduction of the group's gradients is issued
    REDUCED = "REDUCED"  # the reduction has been waited for: `.grad` is set
    FORWARD = "FORWARD"  # the group's forward begins
    BACKWARD = "BACKWARD"  # the group's backward begins
    ENDED = "ENDED"  # the group's most recent forward or backward ends, including all groups that run inside it


@dataclass(frozen=True, slots=True)
class Action:
    """One action on one group. The text form is ``UNSHARD layers.3``."""

    kind: Kind
    fqn: str

    def __str__(self) -> str:
        return f"{self.kind} {self.fqn or ROOT_NAME}"


@dataclass(frozen=True, slots=True)
class Step:
    """One use of a group, as the scheduler sees it: one forward and the corresponding backward.

    Attributes:
        fqn: the group.
        is_root: whether this is the root's group, which encloses all others.
        reshard_after_forward: whether the weights are resharded after forward.
        trains: whether the group gets gradients.
        shrinks: whether the weights are resharded to a few ranks after forward.
        reduces_first: whether backward waits for reductions before it gathers the groups that follow this group.
        around: possible enclosing groups, except the root's. The use is inside one of them only while that one runs.
        turn: if the gradients are reduced after the whole backward, a number that orders such groups, else None.
        refreshes: whether the shards are split over the outer axis as well, so that a forward begins with a refresh of
            the node's compute copy.
    """

    fqn: str
    is_root: bool
    reshard_after_forward: bool
    trains: bool
    shrinks: bool = False
    reduces_first: bool = False
    around: tuple[str, ...] = ()
    turn: int | None = None
    refreshes: bool = False


# Phases: forward without backward, forward with backward, forward with a backward whose gradients are not reduced yet.
NO_GRAD, TRAIN, NO_SYNC = "no_grad", "train", "train, no sync"
AGAIN = ", again"  # suffix of a phase in which an earlier forward still waits for its backward

MAX_REDUCTIONS = 2  # reductions in flight; before another one is issued, the oldest is waited for

Edges = tuple[tuple[str, tuple[str, ...]], ...]

MARKS = (Kind.FORWARD, Kind.BACKWARD, Kind.ENDED)  # kinds that do not occur in records


@dataclass(frozen=True, slots=True)
class Schedule:
    """When groups are gathered, how long they stay unsharded, and how many reductions may be in flight.

    A schedule does not depend on run-time clocks or memory, so ranks with the same schedule issue the same actions.

    Attributes:
        forward, backward: prefetch edges. An edge is a group and the groups to gather once its forward (backward) has
            begun and its own gather has been waited for, in order of issue. A group with several uses has several
            edges, in the order of its uses. A group without an incoming edge is gathered when it begins.
        kept: the groups that stay unsharded between forward and backward, in order of their forwards.
        max_reductions: limit of reductions in flight. Before another one is issued, the oldest is waited for.
        reduces_first: whether the backward of every group waits for all reductions before it gathers. If False, this
            depends on `Step.reduces_first` of each group.
        in_flight: groups whose reduction has another limit than `max_reductions`, with that limit.
        stays_for_next: whether weights stay unsharded between two consecutive backwards of one group.
        holds: groups whose reductions keep their memory until they have been waited for, even with streams. Otherwise
            work that is queued after a reduction may reuse its memory (`Sizes.frees_queued`), so compute must wait for
            the reduction before it packs the next gradients there. In compiled graphs no reduction keeps its memory.
    """

    forward: Edges
    backward: Edges
    kept: tuple[str, ...]
    max_reductions: int = MAX_REDUCTIONS
    reduces_first: bool = False
    in_flight: tuple[tuple[str, int], ...] = ()
    stays_for_next: bool = True
    holds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_reductions < 1:
            raise ShardConfigValueError(f"Schedule.max_reductions={self.max_reductions!r}: expected at least 1")
        for fqn, number in self.in_flight:
            if number < 1:
                raise ShardConfigValueError(f"Schedule.in_flight[{fqn!r}]={number!r}: expected at least 1")

    def ahead(self) -> dict[Action, list[tuple[str, ...]]]:
        """The groups to prefetch at each `FORWARD` or `BACKWARD`, one tuple per use of its group."""
        ahead: dict[Action, list[tuple[str, ...]]] = {}
        for kind, edges in ((Kind.FORWARD, self.forward), (Kind.BACKWARD, self.backward)):
            for fqn, groups in edges:
                ahead.setdefault(Action(kind, fqn), []).append(groups)
        return ahead

    def names(self) -> Iterator[tuple[str, Iterable[str]]]:
        """The FQNs of groups in each field."""
        yield "kept", self.kept
        yield "holds", self.holds
        yield "in_flight", (fqn for fqn, _ in self.in_flight)
        yield "forward", (fqn for at, ahead in self.forward for fqn in (at, *ahead))
        yield "backward", (fqn for at, ahead in self.backward for fqn in (at, *ahead))

    def part(self, fqns: Set[str]) -> Schedule:
        """The schedule restricted to these groups."""

        def only(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(fqn for fqn in names if fqn in fqns)

        def those(edges: Edges) -> Edges:
            return tuple((at, only(ahead)) for at, ahead in edges if at in fqns)

        in_flight = tuple(each for each in self.in_flight if each[0] in fqns)
        forward, backward = those(self.forward), those(self.backward)
        kept, holds = only(self.kept), only(self.holds)
        return replace(self, forward=forward, backward=backward, kept=kept, in_flight=in_flight, holds=holds)

    def telling(self) -> Schedule:
        """This schedule without the edges of groups that prefetch nothing at any of their uses."""

        def those(edges: Edges) -> Edges:
            gather = {at for at, ahead in edges if ahead}
            return tuple(edge for edge in edges if edge[0] in gather)

        return replace(self, forward=those(self.forward), backward=those(self.backward))


def listed(events: Sequence[str], ahead: Mapping[int, Sequence[str]]) -> Edges:
    """Make prefetch edges.

    A group with several events gets one edge per event, even if empty, so that edges correspond to uses.

    Args:
        events: the group of each event, in order.
        ahead: by index of an event, the groups that it prefetches.
    """
    uses = Counter(events)
    return tuple((fqn, tuple(ahead.get(at, ()))) for at, fqn in enumerate(events) if at in ahead or uses[fqn] > 1)


def forward_order(steps: Sequence[Step]) -> list[Step]:
    """The uses in the order in which their forwards begin. The root encloses all others and comes first."""
    return [s for s in steps if s.is_root] + [s for s in steps if not s.is_root]


def backward_order(steps: Sequence[Step]) -> list[Step]:
    """The uses in the order in which their backwards begin. An enclosing group comes before the groups inside it."""
    return [step for step, begins in reversed(_course(steps)) if not begins]


def _course(steps: Sequence[Step]) -> list[tuple[Step, bool]]:
    """The beginnings (True) and ends (False) of forwards, in order. Backward is this list in reverse order."""
    running: list[Step] = []
    course: list[tuple[Step, bool]] = []
    for step in forward_order(steps):
        while running and not (running[-1].is_root or running[-1].fqn in step.around):
            course.append((running.pop(), False))
        running.append(step)
        course.append((step, True))
    return course + [(step, False) for step in reversed(running)]


def modules_of(order: Sequence[Step]) -> list[int]:
    """The module number of each use. Groups of one module on several meshes begin together and share a number."""
    numbers: list[int] = []
    for at, step in enumerate(order):
        before = order[at - 1] if at else None
        around = before is not None and (before.fqn in step.around or (before.is_root and step.is_root))
        numbers.append(numbers[-1] + (not (around and _module(before) == _module(step))) if before is not None else 0)
    return numbers


def first_of(modules: Sequence[int]) -> dict[int, int]:
    """The index of the first use of each module, by module number."""
    return {number: at for at, number in reversed(list(enumerate(modules)))}


def _module(step: Step | None) -> str:
    return "" if step is None else step.fqn.partition(" on ")[0].replace(ROOT_NAME, "")


def kept_by_setting(steps: Sequence[Step]) -> tuple[str, ...]:
    """The groups that are not resharded after forward."""
    return tuple(dict.fromkeys(step.fqn for step in forward_order(steps) if not step.reshard_after_forward))


def one_ahead(steps: Sequence[Step]) -> Schedule:
    """The default schedule: each module prefetches the next module when it begins."""

    def edges(order: Sequence[Step], resident: Sequence[str]) -> Edges:
        names, modules = [step.fqn for step in order], modules_of(order)
        first = first_of(modules)
        ahead: dict[int, list[str]] = {}
        gathered = set(resident)
        for at, fqn in enumerate(names):
            begins = first[max(0, modules[at] - 1)]
            if begins < at and fqn not in gathered:
                ahead.setdefault(begins, []).append(fqn)
            gathered.discard(fqn)
        return listed(names, ahead)

    kept = kept_by_setting(steps)
    return Schedule(edges(forward_order(steps), ()), edges(backward_order(steps), kept), kept)


# ---- passes: each takes a list of actions and returns a new one


def computes(steps: Sequence[Step], kind: Kind) -> list[Action]:
    """The beginnings and ends of the forwards, or of the backwards, of a step."""
    forward = _course(steps)
    course = forward if kind is Kind.FORWARD else [(step, not begins) for step, begins in reversed(forward)]
    return [Action(kind if begins else Kind.ENDED, step.fqn) for step, begins in course]


def with_reshards(steps: Sequence[Step], schedule: Schedule, backward: bool = True) -> list[Action]:
    """Add a reshard to each forward and backward.

    Groups that the schedule keeps are not resharded after forward. A group is not resharded between two consecutive
    backwards if `Schedule.stays_for_next` is set.
    """
    shrinks = {step.fqn for step in steps if step.shrinks}
    actions: list[Action] = []
    for action in computes(steps, Kind.FORWARD):
        if action.kind is Kind.ENDED and action.fqn not in schedule.kept:
            actions.append(Action(Kind.SHRINK if action.fqn in shrinks else Kind.RESHARD, action.fqn))
        actions.append(action)
    backwards = computes(steps, Kind.BACKWARD) if backward else []
    begins = iter([action.fqn for action in backwards if action.kind is Kind.BACKWARD])
    following = next(begins, None)  # the group whose backward begins next
    for action in backwards:
        if action.kind is Kind.BACKWARD:
            following = next(begins, None)
        elif not (schedule.stays_for_next and following == action.fqn):
            actions.append(Action(Kind.RESHARD, action.fqn))
        actions.append(action)
    return actions


def with_gathers(actions: Sequence[Action], ahead: Mapping[Action, Sequence[Sequence[str]]]) -> list[Action]:
    """Add gathers where a forward or backward begins: its own weights unless they are unsharded, then prefetches."""
    gathering: set[str] = set()
    resident: set[str] = set()
    following = {action: deque(groups) for action, groups in ahead.items()}
    complete: list[Action] = []

    def unshard(fqn: str) -> None:
        if fqn not in resident and fqn not in gathering:
            gathering.add(fqn)
            complete.append(Action(Kind.UNSHARD, fqn))

    for action in actions:
        complete.append(action)
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            unshard(action.fqn)
            if action.fqn in gathering:
                gathering.remove(action.fqn)
                resident.add(action.fqn)
                complete.append(Action(Kind.WAIT, action.fqn))
            for fqn in following[action].popleft() if following.get(action) else ():
                unshard(fqn)
        elif action.kind in (Kind.RESHARD, Kind.SHRINK):
            resident.remove(action.fqn)
    return complete


class _Reductions:
    """Generates a step with its reductions, and waits for the oldest reductions if too many are in flight."""

    def __init__(self, steps: Sequence[Step], schedule: Schedule) -> None:
        self.actions: list[Action] = []
        self._most, self._most_with = schedule.max_reductions, dict(schedule.in_flight)
        self._first = {step.fqn for step in steps if step.reduces_first or schedule.reduces_first}
        self._turns = {step.fqn: step.turn for step in steps if step.trains}  # None: reduced right after backward
        self._in_flight: deque[str] = deque()
        self._running: str | None = None  # the group whose backward has begun last

    def follow(self, action: Action) -> None:
        """Append an action of the step, and the reductions and waits that result from it."""
        if action.kind is Kind.BACKWARD:
            self._running = action.fqn
        elif action.kind is Kind.UNSHARD and self._running in self._first:
            self._settle()
        if action.kind is not Kind.ENDED:
            self.actions.append(action)
        elif self._running is not None:
            if self.actions[-1] != Action(Kind.RESHARD, action.fqn):
                self.actions.append(action)  # without a reshard, this marks the end of its compute
            if self._turns.get(action.fqn, -1) is None:
                self._issue(action.fqn)

    def finish(self) -> None:
        """End the step: issue the reductions that come after backward, and wait for all reductions."""
        if self._running is not None:
            last = {fqn: turn for fqn, turn in self._turns.items() if turn is not None}
            for fqn in sorted(last, key=last.__getitem__):
                self._issue(fqn)
        self._settle()

    def _issue(self, fqn: str) -> None:
        self._settle(self._most_with.get(fqn, self._most) - 1)
        self._in_flight.append(fqn)
        self.actions.append(Action(Kind.REDUCE, fqn))

    def _settle(self, most: int = 0) -> None:
        while len(self._in_flight) > most:
            self.actions.append(Action(Kind.REDUCED, self._in_flight.popleft()))


def with_reductions(actions: Sequence[Action], steps: Sequence[Step], schedule: Schedule) -> list[Action]:
    """Add a reduction after the reshard of each backward, so that its buffer can use the memory of the weights."""
    reductions = _Reductions(steps, schedule)
    for action in actions:
        reductions.follow(action)
    reductions.finish()
    return reductions.actions


def timed_step(steps: Sequence[Step], schedule: Schedule, phase: str = TRAIN) -> tuple[Action, ...]:
    """`training_step` with `MARKS` (beginnings of forwards and backwards, ends of backwards without a reshard)."""
    if phase.startswith(NO_GRAD):
        return _without_backward(steps, schedule)
    if phase.startswith(NO_SYNC):
        steps = [replace(step, trains=False) for step in steps]
    actions = with_gathers(with_reshards(steps, schedule), schedule.ahead())
    return (*refreshes(steps), *with_reductions(actions, steps, schedule))


def refreshes(steps: Sequence[Step]) -> tuple[Action, ...]:
    """The refreshes of a step. All are issued when the forward begins: they use no memory of the pool."""
    fqns = dict.fromkeys(step.fqn for step in forward_order(steps) if step.refreshes)
    return tuple(Action(Kind.REFRESH, fqn) for fqn in fqns)


def _without_backward(steps: Sequence[Step], schedule: Schedule) -> tuple[Action, ...]:
    """A forward without backward. All weights that are still unsharded at its end are resharded."""
    actions = with_gathers(with_reshards(steps, schedule, backward=False), schedule.ahead())
    left = dict.fromkeys(step.fqn for step in steps if step.shrinks or step.fqn in schedule.kept)
    reduced = with_reductions(actions, steps, schedule)
    return (*refreshes(steps), *reduced, *(Action(Kind.RESHARD, fqn) for fqn in left))


def training_step(steps: Sequence[Step], schedule: Schedule | None = None, phase: str = TRAIN) -> tuple[Action, ...]:
    """The actions of forward and backward of groups that run in the given order, inside the root (if any).

    Args:
        steps: the uses of groups.
        schedule: the schedule; None for `one_ahead`.
        phase: the phase. A phase without gradients has no backward, and a phase without sync has no reductions.
    """
    actions = timed_step(steps, schedule or one_ahead(steps), phase)
    return tuple(action for action in actions if action.kind not in MARKS)
