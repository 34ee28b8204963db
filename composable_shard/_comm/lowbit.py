"""Gathers and reductions in fewer bits, which send rounded numbers (`rounding.py`).

They have the interfaces of `GatherCopies` and of a transport, so parameter groups, engines and graphs need no special
case for them. A rank sends a parcel of bytes (`_plan/parcel.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence, Set
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

    This rank's shards are rounded into a parcel, whose memory is kept. They are rounded for each gather, because
    hand-written optimizers and evaluations may change shards without increasing their versions. The parcels of all
    ranks are gathered into one buffer, and each part of it is converted back immediately. This rank's own parameters
    are rounded, too, so that all ranks compute with the same values.

    Args:
        layout: the layout of the gather, with a parcel.
        rank, transport, non_blocking: as for `GatherCopies`.
        like: a tensor of the compute dtype on the device.
    """

    def __init__(
        self, layout: GatherLayout, rank: int, transport: Transport | None, like: Tensor, non_blocking: bool
    ) -> None:
        super().__init__(layout, rank, transport, non_blocking=non_blocking)
        assert layout.parcel is not None
        self._parcel, self._like = layout.parcel, like
        self._sent: Tensor | None = None  # this rank's parcel, whose memory is kept

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
        for numbers in landing.numbers:
            _restore(numbers, wholes.packed, self.layout.places.params)

    def _rounded(self, shards: Sequence[Tensor]) -> Tensor:
        if self._sent is None:
            with torch.inference_mode(False):
                self._sent = self._like.new_zeros(self._parcel.nbytes, dtype=torch.uint8)
        for numbers in numbers_in(self._sent, self._parcel.parts, self._like.dtype):
            self._round(numbers, shards)
        return self._sent

    def _round(self, numbers: Numbers, shards: Sequence[Tensor]) -> None:
        """Round the shards of a part, with zeros behind shards that are shorter than the others."""
        params, members = self.layout.places.params, numbers.part.members
        places = [params[index] for index in members]
        rounds = numbers.scales is not None
        flat = numbers.flat()
        if rounds:
            flat = self._room(flat, places, {shards[index].dtype for index in members})
        to, given = [], []
        for index, at, piece in zip(members, places, torch.split(flat, [at.piece for at in places]), strict=True):
            shard = _by_row(shards[index], at.dim)
            if shard.numel():
                to.append(piece[: shard.numel()].view(shard.shape))
                given.append(shard)
        if to:
            torch._foreach_copy_(to, given, non_blocking=self._non_blocking)
        if rounds:
            numbers.put(flat.view(numbers.values.shape))

    def _room(self, flat: Tensor, places: Sequence[ParamLayout], dtypes: Set[torch.dtype]) -> Tensor:
        """Allocate memory for the values of shards of some dtypes, with zeros if not all of it will be filled."""
        is_full = all(at.rows_of(self._rank) == at.chunk for at in places)
        make = torch.empty if is_full else torch.zeros
        return make(flat.shape, dtype=_widest(dtypes), device=flat.device)


def gather_copies(
    layout: GatherLayout,
    rank: int,
    transport: Transport | None,
    pieces: Sequence[Tensor],
    offloads: bool,
    like: Tensor,
    streams: bool,
) -> GatherCopies:
    """Make the copies and the collective of a gather: in fewer bits if the layout has a parcel.

    Args:
        layout, rank, transport, like, streams: as for `GatherCopies`.
        pieces: the tensors that this rank sends. Those of another dtype, and those that are not contiguous, are copied
            before they are sent.
        offloads: whether the pieces are on the CPU, and are copied to the device first.
    """
    if layout.parcel is not None:
        return LowBitGather(layout, rank, transport, like, offloads)
    converted = [i for i, at in enumerate(pieces) if offloads or at.dtype != like.dtype or not at.is_contiguous()]
    return GatherCopies(layout, rank, transport, converted, offloads, like, streams)


def _by_row(piece: Tensor, dim: int) -> Tensor:
    return piece.movedim(dim, 0) if dim else piece


def _widest(dtypes: Set[torch.dtype]) -> torch.dtype:
    """Return the dtype that represents the numbers of all these dtypes."""
    return functools.reduce(torch.promote_types, dtypes)


