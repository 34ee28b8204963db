"""What a state is made of: modules, optimizers, other objects with a state dict, tensors, and plain values.

A state is a dictionary, which may hold dictionaries. `collect` turns one into tensors by key and trees of JSON,
`Target` finds for a saved one where each tensor goes, and what is to be done once all of them are there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from .._errors import CheckpointMismatchError, ShardConfigTypeError, ShardConfigValueError
from .._module.state import states_below
from .._torch.distributed import local_tensor
from ._format.manifest import Manifest, SavedTensor, name_of
from ._format.values import GeneratorState, decode, encode

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # what others put around modules


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes it back, as schedulers and data loaders do."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


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


def _unwrapped(module: nn.Module) -> nn.Module:
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def plain_name(name: str) -> str:
    """A parameter's name without what compilation, checkpoints of activations and others put around modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _show_sharded(module: nn.Module) -> None:
    for state in states_below(module):
        state.show_sharded()


def leaves(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Path, value, the container that it is in, and its name there; containers of plain values are leaves."""
    for name, value in state.items():
        if not isinstance(name, str) or not name:
            raise ShardConfigTypeError(f"state: {prefix}{name!r} is no name; names are strings that are not empty")
        yield from _below(f"{prefix}{name}", value, state, name)


def _below(path: str, value: Any, container: Any, name: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    if isinstance(value, Mapping) and not _is_plain(value):
        yield from leaves(value, f"{path}.")
    elif isinstance(value, (list, tuple)) and not _is_plain(value):
        for index, each in enumerate(value):
            yield from _below(f"{path}.{index}", each, value, index)
    else:
        yield path, value, container, name


def _is_plain(value: Any) -> bool:
    """Whether nothing in it has a place of its own that is loaded into."""
    if isinstance(value, Mapping):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return not isinstance(value, (torch.Tensor, PerRank, torch.Generator, Stateful))


def _names_of_parameters(state: Mapping[str, Any]) -> dict[int, str]:
    """The key of every parameter of the modules in a state, by its identity."""
    names: dict[int, str] = {}
    for path, value, _, _ in leaves(state):
        if isinstance(value, nn.Module):
            module = _unwrapped(value)
            _show_sharded(module)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), f"{path}.{plain_name(name)}")
    return names


def _module_content(module: nn.Module) -> tuple[dict[str, Any], dict[str, str], bool]:
    """A module's state dict, which names in it are another one's, too, and whether all are tensors it holds itself."""
    _show_sharded(module)
    content = {plain_name(name): value for name, value in module.state_dict().items()}
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    own = set()
    for name, tensor in held:
        name = plain_name(name)
        own.add(name)
        if name in content and first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    return content, aliases, all(name in own or not isinstance(value, torch.Tensor) for name, value in content.items())


# ------------------------------------------------------------------------------------------------------- saving


@dataclass
class Collected:
    """A state taken apart.

    Attributes:
        tensors: by key, those that the ranks hold together, or all alike.
        own: by key, those of this rank alone.
        aliases, values, per_rank: as in a manifest; of `per_rank` this rank's.
        owned: keys of the tensors of modules and optimizers.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)

    def keep_owned(self, key: str, tensor: torch.Tensor) -> None:
        """Take in a tensor of a module or an optimizer."""
        self.keep(key, tensor)
        self.owned.add(key)

    def keep(self, key: str, tensor: torch.Tensor) -> None:
        """Take in a tensor."""
        if key in self.tensors or key in self.own:
            raise ShardConfigValueError(f"state: two tensors have the key {key}; rename an entry")
        self.tensors[key] = tensor

    def keep_own(self, key: str, tensor: torch.Tensor) -> None:
        """Take in a tensor of this rank alone."""
        if isinstance(tensor, DTensor):
            raise ShardConfigTypeError(f"{key} is sharded over ranks, so PerRank cannot hold it")
        self.own[key] = tensor


