"""All-gather, reduce-scatter and all-reduce on tensors: they know no parameter and keep no state.

The eager form is a generator that launches and yields what must be waited for (see `_streams`); it calls the process
group's own methods. `Native` asks the backend for the collective itself. `RankOrdered` builds the same from
primitives that gloo has in a faster form: its own all-gather and reduce-scatter make a temporary of the full size at
every call, and beyond two ranks it adds in another order than that of the ranks, so that sums would not be equal, to
the bit, to those of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ._policies import Comms
from ._streams import Awaitable, Steps
from ._torch_distributed import (
    all_gather_options,
    all_reduce_options,
    all_to_all_options,
    backend_name,
    broadcast_options,
    reduce_scatter_options,
)

BROADCAST_FROM_BYTES = 512 * 1024
_AVERAGING = ("nccl", "xccl")  # backends that know a mean


class Transport(Protocol):
    """A way to move buckets within one process group. Every rank calls the same methods in the same order."""

    name: str
    averages: bool  # whether the reductions can give means instead of sums
    needs_scratch: bool  # whether `reduce_scatter` wants a scratch tensor of the size of the bucket
    direct: bool  # whether `all_gather_each` costs no more than one gather of all

    def all_gather(self, bucket: torch.Tensor, chunk: torch.Tensor) -> Steps[None]:
        """Fill `bucket`, `world` chunks, with every rank's `chunk`, which is this rank's part of `bucket`."""

    def all_gather_each(self, wholes: list[torch.Tensor], pieces: list[torch.Tensor]) -> Steps[None]:
        """Fill each of `wholes` with every rank's piece of it. All have one dtype; if `direct`, as one collective."""

    def reduce_scatter(
        self, out: torch.Tensor, bucket: torch.Tensor, scratch: torch.Tensor | None, mean: bool = False
    ) -> Steps[None]:
        """Set `out`, one chunk, to the sum over ranks of their part for this rank; may overwrite `bucket`.

        With `mean`, which only those can that average, to the mean.
        """

    def all_reduce(self, tensor: torch.Tensor, mean: bool = False) -> Steps[None]:
        """Set `tensor` to its sum (or mean) over ranks."""


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Process groups move and add real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _reals(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same for tensors of one dtype."""
    return [torch.view_as_real(tensor) for tensor in tensors] if tensors[0].is_complex() else tensors


class Native:
    """The backend's own collectives."""

    name = "packed"
    needs_scratch = False
    direct = True

    def __init__(self, group: dist.ProcessGroup, averages: bool) -> None:
        self.averages = averages
        self._group = group
        self._gather = all_gather_options()
        ops = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)  # by whether a mean is wanted
        self._scatter = [reduce_scatter_options(op) for op in ops]
        self._reduce = [all_reduce_options(op) for op in ops]

    def all_gather(self, bucket: torch.Tensor, chunk: torch.Tensor) -> Steps[None]:
        yield self._group._allgather_base(_real(bucket), _real(chunk), self._gather)

    def all_gather_each(self, wholes: list[torch.Tensor], pieces: list[torch.Tensor]) -> Steps[None]:
        yield self._group.allgather_into_tensor_coalesced(_reals(wholes), _reals(pieces), self._gather)

    def reduce_scatter(
        self, out: torch.Tensor, bucket: torch.Tensor, scratch: torch.Tensor | None, mean: bool = False
    ) -> Steps[None]:
        yield self._group._reduce_scatter_base(_real(out), _real(bucket), self._scatter[mean])

    def all_reduce(self, tensor: torch.Tensor, mean: bool = False) -> Steps[None]:
        yield self._group.allreduce([_real(tensor)], self._reduce[mean])


