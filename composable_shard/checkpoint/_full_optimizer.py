"""The state of an optimizer by the names of parameters, in full tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from .._errors import CheckpointError
from .._torch.core import tree_tensors
from ._tensors import Held, Holdings
from ._transfer import Expected, Part, cut_of, gathered, sent

_NAMES = ("params", "param_names")  # keys of a group that are no hyperparameters


def full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = True, cpu_offload: bool = True
) -> dict[str, Any]:
    """Gather the full state of an optimizer, by the names of the model's parameters. A collective, as `full_state_dict`.

    Args:
        model: the model.
        optimizer: of parameters of the model, all or some.
        rank0_only: whether rank 0 alone gets the state, and the others an empty dict; see `full_state_dict`.
        cpu_offload: whether the tensors are on the CPU; else they are on the device on which the ranks compute, except
            tensors that the optimizer itself keeps on the CPU (as AdamW its steps).

    Returns:
        ``{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, ...], "lr": ..., ...}]}``, the format of
        torch's `get_optimizer_state_dict` with ``full_state_dict=True``. Dtypes are those of the state. A parameter
        without state, and an optimizer that has not stepped, have none here. A tied weight has its first name.

    Raises:
        CheckpointError: the optimizer has a parameter that the model lacks, or state on the meta device, or DTensors
            in lists or dicts.
    """
    held = Holdings(model)
    device = torch.device("cpu") if cpu_offload else None
    names = _names(held, optimizer)
    parts, others = [], {}
    for param, name in names.items():
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.device.type != "cpu"):
                parts.append(Part.of((name, key), value))
            else:
                others[name, key] = _apart(value, f"state {key!r} of {name}")
    full = dict(gathered(parts, held.ranks, limit=held.limit, lead_only=rank0_only, device=device))
    if rank0_only and not held.ranks.leads:
        return {}
    state: dict[str, dict[str, Any]] = {}
    for param, name in names.items():
        if param in optimizer.state:
            state[name] = {
                key: full[name, key] if (name, key) in full else others[name, key] for key in optimizer.state[param]
            }
    groups = [_hyperparameters(group) | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sd: Mapping[str, Any] | None,
    *,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load the full state of an optimizer, which may never have stepped. A collective: all ranks must call it.

    All is checked first, on all ranks: if it fails, the optimizer is as it was on each of them. State keeps its dtypes
    to the bit, where torch's `Optimizer.load_state_dict` casts it to that of the parameter. Hyperparameters of the
    groups are restored. Groups may be cut otherwise than those that were saved, as long as each has parameters of one
    saved group. Hooks of the optimizer's `load_state_dict` are not called.

    Args:
        model: the model.
        optimizer: of the same parameters as the one that was saved.
        sd: what `full_optimizer_state_dict` or torch's `get_optimizer_state_dict` gave. State of a parameter's shape is
            sharded as the parameter is; other state is replicated, placed as this optimizer has it already, if it has.
        broadcast_from_rank0: whether only rank 0 has `sd`, and sends each rank its pieces, in bounded memory.

    Raises:
        CheckpointError: the optimizer has a parameter that the model lacks.
        CheckpointMismatchError: on all ranks; the parameters are not those of `sd`, or a group has some of several.
    """
    held = Holdings(model)
    names = _names(held, optimizer)
    offer = _Offer.of(sd or {}, held)
    if broadcast_from_rank0:
        offer = held.ranks.from_lead(offer)
    params = dict.fromkeys(names.values())
    problems = [*offer.problems, *_misfits(optimizer, names, offer)]
    held.ranks.agree("load_full_optimizer_state_dict", problems, [*held.layout(), *params])

    given = {} if sd is None else {(held.first(fqn), key): v for fqn, s in sd["state"].items() for key, v in s.items()}
    for group in optimizer.param_groups:
        saved = offer.groups[offer.group_of[names[group["params"][0]]]] if group["params"] else {}
        group.update({key: _like(copy.deepcopy(value), group.get(key)) for key, value in saved.items()})
    loaded = _received(held, optimizer, names, offer, given, broadcast_from_rank0)
    by_name = {name: param for param, name in names.items()}
    fresh: dict[str, dict[str, Any]] = {name: dict.fromkeys(keys) for name, keys in offer.keys.items()}
    for (name, key), value in loaded:
        fresh[name][key] = value
        before = optimizer.state.get(by_name[name], {})
        before.pop(key, None)  # its memory is free before the next tensor comes
    for param, name in names.items():
        optimizer.state.pop(param, None)
        if name in fresh:
            optimizer.state[param] = fresh[name]
