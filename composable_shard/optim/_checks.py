"""What optimizers must keep to that others call in parts."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Optimizer, Rprop, SparseAdam

from .._errors import ShardConfigStateError, ShardConfigTypeError

IN_PARTS: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that others step, a part of parameters at a time


def title_of(kind: Any) -> str:
    """The name of a class, or of that of an object."""
    return getattr(kind, "__name__", type(kind).__name__)


def check_steps_once(argument: str, made: Optimizer) -> None:
    """See that an optimizer's step calls no closure.

    Raises:
        ShardConfigTypeError: it needs one.
    """
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ShardConfigTypeError(
            f"{argument}: {title_of(made)} calls the closure several times in a step, and can only step all parameters "
            "at once; use it alone"
        )


def check_takes_dense(name: str, made: Optimizer) -> None:
    """See that an optimizer takes dense gradients, as those of sharded parameters are.

    Raises:
        ShardConfigTypeError: it takes sparse ones alone.
    """
    if isinstance(made, SparseAdam):
        raise ShardConfigTypeError(
            f"parameter {name}: {title_of(made)} takes sparse gradients alone, and that of a sharded parameter is "
            "dense; take Adam, or leave the parameter unsharded and give it to an optimizer of its own"
        )


def check_takes_parts(name: str, param: torch.Tensor, made: Optimizer) -> None:
    """See that an optimizer of torch can step the shards of a parameter, if it is sharded.

    Raises:
        ShardConfigTypeError: it takes means over all of a parameter, has operators that torch's DTensors do not have,
            or takes sparse gradients alone.
    """
    if not isinstance(param, DTensor):
        return
    check_takes_dense(name, made)
    if isinstance(made, (Adafactor, Rprop)):
        why = (
            "writes where a mask says, which no DTensor can"
            if isinstance(made, Rprop)
            else "takes means over all of it"
        )
        raise ShardConfigTypeError(
            f"parameter {name}: is sharded, and {title_of(made)} {why}; take cs.optim.owned(torch.optim."
            f"{title_of(made)}, model), which steps whole parameters behind backward"
        )


def check_unchanged(inner: Optimizer, group: Mapping[str, Any], given: Mapping[str, Any], name: str) -> None:
    """See that a step has left the options of a param group alone: others that have a part of it would not see it.

    Args:
        inner: the optimizer.
        group: its param group.
        given: what it was given as that.
        name: of a parameter, for the message.

    Raises:
        ShardConfigStateError: it has changed some, or keeps state of no parameter.
    """
    changed = [key for key, value in group.items() if key != "params" and value is not given.get(key)]
    strange = [str(key) for key in inner.state if isinstance(key, str)]
    if changed or strange:
        raise ShardConfigStateError(
            f"parameter {name}: {title_of(inner)} keeps {', '.join([*changed, *strange])} beside the state of "
            "parameters, and is stepped a part of them at a time; use an optimizer that keeps its state by parameter"
        )
