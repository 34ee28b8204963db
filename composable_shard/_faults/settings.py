"""The settings in the note of an optimizer step: its learning rates, and which parameters have a gradient.

If ranks differ in these settings, their weights diverge, and no collective shows it. A note that equals the last one
costs nothing. But a learning rate schedule changes the rate in each step, and for each new note all ranks ask each
other, which takes time. The number of changes in notes is therefore limited by a credit. When the credit is used up,
only some of the notes contain the settings. All ranks count in the same way.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

_CREDIT = 100  # how many changes in a row are noted
_NOW_AND_THEN = 20  # without credit, one change in this many is noted
_SHOWN = 4  # maximum number of learning rates in a note

Rates = tuple[float | str, ...]
Having = tuple[bool, ...]


def rates_of(optimizer: torch.optim.Optimizer) -> Rates:
    """The learning rate of each param group."""
    return tuple(_number(group.get("lr")) for group in optimizer.param_groups)


def _number(rate: Any) -> float | str:
    if isinstance(rate, torch.Tensor):
        return rate.item() if rate.device.type == "cpu" else "on a device"  # reading it would block the host
    return float(rate) if rate is not None else "none"


def sharded_state_of(optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, Any]:
    """The state of an optimizer by parameter, sharded like the parameters.

    An optimizer that stores its state in another form has a method `sharded_state`, which is a collective, and a method
    `put_sharded_state`, which takes the state back.
    """
    made = getattr(optimizer, "sharded_state", None)
    state: Mapping[torch.Tensor, Any] = optimizer.state if made is None else made()
    return state


def put_sharded_state(optimizer: torch.optim.Optimizer, state: Mapping[torch.Tensor, Any]) -> None:
    """Pass the state of `sharded_state_of`, changed in place, back to an optimizer that stores it in another form."""
    put = getattr(optimizer, "put_sharded_state", None)
    if put is not None:
        put(state)


class Credit:
    """Decides which steps note their settings, in one process group."""

    __slots__ = ("_credit", "_last", "_text", "_untold")

    def __init__(self) -> None:
        self._last: tuple[Rates, Having] = ((), ())
        self._text = ""
        self._credit = _CREDIT
        self._untold = 0

    def in_note(self, rates: Rates, having: Having) -> str:
        """The text about settings in the note of a step; empty if the note omits them.

        Args:
            rates: learning rates.
            having: whether each stepped parameter of the process group has a gradient.
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
    return f"{zlib.crc32(repr(values).encode()):08x}"  # `hash` of a string differs between processes
