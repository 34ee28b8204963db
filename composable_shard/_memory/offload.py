"""Optimizers whose state is offloaded to disk or to host memory.

`offload_optimizer` replaces the class of an optimizer by a subclass, in place. The subclass calls the original `step`
several times, each time with some of the parameters, as if there were no others. This works for all optimizers that
step each parameter independently.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .._policies import DiskOffloadPolicy, HostOffloadPolicy, OffloadPolicy, keeps_shards_on_host
from .._torch.core import HANDLES, between_graphs, has_memory, never_trace
from .._torch.distributed import local_part
from ..errors import OffloadError, ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from .elsewhere import StateElsewhere, rehearsed
from .state_on_disk import StateKeeper, StateOnDisk, Step
from .state_on_host import StateOnHost

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
_LOST = (
    "the optimizer's state was lost when a step or a load failed ({}); create the model and the optimizer again, and "
    "load a checkpoint"
)


class Sharded(Protocol):
    """A parameter of a group.

    Attributes:
        fqn: fully qualified name.
        sharded: the parameter that optimizers step. Conversions and loads may replace it.
    """

    fqn: str
    sharded: nn.Parameter


class _Asked(NamedTuple):
    """The offload policy that was requested for a parameter, and the parameter's name."""

    policy: OffloadPolicy
    name: str


_asked: dict[int, tuple[weakref.ref[Sharded], OffloadPolicy]] = {}  # by id of the `Sharded`, while it is alive


def _asked_for() -> dict[int, _Asked]:
    """The requested policies, by the id of each current sharded parameter."""
    living = [(ref(), policy) for ref, policy in list(_asked.values())]
    return {id(each.sharded): _Asked(policy, each.fqn) for each, policy in living if each is not None}


def note_policy(params: Iterable[Sharded], policy: OffloadPolicy) -> None:
    """Record the offload policy of a group's parameters."""
    params = list(params)
    rehearsal = rehearsed()
    if rehearsal is not None and keeps_shards_on_host(policy):
        rehearsal.note(params)
    if _keeps_state_apart(policy):
        for each in params:
            key = id(each)
            _asked[key] = weakref.ref(each, lambda _, key=key: _asked.pop(key, None)), policy  # type: ignore[misc]
        _watch_optimizers()


def _keeps_state_apart(policy: OffloadPolicy) -> bool:
    """Whether a policy stores optimizer state on another device than the parameters, or on disk."""
    return isinstance(policy, (DiskOffloadPolicy, HostOffloadPolicy))


@functools.cache
def _watch_optimizers() -> None:
    """Refuse optimizers that step parameters with an offload policy but were not passed to `offload_optimizer`.

    The hook is installed on first use, so programs without offload policies have no overhead.
    """
    register_optimizer_step_pre_hook(_refuse_forgotten)
    HANDLES.give()


def _refuse_forgotten(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, OffloadedOptimizer):
        return
    asked = _asked_for()
    for param in _params_of(optimizer):
        note = asked.get(id(param))
        if note is not None and _applies(note.policy, param):
            raise ShardConfigStateError(
                f"optimizer: {note.name} was sharded with {type(note.policy).__name__}, but the state of this "
                f"{type(optimizer).__name__} is not offloaded; call cs.optim.offload_optimizer(optimizer) before the "
                "first step"
            )


def _applies(policy: OffloadPolicy, param: torch.Tensor) -> bool:
    """Whether a policy has an effect for a parameter on its current device. It has none for fake tensors."""
    local = local_part(param)
    return has_memory(local) and (isinstance(policy, DiskOffloadPolicy) or local.device.type not in ("cpu", "meta"))


