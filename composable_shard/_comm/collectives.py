"""Transports: implementations of the all-gather, reduce-scatter, all-reduce and all-to-all of a process group.

A transport works on tensors and has no notion of parameters. Each call launches a collective and returns a handle.
After `handle.wait()` the result is valid: on a CPU for the host, on an accelerator for all work queued on the stream
after the wait. The `route` of a transport tells which parameters are gathered alone, without a shared buffer:

    packed   none: one collective sends all parameters that share a buffer
    direct   all: coalesced gathers, each parameter straight into its memory
    p2p      on gloo: large ones, by sends and receives; the others are packed
    torch    none; calls the public functions of torch.distributed with the arguments of torch's FSDP2, so that code
             that patches or counts these functions sees the calls; used for unknown backends and for fake tensors

All transports pack gradients, so that autograd's own gradients can be freed while the collective runs.

gloo's own all-gather and reduce-scatter allocate a temporary of the full size in every call. With more than two ranks,
gloo also does not add in rank order, so its sums are not bitwise identical to those of one process. On gloo, every
transport except `torch` therefore uses other primitives and adds in rank order. Their results are bitwise identical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .._plan.layout import Route
from .._policies import Comms
from .._torch.distributed import (
    all_gather_options,
    all_reduce_options,
    all_to_all_options,
    backend_name,
    broadcast_options,
    is_native,
    public_all_gather,
    public_reduce_scatter,
    reduce_scatter_options,
)
from .lanes import Awaitable

BROADCAST_FROM_BYTES = 512 * 1024  # smaller buckets are faster with gloo's own all-gather
ALONE_FROM_BYTES = 64 * 1024  # for a smaller piece, one message costs as much as one message for all pieces
_AVERAGING = ("nccl", "xccl")  # backends whose reductions support ReduceOp.AVG
_ON_LANE = ("nccl",)  # backends that run a collective on the current stream if it is not asynchronous
PLAIN = "torch"  # the name of the transport that works with any process group
OWN = ("simulated", "fabric")  # backends of this library
_KNOWN = (*_AVERAGING, *OWN, "gloo", "fake")  # backends on which calls other than FSDP2's are known to work
_TAG = 0x5AD0_0000  # the first tag of our messages; far from the tags that users choose

_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)  # indexed by `mean`

Tensors = list[Tensor]


class Transport(Protocol):
    """Communicates tensors within one process group. Every rank calls the same methods in the same order."""

    route: Route
    averages: bool  # whether the reductions can return means instead of sums

    def all_gather(self, wholes: Tensors, pieces: Tensors) -> Awaitable:
        """Fill each of `wholes`, (world * n,), with all ranks' pieces of it, n elements each, contiguous.

        All tensors have one dtype. A piece may be a view of this rank's part of its whole. Several pairs are passed
        only if the route gathers parameters alone.
        """

    def reduce_scatter(self, out: Tensor, bucket: Tensor, scratch: Tensor | None, mean: bool = False) -> Awaitable:
        """Set `out`, (n,), to the sum over ranks of this rank's part of each `bucket`, (world * n,).

        With `mean`, which needs `averages`, the result is the mean. The bucket may be overwritten. If `route.sums` is
        set, `scratch` has the bucket's size.
        """

    def all_reduce(self, tensor: Tensor, mean: bool = False) -> Awaitable:
        """Set `tensor` to its sum (or mean) over the ranks."""

    def all_to_all(self, out: Tensor, bucket: Tensor) -> Awaitable:
        """Fill `out` with all ranks' parts for this rank, in rank order; both are (world * n,) in bytes."""


_flat = methodcaller("view", -1)


def _real(tensor: Tensor) -> Tensor:
    """View a complex tensor as real numbers, because process groups cannot add complex ones."""
    return torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor


# Dtypes that every backend sends. Gathers of other dtypes send bytes, which works because a gather adds nothing.
MOVED = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64)
)


def _movable(tensors: Tensors) -> Tensors:
    """View contiguous tensors of one dtype in a dtype that every backend sends."""
    return tensors if tensors[0].dtype in MOVED else [tensor.view(torch.uint8) for tensor in tensors]


