"""Optimizers whose state is elsewhere than their parameters: in files, or in the memory of the host.

`offload_optimizer` gives an optimizer a subclass of its own class, in place. What it steps at a time is put before the
`step` of its class as if there were no other parameters; so any optimizer works that treats parameters one by one.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .._errors import OffloadError, ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from .._policies import DiskOffloadPolicy, HostOffloadPolicy, OffloadPolicy, keeps_shards_on_host
from .._torch.core import HANDLES, between_graphs, has_memory, never_trace
from .elsewhere import StateElsewhere, rehearsed
from .state_on_disk import StateOnDisk, Step, local_part
from .state_on_host import StateOnHost

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
_LOST = (
    "the optimizer's state was lost when a step or a load failed ({}); make model and optimizer anew, and load a "
    "checkpoint"
)


class Sharded(Protocol):
    """A parameter of a group.

    Attributes:
        fqn: its name.
        sharded: the parameter as optimizers have it; conversions and loads may put another one there.
    """

    fqn: str
    sharded: nn.Parameter


class _Asked(NamedTuple):
    """What was asked for a parameter, and its name."""

    policy: OffloadPolicy
    name: str


_asked: dict[int, tuple[weakref.ref[Sharded], OffloadPolicy]] = {}  # by id of a parameter of a group, while it lives


def _asked_for() -> dict[int, _Asked]:
    """By the id of each parameter as it is now, what was asked for it."""
    living = [(ref(), policy) for ref, policy in list(_asked.values())]
    return {id(each.sharded): _Asked(policy, each.fqn) for each, policy in living if each is not None}


class _Keeper(Protocol):
    """Who keeps an optimizer's state, and brings it to where it is stepped."""

    loads_on_host: bool

    def step(self, states: Any, params: Sequence[torch.Tensor], step: Step) -> None: ...
    def keep_all(self, states: Any, params: Sequence[torch.Tensor]) -> None: ...
    def options(self, group: Mapping[str, Any]) -> dict[str, Any]: ...


def note_policy(params: Iterable[Sharded], policy: OffloadPolicy) -> None:
    """Note of the parameters of a group that their optimizer's state is to be kept as a policy says."""
    params = list(params)
    rehearsal = rehearsed()
    if rehearsal is not None and keeps_shards_on_host(policy):
        rehearsal.note(params)
    if _keeps_state_apart(policy):
        for each in params:
            key = id(each)
            _asked[key] = weakref.ref(each, lambda _, key=key: _asked.pop(key, None)), policy  # type: ignore[misc]
        _Watch.begin()


def _keeps_state_apart(policy: OffloadPolicy) -> bool:
    """Whether state of the optimizer lies elsewhere than its parameters."""
    return isinstance(policy, DiskOffloadPolicy) or (
        isinstance(policy, HostOffloadPolicy) and policy.optimizer and not policy.parameters
    )


class _Watch:
    """Notices optimizers that step parameters with such a policy and were not given to `offload_optimizer`."""

    begun = False

    @classmethod
    def begin(cls) -> None:
        """Begin with it; programs without such policies pay nothing."""
        if not cls.begun:
            cls.begun = True
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
                f"optimizer: {note.name} was sharded with {type(note.policy).__name__}, and this "
                f"{type(optimizer).__name__} keeps its state in memory; call cs.offload_optimizer(optimizer) before "
                "the first step"
            )


def _applies(policy: OffloadPolicy, param: torch.Tensor) -> bool:
    """Whether a policy changes anything for a parameter where it is; fake tensors are nowhere."""
    local = local_part(param)
    return has_memory(local) and (isinstance(policy, DiskOffloadPolicy) or local.device.type not in ("cpu", "meta"))


