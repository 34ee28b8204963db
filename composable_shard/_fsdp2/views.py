"""Base of the facades: attributes are computed when they are read, and most are read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from .._torch.distributed import TrainingState
from ..errors import ShardConfigAttributeError

_SETTERS = {
    "reduce_grads": "set_requires_gradient_sync",
    "all_reduce_grads": "set_requires_all_reduce",
    "reshard_after_backward": "set_reshard_after_backward",
    "post_forward_mesh_info": "set_reshard_after_forward",
    "gradient_divide_factor": "set_gradient_divide_factor",
    "reduce_scatter_unused_params": "set_reduce_scatter_unused_params",
    "reduce_scatter_max_input_buffers": "set_reduce_scatter_max_input_buffers",
    "force_sum_reduction_for_comms": "set_force_sum_reduction_for_comms",
    "unshard_in_backward": "set_unshard_in_backward",
    "_all_reduce_hook": "set_all_reduce_hook",
    "_all_gather_comm": "set_custom_all_gather",
    "_reduce_scatter_comm": "set_custom_reduce_scatter",
    "_states_to_forward_prefetch": "set_modules_to_forward_prefetch",
    "_states_to_backward_prefetch": "set_modules_to_backward_prefetch",
    "is_last_backward": "set_is_last_backward",
    "post_optim_event": "set_post_optim_event",
}


class View:
    """Base of the facades: attributes are read-only, except properties with a setter."""

    _title: ClassVar[str]  # name of torch's class
    _names: ClassVar[dict[str, Callable[[Any], Any]]] = {}  # torch's name -> a function that computes it from a facade

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)

    def __getattr__(self, name: str) -> Any:
        if (read := self._names.get(name)) is not None:
            return read(self)
        known = getattr(type(self), name, None)
        if isinstance(known, property):  # its getter has raised an AttributeError: raise that again
            return known.__get__(self)
        raise missing(self, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._names]

    def __setattr__(self, name: str, value: Any) -> None:
        known = getattr(type(self), name, None)
        if isinstance(known, property) and known.fset is not None:
            object.__setattr__(self, name, value)
            return
        use = f"; use the module's {_SETTERS[name]}" if name in _SETTERS else ""
        raise ShardConfigAttributeError(f"{self._title}.{name}: is read-only{use}")


def check_idle(value: Any) -> None:
    """Check the value to which code sets `_training_state`.

    Raises:
        ShardConfigAttributeError: it is not IDLE.
    """
    if value is not TrainingState.IDLE:
        raise ShardConfigAttributeError(f"_training_state: can only be set to TrainingState.IDLE, got {value}")


def uniform(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """The common dtype; None if they differ."""
    kinds = set(dtypes)
    return kinds.pop() if len(kinds) == 1 else None


def strides(size: torch.Size) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


def missing(view: View, name: str) -> ShardConfigAttributeError:
    """The error about an attribute that a facade does not have."""
    return ShardConfigAttributeError(
        f"{view._title} has no {name!r}: it only has attributes of torch's FSDP2 state that this library "
        "has as well; for other information see composable_shard.stats and last_record"
    )


def refuse_inherited(cls: type[View], base: type) -> None:
    """Hide the attributes that a facade inherits from a class of torch and does not define itself.

    Torch's methods would read state that our modules do not have.
    """
    for name in base.__dict__.keys() - {name for each in cls.__mro__[: cls.__mro__.index(base)] for name in vars(each)}:
        if not name.startswith("__"):
            setattr(cls, name, property(_refusal(name)))


def _refusal(name: str) -> Callable[[View], Any]:
    def refuse(view: View) -> Any:
        raise missing(view, name)

    return refuse