def _restore(numbers: Numbers, wholes: Sequence[Tensor], params: Sequence[ParamLayout]) -> None:
    """Make the parameters of a part from the numbers of all ranks.

    Args:
        numbers: the numbers of all ranks.
        wholes: the memory of each parameter, (world, piece), or (world, *local shape) if it is sharded along a dim
            other than 0.
        params: their layouts.
    """
    members = numbers.part.members
    by_row = [_by_row_of_all(wholes[index], params[index].dim) for index in members]
    if len(members) == 1 and not params[members[0]].dim:
        numbers.fill(by_row[0].view(numbers.values.shape))
        return
    made = numbers.flat()
    if numbers.scales is not None:
        made = torch.empty(made.shape, dtype=by_row[0].dtype, device=made.device)
        numbers.fill(made.view(numbers.values.shape))
    sizes = [params[index].piece for index in members]
    if made.dtype == by_row[0].dtype and not any(params[index].dim for index in members):
        torch.split_with_sizes_copy(made, sizes, dim=-1, out=by_row)
        return
    pieces = zip(by_row, torch.split(made, sizes, -1), strict=True)
    torch._foreach_copy_(by_row, [piece.view(whole.shape) for whole, piece in pieces])


def _by_row_of_all(whole: Tensor, dim: int) -> Tensor:
    return whole.movedim(1 + dim, 1) if dim else whole


# ---- reductions


def _rows_of(pieces: Tensor, at: ParamLayout) -> Tensor:
    """View the padded pieces of a parameter in a bucket, (..., piece), as (..., rows, *rest)."""
    if at.dim == 0:
        return pieces
    lead = pieces.dim() - 1
    return pieces.view(*pieces.shape[:-1], *at.local_shape(0)).movedim(lead + at.dim, lead)


class _Chunks:
    """The positions of the members of parts in a chunk of a bucket. Members are the gradients, then the marks.

    Args:
        layout: the layout of the chunk.
    """

    def __init__(self, layout: ReduceLayout) -> None:
        self._params = layout.result.params
        self._begins = [*(at.offset for at in self._params), layout.result.numel]
        self._ends = [*(at.offset + at.piece for at in self._params), layout.numel]

    def _is_a_run(self, members: Sequence[int]) -> bool:
        """Whether the members are laid out in a chunk as they are in a parcel."""
        touch = all(self._ends[one] == self._begins[two] for one, two in itertools.pairwise(members))
        return (
            touch
            and not any(at.dim for at in map(self._params.__getitem__, members[:-1]))
            and not self._dim(members[-1])
        )

    def _dim(self, member: int) -> int:
        return self._params[member].dim if member < len(self._params) else 0

    def _views(self, chunks: Tensor, members: Sequence[int]) -> list[Tensor]:
        """Return for each member its rows, (..., rows, *rest), or its piece, (..., elements)."""
        pieces = [chunks[..., self._begins[index] : self._ends[index]] for index in members]
        return [
            _rows_of(piece, self._params[index]) if self._dim(index) else piece
            for index, piece in zip(members, pieces, strict=True)
        ]

    def cut(self, chunks: Tensor, numbers: Numbers) -> Tensor:
        """Return the members of a part in chunks, (..., chunk), in the shape of the part's values."""
        members = numbers.part.members
        if self._is_a_run(members):
            return chunks[..., self._begins[members[0]] : self._ends[members[-1]]].view(numbers.values.shape)
        flat = [each.reshape(*chunks.shape[:-1], -1) for each in self._views(chunks, members)]
        return torch.cat(flat, -1).view(numbers.values.shape)

    def set(self, chunk: Tensor, members: Sequence[int], values: Tensor) -> None:
        """Set the members of one chunk to values, (elements,)."""
        if self._is_a_run(members):
            chunk[self._begins[members[0]] : self._ends[members[-1]]].copy_(values)
            return
        views = self._views(chunk, members)
        pieces = zip(views, torch.split(values, [view.numel() for view in views]), strict=True)
        torch._foreach_copy_(views, [piece.view(view.shape) for view, piece in pieces])


def _add_up(out: Tensor, parcels: Tensor, parts: Sequence[Part], places: _Chunks) -> None:
    """Set a chunk to the sum, in rank order, of the numbers in parcels, (ranks, bytes)."""

    def together(numbers: Numbers) -> tuple[int, torch.dtype]:
        wide = not numbers.part.form and out.dtype.itemsize > 4
        return numbers.part.turn, out.dtype if wide else torch.float32

    for (_, dtype), turn in itertools.groupby(numbers_in(parcels, parts, out.dtype), key=together):
        _add_up_at_once(out, list(turn), dtype, places)


def _add_up_at_once(out: Tensor, every: Sequence[Numbers], dtype: torch.dtype, places: _Chunks) -> None:
    """Run `_add_up` for one turn. A separate call, so that its memory is freed before the next turn allocates."""
    sizes = [numbers.flat().shape[-1] for numbers in every]
    made = torch.empty((len(every[0].values), sum(sizes)), dtype=dtype, device=out.device)
    for numbers, columns in zip(every, torch.split(made, sizes, -1), strict=True):
        numbers.fill(columns.view(numbers.values.shape))
    total, *others = made.unbind()
    for other in others:
        total.add_(other)
    places.set(out, [index for numbers in every for index in numbers.part.members], total)


