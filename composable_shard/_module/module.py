"""The class of sharded modules, its forward hooks, and the methods that users call.

`__call__` encloses the whole forward: it enters the engine, sets the saved-tensor hooks that keep autograd from saving
unsharded weights, and leaves the engine even if the forward raises. `pre_forward` and `post_forward` do the rest. They
are ordinary forward hooks, which `torch.compile` can trace.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.tensor import DTensor

from .._engine.engine import Engine
from .._engine.iterations import two_threads
from .._engine.profiling import record
from .._errors import ShardConfigStateError, ShardConfigValueError
from .._graph.guard import begin_trace, same_graph, say_broken
from .._group.group import ParamGroup
from .._group.phases import GATHERING
from .._group.saved_tensors import PLAIN, saved_weights, weights_in_place
from .._policies import as_bool
from .._torch.compiler import put_rng_states_before_meshes
from .._torch.core import (
    HANDLES,
    ContainerCopy,
    active_saved_tensors_hooks,
    address_of,
    any_global_hook,
    apart_from_checkpoints,
    current_backward,
    is_traced_by_jit,
    map_tensors,
    plain_parts,
    refuses_saved_tensors_hooks,
    return_writes,
    run_while_tracing,
    saved_tensors_hooks_are_enabled,
    tree_tensors,
    with_side_effects,
)
from .._torch.distributed import local_tensor, register_copy, registered_by_torch
from .build import build_engine, check_root
from .methods import Methods, refuse_newer
from .sharded_reads import explain_meta_buffers, explain_sharded_read, explaining_methods, unexplained
from .state import EAGER, STATE, TRACED, Bound, ShardState, Way, states_below

# Key in a root's `__dict__`: the id of the thread that builds its engine. It is set by `setdefault`, which is atomic.
_BUILDER = "_shard_builder"


class UnshardHandle(TorchUnshardHandle):
    """A handle for an unshard that may still be in flight."""

    def __init__(self, states: Sequence[ShardState]) -> None:
        self._states = states  # not their groups: the first forward of an enclosing root makes others

    def wait(self) -> None:
        """Wait, and install the unsharded parameters in the module; a no-op if they are installed or resharded."""
        for bound in [state.bound for state in self._states]:
            if bound is not None and bound.group is not None and bound.group.phase is GATHERING:
                bound.engine.unshard(bound.group, wait=True)


def bound_of(module: nn.Module, agrees: bool = True, runs: bool = True) -> Bound:
    """Return a module's part in its engine. Build the engine if there is none; the arguments are `build_engine`'s."""
    state: ShardState = module.__dict__[STATE]
    if state.bound is None:
        here = threading.get_ident()
        if module.__dict__.setdefault(_BUILDER, here) != here:
            raise two_threads("its first forward")
        try:
            if state.bound is None:  # else another thread has built the engine in the meantime
                apart_from_checkpoints(build_engine)(module, agrees, runs)
        finally:
            module.__dict__.pop(_BUILDER, None)
    assert state.bound is not None
    return state.bound


class FSDPModule(Methods):
    """Base of the class of every sharded module; use it for `isinstance` and for the methods below."""

    _leads_to_torchs: bool  # whether the original class has torch's own `_call_impl`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return _trace(self, partial(_call_whole, call), args, kwargs)  # type: ignore[arg-type]
        if self._compiled_call_impl is not None:  # type: ignore[attr-defined]
            _let_engine_surround_compiled_code(self)  # type: ignore[arg-type]
            return _run(self, partial(_call_whole, call), args, kwargs)  # type: ignore[arg-type]
        if _is_plain(call, self):  # type: ignore[arg-type]
            return _run(self, None, args, kwargs)  # type: ignore[arg-type]
        return _run(self, partial(_call_past, call), args, kwargs)  # type: ignore[arg-type]

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch's own `Module.__call__`, which may have been reached without our `__call__`.

        `torch.compile` calls the `__call__` that it saved before the module was sharded, and a checkpoint may call
        `nn.Module.__call__`. Such a call runs the module here, and its recomputation, too. An activation checkpoint
        around `super().__call__` also bypasses our `__call__`, but only when it recomputes. That call continues without
        our hooks, because they were outside of the checkpoint's in the original call, which went through our
        `__call__`.
        """
        state: ShardState = self.__dict__[STATE]
        call = super()._call_impl  # type: ignore[misc]
        if state.way is not EAGER or state.calls:
            return call(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self(*args, **kwargs)
        if current_backward() < 0 or state.recomputes_below():
            return _run(self, partial(_call_below, call), args, kwargs)  # type: ignore[arg-type]
        copied = len(state.copies)
        try:
            with _hooks_of_recomputation(state) or _NO_HOOKS:
                return call(*args, **kwargs)
        finally:
            del state.copies[copied:]  # a recomputation stops before its forward ends

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        state: ShardState = self.__dict__[STATE]
        state.release()
        typed = [each.entries.take_typed() for each in state.family]
        try:
            return super(TorchFSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]  # skip torch's FSDPModule
        finally:
            for each in state.family:
                each.entries.keep_carried()
                each.entries.converted = True
            for each, gradients in zip(state.family, typed, strict=True):
                each.entries.return_typed(gradients)
            if state.bound is not None:
                state.bound.engine.converted(state.groups)

    def share_memory(self) -> Any:
        """Move this rank's shards of the parameters, and the buffers, to shared memory."""
        return self._apply(_share)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those of sharded parameters while the unsharded parameters are installed."""
        for state in states_below(self):  # type: ignore[arg-type]
            for param in state.declaration.params if state.entries.shown else ():
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
        number(made)  # type: ignore[arg-type]
        return made

    def __copy__(self) -> FSDPModule:
        """Copy the module, but not its parameters, submodules and state: the original and the copy share these."""
        if (own := getattr(super(), "__copy__", None)) is not None:
            return own()  # type: ignore[no-any-return]
        made = object.__new__(type(self))
        made.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_compiled_call_impl"})
        for name, value in self.__dict__.items():
            if isinstance(value, _ForwardMethod):
                made.__dict__[name] = value.on(made)  # type: ignore[arg-type]
        _numbered[self.__dict__[STATE].traced.unknown, id(made)] = made  # type: ignore[assignment]
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
    methods = explaining_methods(cls, _run.__code__).items()
    own: dict[str, Any] = {name: method for name, method in methods if not hasattr(FSDPModule, name)}
    own |= {"__module__": cls.__module__, "_leads_to_torchs": cls._call_impl is nn.Module._call_impl}
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), own)


def _share(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor to shared memory. For a DTensor, move its local tensor, because moving the DTensor crashes."""
    (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def _is_plain(call: Any, module: nn.Module) -> bool:
    """Whether a module's call is torch's own, and runs no module hooks except ours.

    A class may override `__call__`, and torch.fx replaces it.
    """
    if getattr(call, "__func__", None) is not nn.Module._wrapped_call_impl or not type(call.__self__)._leads_to_torchs:
        return False
    own = module.__dict__  # faster than `Module.__getattr__`
    if len(own["_forward_hooks"]) != 1 or len(own["_forward_pre_hooks"]) != 1:
        return False
    own_backward = own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not (own_backward or any_global_hook() or is_traced_by_jit())


def _call_whole(call: Callable[..., Any], _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the class's own call, with all hooks of the module."""
    return call(*args, **kwargs)


def _call_past(call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_call_whole` in eager mode, with the call counted so that `FSDPModule._call_impl` does not start over."""
    state: ShardState = module.__dict__[STATE]
    return state.counted(call, args, kwargs)


def _call_below(call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_call_past` for a call that has bypassed our `__call__`: a recomputation of it must run the module here, too."""
    state: ShardState = module.__dict__[STATE]
    output = state.counted(call, args, kwargs)
    state.ran_below()
    return output


_Call = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
_NO_HOOKS = contextlib.nullcontext()


def _run(module: nn.Module, call: _Call | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one eager call of a sharded module.

    Args:
        module: the module.
        call: runs the module with its hooks. None for a module that has only our hooks: they are called directly here,
            because torch's own call takes twice the time.
        args, kwargs: arguments of the call.
    """
    state: ShardState = module.__dict__[STATE]
    bound = state.bound or bound_of(module)
    engine = bound.engine
    if bound.is_root and state.declaration.modules > 1:
        check_root(module)
    engine.enter(bound.is_root)
    depth, copied = len(state.open_calls), len(state.copies)
    stays = state.declaration.settings.current.keep_storage
    root_succeeded, failed = False, False
    try:
        with _hooks_for(engine, bound.group, stays) or _NO_HOOKS:
            if call is not None:
                output = call(module, args, kwargs)
            else:
                if (cast := pre_forward(module, args, kwargs)) is not None:
                    args, kwargs = cast
                output = post_forward(module, args, module.forward(*args, **kwargs))
        root_succeeded = bound.is_root
        return output
    except BaseException as error:
        failed = True
        engine.failed(error)
        explain_sharded_read(error, (param for group in engine.groups for param in group.params), _run.__code__)
        explain_meta_buffers(error, module, bound.is_root)
        state.abort(depth)
        del state.copies[copied:]
        engine.show_sharded()
        if refuses_saved_tensors_hooks(error) and not stays:
            raise _needs_storage(module, bound) from error
        raise
    finally:
        engine.leave(root_succeeded, failed)


def _hooks_for(engine: Engine, group: ParamGroup | None, stays: bool) -> contextlib.AbstractContextManager[Any] | None:
    """The saved-tensor hooks of a call; None without gradients, or if those of the enclosing forward are enough.

    Also None where hooks are forbidden, as in `torch.func.grad`. Autograd then saves the weights themselves.

    Args:
        engine: the module's engine.
        group: the module's group, if it has parameters.
        stays: whether the weights keep their memory until backward (`set_keep_unsharded_storage`).
    """
    if not (torch.is_grad_enabled() and saved_tensors_hooks_are_enabled()):
        return None
    if engine.active and _saved_none(engine, group):
        return None
    return weights_in_place(engine) if stays else saved_weights(engine)


def _hooks_of_recomputation(state: ShardState) -> contextlib.AbstractContextManager[Any] | None:
    """The saved-tensor hooks of a recomputation that bypasses our `__call__`; None if the checkpoint has set hooks.

    A reentrant checkpoint sets no hooks. A non-reentrant one counts saved tensors with its own hooks, and must count as
    many as in the original forward. There, its hooks were inside of ours, so ours must not be set inside of its hooks.
    """
    if state.bound is None or active_saved_tensors_hooks() is not None:
        return None
    return _hooks_for(state.bound.engine, state.bound.group, state.declaration.settings.current.keep_storage)


def _needs_storage(module: nn.Module, bound: Bound) -> ShardConfigStateError:
    name = bound.group.name if bound.group is not None else type(module).__name__
    return ShardConfigStateError(
        f"module {name}: its forward runs inside of a torch.func transform, or uses one, that needs the weights to "
        "stay in memory until backward; call set_keep_unsharded_storage(True) on the root, before its first forward"
    )


def _saved_none(engine: Engine, group: ParamGroup | None) -> bool:
    """Whether this call recomputes a forward that saved no weights through our saved-tensor hooks.

    In that forward, the hooks of an activation checkpoint saved the tensors instead: a module hook that runs after ours
    may begin a checkpoint, as `torch.distributed._composable.checkpoint` does. The recomputation must not set our
    saved-tensor hooks either, because the checkpoint counts the tensors that are saved in it.
    """
    use = None if group is None else engine.active.get(group)
    return use is not None and not use.reads and not any(bucket.saved for bucket in use.group.buckets[1:])


class _ForwardMethod:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> _ForwardMethod:
        module = self._module()
        assert module is not None
        made = copy.deepcopy(module, memo)
        if self._takes_module:
            return self.on(made)
        return _ForwardMethod(made, self._name, copy.deepcopy(self.__wrapped__, memo))  # type: ignore[attr-defined]

    def on(self, module: nn.Module) -> _ForwardMethod:
        """The same method of a copy of the module."""
        function: Any = self.__wrapped__  # type: ignore[attr-defined]
        return _ForwardMethod(
            module, self._name, types.MethodType(function, module) if self._takes_module else function
        )


def _forward_as(
    function: Callable[..., Any], takes_module: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cast = pre_forward(module, args, kwargs)
        if cast is not None:
            args, kwargs = cast
        output = function(module, *args, **kwargs) if takes_module else function(*args, **kwargs)
        return post_forward(module, args, output)

    return (_trace if torch.compiler.is_compiling() else _run)(module, call, args, kwargs)


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
    if not isinstance(module, FSDPModule):
        return
    adopt_forward_methods(module)
    method = getattr(module, method_name, None)
    if isinstance(method, _ForwardMethod) and method._module() is module:
        return
    if not callable(method) or isinstance(method, nn.Module):
        raise ShardConfigValueError(
            f"method_name: {type(module).__name__} does not have a method {method_name!r}; pass the name of a method"
        )
    module.__dict__[method_name] = _ForwardMethod(module, method_name, method)


def adopt_forward_methods(module: nn.Module) -> None:
    """Replace the wrappers that torch's own `register_fsdp_forward_method` has set on a module by `_ForwardMethod`.

    A torch wrapper that is running has called the state's `_pre_forward`, and will call the method that it wraps. That
    inner method is replaced, too: a `_ForwardMethod` does the whole forward, and also ends it if the method fails.
    """
    for name, value in list(module.__dict__.items()):
        cell = registered_by_torch(value)
        if cell is not None:
            method = cell.cell_contents
            while (inner := registered_by_torch(method)) is not None:
                method = inner.cell_contents  # registered several times
            ours = method if isinstance(method, _ForwardMethod) else _ForwardMethod(module, name, method)
            cell.cell_contents = module.__dict__[name] = ours


_numbers = itertools.count()
# By number and id: several modules have the same number, if they are shallow copies.
_numbered: weakref.WeakValueDictionary[tuple[str, int], nn.Module] = weakref.WeakValueDictionary()


def number(module: nn.Module) -> None:
    """Number a sharded module, so that `_find_root` can find it: Dynamo passes only constants to that function."""
    here = module.__dict__[STATE].traced.unknown = str(next(_numbers))
    _numbered[here, id(module)] = module


@run_while_tracing
def _find_root(unknown: str) -> bool:
    """Build the engine of a module that is compiled before its first forward.

    Dynamo may trace a function several times and must take the same path each time, so this is always called: with the
    module's number, or with an empty string once the engine exists.
    """
    put_rng_states_before_meshes()
    if unknown:
        module = next(module for (number, _), module in list(_numbered.items()) if number == unknown)
        bound_of(module, agrees=False)  # no collective while Dynamo traces
    return True


def _trace(module: nn.Module, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one call of a sharded module while Dynamo traces."""
    state: ShardState = module.__dict__[STATE]
    _find_root(state.traced.unknown)
    with_side_effects(partial(setattr, state, "compiled_as", begin_trace(state.asked.schedule)))
    with_side_effects(partial(setattr, state, "way", Way.TRACED))
    steps = state.traced.steps
    if steps is not None and steps.root() is module:
        with_side_effects(steps.begin)
    output = call(module, args, kwargs)
    with_side_effects(partial(setattr, state, "way", Way.EAGER))
    if steps is not None and steps.root() is module:
        with_side_effects(steps.end)
    if state.lists:
        with_side_effects(state.finish_traced)
    return output


def _let_engine_surround_compiled_code(module: nn.Module) -> None:
    """Let the engine gather and reduce outside of the compiled code of a module on which `compile()` was called.

    For such a module, torch compiles `_call_impl`, including hooks, and runs the compiled code at every call of the
    module, also when an activation checkpoint in the class's own `__call__` recomputes. The module's own communication
    is not in the graph, so that layers of one class share their code. The communication of sharded modules inside of it
    is in the graph.
    """
    compiled = module._compiled_call_impl
    if hasattr(compiled, "_surrounded"):
        return
    known = weakref.ref(module)

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)  # type: ignore[misc]
        owner = known()
        assert owner is not None
        return _run_around(compiled, owner, args, kwargs)  # type: ignore[arg-type]

    surrounded._surrounded = compiled  # type: ignore[attr-defined]
    module._compiled_call_impl = surrounded


def _run_around(call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run compiled code, whose graph gathers for the sharded modules inside of the module, but not for itself."""
    state: ShardState = module.__dict__[STATE]
    depth = len(state.open_calls)
    state.begin(module)
    try:
        with state.around_compiled_code(), warnings.catch_warnings():
            # Dynamo reads `.grad` of the unsharded parameters, which are not leaves.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            output = call(*args, **kwargs)
    except BaseException:
        state.abort(depth)
        raise
    return _ended(module, state, output)


def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The hook before forward, which runs first: install the unsharded parameters, move and cast the inputs."""
    state: ShardState = module.__dict__[STATE]
    way = state.way
    if way is TRACED:
        _begin_traced(state, module)
    elif way is EAGER:
        state.begin(module)
    policy = state.declaration.settings.current.mp_policy
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    if dtype is None and state.inputs_to is None:
        return None
    copies: list[ContainerCopy] = []
    if state.inputs_to is not None:
        args, kwargs = _mapped(partial(_move, state.inputs_to), args, kwargs, copies)
    if dtype is not None:
        args, kwargs = _cast_inputs(state, args, kwargs, dtype, copies)
    # `post_forward` removes the last entry. So if an enclosing call has one, this call needs one, too, even if empty.
    if copies or state.copies:
        with_side_effects(partial(state.copies.append, copies))
    return args, kwargs


def _cast_inputs(
    state: ShardState, args: Any, kwargs: Any, dtype: torch.dtype, copies: list[ContainerCopy]
) -> tuple[Any, Any]:
    if state.way is EAGER and state.bound is not None and state.bound.engine.profiled:
        with record("FSDP::cast_forward_inputs"):
            return _mapped(partial(_cast, dtype), args, kwargs, copies)
    return _mapped(partial(_cast, dtype), args, kwargs, copies)


def _mapped(
    function: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: Any, copies: list[ContainerCopy]
) -> tuple[Any, Any]:
    """Apply a function to the tensors in the arguments of a call. Containers that do not change are not copied.

    `args` and `kwargs` themselves belong to this call only, so nothing has to be written back into them.
    """
    args = map_tensors(function, args, copies)
    return args, {name: map_tensors(function, each, copies) for name, each in kwargs.items()} if kwargs else kwargs


def _begin_traced(state: ShardState, module: nn.Module) -> None:
    if not (torch.compiler.is_compiling() and same_graph()):
        say_broken(type(module).__name__)
    state.begin_traced(module)


def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The hook after forward: let the engine reshard and prepare backward, then cast the outputs."""
    state: ShardState = module.__dict__[STATE]
    way = state.way
    if way is TRACED:
        state.end_traced(module)
    elif way is EAGER and state.bound is not None:
        output = _ended(module, state, output)
    if state.copies:
        _return_writes(state)
    dtype = state.declaration.settings.current.mp_policy.output_dtype
    if dtype is None:
        return output
    if way is EAGER and state.bound is not None and state.bound.engine.profiled:
        with record("FSDP::cast_forward_outputs"):
            return map_tensors(partial(_cast, dtype), output)
    return map_tensors(partial(_cast, dtype), output)


def _ended(module: nn.Module, state: ShardState, output: Any) -> Any:
    """End a forward in the engine, and have autograd call the engine when backward reaches one of the outputs.

    Returns:
        the output, in which views of weights are replaced by clones.
    """
    assert state.bound is not None
    engine = state.bound.engine
    tensors: Sequence[torch.Tensor] = (output,)
    among_weights: Sequence[torch.Tensor] = ()
    if type(output) is not torch.Tensor or engine.pool.addresses.find(address_of(output)) is not None:
        output, among_weights = _apart_from_weights(output, engine)
        tensors = tree_tensors(output)
    for use, outputs in state.end(module, among_weights):
        for tensor in tensors:
            node = tensor.grad_fn
            if node is not None:
                node.register_prehook(partial(engine.before_backward, use, outputs))
                HANDLES.ours += 1  # a call of `give` would cost host time in each step
    return output


def _apart_from_weights(output: Any, engine: Engine) -> tuple[Any, Sequence[torch.Tensor]]:
    """Replace views of weights in the output by clones; return the output and the views that were cloned.

    A view of a weight would change when the weight's slot is leased again. Views in containers that `map_tensors` does
    not support are not cloned: like views that users keep elsewhere, they keep the slot from being leased.
    """
    tensors = tree_tensors(output)
    parts = tensors if {*map(type, tensors)}.issubset(PLAIN) else [part for t in tensors for part in plain_parts(t)]
    among_weights = [part for part in parts if engine.pool.addresses.find(address_of(part)) is not None]
    if not among_weights:
        return output, ()
    return _with_clones(output, {id(part) for part in among_weights})


def _with_clones(output: Any, views: Set[int]) -> tuple[Any, list[torch.Tensor]]:
    """Clone the tensors of the output that are, or contain, one of `views` (ids); return the output and these views."""
    cloned: list[torch.Tensor] = []

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        inside = [part for part in plain_parts(tensor) if id(part) in views]
        cloned.extend(inside)
        return tensor.clone() if inside else tensor

    return map_tensors(clone, output), cloned


def _move(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def _return_writes(state: ShardState) -> None:
    """Write the items that forward has written into copies of containers into the caller's containers."""
    copies = state.copies[-1]
    with_side_effects(partial(state.copies.__delitem__, -1))
    if copies:
        return_writes(copies)
