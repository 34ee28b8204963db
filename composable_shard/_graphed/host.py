"""What the host contributes to a training step: facts that decide what it runs, and state that it leaves behind.

A CUDA graph contains neither. So a step is replayed only if all facts are those of its capture (`Host.key`), and after
each replay, the host gets the state that the captured step left (`Host.state`, `Host.resume`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from .._engine.engine import Engine
from .._group.accumulation import Held
from .._group.faces import LEAF_OF
from .._group.group import ParamGroup
from .._group.optimizers import DecidesSteps, known_optimizers
from .._group.refresh import CopyState
from .._policies import Options
from .._torch import debug
from .._torch.core import address_of, addresses_in, autocast_state, version_of, without_torch_function
from .._torch.distributed import local_part
from .observation import Observation, set_each

_MOST_OPTIONS = 256  # how many different options of groups are numbered; then numbering starts again
_OF_A_SCHEDULER = "_opt_called"  # an attribute by which a scheduler of torch knows that an optimizer has stepped


class Sight(NamedTuple):
    """The modules of a step at one call. Seen once for each call, because a large model has thousands.

    Attributes:
        modules: the modules.
        params: the sharded parameters of the models, other parameters of the modules, and others that the step trains.
        sharded: how many of `params` are sharded.
        buffers: all buffers of the modules.
    """

    modules: list[nn.Module]
    params: list[torch.Tensor]
    sharded: int
    buffers: list[torch.Tensor]


class HostState(NamedTuple):
    """The state of the host between two steps.

    Attributes:
        grads: `.grad` of each parameter.
        requires_grad: whether each parameter requires one.
        training: whether each module is in training mode.
        held: the accumulated gradients of each group.
        options: the options of each group.
        copies: what decides about the next refresh of each group with `outer_sharding`; None for the others.
        ends: `is_last_backward` and `ends_by_hand` of each engine.
    """

    grads: list[torch.Tensor | None]
    requires_grad: list[bool]
    training: list[bool]
    held: list[Held]
    options: list[Options]
    copies: list[CopyState | None]
    ends: list[tuple[bool, bool]]


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
        # By id, parameters outside of the models that the step trains; weakly, because a program may make new ones.
        self._trained: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._numbers: dict[Options, int] = {}
        self._seen: dict[int, tuple[Options, int]] = {}  # by id, which is unique because the options are held here

    def unknown_engines(self, seen: Observation) -> list[tuple[Engine, nn.Module]]:
        """The engines that a call of the step has run and that are not observed yet, with their roots."""
        known = [engine for engine, _ in self.engines]
        return [(engine, root) for engine, root in seen.engines() if engine not in known]

    def unknown_params(self, seen: Observation) -> list[torch.Tensor]:
        """The parameters that a call of the step has trained and that are not observed yet."""
        inside = {id(param) for module in self._modules() for param in module._parameters.values()}
        return [param for param in seen.trained() if id(param) not in inside and id(param) not in self._trained]

    def add_engines(self, seen: Observation) -> list[tuple[Engine, nn.Module]]:
        """Observe the models that a call of the step has run. Returns those that were not observed yet."""
        engines = self.unknown_engines(seen)
        self.engines += engines
        return engines

    def add(self, seen: Observation) -> None:
        """Observe what a call of the step has run and trained."""
        self.add_engines(seen)
        self._trained.update({id(param): param for param in self.unknown_params(seen)})

    def _modules(self) -> list[nn.Module]:
        return _all_below([*self._others, *(root for _, root in self.engines)])

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
        modules = self._modules()
        # Without the unsharded parameters that are installed after `unshard()`. A parameter that was just assigned is
        # among these, until an eager step adopts it.
        held = [param for module in modules for param in module._parameters.values() if param is not None]
        others = {id(param): param for param in held if LEAF_OF not in param.__dict__}
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        sharded = self._sharded()
        params = sharded | others | dict(self._trained.items())
        return Sight(modules, list(params.values()), len(sharded), buffers)

    def _sharded(self) -> dict[int, torch.Tensor]:
        """The sharded parameters of the models, by id."""
        return {id(param.sharded): param.sharded for group in self._groups() for param in group.params}

    def _groups(self) -> list[ParamGroup]:
        return [group for engine, _ in self.engines for group in engine.groups]

    def binding(self, sight: Sight) -> tuple[object, ...]:
        """What all graphs depend on: if it changes, they cannot be replayed any more.

        - the memory of all parameters and buffers
        - the buckets of the groups, which are made again if parameters are converted or memory is freed
        - the plan
        """
        shards = tuple([addresses_in(local_part(each)) for each in sight.params[: sight.sharded]])
        places = tuple(_places((*sight.params[sight.sharded :], *sight.buffers), self.device))
        plans = tuple([engine.order.plan.digest for engine, _ in self.engines])
        return shards, places, tuple([group.layout for group in self._groups()]), plans

    def key(self, sight: Sight) -> Hashable:
        """All facts that decide what the step runs, except its arguments.

        - whether gradients are recorded, and autocast
        - whether each module is in training mode
        - for each parameter, whether it requires a gradient, and whether it has one, to which the step adds
        - the settings of each model
        - which gradients are accumulated, and so the position among microbatches
        - whether compute copies are refreshed (`outer_sharding`)
        - whether optimizers step in backward
        - debug mode, in which each capture is refused
        """
        training = tuple([module.training for module in sight.modules])
        with without_torch_function():
            grads = tuple([(param.requires_grad, param.grad is None) for param in sight.params])
        ends = tuple([(engine.is_last_backward, engine.ends_by_hand) for engine, _ in self.engines])
        groups = self._groups()
        settings = tuple([self._number_of(group.options) for group in groups])
        held = tuple([(group.gradients.held_now().key(), group.copies_key()) for group in groups])
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), debug.debugging
        deciding = [each for each in known_optimizers() if isinstance(each, DecidesSteps)]
        steps = tuple([each.decision() for each in deciding if _trains_some(each, sight.params)])
        return modes, autocast_state(), training, grads, ends, settings, held, steps

    def are_voided(self) -> bool:
        """Whether accumulated gradients may have been set to zero, which only an eager step can tell."""
        return any(group.gradients.held_now().is_voided for group in self._groups())

    def _number_of(self, options: Options) -> int:
        """A number for these options. Hashing options takes long, and setters often return to earlier ones."""
        seen = self._seen.get(id(options))
        if seen is None:
            if len(self._seen) > _MOST_OPTIONS:
                self._seen.clear()
            number = self._numbers.setdefault(options, len(self._numbers))
            seen = self._seen[id(options)] = options, number
        return seen[1]

    # ---- state

    def state(self, sight: Sight) -> HostState:
        """The state now."""
        with without_torch_function():
            grads = [param.grad for param in sight.params]
            requires_grad = [param.requires_grad for param in sight.params]
        training = [module.training for module in sight.modules]
        groups, engines = self._groups(), [engine for engine, _ in self.engines]
        held, options = [group.gradients.held_now() for group in groups], [group.options for group in groups]
        ends = [(engine.is_last_backward, engine.ends_by_hand) for engine in engines]
        copies = [None if group.layout.copies is None else group.layout.copies.state for group in groups]
        return HostState(grads, requires_grad, training, held, options, copies, ends)

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
        now = self.state(sight)
        with without_torch_function():
            set_each("grad", sight.params, now.grads, state.grads)
            set_each("requires_grad", sight.params, now.requires_grad, state.requires_grad)
        set_each("training", sight.modules, now.training, state.training)
        engines = [engine for engine, _ in self.engines]
        for index, name in enumerate(("is_last_backward", "ends_by_hand")):
            set_each(name, engines, [ends[index] for ends in now.ends], [ends[index] for ends in state.ends])
        for group, options, held, held_now in zip(self._groups(), state.options, state.held, now.held, strict=True):
            group.settings.take(options)
            if not (held.is_empty and held_now.is_empty):
                group.gradients.resume(held)
        for group, copied in zip(self._groups(), state.copies, strict=True):
            if copied is not None:
                group.resume_copies(copied)

    def dicts(self, sight: Sight) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Each dict of buffers, and of settings and state of optimizers, with a copy, to restore after a failure."""
        dicts: list[dict[Any, Any]] = [module._buffers for module in sight.modules if module._buffers]
        for optimizer in known_optimizers():
            dicts += [*optimizer.param_groups, optimizer.state, *optimizer.state.values()]
        return [(each, dict(each)) for each in dicts]

    def captured_optimizers(self) -> list[Optimizer]:
        """The optimizers that have stepped in the last capture."""
        by_id = [engine.capturing.optimizers for engine, _ in self.engines]
        return list({number: each for optimizers in by_id for number, each in optimizers.items()}.values())

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """In this context, other threads cannot run the models.

        Raises:
            ShardConfigStateError: another thread does.
        """
        with ExitStack() as claims:
            for engine, _ in self.engines:
                claims.enter_context(engine.claimed())
            yield

    def before_replay(self) -> None:
        """Reshard all groups, and wait for the last change of parameters."""
        for engine, _ in self.engines:
            engine.before_replay()

    def numbers(self) -> list[int]:
        """How many captures there were of each engine. Ranks capture a model in the same order."""
        return [engine.capturing.counts["captures"] for engine, _ in self.engines]

    def note_replay(self, numbers: Sequence[int]) -> None:
        """Note a replay, as one action, in the ledgers of all models: all ranks must replay the same graph now.

        Args:
            numbers: the number of the graph for each engine (`numbers` after its capture).

        Raises:
            RankMismatchError: another rank does something else.
        """
        for (engine, _), number in zip(self.engines, numbers, strict=True):
            engine.review.seat.together(f"replay captured graph {number}")

    def count(self, kind: str) -> None:
        """Count a call of the step in the figures of all models (`stats`)."""
        for engine, _ in self.engines:
            engine.capturing.count(kind)