class OffloadedOptimizer(Optimizer):
    """The base class of offloaded optimizers, which step their parameters part by part."""

    _keeper: StateKeeper
    _keeps_all: bool
    _lost = ""

    def _become(self, cls: type, keeper: StateKeeper, keeps_all: bool) -> None:
        """Convert an optimizer in place.

        Args:
            cls: a subclass of the optimizer's class and of this class.
            keeper: stores the state.
            keeps_all: whether to offload the state of all parameters, instead of only those with an offload policy.
        """
        self._keeper, self._keeps_all = keeper, keeps_all
        with torch.no_grad():
            keeper.keep_all(self.state, OffloadedOptimizer.apart(self, _params_of(self)))
        self.__class__ = cls

    def apart(self, params: Sequence[Any]) -> list[Any]:
        """The parameters whose state is offloaded."""
        asked = {} if self._keeps_all else _asked_for()
        return [param for param in params if self._keeps_all or id(param) in asked]

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step like the optimizer's original class, some parameters at a time.

        Raises:
            OffloadError: state could not be read or written, or was lost in an earlier step.
            PoolBudgetError: `DiskOffloadPolicy.memory` is too small for the state of a parameter.
        """
        self._refuse_lost()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        between_graphs(self._step_now)(options)  # file I/O and threads cannot be compiled
        return loss

    def _step_now(self, options: Mapping[str, Any]) -> None:
        ready = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        apart = self.apart(ready)
        others = [param for param in ready if param not in {*apart}]
        with torch.no_grad(), self._losing_state(), self._in_parts(options) as step:
            if others:
                step(others, others)
            if apart:
                self._keeper.step(self.state, apart, step)
        self._refuse_own_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state like the optimizer's original class, and offload it.

        Raises:
            OffloadError: the state could not be written, or was lost in an earlier step.
        """
        self._refuse_lost()
        with self._loading():
            super().load_state_dict(state_dict)
        with torch.no_grad(), self._losing_state():
            self._keeper.keep_all(self.state, self.apart(_params_of(self)))

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step. Tensors on disk are mapped from the files.

        Raises:
            OffloadError: state was lost in an earlier step.
        """
        self._refuse_lost()
        return super().state_dict()

    def blank_state(self, params: Iterable[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
        """Create state on disk for parameters without state, so that a load can fill it. Its values mean nothing.

        The optimizer does not use it until it is passed to `load_state_dict`. Empty if the state is not on disk.
        """
        keeper = self._keeper
        if not isinstance(keeper, StateOnDisk):
            return {}
        made = {}
        for param in self.apart(list(params)):
            if not self.state.get(param):
                made[param] = keeper.blank(param, self._state_of_twin(param))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ShardConfigTypeError(
            "optimizer: its state is offloaded, so it cannot be copied; create another one and load the state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardConfigTypeError(
            "optimizer: its state is offloaded, so it cannot be pickled; save it with checkpoint.save"
        )

    def _state_of_twin(self, param: torch.Tensor) -> dict[str, Any]:
        """The state of a zero parameter like `param` after a step with a zero gradient."""
        twin = nn.Parameter(torch.zeros_like(param))
        twin.grad = torch.zeros_like(param)
        groups = self.param_groups
        group = next(group for group in groups if any(each is param for each in group["params"]))
        self.param_groups = [{**group, "params": [twin]}]
        try:
            with torch.no_grad():
                _own_step(type(self))(self)
            return dict(self.state.pop(twin, {}))
        finally:
            self.param_groups = groups
            self.state.pop(twin, None)

    @contextmanager
    def _in_parts(self, options: Mapping[str, Any]) -> Iterator[Step]:
        """Context with a function that steps some of the parameters.

        Each call sees only the param groups of its parameters, with the options from before the first call. Options
        that the calls change are written to the param groups at the end.
        """
        groups, step = self.param_groups, _own_step(type(self))
        index_of = {param: index for index, group in enumerate(groups) for param in group["params"]}
        changed: dict[int, dict[str, Any]] = {}

        def step_some(params: Sequence[Any], stepped: Sequence[Any]) -> None:
            parts: dict[int, list[Any]] = {}
            for param, each in zip(params, stepped, strict=True):
                parts.setdefault(index_of[param], []).append(each)
            given = {
                index: {**groups[index], **self._keeper.options(groups[index]), "params": part}
                for index, part in parts.items()
            }
            before = {index: dict(group) for index, group in given.items()}
            self.param_groups = list(given.values())
            try:
                step(self, **options)
            finally:
                self.param_groups = groups
            for index, group in given.items():
                new = {name: value for name, value in group.items() if value is not before[index].get(name, group)}
                changed.setdefault(index, {}).update(new)

        yield step_some
        for index, values in changed.items():
            groups[index].update(values)

    @contextmanager
    def _losing_state(self) -> Iterator[None]:
        """Context that discards the state if it fails, because the state may be partly updated."""
        try:
            yield
        except BaseException as error:
            self._lost = f"{type(error).__name__}: {error}"
            self.state.clear()
            raise

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Context in which a load leaves state on the host. Torch would copy it to the device of its parameter."""
        if not self._keeper.loads_on_host:
            yield
            return
        groups = self.param_groups
        stand_ins = {param: torch.empty(0, dtype=param.dtype) for group in groups for param in group["params"]}
        params = {stand_in: param for param, stand_in in stand_ins.items()}
        self.param_groups = [{**group, "params": [stand_ins[each] for each in group["params"]]} for group in groups]
        try:
            yield
            self.state = defaultdict(dict, {params.get(key, key): value for key, value in self.state.items()})
            groups = [{**new, "params": old["params"]} for new, old in zip(self.param_groups, groups, strict=True)]
        finally:
            self.param_groups = groups

    def _refuse_lost(self) -> None:
        if self._lost:
            raise OffloadError(_LOST.format(self._lost))

    def _refuse_own_state(self) -> None:
        for key in self.state:
            if not isinstance(key, torch.Tensor):
                raise ShardConfigTypeError(
                    f"optimizer: {type(self).__name__} has state for {key!r}, which is not a parameter; state can "
                    "only be offloaded if the optimizer steps each parameter independently"
                )


