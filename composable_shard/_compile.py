"""`compile`: `torch.compile` for a sharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import fx, nn

from ._errors import ShardConfigTypeError, ShardConfigUnsupportedError
from ._graph.guard import guard_pass, guarded
from ._module.module import FSDPModule
from ._torch.compiler import aot_backend, as_it_is, inductor, mode_options
from ._torch.core import never_compile

M = TypeVar("M", bound=nn.Module)

_WHY_NO_REGIONS = (
    "torch.compiler.nested_compile_region, by which alike blocks would be compiled once, holds no sharded module as it "
    "is: marked at a block's forward, the weights that the graph has gathered fail with 'Freevar has no source', and "
    "marked at its __call__, the region cannot read the shards. Besides, under Inductor of torch 2.13 gradients of "
    "regions are silently wrong, unless the options have allow_buffer_reuse=False"
)


def compile(  # noqa: A001 - the name of the function in torch that it stands for
    model: M,
    *,
    fullgraph: bool = True,
    backend: str | Callable[..., Any] = "inductor",
    regions: bool = False,
    **torch_compile_kwargs: Any,
) -> M:
    """`torch.compile` for a sharded model: one whole graph by default, and its graphs checked under every backend.

    ``torch.compile(model, fullgraph=True)`` alone is right and whole too. What this adds, for this model only (as does
    ``torch.compile(model, backend="composable_shard", fullgraph=True)``):

    - ``fullgraph=True`` is the default, so that a graph break is an error that shows the frame.
    - Communication overlaps with compute, under Inductor and ``aot_eager``: a gather is launched one group ahead, and a
      reduction is waited for after the launch of the next one, or as the model's policies and its plan say. It costs
      the memory of these, and under Inductor ``reorder_for_peak_memory`` and ``reorder_for_locality``, which would undo
      it, are off unless ``options`` says otherwise.
    - Graphs are checked for gathered weights that should not be saved also under ``aot_eager``, and for a callable that
      `torch._dynamo` knows as a backend of AOTAutograd; with plain `torch.compile` under Inductor only.

    Args:
        model: the model, sharded before or after this call; its parameters, its optimizer and its state dict stay as
            they are.
        fullgraph: see `torch.compile`. With False a graph may break: results stay right, a warning names the frame.
        backend: ``inductor``, ``aot_eager``, or another backend, which is then used as it is.
        regions: whether blocks that are alike are to be compiled once (`torch.compiler.nested_compile_region`). True is
            refused now; the error says why.
        torch_compile_kwargs: the other arguments of `torch.compile`: ``dynamic``, ``mode``, ``options``. Under Inductor
            a ``post_grad_custom_post_pass`` among the options runs before that check.

    Returns:
        what `torch.compile` returns: a module that shares everything with `model`.

    Raises:
        ShardConfigTypeError: `model` is no module.
        ShardConfigUnsupportedError: `regions` is true.

    Warns:
        CompiledGraphWarning: a graph, once compiled, keeps gathered weights that should be gathered again, gathers some
            twice, or is not whole; see `composable_shard.CompiledGraphWarning`.

    Example:
        >>> run = cs.compile(model)
        >>> loss = run(batch).mean()
        >>> loss.backward()
    """
    if not isinstance(model, nn.Module):
        raise ShardConfigTypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if regions:
        raise ShardConfigUnsupportedError(
            f"regions: {_WHY_NO_REGIONS}. This is torch {torch.__version__}; leave regions out"
        )
    if backend == "inductor":
        torch_compile_kwargs["options"] = _options(torch_compile_kwargs)
    elif backend == "aot_eager":
        backend = aot_eager()
    compiled: M = torch.compile(model, fullgraph=fullgraph, backend=backend, **torch_compile_kwargs)  # type: ignore[assignment]
    return compiled


def backend(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """What ``torch.compile(model, backend="composable_shard")`` calls: Inductor, with the same as `compile` adds.

    Args:
        module, inputs: what Dynamo has traced.
        kwargs: ``options`` and ``mode``, as for Inductor.
    """
    return inductor(module, inputs, _options(kwargs))


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Inductor's options, with those of a mode, which torch does not take beside options, and with the guard."""
    options = dict(kwargs.pop("options", None) or {})
    mode = kwargs.pop("mode", None)
    if mode is not None:
        options = {**mode_options(mode, kwargs.get("dynamic")), **options}
    options["post_grad_custom_post_pass"] = guard_pass(options.get("post_grad_custom_post_pass"), places=True)
    # Both would undo that; the latter is for graphs without a backward of their own: evaluations, and whole steps.
    options.setdefault("reorder_for_peak_memory", False)
    options.setdefault("reorder_for_locality", False)
    return options


@functools.cache  # one backend for all, so that equal layers share code
def aot_eager() -> Callable[..., Any]:
    """The backend ``aot_eager`` with the guard."""
    return aot_backend(guarded(as_it_is), "composable_shard_aot")


def keep_from_dynamo(modules: Mapping[str, ModuleType], package: str) -> None:
    """Have none of the runtime's functions compiled when they are called under compiled code.

    Saved-tensor hooks, for one, are called by autograd while a compiled part of a module runs. The only functions
    that are compiled are those that call a sharded module; whatever that needs of the runtime is traced with it.
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
    """That function, and what decorators have wrapped in it."""
    while isinstance(function, FunctionType):
        never_compile(function.__code__)
        function = getattr(function, "__wrapped__", None)
