"""What the note of an optimizer's step says of it: its learning rates, and which parameters have a gradient.

Ranks whose learning rates or gradients differ train apart, and no collective would show it. A note that is the same as
the last time costs nothing, but a schedule changes the rate at each step, and what is new asks all ranks. So changes
have a credit, and when it is used up only some of the steps say more than that they are made. All ranks count alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

_CREDIT = 100  # changes that are told in a row
_NOW_AND_THEN = 20  # steps between two that are told without credit
_SHOWN = 4  # learning rates in a note

Rates = tuple[float | str, ...]
Having = tuple[bool, ...]


def rates_of(optimizer: torch.optim.Optimizer) -> Rates:
    """The learning rate of each param group."""
    return tuple(_number(group.get("lr")) for group in optimizer.param_groups)


def _number(rate: Any) -> float | str:
    if isinstance(rate, torch.Tensor):
        return rate.item() if rate.device.type == "cpu" else "on a device"  # which nobody waits for here
    return float(rate) if rate is not None else "none"


def sharded_state_of(optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, Any]:
    """The state of an optimizer by parameter, cut as the parameters are.

    An optimizer that keeps it in another way has a method `sharded_state`, which is a collective, and takes it back by
    `put_sharded_state`.
    """
    made = getattr(optimizer, "sharded_state", None)
    state: Mapping[torch.Tensor, Any] = optimizer.state if made is None else made()
    return state


def put_sharded_state(optimizer: torch.optim.Optimizer, state: Mapping[torch.Tensor, Any]) -> None:
    """The state that `sharded_state_of` gave was changed in place: let the optimizer have it, if it does not yet."""
    put = getattr(optimizer, "put_sharded_state", None)
    if put is not None:
        put(state)


class Credit:
    """Decides which steps tell their settings, in one process group."""

    __slots__ = ("_credit", "_last", "_text", "_untold")

    def __init__(self) -> None:
        self._last: tuple[Rates, Having] = ((), ())
        self._text = ""
        self._credit = _CREDIT
        self._untold = 0

    def in_note(self, rates: Rates, having: Having) -> str:
        """What the note of a step says of its settings; empty if it says nothing.

        Args:
            rates: learning rates.
            having: for each parameter of the process group that is stepped, whether it has a gradient.
        """
        if (rates, having) == self._last:
            self._credit = min(self._credit + 1, _CREDIT)
            self._untold = 0
            return self._text
        self._last, self._text = (rates, having), _in_words(rates, having)
        if self._credit:
            self._credit -= 1
            return self._text
        self._untold = (self._untold + 1) % _NOW_AND_THEN
        return "" if self._untold else self._text


def _in_words(rates: Rates, having: Having) -> str:
    shown = ", ".join(map(str, rates[:_SHOWN]))
    more = f", ... ({len(rates)} in all, {_digest(rates)})" if len(rates) > _SHOWN else ""
    mixed = f" ({_digest(having)})" if len({*having}) > 1 else ""
    return f", learning rate {shown}{more}, {sum(having)} of {len(having)} gradients{mixed}"


def _digest(values: Rates | Having) -> str:
    return f"{zlib.crc32(repr(values).encode()):08x}"  # `hash` of a text differs between processes
