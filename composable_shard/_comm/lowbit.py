"""Collectives in fewer bits: the forms of a gather and of reductions that move rounded numbers (`rounding.py`).

They stand where the copies around a gather and where a transport stands, so that groups, engines and graphs do not know
of them. What a rank sends is a parcel of bytes (`_plan/parcel.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .._plan.layout import GatherLayout, ParamLayout, ReduceLayout, Route
from .._plan.parcel import Parcel, Part
from .._policies import CommPolicy
from .._torch.core import plainly
from .collectives import All, Tensors, Transport, Transports
from .copies import GatherCopies, Landing, Wholes
from .lanes import Awaitable, Steps
from .mesh import MeshInfo
from .rounding import Numbers, Rounder, Rounding, numbers_in

# ---- gathers


class LowBitGather(GatherCopies):
    """The gather of a bucket in fewer bits.

    This rank's shard is rounded into a parcel, which is kept; all ranks' parcels land in one buffer, and each parameter
    is made of them by one copy and one product. This rank's own weights are rounded, too, so that all ranks compute
    with the same.

    Args:
        layout: with a parcel.
        rank, transport, non_blocking: as of `GatherCopies`.
        like: of the dtype of compute, on the device.
    """

    def __init__(
        self, layout: GatherLayout, rank: int, transport: Transport, like: Tensor, non_blocking: bool = False
    ) -> None:
        super().__init__(layout, rank, transport, non_blocking=non_blocking)
        assert layout.parcel is not None
        self._parcel, self._like = layout.parcel, like
        self._sent: Tensor | None = None  # the parcel of this rank, once there was a gather
        self._own: list[Numbers] = []
        self._again = False

    def send_again(self) -> None:
        """The shards of the next gather are those of the last one: send what is there."""
        self._again = self._sent is not None

    def landing(self, buffer: Tensor) -> Landing:
        layout, dtype = self.layout.landing, self._like.dtype
        assert layout is not None
        with plainly():
            flat = buffer[: layout.total]
            chunks = flat.view(layout.world, layout.numel)
            numbers = numbers_in(chunks, self._parcel.parts, dtype)
            return Landing(flat, chunks, chunks[self._rank], [], [], numbers)

    def steps(self, wholes: Wholes, landing: Landing | None, shards: Sequence[Tensor]) -> Steps[None]:
        assert landing is not None
        assert self.transport is not None
        sent = self._rounded(shards)
        yield self.transport.all_gather([landing.flat], [sent])
        for numbers, whole, at in zip(landing.numbers, wholes.packed, self.layout.places.params, strict=True):
            _restore(numbers, whole, at)

    def _rounded(self, shards: Sequence[Tensor]) -> Tensor:
        again, self._again = self._again, False
        if again and self._sent is not None:
            return self._sent
        if self._sent is None:
            with torch.inference_mode(False):
                self._sent = self._like.new_zeros(self._parcel.nbytes, dtype=torch.uint8)
                whole = numbers_in(self._sent, self._parcel.parts, self._like.dtype)
                pairs = zip(whole, self.layout.places.params, strict=True)
                self._own = [numbers.narrowed(at.rows_of(self._rank) * at.row) for numbers, at in pairs]
        for numbers, shard, at in zip(self._own, shards, self.layout.places.params, strict=True):
            if shard.numel():
                at_hand = shard.to(self._like.device, non_blocking=self._non_blocking)
                numbers.put(_by_row(at_hand, at.dim).reshape(numbers.values.shape))
        return self._sent


def _by_row(piece: Tensor, dim: int) -> Tensor:
    return piece.movedim(dim, 0) if dim else piece


def _restore(numbers: Numbers, whole: Tensor, at: ParamLayout) -> None:
    """Make one parameter of all ranks' numbers: `whole` is (world, piece), or (world, *local shape) if `at.dim` > 0."""
    if at.dim == 0:
        numbers.fill(whole.view(numbers.values.shape))
        return
    made = torch.empty(numbers.values.shape, dtype=whole.dtype, device=whole.device)
    numbers.fill(made)
    by_row = whole.movedim(1 + at.dim, 1)
    by_row.copy_(made.view(by_row.shape))


# ---- reductions


def _rows_of(pieces: Tensor, at: ParamLayout) -> Tensor:
    """Padded pieces of a parameter in a bucket, (..., piece), as (..., rows, *rest): views."""
    if at.dim == 0:
        return pieces
    lead = pieces.dim() - 1
    return pieces.view(*pieces.shape[:-1], *at.local_shape(0)).movedim(lead + at.dim, lead)


def _cut(chunks: Tensor, layout: ReduceLayout, numbers: Sequence[Numbers]) -> list[Tensor]:
    """The gradients in chunks, (..., chunk), each in the shape of its numbers."""
    pairs = zip(layout.result.params, numbers, strict=True)
    return [
        _rows_of(chunks[..., at.offset : at.offset + at.piece], at).reshape(each.values.shape) for at, each in pairs
    ]


def _add_up(out: Tensor, parcels: Tensor, parts: Sequence[Part], layout: ReduceLayout) -> None:
    """Set a chunk to the sum of what parcels, (ranks, bytes), stand for, in the order of the ranks."""
    *gradients, marks = numbers_in(parcels, parts, out.dtype)
    for numbers, at in zip(gradients, layout.result.params, strict=True):
        piece = _rows_of(out[at.offset : at.offset + at.piece], at)
        piece.copy_(_sum_of(numbers, out.dtype).view(piece.shape))
    out[layout.result.numel :].copy_(_sum_of(marks, out.dtype))


