"""What the host contributes to a training step: facts that decide what it runs, and state that it leaves behind.

A CUDA graph contains neither. So a step is replayed only if all facts are those of its capture (`Host.key`), and after
each replay, the host gets the state that the captured step left (`Host.state`, `Host.resume`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import nn

from .._engine.engine import Engine
from .._group.accumulation import Held
from .._group.optimizers import known_parameters
from .._group.param import run_all
from .._module.build import living_engines
from .._policies import Options
from .._torch.core import address_of, autocast_state, without_torch_function
from .._torch.distributed import local_part
from ..errors import ShardConfigValueError

_MOST_OPTIONS = 256  # how many different options of groups are numbered; then numbering starts again


class Sight(NamedTuple):
    """The modules of a step at one call. Seen once for each call, because a large model has thousands.

    Attributes:
        training: whether each module is in training mode.
        params: all parameters of the modules, and others that the step trains.
        buffers: all buffers of the modules.
    """

    training: list[bool]
    params: list[torch.Tensor]
    buffers: list[torch.Tensor]


class HostState(NamedTuple):
    """The state of the host between two steps.

    Attributes:
        grads: `.grad` of each parameter.
        held: the accumulated gradients of each group.
    """

    grads: list[torch.Tensor | None]
    held: list[Held]


class Host:
    """The models, modules and optimizers of a step.

    Args:
        modules: modules to include that contain no sharded module.

    Attributes:
        engines: the engines of the sharded models that the step has run, with their roots.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._others = list(modules)
        self.engines: list[tuple[Engine, nn.Module]] = []
        self._touched: dict[int, torch.Tensor] = {}  # by id, parameters outside of the models that eager calls train
        self._numbers: dict[Options, int] = {}
        self._seen: dict[int, tuple[Options, int]] = {}  # by id, which is unique because the options are held here

    def observe(self, run: Callable[[], Any]) -> Any:
        """Call `run`, and add the sharded models that it has run, and other parameters whose `.grad` it has changed.

        Raises:
            ShardConfigValueError: there are none.
        """
        before = {id(engine): engine.runs for engine, _ in living_engines()}
        others = known_parameters()
        grads = _grads_of(others)
        result = run()
        known = [engine for engine, _ in self.engines]
        for param, was, now in zip(others, grads, _grads_of(others), strict=True):
            if was != now:
                self._touched[id(param)] = param
        for engine, root in living_engines():
            if not engine.is_of_this_thread:
                continue
            if engine.runs != before.get(id(engine), (0, 0)) and engine not in known:
                self.engines.append((engine, root))
        if not self.engines:
            raise ShardConfigValueError("make_graphed_step: the step has run no sharded model; call fully_shard first")
        return result

    @property
    def device(self) -> torch.device:
        """The device on which the models compute."""
        return self.engines[0][0].pool.memory.device

    @property
    def is_settled(self) -> bool:
        """Whether no model is about to follow another plan or to measure a step. Equal on all ranks."""
        return all(engine.review.is_settled for engine, _ in self.engines)

    def see(self) -> Sight:
        """Walk through all modules."""
        modules: dict[int, nn.Module] = {}
        waiting = [*self._others, *(root for _, root in self.engines)]
        while waiting:
            module = waiting.pop()
            if id(module) not in modules:
                modules[id(module)] = module
                waiting += [child for child in module._modules.values() if child is not None]
        every = modules.values()
        params = [param for module in every for param in module._parameters.values() if param is not None]
        buffers = [buffer for module in every for buffer in module._buffers.values() if buffer is not None]
        unique = {id(param): param for param in params} | self._touched
        return Sight([module.training for module in every], list(unique.values()), buffers)

    @staticmethod
    def places(sight: Sight) -> tuple[int, ...]:
        """The addresses of all parameters and buffers, which a graph contains."""
        return tuple([address_of(local_part(each)) for each in (*sight.params, *sight.buffers)])

    def key(self, sight: Sight) -> Hashable:
        """All facts that decide what the step runs, except its arguments.

        - whether gradients are recorded, and autocast
        - whether each module is in training mode
        - for each parameter, whether it requires a gradient, and whether it has one, to which the step adds
        - the plan and the settings of each model
        - which gradients are accumulated, and so the position among microbatches
        """
        with without_torch_function():
            grads = tuple([(param.requires_grad, param.grad is None) for param in sight.params])
        plans = tuple(
            [(id(engine.order.plan), engine.is_last_backward, engine.ends_by_hand) for engine, _ in self.engines]
        )
        groups = [group for engine, _ in self.engines for group in engine.groups]
        settings = tuple([self._number_of(group.options) for group in groups])
        held = tuple([group.gradients.held_now().key() for group in groups])
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return grad, autocast_state(), tuple(sight.training), grads, plans, settings, held

    def _number_of(self, options: Options) -> int:
        """A number for these options. Hashing options takes long, and setters often return to earlier ones."""
        seen = self._seen.get(id(options))
        if seen is None:
            if len(self._seen) > _MOST_OPTIONS:
                self._seen.clear()
            number = self._numbers.setdefault(options, len(self._numbers))
            seen = self._seen[id(options)] = options, number
        return seen[1]

    def plans(self) -> list[object]:
        """The plans, to hold them as long as a key refers to them."""
        return [engine.order.plan for engine, _ in self.engines]

    # ---- state

    def state(self, sight: Sight) -> HostState:
        """The state now."""
        with without_torch_function():
            grads = [param.grad for param in sight.params]
        return HostState(grads, [group.gradients.held_now() for engine, _ in self.engines for group in engine.groups])

    def copy_into(self, state: HostState, sight: Sight) -> None:
        """Copy each gradient into the one of `state`, which a graph reads, if it is another tensor."""
        now = self.state(sight)
        pairs = list(zip(now.grads, state.grads, strict=True))
        for held, wanted in zip(now.held, state.held, strict=True):
            pairs += zip(held.tensors(), wanted.tensors(), strict=True)
        apart = [
            (local_part(to), local_part(of)) for of, to in pairs if of is not to and of is not None and to is not None
        ]
        if apart:
            torch._foreach_copy_([to for to, _ in apart], [of for _, of in apart])

    def resume(self, state: HostState, sight: Sight) -> None:
        """Set the state: the one that a captured step left, after its replay."""
        with without_torch_function():
            run_all(map(setattr, sight.params, repeat("grad"), state.grads))
        groups = [group for engine, _ in self.engines for group in engine.groups]
        for group, held in zip(groups, state.held, strict=True):
            group.gradients.resume(held)

    def note(self, what: str) -> None:
        """Note a replay, as one action, in the ledgers of all models: all ranks must replay the same graph now.

        Raises:
            RankMismatchError: another rank does something else.
        """
        for engine, _ in self.engines:
            engine.review.seat.together(what)

    def count(self, kind: str) -> None:
        """Count a call of the step in the figures of all models (`stats`)."""
        for engine, _ in self.engines:
            engine.capturing.count(kind)


def _grads_of(params: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """The id and the version of each `.grad`, by which a change is recognized; zeros if there is none."""
    with without_torch_function():
        grads = [param.grad for param in params]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]
