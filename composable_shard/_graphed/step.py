"""`make_graphed_step`."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from .._engine.engine import Engine
from .._group.group import ParamGroup
from .._group.optimizers import known_optimizers
from .._torch.capturing import Graph, SideStream, can_capture, capture, capture_number
from .._torch.core import autocast_cache_off, flatten, unflatten
from ..errors import ComposableShardError, ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from .host import Host, HostState, Sight, settings_of

P = ParamSpec("P")
R = TypeVar("R")

_CONSTANTS = (str, bytes, bool, int, float, complex, NoneType, Enum, torch.dtype, torch.device, torch.Size)
_MOST_SEEN = 1024  # how many keys are remembered of steps that have run eagerly
_HINT = (
    "In a captured step, Python runs once, and no value may reach the host: no .item(), print(tensor), `if tensor`, "
    "GradScaler.step, copy to the CPU, or data-dependent shape. Move such code out of the step"
)


def make_graphed_step(
    step: Callable[P, R],
    *,
    max_graphs: int = 8,
    modules: Iterable[nn.Module] = (),
    key: Callable[[], Hashable] | None = None,
) -> GraphedStep[P, R]:
    """Capture a training step of sharded models in CUDA graphs, and replay these instead of running Python.

        def forward_backward(tokens, targets):
            loss = loss_of(model(tokens), targets)
            loss.backward()
            return loss

        step = cs.make_graphed_step(forward_backward)
        for tokens, targets in batches:
            loss = step(tokens, targets)
            cs.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    The first calls run eagerly, until the plan of each model has settled and a call with the same key has run. The next
    call with this key is captured and replayed, and so are later ones. The key contains all facts that decide what the
    host does: the shapes, dtypes and structure of the arguments, and the values of those that are not tensors; which
    parameters have a `.grad`; settings of the models, such as gradient sync, and accumulated gradients, so that the
    first, the middle and the last microbatch have graphs of their own; training mode; autocast. Everything else
    that Python decides is decided once, at the capture. Graphs are captured again if parameters or buffers have moved,
    for example in a load with ``assign=True``, if the plan has changed, and if settings or state of an optimizer in the
    step were replaced.

    A replay computes the same as an eager step, and draws new random numbers. Before it, the arguments are copied into
    the graph's own buffers. After it, each parameter has the `.grad` that the captured step set, in the same memory.
    Settings and training mode are as after an eager step, and the result is copied. A replay runs no Python code of the
    step: no hooks, and no actions that `last_record`, `watch` or `stats` would show. All ranks must replay the same
    graph at the same time, which the ledger of actions checks.

    The step may include the optimizer if its learning rate is a tensor and it was created with ``capturable=True``.
    Without CUDA, all calls run eagerly.

    Args:
        step: takes tensors, numbers and text in any containers. Its tensors must be on the device of the models, and
            must not require gradients. A result does not require one, either: the step runs backward itself.
        max_graphs: the most graphs to keep, at least 1. Calls with other keys run eagerly, with one warning.
        modules: modules without sharded ones that the step trains or runs. Their training mode and `.grad` are observed
            as well. (Those in sharded models, and parameters of optimizers that have stepped, are always observed.)
        key: returns another part of the key: a hashable value of further facts that decide what the step does, such as
            ``lambda: config.use_auxiliary_loss``.

    Returns:
        the function to call instead of `step`.

    Raises:
        ShardConfigTypeError: `step` or `key` cannot be called.
        ShardConfigValueError: `max_graphs` is not positive.
    """
    if not callable(step) or not (key is None or callable(key)):
        raise ShardConfigTypeError("make_graphed_step: step and key must be functions")
    if max_graphs < 1:
        raise ShardConfigValueError(f"max_graphs: expected at least 1, got {max_graphs}")
    return GraphedStep(step, max_graphs, modules, key)


@dataclass(frozen=True)
class _Captured:
    """A captured step.

    Attributes:
        number: its number among the captures of this function.
        graph: the graph.
        inputs: the leaves of the arguments with which it was captured; tensors are the graph's buffers.
        outputs: the leaves of its result; tensors are in the graph's memory.
        tree: the structure of its result.
        before, after: the state of the host before and after it.
        stepped: the groups that an optimizer steps in it.
        optimizers: the optimizers that step in it, with their settings (`settings_of`).
    """

    number: int
    graph: Graph
    inputs: list[Any]
    outputs: list[Any]
    tree: Any
    before: HostState
    after: HostState
    stepped: list[tuple[Engine, list[ParamGroup]]]
    optimizers: tuple[list[Optimizer], Hashable]


class GraphedStep(Generic[P, R]):
    """Result of `make_graphed_step`: call it like the step. `repr` shows what it has done, and why calls ran eagerly.

    Attributes:
        captures, replays: number of captures, and of replays, of which each capture is followed by one.
        eager_reasons: number of eager calls by reason.
    """

    def __init__(
        self,
        step: Callable[P, R],
        max_graphs: int,
        modules: Iterable[nn.Module],
        key: Callable[[], Hashable] | None,
    ) -> None:
        self._step, self._most, self._further = step, max_graphs, key
        self._host = Host(modules)
        self._graphs: dict[Hashable, _Captured] = {}
        self._seen: set[Hashable] = set()
        self._binding: tuple[object, ...] = ()
        self._why_first = ""
        self._pool: Any = None
        self._stream = SideStream()
        self._has_warned = False
        self.captures = self.replays = 0
        self.eager_reasons: Counter[str] = Counter()

    @property
    def eager_calls(self) -> int:
        """Number of eager calls."""
        return self.eager_reasons.total()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run, capture or replay the step.

        Raises:
            ShardConfigTypeError: an argument is neither a tensor, nor a number, text or another constant.
            ShardConfigValueError: a tensor requires a gradient, or is on another device; or the step ran no sharded
                model.
            ShardConfigStateError: the step cannot be captured.
            RankMismatchError: another rank does something else than to replay the same graph.
        """
        if not self._host.engines:
            return self._run_eagerly("the first call finds the models", args, kwargs)
        device = self._host.device
        if not can_capture(device):
            return self._run_eagerly(f"no CUDA graphs on {device.type}", args, kwargs)
        if capture_number(device):
            return self._step(*args, **kwargs)  # it becomes part of a graph of other code
        leaves, tree = flatten((args, kwargs))
        sight = self._host.see()
        key = tree, self._facts_of(leaves), self._host.key(sight), self._further and self._further()
        self._follow(sight)
        if self._host.are_voided():
            return self._run_eagerly("accumulated gradients may have been set to zero", args, kwargs)
        if (known := self._known(key)) is not None:
            return self._replay(known, leaves, sight)
        if (why := self._why_eager(key)) is not None:
            result = self._run_eagerly(why, args, kwargs)
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)
            return result
        return self._replay(self._capture(key, leaves, tree, sight), leaves, sight)

    def _facts_of(self, leaves: Sequence[Any]) -> tuple[Hashable, ...]:
        facts: list[Hashable] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._check(leaf)
                facts.append((leaf.shape, leaf.dtype, type(leaf)))
                continue
            if not isinstance(leaf, _CONSTANTS):  # the values in another object may change
                raise ShardConfigTypeError(
                    f"make_graphed_step: the step got a {type(leaf).__name__}; pass tensors, numbers and text, in "
                    "tuples, lists and dicts"
                )
            facts.append((type(leaf), leaf))
        return tuple(facts)

    def _check(self, tensor: torch.Tensor) -> None:
        device = self._host.device
        if tensor.device.type != device.type:
            raise ShardConfigValueError(
                f"make_graphed_step: the step got a tensor of shape {list(tensor.shape)} on {tensor.device}, and the "
                f"model computes on {device}; move the batch to {device.type} before the step"
            )
        if tensor.requires_grad:
            raise ShardConfigValueError(
                f"make_graphed_step: the step got a tensor of shape {list(tensor.shape)} that requires a gradient, "
                "which a graph would not set; pass tensor.detach(), or run this step without make_graphed_step"
            )

    def _follow(self, sight: Sight) -> None:
        """Drop all graphs if something has changed that they depend on, such as the address of a parameter."""
        binding = self._host.binding(sight)
        if binding != self._binding:
            self._graphs.clear()
            self._seen.clear()  # the engine adopts replaced parameters in an eager step
            self._pool = None
            self._binding = binding
            self._why_first = "the first call after parameters, buffers or the plan have changed"
        else:
            self._why_first = "the first call with its key"

    def _known(self, key: Hashable) -> _Captured | None:
        """The graph of a key, unless settings or state of an optimizer in it have changed since its capture."""
        known = self._graphs.get(key)
        if known is not None and settings_of(known.optimizers[0]) != known.optimizers[1]:
            del self._graphs[key]
            return None
        return known

    def _why_eager(self, key: Hashable) -> str | None:
        """Why a call without a graph runs eagerly; None if it is to be captured.

        Ranks decide alike if they get batches of the same shapes. If not, the ledger of actions raises an error.
        """
        if not self._host.is_settled:
            return "the plan had not settled"
        if key not in self._seen:
            return self._why_first
        if len(self._graphs) < self._most:
            return None
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"make_graphed_step: {self._most} graphs are captured, and calls with further keys run eagerly. Pass "
                "batches of fewer shapes, for example padded ones, or increase max_graphs",
                stacklevel=4,
            )
        return f"{self._most} graphs were captured before"

    # ---- eager calls

    def _run_eagerly(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        # On the stream of the captures: autograd accumulates gradients on the stream of a parameter's first use.
        result = self._host.observe(lambda: self._stream.run(lambda: self._step(*args, **kwargs)))
        self.eager_reasons[why] += 1
        self._host.count("eager_steps")
        leaves, tree = flatten(result)
        made: R = unflatten(_each_tensor(leaves, torch.Tensor.detach), tree)
        return made

    # ---- capture and replay

    def _capture(self, key: Hashable, leaves: Sequence[Any], tree: Any, sight: Sight) -> _Captured:
        host = self._host
        for engine, _ in host.engines:
            engine.before_capture()
        inputs = _each_tensor(leaves, lambda leaf: leaf.detach().clone())
        args, kwargs = unflatten(inputs, tree)
        before, results = host.state(sight), list[Any]()
        settings = {id(each): settings_of([each]) for each in known_optimizers()}
        versions = _versions(inputs)

        def work() -> None:
            results.append(self._step(*args, **kwargs))
            for engine, _ in host.engines:
                engine.capturing.end()  # compiled graphs do not tell when a backward ends

        def run() -> tuple[Graph, Any]:
            with autocast_cache_off(), _no_collector():
                return capture(work, self._pool)

        try:
            graph, self._pool = self._stream.run(run)
            optimizers = host.captured_optimizers()
            self._check_repeats(inputs, versions, optimizers, settings)
        except BaseException as error:
            host.resume(before, sight)
            if (explained := _explained(error)) is error:
                raise
            raise explained from error
        finally:
            for engine, _ in host.engines:
                engine.after_capture()
        outputs, of_result = flatten(results.pop())
        outputs = _each_tensor(outputs, torch.Tensor.detach)
        stepped = [(engine, list(engine.capturing.stepped)) for engine, _ in host.engines]
        self.captures += 1
        host.count("captures")
        after, stepping = host.state(sight), (optimizers, settings_of(optimizers))
        made = _Captured(self.captures, graph, inputs, outputs, of_result, before, after, stepped, stepping)
        self._graphs[key] = made
        host.resume(before, sight)
        return made

    def _check_repeats(
        self,
        inputs: Sequence[Any],
        versions: Sequence[int],
        optimizers: Sequence[Optimizer],
        settings: Mapping[int, Hashable],
    ) -> None:
        """Check that the captured step has not changed anything that a replay cannot change again.

        Args:
            inputs, versions: the leaves of the arguments, and their versions before.
            optimizers: the optimizers that have stepped.
            settings: the settings of optimizers before, by id.
        """
        for tensor, version, now in zip(inputs, versions, _versions(inputs), strict=True):
            if now != version:
                raise ShardConfigStateError(
                    f"make_graphed_step: the step writes to an argument of shape {list(tensor.shape)}, and a replay "
                    "would write to its own copy; return the result, or write to a tensor that is not an argument"
                )
        for optimizer in optimizers:
            if settings.get(id(optimizer)) != settings_of([optimizer]):
                raise ShardConfigStateError(
                    f"make_graphed_step: the step of {type(optimizer).__name__} changes Python numbers or replaces "
                    "tensors in its state, which a replay would not repeat; step outside of the graph"
                )
        if self._host.binding(self._host.see()) != self._binding:
            raise ShardConfigStateError(
                "make_graphed_step: the step replaces a parameter or a buffer, such as self.mean = ..., and a replay "
                "would use the old one; write to it in place, such as self.mean.copy_(...)"
            )

    def _replay(self, captured: _Captured, leaves: Sequence[Any], sight: Sight) -> R:
        host = self._host
        host.before_replay()
        with torch.no_grad():
            for buffer, leaf in zip(captured.inputs, leaves, strict=True):
                if isinstance(buffer, torch.Tensor):
                    buffer.copy_(leaf)
            host.copy_into(captured.before, sight)
        host.note(f"replay graph {captured.number} of a captured step")
        captured.graph.replay()
        host.resume(captured.after, sight)
        for engine, groups in captured.stepped:
            engine.replayed(groups)
        self.replays += 1
        host.count("replays")
        result: R = unflatten(_each_tensor(captured.outputs, torch.Tensor.clone), captured.tree)
        return result

    def __repr__(self) -> str:
        name = getattr(self._step, "__qualname__", type(self._step).__name__)
        reasons = "; ".join(f"{count} because {why}" for why, count in self.eager_reasons.most_common())
        eager = f"{self.eager_calls} eager calls" + (f" ({reasons})" if reasons else "")
        return f"GraphedStep({name}: {self.captures} captures, {self.replays} replays, {eager})"


def _explained(error: BaseException) -> BaseException:
    """The error to raise after a failed capture. Interrupts and errors of this library explain themselves."""
    if isinstance(error, ComposableShardError) or not isinstance(error, Exception):
        return error
    return ShardConfigStateError(f"make_graphed_step: the step cannot be captured: {error}. {_HINT}")


def _each_tensor(leaves: Iterable[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """The leaves, with the result of `change` instead of each tensor."""
    return [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _versions(leaves: Iterable[Any]) -> list[int]:
    """The version of each leaf that is a tensor; 0 for others."""
    return [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]


class _no_collector:  # noqa: N801 - used like a function
    """Keep the garbage collector from freeing objects with work on the device during a capture."""

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.collect()
        gc.disable()

    def __exit__(self, *_of_the_error: object) -> None:
        if self._was_on:
            gc.enable()