class _All:
    """Several handles as one."""

    __slots__ = ("_handles",)

    def __init__(self, handles: list[Awaitable]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


class RankOrdered:
    """For gloo: gathers by broadcast, reductions by all-to-all and a local sum in the order of the ranks."""

    name = "packed, rank order"
    averages = False
    needs_scratch = True
    direct = False  # gloo sends each on its own, and small ones cost as much as large ones

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._world = group.size()
        self._gather = all_gather_options()
        self._roots = [broadcast_options(rank) for rank in range(self._world)]
        self._exchange = all_to_all_options()

    def all_gather(self, bucket: torch.Tensor, chunk: torch.Tensor) -> Steps[None]:
        if bucket.nbytes < BROADCAST_FROM_BYTES:
            yield self._group._allgather_base(_real(bucket), _real(chunk), self._gather)
            return
        parts = _real(bucket).view(self._world, -1)
        yield _All([self._group.broadcast([parts[rank]], root) for rank, root in enumerate(self._roots)])

    def all_gather_each(self, wholes: list[torch.Tensor], pieces: list[torch.Tensor]) -> Steps[None]:
        for whole, piece in zip(wholes, pieces, strict=True):
            own = whole.view(self._world, -1)[self._group.rank()]
            own.copy_(piece.reshape(-1))
            yield from self.all_gather(whole.view(-1), own)

    def reduce_scatter(
        self, out: torch.Tensor, bucket: torch.Tensor, scratch: torch.Tensor | None, mean: bool = False
    ) -> Steps[None]:
        assert scratch is not None
        yield self._group.alltoall_base(_real(scratch), _real(bucket), [], [], self._exchange)
        parts = scratch.view(self._world, -1)
        torch.add(parts[0], parts[1], out=out)
        for rank in range(2, self._world):
            out.add_(parts[rank])

    def all_reduce(self, tensor: torch.Tensor, mean: bool = False) -> Steps[None]:
        chunk = -(-tensor.numel() // self._world)
        bucket = tensor.new_zeros(self._world * chunk)
        bucket[: tensor.numel()].copy_(tensor.view(-1))
        own = torch.empty_like(bucket[:chunk])
        yield from self.reduce_scatter(own, bucket, torch.empty_like(bucket), mean)
        place = bucket.view(self._world, chunk)[self._group.rank()]
        place.copy_(own)
        yield from self.all_gather(bucket, place)
        tensor.view(-1).copy_(bucket[: tensor.numel()])


class Custom:
    """A user's own communication around that of another transport.

    It moves packed buckets, in buffers that the user's objects allocate (torch's interfaces `AllGather` and
    `ReduceScatter`), so a bucket is copied there and back.
    """

    name = "custom"

    def __init__(self, inner: Transport, group: dist.ProcessGroup, comms: Comms) -> None:
        self._inner = inner
        self._group = group
        self._gather = comms.all_gather
        self._scatter = comms.reduce_scatter
        self.averages = inner.averages
        self.needs_scratch = inner.needs_scratch and self._scatter is None
        self.direct = inner.direct and self._gather is None

    def all_gather(self, bucket: torch.Tensor, chunk: torch.Tensor) -> Steps[None]:
        if self._gather is None:
            yield from self._inner.all_gather(bucket, chunk)
            return
        out = self._gather.allocate((bucket.numel(),), dtype=bucket.dtype, device=bucket.device)
        own = out.view(self._group.size(), -1)[self._group.rank()].copy_(chunk)
        yield from _called(self._gather(output_tensor=out, input_tensor=own, group=self._group, async_op=True))
        bucket.copy_(out)

    def all_gather_each(self, wholes: list[torch.Tensor], pieces: list[torch.Tensor]) -> Steps[None]:
        yield from self._inner.all_gather_each(wholes, pieces)

    def reduce_scatter(
        self, out: torch.Tensor, bucket: torch.Tensor, scratch: torch.Tensor | None, mean: bool = False
    ) -> Steps[None]:
        if self._scatter is None:
            yield from self._inner.reduce_scatter(out, bucket, scratch, mean)
            return
        to, frm = (self._scatter.allocate((t.numel(),), dtype=t.dtype, device=t.device) for t in (out, bucket))
        frm.copy_(bucket)
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        yield from _called(self._scatter(output_tensor=to, input_tensor=frm, group=self._group, op=op, async_op=True))
        out.copy_(to)

    def all_reduce(self, tensor: torch.Tensor, mean: bool = False) -> Steps[None]:
        yield from self._inner.all_reduce(tensor, mean)


def _called(handle: Awaitable | None) -> Steps[None]:
    """What a user's communication has returned: nothing, if it is done already."""
    if handle is not None:
        yield handle


def transport_for(group: dist.ProcessGroup, device: torch.device, comms: Comms | None = None) -> Transport:
    """The transport of a process group: `RankOrdered` on gloo, else `Native`; within `Custom`, if a user wants that."""
    name = backend_name(group, device)
    own: Transport = RankOrdered(group) if name == "gloo" else Native(group, averages=name in _AVERAGING)
    return own if comms is None else Custom(own, group, comms)


@dataclass(frozen=True)
class Transports:
    """The transports of a group; None where an axis has one rank only.

    Attributes:
        gather, reduce: of the shard axis.
        replicate: of the replicate axis.
        small: of the few ranks among which weights stay cut between forward and backward, if that is wanted.
    """

    gather: Transport | None
    reduce: Transport | None
    replicate: Transport | None
    small: Transport | None = None