class OffloadedOptimizer(Optimizer):
    """What the class of an optimizer becomes a subclass of: its state is elsewhere, and comes when it is stepped."""

    _keeper: _Keeper
    _keeps_all: bool
    _lost = ""

    def _become(self, cls: type, keeper: _Keeper, keeps_all: bool) -> None:
        """Make this of an optimizer.

        Args:
            cls: a subclass of its own class and of this one.
            keeper: of its state.
            keeps_all: whether of all parameters, and not only of those whose groups have asked for it.
        """
        self._keeper, self._keeps_all = keeper, keeps_all
        with torch.no_grad():
            keeper.keep_all(self.state, OffloadedOptimizer.apart(self, _params_of(self)))
        self.__class__ = cls

    def apart(self, params: Sequence[Any]) -> list[Any]:
        """Those parameters whose state is kept elsewhere."""
        asked = {} if self._keeps_all else _asked_for()
        return [param for param in params if self._keeps_all or id(param) in asked]

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step as the optimizer's own class does, some parameters at a time.

        Raises:
            OffloadError: state could not be read or written, or was lost so in an earlier step.
            PoolBudgetError: the memory for state on disk is too small for a parameter.
        """
        self._refuse_lost()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        between_graphs(self._step_now)(options)  # files and threads are not for a graph
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
        """Load a state as the optimizer's own class does, and keep it where this optimizer keeps state.

        Raises:
            OffloadError: it could not be written, or state was lost in an earlier step.
        """
        self._refuse_lost()
        with self._loading():
            super().load_state_dict(state_dict)
        with torch.no_grad(), self._losing_state():
            self._keeper.keep_all(self.state, self.apart(_params_of(self)))

    def state_dict(self) -> dict[str, Any]:
        """The state, in tensors that are mapped from the files where it is on disk, as after the last step.

        Raises:
            OffloadError: state was lost in an earlier step.
        """
        self._refuse_lost()
        return super().state_dict()

    def blank_state(self, params: Iterable[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
        """State for parameters that have none, for a load to fill: tensors on disk, none of which is in memory.

        It is not that of the optimizer before `load_state_dict` is given it. Other optimizers have none.
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
            "optimizer: its state is offloaded, so it cannot be copied; make another one and give it the state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardConfigTypeError(
            "optimizer: its state is offloaded, so it cannot be pickled; save it with checkpoint.save"
        )

    def _state_of_twin(self, param: torch.Tensor) -> dict[str, Any]:
        """The state of a parameter of zeros like `param` after a step with gradients of zeros."""
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
        """Gives what steps some parameters. Each time, param groups are as they were; what steps change stays."""
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
        """What fails in this context leaves a state of which nobody knows what it is: nobody is to take it for good."""
        try:
            yield
        except BaseException as error:
            self._lost = f"{type(error).__name__}: {error}"
            self.state.clear()
            raise

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """In this context, a load leaves state on the host, where torch would copy it to its parameter's device."""
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
                    f"optimizer: {type(self).__name__} keeps state under {key!r}, which is no parameter; it does not "
                    "treat parameters one by one, so its state cannot be offloaded"
                )


def offload_optimizer(optimizer: AnyOptimizer, policy: OffloadPolicy | None = None) -> AnyOptimizer:
    """Keep the state of an optimizer on disk, or on the host, as a policy says; in place.

    Call it once, before the first step and before learning rate schedulers are made. Its class becomes a subclass of
    its own; param groups, hooks, schedulers, state dicts and checkpoints work as before, and each step gives the same
    bits as in memory (on the host, those of the CPU; Adam and AdamW are fused unless `foreach` or `fused` is set).
    Any optimizer works that treats parameters one by one, as all of torch's but LBFGS do.

    The step of a `DiskOffloadPolicy` reads, steps and writes the state of some parameters at a time, in the order of
    the optimizer's parameters, which is that of the model. A step or a load that fails loses the state: from then on
    the optimizer refuses to step, and training goes on from a checkpoint.

    Args:
        optimizer: of `model.parameters()`, after sharding.
        policy: None: that of the parameters, as `fully_shard(offload_policy=)` was given it; parameters without one
            keep their state where they are. Otherwise it is for all parameters of the optimizer, as after a load with
            `assign=True`, which has put others in their place.

    Returns:
        `optimizer`; as it was where the policy changes nothing, as `HostOffloadPolicy` without an accelerator, or
        for fake tensors outside of `estimate`.

    Raises:
        ShardConfigTypeError: `optimizer` is no optimizer of torch's, or LBFGS, or holds state that cannot be offloaded.
        ShardConfigValueError: no parameter has a policy and none is given, or they have several.
        ShardConfigStateError: the state is offloaded already, or a scheduler was made before.
        PoolBudgetError: the optimizer has state already, and the memory is too small for that of a parameter.
        OffloadError: the directory cannot be written in.
    """
    _check(optimizer, policy)
    params = _params_of(optimizer)
    chosen = policy if policy is not None else _policy_of(params)
    if _keeps_state_apart(chosen) and rehearsed() is not None:
        return take_over(optimizer, StateElsewhere(chosen), keeps_all=policy is not None)
    if not _keeps_state_apart(chosen) or not any(_applies(chosen, param) for param in params):
        return optimizer
    keeper: _Keeper
    if isinstance(chosen, DiskOffloadPolicy):
        keeper = StateOnDisk(chosen, _Names(optimizer))
    else:
        # DTensors know no other fused step of torch's.
        keeper = StateOnHost(bool(getattr(chosen, "pin_memory", True)), isinstance(optimizer, torch.optim.Adam))
    return take_over(optimizer, keeper, keeps_all=policy is not None)


