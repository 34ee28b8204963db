"""The calls of a sharded module: how each way in reaches the engine, the hooks and the class's own forward.

    way in                                       goes to                    the forward is run by
    module(...), and only our hooks              `run`                      our hooks and `forward`, called directly
    module(...), other hooks or own `__call__`   `run`, `call_counted`      the class's own `__call__`
    module(...), after `module.compile()`        `run`, `_run_around`       the compiled code
    module(...), while Dynamo traces             `trace`, `call_class`      the class's own `__call__`
    `nn.Module.__call__(module, ...)`            `_call_impl`, `run`        the class's own `_call_impl`
    checkpoint in a `__call__` recomputes        `_call_impl`               the class's own `_call_impl`
    method of `register_fsdp_forward_method`     `run` or `trace`           our hooks and the method, called directly

`run` encloses the whole forward: it enters the engine, sets the saved-tensor hooks that keep autograd from saving
unsharded weights, and leaves the engine even if the forward raises an error. `pre_forward` and `post_forward` do the
rest (`forward_hooks.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .._engine.engine import Engine
from .._graph.guard import begin_trace
from .._group.group import ParamGroup
from .._group.saved_tensors import saved_weights, weights_in_place
from .._torch.compiler import put_rng_states_before_meshes
from .._torch.core import (
    active_saved_tensors_hooks,
    any_global_hook,
    is_traced_by_jit,
    refuses_saved_tensors_hooks,
    run_while_tracing,
    saved_tensors_hooks_are_enabled,
    with_side_effects,
)
from ..errors import ShardConfigStateError
from .build import bound_of, check_root
from .forward_hooks import end_forward, post_forward, pre_forward
from .sharded_reads import explain_meta_buffers, explain_sharded_read
from .state import STATE, Bound, ShardState, Way


def is_plain(call: Any, module: nn.Module) -> bool:
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


def call_class(call: Callable[..., Any], _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the class's own call, with all hooks of the module."""
    return call(*args, **kwargs)


def call_counted(call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`call_class` in eager mode. `ShardState.calls` tells `FSDPModule._call_impl` that `run` is already around it."""
    state: ShardState = module.__dict__[STATE]
    return state.counted(call, args, kwargs)


def call_bypassing(call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Like `call_counted`, for a call that has bypassed our `__call__`. It notes the uses (`note_bypass`)."""
    state: ShardState = module.__dict__[STATE]
    output = state.counted(call, args, kwargs)
    state.note_bypass()
    return output


Call = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
NO_HOOKS = contextlib.nullcontext()


def run(module: nn.Module, call: Call | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        with _hooks_for(engine, bound.group, stays) or NO_HOOKS:
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
        explain_sharded_read(error, (param for group in engine.groups for param in group.params), run.__code__)
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
    """A context that makes the saved-tensor hooks right for a call; None if they are right already:

    - There are no gradients.
    - Hooks are forbidden, as in `torch.func.grad`. Autograd then saves the weights themselves.
    - The call is a recomputation that must not have our hooks (`_saved_none`).
    - It needs our hooks, and those of the enclosing forward are active and enough (`saved_weights`).
    - It needs none, and our hooks are not the innermost ones (`weights_in_place`).

    Args:
        engine: the module's engine.
        group: the module's group, if it has parameters.
        stays: whether the weights keep their memory until backward (`set_keep_unsharded_storage`). Then the call needs
            no hooks, and those of the enclosing forward are set aside. Otherwise it needs ours.
    """
    if not (torch.is_grad_enabled() and saved_tensors_hooks_are_enabled()):
        return None
    if engine.active and _saved_none(engine, group):
        return None
    return weights_in_place(engine) if stays else saved_weights(engine)


def recomputation_hooks(state: ShardState) -> contextlib.AbstractContextManager[Any] | None:
    """Like `_hooks_for`, for a recomputation that bypasses our `__call__`; None if the checkpoint has set hooks.

    A reentrant checkpoint sets no hooks. A non-reentrant one sets its own, in the original forward and in the
    recomputation, and both times they must get the same number of tensors. In the original forward they were set inside
    of ours, and torch gives saved tensors to the innermost hooks, so they got all. If ours were set inside of them in
    the recomputation, they would get fewer.
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

    In that forward, a module hook that ran after ours began an activation checkpoint, as
    `torch.distributed._composable.checkpoint` does. The checkpoint's hooks were set inside of ours and got all saved
    tensors. In the recomputation they must get as many, so ours must not be set (see `recomputation_hooks`).
    """
    use = None if group is None else engine.active.get(group)
    return use is not None and not use.saved_any


_numbers = itertools.count()
# By number and id: several modules have the same number, if they are shallow copies.
_numbered: weakref.WeakValueDictionary[tuple[str, int], nn.Module] = weakref.WeakValueDictionary()


def number_copy(made: nn.Module) -> None:
    """Make `_build_engine` find the root through a shallow copy, which has the same number as the original."""
    _numbered[made.__dict__[STATE].traced.number_until_built, id(made)] = made


def assign_number(module: nn.Module) -> None:
    """Number a sharded module, so that `_build_engine` can find it: Dynamo passes only constants to that function."""
    here = module.__dict__[STATE].traced.number_until_built = str(next(_numbers))
    _numbered[here, id(module)] = module


@run_while_tracing
def _build_engine(number: str) -> bool:
    """Build the engine of a module that is compiled before its first forward.

    Dynamo may trace a function several times and must take the same path each time, so this is always called: with the
    module's number, or with an empty string once the engine exists.
    """
    put_rng_states_before_meshes()
    if number:
        module = next(module for (known, _), module in list(_numbered.items()) if known == number)
        bound_of(module, agrees=False)  # no collective while Dynamo traces
    return True


def trace(module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one call of a sharded module while Dynamo traces."""
    state: ShardState = module.__dict__[STATE]
    _build_engine(state.traced.number_until_built)
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


def surround_compiled_code(module: nn.Module) -> None:
    """Let the engine gather and reduce outside of the compiled code of a module on which `compile()` was called.

    On such a module, torch sets `_compiled_call_impl`: `_call_impl`, including hooks, compiled. Every call of the
    module runs it, also a recomputation by an activation checkpoint. It is replaced here by `_run_around`, which
    gathers before the compiled code and reshards after it. The module's own communication is thus not in the graph, so
    that layers of one class share their code. The communication of sharded modules inside of it is in the graph.
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
    return end_forward(module, state, output)
