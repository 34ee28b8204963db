"""Deferred uses: backward has reached them, and gathers their weights only when something asks for one.

Under a budget, uses in checkpoints are deferred. Otherwise their weights would be gathered when backward reaches their
outputs, and be live beside the weights that the recomputation gathers first. They could not be given up for these
either, as an operator might have read them already.
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
    """Installed in a module in the place of a deferred weight; operators compute with what `find` returns instead.

    Args:
        find: gathers the weight and returns it.
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
    """The deferred uses, at most one of each group.

    The backward of a deferred use begins when a handle of its weights is read, or its forward is recomputed. As a
    checkpoint around a part of the module recomputes that part without calling our forward hooks, `LateWeight`s are
    installed in the module, and the first operator that gets one begins the backward.
    """

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._begin: dict[ParamGroup, Callable[[], None]] = {}

    def __contains__(self, group: ParamGroup) -> bool:
        return group in self._begin

    def put_off(self, use: Use, begin: Callable[[], None]) -> None:
        """Defer a use that backward has reached; `begin` will gather and install its weights."""
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
        """Weights of this group are needed: begin the backward of its deferred use, if it has one."""
        if self._begin and (begin := self._begin.get(group)) is not None:
            self.end(group)
            begin()

    def begin_again(self, group: ParamGroup, repeated: Container[ParamGroup]) -> None:
        """A forward of this group is recomputed: begin the backward of its deferred use, if it has one.

        Not for a group with several uses (`repeated`): the forward may be that of an earlier use.
        """
        if self._begin and group not in repeated:
            self.begin(group)

    def end(self, group: ParamGroup) -> None:
        """The group has no deferred use any more."""
        self._begin.pop(group, None)
        self._shown.late.pop(group, None)

    def clear(self) -> None:
        """No group has a deferred use any more."""
        self._begin.clear()
        self._shown.late.clear()
