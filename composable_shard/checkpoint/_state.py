"""What a state is made of: modules, optimizers, other objects with a state dict, tensors, and plain values.

A state is a dictionary, which may hold dictionaries. `collect` turns one into tensors by key and trees of JSON,
`Target` finds for a saved one where each tensor goes, and what is to be done once all of them are there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from .._errors import (
    CheckpointError,
    CheckpointMismatchError,
    ComposableShardError,
    ShardConfigTypeError,
    ShardConfigValueError,
)
from .._module.state import states_below
from .._torch.distributed import dtensor_like, local_tensor
from ._format.manifest import Manifest, SavedTensor, name_of
from ._format.values import decode, encode
from ._full.tensors import Held, Holdings, is_split, parameters_of, plain_name

_PLAIN_BESIDE_SHARDED = (
    "is a plain tensor of this rank, though its parameter is sharded over ranks; make it a DTensor like its parameter"
)


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


@contextlib.contextmanager
def _named(path: str, method: str) -> Iterator[None]:
    """Errors of a method of the user's say of which entry of the state it is."""
    try:
        yield
    except ComposableShardError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: its {method} has raised {type(error).__name__}: {error}") from error


def _state_of(path: str, value: Stateful) -> dict[str, Any]:
    with _named(path, "state_dict"):
        return value.state_dict()


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` and DDP have been given, in whatever order they are around it."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


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


def _parameters_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters of the modules in a state by their keys: those that optimizers step."""
    parameters: dict[str, torch.Tensor] = {}
    for path, value, _, _ in leaves(state):
        if isinstance(value, nn.Module):
            module = unwrapped(value)
            _state_of(path, module)  # torch's FSDP2 reshards now
            parameters.update({f"{path}.{name}": each for name, each in parameters_of(module).items()})
    return parameters


def _names_of(parameters: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """The first key of every parameter, by its identity."""
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), name)
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
        self._refuse_second(key)
        self.tensors[key] = tensor

    def keep_own(self, key: str, tensor: torch.Tensor) -> None:
        """Take in a tensor of this rank alone."""
        if isinstance(tensor, DTensor):
            raise ShardConfigTypeError(f"{key} is sharded over ranks, so PerRank cannot hold it")
        self._refuse_second(key)
        self.own[key] = tensor

    def _refuse_second(self, key: str) -> None:
        if key in self.tensors or key in self.own:
            raise ShardConfigValueError(f"state: two tensors have the key {key}; rename an entry")


def collect(state: Mapping[str, Any], rank: int) -> Collected:
    """Take a state apart.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: something in it cannot be saved; it says what.
    """
    if not isinstance(state, Mapping):
        raise ShardConfigTypeError(f"state: is a {type(state).__name__}; give a dictionary of names")
    try:
        return _collect(state, rank)
    except RecursionError:
        raise ShardConfigValueError("state: is nested too deeply, or holds itself") from None


def _collect(state: Mapping[str, Any], rank: int) -> Collected:
    collected = Collected()
    parameters = _parameters_of(state)
    for path, value, _, _ in leaves(state):
        if path in collected.values or path in collected.per_rank:
            raise ShardConfigValueError(f"state: two entries are called {path}; rename one")
        if isinstance(value, nn.Module):
            collected.values[path] = _collect_module(path, unwrapped(value), collected)
        elif isinstance(value, torch.optim.Optimizer):
            collected.values[path] = _collect_optimizer(path, value, parameters, collected)
        elif isinstance(value, PerRank):
            content = _state_of(path, value.value) if isinstance(value.value, Stateful) else value.value
            collected.per_rank[path] = encode(content, f"{path}@{rank}", collected.keep_own)
        elif isinstance(value, Stateful):
            content = _state_of(path, value)
            collected.values[path] = {"$": "stateful", "value": encode(content, path, collected.keep)}
        else:
            collected.values[path] = encode(value, path, collected.keep)
    return collected


def _collect_module(path: str, module: nn.Module, collected: Collected) -> dict[str, Any]:
    with _named(path, "state_dict"):
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
    path: str, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], collected: Collected
) -> dict[str, Any]:
    groups, content = _optimizer_content(path, optimizer, _names_of(parameters))
    state = {}
    plain: list[str] = []  # tensors that are none of a mesh's though their parameters are DTensors
    for name, values in content.items():
        key = f"{path}.state.{name}"
        if name not in parameters:
            state[name] = encode(values, key, collected.keep)
            continue

        def keep(key: str, tensor: torch.Tensor, parameter: torch.Tensor = parameters[name]) -> None:
            if _is_plain_beside(tensor, parameter):
                if is_split(parameter):
                    raise ShardConfigValueError(f"{key}: {_PLAIN_BESIDE_SHARDED}")
                plain.append(key)
            collected.keep_owned(key, tensor)

        state[name] = encode(values, key, keep)
    encoded = encode(groups, f"{path}.param_groups", collected.keep)
    return {"$": "optimizer", "groups": encoded, "state": state, **({"plain": plain} if plain else {})}


def _is_plain_beside(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether an optimizer's tensor is none of a mesh, though its parameter is a DTensor."""
    return isinstance(parameter, DTensor) and not isinstance(tensor, DTensor) and tensor.dim() > 0


def _optimizer_content(
    path: str, optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What an optimizer's state dict gives: its groups, and its state by the keys of parameters.

    State of no parameter, which optimizers keep under names of their own, is there by these names.
    """
    content = _state_of(path, optimizer)
    groups = [_named_group(path, group, names) for group in optimizer.param_groups]
    given = content.get("param_groups", ())
    if set(content) != {"state", "param_groups"} or [len(g["params"]) for g in given] != [
        len(group["params"]) for group in groups
    ]:
        raise ShardConfigValueError(
            f"{path}: the state_dict of {type(optimizer).__name__} does not give 'state' and 'param_groups' alone, of "
            "all parameters; if it is around another optimizer, put that one into the state, and the rest apart"
        )
    pairs = list(zip(given, groups, strict=True))
    named = {i: name for ours, group in pairs for i, name in zip(ours["params"], group["params"], strict=True)}
    state: dict[str, Any] = {}
    for index, values in content["state"].items():
        name = named.get(index, index)
        if not isinstance(name, str) or name in state:
            raise ShardConfigValueError(f"{path}: its state has the key {index!r}, which is no parameter's, nor a name")
        state[name] = values
    return [{**ours, "params": group["params"]} for ours, group in pairs], state


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


@dataclass(frozen=True)
class _Handed:
    """What is handed to a method of the user's, and what gives its owner back the state that it had before."""

    load: Callable[[], None]
    restore: Callable[[], None]


class Target:
    """Where the tensors of a saved state go, and what is done when they are there.

    First all that is handed to methods of the user's, which may fail; then modules, optimizers and values.

    Attributes:
        handed: by key of the checkpoint, new tensors to fill that are handed to methods of the user's.
        wanted: likewise, all others to fill.
        problems: why the state does not fit, a statement each.
        missing: names that modules have and the checkpoint has not.
        unexpected: names that the checkpoint has and the modules have not.
    """

    def __init__(self, manifest: Manifest, rank: int, ranks: int, cast: bool) -> None:
        self.handed: dict[str, list[torch.Tensor]] = {}
        self.wanted: dict[str, list[torch.Tensor]] = {}
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._manifest = manifest
        self._rank = rank
        self._ranks = ranks
        self._cast = cast
        self._hand: list[_Handed] = []
        self._tried = 0
        self._finish: list[Callable[[], None]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []

    def add(self, state: Mapping[str, Any]) -> None:
        """Find what a state wants of the checkpoint."""
        if not isinstance(state, Mapping):
            raise ShardConfigTypeError(f"state: is a {type(state).__name__}; give a dictionary of names")
        parameters = _parameters_of(state)
        for path, value, container, name in leaves(state):
            try:
                self._add(path, value, container, name, parameters)
            except CheckpointMismatchError as error:
                self.problems.append(f"{path}: {error}")
            except ComposableShardError:
                raise
            except RecursionError:
                self.problems.append(f"{path}: is nested too deeply in the checkpoint")
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                self.problems.append(f"{path}: cannot be understood: {type(error).__name__}: {error}")

    def _add(self, path: str, value: Any, container: Any, name: Any, parameters: dict[str, torch.Tensor]) -> None:
        saved: Any = self._manifest.values.get(path)
        if isinstance(value, PerRank):
            self._add_per_rank(path, value)
        elif path not in self._manifest.values:
            self.problems.append(f"{path}: the checkpoint has no such entry")
        elif isinstance(value, nn.Module):
            self._add_kind(path, saved, "module", lambda: self._add_module(path, unwrapped(value), saved))
        elif isinstance(value, torch.optim.Optimizer):
            self._add_kind(path, saved, "optimizer", lambda: self._add_optimizer(path, value, parameters, saved))
        elif isinstance(value, Stateful):
            self._add_kind(path, saved, "stateful", lambda: self._add_stateful(path, value, saved["value"]))
        else:
            self._add_value(path, value, container, name, saved)

    def hand(self) -> None:
        """With the tensors of `handed` filled: call the methods of the user's that load."""
        for each in self._hand:
            self._tried += 1
            each.load()

    def restore(self) -> None:
        """Undo `hand`."""
        for each in self._hand[: self._tried]:
            with contextlib.suppress(Exception):  # the error that has led here is raised
                each.restore()

    def finish(self) -> None:
        """With all tensors filled: see to modules and optimizers, and set plain values and generators."""
        for action in self._finish:
            action()
        for generator, state in self._generators:
            generator.set_state(state)

    def _add_kind(self, path: str, saved: Any, kind: str, add: Callable[[], None]) -> None:
        kind_there = saved.get("$") if isinstance(saved, dict) else None
        if kind_there != kind:
            self.problems.append(f"{path}: is {_spoken(kind)} here, and {_spoken(kind_there)} in the checkpoint")
        else:
            add()

    def want(self, key: str, tensor: torch.Tensor, handed: bool = False) -> None:
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
            wanted = self.handed if handed else self.wanted
            wanted.setdefault(self._key(key), []).append(tensor.detach())

    def _key(self, key: str) -> str:
        return self._manifest.aliases.get(key, key)

    def _saved(self, key: str) -> SavedTensor | None:
        return self._manifest.tensors.get(self._key(key))

    def _fetch(self, key: str, now: Any) -> Any:
        """The tensor that a value in a tree will be: the one that is there, if it fits, or a new one."""
        if isinstance(now, torch.Generator):
            self._generators.append((now, self._generator_state(key, now, False)))
            return now
        saved = self._needed(key)
        fits = now is not None and tuple(now.shape) == saved.shape and now.dtype == saved.dtype
        tensor = now if fits else self._new(key, now)
        self.want(key, tensor)
        return tensor

    def _fetch_to_hand(self, key: str, now: Any) -> Any:
        """The same for a tree that is handed to a method of the user's: what is there now stays as it is."""
        if isinstance(now, torch.Generator):
            generator = torch.Generator(now.device)
            state = self._generator_state(key, generator, True)
            self._hand.append(_Handed(lambda: _set(generator, state), lambda: None))
            return generator
        saved = self._needed(key)
        fits = now is not None and tuple(now.shape) == saved.shape and now.dtype == saved.dtype
        tensor = torch.empty_like(now, requires_grad=False) if fits else self._new(key, now)
        self.want(key, tensor, handed=True)
        return tensor

    def _generator_state(self, key: str, generator: torch.Generator, handed: bool) -> torch.Tensor:
        saved, size = self._needed(key), generator.get_state().numel()
        if saved.dtype != torch.uint8 or saved.shape != (size,):
            raise CheckpointMismatchError(
                f"{key}: the state of a generator of {generator.device} has {size} bytes here, and in the checkpoint "
                f"it is of dtype {name_of(saved.dtype)} and shape {saved.shape}"
            )
        state = self._new(key)
        self.want(key, state, handed)
        return state

    def _needed(self, key: str) -> SavedTensor:
        saved = self._saved(key)
        if saved is None:
            raise CheckpointMismatchError(f"{key}: the checkpoint has no such tensor")
        return saved

    def _new(self, key: str, beside: torch.Tensor | None = None) -> torch.Tensor:
        """A new tensor, on the CPU, or on the device of another one."""
        saved = self._needed(key)
        try:
            return torch.empty(saved.shape, dtype=saved.dtype, device="cpu" if beside is None else beside.device)
        except (RuntimeError, TypeError) as error:  # more than there is memory, or than can be addressed
            raise CheckpointMismatchError(f"{key}: there is no memory for shape {saved.shape}: {error}") from None

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
        if isinstance(value, torch.Generator) and not isinstance(made, torch.Generator):
            self.problems.append(f"{path}: is a generator here, and {_spoken(kind)} in the checkpoint")
        elif isinstance(value, MutableMapping) and isinstance(made, dict):
            self._finish.append(lambda: _become(value, made))
        elif isinstance(container, (MutableMapping, list)):
            self._finish.append(lambda: container.__setitem__(name, made))
        elif made is not value and made != value:
            self.problems.append(f"{path}: is in a {type(container).__name__}, which cannot be changed")

    def _add_stateful(self, path: str, value: Stateful, saved: Any) -> None:
        now = _state_of(path, value)
        made = decode(saved, now, self._fetch_to_hand)
        self._load_by(path, value.load_state_dict, lambda: made, now)

    def _load_by(self, path: str, load: Callable[[Any], Any], make: Callable[[], Any], now: Any) -> None:
        """Hand a state to a method that loads it; where one fails on any rank, it gets the present state again."""

        def hand() -> None:
            with _named(path, "load_state_dict"):
                load(make())

        present = _copied(now, path)
        self._hand.append(_Handed(hand, lambda: load(present())))

    def _add_per_rank(self, path: str, value: PerRank) -> None:
        saved = self._manifest.per_rank.get(path)
        if saved is None:
            self.problems.append(f"{path}: the checkpoint has no values by rank of this name")
            return
        stateful = value.value if isinstance(value.value, Stateful) else None
        now = value.value if stateful is None else _state_of(path, stateful)
        if len(saved) == self._ranks:
            made = decode(saved[self._rank], now, self._fetch if stateful is None else self._fetch_to_hand)
            make: Callable[[], Any] = lambda: made  # noqa: E731
        elif value.resize is None:
            self.problems.append(
                f"{path}: has values of {len(saved)} ranks, and there are {self._ranks} now; give PerRank a `resize`"
            )
            return
        else:
            every = [decode(each, None, self._fetch_to_hand) for each in saved]
            make = functools.cache(functools.partial(_resized, path, value.resize, every, self._rank, self._ranks))
            self._hand.append(_Handed(lambda: make() and None, lambda: None))
        if stateful is None:
            self._finish.append(lambda: setattr(value, "value", make()))
        else:
            self._load_by(path, stateful.load_state_dict, make, now)

    def _add_module(self, path: str, module: nn.Module, saved: dict[str, Any]) -> None:
        content, ties, plain = _module_content(module)
        tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
        names = set(saved["tensors"])
        self.missing += [f"{path}.{name}" for name in content if name not in names and name not in saved["extra"]]
        self.unexpected += [f"{path}.{name}" for name in (*saved["tensors"], *saved["extra"]) if name not in content]
        made = self._made_for(path, module, {name: each for name, each in tensors.items() if name in names}, ties)
        for name, tensor in made.items():
            self.want(f"{path}.{name}", tensor)
        fetch = self._fetch_to_hand
        extra = {name: decode(value, content[name], fetch) for name, value in saved["extra"].items() if name in content}
        replaced = {name for name in made if made[ties.get(name, name)] is not tensors[ties.get(name, name)]}
        if extra and plain and not replaced:
            now = {name: content[name] for name in extra}
            self._load_by(path, functools.partial(_load_extra, module), lambda: extra, now)
        self._finish.append(lambda: _finish_module(module, made, extra, plain, replaced))

    def _made_for(
        self, path: str, module: nn.Module, tensors: dict[str, torch.Tensor], ties: dict[str, str]
    ) -> dict[str, torch.Tensor]:
        """The tensors to fill: a module's own, or new ones where these are on meta; one for tied names."""
        held = Holdings(module) if any(map(_is_meta, tensors.values())) else None
        made: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            first = ties.get(name)
            if first in made and self._key(f"{path}.{first}") != self._key(f"{path}.{name}"):
                self.problems.append(f"{path}.{name}: is one with {path}.{first} here, and another in the checkpoint")
            if first in made:
                made[name] = made[first]
            else:
                made[name] = _materialised(held, name) if held is not None and _is_meta(tensor) else tensor
        return made

    def _add_optimizer(
        self, path: str, optimizer: torch.optim.Optimizer, parameters: dict[str, torch.Tensor], saved: dict[str, Any]
    ) -> None:
        here, present = _optimizer_content(path, optimizer, _names_of(parameters))
        groups = decode(saved["groups"], here, self._fetch_to_hand)
        if len(groups) != len(here):
            self.problems.append(
                f"{path}: has {len(here)} groups of parameters here, and {len(groups)} in the checkpoint"
            )
            return
        self._compare_groups(path, optimizer, here, groups)
        stepped = {name for group in here for name in group["params"]}
        if any(_is_meta(parameters[name]) for name in stepped):
            self.problems.append(
                f"{path}: steps on parameters on the meta device, in whose place the load puts others; make the "
                "optimizer after the model is loaded, or call model.to_empty(device=...) before it is made"
            )
            return
        known = {name for group in groups for name in group["params"]}
        plain = set(saved.get("plain", ()))
        state = {}
        for name, values in saved["state"].items():
            now = present.get(name)
            if name in stepped:
                fetch = functools.partial(self._fetch_state, parameters[name], plain)
                state[name] = decode(values, now or {}, fetch)
                if not isinstance(state[name], dict):
                    raise TypeError(f"the state of {name} is no dictionary")
            elif name not in known:  # of no parameter
                state[name] = self._decoded(values, now)
        groups = [{**each, "params": ours["params"]} for each, ours in zip(groups, here, strict=True)]
        self._finish.append(lambda: _finish_optimizer(optimizer, groups, state))

    def _compare_groups(
        self, path: str, optimizer: torch.optim.Optimizer, here: list[dict[str, Any]], groups: list[dict[str, Any]]
    ) -> None:
        for index, (ours, saved_group) in enumerate(zip(here, groups, strict=True)):
            where = f"{path}.param_groups.{index}"
            self.problems += [
                f"{where}.{name}: the checkpoint has no such option; it is of another kind of optimizer"
                for name, default in optimizer.defaults.items()
                if name not in saved_group and default is not None and not isinstance(default, bool)
            ]
            self.missing += [f"{where}.{name}" for name in ours["params"] if name not in set(saved_group["params"])]
            self.unexpected += [f"{where}.{name}" for name in saved_group["params"] if name not in set(ours["params"])]

    def _fetch_state(self, parameter: torch.Tensor, plain: set[str], key: str, now: Any) -> Any:
        """An optimizer's tensor: the one that it has, or a new one that is sharded like its parameter."""
        saved = self._saved(key)
        if isinstance(now, torch.Tensor) and _is_plain_beside(now, parameter) and is_split(parameter):
            raise CheckpointMismatchError(f"{key}: {_PLAIN_BESIDE_SHARDED}")
        if now is None and saved is not None and len(saved.shape) > 0:
            if key in plain and not is_split(parameter):
                now = self._new(key, parameter)
            elif isinstance(parameter, DTensor):
                now = _state_like(parameter, saved)
            elif saved.shape == tuple(parameter.shape):
                now = torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
        return self._fetch(key, now)


def _set(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _copied(state: Any, path: str) -> Callable[[], Any]:
    """What gives a state as it is now, whatever happens to what is in it; as it is then, if it cannot be copied."""
    kept: dict[str, torch.Tensor] = {}

    def keep(key: str, tensor: torch.Tensor) -> None:
        if key in kept:
            raise ShardConfigValueError(f"two tensors have the key {key}")
        kept[key] = tensor.detach().clone()

    def fetch(key: str, now: Any) -> Any:
        return torch.Generator(now.device).set_state(kept[key]) if isinstance(now, torch.Generator) else kept[key]

    try:
        tree = encode(state, path, keep)
    except (ShardConfigTypeError, ShardConfigValueError):
        return lambda: state
    return lambda: decode(tree, state, fetch)


def _resized(path: str, resize: Callable[[list[Any], int, int], Any], saved: list[Any], rank: int, ranks: int) -> Any:
    with _named(path, "resize"):
        return resize(saved, rank, ranks)


def _become(value: MutableMapping[Any, Any], made: dict[Any, Any]) -> None:
    value.clear()
    value.update(made)


def _spoken(kind: str | None) -> str:
    kinds = {"module": "a module", "optimizer": "an optimizer", "stateful": "an object with a state dict"}
    return (kinds | {"tensor": "a tensor", "generator": "a generator"}).get(kind or "", "a value")


def _can_cast(saved: torch.dtype, wanted: torch.dtype) -> bool:
    return saved.is_floating_point and wanted.is_floating_point


def _is_meta(tensor: torch.Tensor) -> bool:
    return (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).is_meta


def _materialised(held: Holdings, name: str) -> torch.Tensor:
    """A tensor to load into, instead of one on meta: where this belongs, pinned if it is offloaded to pinned memory."""
    each: Held = held.tensors[name]
    home = each.home(held.ranks)
    pins = each.owner is not None and each.owner.info.pins and home.type == "cpu"
    local = torch.empty_like(each.local, device=home, requires_grad=False, pin_memory=pins)
    return dtensor_like(each.tensor, local) if isinstance(each.tensor, DTensor) else local


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


def _load_extra(module: nn.Module, extra: dict[str, Any]) -> None:
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
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: dict[str, dict[str, Any]]
) -> None:
    indices = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    numbered = [{**group, "params": [indices[name] for name in group["params"]]} for group in groups]
    content = {indices.get(name, name): values for name, values in state.items()}
    given = {key: dict(values) if isinstance(values, dict) else values for key, values in content.items()}
    optimizer.load_state_dict({"state": given, "param_groups": numbered})
    loaded = optimizer.state_dict()["state"]
    for index in set(indices.values()) & set(content):  # torch casts floating state to the dtype of its parameter
        kept = loaded.get(index, {})
        for entry, value in content[index].items():
            now = kept.get(entry)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                kept[entry] = value.to(now.device) if entry != "step" else now
