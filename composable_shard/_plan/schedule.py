"""A step as a list of actions: their text form, and the step that a plan expects.

`training_step` writes down what the eager engine does for uses of groups in order, one inside of another or not; the
engine's record of such a step is the same list, which is how the tests hold the two together. It is made by passes from
list to list: the forwards and backwards of the groups, then the reshards, the gathers and the reductions between them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from .._errors import ShardConfigValueError

ROOT_NAME = "(root)"


class Kind(StrEnum):
    """What is done to a group."""

    UNSHARD = "UNSHARD"  # its all-gather is issued
    WAIT = "WAIT"  # ... and waited for: the parameters can be read
    RESHARD = "RESHARD"  # the unsharded parameters are given up
    SHRINK = "SHRINK"  # they are given up but for what a few ranks keep among them
    REDUCE = "REDUCE"  # the reduction of its gradients is issued
    REDUCED = "REDUCED"  # ... and waited for: `.grad` is set
    FORWARD = "FORWARD"  # its forward begins; in no record, nor are the next two
    BACKWARD = "BACKWARD"  # its backward begins
    ENDED = "ENDED"  # what has begun last of it is over, with all that runs inside


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
    """What the schedule must know of a use of a group: of one of its forwards, and the backward of that.

    Attributes:
        is_root: whether it is the root's, whose forward is around all others.
        reshard_after_forward, shrinks: whether forward gives its weights up, or keeps some.
        trains: whether it gets gradients.
        reduces_first: whether backward waits for reductions before it gathers what follows this group.
        around: groups but for the root's in whose forward it runs, if one of them runs.
        turn: if its gradients are reduced only when backward is over, its place among those; None else.
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
AGAIN = ", again"  # behind them, where an earlier forward still waits for its backward

MAX_REDUCTIONS = 2  # reductions in flight: issuing one more waits for the oldest

Edges = tuple[tuple[str, tuple[str, ...]], ...]

MARKS = (Kind.FORWARD, Kind.BACKWARD, Kind.ENDED)  # what is in no record


@dataclass(frozen=True, slots=True)
class Schedule:
    """When groups are gathered, how long they stay, and how far reductions may lag behind.

    No part of it depends on a clock or on memory at run time, so ranks that have the same one issue the same actions.

    Attributes:
        forward, backward: prefetch edges: a group, and those to gather when its forward (backward) begins and its own
            weights are there, in order of issue; of a group that is used several times, what begins first comes
            first. A group that is in no list is gathered when it begins itself.
        kept: the groups that keep their weights between forward and backward, in order of their forwards.
        max_reductions: most reductions in flight; issuing one more waits for the oldest.
        reduces_first: whether backward of every group waits for all reductions before it gathers, which `Step` says of
            some groups anyway.
        in_flight: groups for whose reduction another number holds than `max_reductions`, and that number.
        stays_for_next: whether weights stay from one backward of a group to the next one, where that follows at once.
    """

    forward: Edges
    backward: Edges
    kept: tuple[str, ...]
    max_reductions: int = MAX_REDUCTIONS
    reduces_first: bool = False
    in_flight: tuple[tuple[str, int], ...] = ()
    stays_for_next: bool = True

    def __post_init__(self) -> None:
        if self.max_reductions < 1:
            raise ShardConfigValueError(f"Schedule.max_reductions={self.max_reductions!r}: expected at least 1")
        for fqn, number in self.in_flight:
            if number < 1:
                raise ShardConfigValueError(f"Schedule.in_flight[{fqn!r}]={number!r}: expected at least 1")

    def ahead(self) -> dict[Action, list[tuple[str, ...]]]:
        """The edges by the action at which they gather, a `FORWARD` or a `BACKWARD`, in the order of its uses."""
        found: dict[Action, list[tuple[str, ...]]] = {}
        for kind, edges in ((Kind.FORWARD, self.forward), (Kind.BACKWARD, self.backward)):
            for fqn, groups in edges:
                found.setdefault(Action(kind, fqn), []).append(groups)
        return found


def listed(events: Sequence[str], ahead: Mapping[int, Sequence[str]]) -> Edges:
    """Prefetch edges of what begins in this order, by place; those of a group that begins again and again all."""
    uses = Counter(events)
    return tuple((fqn, tuple(ahead.get(at, ()))) for at, fqn in enumerate(events) if at in ahead or uses[fqn] > 1)