def offload_optimizer(optimizer: AnyOptimizer, policy: OffloadPolicy | None = None) -> AnyOptimizer:
    """Offload the state of an optimizer to disk or to host memory, in place.

    Call it once, before the first step and before you create learning rate schedulers. The optimizer's class is
    replaced by a subclass. Param groups, hooks, schedulers, state dicts and checkpoints work as before. Each step is
    bitwise identical to a step in memory. With `HostOffloadPolicy` it is identical to a step on the CPU, and Adam and
    AdamW are fused unless `foreach` is True or `fused` is set. The optimizer must step each parameter independently.
    LBFGS does not.

    With `DiskOffloadPolicy`, a step reads, steps and writes the state of some parameters at a time, in the order in
    which they first got state.

    If a step fails, or a load cannot offload what it has loaded, the state is lost: the optimizer then raises on every
    use, and training must resume from a checkpoint.

    Args:
        optimizer: an optimizer of `model.parameters()`, created after sharding.
        policy: the policy for all parameters of the optimizer. None for the policy that each parameter got from
            `fully_shard(offload_policy=)`; the state of parameters without a policy is not offloaded. Pass a policy
            after a load with `assign=True`, which replaces the parameters.

    Returns:
        `optimizer`. It is unchanged if the policy has no effect: a policy that does not offload optimizer state, or
        `HostOffloadPolicy` for parameters that are not on an accelerator, or fake tensors outside of `estimate`.

    Raises:
        ShardConfigTypeError: `optimizer` is not an optimizer of torch, is LBFGS, or has state that cannot be offloaded.
        ShardConfigValueError: no parameter has a policy and none is given, or the parameters have different policies.
        ShardConfigStateError: the state is already offloaded, or a scheduler was created before.
        PoolBudgetError: the optimizer already has state, and `memory` is too small for the state of a parameter.
        OffloadError: the directory is not writable.
    """
    _check(optimizer, policy)
    params = _params_of(optimizer)
    chosen = policy if policy is not None else _policy_of(params)
    if _keeps_state_apart(chosen) and rehearsed() is not None:
        return take_over(optimizer, StateElsewhere(chosen), keeps_all=policy is not None)
    if not _keeps_state_apart(chosen) or not any(_applies(chosen, param) for param in params):
        return optimizer
    keeper: StateKeeper
    if isinstance(chosen, DiskOffloadPolicy):
        keeper = StateOnDisk(chosen, functools.partial(_name_of, optimizer.param_groups))
    else:
        # Of torch's fused steps, DTensor supports only those of Adam and AdamW.
        keeper = StateOnHost(bool(getattr(chosen, "pin_memory", True)), isinstance(optimizer, torch.optim.Adam))
    return take_over(optimizer, keeper, keeps_all=policy is not None)


