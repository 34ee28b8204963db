"""A step as a list of actions: their text form, and the step that a plan expects.

`training_step` writes down what the eager engine does for a model whose groups run once each, in order; the engine's
record of such a step is the same list, which is how the tests hold the two together. It is made by passes from list to
list: the forwards and backwards of the groups, then the reshards, the gathers and the reductions between them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ._errors import ShardConfigValueError

ROOT_NAME = "(root)"


class Kind(StrEnum):
    """What is done to a group."""

    UNSHARD = "UNSHARD"  # its all-gather is issued
    WAIT = "WAIT"  # ... and waited for: the parameters can be read
    RESHARD = "RESHARD"  # the unsharded parameters are given up
    SHRINK = "SHRINK"  # they are given up but for what a few ranks keep among them
    REDUCE = "REDUCE"  # the reduction of its gradients is issued
    REDUCED = "REDUCED"  # ... and waited for: `.grad` is set
    FORWARD = "FORWARD"  # its forward begins; in no record, nor is the next
    BACKWARD = "BACKWARD"  # its backward begins


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
    """What the schedule must know of a group.

    Attributes:
        is_root: whether it is the root's.
        reshard_after_forward, shrinks: whether forward gives its weights up, or keeps some.
        trains: whether it gets gradients.
        reduces_first: whether backward waits for reductions before it gathers what follows this group.
    """

    fqn: str
    is_root: bool
    reshard_after_forward: bool
    trains: bool
    shrinks: bool = False
    reduces_first: bool = False


# Kinds of forwards, and what follows each: nothing, a backward, one whose gradients are reduced only later.
NO_GRAD, TRAIN, NO_SYNC = "no_grad", "train", "train, no sync"
AGAIN = ", again"  # behind them, where an earlier forward still waits for its backward

MAX_REDUCTIONS = 2  # reductions in flight: issuing one more waits for the oldest

Edges = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """When groups are gathered, how long they stay, and how far reductions may lag behind.

    No part of it depends on a clock or on memory at run time, so ranks that have the same one issue the same actions.

    Attributes:
        forward, backward: prefetch edges: a group, and those to gather when its forward (backward) begins and its own
            weights are there, in order of issue. A group that is in no list is gathered when it begins itself.
        kept: the groups that keep their weights between forward and backward, in order of their forwards.
        max_reductions: most reductions in flight; issuing one more waits for the oldest.
        reduces_first: whether backward of every group waits for all reductions before it gathers, which `Step` says of
            some groups anyway.
        in_flight: groups for whose reduction another number holds than `max_reductions`, and that number.
    """

    forward: Edges
    backward: Edges
    kept: tuple[str, ...]
    max_reductions: int = MAX_REDUCTIONS
    reduces_first: bool = False
    in_flight: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.max_reductions < 1:
            raise ShardConfigValueError(f"Schedule.max_reductions={self.max_reductions!r}: expected at least 1")
        for fqn, number in self.in_flight:
            if number < 1:
                raise ShardConfigValueError(f"Schedule.in_flight[{fqn!r}]={number!r}: expected at least 1")

    def ahead(self) -> dict[Action, tuple[str, ...]]:
        """The edges by the action at which they gather: a `FORWARD` or a `BACKWARD`."""
        found = {Action(Kind.FORWARD, fqn): groups for fqn, groups in self.forward}
        return found | {Action(Kind.BACKWARD, fqn): groups for fqn, groups in self.backward}


def forward_order(steps: Sequence[Step]) -> list[Step]:
    """The groups in the order in which their forwards begin: the root, which is around the others, first."""
    return [s for s in steps if s.is_root] + [s for s in steps if not s.is_root]


def backward_order(steps: Sequence[Step]) -> list[Step]:
    """The groups in the order in which their backwards begin."""
    return [s for s in steps if s.is_root] + [s for s in reversed(steps) if not s.is_root]


def kept_by_setting(steps: Sequence[Step]) -> tuple[str, ...]:
    """The groups that are not resharded after forward."""
    return tuple(step.fqn for step in forward_order(steps) if not step.reshard_after_forward)


def one_ahead(steps: Sequence[Step]) -> Schedule:
    """The schedule of the engine if nothing else is asked for: the next group is gathered when one begins."""

    def edges(order: Sequence[Step], resident: Sequence[str]) -> Edges:
        pairs = itertools.pairwise(order)
        return tuple((step.fqn, (ahead.fqn,)) for step, ahead in pairs if ahead.fqn not in resident)

    kept = kept_by_setting(steps)
    return Schedule(edges(forward_order(steps), ()), edges(backward_order(steps), kept), kept)


# ---- passes, list -> list


def computes(steps: Sequence[Step]) -> list[Action]:
    """The forwards and backwards of a step, each where it begins."""
    forward = [Action(Kind.FORWARD, step.fqn) for step in forward_order(steps)]
    return forward + [Action(Kind.BACKWARD, step.fqn) for step in backward_order(steps)]


def with_reshards(actions: Sequence[Action], steps: Sequence[Step], kept: Sequence[str]) -> list[Action]:
    """Give weights up behind each forward, but for what is kept, and behind each backward; the root's at the end."""
    by_fqn, stays = {step.fqn: step for step in steps}, set(kept)
    roots = [step for step in steps if step.is_root]
    found: list[Action] = []

    def give_up(step: Step) -> None:
        if step.fqn not in stays:
            found.append(Action(Kind.SHRINK if step.shrinks else Kind.RESHARD, step.fqn))

    for place, action in enumerate(actions):
        step = by_fqn[action.fqn]
        found.append(action)
        if action.kind is Kind.BACKWARD and not step.is_root:
            found.append(Action(Kind.RESHARD, action.fqn))
        elif action.kind is Kind.FORWARD:
            ends = place + 1 == len(actions) or actions[place + 1].kind is Kind.BACKWARD
            for each in [] if step.is_root else [step]:
                give_up(each)
            for each in roots if ends else []:
                give_up(each)
    return found + [Action(Kind.RESHARD, step.fqn) for step in roots]