def forward_order(steps: Sequence[Step]) -> list[Step]:
    """The uses in the order in which their forwards begin: the root, which is around the others, first."""
    return [s for s in steps if s.is_root] + [s for s in steps if not s.is_root]


def backward_order(steps: Sequence[Step]) -> list[Step]:
    """The uses in the order in which their backwards begin: what is around another begins before that in both."""
    return [step for step, begins in reversed(_course(steps)) if not begins]


def _course(steps: Sequence[Step]) -> list[tuple[Step, bool]]:
    """Where forwards begin (true) and end. Backward goes the other way, from the ends to the beginnings."""
    running: list[Step] = []
    found: list[tuple[Step, bool]] = []
    for step in forward_order(steps):
        while running and not (running[-1].is_root or running[-1].fqn in step.around):
            found.append((running.pop(), False))
        running.append(step)
        found.append((step, True))
    return found + [(step, False) for step in reversed(running)]


def modules_of(order: Sequence[Step]) -> list[int]:
    """The module that each use is of, by number: groups of one module, on several meshes, begin together."""
    found: list[int] = []
    for at, step in enumerate(order):
        before = order[at - 1] if at else None
        around = before is not None and (before.fqn in step.around or (before.is_root and step.is_root))
        found.append(found[-1] + (not (around and _module(before) == _module(step))) if before is not None else 0)
    return found


def first_of(modules: Sequence[int]) -> dict[int, int]:
    """Where each module begins."""
    return {number: at for at, number in reversed(list(enumerate(modules)))}


def _module(step: Step | None) -> str:
    return "" if step is None else step.fqn.partition(" on ")[0].replace(ROOT_NAME, "")


def kept_by_setting(steps: Sequence[Step]) -> tuple[str, ...]:
    """The groups that are not resharded after forward."""
    return tuple(dict.fromkeys(step.fqn for step in forward_order(steps) if not step.reshard_after_forward))


def one_ahead(steps: Sequence[Step]) -> Schedule:
    """The schedule of the engine if nothing else is asked for: the next module is gathered when one begins."""

    def edges(order: Sequence[Step], resident: Sequence[str]) -> Edges:
        names, modules = [step.fqn for step in order], modules_of(order)
        first = first_of(modules)
        ahead: dict[int, list[str]] = {}
        there = set(resident)
        for at, fqn in enumerate(names):
            begins = first[max(0, modules[at] - 1)]
            if begins < at and fqn not in there:
                ahead.setdefault(begins, []).append(fqn)
            there.discard(fqn)
        return listed(names, ahead)

    kept = kept_by_setting(steps)
    return Schedule(edges(forward_order(steps), ()), edges(backward_order(steps), kept), kept)


# ---- passes, list -> list


def computes(steps: Sequence[Step], kind: Kind) -> list[Action]:
    """The forwards, or the backwards, of a step: where each begins, and where it ends."""
    forward = _course(steps)
    course = forward if kind is Kind.FORWARD else [(step, not begins) for step, begins in reversed(forward)]
    return [Action(kind if begins else Kind.ENDED, step.fqn) for step, begins in course]


def with_reshards(actions: Sequence[Action], steps: Sequence[Step], schedule: Schedule) -> list[Action]:
    """Give weights up where a forward ends, but for what is kept, and a backward, but for what follows at once."""
    shrinks, stays = {step.fqn for step in steps if step.shrinks}, set(schedule.kept)
    turn = next((place for place, action in enumerate(actions) if action.kind is Kind.BACKWARD), len(actions))
    found: list[Action] = []  # last action first
    following: str | None = None  # whose backward begins next
    for place, action in reversed(list(enumerate(actions))):
        found.append(action)
        if action.kind is Kind.BACKWARD:
            following = action.fqn
        elif action.kind is Kind.ENDED and place > turn:
            again = schedule.stays_for_next and following == action.fqn
            found += [] if again else [Action(Kind.RESHARD, action.fqn)]
        elif action.kind is Kind.ENDED and place < turn and action.fqn not in stays:
            found.append(Action(Kind.SHRINK if action.fqn in shrinks else Kind.RESHARD, action.fqn))
    return found[::-1]


