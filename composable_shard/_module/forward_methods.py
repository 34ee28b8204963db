"""Methods of sharded modules that run like a forward (`register_fsdp_forward_method`)."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._torch.distributed import registered_by_torch
from ..errors import ShardConfigStateError, ShardConfigValueError
from .calls import run, trace
from .forward_hooks import post_forward, pre_forward
from .sharded_reads import unexplained
from .state import state_of


class ForwardMethod:
    """A method of a sharded module that runs as a forward.

    The module refers to this object, which has only a weak reference to the module.

    Args:
        module: the module.
        name: the name of the method.
        method: the attribute of that name: a method bound to the module, or any other callable.
    """

    def __init__(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        self._takes_module = getattr(method, "__self__", None) is module and hasattr(method, "__func__")
        function = unexplained(method.__func__) if self._takes_module else method  # type: ignore[attr-defined]
        functools.update_wrapper(self, function)
        self._module = weakref.ref(module)
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            raise ShardConfigStateError(f"{self._name}: its module has been deleted")
        return _forward_as(self.__wrapped__, self._takes_module, module, args, kwargs)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardMethod:
        module = self._module()
        assert module is not None
        made = copy.deepcopy(module, memo)
        if self._takes_module:
            return self.on(made)
        return ForwardMethod(made, self._name, copy.deepcopy(self.__wrapped__, memo))  # type: ignore[attr-defined]

    def on(self, module: nn.Module) -> ForwardMethod:
        """The same method of a copy of the module."""
        function: Any = self.__wrapped__  # type: ignore[attr-defined]
        return ForwardMethod(module, self._name, types.MethodType(function, module) if self._takes_module else function)


def _forward_as(
    function: Callable[..., Any], takes_module: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cast = pre_forward(module, args, kwargs)
        if cast is not None:
            args, kwargs = cast
        output = function(module, *args, **kwargs) if takes_module else function(*args, **kwargs)
        return post_forward(module, args, output)

    return (trace if torch.compiler.is_compiling() else run)(module, call, args, kwargs)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make another method of a sharded module run like its forward: on unsharded parameters, and with a backward.

    Modules that are not sharded are left unchanged, so code may call this for any module.

    Args:
        module: the module.
        method_name: name of the method, for example ``generate`` or ``encode``: a method of the class, or a function
            that was set on this module only.

    Raises:
        ShardConfigValueError: the module has no such method.
    """
    if state_of(module) is None:
        return
    adopt_forward_methods(module)
    method = getattr(module, method_name, None)
    if isinstance(method, ForwardMethod) and method._module() is module:
        return
    if not callable(method) or isinstance(method, nn.Module):
        raise ShardConfigValueError(
            f"method_name: {type(module).__name__} does not have a method {method_name!r}; pass the name of a method"
        )
    module.__dict__[method_name] = ForwardMethod(module, method_name, method)


def adopt_forward_methods(module: nn.Module) -> None:
    """Replace the wrappers that torch's own `register_fsdp_forward_method` has set on a module by `ForwardMethod`.

    When such a wrapper is called, its first step is `_pre_forward` of the module's FSDP2 state, which calls this
    function (`_fsdp2/state.py`). Its next step is to call the method that its closure holds. So the method in the
    closure is replaced by the `ForwardMethod` as well, which ends the forward even if the method fails.
    """
    for name, value in list(module.__dict__.items()):
        cell = registered_by_torch(value)
        if cell is not None:
            method = cell.cell_contents
            while (inner := registered_by_torch(method)) is not None:
                method = inner.cell_contents  # registered several times
            ours = method if isinstance(method, ForwardMethod) else ForwardMethod(module, name, method)
            cell.cell_contents = module.__dict__[name] = ours
