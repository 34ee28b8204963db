"""What a state is made of: modules, optimizers, other objects with a state dict, tensors, and plain values.

A state is a dictionary, which may hold dictionaries. `_collect` takes one apart for a save, `_fitting` finds for a
saved one where each of its tensors goes.
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

from .._errors import CheckpointError, ComposableShardError, ShardConfigTypeError, ShardConfigValueError
from ._full.entries import Entries, Entry, parameters_of
from ._full.metadata import Metadata
from ._full.names import plain_name

PLAIN_BESIDE_SHARDED = (
    "is a plain tensor of this rank, though its parameter is sharded over ranks; make it a DTensor like its parameter"
)


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes it back, as schedulers and data loaders do."""

    def state_dict(self) -> dict[str, Any]:
        """What to save: numbers, strings, tensors, dictionaries and lists of those."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take what `state_dict` gave in an earlier run."""


class PerRank:
    """A value that differs by rank, so that every rank's is saved and each gets its own back.

    Args:
        value: anything that a state may hold but modules, optimizers and sharded tensors. An object with `state_dict`
            and `load_state_dict` is loaded by them.
        resize: makes a value for a run with another number of ranks: called with the saved values by rank, this rank,
            and how many there are now. Without it such a load is a `CheckpointMismatchError`.

    Attributes:
        value: what was given, or loaded.
    """

    def __init__(self, value: Any, resize: Callable[[list[Any], int, int], Any] | None = None) -> None:
        self.value = value
        self.resize = resize

    def put(self, value: Any) -> None:
        """Replace the value, as a load does."""
        self.value = value


@contextlib.contextmanager
def named(path: str, method: str) -> Iterator[None]:
    """Errors of a method of the user's say of which entry of the state it is."""
    try:
        yield
    except ComposableShardError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: its {method} has raised {type(error).__name__}: {error}") from error


def state_of(path: str, value: Stateful) -> dict[str, Any]:
    with named(path, "state_dict"):
        return value.state_dict()


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` and DDP have been given, in whatever order they are around it."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def leaves(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Path, value, the container that it is in, and its name there; containers of plain values are leaves."""
    for name, value in state.items():
        if not isinstance(name, str) or not name:
            raise ShardConfigTypeError(f"state: {prefix}{name!r} is no name; names are strings that are not empty")
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
    """Whether nothing in it has a place of its own that is loaded into."""
    if isinstance(value, Mapping):
        return all(is_plain(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return all(is_plain(each) for each in value)
    return not isinstance(value, (torch.Tensor, PerRank, torch.Generator, Stateful))


@dataclass(frozen=True)
class ModuleContent:
    """What a module's state dict gives.

    Attributes:
        values: by name.
        keys: those of the state dict, by name.
        entries: its tensors, by name.
        tied: names of tensors that are another name's, too, with the first of them.
        metadata: that of the state dict.
    """

    values: dict[str, Any]
    keys: dict[str, str]
    entries: dict[str, Entry]
    tied: dict[str, str]
    metadata: Metadata | None

    @property
    def own(self) -> bool:
        """Whether all tensors are parameters and buffers of the module, and none is made by a hook."""
        return all(each.source is not None for each in self.entries.values())

    @property
    def renamed(self) -> bool:
        """Whether some have other names than in the module, or not all of these."""
        named = [(name, each.source.names) for name, each in self.entries.items() if each.source is not None]
        return any(name not in names or not self.values.keys() >= {*names} for name, names in named)

    @property
    def buffers(self) -> list[str]:
        """Names of those that are buffers."""
        return [name for name, each in self.entries.items() if each.source is not None and not each.source.is_param]

    @staticmethod
    def of(module: nn.Module) -> ModuleContent:
        """Ask a module for it; parameters are sharded then."""
        state = Entries.of(module)
        tied = {name: each.first for name, each in state.tensors.items() if each.first != name and each.source}
        keys = {plain_name(key): key for key in state.order}
        return ModuleContent(state.values(), keys, state.tensors, tied, state.metadata)


class Modules:
    """The modules of a state.

    Attributes:
        contents: what each gives, by its path in the state.
        parameters: those that optimizers step, by key.

    Raises:
        ShardConfigValueError: two have one path.
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
                    self.contents[path] = ModuleContent.of(module)  # torch's FSDP2 reshards now
                self.parameters.update({f"{path}.{name}": each for name, each in parameters_of(module).items()})
        self._keys: dict[int, str] = {}
        for key, parameter in self.parameters.items():
            self._keys.setdefault(id(parameter), key)

    def key_of(self, parameter: torch.Tensor) -> str | None:
        """The first key of a parameter."""
        return self._keys.get(id(parameter))


@dataclass(frozen=True)
class OptimizerContent:
    """What an optimizer's state dict gives.

    Attributes:
        groups: with the keys of their parameters.
        state: by the keys of parameters; that of no parameter by the names that the optimizer keeps it under.
    """

    groups: list[dict[str, Any]]
    state: dict[str, Any]

    @staticmethod
    def of(path: str, optimizer: torch.optim.Optimizer, modules: Modules) -> OptimizerContent:
        """Ask an optimizer for it.

        Raises:
            ShardConfigValueError: it steps on parameters of no module, or its state dict is of another form.
        """
        content = state_of(path, optimizer)
        keys = [_keys_of(path, group["params"], modules) for group in optimizer.param_groups]
        groups = content.get("param_groups", ())
        if content.keys() != {"state", "param_groups"} or [len(g["params"]) for g in groups] != list(map(len, keys)):
            raise ShardConfigValueError(
                f"{path}: the state_dict of {type(optimizer).__name__} does not give 'state' and 'param_groups' alone, "
                "of all parameters; if it is around another optimizer, put that one into the state, and the rest apart"
            )
        pairs = list(zip(groups, keys, strict=True))
        by_index = {index: key for group, own in pairs for index, key in zip(group["params"], own, strict=True)}
        state: dict[str, Any] = {}
        for index, values in content["state"].items():
            key = by_index.get(index, index)
            if not isinstance(key, str) or key in state:
                raise ShardConfigValueError(
                    f"{path}: its state has the key {index!r}, which is no parameter's, nor a name"
                )
            state[key] = values
        return OptimizerContent([{**group, "params": own} for group, own in pairs], state)


def _keys_of(path: str, parameters: list[torch.Tensor], modules: Modules) -> list[str]:
    keys = []
    for parameter in parameters:
        key = modules.key_of(parameter)
        if key is None:
            raise ShardConfigValueError(
                f"{path} steps on a parameter of shape {tuple(parameter.shape)} that no module of the state holds, so "
                "it has no name; put its module into the state, too, and make the optimizer after fully_shard"
            )
        keys.append(key)
    return keys


def is_plain_beside(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether an optimizer's tensor is none of a mesh, though its parameter is a DTensor."""
    return isinstance(parameter, DTensor) and not isinstance(tensor, DTensor) and tensor.dim() > 0