class All:
    """Several handles as one. `rest` runs after them; `held` keeps the tensors that they read alive.

    Each handle is waited for only once, even after an error: a second wait for a message of gloo would never return.
    """

    __slots__ = ("_handles", "_held", "_rest")

    def __init__(
        self, handles: Sequence[Awaitable | None], rest: Callable[[], None] | None = None, held: object = None
    ) -> None:
        self._handles = handles
        self._rest = rest
        self._held = held

    def wait(self) -> None:
        handles, self._handles = self._handles, ()
        error: Exception | None = None
        for handle in handles:
            try:
                if handle is not None:
                    handle.wait()
            except Exception as caught:  # keep waiting for the others, which still use their memory; not if interrupted
                error = error or caught
        if error is not None:
            raise error
        rest, self._rest = self._rest, None
        if rest is not None:
            rest()


_DONE = All(())


class Plain:
    """The public functions of `torch.distributed`, looked up at each call, with the arguments of torch's FSDP2."""

    route = Route(PLAIN)

    def __init__(self, group: dist.ProcessGroup, averages: bool) -> None:
        self.averages = averages
        self._group = group

    def all_gather(self, wholes: Tensors, pieces: Tensors) -> Awaitable:
        (whole,), (piece,) = _movable(wholes), _movable([piece.view(-1) for piece in pieces])
        return public_all_gather(whole, piece, self._group) or _DONE

    def reduce_scatter(self, out: Tensor, bucket: Tensor, scratch: Tensor | None, mean: bool = False) -> Awaitable:
        return public_reduce_scatter(_real(out), _real(bucket), self._group, _OPS[mean]) or _DONE

    def all_reduce(self, tensor: Tensor, mean: bool = False) -> Awaitable:
        return dist.all_reduce(_real(tensor), group=self._group, op=_OPS[mean], async_op=True) or _DONE

    def all_to_all(self, out: Tensor, bucket: Tensor) -> Awaitable:
        return dist.all_to_all_single(out, bucket, group=self._group, async_op=True) or _DONE


class Packed:
    """The backend's own collectives.

    Args:
        group: the process group.
        averages: whether its reductions can return means.
        on_lane: whether collectives run on the lane's own stream, with that stream's priority. If not, all collectives
            of the group share one stream of the backend, on which a gather queues behind a reduction, as in torch's
            FSDP2.
    """

    route = Route("packed")

    def __init__(self, group: dist.ProcessGroup, averages: bool = False, on_lane: bool = False) -> None:
        self.averages = averages
        self._group = group
        self._gather = all_gather_options(not on_lane)
        self._scatter = [reduce_scatter_options(op, not on_lane) for op in _OPS]
        self._reduce = [all_reduce_options(op, not on_lane) for op in _OPS]
        self._exchange = all_to_all_options(not on_lane)

    def all_gather(self, wholes: Tensors, pieces: Tensors) -> Awaitable:
        (whole,), (piece,) = _movable(wholes), _movable(pieces)
        return self._group._allgather_base(whole, piece, self._gather) or _DONE

    def reduce_scatter(self, out: Tensor, bucket: Tensor, scratch: Tensor | None, mean: bool = False) -> Awaitable:
        if bucket.dtype.is_complex:
            out, bucket = _real(out), _real(bucket)
        return self._group._reduce_scatter_base(out, bucket, self._scatter[mean]) or _DONE

    def all_reduce(self, tensor: Tensor, mean: bool = False) -> Awaitable:
        return self._group.allreduce([_real(tensor)], self._reduce[mean]) or _DONE

    def all_to_all(self, out: Tensor, bucket: Tensor) -> Awaitable:
        return self._group.alltoall_base(out, bucket, [], [], self._exchange) or _DONE


class Direct(Packed):
    """`Packed`, except that gathers are coalesced: each parameter is gathered straight into its memory."""

    route = Route("direct", gather_from=0)
    flattens = False  # whether the backend accepts flat pieces only

    def all_gather(self, wholes: Tensors, pieces: Tensors) -> Awaitable:
        if self.flattens:
            pieces = list(map(_flat, pieces))
        if wholes[0].dtype not in MOVED:
            wholes, pieces = _movable(wholes), _movable(pieces)
        return self._group.allgather_into_tensor_coalesced(wholes, pieces, self._gather) or _DONE


class OfFakeGroup(Direct):
    """`Direct` for torch's fake process group."""

    flattens = True


