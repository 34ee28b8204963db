"""The torch-private names that compiling needs, one shim each, beside those of `_torch`. Holds for torch 2.11 to 2.15.

Each is loaded when it is called: they load the compiler, which takes seconds.
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
    """In words, why and where Dynamo broke a graph last; empty if it never did."""
    reasons = torch._dynamo.utils.graph_break_reasons
    if not reasons:
        return ""
    reason = reasons[-1]
    frames = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reason.user_stack[-1:]]
    return " ".join([*frames, reason.reason.strip().splitlines()[0]])


def last_traced(count: int) -> Sequence[torch.Tensor]:
    """The fake results of the last `count` operators that Dynamo has put into the graph that it traces now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    nodes = InstructionTranslator.current_tx().output.graph.nodes
    last = list(itertools.islice(reversed(nodes), count))
    return [node.meta["example_value"] for node in reversed(last)]


def results_are_checked() -> bool:
    """Whether torch may check that the results of an operator in the graph that runs now share no storage.

    It does so in the first run of every graph that is not called by autograd itself.
    """
    return current_backward() < 0 or bool(torch._dynamo.compiled_autograd.in_compiled_autograd_region)


def failed_guards() -> Mapping[CodeType, Sequence[str]]:
    """By code, the guards that have failed so that it was compiled again, in words; none if nothing was compiled."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    failures: Mapping[CodeType, Sequence[str]] = getattr(utils, "guard_failures", {})
    return failures


def mode_options(mode: str, dynamic: bool | None) -> dict[str, Any]:
    """The options of Inductor that a mode of `torch.compile` stands for."""
    options: dict[str, Any] = torch._inductor.list_mode_options(mode, dynamic)
    return options


class _Interpreted:
    def __init__(self, module: fx.GraphModule) -> None:
        self._interpreter = fx.Interpreter(module)  # which looks for last uses
        self._boxed_call = True  # it takes over what it is given

    def __call__(self, arguments: list[Any]) -> Any:
        return copy.copy(self._interpreter).boxed_run(arguments)  # with an environment of its own


def as_it_is(module: fx.GraphModule, inputs: Any) -> Any:
    """A compiler for `aot_backend` that runs a graph's operators one by one and frees each tensor at its last use."""
    return _Interpreted(module)


def aot_backend(compiler: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """A backend for `torch.compile` that hands graphs, partitioned as for Inductor, to `compiler`.

    Args:
        compiler: of forward and backward graphs.
        name: by which Dynamo is to know it; one backend may have it. Only after a backend that it knows does it drop
            its references to parameters, which would keep `Module.to` from converting them.
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
    """Compile by Inductor, with these of its options."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs, config_patches=options)


def graph_pass() -> type[Any]:
    """The base class of passes that Inductor's compile cache can tell apart."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def last_pass() -> Any:
    """The pass that Inductor runs after its own; None if there is none."""
    from torch._inductor import config

    return config.post_grad_custom_post_pass


def set_last_pass(last_pass: Any) -> None:
    """Have Inductor run this pass after its own, for all models."""
    from torch._inductor import config

    config.post_grad_custom_post_pass = last_pass


@functools.cache  # once in a process
def put_rng_states_before_meshes() -> None:
    """Mend how graphs are cut that have sharded parameters and recompute a random operator, such as dropout.

    Backward hands gradients out as DTensors, so torch saves the parameters' meshes for it, behind all tensors. Then it
    appends the states of generators that recomputed operators need, which are tensors, behind the meshes, and fails
    when the graph runs. Torch 2.11 saves no meshes, and where states stand before them nothing is changed.
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
    """Of a graph's outputs, which end with `first`, `second` and `last` ones, let the second come before the first."""
    (output,) = module.graph.find_nodes(op="output")
    values = list(output.args[0])
    end = len(values) - last
    middle, begin = end - second, end - second - first
    output.update_arg(0, [*values[:begin], *values[middle:end], *values[begin:middle], *values[end:]])