def rehearsed_apart(optimizer: Optimizer) -> tuple[StateElsewhere, list[torch.Tensor]] | None:
    """Who would keep the state of an optimizer in a rehearsal, and of which parameters; None of other optimizers."""
    if not isinstance(optimizer, OffloadedOptimizer) or not isinstance(optimizer._keeper, StateElsewhere):
        return None
    return optimizer._keeper, optimizer.apart(list(optimizer.state))  # within a step, param groups have a part


def in_memory(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Those parameters whose state is not on disk."""
    if not isinstance(optimizer, OffloadedOptimizer) or not isinstance(optimizer._keeper, StateOnDisk):
        return params
    on_disk = {id(param) for param in optimizer.apart(params)}
    return [param for param in params if id(param) not in on_disk]


def take_over(optimizer: AnyOptimizer, keeper: _Keeper, keeps_all: bool) -> AnyOptimizer:
    """Let a keeper have the state of an optimizer: of all parameters, or of those whose groups have asked for it."""
    cls = type(optimizer)
    if cls not in _classes:
        names = {"step": _hooked(OffloadedOptimizer.step)}
        _classes.setdefault(cls, type(f"Offloaded{cls.__name__}", (OffloadedOptimizer, cls), names))
    become: Any = OffloadedOptimizer._become
    become(optimizer, _classes[cls], keeper, keeps_all)
    return optimizer


_classes: dict[type, type] = {}


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A `step` with the hooks of optimizers around it, as torch puts them there.

    Only when it is needed: once done at import, it changed where Dynamo breaks the graphs of all optimizers' steps.
    """
    hooked = never_trace(Optimizer.profile_hook_step(step))
    vars(hooked).update(hooked=True)  # torch shall not do it again
    return hooked


def _own_step(cls: type) -> Callable[..., Any]:
    """The `step` of the class that an optimizer had, without the hooks that torch puts around it."""
    step = cls.__mro__[2].step  # type: ignore[attr-defined]  # behind the class that was made for it, and ours
    own: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return own


def _params_of(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _check(optimizer: Any, policy: Any) -> None:
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ShardConfigTypeError(
            f"optimizer: expected one of torch's optimizers that treats parameters one by one, got "
            f"{type(optimizer).__name__}; if it is around another one, give that"
        )
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise ShardConfigTypeError(f"policy: expected an OffloadPolicy, got {type(policy).__name__}")
    if isinstance(optimizer, OffloadedOptimizer):
        raise ShardConfigStateError("optimizer: its state is offloaded already; call offload_optimizer once")
    if "step" in optimizer.__dict__:
        raise ShardConfigStateError(
            "optimizer: it has a `step` of its own, as a learning rate scheduler puts there when it is made; call "
            "offload_optimizer first, and make schedulers after it"
        )


def _policy_of(params: Iterable[torch.Tensor]) -> OffloadPolicy:
    asked = _asked_for()
    notes = [asked[id(param)] for param in params if id(param) in asked]
    if not notes:
        raise ShardConfigValueError(
            "optimizer: none of its parameters was sharded with a policy that keeps the optimizer's state elsewhere; "
            "give fully_shard(offload_policy=DiskOffloadPolicy(...)), or policy= here"
        )
    first = notes[0]
    for note in notes:
        if note.policy != first.policy:
            raise ShardConfigValueError(
                f"optimizer: {first.name} was sharded with {first.policy}, and {note.name} with {note.policy}; make an "
                "optimizer for each, or give policy= here for all"
            )
    return first.policy


class _Names:
    """Names the parameters of an optimizer in messages: as they were sharded, or by their index."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups

    def __call__(self, param: torch.Tensor) -> str:
        note = _asked_for().get(id(param))
        if note is not None:
            return note.name
        for number, group in enumerate(self._groups):
            for index, each in enumerate(group["params"]):
                if each is param:
                    return f"parameter {index} of group {number}"
        return "a parameter"
