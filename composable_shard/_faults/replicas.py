"""Checks that unsharded values which must be equal on all ranks are equal, and can make them equal."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from .._comm.mesh import compute_device, default_device_type
from .._comm.own_groups import own_group
from .._plan.text import first_names
from .._torch import debug
from .._torch.core import without_dispatch_modes
from .._torch.distributed import local_part, local_tensor
from .._torch.fingerprint import fingerprints
from ..errors import RankMismatchError, ShardConfigValueError
from .settings import put_sharded_state, sharded_state_of

PERIOD = "COMPOSABLE_SHARD_CHECK_REPLICAS"
_PERIOD_IN_DEBUG = 10
_NAMED = 5  # how many differences an error names


@dataclass(frozen=True)
class _Value:
    """A value that must be equal on ranks.

    Attributes:
        name: a description.
        held: a tensor, or plain data.
        groups: the process groups whose ranks must have the same value.
    """

    name: str
    held: Any
    groups: tuple[dist.ProcessGroup, ...]


class Rolling:
    """The rolling check: compares the fingerprint of one value at a time, every few training forwards.

    The values are those of `check_replicas`, except batch normalization statistics, which differ between ranks.

    Args:
        model: the root.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._period = _period()
        self._forwards = self._next = 0

    def due(self) -> tuple[str, tuple[dist.ProcessGroup, ...]] | None:
        """At the start of a training forward: a description of this rank's value, and the process groups to compare in.

        None if no check is due.
        """
        self._forwards += 1
        period = self._period or (_PERIOD_IN_DEBUG if debug.debugging else 0)
        model = self._model()
        if not period or self._forwards % period or model is None:
            return None
        statistics = _statistics(model)
        values = [value for value in _values(model, None, {}) if id(value.held) not in statistics]
        if not values:
            return None
        self._next += 1
        value = values[self._next % len(values)]
        with torch.no_grad(), without_dispatch_modes():
            return f"{value.name} of fingerprint {_fingerprint(value.held)}", value.groups


def _statistics(model: nn.Module) -> set[int]:
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}


def _period() -> int:
    given = os.environ.get(PERIOD, "").strip() or "0"
    if not given.isdecimal():
        raise ShardConfigValueError(
            f"{PERIOD}={given}: expected the number of training forwards between two comparisons of values that must "
            "be equal on all ranks, or 0 for no comparisons"
        )
    return int(given)


def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Check that ranks agree bit for bit on all values that must be equal. Collective: call it on all ranks.

    Compared values:

    - parameters and buffers that are not sharded
    - the shards of parameters, over the replicas of a 2D mesh or of tensor parallelism
    - an optimizer's settings (for example learning rates), its step counts, and its state over replicas

    The states of random generators are not compared, because dropout needs different states on different ranks.

    Before `fully_shard`, this is the whole model, so the check shows whether all ranks initialized it in the same way.
    This cannot be checked later. Each tensor is reduced to a fingerprint of 8 bytes, and only one combined fingerprint
    is sent. If these differ, the fingerprints of all tensors are compared.

    Args:
        model: a model, sharded or not.
        optimizer: the optimizer of its parameters.

    Raises:
        RankMismatchError: values differ. Raised on all ranks, with the names of the first differing values.
            `broadcast_state` makes them equal.
    """
    difference = ""
    state = {} if optimizer is None else sharded_state_of(optimizer)
    values = [*_values(model, optimizer, state)]
    axes = _axes(model)
    for group in dict.fromkeys([*axes, *[group for value in values for group in value.groups]]):
        here = _difference(group, [value for value in values if group in value.groups])  # a collective: never skipped
        difference = difference or here
    for group in axes:  # ranks of other groups also raise the error
        difference = next(filter(None, _of_ranks(group, difference)), "")
    if difference:
        raise RankMismatchError(difference)


def broadcast_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Make the values that `check_replicas` compares equal: copy them from the first rank of each process group.

    Collective: call it on all ranks. Random generators are not changed. Called before `fully_shard` on a model that
    ranks have initialized differently, it copies the model of rank 0 to all ranks.

    Args:
        model: a model, sharded or not.
        optimizer: the optimizer of its parameters. Its settings and state are copied, too. It must have the same param
            groups on all ranks.
    """
    with torch.no_grad(), without_dispatch_modes():
        state = {} if optimizer is None else sharded_state_of(optimizer)
        for value in _values(model, optimizer, state):
            for group in value.groups:
                if isinstance(value.held, torch.Tensor):
                    _send(value.held, group)
    if optimizer is not None:
        put_sharded_state(optimizer, state)
        _send_settings(optimizer, _axes(model))
    for reshard in filter(None, [getattr(module, "reshard", None) for module in model.modules()]):
        reshard()  # unsharded parameters from before are outdated