def _trains_some(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> bool:
    ids = set(map(id, params))
    return any(id(param) in ids for group in optimizer.param_groups for param in group["params"])


def _places(tensors: Iterable[torch.Tensor], device: torch.device) -> list[Hashable]:
    """What a graph contains of each tensor: where it is, and of one on the CPU in a graph of a GPU, its values."""
    is_gpu, facts = device.type != "cpu", list[Hashable]()
    for tensor in map(local_part, tensors):
        address = address_of(tensor)
        strides = tensor.stride() if address else ()  # sparse tensors have none
        values = version_of(tensor) if is_gpu and tensor.is_cpu else 0
        facts.append((address, tensor.dtype, tensor.shape, strides, values))
    return facts


def _all_below(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """These modules and all modules in them, each once. `nn.Module.modules` takes several times as long."""
    modules: dict[int, nn.Module] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if id(module) not in modules:
            modules[id(module)] = module
            waiting += [child for child in module._modules.values() if child is not None]  # an empty one is false
    return list(modules.values())


def settings_of(optimizers: Iterable[Optimizer]) -> Hashable:
    """The facts about optimizers that a graph with their steps contains: settings, and addresses of tensors."""
    return tuple([_settings_of(optimizer) for optimizer in optimizers])


def _settings_of(optimizer: Optimizer) -> Hashable:
    facts: list[Hashable] = []
    for group in optimizer.param_groups:
        facts += [(name, _fact(value)) for name, value in group.items() if name != "params"]
        states = [optimizer.state.get(param, {}) for param in group["params"]]
        facts += [(name, _fact(value)) for state in states for name, value in state.items()]
    return tuple(facts)


def numbers_of(optimizer: Optimizer) -> Hashable:
    """Its attributes that are numbers, such as a count of its steps."""
    named = vars(optimizer).items()
    return tuple([pair for pair in named if isinstance(pair[1], (int, float)) and pair[0] != _OF_A_SCHEDULER])


def _fact(value: object) -> Hashable:
    return address_of(local_part(value)) if isinstance(value, torch.Tensor) else repr(value)
