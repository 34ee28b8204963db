"""A step as a list of actions: their text form, and the step that a plan expects.

`training_step` predicts the actions of the eager engine for uses of groups in order, nested or not. The engine's record
of such a step is the same list: the tests compare the two. The list is made by passes, each from list to list: first
the forwards and backwards of the groups, then the reshards, the gathers and the reductions between them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from .._errors import ShardConfigValueError

ROOT_NAME = "(root)"


class Kind(StrEnum):
    """What is done to a group."""

    UNSHARD = "UNSHARD"  # its all-gather is issued
    WAIT = "WAIT"  # ... and waited for: the parameters can be read
    RESHARD = "RESHARD"  # the unsharded parameters are given up
    SHRINK = "SHRINK"  # the unsharded parameters are given up, but a few ranks keep pieces to gather them from
    REDUCE = "REDUCE"  # the reduction of its gradients is issued
    REDUCED = "REDUCED"  # ... and waited for: `.grad` is set
    FORWARD = "FORWARD"  # its forward begins; this kind and the next two are in no record
    BACKWARD = "BACKWARD"  # its backward begins
    ENDED = "ENDED"  # the forward or backward of it that has begun last is over, with all that runs inside


@dataclass(frozen=True, slots=True)
class Action:
    """One action on one group; its text form is ``UNSHARD layers.3``."""

    kind: Kind
    fqn: str

    def __str__(self) -> str:
        return f"{self.kind} {self.fqn or ROOT_NAME}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str`.

        Raises:
            ShardConfigValueError: the text is no action.
        """
        kind, _, fqn = text.strip().partition(" ")
        if kind not in Kind.__members__ or not fqn:
            raise ShardConfigValueError(f"{text!r} is no action; expected for example 'UNSHARD layers.3'")
        return cls(Kind(kind), "" if fqn == ROOT_NAME else fqn)


@dataclass(frozen=True, slots=True)
class Step:
    """What the schedule must know of a use: one forward of a group, and the backward that belongs to it.

    Attributes:
        fqn: the group.
        is_root: whether it is the root's group, which encloses all others.
        reshard_after_forward: whether the weights are given up after forward.
        trains: whether the group gets gradients.
        shrinks: whether a few ranks then keep pieces of the weights among them.
        reduces_first: whether backward waits for reductions before it gathers what follows this group.
        around: possible enclosing groups but for the root's: the use runs inside of one only if that one runs.
        turn: if the gradients are reduced only when backward is over, a number that orders such groups; None else.
    """

    fqn: str
    is_root: bool
    reshard_after_forward: bool
    trains: bool
    shrinks: bool = False
    reduces_first: bool = False
    around: tuple[str, ...] = ()
    turn: int | None = None


# Kinds of forwards, and what follows each: nothing, a backward, one whose gradients are reduced only later.
NO_GRAD, TRAIN, NO_SYNC = "no_grad", "train", "train, no sync"
AGAIN = ", again"  # suffix of these phases where an earlier forward still waits for its backward

MAX_REDUCTIONS = 2  # reductions in flight: issuing one more waits for the oldest

Edges = tuple[tuple[str, tuple[str, ...]], ...]

MARKS = (Kind.FORWARD, Kind.BACKWARD, Kind.ENDED)  # kinds that are in no record


