"""What can happen to a group: two small tables, one for its parameters and one for its gradients."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, TypeVar

from ._errors import PhaseError


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

P = TypeVar("P", bound=StrEnum)


class Named(Protocol):
    """What has a name to show."""

    @property
    def name(self) -> str: ...


def moved(table: dict[P, set[P]], old: P, new: P, of: Named) -> P:
    """The new phase of a group.

    Raises:
        PhaseError: the table does not list it after the old one.
    """
    if new not in table[old]:
        raise PhaseError(f"group {of.name}: cannot go from {old.value} to {new.value}; please report this")
    return new