def _send_settings(optimizer: torch.optim.Optimizer, axes: tuple[dist.ProcessGroup, ...]) -> None:
    for group in axes:
        settings: list[Any] = [[_settings(each) for each in optimizer.param_groups]]
        dist.broadcast_object_list(settings, group=own_group(group, _device(group)), group_src=0)
        for own, sent in zip(optimizer.param_groups, settings[0], strict=True):
            own.update(sent)


def _send(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    device = _device(group)
    sent = tensor.detach().to(device).contiguous().clone()
    dist.broadcast(sent.view(-1).view(torch.uint8), group=own_group(group, device), group_src=0)
    tensor.copy_(sent)


def _axes(model: nn.Module) -> tuple[dist.ProcessGroup, ...]:
    """The process groups of the axes of the model's meshes; that of all ranks if the model is not sharded."""
    meshes = {param.device_mesh: None for param in model.parameters() if isinstance(param, DTensor)}
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    if not meshes and dist.is_initialized() and dist.group.WORLD is not None:
        groups = [dist.group.WORLD]
    return tuple(dict.fromkeys(group for group in groups if group.size() > 1))


def _values(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[torch.Tensor, Any]
) -> Iterator[_Value]:
    axes = _axes(model)
    names: dict[int, str] = {}
    for name, param in model.named_parameters():
        names[id(param)] = name
        yield from _tensor(f"parameter {name}", param, axes)
    for name, buffer in model.named_buffers():
        yield from _tensor(f"buffer {name}", buffer, axes)
    if optimizer is None:
        return
    for index, group in enumerate(optimizer.param_groups):
        for name, setting in _settings(group).items():
            yield _Value(f"{name} of the optimizer's param group {index}", setting, axes)
        for param in group["params"]:
            for name, held in sorted(state.get(param, {}).items()):
                yield from _tensor(f"{name} of the optimizer for {names.get(id(param), 'a parameter')}", held, axes)


def _tensor(name: str, held: Any, axes: tuple[dist.ProcessGroup, ...]) -> Iterator[_Value]:
    """A value and the process groups in which it must be equal; nothing if it is sharded over all ranks."""
    if not isinstance(held, DTensor):
        yield _Value(name, held, axes)
        return
    replicated = [index for index, placement in enumerate(held.placements) if isinstance(placement, Replicate)]
    groups = [held.device_mesh.get_group(index) for index in replicated if held.device_mesh.size(index) > 1]
    if groups:
        yield _Value(name, local_tensor(held), tuple(groups))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer's param group that are plain numbers, flags and strings."""
    plain = (bool, int, float, str, tuple, list, type(None))
    plain_ones = {name: value for name, value in group.items() if name != "params" and isinstance(value, plain)}
    tensors = {name: value.item() for name, value in group.items() if isinstance(value, torch.Tensor)}
    return plain_ones | tensors


def _difference(group: dist.ProcessGroup, values: list[_Value]) -> str:
    """A text about the values that differ between ranks of a process group; empty if all are equal."""
    prints = [(value.name, _fingerprint(value.held)) for value in values]
    digest = hashlib.sha256(repr(prints).encode()).hexdigest()
    if len({*_of_ranks(group, digest)}) == 1:
        return ""
    ranks = dist.get_process_group_ranks(group)
    all_prints = _of_ranks(group, prints)
    other = next(rank for rank, each in enumerate(all_prints) if each != all_prints[0])
    one, two = dict(all_prints[0]), dict(all_prints[other])
    differing = [name for name in dict.fromkeys([*one, *two]) if one.get(name) != two.get(name)]
    shown = first_names([_shown(name, one, two) for name in differing], _NAMED)
    return (
        f"ranks {ranks[0]} and {ranks[other]} differ in: {shown}. Seed and load all ranks in the same way, or call "
        "broadcast_state(model) to copy the first rank's values to all of them"
    )


def _shown(name: str, one: dict[str, Any], two: dict[str, Any]) -> str:
    values = [prints.get(name, "missing") for prints in (one, two)]
    if any(isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 32 for value in values):
        return name  # fingerprints mean nothing to users
    return f"{name} ({values[0]} and {values[1]})"


def _of_ranks(group: dist.ProcessGroup, own: Any) -> list[Any]:
    values: list[Any] = [None] * group.size()
    with without_dispatch_modes():
        dist.all_gather_object(values, own, group=own_group(group, _device(group)))
    return values


def _device(group: dist.ProcessGroup) -> torch.device:
    device = compute_device(default_device_type())
    try:
        group._get_backend(device)
    except (RuntimeError, NotImplementedError):
        return torch.device("cpu")
    return device


def _fingerprint(held: Any) -> Any:
    """A number that practically identifies the content of a tensor; other data is returned as it is."""
    if not isinstance(held, torch.Tensor):
        return held
    held = local_part(held)
    if held.numel() == 1 and not held.dtype.is_complex:
        value = held.item()
        return value if value == value else "nan"
    return int.from_bytes(fingerprints([held])[0])
