"""Precisions by name: the dtypes of stored parameters, of compute and of reductions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._policies import MixedPrecisionPolicy
from ..errors import ShardConfigValueError


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a training.

    Attributes:
        name: its name.
        stored: dtype of the sharded parameters, which the optimizer steps.
        compute: dtype of forward and backward.
        reduce: dtype of gradients in reductions.
    """

    name: str
    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The mixed-precision policy for sharding."""
        compute = None if self.compute == self.stored else self.compute
        reduce = None if self.reduce == self.compute else self.reduce
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


PRECISIONS = {
    each.name: each
    for each in (
        Precision("float32", torch.float32, torch.float32, torch.float32),
        Precision("bfloat16-mixed", torch.float32, torch.bfloat16, torch.float32),
        Precision("float16-mixed", torch.float32, torch.float16, torch.float32),
        Precision("bfloat16", torch.bfloat16, torch.bfloat16, torch.bfloat16),
    )
}


def precision_of(name: str) -> Precision:
    """Look up a precision by its name.

    Raises:
        ShardConfigValueError: there is no precision with this name.
    """
    if name not in PRECISIONS:
        raise ShardConfigValueError(f"precision: {name!r} is not one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