class _Around:
    """A transport that wraps another one and passes on the calls that it does not implement.

    Args:
        inner: the wrapped transport.
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
    """A reduce-scatter in fewer bits: an all-to-all of parcels, and a sum in float32 in rank order.

    Args:
        inner: sends the bytes.
        layout: the layout of the reduction, with a parcel.
        rounder: rounds the gradients.
    """

    def __init__(self, inner: Transport, layout: ReduceLayout, rounder: Rounder) -> None:
        super().__init__(inner, Route(inner.route.name, sums=True))
        assert layout.parcel is not None
        self._layout, self._parcel, self._rounder = layout, layout.parcel, rounder
        self._places = _Chunks(layout)

    def reduce_scatter(self, out: Tensor, bucket: Tensor, scratch: Tensor | None, mean: bool = False) -> Awaitable:
        assert scratch is not None
        world, parts = self._layout.result.world, self._parcel.parts
        sent, received = scratch.view(torch.uint8).view(2, world, self._parcel.nbytes)
        chunks = bucket.view(world, -1)
        to = numbers_in(sent, parts, bucket.dtype)
        self._rounder.put(to, [self._places.cut(chunks, numbers) for numbers in to])
        handle = self._inner.all_to_all(received.view(-1), sent.view(-1))
        return All([handle], partial(_add_up, out, received, parts, self._places), held=scratch)


class LowBitReplicas(_Around):
    """An all-reduce in fewer bits of a reduced chunk: each replica gathers the parcels of all and adds them up.

    Args:
        inner: sends the bytes.
        ranks: number of replicas.
        layout: the layout of the preceding reduce-scatter.
        parcel: the layout of the bytes that a replica sends.
        rounder: rounds the sums.
    """

    def __init__(self, inner: Transport, ranks: int, layout: ReduceLayout, parcel: Parcel, rounder: Rounder) -> None:
        super().__init__(inner, inner.route)
        self._ranks, self._parcel, self._rounder = ranks, parcel, rounder
        self._places = _Chunks(layout)

    def all_reduce(self, tensor: Tensor, mean: bool = False) -> Awaitable:
        parts, nbytes = self._parcel.parts, self._parcel.nbytes
        sent = tensor.new_empty(nbytes, dtype=torch.uint8)
        received = tensor.new_empty((self._ranks, nbytes), dtype=torch.uint8)
        to = numbers_in(sent, parts, tensor.dtype)
        self._rounder.put(to, [self._places.cut(tensor, numbers) for numbers in to])
        handle = self._inner.all_gather([received.view(-1)], [sent])
        return All([handle], partial(_add_up, tensor, received, parts, self._places), held=sent)


def between_nodes(
    transport: Transport, info: MeshInfo, layout: ReduceLayout, rounding: Rounding, name: str
) -> Transport:
    """Return the transport of a reduce-scatter over the outer axis: one in fewer bits if the layout has a parcel.

    Args:
        transport: the transport of that axis.
        info: the mesh.
        layout: the layout of that reduce-scatter.
        rounding: the rounding state of the group.
        name: the name of the bucket's first parameter.
    """
    if layout.parcel is None:
        return transport
    pieces = [at.piece for at in layout.result.params]
    return LowBitReduce(transport, layout, Rounder(rounding, f"{name} between nodes", pieces, info.mesh.get_rank()))


def compressed(
    transports: Transports,
    info: MeshInfo,
    layout: ReduceLayout,
    comm: CommPolicy,
    dtype: torch.dtype,
    rounding: Rounding,
    name: str,
) -> Transports:
    """Replace transports of a reduction with those in fewer bits, where the policy and the layout allow it.

    Args:
        transports, info: the transports and the mesh of the group.
        layout, dtype: the layout and the dtype of the bucket.
        comm: the policy.
        rounding: the rounding state of the group.
        name: the name of the bucket's first parameter.
    """
    if comm.reduce is None and comm.replicas is None:
        return transports
    how = [at.piece for at in layout.result.params], info.mesh.get_rank()
    reduce, replicate = transports.reduce, transports.replicate
    if reduce is not None and layout.parcel is not None:
        reduce = LowBitReduce(reduce, layout, Rounder(rounding, name, *how))
    between = layout.between_replicas(dtype.itemsize, comm.wire("replicas", dtype))
    if replicate is not None and between is not None and not info.shards_outer:  # then see `between_nodes`
        rounder = Rounder(rounding, f"{name} between replicas", *how)
        replicate = LowBitReplicas(replicate, info.replicate_size, layout, between, rounder)
    return replace(transports, reduce=reduce, replicate=replicate)
