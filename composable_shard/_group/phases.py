"""The group phases, and two small tables of which may follow which: one for parameters and one for gradients."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from .._errors import PhaseError


class ParamPhase(StrEnum):
    """Where the parameters of a group are."""

    SHARDED = "sharded"
    GATHERING = "gathering"  # a gather was issued and not yet waited for
    UNSHARDED = "unsharded"
    RESIDENT = "resident"  # cut among a few ranks, between forward and backward


class GradPhase(StrEnum):
    """Where the gradients of a group are."""

    NONE = "none"  # neither accumulated nor in flight; `.grad` may have any
    ACCUMULATED = "accumulated"  # unsharded ones, or pieces that wait for an all-reduce
    REDUCING = "reducing"  # at least one reduction is in flight


# For code that runs many times in a step: looking a member up in its enumeration takes as long as three calls.
SHARDED, GATHERING, UNSHARDED, RESIDENT = ParamPhase
AWAY = (SHARDED, RESIDENT)  # a gather must be issued before the weights can be read

PARAM_TRANSITIONS = {
    ParamPhase.SHARDED: {ParamPhase.GATHERING},
    ParamPhase.GATHERING: {ParamPhase.UNSHARDED},
    ParamPhase.UNSHARDED: {ParamPhase.SHARDED, ParamPhase.RESIDENT},
    ParamPhase.RESIDENT: {ParamPhase.GATHERING, ParamPhase.SHARDED},
}
GRAD_TRANSITIONS = {
    GradPhase.NONE: {GradPhase.ACCUMULATED, GradPhase.REDUCING},
    GradPhase.ACCUMULATED: {GradPhase.ACCUMULATED, GradPhase.REDUCING, GradPhase.NONE},
    GradPhase.REDUCING: {GradPhase.REDUCING, GradPhase.NONE, GradPhase.ACCUMULATED},
}
TRANSITIONS: dict[Any, Any] = {**PARAM_TRANSITIONS, **GRAD_TRANSITIONS}


class Stay:
    """Why the weights of a group outlive the use that has gathered them.

    Attributes:
        pinned: whether a user has called `unshard`. Then the weights stay until `reshard`, until the group's own next
            use reshards them, until a backward ends that is to reshard them, or until its parameters change.
        kept: whether the weights have outlived a backward, because `set_reshard_after_backward(False)` was in force.
    """

    __slots__ = ("kept", "pinned")

    def __init__(self) -> None:
        self.pinned = self.kept = False

    def pin(self) -> None:
        self.pinned = True

    def keep(self) -> None:
        self.kept = True

    def end(self) -> None:
        """The weights were released."""
        self.pinned = self.kept = False


def illegal(group: str, old: StrEnum, new: StrEnum) -> PhaseError:
    """The error of a transition that is not in the tables."""
    return PhaseError(f"group {group}: cannot go from {old.value} to {new.value}; please report this")
