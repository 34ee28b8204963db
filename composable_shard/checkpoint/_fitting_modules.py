"""Match a module with a checkpoint: its tensors are filled, and tensors on the meta device are replaced."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._module.state import states_below
from .._torch.distributed import dtensor_like
from ..errors import CheckpointError
from ._format.values import decode
from ._full.entries import are_alike
from ._full.metadata import metadata_for, with_metadata
from ._full.names import load_key, plain_name
from ._full.tensors import Held, Holdings, is_meta
from ._state import ModuleContent
from ._target import Target


def fit_module(target: Target, path: str, module: nn.Module, content: ModuleContent, saved: Mapping[str, Any]) -> None:
    """Find what a module reads from the checkpoint.

    Args:
        target: records the tensors to read, the problems, and the actions after the read.
        path: path of the module in the state.
        module: module to load into, without wrappers.
        content: content of its state dict.
        saved: entry of the module in the checkpoint: names of tensors, and values that are not tensors.
    """
    values, names = content.values, dict.fromkeys((*saved["tensors"], *saved["extra"]))
    target.differ(path, here=values, saved=names)
    made = _made_for(target, path, module, content, set(saved["tensors"]))
    for name, tensor in made.items():
        target.want(f"{path}.{name}", tensor)
    fetch = target.fetch_to_hand
    extra = {name: decode(each, values[name], fetch) for name, each in saved["extra"].items() if name in values}
    tied = content.tied
    replaced = {name for name in made if made[tied.get(name, name)] is not values[tied.get(name, name)]}
    if extra and content.own and not replaced:
        now = {name: values[name] for name in extra}
        target.load_by(path, functools.partial(_load_extra, module, content), lambda: extra, now)
    target.after(lambda: _finish(module, made, extra, content, replaced))


def _made_for(
    target: Target, path: str, module: nn.Module, content: ModuleContent, names: set[str]
) -> dict[str, torch.Tensor]:
    """The tensors to fill: the module's tensors, or new ones for those on the meta device. Tied names share one."""
    tensors = {name: each for name, each in content.values.items() if name in names and isinstance(each, torch.Tensor)}
    held = Holdings(module) if any(map(is_meta, tensors.values())) else None
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        first = content.tied.get(name)
        if first in made:
            if target.key(f"{path}.{first}") != target.key(f"{path}.{name}"):
                target.problems.append(
                    f"{path}.{name}: is tied to {path}.{first} in this model, but not in the checkpoint"
                )
            made[name] = made[first]
        else:
            made[name] = _materialised(held, name) if held is not None and is_meta(tensor) else tensor
    return made


def _materialised(held: Holdings, name: str) -> torch.Tensor:
    """A new tensor to load into instead of one on the meta device. It is pinned if it is offloaded to pinned memory."""
    each: Held = held.tensors[name]
    home = each.home(held.ranks)
    pins = each.owner is not None and each.owner.info.pins and home.type == "cpu"
    local = torch.empty_like(each.local, device=home, requires_grad=False, pin_memory=pins)
    return dtensor_like(each.tensor, local) if isinstance(each.tensor, DTensor) else local


def _finish(
    module: nn.Module,
    tensors: dict[str, torch.Tensor],
    extra: dict[str, Any],
    content: ModuleContent,
    replaced: set[str],
) -> None:
    """Finish the load of a module after all its tensors are filled.

    Marks the parameters as changed, and passes tensors that are not the module's own to `load_state_dict`.
    """
    if replaced:
        tensors = _as_parameters(content, tensors, replaced)
    for state in states_below(module):
        state.before_load()
    if replaced or not content.own:
        module.load_state_dict(_spelled(module, content, {**tensors, **extra}), strict=False, assign=bool(replaced))
    if not content.own:
        _check_taken(module, content, tensors)


def _check_taken(module: nn.Module, content: ModuleContent, tensors: dict[str, torch.Tensor]) -> None:
    """Check that a module has loaded the tensors that a hook, and not the module itself, adds to its state dict.

    Raises:
        CheckpointError: the state dict now has other values.
    """
    now = ModuleContent.of(module)
    beside = [name for name, each in content.entries.items() if each.source is None and name in tensors]
    lost = [name for name in beside if name in now.values and not are_alike(now.values[name], tensors[name])]
    if lost:
        raise CheckpointError(
            f"{', '.join(lost[:20])}: the module did not load these values, but its weights are loaded. If a hook of "
            "state_dict() makes these values, add a hook that loads them (register_load_state_dict_pre_hook). If they "
            "belong to weights that were quantized from other weights, quantize the same weights before the load, or "
            "load only the adapters"
        )


def _load_extra(module: nn.Module, content: ModuleContent, extra: dict[str, Any]) -> None:
    own = content.values if content.renamed else {}  # hooks that undo a renaming may expect all renamed keys
    module.load_state_dict(_spelled(module, content, {**own, **extra}), strict=False)


def _as_parameters(
    content: ModuleContent, tensors: dict[str, torch.Tensor], replaced: set[str]
) -> dict[str, torch.Tensor]:
    """The tensors to assign: existing parameters unchanged, and one new parameter for each new tensor.

    Each is assigned to all its names in the module, including names that are not in the state dict.
    """
    assigned, new = dict(tensors), dict[int, nn.Parameter]()
    for name, tensor in tensors.items():
        source = content.entries[name].source
        if source is None or not source.is_param:
            continue
        param = source.tensor
        if name in replaced:
            param = new.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=param.requires_grad))
        hidden = [each for each in source.names if each not in content.values]
        assigned.update(dict.fromkeys((name, *hidden), param))
    return assigned


def _spelled(module: nn.Module, content: ModuleContent, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the keys that `load_state_dict` expects. Values that share memory with other parameters are copied.

    The metadata is the module's own. Tensors that are filled in place are not converted from an older version of the
    module, so the other tensors must not be converted either.
    """
    own = {plain_name(name): load_key(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    keys = {**own, **content.keys}
    aliases = {name for name, each in content.entries.items() if each.aliases}
    named = ((name, value) for name, value in values.items() if name in keys)
    spelled = {keys[name]: value.clone() if name in aliases else value for name, value in named}
    return with_metadata(spelled, metadata_for(module, content.metadata))