class RankOrdered:
    """For gloo: gathers by broadcast; reductions by all-to-all and a local sum in rank order."""

    route = Route("packed", sums=True)
    averages = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._world = group.size()
        self._rank = group.rank()
        self._others = [(self._rank + by) % self._world for by in range(1, self._world)]
        self._gather = all_gather_options()
        self._roots = [broadcast_options(rank) for rank in range(self._world)]
        self._exchange = all_to_all_options()

    def all_gather(self, wholes: Tensors, pieces: Tensors) -> Awaitable:
        handles: list[Awaitable] = []
        for index, (whole, piece) in enumerate(zip(_movable(wholes), _movable(pieces), strict=True)):
            handles += self._gather_one(index, whole, piece)
        return All(handles)

    def _gather_one(self, index: int, whole: Tensor, piece: Tensor) -> list[Awaitable]:
        """Launch the gather of one tensor, the one at `index` among those of the call."""
        if whole.nbytes < BROADCAST_FROM_BYTES:
            return [self._flat_gather(whole, piece)]
        parts = self._with_own(whole, piece)
        return [self._group.broadcast([parts[rank]], root) for rank, root in enumerate(self._roots)]

    def _flat_gather(self, whole: Tensor, piece: Tensor) -> Awaitable:
        return self._group._allgather_base(whole, piece.reshape(-1, *whole.shape[1:]), self._gather)

    def _with_own(self, whole: Tensor, piece: Tensor) -> Tensor:
        """Return `whole` as (world, n), with this rank's piece copied into its row."""
        parts = whole.view(self._world, -1)
        own = parts[self._rank]
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece.view(-1))
        return parts

    def reduce_scatter(self, out: Tensor, bucket: Tensor, scratch: Tensor | None, mean: bool = False) -> Awaitable:
        assert scratch is not None
        handle = self._group.alltoall_base(_real(scratch), _real(bucket), [], [], self._exchange)
        return All([handle], partial(_add_up, out, scratch.view(self._world, -1)))

    def all_reduce(self, tensor: Tensor, mean: bool = False) -> Awaitable:
        flat = _real(tensor).view(-1)
        chunk = max(1, -(-flat.numel() // self._world))
        parts = list(torch.split(flat, chunk))  # parts of the last ranks may be smaller or missing
        parts += [flat[:0]] * (self._world - len(parts))
        own, sizes = parts[self._rank], [part.numel() for part in parts]
        scratch = flat.new_empty(self._world, own.numel())
        received = [own.numel()] * self._world
        handle = self._group.alltoall_base(scratch.view(-1), flat, received, sizes, self._exchange)
        return All([handle], partial(self._share_sum, flat, parts, scratch))

    def all_to_all(self, out: Tensor, bucket: Tensor) -> Awaitable:
        return self._group.alltoall_base(out, bucket, [], [], self._exchange)

    def _share_sum(self, flat: Tensor, parts: Tensors, scratch: Tensor) -> None:
        """Add up all ranks' values of this rank's part of a tensor, and fill the other parts with the peers' sums."""
        own = parts[self._rank]
        _add_up(own, scratch)
        if flat.nbytes >= BROADCAST_FROM_BYTES:
            roots = zip(parts, self._roots, strict=True)
            All([self._group.broadcast([part], root) for part, root in roots if part.numel()]).wait()
            return
        padded = flat.new_zeros(self._world, parts[0].numel())
        padded[self._rank, : own.numel()] = own
        self._flat_gather(padded, padded[self._rank].clone()).wait()
        flat.copy_(padded.view(-1)[: flat.numel()])


class PointToPoint(RankOrdered):
    """`RankOrdered`, but large parameters are sent and received from shards to unsharded memory without a buffer.

    Gradients are packed. Sending them from their own memory would be faster still, but that memory is autograd's:
    other code may hold the gradients and write to them while they are sent.
    """

    route = Route("p2p", gather_from=ALONE_FROM_BYTES, sums=True)

    def _gather_one(self, index: int, whole: Tensor, piece: Tensor) -> list[Awaitable]:
        if piece.nbytes < ALONE_FROM_BYTES:
            return [self._flat_gather(whole, piece)]
        parts, tag = self._with_own(whole, piece), _TAG + index
        received = [self._group.recv([parts[rank]], rank, tag) for rank in self._others]
        return [*received, *[self._group.send([piece], rank, tag) for rank in self._others]]


def _add_up(out: Tensor, parts: Tensor) -> None:
    """Set `out` to the sum of the rows of `parts`, added in order."""
    torch.add(parts[0], parts[1], out=out)
    for rank in range(2, parts.shape[0]):
        out.add_(parts[rank])


class Custom:
    """A user's own communication, with an inner transport for the collectives that the user has not replaced.

    Buckets are packed. The user's objects (torch's interfaces `AllGather` and `ReduceScatter`) allocate their own
    buffers, so each bucket is copied into such a buffer and back.
    """

    def __init__(self, inner: Transport, group: dist.ProcessGroup, comms: Comms) -> None:
        self._inner = inner
        self._group = group
        self._gather = comms.all_gather
        self._scatter = comms.reduce_scatter
        self.averages = inner.averages
        was = inner.route
        self.route = Route(
            "custom",
            gather_from=was.gather_from if self._gather is None else None,
            sums=was.sums and self._scatter is None,
        )

    def all_gather(self, wholes: Tensors, pieces: Tensors) -> Awaitable:
        if self._gather is None:
            return self._inner.all_gather(wholes, pieces)
        (whole,), (piece,) = wholes, pieces
        out = self._gather.allocate((whole.numel(),), dtype=whole.dtype, device=whole.device)
        own = out.view(self._group.size(), -1)[self._group.rank()].copy_(piece.view(-1))
        handle = self._gather(output_tensor=out, input_tensor=own, group=self._group, async_op=True)
        return All([handle], partial(_copy, whole, out), held=own)

    def reduce_scatter(self, out: Tensor, bucket: Tensor, scratch: Tensor | None, mean: bool = False) -> Awaitable:
        if self._scatter is None:
            return self._inner.reduce_scatter(out, bucket, scratch, mean)
        to, frm = (self._scatter.allocate((t.numel(),), dtype=t.dtype, device=t.device) for t in (out, bucket))
        frm.copy_(bucket)
        handle = self._scatter(output_tensor=to, input_tensor=frm, group=self._group, op=_OPS[mean], async_op=True)
        return All([handle], partial(_copy, out, to), held=frm)

    def all_reduce(self, tensor: Tensor, mean: bool = False) -> Awaitable:
        return self._inner.all_reduce(tensor, mean)

    def all_to_all(self, out: Tensor, bucket: Tensor) -> Awaitable:
        return self._inner.all_to_all(out, bucket)


def _copy(to: Tensor, frm: Tensor) -> None:
    to.view(-1).copy_(frm)


def transports_of(
    group: dist.ProcessGroup, device: torch.device, given: dist.ProcessGroup | None = None
) -> dict[str, Transport]:
    """Return the transports of a process group by name; the first is the default.

    Args:
        group: the process group.
        device: the device of the tensors.
        given: the user's process group that `group` replaces. Calls to torch's public functions use it, because
            user code may watch for them.
    """
    name = backend_name(group, device)
    plain = Plain(given or group, averages=device.type != "mtia")  # mtia supports sums only
    made: list[Transport]
    if name not in _KNOWN or not (is_native(group) or name in OWN):
        # The other transports are for users who know that they work and name one.
        made = [plain, *(each(group, name in _AVERAGING) for each in (Direct, Packed))]
    elif name == "gloo":
        made = [RankOrdered(group), plain]
        if device.type == "cpu":  # gloo cannot send device memory
            made.insert(1, PointToPoint(group))
    elif name == "fake":
        made = [OfFakeGroup(group), Packed(group), plain]
    else:
        how = name in _AVERAGING, name in _ON_LANE
        made = [Direct(group, *how), Packed(group, *how), plain]
    return {transport.route.name: transport for transport in made}


@dataclass(frozen=True)
class Transports:
    """The transports of a parameter group; None where an axis has only one rank.

    Attributes:
        gather, reduce: the transports of the shard axis.
        replicate: the transport of the replicate axis.
        small: the transport among the few ranks that share the parameters between forward and backward
            (`reshard_after_forward` as an integer), if requested.
    """

    gather: Transport | None
    reduce: Transport | None
    replicate: Transport | None
    small: Transport | None = None
