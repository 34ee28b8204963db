"""Match an optimizer with a checkpoint: its tensors are filled, and missing ones are created."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from .._memory.offload import OffloadedOptimizer
from .._torch.distributed import dtensor_at, local_tensor
from ..errors import CheckpointMismatchError
from ._format.manifest import SavedTensor
from ._format.values import decode
from ._full.tensors import is_meta, is_split
from ._state import PLAIN_BESIDE_SHARDED, Modules, OptimizerContent, is_plain_beside
from ._target import Target


def fit_optimizer(
    target: Target, path: str, optimizer: torch.optim.Optimizer, modules: Modules, saved: Mapping[str, Any]
) -> None:
    """Find what an optimizer reads from the checkpoint.

    Args:
        target: records the tensors to read, the problems, and the actions after the read.
        path: path of the optimizer in the state.
        optimizer: optimizer to load into. It need not have stepped.
        modules: modules of the state, whose parameters the optimizer updates.
        saved: entry of the optimizer in the checkpoint: groups, and state by the keys of parameters.
    """
    content = OptimizerContent.of(path, optimizer, modules)
    groups = decode(saved["groups"], content.groups, target.fetch_to_hand)
    if not _same_groups(target, path, optimizer, content.groups, groups):
        return
    stepped = {name: modules.parameters[name] for group in content.groups for name in group["params"]}
    if any(map(is_meta, stepped.values())):
        target.problems.append(
            f"{path}: has parameters on the meta device, which the load replaces; make the optimizer after the model "
            "is loaded, or call model.to_empty(device=...) before the optimizer is made"
        )
        return
    others = {name for group in groups for name in group["params"]} - stepped.keys()
    plain = set(saved.get("plain", ()))
    present = {**content.state, **_on_disk(optimizer, stepped, saved["state"])}
    state = {
        name: _decoded(target, name, values, present.get(name), stepped.get(name), plain)
        for name, values in saved["state"].items()
        if name not in others
    }
    groups = [{**each, "params": ours["params"]} for each, ours in zip(groups, content.groups, strict=True)]
    target.after(lambda: _finish(optimizer, groups, state))


def _on_disk(
    optimizer: torch.optim.Optimizer, stepped: Mapping[str, torch.Tensor], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Allocate state on disk for parameters without state, so that the loaded state need not fit in memory."""
    if not isinstance(optimizer, OffloadedOptimizer):
        return {}
    names = {id(stepped[name]): name for name in stepped if name in saved}
    blank = optimizer.blank_state([stepped[name] for name in names.values()])
    return {names[id(each)]: state for each, state in blank.items()}


def _same_groups(
    target: Target,
    path: str,
    optimizer: torch.optim.Optimizer,
    here: list[dict[str, Any]],
    saved: list[dict[str, Any]],
) -> bool:
    """Whether the number of groups is equal. Other differences are added to the target."""
    if len(saved) != len(here):
        target.problems.append(f"{path}: has {len(here)} parameter groups here, but {len(saved)} in the checkpoint")
        return False
    for index, (ours, other) in enumerate(zip(here, saved, strict=True)):
        where = f"{path}.param_groups.{index}"
        target.problems.extend(
            f"{where}.{name}: the checkpoint has no such option; it was saved by another type of optimizer"
            for name, default in optimizer.defaults.items()
            if name not in other and default is not None and not isinstance(default, bool)
        )
        target.differ(where, here=dict.fromkeys(ours["params"]), saved=dict.fromkeys(other["params"]))
    return True


def _decoded(target: Target, name: str, saved: Any, now: Any, parameter: torch.Tensor | None, plain: set[str]) -> Any:
    """The state that an optimizer stores by a parameter, or by a name if it belongs to no parameter."""
    if parameter is None:
        return decode(saved, now, target.fetch)
    values = decode(saved, now or {}, functools.partial(_fetch, target, parameter, plain))
    if not isinstance(values, dict):
        raise TypeError(f"the state of {name} is not a dictionary")
    return values


def _fetch(target: Target, parameter: torch.Tensor, plain: set[str], key: str, now: Any) -> Any:
    """The optimizer's existing tensor, or a new one that is sharded like its parameter."""
    if isinstance(now, torch.Tensor) and is_plain_beside(now, parameter) and is_split(parameter):
        raise CheckpointMismatchError(f"{key}: {PLAIN_BESIDE_SHARDED}")
    saved = target.saved(key)
    if now is None and saved is not None and saved.shape:
        is_plain = key in plain and not is_split(parameter)
        now = target.new(key, parameter) if is_plain else _like(parameter, saved)
    return target.fetch(key, now)


def _like(parameter: torch.Tensor, saved: SavedTensor) -> torch.Tensor | None:
    """A new tensor: sharded like its parameter if the shapes are equal, replicated otherwise."""
    if saved.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    if not isinstance(parameter, DTensor):
        return None
    replicated = [Replicate()] * parameter.device_mesh.ndim
    local = torch.empty(saved.shape, dtype=saved.dtype, device=local_tensor(parameter).device)
    return dtensor_at(local, parameter.device_mesh, replicated, local)


def _finish(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: dict[str, dict[str, Any]]) -> None:
    indices = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    numbered = [{**group, "params": [indices[name] for name in group["params"]]} for group in groups]
    content = {indices.get(name, name): values for name, values in state.items()}
    given = {key: dict(values) if isinstance(values, dict) else values for key, values in content.items()}
    optimizer.load_state_dict({"state": given, "param_groups": numbered})
    loaded = optimizer.state_dict()["state"]
    for index in set(indices.values()) & set(content):
        _keep_dtypes(loaded.get(index, {}), content[index])


def _keep_dtypes(loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore the saved dtypes. `Optimizer.load_state_dict` casts floating-point state to the parameter's dtype."""
    for entry, value in saved.items():
        now = loaded.get(entry)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
            loaded[entry] = value.to(now.device) if entry != "step" else now
