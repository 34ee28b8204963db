"""The tensors that a load reads from a checkpoint, and the actions that follow the read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointMismatchError, ShardConfigTypeError, ShardConfigValueError
from ._format.manifest import Manifest, SavedTensor, name_of
from ._format.values import decode, encode
from ._state import named


@dataclass(frozen=True)
class _Handed:
    """A call of a user's load method, and a call that restores the previous state of its object."""

    load: Callable[[], None]
    restore: Callable[[], None]


class Target:
    """The tensors to fill from a checkpoint, and the actions that follow.

    First the user's load methods are called, because they may fail. Then modules, optimizers and values are loaded.

    Attributes:
        manifest: manifest of the checkpoint.
        rank, ranks: rank of this process, and number of ranks that load.
        handed: new tensors to fill for the user's load methods, by key in the checkpoint.
        wanted: all other tensors to fill, by key in the checkpoint.
        problems: descriptions of why the state does not match.
        missing: names that modules have, but the checkpoint does not.
        unexpected: names that the checkpoint has, but modules do not.
    """

    def __init__(self, manifest: Manifest, rank: int, ranks: int, cast: bool) -> None:
        self.manifest = manifest
        self.rank = rank
        self.ranks = ranks
        self.handed: dict[str, list[torch.Tensor]] = {}
        self.wanted: dict[str, list[torch.Tensor]] = {}
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._cast = cast
        self._hand: list[_Handed] = []
        self._tried = 0
        self._finish: list[Callable[[], None]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []

    @property
    def hands(self) -> bool:
        """Whether `hand` has anything to do."""
        return bool(self._hand)

    def hand(self) -> None:
        """Call the user's load methods, after the tensors in `handed` are filled."""
        for each in self._hand:
            self._tried += 1
            each.load()

    def restore(self) -> None:
        """Restore the state that the user's objects had before `hand`."""
        for each in self._hand[: self._tried]:
            with contextlib.suppress(Exception):  # the caller raises the error that caused the restore
                each.restore()

    def finish(self) -> None:
        """Finish modules and optimizers, and set plain values and generators, after all tensors are filled."""
        for action in self._finish:
            action()
        for generator, state in self._generators:
            generator.set_state(state)

    def before(self, action: Callable[[], Any]) -> None:
        """Add an action that `hand` runs in order. It must not change the user's objects."""
        self._hand.append(_Handed(action, lambda: None))

    def after(self, action: Callable[[], None]) -> None:
        """Add an action that `finish` runs."""
        self._finish.append(action)

    def load_by(self, path: str, load: Callable[[Any], Any], make: Callable[[], Any], now: Any) -> None:
        """Load a state with a user's method. If a method fails on any rank, the state `now` is loaded again."""

        def hand() -> None:
            with named(path, "load_state_dict"):
                load(make())

        present = _copied(now, path)
        self._hand.append(_Handed(hand, lambda: load(present())))

    def want(self, key: str, tensor: torch.Tensor, handed: bool = False) -> None:
        """Request the values of a tensor. Adds a problem if the saved tensor does not match."""
        saved = self.saved(key)
        if saved is None:
            self.problems.append(f"{key}: the checkpoint has no such tensor")
        elif tuple(tensor.shape) != saved.shape:
            self.problems.append(f"{key}: has shape {tuple(tensor.shape)} here, but {saved.shape} in the checkpoint")
        elif tensor.dtype != saved.dtype and not (self._cast and _can_cast(saved.dtype, tensor.dtype)):
            hint = "; cast=True converts it" if _can_cast(saved.dtype, tensor.dtype) else ""
            here, saved_as = name_of(tensor.dtype), name_of(saved.dtype)
            self.problems.append(f"{key}: has dtype {here} here, but {saved_as} in the checkpoint{hint}")
        else:
            wanted = self.handed if handed else self.wanted
            wanted.setdefault(self.key(key), []).append(tensor)

    def all_wanted(self) -> dict[str, list[torch.Tensor]]:
        """All tensors to fill, by key in the checkpoint."""
        keys = dict.fromkeys((*self.handed, *self.wanted))
        return {key: [*self.handed.get(key, ()), *self.wanted.get(key, ())] for key in keys}

    def differ(self, path: str, here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Record the missing and the unexpected names below a path."""
        self.missing += [f"{path}.{name}" for name in here if name not in saved]
        self.unexpected += [f"{path}.{name}" for name in saved if name not in here]

    def key(self, key: str) -> str:
        """The key under which a tensor is saved. It differs from `key` if the tensor is tied."""
        return self.manifest.aliases.get(key, key)

    def saved(self, key: str) -> SavedTensor | None:
        """The saved tensor of a key; None if the checkpoint does not have it."""
        return self.manifest.tensors.get(self.key(key))

    def fetch(self, key: str, now: Any) -> Any:
        """The tensor to fill for a value in a tree: the existing tensor if it matches, or a new one."""
        if isinstance(now, torch.Generator):
            self._generators.append((now, self._generator_state(key, now, False)))
            return now
        saved = self._needed(key)
        fits = now is not None and tuple(now.shape) == saved.shape and now.dtype == saved.dtype
        tensor = now if fits else self.new(key, now)
        self.want(key, tensor)
        return tensor

    def fetch_to_hand(self, key: str, now: Any) -> Any:
        """Like `fetch`, for a tree that is passed to a user's load method. Existing tensors are not changed."""
        if isinstance(now, torch.Generator):
            generator = torch.Generator(now.device)
            state = self._generator_state(key, generator, True)
            self.before(lambda: generator.set_state(state))
            return generator
        saved = self._needed(key)
        fits = now is not None and tuple(now.shape) == saved.shape and now.dtype == saved.dtype
        tensor = torch.empty_like(now, requires_grad=False) if fits else self.new(key, now)
        self.want(key, tensor, handed=True)
        return tensor

    def _generator_state(self, key: str, generator: torch.Generator, handed: bool) -> torch.Tensor:
        saved, size = self._needed(key), generator.get_state().numel()
        if saved.dtype != torch.uint8 or saved.shape != (size,):
            raise CheckpointMismatchError(
                f"{key}: the state of a generator on {generator.device} has {size} bytes here, but in the checkpoint "
                f"it has dtype {name_of(saved.dtype)} and shape {saved.shape}"
            )
        state = self.new(key)
        self.want(key, state, handed)
        return state

    def _needed(self, key: str) -> SavedTensor:
        saved = self.saved(key)
        if saved is None:
            raise CheckpointMismatchError(f"{key}: the checkpoint has no such tensor")
        return saved

    def new(self, key: str, beside: torch.Tensor | None = None) -> torch.Tensor:
        """A new tensor on the device of `beside`, or on the CPU."""
        saved = self._needed(key)
        try:
            return torch.empty(saved.shape, dtype=saved.dtype, device="cpu" if beside is None else beside.device)
        except (RuntimeError, TypeError) as error:  # out of memory, or more bytes than can be addressed
            raise CheckpointMismatchError(f"{key}: not enough memory for shape {saved.shape}: {error}") from None


def _copied(state: Any, path: str) -> Callable[[], Any]:
    """Copy a state. Returns a function that gives the copy, or the uncopied state if it cannot be copied."""
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


def _can_cast(saved: torch.dtype, wanted: torch.dtype) -> bool:
    return saved.is_floating_point and wanted.is_floating_point
