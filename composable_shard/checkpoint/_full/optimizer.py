"""Gather and load the full state of an optimizer, by the names of parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ..._faults.settings import put_sharded_state, sharded_state_of
from ..._torch.core import tree_tensors
from ..._torch.distributed import dtensor_at
from ...errors import CheckpointError, ShardConfigValueError
from .names import plain_name
from .ranks import ModelRanks
from .state import placed_like
from .tensors import Held, Holdings, is_split
from .transfer import Expected, Part, cut_of, gathered, sent

_NOT_HYPERPARAMETERS = ("params", "param_names")
_CPU = torch.device("cpu")
_State = Mapping[torch.Tensor, Mapping[str, Any]]  # of an optimizer, by parameter and name


def full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = True, cpu_offload: bool = True
) -> dict[str, Any]:
    """Gather the full state of an optimizer, by the names of the model's parameters.

    This is a collective: all ranks must call it.

    Args:
        model: the model.
        optimizer: optimizer of all or some parameters of the model.
        rank0_only: if True, only rank 0 gets the state, and the other ranks get an empty dict; see `full_state_dict`.
        cpu_offload: if True, the tensors are on the CPU. Otherwise they are on the compute device, and unsharded
            tensors stay on their device.

    Returns:
        ``{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, ...], "lr": ..., ...}]}``, the format of
        torch's `get_optimizer_state_dict` with ``full_state_dict=True``. Dtypes are those of the state. Parameters
        without state, for example before the first step, have no entry. A tied weight has its first name. Some
        optimizers also store state by a name instead of a parameter. A third entry "own_state" contains this state of
        this rank.

    Raises:
        CheckpointError: the optimizer has a parameter that the model does not have, state on the meta device, or
            DTensors in lists or dicts.
        ShardConfigValueError: the optimizer has a plain tensor of one or more dimensions for a parameter that is
            sharded over ranks.
    """
    sharded = sharded_state_of(optimizer)

    def check(held: Holdings) -> None:
        _check_state(sharded, _names(held, optimizer))

    held = Holdings.together(model, "gather the full state of an optimizer", check)
    names = _names(held, optimizer)
    device = torch.device("cpu") if cpu_offload else None
    parts = _parts(sharded, names)
    full = dict(gathered(parts, held.ranks, limit=held.limit, lead_only=rank0_only, device=device))
    own = _own_state(optimizer, device)  # raises on all ranks
    if rank0_only and not held.ranks.leads:
        return {}
    state = {name: _full_state(sharded[param], name, full, device) for param, name in names.items() if param in sharded}
    groups = [_saved_group(group, names) for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups} | ({"own_state": own} if own else {})


def _check_state(state: _State, names: Mapping[nn.Parameter, str]) -> None:
    """Check that state that is saved from one rank only is not a part of a sharded tensor."""
    for param, name in names.items():
        for key, value in state.get(param, {}).items():
            if not isinstance(value, DTensor):
                _check_unsharded(param, f"{key!r} of {name}", value)


def _parts(state: _State, names: Mapping[nn.Parameter, str]) -> list[Part]:
    """The tensors to gather, named by parameter name and state name."""
    values = ((name, key, value) for param, name in names.items() for key, value in state.get(param, {}).items())
    return [Part.of((name, key), value) for name, key, value in values if isinstance(value, DTensor)]


def _full_state(
    state: Mapping[str, Any], name: str, full: Mapping[Any, torch.Tensor], device: torch.device | None
) -> dict[str, Any]:
    """The full state of a parameter: gathered tensors, and copies of all other values."""
    return {
        key: full[name, key] if isinstance(value, DTensor) else _apart(value, device) for key, value in state.items()
    }


def _saved_group(group: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    return {"params": [names[param] for param in group["params"]], **_hyperparameters(group)}


def _own_state(optimizer: torch.optim.Optimizer, device: torch.device | None) -> dict[str, Any]:
    """A copy of the state that some optimizers store by a name instead of a parameter."""
    state: dict[Any, Any] = optimizer.state
    own = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
    for key, value in own.items():
        if not isinstance(key, str):
            raise CheckpointError(f"state of the optimizer: the key {key!r} is neither a parameter nor a name")
        if any(isinstance(tensor, DTensor) for tensor in tree_tensors(value)):
            raise CheckpointError(f"state {key!r} of the optimizer: has DTensors; store such state by parameter")
    return {key: _apart(value, device) for key, value in own.items()}


def _check_unsharded(param: nn.Parameter, what: str, value: Any) -> None:
    """Check that a value that is saved from one rank only is not a part of a sharded tensor."""
    held = tree_tensors(value)
    if any(isinstance(tensor, DTensor) for tensor in held):
        raise CheckpointError(f"{what}: has DTensors in a {type(value).__name__}; store them as separate values")
    if is_split(param) and any(tensor.ndim > 0 for tensor in held):
        raise ShardConfigValueError(
            f"{what}: is a plain tensor, but its parameter is sharded over ranks; make it a DTensor like its parameter"
        )


def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sd: Mapping[str, Any] | None,
    *,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load the full state of an optimizer, which need not have stepped.

    This is a collective: all ranks must call it.

    All ranks check everything first. If a check fails, the optimizer is unchanged on all ranks. State keeps its dtype;
    torch's `Optimizer.load_state_dict` would cast it to the parameter's dtype. Hyperparameters of the groups are
    restored. A saved group may be split into several groups, but no group may have parameters of several saved groups.
    Hooks of the optimizer's `load_state_dict` are not called.

    State that belongs to no parameter is replaced if `sd` has such state ("own_state"). Otherwise it is kept.

    Args:
        model: the model.
        optimizer: optimizer of the same parameters as the saved one.
        sd: result of `full_optimizer_state_dict` or torch's `get_optimizer_state_dict`. State of the parameter's shape
            is sharded like the parameter. Other state is placed like this optimizer's existing state, or replicated if
            there is none.
        broadcast_from_rank0: if True, only rank 0 needs `sd`. It sends each rank its pieces, in bounded memory.

    Raises:
        CheckpointError: the optimizer has a parameter that the model does not have.
        CheckpointMismatchError: the parameters differ from those in `sd`, or a group has parameters of several saved
            groups. Raised on all ranks.
    """
    held = Holdings.together(model, "load the full state of an optimizer", lambda held: _names(held, optimizer))
    names = _names(held, optimizer)
    given, offer = _offered(held, sd or {})
    if broadcast_from_rank0:
        offer = held.ranks.from_lead(offer)
    problems = _misfits(optimizer, names, offer)
    held.ranks.agree("load_full_optimizer_state_dict", problems, [*held.layout(), *names.values()])

    targets: dict[tuple[str, str], _Target] = {}
    fresh: dict[str, dict[str, Any]] = {name: dict.fromkeys(keys) for name, keys in offer.keys.items()}
    for param, name in names.items():
        before = _released(optimizer, param)
        for key in fresh.get(name, ()):
            if (name, key) in offer.tensors:
                targets[name, key] = _Target.of(held.params[name], *offer.tensors[name, key], before.get(key))
        del before
    for group in optimizer.param_groups:
        _restore(group, held, names, offer, fresh)
    state: dict[torch.Tensor, Any] = {param: fresh[name] for param, name in names.items() if name in fresh}
    _replace_own(optimizer, offer.own)
    for (name, key), value in _pieces(targets, held, given, broadcast_from_rank0):
        fresh[name][key] = targets[name, key].made(value, held.ranks)
    optimizer.state.update(state)
    put_sharded_state(optimizer, state)