@dataclass(frozen=True, slots=True)
class Schedule:
    """When groups are gathered, how long they stay, and how far reductions may lag behind.

    No part of it depends on a clock or on memory at run time, so ranks that have the same one issue the same actions.

    Attributes:
        forward, backward: prefetch edges: a group, and those to gather, in order of issue, when its forward (backward)
            has begun and its own gather was waited for. A group that is used several times has several edges, in the
            order of its uses. A group that no edge gathers is gathered when it begins itself.
        kept: the groups that keep their weights between forward and backward, in order of their forwards.
        max_reductions: most reductions in flight; issuing one more waits for the oldest.
        reduces_first: whether backward of every group waits for all reductions before it gathers, which `Step` says of
            some groups anyway.
        in_flight: groups for whose reduction another number than `max_reductions` holds, with that number.
        stays_for_next: whether weights stay between two backwards of one group that follow each other at once.
        holds: groups whose reductions keep their memory until they are waited for, also on a stream, where it is else
            free for what is queued behind them (`Sizes.frees_queued`). Then compute need not wait for them before it
            packs the next gradients there. Compiled graphs hold none.
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
        """The groups to gather at each `FORWARD` or `BACKWARD`, one tuple for each use of its group."""
        ahead: dict[Action, list[tuple[str, ...]]] = {}
        for kind, edges in ((Kind.FORWARD, self.forward), (Kind.BACKWARD, self.backward)):
            for fqn, groups in edges:
                ahead.setdefault(Action(kind, fqn), []).append(groups)
        return ahead

    def names(self) -> Iterator[tuple[str, Iterable[str]]]:
        """The FQNs of groups that each field names."""
        yield "kept", self.kept
        yield "holds", self.holds
        yield "in_flight", (fqn for fqn, _ in self.in_flight)
        yield "forward", (fqn for at, ahead in self.forward for fqn in (at, *ahead))
        yield "backward", (fqn for at, ahead in self.backward for fqn in (at, *ahead))

    def part(self, fqns: Set[str]) -> Schedule:
        """What the schedule says of these groups alone."""

        def only(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(fqn for fqn in names if fqn in fqns)

        def those(edges: Edges) -> Edges:
            return tuple((at, only(ahead)) for at, ahead in edges if at in fqns)

        in_flight = tuple(each for each in self.in_flight if each[0] in fqns)
        forward, backward = those(self.forward), those(self.backward)
        kept, holds = only(self.kept), only(self.holds)
        return replace(self, forward=forward, backward=backward, kept=kept, in_flight=in_flight, holds=holds)

    def telling(self) -> Schedule:
        """This schedule without the edges of groups that gather nothing at any of their uses."""

        def those(edges: Edges) -> Edges:
            gather = {at for at, ahead in edges if ahead}
            return tuple(edge for edge in edges if edge[0] in gather)

        return replace(self, forward=those(self.forward), backward=those(self.backward))


def listed(events: Sequence[str], ahead: Mapping[int, Sequence[str]]) -> Edges:
    """Prefetch edges of events in order, from the groups that the event at each index gathers ahead.

    A group with several events gets an edge for each, even if empty, so that edges and uses correspond.
    """
    uses = Counter(events)
    return tuple((fqn, tuple(ahead.get(at, ()))) for at, fqn in enumerate(events) if at in ahead or uses[fqn] > 1)


def forward_order(steps: Sequence[Step]) -> list[Step]:
    """The uses in the order in which their forwards begin: the root, which encloses the others, first."""
    return [s for s in steps if s.is_root] + [s for s in steps if not s.is_root]


def backward_order(steps: Sequence[Step]) -> list[Step]:
    """The uses in the order in which their backwards begin: here, too, an enclosing group before those inside."""
    return [step for step, begins in reversed(_course(steps)) if not begins]


def _course(steps: Sequence[Step]) -> list[tuple[Step, bool]]:
    """Where forwards begin (True) and end (False), in order; backward runs through this list from its end."""
    running: list[Step] = []
    course: list[tuple[Step, bool]] = []
    for step in forward_order(steps):
        while running and not (running[-1].is_root or running[-1].fqn in step.around):
            course.append((running.pop(), False))
        running.append(step)
        course.append((step, True))
    return course + [(step, False) for step in reversed(running)]


def modules_of(order: Sequence[Step]) -> list[int]:
    """The number of the module of each use: groups of one module, on several meshes, begin together."""
    numbers: list[int] = []
    for at, step in enumerate(order):
        before = order[at - 1] if at else None
        around = before is not None and (before.fqn in step.around or (before.is_root and step.is_root))
        numbers.append(numbers[-1] + (not (around and _module(before) == _module(step))) if before is not None else 0)
    return numbers


def first_of(modules: Sequence[int]) -> dict[int, int]:
    """By number of a module, the index of its first use."""
    return {number: at for at, number in reversed(list(enumerate(modules)))}


def _module(step: Step | None) -> str:
    return "" if step is None else step.fqn.partition(" on ")[0].replace(ROOT_NAME, "")


def kept_by_setting(steps: Sequence[Step]) -> tuple[str, ...]:
    """The groups that are not resharded after forward."""
    return tuple(dict.fromkeys(step.fqn for step in forward_order(steps) if not step.reshard_after_forward))


def one_ahead(steps: Sequence[Step]) -> Schedule:
    """The default schedule: when a module begins, the next one is gathered."""

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


# ---- passes, list -> list


def computes(steps: Sequence[Step], kind: Kind) -> list[Action]:
    """The beginnings and ends of the forwards, or of the backwards, of a step."""
    forward = _course(steps)
    course = forward if kind is Kind.FORWARD else [(step, not begins) for step, begins in reversed(forward)]
    return [Action(kind if begins else Kind.ENDED, step.fqn) for step, begins in course]


def with_reshards(steps: Sequence[Step], schedule: Schedule, backward: bool = True) -> list[Action]:
    """Forwards and backwards, each of which gives its weights up: unless they are kept, or the group's next follows."""
    shrinks = {step.fqn for step in steps if step.shrinks}
    actions: list[Action] = []
    for action in computes(steps, Kind.FORWARD):
        if action.kind is Kind.ENDED and action.fqn not in schedule.kept:
            actions.append(Action(Kind.SHRINK if action.fqn in shrinks else Kind.RESHARD, action.fqn))
        actions.append(action)
    backwards = computes(steps, Kind.BACKWARD) if backward else []
    begins = iter([action.fqn for action in backwards if action.kind is Kind.BACKWARD])
    following = next(begins, None)  # whose backward begins next
    for action in backwards:
        if action.kind is Kind.BACKWARD:
            following = next(begins, None)
        elif not (schedule.stays_for_next and following == action.fqn):
            actions.append(Action(Kind.RESHARD, action.fqn))
        actions.append(action)
    return actions


