"""Precisions by name: the dtypes of stored parameters, of compute, of linear layers and of reductions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .._policies import MixedPrecisionPolicy
from ..errors import ShardConfigValueError
from .linear import LinearFormat, linear_format_of


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a training.

    Attributes:
        name: its name.
        stored: dtype of the sharded parameters, which the optimizer steps.
        compute: dtype of forward and backward.
        reduce: dtype of gradients in reductions.
        linear: format of the matrix products of linear layers in blocks; None for `compute`.
    """

    name: str
    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    linear: LinearFormat | None = None

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


def precision_of(name: str, linear_format: str | None = None) -> Precision:
    """Look up a precision by its name, and the format of linear layers by its name.

    Raises:
        ShardConfigValueError: there is no precision or format with this name.
    """
    if name not in PRECISIONS:
        raise ShardConfigValueError(f"precision: {name!r} is not one of {', '.join(PRECISIONS)}")
    return replace(PRECISIONS[name], linear=linear_format_of(linear_format))