def _released(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, Any]:
    """Remove the state of a parameter from the optimizer, so that it is freed before new tensors are made."""
    before: dict[str, Any] = optimizer.state.pop(param, {})
    return {} if hasattr(optimizer, "put_sharded_state") else before  # such state is not sharded like the parameter


def _replace_own(optimizer: torch.optim.Optimizer, own: Mapping[str, Any] | None) -> None:
    """Replace the optimizer's state that belongs to no parameter, unless `own` is None."""
    state: dict[Any, Any] = optimizer.state
    if own is None:
        return
    before = {key: state.pop(key) for key in [*state] if isinstance(key, str)}
    state.update({key: _as_before(value, before.get(key)) for key, value in own.items()})


def _restore(
    group: dict[str, Any],
    held: Holdings,
    names: Mapping[nn.Parameter, str],
    offer: _Offer,
    fresh: Mapping[str, dict[str, Any]],
) -> None:
    """Restore the hyperparameters of a group, and the state of its parameters except its larger tensors."""
    saved = offer.groups[offer.group_of[names[group["params"][0]]]] if group["params"] else {}
    group.update({key: _as_before(value, group.get(key)) for key, value in saved.items()})
    on_device = group.get("fused") or group.get("capturable")  # AdamW's `step` is then on the parameter's device
    for name in (names[param] for param in group["params"]):
        home = held.params[name].local.device if on_device else _CPU
        values = {key: offer.values[name, key] for key in fresh.get(name, ()) if (name, key) in offer.values}
        fresh.get(name, {}).update({key: _apart(value, home) for key, value in values.items()})


