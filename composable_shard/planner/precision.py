"""Precisions by name: the dtypes of stored parameters, of compute and of reductions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._errors import ShardConfigValueError
from .._policies import MixedPrecisionPolicy


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of parameters.

    Attributes:
        name: for users.
        stored: as the optimizer has them.
        compute: in forward and backward.
        reduce: of gradients on their way.
    """

    name: str
    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The policy to shard with."""
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
    """The precision of a name.

    Raises:
        ShardConfigValueError: there is none.
    """
    if name not in PRECISIONS:
        raise ShardConfigValueError(f"precision: {name!r} is none of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