def collect(state: Mapping[str, Any], rank: int) -> Collected:
    """Take a state apart.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: something in it cannot be saved; it says what.
    """
    if not isinstance(state, Mapping):
        raise ShardConfigTypeError(f"state: is a {type(state).__name__}; give a dictionary of names")
    collected = Collected()
    names = _names_of_parameters(state)
    for path, value, _, _ in leaves(state):
        if path in collected.values or path in collected.per_rank:
            raise ShardConfigValueError(f"state: two entries are called {path}; rename one")
        if isinstance(value, nn.Module):
            collected.values[path] = _collect_module(path, _unwrapped(value), collected)
        elif isinstance(value, torch.optim.Optimizer):
            collected.values[path] = _collect_optimizer(path, value, names, collected)
        elif isinstance(value, PerRank):
            content = value.value.state_dict() if isinstance(value.value, Stateful) else value.value
            collected.per_rank[path] = encode(content, f"{path}@{rank}", collected.keep_own)
        elif isinstance(value, Stateful):
            collected.values[path] = {"$": "stateful", "value": encode(value.state_dict(), path, collected.keep)}
        else:
            collected.values[path] = encode(value, path, collected.keep)
    return collected


def _collect_module(path: str, module: nn.Module, collected: Collected) -> dict[str, Any]:
    content, aliases, _ = _module_content(module)
    extra = {}
    tensors = []
    for name, value in content.items():
        key = f"{path}.{name}"
        if not isinstance(value, torch.Tensor):
            extra[name] = encode(value, key, collected.keep_owned)
            continue
        tensors.append(name)
        if name in aliases:
            collected.aliases[key] = f"{path}.{aliases[name]}"
        else:
            collected.keep_owned(key, value)
    return {"$": "module", "tensors": tensors, "extra": extra}


def _collect_optimizer(
    path: str, optimizer: torch.optim.Optimizer, names: dict[int, str], collected: Collected
) -> dict[str, Any]:
    groups = [_named_group(path, group, names) for group in optimizer.param_groups]
    state = {}
    for parameter, values in optimizer.state.items():
        if name := names.get(id(parameter)):
            state[name] = encode(values, f"{path}.state.{name}", collected.keep_owned)
    return {"$": "optimizer", "groups": encode(groups, f"{path}.param_groups", collected.keep), "state": state}


