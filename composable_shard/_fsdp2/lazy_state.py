"""The state that torch finds for a sharded module before code uses one of its attributes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import nn

from .._module.state import ShardState, state_of
from .._torch.distributed import OurState, register_state, registered_state


class LazyState(OurState):
    """Turns into a `StateFacade` when code first uses one of its attributes; that loads the facades.

    Args:
        modules: the modules of one call of `fully_shard`; held weakly, because they refer to this object.
        state: their state.
    """

    def __init__(self, modules: Sequence[nn.Module], state: ShardState) -> None:
        own = object.__getattribute__(self, "__dict__")
        own.update(_known=[weakref.ref(module) for module in modules], _own=state)
        for module in modules:
            register_state(module, self)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(_load(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_load(self), name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyState:
        own = object.__getattribute__(self, "__dict__")
        made = memo[id(self)] = LazyState.__new__(LazyState)
        modules = [copy.deepcopy(module, memo) for known in own["_known"] if (module := known()) is not None]
        LazyState.__init__(made, modules, copy.deepcopy(own["_own"], memo))
        return made


def _load(lazy: LazyState) -> Any:
    """Turn this object into a `StateFacade`, and return it."""
    own = dict(object.__getattribute__(lazy, "__dict__"))
    facade_class = import_module(".state", __package__).StateFacade  # imported here, because few programs need it
    object.__setattr__(lazy, "__class__", facade_class)
    facade: Any = lazy
    facade.load(**own)
    return facade


def registered(module: nn.Module) -> Any:
    """The state of a sharded module, which `torch.distributed.fsdp.fully_shard.state` returns; None for others."""
    return registered_state(module) if state_of(module) is not None else None
