"""The content of a state: modules, optimizers, other objects with a state dict, tensors, and plain values.

A state is a dictionary and may contain nested dictionaries. `_collect` splits a state for a save. `_fitting` maps the
tensors of a checkpoint to a state for a load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import CheckpointError, ComposableShardError, ShardConfigTypeError, ShardConfigValueError
from ._full.entries import Entries, Entry, parameters_of
from ._full.metadata import Metadata
from ._full.names import plain_name

PLAIN_BESIDE_SHARDED = (
    "is a plain tensor, but its parameter is sharded over ranks; make it a DTensor like its parameter"
)


@runtime_checkable
class Stateful(Protocol):
    """An object with a state dict, for example a scheduler or a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: numbers, strings, tensors, and dictionaries and lists of these."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state that `state_dict` returned in an earlier run."""


class PerRank:
    """A value that differs between ranks. Every rank's value is saved, and each rank loads its own.

    Args:
        value: any value that a state may contain, except modules, optimizers and sharded tensors. An object with
            `state_dict` and `load_state_dict` is saved and loaded through these methods.
        resize: computes the value of a rank if the number of ranks has changed. Called as
            ``resize(saved, rank, ranks)`` with the list of all saved values in the order of the ranks, this rank, and
            the number of ranks now. Without it, such a load raises `CheckpointMismatchError`.

    Attributes:
        value: the value that was passed or loaded.
    """

    def __init__(self, value: Any, resize: Callable[[list[Any], int, int], Any] | None = None) -> None:
        self.value = value
        self.resize = resize

    def put(self, value: Any) -> None:
        """Replace the value. A load calls this."""
        self.value = value


@contextlib.contextmanager
def named(path: str, method: str) -> Iterator[None]:
    """Raise errors of a user's method as a CheckpointError that names the entry of the state."""
    try:
        yield
    except ComposableShardError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: its {method} raised {type(error).__name__}: {error}") from error


def state_of(path: str, value: Stateful) -> dict[str, Any]:
    with named(path, "state_dict"):
        return value.state_dict()


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of `torch.compile` and DDP wrappers, in any order."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def leaves(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield path, value, container and name in the container of each leaf. Containers of plain values are leaves."""
    for name, value in state.items():
        if not isinstance(name, str) or not name:
            raise ShardConfigTypeError(f"state: {prefix}{name!r} is not a name; names are non-empty strings")
        yield from _below(f"{prefix}{name}", value, state, name)