def with_gathers(actions: Sequence[Action], ahead: Mapping[Action, Sequence[str]]) -> list[Action]:
    """Gather what a forward or a backward needs where it begins, unless that is there, and then what `ahead` says."""
    gathering: set[str] = set()
    resident: set[str] = set()
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
            for fqn in ahead.get(action, ()):
                unshard(fqn)
        elif action.kind in (Kind.RESHARD, Kind.SHRINK):
            resident.remove(action.fqn)
    return found


def with_reductions(actions: Sequence[Action], steps: Sequence[Step], schedule: Schedule) -> list[Action]:
    """Reduce the gradients of a group behind its last reshard, so that the buffer can take the place of the weights."""
    trains = {step.fqn for step in steps if step.trains}
    first = {step.fqn for step in steps if step.reduces_first or schedule.reduces_first}
    allowed = dict(schedule.in_flight)
    reducing: deque[Action] = deque()
    found: list[Action] = []
    running: str | None = None  # whose backward it is

    def settle(most: int = 0) -> None:
        while len(reducing) > most:
            found.append(reducing.popleft())

    for action in actions:
        if action.kind is Kind.BACKWARD:
            running = action.fqn
        elif action.kind is Kind.UNSHARD and running in first:
            settle()
        found.append(action)
        if action.kind is Kind.RESHARD and running is not None and action.fqn in trains:
            settle(allowed.get(action.fqn, schedule.max_reductions) - 1)
            reducing.append(Action(Kind.REDUCED, action.fqn))
            found.append(Action(Kind.REDUCE, action.fqn))
    settle()
    return found


def timed_step(steps: Sequence[Step], schedule: Schedule, phase: str = TRAIN) -> tuple[Action, ...]:
    """`training_step`, with the forwards and backwards where they begin: what can be simulated."""
    if phase.startswith(NO_GRAD):
        return _without_backward(steps, schedule)
    if phase.startswith(NO_SYNC):
        steps = [replace(step, trains=False) for step in steps]
    actions = with_reshards(computes(steps), steps, schedule.kept)
    actions = with_gathers(actions, schedule.ahead())
    return tuple(with_reductions(actions, steps, schedule))


def _without_backward(steps: Sequence[Step], schedule: Schedule) -> tuple[Action, ...]:
    """A forward at whose end all is given up that is still there."""
    forwards = [Action(Kind.FORWARD, step.fqn) for step in forward_order(steps)]
    roots = sum(step.is_root for step in steps)
    actions = with_reshards(forwards, steps, schedule.kept)
    actions = with_gathers(actions[: len(actions) - roots], schedule.ahead())
    left = [step.fqn for step in steps if step.shrinks or step.fqn in schedule.kept]
    return (*actions, *(Action(Kind.RESHARD, fqn) for fqn in left))


def training_step(steps: Sequence[Step], schedule: Schedule | None = None, phase: str = TRAIN) -> tuple[Action, ...]:
    """Forward and backward of groups that run once each in the given order, the root (if any) around the others.

    Args:
        steps: the groups.
        schedule: what is gathered ahead, kept and waited for; None for `one_ahead`.
        phase: another kind of forward, and what follows that.
    """
    actions = timed_step(steps, schedule or one_ahead(steps), phase)
    return tuple(action for action in actions if action.kind not in (Kind.FORWARD, Kind.BACKWARD))
