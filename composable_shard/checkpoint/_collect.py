"""Split a state for a save: tensors by key, and trees of JSON for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ShardConfigTypeError, ShardConfigValueError
from ._format.values import encode
from ._full.tensors import is_split
from ._state import (
    PLAIN_BESIDE_SHARDED,
    ModuleContent,
    Modules,
    OptimizerContent,
    PerRank,
    Stateful,
    is_plain_beside,
    leaves,
    state_of,
)


@dataclass
class Collected:
    """The parts of a state.

    Attributes:
        tensors: tensors that are sharded over the ranks or equal on all ranks, by key.
        own: tensors of this rank only, by key.
        aliases, values, per_rank: as in a manifest. `per_rank` has this rank's values only.
        owned: keys of the tensors of modules and optimizers.
        buffers: keys of the buffers of modules.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)

    def keep_owned(self, key: str, tensor: torch.Tensor) -> None:
        """Add a tensor of a module or an optimizer."""
        self.keep(key, tensor)
        self.owned.add(key)

    def keep(self, key: str, tensor: torch.Tensor) -> None:
        """Add a tensor."""
        self._refuse_second(key)
        self.tensors[key] = tensor

    def keep_own(self, key: str, tensor: torch.Tensor) -> None:
        """Add a tensor that only this rank has."""
        if isinstance(tensor, DTensor):
            raise ShardConfigTypeError(f"{key} is sharded over ranks, so PerRank cannot hold it")
        self._refuse_second(key)
        self.own[key] = tensor

    def _refuse_second(self, key: str) -> None:
        if key in self.tensors or key in self.own:
            raise ShardConfigValueError(f"state: two tensors have the key {key}; rename an entry")


def collect(state: Mapping[str, Any], rank: int) -> Collected:
    """Split a state into tensors and JSON trees.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: something in the state cannot be saved. The message names it.
    """
    if not isinstance(state, Mapping):
        raise ShardConfigTypeError(f"state: is a {type(state).__name__}; give a dictionary of names")
    try:
        return _collect(state, rank)
    except RecursionError:
        raise ShardConfigValueError("state: is nested too deeply, or contains itself") from None


def _collect(state: Mapping[str, Any], rank: int) -> Collected:
    collected = Collected()
    modules = Modules(state)
    for path, value, _, _ in leaves(state):
        if path in collected.values or path in collected.per_rank:
            raise ShardConfigValueError(f"state: two entries are called {path}; rename one")
        if isinstance(value, PerRank):
            content = state_of(path, value.value) if isinstance(value.value, Stateful) else value.value
            collected.per_rank[path] = encode(content, f"{path}@{rank}", collected.keep_own)
        else:
            collected.values[path] = _tree(path, value, modules, collected)
    return collected


def _tree(path: str, value: Any, modules: Modules, collected: Collected) -> Any:
    if isinstance(value, nn.Module):
        return _collect_module(path, modules.contents[path], collected)
    if isinstance(value, torch.optim.Optimizer):
        return _collect_optimizer(path, value, modules, collected)
    if isinstance(value, Stateful):
        return {"$": "stateful", "value": encode(state_of(path, value), path, collected.keep)}
    return encode(value, path, collected.keep)


def _collect_module(path: str, content: ModuleContent, collected: Collected) -> dict[str, Any]:
    extra = {}
    tensors = []
    collected.buffers.update(f"{path}.{name}" for name in content.buffers)
    for name, value in content.values.items():
        key = f"{path}.{name}"
        if not isinstance(value, torch.Tensor):
            extra[name] = encode(value, key, collected.keep_owned)
            continue
        tensors.append(name)
        if name in content.tied:
            collected.aliases[key] = f"{path}.{content.tied[name]}"
        else:
            collected.keep_owned(key, value)
    return {"$": "module", "tensors": tensors, "extra": extra}


def _collect_optimizer(
    path: str, optimizer: torch.optim.Optimizer, modules: Modules, collected: Collected
) -> dict[str, Any]:
    content = OptimizerContent.of(path, optimizer, modules)
    state = {}
    plain: list[str] = []  # keys of plain tensors whose parameters are DTensors
    for name, values in content.state.items():
        key = f"{path}.state.{name}"
        if name not in modules.parameters:
            state[name] = encode(values, key, collected.keep)
            continue

        def keep(key: str, tensor: torch.Tensor, parameter: torch.Tensor = modules.parameters[name]) -> None:
            if is_plain_beside(tensor, parameter):
                if is_split(parameter):
                    raise ShardConfigValueError(f"{key}: {PLAIN_BESIDE_SHARDED}")
                plain.append(key)
            collected.keep_owned(key, tensor)

        state[name] = encode(values, key, keep)
    groups = encode(content.groups, f"{path}.param_groups", collected.keep)
    return {"$": "optimizer", "groups": groups, "state": state, **({"plain": plain} if plain else {})}
