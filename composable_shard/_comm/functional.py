"""The collectives of a traced graph: functions on tensors, made of torch's functional collectives.

Their results equal those of the eager transports to the bit (see `collectives.py`). The order of two summands does not
matter, so with two ranks the backend's own reductions serve; on gloo with more ranks, a reduction is an all-to-all and
a local sum in the order of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

import torch
import torch.distributed as dist

from .collectives import MOVED, transports_of

P = ParamSpec("P")
_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh, as a graph names it.

    Attributes:
        size: number of ranks.
        group: name of the process group.
        averages: whether the backend's reductions can give means instead of sums.
        ordered: whether a sum must be made in the order of the ranks.
    """

    size: int
    group: str
    averages: bool
    ordered: bool


def axis_of(group: dist.ProcessGroup | None, size: int, device: torch.device) -> Axis | None:
    """The axis of a process group; None for one rank."""
    if group is None or size == 1:
        return None
    transport = next(iter(transports_of(group, device).values()))
    return Axis(size, group.group_name, transport.averages, ordered=transport.route.sums and size > 2)


def _as_pairs(collective: Callable[Concatenate[torch.Tensor, P], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A collective of 1D tensors that moves complex numbers as pairs of real ones."""

    @functools.wraps(collective)
    def move(tensor: torch.Tensor, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        if not tensor.is_complex():
            return collective(tensor, *args, **kwargs)
        pairs = collective(torch.view_as_real(tensor).reshape(-1), *args, **kwargs)
        return torch.view_as_complex(pairs.view(-1, 2))

    return move


@_as_pairs
def all_gather(chunk: torch.Tensor, axis: Axis) -> torch.Tensor:
    """All ranks' chunks, one after the other: (n,) -> (size * n,)."""
    if chunk.dtype not in MOVED:
        return all_gather(chunk.view(torch.uint8), axis).view(chunk.dtype)
    return _wait(_ops.all_gather_into_tensor(chunk, axis.size, axis.group))


@_as_pairs
def reduce_scatter(bucket: torch.Tensor, axis: Axis, mean: bool) -> torch.Tensor:
    """The sum, or the mean, over all ranks' parts for this rank: (size * n,) -> (n,)."""
    if not axis.ordered:
        op = "avg" if mean else "sum"
        return _wait(_ops.reduce_scatter_tensor(bucket, op, axis.size, axis.group))
    sizes = [bucket.numel() // axis.size] * axis.size
    parts = _wait(_ops.all_to_all_single(bucket, sizes, sizes, axis.group)).view(axis.size, -1)
    total = parts[0] + parts[1]
    for rank in range(2, axis.size):
        total = total + parts[rank]
    return total


@_as_pairs
def all_reduce(tensor: torch.Tensor, axis: Axis, mean: bool) -> torch.Tensor:
    """The sum over ranks, or the mean, of a 1D tensor."""
    if not axis.ordered:
        return _wait(_ops.all_reduce(tensor, "avg" if mean else "sum", axis.group))
    missing = -tensor.numel() % axis.size
    own = reduce_scatter(torch.nn.functional.pad(tensor, [0, missing]), axis, mean)
    return all_gather(own, axis).narrow(0, 0, tensor.numel())


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = _ops.wait_tensor(tensor)
    return waited