def with_gathers(actions: Sequence[Action], ahead: Mapping[Action, Sequence[Sequence[str]]]) -> list[Action]:
    """Gather what a forward or a backward needs where it begins, unless that is there, and then what `ahead` says."""
    gathering: set[str] = set()
    resident: set[str] = set()
    told = {action: deque(groups) for action, groups in ahead.items()}
    found: list[Action] = []

    def unshard(fqn: str) -> None:
        if fqn not in resident and fqn not in gathering:
            gathering.add(fqn)
            found.append(Action(Kind.UNSHARD, fqn))

    for action in actions:
        found.append(action)
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            unshard(action.fqn)
            if action.fqn in gathering:
                gathering.remove(action.fqn)
                resident.add(action.fqn)
                found.append(Action(Kind.WAIT, action.fqn))
            for fqn in told[action].popleft() if told.get(action) else ():
                unshard(fqn)
        elif action.kind in (Kind.RESHARD, Kind.SHRINK):
            resident.remove(action.fqn)
    return found


def with_reductions(actions: Sequence[Action], steps: Sequence[Step], schedule: Schedule) -> list[Action]:
    """Reduce gradients where a backward ends, behind its reshard, so that the buffer can take the place of weights."""
    trains = {step.fqn for step in steps if step.trains}
    first = {step.fqn for step in steps if step.reduces_first or schedule.reduces_first}
    last = {step.fqn: step.turn for step in steps if step.turn is not None and step.trains}
    allowed = dict(schedule.in_flight)
    reducing: deque[Action] = deque()
    found: list[Action] = []
    running: str | None = None  # whose backward has begun last

    def settle(most: int = 0) -> None:
        while len(reducing) > most:
            found.append(reducing.popleft())

    def reduce(fqn: str) -> None:
        settle(allowed.get(fqn, schedule.max_reductions) - 1)
        reducing.append(Action(Kind.REDUCED, fqn))
        found.append(Action(Kind.REDUCE, fqn))

    for action in actions:
        if action.kind is Kind.BACKWARD:
            running = action.fqn
        elif action.kind is Kind.UNSHARD and running in first:
            settle()
        if action.kind is not Kind.ENDED:
            found.append(action)
            continue
        if running is not None and found[-1] != Action(Kind.RESHARD, action.fqn):
            found.append(action)  # nothing else says that its compute is over
        if running is not None and action.fqn in trains and action.fqn not in last:
            reduce(action.fqn)
    for fqn in sorted(last, key=lambda fqn: last[fqn]) if running is not None else ():
        reduce(fqn)
    settle()
    return found


def timed_step(steps: Sequence[Step], schedule: Schedule, phase: str = TRAIN) -> tuple[Action, ...]:
    """`training_step`, with the forwards and backwards where they begin, and where they end if nothing else tells."""
    if phase.startswith(NO_GRAD):
        return _without_backward(steps, schedule)
    if phase.startswith(NO_SYNC):
        steps = [replace(step, trains=False) for step in steps]
    actions = with_reshards(computes(steps, Kind.FORWARD) + computes(steps, Kind.BACKWARD), steps, schedule)
    actions = with_gathers(actions, schedule.ahead())
    return tuple(with_reductions(actions, steps, schedule))


def _without_backward(steps: Sequence[Step], schedule: Schedule) -> tuple[Action, ...]:
    """A forward at whose end all is given up that is still there."""
    actions = with_reshards(computes(steps, Kind.FORWARD), steps, schedule)
    actions = with_gathers(actions, schedule.ahead())
    left = dict.fromkeys(step.fqn for step in steps if step.shrinks or step.fqn in schedule.kept)
    return (*with_reductions(actions, steps, schedule), *(Action(Kind.RESHARD, fqn) for fqn in left))


def training_step(steps: Sequence[Step], schedule: Schedule | None = None, phase: str = TRAIN) -> tuple[Action, ...]:
    """Forward and backward of groups that run in the given order, the root (if any) around the others.

    Args:
        steps: the uses of groups.
        schedule: what is gathered ahead, kept and waited for; None for `one_ahead`.
        phase: another kind of forward, and what follows that.
    """
    actions = timed_step(steps, schedule or one_ahead(steps), phase)
    return tuple(action for action in actions if action.kind not in MARKS)