def with_gathers(actions: Sequence[Action], ahead: Mapping[Action, Sequence[Sequence[str]]]) -> list[Action]:
    """Where a forward or a backward begins, gather its weights, unless they are there, then the groups of `ahead`."""
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
    """Writes a step with its reductions, and waits for the oldest ones where too many are in flight."""

    def __init__(self, steps: Sequence[Step], schedule: Schedule) -> None:
        self.actions: list[Action] = []
        self._most, self._most_with = schedule.max_reductions, dict(schedule.in_flight)
        self._first = {step.fqn for step in steps if step.reduces_first or schedule.reduces_first}
        self._turns = {step.fqn: step.turn for step in steps if step.trains}  # None for those reduced at once
        self._in_flight: deque[str] = deque()
        self._running: str | None = None  # whose backward has begun last

    def follow(self, action: Action) -> None:
        """Write an action of the step, with the reductions and waits that it brings about."""
        if action.kind is Kind.BACKWARD:
            self._running = action.fqn
        elif action.kind is Kind.UNSHARD and self._running in self._first:
            self._settle()
        if action.kind is not Kind.ENDED:
            self.actions.append(action)
        elif self._running is not None:
            if self.actions[-1] != Action(Kind.RESHARD, action.fqn):
                self.actions.append(action)  # nothing else says that its compute is over
            if self._turns.get(action.fqn, -1) is None:
                self._issue(action.fqn)

    def finish(self) -> None:
        """The step is over: reduce what is reduced last, and wait for all."""
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
    """Reduce gradients where a backward ends, behind its reshard, so that the buffer can use the weights' memory."""
    reductions = _Reductions(steps, schedule)
    for action in actions:
        reductions.follow(action)
    reductions.finish()
    return reductions.actions


def timed_step(steps: Sequence[Step], schedule: Schedule, phase: str = TRAIN) -> tuple[Action, ...]:
    """`training_step` with `MARKS`: beginnings of forwards and backwards, and ends of backwards without a reshard."""
    if phase.startswith(NO_GRAD):
        return _without_backward(steps, schedule)
    if phase.startswith(NO_SYNC):
        steps = [replace(step, trains=False) for step in steps]
    actions = with_gathers(with_reshards(steps, schedule), schedule.ahead())
    return tuple(with_reductions(actions, steps, schedule))


def _without_backward(steps: Sequence[Step], schedule: Schedule) -> tuple[Action, ...]:
    """A forward without backward: at its end, all weights that are still there are given up."""
    actions = with_gathers(with_reshards(steps, schedule, backward=False), schedule.ahead())
    left = dict.fromkeys(step.fqn for step in steps if step.shrinks or step.fqn in schedule.kept)
    return (*with_reductions(actions, steps, schedule), *(Action(Kind.RESHARD, fqn) for fqn in left))


def training_step(steps: Sequence[Step], schedule: Schedule | None = None, phase: str = TRAIN) -> tuple[Action, ...]:
    """The actions of forward and backward of groups that run in the given order, inside of the root (if any).

    Args:
        steps: the uses of groups.
        schedule: what is gathered ahead, kept and waited for; None for `one_ahead`.
        phase: the kind of forward; without gradients or sync, actions of the missing backward or reductions are left
            out.
    """
    actions = timed_step(steps, schedule or one_ahead(steps), phase)
    return tuple(action for action in actions if action.kind not in MARKS)
