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

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from .._engine.engine import Engine
from .._group.group import ParamGroup
from .._group.optimizers import known_optimizers
from .._torch.capturing import Graph, SideStream, can_capture, capture, capture_number
from .._torch.core import autocast_cache_off, flatten, unflatten, version_of
from ..errors import ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from .host import Host, HostState, Sight, numbers_of, settings_of
from .observation import Observation

P = ParamSpec("P")
R = TypeVar("R")

_CONSTANTS = (str, bytes, bool, int, float, complex, np.generic, NoneType, Enum, torch.dtype, torch.device, torch.Size)
_MOST_SEEN = 1024  # how many keys are remembered of steps that have run eagerly
_MOST_CHANGES = 3
_MOST_UNUSED = 16  # so many calls in a row without a replay of an earlier graph cause a warning
_HINT = (
    "In a captured step, Python runs once, and no value may reach the host: no .item(), print(tensor), `if tensor`, "
    "GradScaler.step, copy to the CPU, or data-dependent shape. Move such code out of the step"
)
_FIRST_TIME = (
    "make_graphed_step: the step has run a sharded model for the first time in a capture, so what it does depends on "
    "something that is not part of the key; pass it with key="
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

    Calls run eagerly until the plan of each model has settled. Then the first call with a key runs eagerly, the second
    one is captured and replayed, and later ones are replayed. The key contains everything that decides which work the
    host issues:

    - the shapes, dtypes and structure of the arguments, and the values of those that are not tensors
    - which parameters require a gradient, and which have a `.grad`
    - settings of the models, such as gradient sync, and accumulated gradients: the first, the second, the middle and
      the last microbatches have separate graphs
    - training mode, grad mode and autocast
    - the result of `key`

    Python decides everything else once, at the capture. The graphs are captured again if parameters or buffers have
    moved, for example in a load with ``assign=True``, if the plan has changed, or if settings or state of an optimizer
    in the step were replaced. If these settings change three times in a row before a graph is replayed, calls with this
    key run eagerly.

    A replay gives the same results as an eager step, and draws new random numbers. Before it, the arguments are copied
    into the graph's own buffers. After it, each parameter has the `.grad` that the captured step set, in the same
    memory, so copy gradients that you keep. Settings and training mode are as after an eager step. Tensors of the
    result are copied. Numbers in it are those of the capture. A replay runs no Python code of the step: no hooks, and
    no actions that `last_record`, `watch` or `stats` would show. All ranks must replay the same graph at the same time.
    The comparison of ranks checks this.

    The step may include the optimizer if its learning rate is a tensor and it was created with ``capturable=True``.
    Without CUDA, all calls run eagerly.

    Args:
        step: takes and returns tensors, numbers and text, also in tuples, lists and dicts. The arguments must be on the
            device of the models, and must not require gradients. Results do not require gradients: call backward in the
            step.
        max_graphs: the maximum number of graphs, at least 1. Calls with further keys run eagerly, with one warning.
        modules: modules that contain no sharded module and that the step runs or trains. (Modules in sharded models,
            and parameters that an optimizer has stepped before the capture, need not be passed.)
        key: returns a hashable value, which becomes part of the key. Use it for anything else that changes what the
            step runs, for example ``lambda: config.use_auxiliary_loss``.

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
        numbers: its number among the captures of each engine.
        graph: the graph.
        pool: its memory pool, which other graphs may share.
        inputs: the leaves of the arguments with which it was captured; tensors are the graph's buffers.
        outputs: the leaves of its result; tensors are in the graph's memory.
        tree: the structure of its result.
        before, after: the state of the host before and after it.
        stepped: the groups that an optimizer steps in it.
        optimizers: the optimizers that step in it, with their settings (`settings_of`).
    """

    numbers: list[int]
    graph: Graph
    pool: Any
    inputs: list[Any]
    outputs: list[Any]
    tree: Any
    before: HostState
    after: HostState
    stepped: list[tuple[Engine, list[ParamGroup]]]
    optimizers: tuple[list[Optimizer], Hashable]


class GraphedStep(Generic[P, R]):
    """Result of `make_graphed_step`. Call it like the step. `repr` shows captures, replays, and why calls ran eagerly.

    Attributes:
        captures: number of captures.
        replays: number of replays. Each capture is followed by one.
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
        self._changes = Counter[Hashable]()  # by key, graphs in a row that were dropped before their second use
        self._unused = 0  # calls in a row without a replay of an earlier graph
        self._warned: set[str] = set()
        self.captures = self.replays = 0
        self.eager_reasons: Counter[str] = Counter()

    @property
    def eager_calls(self) -> int:
        """Number of eager calls."""
        return self.eager_reasons.total()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run, capture or replay the step.

        Raises:
            ShardConfigTypeError: an argument or a result is neither a tensor, nor a number, text or another constant;
                or the result of `key` is not hashable.
            ShardConfigValueError: an argument requires a gradient, or is on another device; or the step ran no sharded
                model.
            ShardConfigStateError: the step cannot be captured, or another thread runs a model of the step.
            RankMismatchError: another rank does not replay the same graph.
        """
        if not self._host.engines:
            return self._observe("the first call finds the models", args, kwargs)
        device = self._host.device
        if not can_capture(device):
            return self._run_eagerly(f"no CUDA graphs on {device.type}", args, kwargs)
        if capture_number(device):
            return self._step(*args, **kwargs)  # it becomes part of a graph of other code
        leaves, tree = flatten((args, kwargs))
        sight = self._host.see()
        key = tree, self._facts_of(leaves), self._host.key(sight), self._further_facts()
        self._follow(sight)
        if self._host.are_voided():
            return self._run_eagerly("accumulated gradients may have been set to zero", args, kwargs)
        if (known := self._known(key)) is not None:
            return self._replay(known, leaves, sight)
        if not self._host.is_settled:
            return self._observe("the plan had not settled", args, kwargs, key)
        self._count_unused()
        if (why := self._why_no_capture(key)) is not None:
            return self._run_eagerly(why, args, kwargs)
        if key not in self._seen:
            return self._observe(self._why_first, args, kwargs, key)
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

    def _further_facts(self) -> Hashable:
        facts = None if self._further is None else self._further()
        if not isinstance(facts, Hashable):
            raise ShardConfigTypeError(
                f"key: must return a value that can be a key of a dict, got a {type(facts).__name__}; return a tuple"
            )
        return facts

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
            self._changes.clear()
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
            self._seen.discard(key)
            self._changes[key] += 1
            self._why_first = "the first call after settings or state of an optimizer have changed"
            return None
        if known is not None:
            self._unused = self._changes[key] = 0
        return known

    # Ranks decide alike if they get batches of the same shapes. If not, the ledger of actions raises an error.

    def _why_no_capture(self, key: Hashable) -> str | None:
        """Why a call that could be captured runs eagerly, if it does."""
        if self._changes[key] >= _MOST_CHANGES:
            return "settings or state of an optimizer change often"
        if len(self._graphs) < self._most:
            return None
        self._warn_once(
            f"make_graphed_step: {self._most} graphs are captured, and calls with further keys run eagerly. Pass "
            "batches of fewer shapes, for example padded ones, or increase max_graphs"
        )
        return f"{self._most} graphs were captured before"

    def _count_unused(self) -> None:
        """Count a call that replays no earlier graph, and warn if there were many in a row."""
        self._unused += 1
        if self._unused == _MOST_UNUSED:
            self._warn_once(
                f"make_graphed_step: none of the last {_MOST_UNUSED} calls could replay an earlier graph: {self!r}. "
                "Pass numbers that change as tensors, pad batches to few shapes, write to buffers in place, and step "
                "an optimizer whose settings change outside of the step"
            )

    def _warn_once(self, text: str) -> None:
        kind = text[:40]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=4)

    # ---- eager calls

    def _observe(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable = None) -> R:
        """Run eagerly, and note what the step runs and trains: the next call with this key may be captured."""
        result = self._run_eagerly(why, args, kwargs, Observation(everything=False))
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return result

    def _run_eagerly(
        self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Observation | None = None
    ) -> R:
        host = self._host
        # On the stream of the captures: autograd accumulates gradients on the stream of a parameter's first use.
        leaves, tree = self._stream.run(lambda: _copied(self._step(*args, **kwargs)))
        if seen is not None:
            host.add(seen)
        if not host.engines:
            raise ShardConfigValueError("make_graphed_step: the step has run no sharded model; call fully_shard first")
        self.eager_reasons[why] += 1
        host.count("eager_steps")
        return self._given(leaves, tree)

    def _given(self, leaves: list[Any], tree: Any) -> R:
        """A result on the caller's stream, which was made on another one."""
        self._stream.hand_over([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        result: R = unflatten(leaves, tree)
        return result

    # ---- capture and replay

    def _capture(self, key: Hashable, leaves: Sequence[Any], tree: Any, sight: Sight) -> _Captured:
        host = self._host
        try:
            for engine, _ in host.engines:
                engine.before_capture()
            made = self._capture_now(leaves, tree, sight)
        except BaseException as error:
            self._pool = None  # torch still records into it
            if (explained := _explained(error)) is error:
                raise
            raise explained from error
        finally:
            for engine, _ in host.engines:
                engine.after_capture()
        self._graphs[key] = made
        self._pool = made.pool
        self.captures += 1
        host.resume(made.before, sight)
        return made

    def _capture_now(self, leaves: Sequence[Any], tree: Any, sight: Sight) -> _Captured:
        host = self._host
        inputs = _each_tensor(leaves, lambda leaf: leaf.detach().clone())
        args, kwargs = unflatten(inputs, tree)
        before, dicts, results = host.state(sight), host.dicts(sight), list[Any]()
        settings = {id(each): _settings_in_a_step(each) for each in known_optimizers()}
        written = [*inputs, *leaves]  # the arguments themselves may be buffers, to which the step writes
        versions = _versions(written)
        seen = Observation(everything=True)

        def work() -> None:
            results.append(self._step(*args, **kwargs))
            for engine, _ in host.engines:
                engine.capturing.end_step()

        def run() -> tuple[Graph, Any]:
            with autocast_cache_off(), _no_collector():
                return capture(work, self._shared_pool())

        try:
            graph, pool = self._stream.run(run)
            outputs, of_result = _leaves_of(results.pop())
            optimizers = host.captured_optimizers()
            self._check_repeats(written, versions, optimizers, settings)
            if host.unknown_engines(seen):
                raise ShardConfigStateError(_FIRST_TIME)
            if params := host.unknown_params(seen):
                raise ShardConfigStateError(_unknown_param(params[0]))
        except BaseException as error:
            seen.restore()
            host.resume(before, sight)
            engines = host.add_engines(seen)
            for each, copy in dicts:
                each.clear()
                each.update(copy)
            if engines and isinstance(error, ShardConfigStateError):
                raise ShardConfigStateError(_FIRST_TIME) from error
            raise
        host.count("captures")
        stepped = [(engine, list(engine.capturing.stepped)) for engine, _ in host.engines]
        after, stepping = host.state(sight), (optimizers, settings_of(optimizers))
        outputs = _each_tensor(outputs, torch.Tensor.detach)
        return _Captured(host.numbers(), graph, pool, inputs, outputs, of_result, before, after, stepped, stepping)

    def _shared_pool(self) -> Any:
        """The pool of the last graph, if a graph still uses it: torch frees a pool with its last graph."""
        return self._pool if any(each.pool == self._pool for each in self._graphs.values()) else None

    def _check_repeats(
        self,
        written: Sequence[Any],
        versions: Sequence[int],
        optimizers: Sequence[Optimizer],
        settings: Mapping[int, Hashable],
    ) -> None:
        """Check that the captured step has not changed anything that a replay cannot change again.

        Args:
            written, versions: the leaves of the arguments, and their versions before.
            optimizers: the optimizers that have stepped.
            settings: the settings of optimizers before, by id.
        """
        for tensor, version, now in zip(written, versions, _versions(written), strict=True):
            if now != version:
                raise ShardConfigStateError(
                    f"make_graphed_step: the step writes to an argument of shape {list(tensor.shape)}, and a replay "
                    "would write to its own copy; return the result, or write to a tensor that is not an argument"
                )
        for optimizer in optimizers:
            if settings.get(id(optimizer)) != _settings_in_a_step(optimizer):
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
        # On one stream: otherwise, a program that changes streams could write arguments while a replay reads others.
        with self._host.claimed():
            results = self._stream.run(lambda: self._replay_now(captured, leaves, sight))
        self.replays += 1
        self._host.count("replays")
        return self._given(results, captured.tree)

    def _replay_now(self, captured: _Captured, leaves: Sequence[Any], sight: Sight) -> list[Any]:
        host = self._host
        host.before_replay()
        with torch.no_grad():
            for buffer, leaf in zip(captured.inputs, leaves, strict=True):
                if isinstance(buffer, torch.Tensor):
                    buffer.copy_(leaf)
            host.copy_into(captured.before, sight)
        host.note_replay(captured.numbers)
        captured.graph.replay()
        host.resume(captured.after, sight)
        for engine, groups in captured.stepped:
            engine.replayed(groups)
        return _each_tensor(captured.outputs, _copy)

    def __repr__(self) -> str:
        name = getattr(self._step, "__qualname__", type(self._step).__name__)
        reasons = "; ".join(f"{count} because {why}" for why, count in self.eager_reasons.most_common())
        eager = f"{self.eager_calls} eager calls" + (f" ({reasons})" if reasons else "")
        return f"GraphedStep({name}: {self.captures} captures, {self.replays} replays, {eager})"


def _unknown_param(param: torch.Tensor) -> str:
    return (
        f"make_graphed_step: the step trains a parameter of shape {list(param.shape)} outside of the sharded models, "
        "which no optimizer has stepped before; pass its module with modules=, or itself in an nn.ParameterList"
    )


def _settings_in_a_step(optimizer: Optimizer) -> Hashable:
    """What a step of this optimizer may not change, because a replay would not repeat it."""
    return settings_of([optimizer]), numbers_of(optimizer)


def _explained(error: BaseException) -> BaseException:
    """The error to raise after a failed capture. Errors of CUDA, which raises RuntimeError, do not explain themselves.

    Programs handle a lack of memory and errors of their own.
    """
    if type(error) in (RuntimeError, torch.AcceleratorError):
        return ShardConfigStateError(f"make_graphed_step: the step cannot be captured: {error}. {_HINT}")
    return error


def _leaves_of(result: Any) -> tuple[list[Any], Any]:
    """The leaves and the structure of a result.

    Raises:
        ShardConfigTypeError: a leaf cannot be copied.
    """
    leaves, tree = flatten(result)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
            raise ShardConfigTypeError(
                f"make_graphed_step: the step returned a {type(leaf).__name__}, whose tensors the next replay would "
                "overwrite; return tensors, numbers and text, in tuples, lists and dicts"
            )
    return leaves, tree


def _each_tensor(leaves: Iterable[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """The leaves, with the result of `change` instead of each tensor."""
    return [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _copied(result: Any) -> tuple[list[Any], Any]:
    """Copies of the leaves, and the structure, of a result."""
    leaves, tree = _leaves_of(result)
    return _each_tensor(leaves, _copy), tree


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _versions(leaves: Iterable[Any]) -> list[int]:
    """The version of each leaf that is a tensor; 0 for others."""
    return [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]


class _no_collector:  # noqa: N801 - used like a function
    """Keep the garbage collector from freeing objects with work on the device during a capture."""

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.collect()
        gc.disable()

    def __exit__(self, *_of_the_error: object) -> None:
        if self._was_on:
            gc.enable()
