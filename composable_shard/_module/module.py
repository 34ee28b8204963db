"""The class of sharded modules, and the methods that users call. `calls.py` has a table of the ways into a forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from .._group.phases import GATHERING
from .._policies import as_bool
from .._torch.core import (
    current_backward,
)
from .._torch.distributed import local_part, register_copy
from ..errors import ShardConfigStateError
from .build import bound_of
from .calls import (
    NO_HOOKS,
    assign_number,
    call_bypassing,
    call_class,
    call_counted,
    is_plain,
    number_copy,
    recomputation_hooks,
    run,
    surround_compiled_code,
    trace,
)
from .forward_methods import ForwardMethod, adopt_forward_methods
from .methods import Methods, refuse_newer
from .sharded_reads import explaining_methods
from .state import EAGER, STATE, ShardState, states_below


class UnshardHandle(TorchUnshardHandle):
    """A handle for an unshard that may still be in flight."""

    def __init__(self, states: Sequence[ShardState]) -> None:
        self._states = states  # not their groups: the first forward of an enclosing root makes others

    def wait(self) -> None:
        """Wait, and install the unsharded parameters in the module; a no-op if they are installed or resharded."""
        for bound in [state.bound for state in self._states]:
            if bound is not None and bound.group is not None and bound.group.phase is GATHERING:
                bound.engine.unshard(bound.group, wait=True)


class FSDPModule(Methods):
    """Base of the class of every sharded module; use it for `isinstance` and for the methods below."""

    _leads_to_torchs: bool  # whether the original class has torch's own `_call_impl`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return trace(self, partial(call_class, call), args, kwargs)  # type: ignore[arg-type]
        if self._compiled_call_impl is not None:  # type: ignore[attr-defined]
            surround_compiled_code(self)  # type: ignore[arg-type]
            return run(self, partial(call_class, call), args, kwargs)  # type: ignore[arg-type]
        if is_plain(call, self):  # type: ignore[arg-type]
            return run(self, None, args, kwargs)  # type: ignore[arg-type]
        return run(self, partial(call_counted, call), args, kwargs)  # type: ignore[arg-type]

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch's own `Module.__call__`. Usually ours is around it; then this only passes the call on.

        Two types of calls come here without our `__call__`:

        - All calls of a module bypass it. For example, `torch.compile` calls the `__call__` that it saved before the
          module was sharded, or code calls `nn.Module.__call__`. Then the forward runs here as it would there (`run`),
          and so does its recomputation (`recomputes_bypass`).
        - Only a recomputation bypasses it: an activation checkpoint is around `super().__call__` in the user's class,
          so the original call went through ours. The recomputation only needs saved-tensor hooks
          (`recomputation_hooks`).
        """
        state: ShardState = self.__dict__[STATE]
        call = super()._call_impl  # type: ignore[misc]
        if state.way is not EAGER or state.calls:
            return call(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self(*args, **kwargs)
        if current_backward() < 0 or state.recomputes_bypass():
            return run(self, partial(call_bypassing, call), args, kwargs)  # type: ignore[arg-type]
        copied = len(state.copies)
        try:
            with recomputation_hooks(state) or NO_HOOKS:
                return call(*args, **kwargs)
        finally:
            del state.copies[copied:]  # a recomputation stops before its forward ends

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        state: ShardState = self.__dict__[STATE]
        state.release()
        typed = [each.entries.take_own_dtype_grads() for each in state.family]
        try:
            return super(TorchFSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]  # skip torch's FSDPModule
        finally:
            for each in state.family:
                each.entries.keep_carried()
                each.entries.converted = True  # the sharded parameters may be other tensors now
            for each, gradients in zip(state.family, typed, strict=True):
                each.entries.return_own_dtype_grads(gradients)
            if state.bound is not None:
                state.bound.engine.converted(state.groups)
                for each in state.family:
                    each.traced.reset()

    def share_memory(self) -> Any:
        """Move this rank's shards of the parameters, and the buffers, to shared memory."""
        return self._apply(_share)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those of sharded parameters while the unsharded parameters are installed."""
        for state in states_below(self):  # type: ignore[arg-type]
            for param in state.declaration.params if state.entries.are_replaced else ():
                grad = param.sharded.grad
                if set_to_none:
                    param.sharded.grad = None
                elif grad is not None:
                    grad.detach_().zero_()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPModule:
        """Copy the module with its sharded parameters, on the same mesh. The copy has no engine yet.

        Raises:
            ShardConfigStateError: there are accumulated gradients that are not reduced; the copy would lose them.
        """
        adopt_forward_methods(self)  # type: ignore[arg-type]  # torch's wrappers are bound to this module
        states = states_below(self)  # type: ignore[arg-type]
        for group in [group for state in states for group in state.groups]:
            group.gradients.check_reduced({*map(id, group.shards)}, "a deep copy is made of")
        for state in states:
            state.release()
            for param in state.declaration.params:
                copy.deepcopy(param, memo)  # before the modules that contain it
        made = memo[id(self)] = object.__new__(type(self))
        compiled = {"_compiled_call_impl"}  # bound to this module; `nn.Module` does not copy it either
        made.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in compiled}, memo))
        assign_number(made)  # type: ignore[arg-type]
        return made

    def __copy__(self) -> FSDPModule:
        """Copy the module, but not its parameters, submodules and state: the original and the copy share these."""
        if (own := getattr(super(), "__copy__", None)) is not None:
            return own()  # type: ignore[no-any-return]
        made = object.__new__(type(self))
        made.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_compiled_call_impl"})
        for name, value in self.__dict__.items():
            if isinstance(value, ForwardMethod):
                made.__dict__[name] = value.on(made)  # type: ignore[arg-type]
        number_copy(made)  # type: ignore[arg-type]
        register_copy(made, self)  # type: ignore[arg-type]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardConfigStateError(
            f"{type(self).__name__}: a sharded module cannot be pickled; save its state_dict() "
            "(torch.distributed.checkpoint does so from all ranks), or deepcopy it"
        )

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's own parameters (not those of sharded modules below it).

        They stay unsharded until one of these events:

        - `reshard` is called.
        - The module's next forward or backward, or the model's next backward, reshards them.
        - The values of the sharded parameters change.

        Args:
            async_op: return immediately, with a handle whose `wait()` installs the unsharded parameters.
        """
        async_op = as_bool("async_op", async_op)
        engine = bound_of(self, runs=False).engine  # type: ignore[arg-type]
        state = self._own_state()
        for group in state.groups:
            engine.unshard(group, wait=not async_op)
        return UnshardHandle([*state.family]) if async_op else None

    def reshard(self) -> None:
        """Reshard this module's own parameters. Ignored while its forward runs."""
        state: ShardState = self.__dict__[STATE]
        state.release()


refuse_newer(FSDPModule, TorchFSDPModule)


def class_of(cls: type[nn.Module]) -> type[nn.Module]:
    """Make the class of sharded modules whose original class is `cls`."""
    methods = explaining_methods(cls, run.__code__).items()
    own: dict[str, Any] = {name: method for name, method in methods if not hasattr(FSDPModule, name)}
    own |= {"__module__": cls.__module__, "_leads_to_torchs": cls._call_impl is nn.Module._call_impl}
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), own)


def _share(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor to shared memory. For a DTensor, move its local tensor, because moving the DTensor crashes."""
    local_part(tensor).share_memory_()  # type: ignore[no-untyped-call]
    return tensor
