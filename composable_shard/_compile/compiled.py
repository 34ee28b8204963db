"""`compile`: `torch.compile` for a sharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import fx, nn

from .._graph.guard import guard_pass, guarded
from .._graph.traced import follow_freezing
from .._module.module import FSDPModule
from .._torch.compiler import aot_backend, as_it_is, inductor, mode_options
from .._torch.core import never_compile
from ..errors import ShardConfigTypeError

M = TypeVar("M", bound=nn.Module)
# `dataclass` and `NamedTuple` compile the methods of each class from a string.
_OWN_FILES = (str(Path(__file__).parents[1]), "<string>")


def compile(  # noqa: A001 - named like the function of torch that it wraps
    model: M,
    *,
    fullgraph: bool = True,
    backend: str | Callable[..., Any] = "inductor",
    **torch_compile_kwargs: Any,
) -> M:
    """`torch.compile` for a sharded model: full-graph by default, with overlap, and with checks of the graphs.

    ``torch.compile(model, fullgraph=True)`` is correct and compiles a full graph, too. This function adds four things,
    for this model only. ``torch.compile(model, backend="composable_shard", fullgraph=True)`` adds the first
    three.

    - ``fullgraph=True`` is the default, so that a graph break is an error that shows the frame.
    - Communication overlaps with compute under Inductor and ``aot_eager``. By default, a gather is launched one group
      ahead, and the graph waits for a reduction after the launch of the next one. The model's policies and plan can
      change this. Overlap needs memory for the buffers in flight. Under Inductor, ``reorder_for_peak_memory`` and
      ``reorder_for_locality`` would undo the overlap, so they are off unless ``options`` sets them.
    - Graphs are checked for gathered weights that should not be saved for backward. The check also runs under
      ``aot_eager`` and under callables that `torch._dynamo` lists as AOTAutograd backends. With plain `torch.compile`
      it runs under Inductor only.
    - Parameters with ``fsdp_pre_all_gather`` may be unfrozen between calls. With plain `torch.compile`, the first call
      afterwards raises an error.

    Args:
        model: the model, sharded before or after this call. Its parameters, optimizer and state dict do not change.
        fullgraph: see `torch.compile`. With False, a graph may break: results stay correct, and a warning names the
            frame.
        backend: ``inductor``, ``aot_eager``, or another backend, which is used unchanged.
        torch_compile_kwargs: the other arguments of `torch.compile`: ``dynamic``, ``mode``, ``options``. Under
            Inductor, a ``post_grad_custom_post_pass`` in the options runs before the check.

    Returns:
        the result of `torch.compile`: a module that shares its parameters and buffers with `model`.

    Raises:
        ShardConfigTypeError: `model` is not a module.

    Warns:
        CompiledGraphWarning: a compiled graph saves gathered weights that it should gather again, gathers some twice,
            or is not a full graph; see `composable_shard.errors.CompiledGraphWarning`.

    Example:
        >>> run = cs.compile(model)
        >>> loss = run(batch).mean()
        >>> loss.backward()
    """
    if not isinstance(model, nn.Module):
        raise ShardConfigTypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if backend == "inductor":
        torch_compile_kwargs["options"] = _options(torch_compile_kwargs)
    elif backend == "aot_eager":
        backend = aot_eager()
    compiled: M = torch.compile(model, fullgraph=fullgraph, backend=backend, **torch_compile_kwargs)  # type: ignore[assignment]
    # Graphs take some parameters through stand-ins. This is the only code that runs before Dynamo looks at those.
    compiled.register_forward_pre_hook(follow_freezing)
    return compiled


def backend(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """The backend of ``torch.compile(model, backend="composable_shard")``: Inductor with the additions of `compile`.

    Args:
        module, inputs: the graph that Dynamo has traced, and its example inputs.
        kwargs: ``options`` and ``mode``, as for Inductor.
    """
    return inductor(module, inputs, _options(kwargs))


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Merge Inductor's options with those of a mode, because torch does not accept both, and add the guard."""
    options = dict(kwargs.pop("options", None) or {})
    mode = kwargs.pop("mode", None)
    if mode is not None:
        options = {**mode_options(mode, kwargs.get("dynamic")), **options}
    options["post_grad_custom_post_pass"] = guard_pass(options.get("post_grad_custom_post_pass"), places=True)
    # Both would undo the overlap. The latter affects graphs without a separate backward graph: evaluation, full steps.
    options.setdefault("reorder_for_peak_memory", False)
    options.setdefault("reorder_for_locality", False)
    return options


@functools.cache  # the same backend object every time, so that equal layers share code
def aot_eager() -> Callable[..., Any]:
    """The backend ``aot_eager`` with the guard."""
    return aot_backend(guarded(as_it_is), "composable_shard_aot")


def keep_from_dynamo(modules: Mapping[str, ModuleType], package: str) -> None:
    """Keep Dynamo from compiling the runtime's functions when compiled code calls them.

    For example, autograd calls saved-tensor hooks while a compiled part of a module runs. The exceptions are the
    functions that call a sharded module. Dynamo compiles these, and traces the runtime functions that they call as part
    of them.
    """
    for name, module in list(modules.items()):
        if name == package or name.startswith(f"{package}."):
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) == name:
                    _keep(value)


def _keep(value: object) -> None:
    if isinstance(value, FunctionType):
        _keep_function(value)
    elif isinstance(value, type):
        for member in list(vars(value).values()):
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if isinstance(function, FunctionType) and function not in (FSDPModule.__call__, FSDPModule._call_impl):
                _keep_function(function)


def _keep_function(function: object) -> None:
    """Keep Dynamo from compiling a function and the functions that its decorators wrap."""
    while isinstance(function, FunctionType):
        # Not decorators of other packages: the `step` of all optimizers, for example, is wrapped in the same code.
        if function.__code__.co_filename.startswith(_OWN_FILES):
            never_compile(function.__code__)
        function = getattr(function, "__wrapped__", None)