def _below(path: str, value: Any, container: Any, name: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    if isinstance(value, Mapping) and not is_plain(value):
        yield from leaves(value, f"{path}.")
    elif isinstance(value, (list, tuple)) and not is_plain(value):
        for index, each in enumerate(value):
            yield from _below(f"{path}.{index}", each, value, index)
    else:
        yield path, value, container, name


def is_plain(value: Any) -> bool:
    """Whether a value contains nothing that is loaded in place."""
    if isinstance(value, Mapping):
        return all(is_plain(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return all(is_plain(each) for each in value)
    return not isinstance(value, (torch.Tensor, PerRank, torch.Generator, Stateful))


@dataclass(frozen=True)
class ModuleContent:
    """Content of a module's state dict.

    Attributes:
        values: all values, by name.
        keys: key in the state dict of each name.
        entries: its tensors, by name.
        tied: maps the other names of a tied tensor to its first name.
        metadata: metadata of the state dict.
    """

    values: dict[str, Any]
    keys: dict[str, str]
    entries: dict[str, Entry]
    tied: dict[str, str]
    metadata: Metadata | None

    @property
    def own(self) -> bool:
        """Whether all tensors are parameters or buffers of the module, so that no hook has made one."""
        return all(each.source is not None for each in self.entries.values())

    @property
    def renamed(self) -> bool:
        """Whether a tensor has another name than in the module, or lacks one of its names in the module."""
        named = [(name, each.source.names) for name, each in self.entries.items() if each.source is not None]
        return any(name not in names or not self.values.keys() >= {*names} for name, names in named)

    @property
    def buffers(self) -> list[str]:
        """Names of the buffers."""
        return [name for name, each in self.entries.items() if each.source is not None and not each.source.is_param]

    @staticmethod
    def of(module: nn.Module) -> ModuleContent:
        """Read the state dict of a module. This reshards its parameters."""
        state = Entries.of(module)
        tied = {name: each.first for name, each in state.tensors.items() if each.first != name and each.source}
        keys = {plain_name(key): key for key in state.order}
        return ModuleContent(state.values(), keys, state.tensors, tied, state.metadata)


class Modules:
    """The modules of a state.

    Attributes:
        contents: content of each module, by its path in the state.
        parameters: parameters as optimizers have them, by key.

    Raises:
        ShardConfigValueError: two modules have the same path.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.contents: dict[str, ModuleContent] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        for path, value, _, _ in leaves(state):
            if isinstance(value, nn.Module):
                if path in self.contents:
                    raise ShardConfigValueError(f"state: two entries are called {path}; rename one")
                module = unwrapped(value)
                with named(path, "state_dict"):
                    self.contents[path] = ModuleContent.of(module)  # with torch's FSDP2, this call reshards
                self.parameters.update({f"{path}.{name}": each for name, each in parameters_of(module).items()})
        self._keys: dict[int, str] = {}
        for key, parameter in self.parameters.items():
            self._keys.setdefault(id(parameter), key)

    def key_of(self, parameter: torch.Tensor) -> str | None:
        """The first key of a parameter."""
        return self._keys.get(id(parameter))


@dataclass(frozen=True)
class OptimizerContent:
    """Content of an optimizer's state dict.

    Attributes:
        groups: parameter groups, with keys instead of parameters.
        state: state by the keys of parameters. State that belongs to no parameter has the optimizer's name for it.
    """

    groups: list[dict[str, Any]]
    state: dict[str, Any]

    @staticmethod
    def of(path: str, optimizer: torch.optim.Optimizer, modules: Modules) -> OptimizerContent:
        """Read the state dict of an optimizer.

        Raises:
            ShardConfigValueError: a parameter belongs to no module of the state, or the state dict has an unknown
                format.
        """
        content = state_of(path, optimizer)
        keys = [_keys_of(path, group["params"], modules) for group in optimizer.param_groups]
        groups = content.get("param_groups", ())
        if content.keys() != {"state", "param_groups"} or [len(g["params"]) for g in groups] != list(map(len, keys)):
            raise ShardConfigValueError(
                f"{path}: the state_dict of {type(optimizer).__name__} does not have exactly 'state' and "
                "'param_groups' for all parameters; if it wraps another optimizer, save that optimizer and the "
                "wrapper's own state as separate entries"
            )
        pairs = list(zip(groups, keys, strict=True))
        by_index = {index: key for group, own in pairs for index, key in zip(group["params"], own, strict=True)}
        state: dict[str, Any] = {}
        for index, values in content["state"].items():
            key = by_index.get(index, index)
            if not isinstance(key, str) or key in state:
                raise ShardConfigValueError(
                    f"{path}: its state has the key {index!r}, which is neither a parameter's index nor a name"
                )
            state[key] = values
        return OptimizerContent([{**group, "params": own} for group, own in pairs], state)


def _keys_of(path: str, parameters: list[torch.Tensor], modules: Modules) -> list[str]:
    keys = []
    for parameter in parameters:
        key = modules.key_of(parameter)
        if key is None:
            raise ShardConfigValueError(
                f"{path} updates a parameter of shape {tuple(parameter.shape)} that no module in the state has, so "
                "it has no name; add its module to the state, and make the optimizer after fully_shard"
            )
        keys.append(key)
    return keys


def is_plain_beside(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether an optimizer's tensor is a plain tensor of one or more dimensions, but its parameter is a DTensor."""
    return isinstance(parameter, DTensor) and not isinstance(tensor, DTensor) and tensor.dim() > 0
