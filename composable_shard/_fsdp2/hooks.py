"""Forward hooks of our modules that a tool removes and replaces by its own, as torch's `FSDPMemTracker` does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .._torch.core import forward_hooks
from ..errors import ShardConfigAttributeError

if TYPE_CHECKING:
    from .state import StateFacade


def _stand_in(*unused: Any) -> None:
    """Do nothing, in place of a disabled hook."""


class Hooks:
    """Our forward pre-hooks, or forward hooks, of a state's modules; replaces torch's `RemovableHandle`.

    Our hooks are disabled when a tool removes them. The tool then registers a hook and sets its handle on the state. If
    that hook is the state's own `_pre_forward` or `_post_forward`, as in torch, our hook is enabled again. Otherwise it
    is the tool's hook.
    """

    def __init__(self, state: StateFacade, name: str, ours: Callable[..., Any]) -> None:
        self._state = weakref.ref(state)
        self._name, self._before, self._ours = name, name == "_pre_forward", ours
        self._lent: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()

    def are_lent(self, module: nn.Module) -> bool:
        """Whether a tool's hook replaces ours on a module."""
        return module in self._lent

    def remove(self) -> None:
        """Disable our hooks; if a tool's hooks replace them already, remove those."""
        for handle in self._lent.values():
            handle.remove()
        state = self._state()
        for module in state._modules if state is not None and not self._lent else ():
            self._swap(module, self._ours, _stand_in)

    def take(self, handle: Any) -> None:
        """Note a hook that a tool has registered on one of the modules.

        Raises:
            ShardConfigAttributeError: `handle` does not belong to a forward hook of these modules.
        """
        state = self._state()
        assert state is not None
        for module in state._modules:
            hooks = forward_hooks(module, self._before)
            if isinstance(handle, RemovableHandle) and handle.hooks_dict_ref() is hooks and handle.id in hooks:
                break
        else:
            raise ShardConfigAttributeError(
                f"{self._name}_hook_handle: expected the handle of a forward hook on one of the state's modules; "
                "register the hook on the module and set the handle that this returns"
            )
        if hooks[handle.id] != getattr(state, self._name):
            self._swap(module, self._ours, _stand_in)
            self._lent[module] = handle
            return
        handle.remove()
        self._swap(module, _stand_in, self._ours)
        self._lent.pop(module, None)

    def _swap(self, module: nn.Module, old: Callable[..., Any], new: Callable[..., Any]) -> None:
        hooks = forward_hooks(module, self._before)
        hooks.update({key: new for key, hook in hooks.items() if hook is old})
