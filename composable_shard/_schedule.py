"""A step as a list of actions: their text form, and the step that a plan expects.

`training_step` writes down what the eager engine does for a model whose groups run once each, in order; the engine's
record of such a step is the same list, which is how the tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


MAX_REDUCTIONS = 2  # reductions in flight: issuing one more waits for the oldest


class _Writer:
    """Writes the actions of one step, with the residence rules that the engine keeps."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.gathering: set[str] = set()
        self.resident: set[str] = set()
        self.reducing: list[str] = []

    def act(self, kind: Kind, fqn: str) -> None:
        self.actions.append(Action(kind, fqn))

    def unshard(self, fqn: str) -> None:
        if fqn not in self.resident and fqn not in self.gathering:
            self.gathering.add(fqn)
            self.act(Kind.UNSHARD, fqn)

    def enter(self, fqn: str, ahead: str | None) -> None:
        self.unshard(fqn)
        if fqn in self.gathering:
            self.gathering.remove(fqn)
            self.resident.add(fqn)
            self.act(Kind.WAIT, fqn)
        if ahead is not None:
            self.unshard(ahead)

    def enter_behind(self, fqn: str, ahead: str | None) -> None:
        """The same, with what must be gathered behind the reductions in flight."""
        away = {fqn, ahead} - {None} - self.resident - self.gathering
        if fqn in away:
            self.settle()
        self.enter(fqn, None)
        if away:
            self.settle()
        if ahead is not None:
            self.unshard(ahead)

    def reshard(self, fqn: str, shrinks: bool = False) -> None:
        self.resident.remove(fqn)
        self.act(Kind.SHRINK if shrinks else Kind.RESHARD, fqn)

    def settle(self) -> None:
        while self.reducing:
            self.act(Kind.REDUCED, self.reducing.pop(0))

    def reduce(self, fqn: str) -> None:
        if len(self.reducing) == MAX_REDUCTIONS:
            self.act(Kind.REDUCED, self.reducing.pop(0))
        self.reducing.append(fqn)
        self.act(Kind.REDUCE, fqn)


def training_step(steps: Sequence[Step]) -> tuple[Action, ...]:
    """Forward and backward of groups that run once each in the given order, the root (if any) around the others.

    One gather is issued ahead in both directions. A group is resharded before its reduction is issued, so that the
    reduction's buffer can take the place of the weights; at most `MAX_REDUCTIONS` reductions are in flight.
    """
    to = _Writer()
    if not steps:
        return ()
    order = [s for s in steps if s.is_root] + [s for s in steps if not s.is_root]
    for step, ahead in zip(order, [*order[1:], None], strict=True):
        to.enter(step.fqn, ahead.fqn if ahead else None)
        if step.reshard_after_forward and not step.is_root:
            to.reshard(step.fqn, step.shrinks)
    for step in order:
        if step.reshard_after_forward and step.is_root:
            to.reshard(step.fqn, step.shrinks)
    entered = [s for s in order if s.is_root] + [s for s in reversed(order) if not s.is_root]
    for step, ahead in zip(entered, [*entered[1:], None], strict=True):
        if step.reduces_first:
            to.enter_behind(step.fqn, ahead.fqn if ahead else None)
        else:
            to.enter(step.fqn, ahead.fqn if ahead else None)
        if not step.is_root:
            to.reshard(step.fqn)
            if step.trains:
                to.reduce(step.fqn)
    for step in order:
        if step.is_root:
            to.reshard(step.fqn)
            if step.trains:
                to.reduce(step.fqn)
    to.settle()
    return tuple(to.actions)
