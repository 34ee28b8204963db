"""Our forward hooks on sharded modules: install the unsharded parameters before forward, and reshard after it.

They are ordinary forward hooks, which `torch.compile` can trace. In an eager call, `calls.run` encloses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import nn

from .._engine.engine import Engine
from .._engine.profiling import record
from .._graph.guard import same_graph, say_broken
from .._group.saved_tensors import PLAIN
from .._torch.core import (
    HANDLES,
    ContainerCopy,
    address_of,
    map_tensors,
    plain_parts,
    return_writes,
    tree_tensors,
    with_side_effects,
)
from .state import EAGER, STATE, TRACED, ShardState


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
    # `_return_writes` in `post_forward` removes the last entry. If an enclosing call has one, this call must add one,
    # too, even if it is empty; otherwise that of the enclosing call would be removed.
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
    state.begin_traced()


def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The hook after forward: let the engine reshard and prepare backward, then cast the outputs."""
    state: ShardState = module.__dict__[STATE]
    way = state.way
    if way is TRACED:
        state.end_traced(module)
    elif way is EAGER and state.bound is not None:
        output = end_forward(module, state, output)
    if state.copies:
        _return_writes(state)
    dtype = state.declaration.settings.current.mp_policy.output_dtype
    if dtype is None:
        return output
    if way is EAGER and state.bound is not None and state.bound.engine.profiled:
        with record("FSDP::cast_forward_outputs"):
            return map_tensors(partial(_cast, dtype), output)
    return map_tensors(partial(_cast, dtype), output)


def end_forward(module: nn.Module, state: ShardState, output: Any) -> Any:
    """End a forward in the engine, and have autograd call the engine when backward reaches one of the outputs.

    Returns:
        the output, in which views of weights are replaced by clones.
    """
    assert state.bound is not None
    engine = state.bound.engine
    tensors: Sequence[torch.Tensor] = (output,)
    among_weights: Sequence[torch.Tensor] = ()
    # The most common output, a plain tensor that is no view of a weight, needs no search.
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