def _named_group(path: str, group: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    parameters = [names.get(id(parameter)) for parameter in group["params"]]
    if None in parameters:
        shape = tuple(group["params"][parameters.index(None)].shape)
        raise ShardConfigValueError(
            f"{path} steps on a parameter of shape {shape} that no module of the state holds, so it has no name; "
            "put its module into the state, too, and make the optimizer after fully_shard"
        )
    return {**group, "params": parameters}


# ------------------------------------------------------------------------------------------------------ loading


class Target:
    """Where the tensors of a saved state go, and what is done when they are there.

    Attributes:
        wanted: by key of the checkpoint, the tensors to fill.
        problems: why the state does not fit, a statement each.
        missing: names that modules have and the checkpoint has not.
        unexpected: names that the checkpoint has and the modules have not.
    """

    def __init__(self, manifest: Manifest, rank: int, ranks: int, cast: bool) -> None:
        self.wanted: dict[str, list[torch.Tensor]] = {}
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._manifest = manifest
        self._rank = rank
        self._ranks = ranks
        self._cast = cast
        self._finish: list[Callable[[], None]] = []
        self._generators: list[GeneratorState] = []

    def add(self, state: Mapping[str, Any]) -> None:
        """Find what a state wants of the checkpoint."""
        names = _names_of_parameters(state)
        by_name = _parameters_of(state)
        for path, value, container, name in leaves(state):
            saved: Any = self._manifest.values.get(path)
            if isinstance(value, PerRank):
                self._add_per_rank(path, value)
            elif path not in self._manifest.values:
                self.problems.append(f"{path}: the checkpoint has no such entry")
            elif isinstance(value, nn.Module):
                self._add_kind(path, saved, "module", lambda: self._add_module(path, _unwrapped(value), saved))  # noqa: B023
            elif isinstance(value, torch.optim.Optimizer):
                add = self._add_optimizer
                self._add_kind(path, saved, "optimizer", lambda: add(path, value, names, by_name, saved))  # noqa: B023
            elif isinstance(value, Stateful):
                self._add_kind(path, saved, "stateful", lambda: self._add_stateful(value, saved["value"]))  # noqa: B023
            else:
                self._add_value(path, value, container, name, saved)

    def finish(self) -> None:
        """With all tensors filled: hand on what is loaded by methods of its owner, and set plain values."""
        for action in self._finish:
            action()
        for each in self._generators:
            each.generator.set_state(each.state)

    def _add_kind(self, path: str, saved: Any, kind: str, add: Callable[[], None]) -> None:
        kind_there = saved.get("$") if isinstance(saved, dict) else None
        if kind_there != kind:
            self.problems.append(f"{path}: is a {kind} here, and {_spoken(kind_there)} in the checkpoint")
        else:
            add()

    def want(self, key: str, tensor: torch.Tensor) -> None:
        """Ask for a tensor's values; where they do not fit, that is a problem."""
        saved = self._saved(key)
        if saved is None:
            self.problems.append(f"{key}: the checkpoint has no such tensor")
        elif tuple(tensor.shape) != saved.shape:
            self.problems.append(f"{key}: has shape {tuple(tensor.shape)} here, and {saved.shape} in the checkpoint")
        elif tensor.dtype != saved.dtype and not (self._cast and _can_cast(saved.dtype, tensor.dtype)):
            hint = "; cast=True converts it" if _can_cast(saved.dtype, tensor.dtype) else ""
            here, saved_as = name_of(tensor.dtype), name_of(saved.dtype)
            self.problems.append(f"{key}: has dtype {here} here, and {saved_as} in the checkpoint{hint}")
        else:
            self.wanted.setdefault(self._key(key), []).append(tensor.detach())

    def _key(self, key: str) -> str:
        return self._manifest.aliases.get(key, key)

    def _saved(self, key: str) -> SavedTensor | None:
        return self._manifest.tensors.get(self._key(key))

    def _fetch(self, key: str, now: torch.Tensor | None) -> torch.Tensor:
        """The tensor that a value in a tree will be: the one that is there, if it fits, or a new one."""
        saved = self._saved(key)
        if saved is None:
            raise CheckpointMismatchError(f"{key}: the checkpoint has no such tensor")
        fits = now is not None and tuple(now.shape) == saved.shape and now.dtype == saved.dtype
        tensor = now if now is not None and fits else torch.empty(saved.shape, dtype=saved.dtype)
        self.want(key, tensor)
        return tensor

    def _decoded(self, saved: Any, now: Any) -> Any:
        return decode(saved, now, self._fetch)

    def _add_value(self, path: str, value: Any, container: Any, name: Any, saved: Any) -> None:
        kind = saved.get("$") if isinstance(saved, dict) else None
        if isinstance(value, torch.Tensor):
            self._add_kind(path, saved, "tensor", lambda: self.want(path, value))
            return
        if kind in ("module", "optimizer", "stateful"):
            self.problems.append(f"{path}: is {_spoken(None)} here, and {_spoken(kind)} in the checkpoint")
            return
        made = self._decoded(saved, value)
        if isinstance(made, GeneratorState):
            self._generators.append(made)
        elif isinstance(value, MutableMapping) and isinstance(made, dict):
            self._finish.append(lambda: _become(value, made))
        elif isinstance(container, (MutableMapping, list)):
            self._finish.append(lambda: container.__setitem__(name, made))
        elif made != value:
            self.problems.append(f"{path}: is in a {type(container).__name__}, which cannot be changed")

    def _add_stateful(self, value: Stateful, saved: Any) -> None:
        made = self._decoded(saved, value.state_dict())
        self._finish.append(lambda: value.load_state_dict(made) and None)

    def _add_per_rank(self, path: str, value: PerRank) -> None:
        saved = self._manifest.per_rank.get(path)
        if saved is None:
            self.problems.append(f"{path}: the checkpoint has no values by rank of this name")
            return
        stateful = value.value if isinstance(value.value, Stateful) else None
        now = value.value if stateful is None else stateful.state_dict()
        if len(saved) == self._ranks:
            made = self._decoded(saved[self._rank], now)
            self._finish.append(lambda: self._finish_per_rank(value, stateful, made))
        elif value.resize is None:
            self.problems.append(
                f"{path}: has values of {len(saved)} ranks, and there are {self._ranks} now; give PerRank a `resize`"
            )
        else:
            every, resize = [self._decoded(each, None) for each in saved], value.resize
            fit = functools.partial(resize, every, self._rank, self._ranks)
            self._finish.append(lambda: self._finish_per_rank(value, stateful, fit()))

    def _finish_per_rank(self, value: PerRank, stateful: Stateful | None, made: Any) -> None:
        if isinstance(made, GeneratorState):
            self._generators.append(made)
        elif stateful is not None:
            stateful.load_state_dict(made)
        else:
            value.value = made

    def _add_module(self, path: str, module: nn.Module, saved: dict[str, Any]) -> None:
        content, ties, plain = _module_content(module)
        tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
        names = set(saved["tensors"])
        self.missing += [f"{path}.{name}" for name in content if name not in names and name not in saved["extra"]]
        self.unexpected += [f"{path}.{name}" for name in (*saved["tensors"], *saved["extra"]) if name not in content]
        made: dict[str, torch.Tensor] = {}
        for name in (each for each in tensors if each in names):
            first = ties.get(name)
            if first in made and self._key(f"{path}.{first}") != self._key(f"{path}.{name}"):
                self.problems.append(f"{path}.{name}: is one with {path}.{first} here, and another in the checkpoint")
            made[name] = made[first] if first in made else _materialised(tensors[name])
        for name, tensor in made.items():
            self.want(f"{path}.{name}", tensor)
        extra = {name: self._decoded(value, content[name]) for name, value in saved["extra"].items() if name in content}
        replaced = {name for name in made if made[ties.get(name, name)] is not tensors[ties.get(name, name)]}
        self._finish.append(lambda: _finish_module(module, made, extra, plain, replaced))

    def _add_optimizer(
        self,
        path: str,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        by_name: dict[str, torch.Tensor],
        saved: dict[str, Any],
    ) -> None:
        here = [_named_group(path, group, names) for group in optimizer.param_groups]
        groups = self._decoded(saved["groups"], None)
        if len(groups) != len(here):
            self.problems.append(
                f"{path}: has {len(here)} groups of parameters here, and {len(groups)} in the checkpoint"
            )
            return
        for index, (ours, saved_group) in enumerate(zip(here, groups, strict=True)):
            where = f"{path}.param_groups.{index}"
            self.missing += [f"{where}.{name}" for name in ours["params"] if name not in set(saved_group["params"])]
            self.unexpected += [f"{where}.{name}" for name in saved_group["params"] if name not in set(ours["params"])]
        groups = [{**each, "params": ours["params"]} for each, ours in zip(groups, here, strict=True)]
        stepped = {name for group in here for name in group["params"]}
        state = {}
        for name, values in saved["state"].items():
            if name not in stepped:
                continue
            parameter = by_name[name]
            now = optimizer.state.get(parameter, {})
            state[name] = decode(values, now, lambda key, tensor: self._fetch_state(key, tensor, parameter))  # noqa: B023
        self._finish.append(lambda: _finish_optimizer(optimizer, groups, state, by_name))

    def _fetch_state(self, key: str, now: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
        """An optimizer's tensor: the one that it has, or a new one that is sharded like its parameter."""
        saved = self._saved(key)
        if now is None and saved is not None and isinstance(parameter, DTensor) and len(saved.shape) > 0:
            now = _state_like(parameter, saved)
        elif now is None and saved is not None and saved.shape == tuple(parameter.shape) and len(saved.shape) > 0:
            now = torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
        return self._fetch(key, now)


def _parameters_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    parameters: dict[str, torch.Tensor] = {}
    for path, value, _, _ in leaves(state):
        if isinstance(value, nn.Module):
            for name, parameter in _unwrapped(value).named_parameters(remove_duplicate=False):
                parameters[f"{path}.{plain_name(name)}"] = parameter
    return parameters


def _become(value: MutableMapping[Any, Any], made: dict[Any, Any]) -> None:
    value.clear()
    value.update(made)


def _spoken(kind: str | None) -> str:
    return {"module": "a module", "optimizer": "an optimizer", "stateful": "an object with a state dict"}.get(
        kind or "", "a value"
    )


def _can_cast(saved: torch.dtype, wanted: torch.dtype) -> bool:
    return saved.is_floating_point and wanted.is_floating_point


def _materialised(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor to load into: itself, or on the device of its mesh, or the CPU, where it is on meta."""
    if tensor.device.type != "meta" and not (isinstance(tensor, DTensor) and local_tensor(tensor).is_meta):
        return tensor
    if isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=tensor.device_mesh.device_type, requires_grad=False)
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


def _state_like(parameter: DTensor, saved: SavedTensor) -> DTensor:
    """An optimizer's new tensor, sharded like its parameter as far as its shape is the parameter's."""
    if saved.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)  # type: ignore[return-value]
    replicated = [Replicate()] * parameter.device_mesh.ndim
    device = local_tensor(parameter).device
    local = torch.empty(saved.shape, dtype=saved.dtype, device=device)
    return DTensor.from_local(local, parameter.device_mesh, replicated, run_check=False)


def _finish_module(
    module: nn.Module, tensors: dict[str, torch.Tensor], extra: dict[str, Any], plain: bool, replaced: set[str]
) -> None:
    if replaced:
        tensors = _as_parameters(module, tensors, replaced)
    for state in states_below(module):
        state.overwritten()
    if replaced or not plain:
        module.load_state_dict(_spelled(module, {**tensors, **extra}), strict=False, assign=bool(replaced))
    elif extra:
        module.load_state_dict(_spelled(module, extra), strict=False)


def _as_parameters(module: nn.Module, tensors: dict[str, torch.Tensor], replaced: set[str]) -> dict[str, torch.Tensor]:
    """Tensors to assign: parameters that are there already as they are, and one new parameter for each new tensor."""
    assigned, new = dict(tensors), dict[int, nn.Parameter]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        name = plain_name(name)
        if name in replaced:
            tensor = tensors[name]
            assigned[name] = new.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=parameter.requires_grad))
        elif name in tensors:
            assigned[name] = parameter
    return assigned


def _spelled(module: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """Values by the names that the module's own state dict has for them."""
    return {name: values[plain_name(name)] for name in module.state_dict() if plain_name(name) in values}


def _finish_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: dict[str, dict[str, Any]],
    by_name: dict[str, torch.Tensor],
) -> None:
    indices = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    numbered = [{**group, "params": [indices[name] for name in group["params"]]} for group in groups]
    optimizer.load_state_dict(
        {"state": {indices[n]: dict(values) for n, values in state.items()}, "param_groups": numbered}
    )
    for name, values in state.items():  # torch casts floating state to the dtype of its parameter
        kept = optimizer.state[by_name[name]]
        for entry, value in values.items():
            now = kept.get(entry)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                kept[entry] = value if entry != "step" else now
