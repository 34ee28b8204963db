"""Check optimizers that `owned` and `in_backward` wrap, which step a part of the parameters at a time."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Optimizer, Rprop, SparseAdam

from ..errors import ShardConfigStateError, ShardConfigTypeError

IN_PARTS: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # wrapped optimizers, which step some parameters at a time


def title_of(kind: Any) -> str:
    """The name of a class, or of an object's class."""
    return getattr(kind, "__name__", type(kind).__name__)


def check_steps_once(argument: str, made: Optimizer) -> None:
    """Check that an optimizer's step needs no closure.

    Raises:
        ShardConfigTypeError: it needs a closure.
    """
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ShardConfigTypeError(
            f"{argument}: {title_of(made)} calls the closure several times in a step, so it can only step all "
            "parameters together; use it directly"
        )


def check_takes_dense(name: str, made: Optimizer) -> None:
    """Check that an optimizer accepts dense gradients. Gradients of sharded parameters are dense.

    Raises:
        ShardConfigTypeError: it accepts only sparse gradients.
    """
    if isinstance(made, SparseAdam):
        raise ShardConfigTypeError(
            f"parameter {name}: {title_of(made)} accepts only sparse gradients, but gradients of sharded parameters "
            "are dense; use Adam, or leave the parameter unsharded and use a separate optimizer for it"
        )


def check_takes_parts(name: str, param: torch.Tensor, made: Optimizer) -> None:
    """Check that an optimizer can step the shards of a parameter, if the parameter is sharded.

    Raises:
        ShardConfigTypeError: the optimizer computes means over the full parameter, uses an operator that DTensor does
            not support, or accepts only sparse gradients.
    """
    if not isinstance(param, DTensor):
        return
    check_takes_dense(name, made)
    if isinstance(made, (Adafactor, Rprop)):
        why = (
            "uses masked writes, which DTensor does not support"
            if isinstance(made, Rprop)
            else "computes means over the full parameter"
        )
        raise ShardConfigTypeError(
            f"parameter {name}: is sharded, but {title_of(made)} {why}; use cs.optim.owned(torch.optim."
            f"{title_of(made)}, model), which steps full parameters after backward"
        )


def check_unchanged(inner: Optimizer, group: Mapping[str, Any], given: Mapping[str, Any], name: str) -> None:
    """Check that a step has not changed the options of a param group. Steps of its other parameters would ignore it.

    Args:
        inner: the optimizer.
        group: its param group after the step.
        given: the param group before the step.
        name: name of a parameter, for the message.

    Raises:
        ShardConfigStateError: the step has changed options, or the optimizer has state of no parameter.
    """
    changed = [key for key, value in group.items() if key != "params" and value is not given.get(key)]
    strange = [str(key) for key in inner.state if isinstance(key, str)]
    if changed or strange:
        raise ShardConfigStateError(
            f"parameter {name}: {title_of(inner)} stores {', '.join([*changed, *strange])} outside of the state of "
            "parameters, but it steps only some parameters at a time; use an optimizer that stores its state by "
            "parameter"
        )