def _as_before(value: Any, before: Any) -> Any:
    """A copy of a value. A tensor, for example a learning rate, is copied to the device of the previous tensor."""
    if isinstance(before, torch.Tensor):
        return _apart(value, before.device)
    if type(value) is dict and isinstance(before, Mapping):
        return {key: _as_before(each, before.get(key)) for key, each in value.items()}
    return _apart(value, None)


def _names(held: Holdings, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """The name of each parameter of an optimizer, in its order."""
    known = {id(each.tensor): each.first for each in held.params.values()}
    names: dict[nn.Parameter, str] = {}
    for index, group in enumerate(optimizer.param_groups):
        for at, param in enumerate(group["params"]):
            if id(param) not in known:
                raise CheckpointError(
                    f"optimizer: parameter {at} of group {index}, {tuple(param.shape)}, is not in the model; make the "
                    "optimizer from model.parameters() after the model is sharded, and after loads with assign=True"
                )
            names[param] = known[id(param)]
    return names


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}


def _apart(value: Any, device: torch.device | None) -> Any:
    """A copy of a value. Tensors, also in dictionaries and lists, are copied to `device` if it is given."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    if type(value) is dict:
        return {key: _apart(each, device) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_apart(each, device) for each in value)
    return copy.deepcopy(value)


class _Offer(NamedTuple):
    """A saved state without the data of its larger tensors.

    Attributes:
        keys: names of the state of each parameter, in order.
        tensors: shapes and dtypes of tensors with one or more dimensions, by parameter and name.
        values: all other values: zero-dimensional tensors, and values that are not tensors.
        own: state that belongs to no parameter, by name. None if no such state was saved.
        groups: hyperparameters of each group.
        group_of: index of each parameter's group.
        problems: reasons why the state cannot be loaded.
    """

    keys: dict[str, list[str]]
    tensors: dict[tuple[str, str], tuple[torch.Size, torch.dtype]]
    values: dict[tuple[str, str], Any]
    own: dict[str, Any] | None
    groups: list[dict[str, Any]]
    group_of: dict[str, int]
    problems: list[str]


def _offered(held: Holdings, sd: Mapping[str, Any]) -> tuple[dict[tuple[str, str], torch.Tensor], _Offer]:
    """The tensors of a saved state by parameter and name, and a description of the state for the other ranks."""

    def first(fqn: str) -> str:
        name = plain_name(fqn)
        return held.params[name].first if name in held.params else name

    offer = _Offer({}, {}, {}, _apart(sd.get("own_state"), _CPU), [], {}, [])
    given: dict[tuple[str, str], torch.Tensor] = {}
    if not isinstance(offer.own, dict | None):
        offer.problems.append(f"own_state: is a {type(offer.own).__name__}; it must be a dictionary")
    if not {"state", "param_groups"} <= sd.keys():
        offer.problems.append("sd: has no 'state' and 'param_groups'; pass the result of full_optimizer_state_dict")
    for index, group in enumerate(sd.get("param_groups", ())):
        offer.groups.append(_hyperparameters(group))
        offer.group_of.update(dict.fromkeys(map(first, group["params"]), index))
    for fqn, state in sd.get("state", {}).items():
        name = first(fqn)
        offer.keys[name] = [*state]
        for key, value in state.items():
            if isinstance(value, DTensor):
                offer.problems.append(f"{key!r} of {fqn}: is a DTensor; pass full tensors (its full_tensor())")
            elif isinstance(value, torch.Tensor) and value.ndim > 0:
                given[name, key] = value.detach()
                offer.tensors[name, key] = value.shape, value.dtype
            else:
                offer.values[name, key] = _apart(value, _CPU)
    return given, offer


def _misfits(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], offer: _Offer) -> list[str]:
    """Reasons why a saved state does not match an optimizer."""
    problems = [*offer.problems]
    expected = {*names.values()}
    problems += [f"missing: {name}" for name in names.values() if name not in offer.group_of]
    problems += [f"unexpected: {name}" for name in {**offer.group_of, **offer.keys} if name not in expected]
    for index, group in enumerate(optimizer.param_groups):
        of = {offer.group_of[names[param]] for param in group["params"] if names[param] in offer.group_of}
        if len(of) > 1:
            problems.append(f"group {index} of the optimizer: has parameters of saved groups {sorted(of)}")
    return problems


class _Target(NamedTuple):
    """The placement of a tensor of optimizer state.

    Attributes:
        like: tensor with the same placement. None for a plain or replicated tensor.
        device: device of a plain or replicated tensor.
        mesh: mesh on which the tensor is replicated. None for a plain tensor.
        shape, dtype: shape and dtype of the full tensor.
    """

    like: Held | None
    device: torch.device
    mesh: DeviceMesh | None
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        param: Held,
        shape: torch.Size,
        dtype: torch.dtype,
        before: Any,
    ) -> _Target:
        """The placement of a parameter's state. `before` is the optimizer's previous state, if any."""
        tensor, home = param.tensor, param.local.device
        if isinstance(before, torch.Tensor) and not isinstance(before, DTensor):
            return cls(None, before.device, None, shape, dtype)
        if not isinstance(tensor, DTensor):
            return cls(None, home, None, shape, dtype)
        if shape == tensor.shape:
            return cls(param, home, None, shape, dtype)
        if isinstance(before, DTensor) and shape == before.shape:
            like = Held(param.name, "", before, param.first, cut_of(before), None, False)
            return cls(like, home, None, shape, dtype)
        return cls(None, home, tensor.device_mesh, shape, dtype)

    def made(self, piece: torch.Tensor, ranks: ModelRanks) -> torch.Tensor:
        """Make the tensor from this rank's piece."""
        if self.like is not None:
            return placed_like(self.like, piece, ranks)
        value = piece.to(self.device, copy=True)
        if self.mesh is None:
            return value
        return dtensor_at(value, self.mesh, [Replicate()] * self.mesh.ndim, value)


def _pieces(
    targets: Mapping[tuple[str, str], _Target],
    held: Holdings,
    given: Mapping[tuple[str, str], torch.Tensor],
    broadcast: bool,
) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Yield this rank's pieces of the tensors, or the full tensors if they are not sharded."""
    if not broadcast:
        for where, target in targets.items():
            yield where, given[where] if target.like is None else target.like.piece_of(given[where])
        return
    cuts = {where: None if target.like is None else target.like.cut for where, target in targets.items()}
    cuts = {where: cut if held.ranks.are_all_of(cut) else None for where, cut in cuts.items()}
    expected = [Expected(where, target.shape, target.dtype, cuts[where]) for where, target in targets.items()]
    for where, value in sent(expected, held.ranks, given.__getitem__, held.limit):
        like = targets[where].like
        yield where, value if like is None or cuts[where] is not None else like.piece_of(value)
