"""Uses whose backward begins only where their weights are needed.

Under a budget, that is how it begins inside of checkpoints. If the weights of a use were gathered where its outputs are
reached, they would lie beside those that the recomputation needs, and could not yield: an operator may have read them.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch

from .._group.group import ParamGroup
from .._torch.core import map_tensors
from .node import Use
from .parameters import Shown


class LateWeight(torch.Tensor):
    """Stands in a module for a weight that is not there yet; an operator that meets it gets what `find` returns.

    Args:
        find: makes the weight readable and returns it.
    """

    _is_param = True  # isinstance(it, nn.Parameter) holds
    _find: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, find: Callable[[], torch.Tensor]) -> LateWeight:
        made = torch.empty(0, device="meta").as_subclass(cls)
        made._find = find
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def found(tensor: torch.Tensor) -> torch.Tensor:
            return tensor._find() if isinstance(tensor, LateWeight) else tensor

        return func(*map_tensors(found, args), **map_tensors(found, kwargs or {}))


class LateUses:
    """The uses that backward has reached and not begun, one of a group.

    It begins where a handle is read, or where the forward runs again, be it that of a part of the module alone, which
    has a checkpoint of its own and no hooks of ours: its weights are `LateWeight`s until then.
    """

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._begin: dict[ParamGroup, Callable[[], None]] = {}

    def __contains__(self, group: ParamGroup) -> bool:
        return group in self._begin

    def put_off(self, use: Use, begin: Callable[[], None]) -> None:
        """Backward has reached a use; `begin` begins its backward, and shows its weights."""
        group = use.group
        self._begin[group] = begin
        self._shown.late[group] = [LateWeight(partial(self._weight, group, i)) for i in range(len(group.params))]
        self._shown.hide(group)

    def _weight(self, group: ParamGroup, index: int) -> torch.Tensor:
        self.begin(group)
        entries = group.entries()
        assert entries is not None
        return entries.there(index)

    def begin(self, group: ParamGroup) -> None:
        """Weights of this group are needed: its backward begins, if it was put off."""
        if self._begin and (begin := self._begin.get(group)) is not None:
            self.end(group)
            begin()

    def begin_again(self, group: ParamGroup, repeated: Container[ParamGroup]) -> None:
        """A forward of this group runs again: its backward begins, if it was put off.

        Not that of a group with several uses (`repeated`): it may be the forward of an earlier one.
        """
        if self._begin and group not in repeated:
            self.begin(group)

    def end(self, group: ParamGroup) -> None:
        """Nothing is put off for this group any more."""
        self._begin.pop(group, None)
        self._shown.late.pop(group, None)

    def clear(self) -> None:
        """Nor for any other."""
        self._begin.clear()
        self._shown.late.clear()
