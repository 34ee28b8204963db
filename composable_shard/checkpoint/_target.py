"""What a load wants of a checkpoint, and what is done once it is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._errors import CheckpointMismatchError, ShardConfigTypeError, ShardConfigValueError
from ._format.manifest import Manifest, SavedTensor, name_of
from ._format.values import decode, encode
from ._state import named


@dataclass(frozen=True)
class _Handed:
    """What is handed to a method of the user's, and what gives its owner back the state that it had before."""

    load: Callable[[], None]
    restore: Callable[[], None]


class Target:
    """Where the tensors of a checkpoint go, and what is done when they are there.

    First all that is handed to methods of the user's, which may fail; then modules, optimizers and values.

    Attributes:
        manifest: of the checkpoint.
        rank, ranks: of this process, and how many load.
        handed: by key of the checkpoint, new tensors to fill that are handed to methods of the user's.
        wanted: likewise, all others to fill.
        problems: why the state does not fit, a statement each.
        missing: names that modules have and the checkpoint has not.
        unexpected: names that the checkpoint has and the modules have not.
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
        """Whether there is anything for `hand` to do."""
        return bool(self._hand)

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

    def before(self, action: Callable[[], Any]) -> None:
        """Do something among what is handed to methods of the user's, which changes nothing that they hold."""
        self._hand.append(_Handed(action, lambda: None))

    def after(self, action: Callable[[], None]) -> None:
        """Do something once all tensors are there."""
        self._finish.append(action)

    def load_by(self, path: str, load: Callable[[Any], Any], make: Callable[[], Any], now: Any) -> None:
        """Hand a state to a method that loads it; where one fails on any rank, it gets the present state again."""

        def hand() -> None:
            with named(path, "load_state_dict"):
                load(make())

        present = _copied(now, path)
        self._hand.append(_Handed(hand, lambda: load(present())))

    def want(self, key: str, tensor: torch.Tensor, handed: bool = False) -> None:
        """Ask for a tensor's values; where they do not fit, that is a problem."""
        saved = self.saved(key)
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
            wanted.setdefault(self.key(key), []).append(tensor)

    def all_wanted(self) -> dict[str, list[torch.Tensor]]:
        """By key of the checkpoint, all tensors to fill."""
        keys = dict.fromkeys((*self.handed, *self.wanted))
        return {key: [*self.handed.get(key, ()), *self.wanted.get(key, ())] for key in keys}

    def differ(self, path: str, here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Note which names below a path are missing, and which are unexpected."""
        self.missing += [f"{path}.{name}" for name in here if name not in saved]
        self.unexpected += [f"{path}.{name}" for name in saved if name not in here]

    def key(self, key: str) -> str:
        """The key under which the tensor of a key is saved: another one, if it is tied."""
        return self.manifest.aliases.get(key, key)

    def saved(self, key: str) -> SavedTensor | None:
        """The tensor of a key, as the checkpoint has it."""
        return self.manifest.tensors.get(self.key(key))

    def fetch(self, key: str, now: Any) -> Any:
        """The tensor that a value in a tree will be: the one that is there, if it fits, or a new one."""
        if isinstance(now, torch.Generator):
            self._generators.append((now, self._generator_state(key, now, False)))
            return now
        saved = self._needed(key)
        fits = now is not None and tuple(now.shape) == saved.shape and now.dtype == saved.dtype
        tensor = now if fits else self.new(key, now)
        self.want(key, tensor)
        return tensor

    def fetch_to_hand(self, key: str, now: Any) -> Any:
        """The same for a tree that is handed to a method of the user's: what is there now stays as it is."""
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
                f"{key}: the state of a generator of {generator.device} has {size} bytes here, and in the checkpoint "
                f"it is of dtype {name_of(saved.dtype)} and shape {saved.shape}"
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
        """A new tensor, on the CPU, or on the device of another one."""
        saved = self._needed(key)
        try:
            return torch.empty(saved.shape, dtype=saved.dtype, device="cpu" if beside is None else beside.device)
        except (RuntimeError, TypeError) as error:  # more than there is memory, or than can be addressed
            raise CheckpointMismatchError(f"{key}: there is no memory for shape {saved.shape}: {error}") from None


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


def _can_cast(saved: torch.dtype, wanted: torch.dtype) -> bool:
    return saved.is_floating_point and wanted.is_floating_point