def rehearsed_apart(optimizer: Optimizer) -> tuple[StateElsewhere, list[torch.Tensor]] | None:
    """The keeper of an optimizer's state in a rehearsal, and its parameters. None for other optimizers."""
    if not isinstance(optimizer, OffloadedOptimizer) or not isinstance(optimizer._keeper, StateElsewhere):
        return None
    return optimizer._keeper, optimizer.apart(list(optimizer.state))  # within a step, param groups contain only a part


def in_memory(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The parameters whose state is not on disk."""
    if not isinstance(optimizer, OffloadedOptimizer) or not isinstance(optimizer._keeper, StateOnDisk):
        return params
    on_disk = {id(param) for param in optimizer.apart(params)}
    return [param for param in params if id(param) not in on_disk]


def take_over(optimizer: AnyOptimizer, keeper: StateKeeper, keeps_all: bool) -> AnyOptimizer:
    """Move the state of an optimizer to a keeper: for all parameters, or for those with an offload policy."""
    cls = type(optimizer)
    if cls not in _classes:
        names = {"step": _hooked(OffloadedOptimizer.step)}
        _classes.setdefault(cls, type(f"Offloaded{cls.__name__}", (OffloadedOptimizer, cls), names))
    become: Any = OffloadedOptimizer._become
    become(optimizer, _classes[cls], keeper, keeps_all)
    return optimizer


_classes: dict[type, type] = {}


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `step` in the optimizer hooks, like torch does.

    Do this lazily. When it was done at import, it changed where Dynamo breaks the graphs of all optimizers' steps.
    """
    hooked = never_trace(Optimizer.profile_hook_step(step))
    vars(hooked).update(hooked=True)  # prevents torch from wrapping it again
    return hooked


def _own_step(cls: type) -> Callable[..., Any]:
    """The `step` of the optimizer's original class, without the hooks that torch adds."""
    step = cls.__mro__[2].step  # type: ignore[attr-defined]  # after the generated subclass and `OffloadedOptimizer`
    own: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return own


def _params_of(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _check(optimizer: Any, policy: Any) -> None:
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ShardConfigTypeError(
            f"optimizer: expected one of torch's optimizers that steps each parameter independently, got "
            f"{type(optimizer).__name__}; if it wraps another optimizer, pass that one"
        )
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise ShardConfigTypeError(f"policy: expected an OffloadPolicy, got {type(policy).__name__}")
    if isinstance(optimizer, OffloadedOptimizer):
        raise ShardConfigStateError("optimizer: its state is already offloaded; call offload_optimizer once")
    if "step" in optimizer.__dict__:
        raise ShardConfigStateError(
            "optimizer: its `step` has been replaced on the instance, for example by a learning rate scheduler; call "
            "offload_optimizer first, then create schedulers"
        )


def _policy_of(params: Iterable[torch.Tensor]) -> OffloadPolicy:
    asked = _asked_for()
    notes = [asked[id(param)] for param in params if id(param) in asked]
    if not notes:
        raise ShardConfigValueError(
            "optimizer: none of its parameters was sharded with a policy that offloads optimizer state; pass "
            "fully_shard(offload_policy=DiskOffloadPolicy(...)), or policy= to offload_optimizer"
        )
    first = notes[0]
    for note in notes:
        if note.policy != first.policy:
            raise ShardConfigValueError(
                f"optimizer: {first.name} was sharded with {first.policy}, but {note.name} with {note.policy}; create "
                "one optimizer per policy, or pass policy= to offload_optimizer"
            )
    return first.policy


def _name_of(groups: Sequence[Mapping[str, Any]], param: torch.Tensor) -> str:
    """Name a parameter of these param groups in messages: by its FQN when it was sharded, or by its index."""
    note = _asked_for().get(id(param))
    if note is not None:
        return note.name
    for number, group in enumerate(groups):
        for index, each in enumerate(group["params"]):
            if each is param:
                return f"parameter {index} of group {number}"
    return "a parameter"
