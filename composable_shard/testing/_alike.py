"""Results of collectives for one rank, if all other ranks are assumed to hold the same data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ShardConfigValueError
from ._collectives import Call, fill, values_of


def move_alike(call: Call, group_rank: int, ranks: int) -> None:
    """Fill the outputs of rank `group_rank` as if all ranks had its inputs; with zeros if the call has no inputs."""
    call.take_inputs()
    if not call.inputs:
        for out in call.outputs:
            out.data.zero_()
    elif call.outputs:
        values = values_of([call] * ranks, _combined)(group_rank)
        fill(call.outputs, [_fitted(value, out) for value, out in zip(values, call.outputs, strict=True)])


def _combined(parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """The reduction of identical tensors."""
    if op == dist.ReduceOp.SUM:
        return parts[0] * len(parts)
    if op == dist.ReduceOp.PRODUCT:
        return parts[0] ** len(parts)
    if any(op == same for same in _SAME):
        return parts[0]
    raise ShardConfigValueError(
        f"reduction {op.op}: not available with identical ranks; use SUM, AVG, PRODUCT, MIN, MAX, BAND or BOR"
    )


_SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR)


def _fitted(value: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Cut or pad `value` to the number of elements of `out`.

    If a peer is expected to send more elements than this rank, the additional elements are zeros.
    """
    if value.numel() == out.numel():
        return value
    common = min(value.numel(), out.numel())
    fitted = torch.zeros(out.numel(), dtype=value.dtype, device=value.device)
    fitted[:common] = value.reshape(-1)[:common]
    return fitted
