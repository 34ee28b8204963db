"""The phases of a group's parameters and gradients, and tables of the allowed transitions."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from ..errors import PhaseError


class ParamPhase(StrEnum):
    """The state of a group's parameters."""

    SHARDED = "sharded"
    GATHERING = "gathering"  # a gather was issued and not yet waited for
    UNSHARDED = "unsharded"
    RESIDENT = "resident"  # sharded among a few ranks, between forward and backward


class GradPhase(StrEnum):
    """The state of a group's gradients."""

    NONE = "none"  # neither accumulated nor in flight; `.grad` may be set
    ACCUMULATED = "accumulated"  # unsharded gradients, or pieces that wait for an all-reduce
    REDUCING = "reducing"  # at least one reduction is in flight


# For code that runs many times in a step: looking up an enum member takes as long as three calls.
SHARDED, GATHERING, UNSHARDED, RESIDENT = ParamPhase
AWAY = (SHARDED, RESIDENT)  # a gather must be issued before the parameters can be read

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
    """The reasons why a group's unsharded parameters outlive the use that has gathered them.

    Attributes:
        pinned: whether a user has called `unshard`. If so, the parameters stay unsharded until `reshard`, until the
            group's own next use reshards them, until the end of a backward that reshards them, or until they change.
        kept: whether the parameters have outlived a backward because of `set_reshard_after_backward(False)`.
    """

    __slots__ = ("kept", "pinned")

    def __init__(self) -> None:
        self.pinned = self.kept = False

    def pin(self) -> None:
        self.pinned = True

    def keep(self) -> None:
        self.kept = True

    def end(self) -> None:
        """Reset the reasons: the parameters were released."""
        self.pinned = self.kept = False


def illegal(group: str, old: StrEnum, new: StrEnum) -> PhaseError:
    """Make the error of a transition that is not in the tables."""
    return PhaseError(f"group {group}: cannot go from {old.value} to {new.value}; this is a bug, please report it")
