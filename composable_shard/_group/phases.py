"""What can happen to a group: two small tables, one for its parameters and one for its gradients."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from .._errors import PhaseError


class ParamPhase(StrEnum):
    """Where the weights are."""

    SHARDED = "sharded"
    GATHERING = "gathering"  # a gather was issued and not yet waited for
    UNSHARDED = "unsharded"
    RESIDENT = "resident"  # cut among a few ranks, between forward and backward


class GradPhase(StrEnum):
    """Where the gradients are."""

    NONE = "none"
    KEPT = "kept"  # unsharded, waiting for a backward with gradient sync
    REDUCING = "reducing"  # at least one reduction is in flight


# What runs many times in a step asks for these: to look a member up in its enumeration takes as long as three calls.
SHARDED, GATHERING, UNSHARDED, RESIDENT = ParamPhase

PARAM_TRANSITIONS = {
    ParamPhase.SHARDED: {ParamPhase.GATHERING},
    ParamPhase.GATHERING: {ParamPhase.UNSHARDED},
    ParamPhase.UNSHARDED: {ParamPhase.SHARDED, ParamPhase.RESIDENT},
    ParamPhase.RESIDENT: {ParamPhase.GATHERING, ParamPhase.SHARDED},
}
GRAD_TRANSITIONS = {
    GradPhase.NONE: {GradPhase.KEPT, GradPhase.REDUCING},
    GradPhase.KEPT: {GradPhase.KEPT, GradPhase.REDUCING, GradPhase.NONE},
    GradPhase.REDUCING: {GradPhase.REDUCING, GradPhase.NONE, GradPhase.KEPT},
}
TRANSITIONS: dict[Any, Any] = {**PARAM_TRANSITIONS, **GRAD_TRANSITIONS}


def illegal(group: str, old: StrEnum, new: StrEnum) -> PhaseError:
    """The error of a group whose table does not list a phase after another."""
    return PhaseError(f"group {group}: cannot go from {old.value} to {new.value}; please report this")