def _sum_of(numbers: Numbers, dtype: torch.dtype) -> Tensor:
    ranks = numbers.values.shape[0]
    kind = dtype if not numbers.part.form and dtype.itemsize > 4 else torch.float32
    total, other = (torch.empty(numbers.values.shape[1:], dtype=kind, device=numbers.values.device) for _ in range(2))
    numbers.of(0).fill(total)
    for rank in range(1, ranks):
        numbers.of(rank).fill(other)
        total.add_(other)
    return total


class _Around:
    """A transport around another one, which moves what this one does not.

    Args:
        inner: the other one.
    """

    averages = False

    def __init__(self, inner: Transport, route: Route) -> None:
        self._inner, self.route = inner, route

    def all_gather(self, wholes: Tensors, pieces: Tensors) -> Awaitable:
        return self._inner.all_gather(wholes, pieces)

    def reduce_scatter(self, out: Tensor, bucket: Tensor, scratch: Tensor | None, mean: bool = False) -> Awaitable:
        return self._inner.reduce_scatter(out, bucket, scratch, mean)

    def all_reduce(self, tensor: Tensor, mean: bool = False) -> Awaitable:
        return self._inner.all_reduce(tensor, mean)

    def all_to_all(self, out: Tensor, bucket: Tensor) -> Awaitable:
        return self._inner.all_to_all(out, bucket)


class LowBitReduce(_Around):
    """A reduce-scatter in fewer bits: an all-to-all of parcels, and a sum in float32 in the order of the ranks.

    Args:
        inner: moves the bytes.
        layout: of the reduction, with a parcel.
        rounder: rounds the gradients.
    """

    def __init__(self, inner: Transport, layout: ReduceLayout, rounder: Rounder) -> None:
        super().__init__(inner, Route(inner.route.name, sums=True))
        assert layout.parcel is not None
        self._layout, self._parcel, self._rounder = layout, layout.parcel, rounder

    def reduce_scatter(self, out: Tensor, bucket: Tensor, scratch: Tensor | None, mean: bool = False) -> Awaitable:
        assert scratch is not None
        world, parts = self._layout.result.world, self._parcel.parts
        sent, received = scratch.view(torch.uint8).view(2, world, self._parcel.nbytes)
        chunks = bucket.view(world, -1)
        *to, marks = numbers_in(sent, parts, bucket.dtype)
        has = chunks[:, self._layout.result.numel :]
        marks.put(has)
        self._rounder.put(to, _cut(chunks, self._layout, to), has[0])
        handle = self._inner.all_to_all(received.view(-1), sent.view(-1))
        return All([handle], partial(_add_up, out, received, parts, self._layout), held=scratch)


class LowBitReplicas(_Around):
    """An all-reduce in fewer bits, of a reduced chunk between replicas: each gets the parcels of all, and adds them up.

    Args:
        inner: moves the bytes.
        ranks: number of replicas.
        layout: of the reduction before.
        parcel: what a replica sends.
        rounder: rounds the sums.
    """

    def __init__(self, inner: Transport, ranks: int, layout: ReduceLayout, parcel: Parcel, rounder: Rounder) -> None:
        super().__init__(inner, inner.route)
        self._ranks, self._layout, self._parcel, self._rounder = ranks, layout, parcel, rounder

    def all_reduce(self, tensor: Tensor, mean: bool = False) -> Awaitable:
        parts, nbytes = self._parcel.parts, self._parcel.nbytes
        sent = tensor.new_empty(nbytes, dtype=torch.uint8)
        received = tensor.new_empty((self._ranks, nbytes), dtype=torch.uint8)
        *to, marks = numbers_in(sent, parts, tensor.dtype)
        has = tensor[self._layout.result.numel :]
        marks.put(has)
        self._rounder.put(to, _cut(tensor, self._layout, to), has.clamp(max=1))
        handle = self._inner.all_gather([received.view(-1)], [sent])
        return All([handle], partial(_add_up, tensor, received, parts, self._layout), held=sent)


BETWEEN_REPLICAS = " between replicas"  # what stands behind the name of a parameter in `Rounding.left`


def compressed(
    transports: Transports,
    info: MeshInfo,
    layout: ReduceLayout,
    comm: CommPolicy,
    dtype: torch.dtype,
    rounding: Rounding,
    names: Sequence[str],
) -> Transports:
    """The transports of a reduction, with those in fewer bits where the policy wants them and the layout has a parcel.

    Args:
        transports, info: of the group.
        layout, dtype: of the bucket.
        comm: the policy.
        rounding: of the group.
        names: of the parameters.
    """
    how = info.mesh.get_rank(), comm.error_feedback
    reduce, replicate = transports.reduce, transports.replicate
    if reduce is not None and layout.parcel is not None:
        reduce = LowBitReduce(reduce, layout, Rounder(rounding, names, *how))
    between = layout.between_replicas(dtype.itemsize, comm.wire("replicas", dtype))
    if replicate is not None and between is not None:
        rounder = Rounder(rounding, [f"{name}{BETWEEN_REPLICAS}" for name in names], *how)
        replicate = LowBitReplicas(replicate, info.replicate_size, layout, between, rounder)
    return replace(transports, reduce=reduce, replicate=replicate)
