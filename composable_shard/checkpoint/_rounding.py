"""Save and load the rounding state of gradients that are communicated with fewer bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._comm.lowbit import BETWEEN_REPLICAS
from .._comm.rounding import Rounding
from .._status import sharded_states
from ._state import PerRank


class RoundingState(PerRank):
    """The rounding state of a model's gradients under a `CommPolicy`, of every rank.

    Put one into the state that you save and load, so that a resumed run is bitwise identical. It holds the position in
    the random numbers, and the rounding residuals of the last gradients (`error_feedback`). If the number of ranks
    changes, each rank continues with the mean of all ranks' residuals, which preserves their average. Residuals
    between replicas and the ranks' own positions in the random numbers are then lost.

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
        return {
            str(index): {"number": each.number, "left": {name: tensor.clone() for name, tensor in each.left.items()}}
            for index, each in enumerate(self._roundings)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, rounding in enumerate(self._roundings):
            saved = state.get(str(index), {"number": 0, "left": {}})
            rounding.put(saved["number"], saved["left"])


def _resize(saved: list[dict[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    return {key: {"number": group["number"], "left": _means(saved, key)} for key, group in saved[0].items()}


def _means(saved: list[dict[str, Any]], key: str) -> dict[str, torch.Tensor]:
    """The mean of the residuals of all ranks that saved, by parameter."""
    names = [name for name in saved[0][key]["left"] if not name.endswith(BETWEEN_REPLICAS)]
    return {name: _sum([each[key]["left"][name] for each in saved]) / len(saved) for name in names}


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total
