"""Match a state with a checkpoint: for each entry, which tensors a load reads and what it does with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import CheckpointMismatchError, ComposableShardError, ShardConfigTypeError
from ._fitting_modules import fit_module
from ._fitting_optimizers import fit_optimizer
from ._format.values import decode
from ._state import Modules, PerRank, Stateful, leaves, named, state_of, unwrapped
from ._target import Target

_KINDS = {"module": "a module", "optimizer": "an optimizer", "stateful": "an object with a state dict"}
_SPOKEN = _KINDS | {"tensor": "a tensor", "generator": "a generator"}


class _Place(NamedTuple):
    """The place of a value in the state: its path, its container, and its name or index in the container."""

    path: str
    container: Any
    name: Any


def fit(target: Target, state: Mapping[str, Any]) -> None:
    """Find what a state reads from the checkpoint. Mismatches are added to the problems of the target.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: the state is invalid: it could not have been saved.
    """
    if not isinstance(state, Mapping):
        raise ShardConfigTypeError(f"state: is a {type(state).__name__}; give a dictionary of names")
    modules = Modules(state)
    for path, value, container, name in leaves(state):
        try:
            _fit(target, _Place(path, container, name), value, modules)
        except CheckpointMismatchError as error:
            target.problems.append(f"{path}: {error}")
        except ComposableShardError:
            raise
        except RecursionError:
            target.problems.append(f"{path}: is nested too deeply in the checkpoint")
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            target.problems.append(f"{path}: cannot be parsed: {type(error).__name__}: {error}")


def _fit(target: Target, place: _Place, value: Any, modules: Modules) -> None:
    path = place.path
    if isinstance(value, PerRank):
        _fit_per_rank(target, path, value)
        return
    if path not in target.manifest.values:
        target.problems.append(f"{path}: the checkpoint has no such entry")
        return
    saved = target.manifest.values[path]
    kind, here = _kind(saved), _kind_of(value)
    if here != kind and (here is not None or kind in _KINDS):
        target.problems.append(f"{path}: is {_spoken(here)} here, but {_spoken(kind)} in the checkpoint")
    elif here == "module":
        fit_module(target, path, unwrapped(value), modules.contents[path], saved)
    elif here == "optimizer":
        fit_optimizer(target, path, value, modules, saved)
    elif here == "stateful":
        now = state_of(path, value)
        made = decode(saved["value"], now, target.fetch_to_hand)
        target.load_by(path, value.load_state_dict, lambda: made, now)
    elif here == "tensor":
        target.want(path, value)
    else:
        _fit_value(target, place, value, saved)


def _kind(saved: Any) -> str | None:
    return saved.get("$") if isinstance(saved, dict) else None


def _kind_of(value: Any) -> str | None:
    """The kind as which a value of the state is saved; None for a plain value."""
    kinds = {
        "module": nn.Module,
        "optimizer": torch.optim.Optimizer,
        "tensor": torch.Tensor,
        "generator": torch.Generator,
        "stateful": Stateful,
    }
    return next((kind for kind, of in kinds.items() if isinstance(value, of)), None)


def _spoken(kind: str | None) -> str:
    return _SPOKEN.get(kind or "", "a value")


def _fit_value(target: Target, place: _Place, value: Any, saved: Any) -> None:
    """Load plain values and generators."""
    made = decode(saved, value, target.fetch)
    if isinstance(value, MutableMapping) and isinstance(made, dict):
        target.after(lambda: _become(value, made))
    elif isinstance(place.container, (MutableMapping, list)):
        target.after(lambda: place.container.__setitem__(place.name, made))
    elif made is not value and made != value:
        kind = type(place.container).__name__
        target.problems.append(f"{place.path}: cannot be replaced, because it is in a {kind}")


def _become(value: MutableMapping[Any, Any], made: dict[Any, Any]) -> None:
    value.clear()
    value.update(made)


def _fit_per_rank(target: Target, path: str, value: PerRank) -> None:
    saved = target.manifest.per_rank.get(path)
    if saved is None:
        target.problems.append(f"{path}: the checkpoint has no per-rank values of this name")
        return
    stateful = value.value if isinstance(value.value, Stateful) else None
    now = value.value if stateful is None else state_of(path, stateful)
    if len(saved) == target.ranks:
        made = decode(saved[target.rank], now, target.fetch if stateful is None else target.fetch_to_hand)
        make: Callable[[], Any] = lambda: made  # noqa: E731
    elif value.resize is None:
        target.problems.append(
            f"{path}: has values of {len(saved)} ranks, but there are {target.ranks} now; pass `resize` to PerRank"
        )
        return
    else:
        every = [decode(each, None, target.fetch_to_hand) for each in saved]
        make = functools.cache(functools.partial(_resized, path, value.resize, every, target.rank, target.ranks))
        target.before(make)
    if stateful is None:
        target.after(lambda: value.put(make()))
    else:
        target.load_by(path, stateful.load_state_dict, make, now)


def _resized(path: str, resize: Callable[[list[Any], int, int], Any], saved: list[Any], rank: int, ranks: int) -> Any:
    with named(path, "resize"):
        return resize(saved, rank, ranks)
