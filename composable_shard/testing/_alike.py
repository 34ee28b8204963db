"""Collectives of ranks that all hold the same: what one of them gets, without the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._errors import ShardConfigValueError
from ._collectives import Call, fill, values_of


def move_alike(call: Call, group_rank: int, ranks: int) -> None:
    """Give the rank `group_rank` what it gets if all bring what it does; zeros if that is not known."""
    call.take_inputs()
    if not call.inputs:
        for out in call.outputs:
            out.data.zero_()
    elif call.outputs:
        values = values_of([call] * ranks, _combined)(group_rank)
        fill(call.outputs, [_fitted(value, out) for value, out in zip(values, call.outputs, strict=True)])


def _combined(parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """What ranks that hold the same have together."""
    if op == dist.ReduceOp.SUM:
        return parts[0] * len(parts)
    if op == dist.ReduceOp.PRODUCT:
        return parts[0] ** len(parts)
    if any(op == same for same in _SAME):
        return parts[0]
    raise ShardConfigValueError(f"alike ranks: reduce by SUM, AVG, PRODUCT, MIN, MAX, BAND or BOR, not by {op.op}")


_SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR)


def _fitted(value: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As many elements as `out` has: a rank that sends another number than this one is taken to send zeros behind."""
    if value.numel() == out.numel():
        return value
    common = min(value.numel(), out.numel())
    fitted = torch.zeros(out.numel(), dtype=value.dtype, device=value.device)
    fitted[:common] = value.reshape(-1)[:common]
    return fitted
