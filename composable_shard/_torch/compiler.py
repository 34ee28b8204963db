"""Shims for private names of torch that compilation needs, one per name. Valid for torch 2.11 to 2.15.

Each shim imports what it needs when it is called, because that imports the compiler, which takes seconds.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx

from .core import current_backward


def last_graph_break() -> str:
    """A text with the place and reason of Dynamo's last graph break; empty if there was none."""
    reasons = torch._dynamo.utils.graph_break_reasons
    if not reasons:
        return ""
    reason = reasons[-1]
    frames = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reason.user_stack[-1:]]
    return " ".join([*frames, reason.reason.strip().splitlines()[0]])


def last_traced(count: int) -> Sequence[torch.Tensor]:
    """The fake results of the last `count` operators in the graph that Dynamo is tracing."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    nodes = InstructionTranslator.current_tx().output.graph.nodes
    last = list(itertools.islice(reversed(nodes), count))
    return [node.meta["example_value"] for node in reversed(last)]


def results_are_checked() -> bool:
    """Whether torch may check that the results of an operator in the running graph share no storage.

    It does so in the first run of every graph, unless autograd itself calls the graph.
    """
    return current_backward() < 0 or bool(torch._dynamo.compiled_autograd.in_compiled_autograd_region)


def failed_guards() -> Mapping[CodeType, Sequence[str]]:
    """By code object, the failed guards, as text, that made Dynamo recompile it; empty if nothing was compiled."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    failures: Mapping[CodeType, Sequence[str]] = getattr(utils, "guard_failures", {})
    return failures


def mode_options(mode: str, dynamic: bool | None) -> dict[str, Any]:
    """The Inductor options of a mode of `torch.compile`."""
    options: dict[str, Any] = torch._inductor.list_mode_options(mode, dynamic)
    return options


class _Interpreted:
    def __init__(self, module: fx.GraphModule) -> None:
        self._interpreter = fx.Interpreter(module)  # finds the last use of each tensor
        self._boxed_call = True  # callers pass a list of arguments, which the call empties

    def __call__(self, arguments: list[Any]) -> Any:
        return copy.copy(self._interpreter).boxed_run(arguments)  # a copy, because a run has its own environment


def as_it_is(module: fx.GraphModule, inputs: Any) -> Any:
    """A compiler for `aot_backend` that runs a graph operator by operator and frees each tensor after its last use."""
    return _Interpreted(module)


def aot_backend(compiler: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """A backend for `torch.compile` that passes graphs, partitioned as for Inductor, to `compiler`.

    Args:
        compiler: compiles forward and backward graphs.
        name: name under which to register the backend with Dynamo; it must be unique. Dynamo drops its references to
            parameters only if the backend is registered. These references would keep `Module.to` from converting them.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.registry import register_backend
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    if name:
        register_backend(backend, name=name)
    return backend


def inductor(module: fx.GraphModule, inputs: Any, options: dict[str, Any]) -> Any:
    """Compile by Inductor, with these options."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs, config_patches=options)


def graph_pass() -> type[Any]:
    """The base class of passes that have a key for Inductor's compile cache."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def last_pass() -> Any:
    """The custom pass that Inductor runs after its own passes; None if there is none."""
    from torch._inductor import config

    return config.post_grad_custom_post_pass


def set_last_pass(last_pass: Any) -> None:
    """Make Inductor run this pass after its own passes, for all models."""
    from torch._inductor import config

    config.post_grad_custom_post_pass = last_pass


@functools.cache  # once in a process
def put_rng_states_before_meshes() -> None:
    """Patch the partitioning of graphs with sharded parameters that recompute a random operator, such as dropout.

    Backward returns gradients as DTensors, so torch saves the parameters' meshes for it, after all tensors. Then torch
    appends the generator states for recomputed operators, which are tensors, after the meshes, and fails when the graph
    runs. The patch moves the states before the meshes. It does nothing in torch 2.11, which saves no meshes, or if the
    states are already before the meshes.
    """
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    is_opaque = getattr(partitioners, "is_opaque_node", None)
    if is_opaque is None:
        return
    append: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] = partitioners.functionalize_rng_ops

    @functools.wraps(append)
    def append_before_meshes(
        joint: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule, sizes: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        known = set(backward.graph.find_nodes(op="placeholder"))
        forward, backward = append(joint, forward, backward, sizes)
        inputs = backward.graph.find_nodes(op="placeholder")
        states = [node for node in inputs if node not in known and "rng_state_output" in node.name]
        meshes: list[fx.Node] = []
        for node in reversed(inputs[: inputs.index(states[0])] if states else []):
            if not is_opaque(node):
                break
            meshes.insert(0, node)
        if meshes:
            for state in states:
                meshes[0].prepend(state)
            _exchange_outputs(forward, len(meshes), len(states), sizes)
            forward.recompile()
            backward.recompile()
        return forward, backward

    partitioners.functionalize_rng_ops = append_before_meshes


def _exchange_outputs(module: fx.GraphModule, first: int, second: int, last: int) -> None:
    """Swap the first two of three blocks of `first`, `second` and `last` outputs at the end of a graph's outputs."""
    (output,) = module.graph.find_nodes(op="output")
    values = list(output.args[0])
    end = len(values) - last
    middle, begin = end - second, end - second - first
    output.update_arg(0, [*values[:begin], *values[middle:end], *values[begin:middle], *values[end:]])
