"""Save and load the rounding state of gradients that are communicated with fewer bits."""

from __future__ import annotations

from typing import Any

from torch import nn

from .._comm.rounding import Rounding
from .._module.status import sharded_states
from ._state import PerRank


class RoundingState(PerRank):
    """The rounding state of a model's gradients under a `CommPolicy`, of every rank.

    Put one into the state that you save and load, so that a resumed run is bitwise identical. It holds the position in
    the random numbers. If the number of ranks changes, all ranks continue at the position of rank 0.

    Args:
        model: the sharded model. Its modules must be in the same order as in the run that saved.

    Raises:
        ShardConfigValueError: the model has no sharded module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(_Roundings([state.declaration.rounding for state in sharded_states(model)]), _resize)


class _Roundings:
    """Reads and sets the roundings of all groups, in the order of their modules."""

    def __init__(self, roundings: list[Rounding]) -> None:
        self._roundings = roundings

    def state_dict(self) -> dict[str, Any]:
        return {str(index): {"number": each.number} for index, each in enumerate(self._roundings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, rounding in enumerate(self._roundings):
            rounding.resume(state.get(str(index), {"number": 0})["number"])


def _resize(saved: list[dict[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    return saved[0]
