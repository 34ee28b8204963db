"""The layout of parameters in a bucket, as integers.

A *bucket* is the data of one collective: `world` chunks of `numel` elements, one chunk per rank. Each parameter is
sharded along one dim (0 by default) into `world` pieces of `chunk` rows. As with `torch.chunk`, the last pieces may be
shorter or empty. The pieces of a parameter start at the same `offset` in each rank's chunk. They are padded to `chunk`
rows, so that all ranks send the same number of bytes. A dim other than 0 must divide evenly. With `Ragged`, shard
boundaries along dim 0 are multiples of a number of rows, and `chunk` is rounded up to such a multiple.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from .._policies import Wire
from .._torch.ragged import rows_of_chunk
from .parcel import SHARD_ALIGNMENT_BYTES, Parcel, parcel

T = TypeVar("T")

SLOT_ALIGNMENT_BYTES = 512


def slot_bytes(nbytes: int) -> int:
    """Size in bytes of a pool slot for `nbytes` bytes: a multiple of 512, at least 512."""
    return -(-max(nbytes, 1) // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """One parameter of a bucket. Counts are in elements unless stated otherwise.

    Attributes:
        shape: unsharded shape, with at least one dim.
        world: number of pieces.
        chunk: number of rows of a full piece: ``ceil(shape[dim] / world)``, or more with `Ragged`.
        row: elements per row.
        offset: offset of the piece in each rank's chunk.
        dim: the dim that is sharded. A row is one index of this dim.
    """

    shape: tuple[int, ...]
    world: int
    chunk: int
    row: int
    offset: int
    dim: int = 0

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return self.shape[self.dim] * self.row

    @property
    def piece(self) -> int:
        """Elements of one piece, including padding."""
        return self.chunk * self.row

    def rows_of(self, rank: int) -> int:
        """Number of rows that `rank` holds, without padding."""
        return max(0, min(self.chunk, self.shape[self.dim] - rank * self.chunk))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the piece that `rank` holds, without padding."""
        return (*self.shape[: self.dim], self.rows_of(rank), *self.shape[self.dim + 1 :])

    @property
    def even(self) -> bool:
        """Whether no piece needs padding."""
        return self.chunk * self.world == self.shape[self.dim]

    @property
    def full_pieces(self) -> int:
        """Number of ranks that hold a piece of `chunk` rows."""
        return self.world if self.chunk == 0 else self.shape[self.dim] // self.chunk

    @property
    def rest(self) -> int:
        """Elements of the shorter piece that follows the full pieces; 0 if there is none."""
        return self.numel - self.full_pieces * self.piece


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The parameters of a bucket. `numel` is the length of one rank's chunk in elements."""

    world: int
    params: tuple[ParamLayout, ...]
    numel: int

    @property
    def total(self) -> int:
        """Elements of the bucket, summed over ranks."""
        return self.world * self.numel

    @property
    def begins(self) -> list[int]:
        """Offset of each parameter in elements, in memory where the pieces of one parameter are contiguous."""
        return [self.world * param.offset for param in self.params]


def piece_numel(shape: tuple[int, ...], world: int, dim: int, rows: int = 1) -> int:
    """Elements of one padded piece of a parameter that is sharded along `dim` at multiples of `rows`."""
    return rows_of_chunk(shape[dim], world, rows) * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def first_alike(sizes: Sequence[int], world: int, rank: int, rows: Sequence[int] | None = None) -> int:
    """The first rank whose pieces have the same numbers of rows as the pieces of `rank`.

    Args:
        sizes: size of each parameter along its sharded dim.
        world: number of ranks.
        rank: the rank to compare with.
        rows: for each parameter, the number of rows whose multiples are shard boundaries; 1 if not given.
    """
    params = bucket_layout([(size,) for size in sizes], world, rows=rows).params

    def held(by: int) -> list[int]:
        return [param.rows_of(by) for param in params]

    return next(other for other in range(world) if other == rank or held(other) == held(rank))


def bucket_layout(
    shapes: Sequence[tuple[int, ...]],
    world: int,
    itemsize: int | None = None,
    dims: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> BucketLayout:
    """Lay out parameters consecutively.

    Args:
        shapes: unsharded shapes, each with at least one dim.
        world: number of ranks that share the bucket.
        itemsize: bytes per element, to align each piece to 16 bytes; None for no gaps.
        dims: the sharded dim of each parameter; 0 if not given.
        rows: for each parameter, the number of rows whose multiples are shard boundaries; 1 if not given.
    """
    align = 1 if itemsize is None else max(1, SHARD_ALIGNMENT_BYTES // itemsize)
    params, end = [], 0
    for shape, dim, block in zip(shapes, dims or [0] * len(shapes), rows or [1] * len(shapes), strict=True):
        offset = -(-end // align) * align
        chunk, row = rows_of_chunk(shape[dim], world, block), math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
        params.append(ParamLayout(tuple(shape), world, chunk, row, offset, dim))
        end = offset + chunk * row
    return BucketLayout(world, tuple(params), end)


@dataclass(frozen=True, slots=True)
class Route:
    """How a transport gathers and reduces parameters.

    Large parameters are gathered *alone*, directly into their memory. The others are packed into a buffer.

    Attributes:
        name: the transport's name.
        gather_from: a parameter is gathered alone if each rank's piece has at least this many bytes; None for never.
        sums: whether each rank receives the gradients of its peers in a buffer (`scratch`) and sums them itself.
    """

    name: str
    gather_from: int | None = None
    sums: bool = False


def _is_alone(param: ParamLayout, itemsize: int, least: int | None) -> bool:
    return least is not None and param.dim == 0 and param.piece > 0 and param.piece * itemsize >= least


@dataclass(frozen=True, slots=True)
class GatherLayout:
    """Where the parameters of one gather are stored, and which of them pass through a landing buffer.

    Attributes:
        places: the layout of all parameters in the slot. The pieces of one parameter are contiguous there (see
            `BucketLayout.begins`).
        alone: indices of the parameters that are gathered directly into the slot.
        packed: indices of the other parameters.
        landing: layout of the landing buffer for the packed parameters, from which they are copied to the slot. None if
            there is no landing buffer.
        nbytes: bytes of the slot. This includes space for the marks of the reduction, which may reuse the slot.
        landing_bytes: bytes of the landing buffer.
        parcel: what a rank sends if parameters are sent in fewer bits. All parameters then pass through the landing
            buffer, whose elements are bytes. None if they are sent in the dtype of the computation.
    """

    places: BucketLayout
    alone: tuple[int, ...]
    packed: tuple[int, ...]
    landing: BucketLayout | None
    nbytes: int
    landing_bytes: int
    parcel: Parcel | None = None

    def moved(self, itemsize: int) -> int:
        """Bytes that the gather moves, summed over ranks, including padding."""
        pieces = [self.places.params[i].piece for i in self.alone]
        return self.places.world * sum(pieces) * itemsize + self.landing_bytes


def gather_layout(
    shapes: Sequence[tuple[int, ...]],
    world: int,
    itemsize: int,
    dims: Sequence[int],
    route: Route | None,
    rows: Sequence[int] | None = None,
    wire: Wire | None = None,
) -> GatherLayout:
    """Lay out a gather of parameters of one dtype.

    Args:
        shapes, dims: unsharded shape and sharded dim of each parameter.
        world: number of ranks.
        itemsize: bytes per element.
        route: the transport's route; None if there is nothing to gather.
        rows: for each parameter, the number of rows whose multiples are shard boundaries; 1 if not given.
        wire: the format in which parameters are sent; None for their dtype.
    """
    places = bucket_layout(shapes, world, itemsize, dims, rows)
    nbytes = world * _with_marks(places.numel, len(shapes), itemsize) * itemsize
    sent = None if route is None else parcel([(at.chunk, at.row) for at in places.params], itemsize, wire, ranks=world)
    if sent is None:
        return _gather_as_it_is(places, nbytes, itemsize, route, rows)
    landing = BucketLayout(world, (), sent.nbytes)
    return GatherLayout(places, (), tuple(range(len(shapes))), landing, nbytes, landing.total, sent)


def _gather_as_it_is(
    places: BucketLayout, nbytes: int, itemsize: int, route: Route | None, rows: Sequence[int] | None
) -> GatherLayout:
    least = None if route is None else route.gather_from
    alone = [i for i, param in enumerate(places.params) if _is_alone(param, itemsize, least)]
    packed = sorted({*range(len(places.params))} - {*alone})
    if len(packed) == 1 and places.params[packed[0]].dim == 0:  # a buffer would have the same layout as the slot
        alone, packed = sorted(alone + packed), []
    if route is None or not packed:
        return GatherLayout(places, tuple(alone), tuple(packed), None, nbytes, 0)
    landing = places
    if alone:
        shapes, dims = zip(*[(places.params[i].shape, places.params[i].dim) for i in packed], strict=True)
        landing = bucket_layout(shapes, places.world, itemsize, dims, rows and _some(rows, packed))
    return GatherLayout(places, tuple(alone), tuple(packed), landing, nbytes, landing.total * itemsize)


def _some(values: Sequence[T], indices: Sequence[int]) -> list[T]:
    return [values[index] for index in indices]


@dataclass(frozen=True, slots=True)
class ReduceLayout:
    """The layout of a reduction of gradients: one bucket, in which each rank's chunk ends with a mark per gradient.

    A mark is 1 if the rank has the gradient, else 0. All transports use the same order, because the result is reduced
    again over replicas, which may use other transports.

    Attributes:
        result: layout of one rank's pieces, without gaps.
        numel: length of a chunk in elements, including marks. It is a multiple of 16 bytes, so that the chunks of all
            ranks are aligned. NCCL is slow with unaligned chunks.
        nbytes: bytes of the bucket's buffer; 0 if there is nothing to reduce.
        scratch: elements of the buffer for data from peers, if this rank sums it (`Route.sums`), else 0. With a parcel,
            the buffer also contains the data that this rank sends.
        moved: bytes that the reduction moves, summed over ranks.
        parcel: what a rank sends to each peer if gradients are sent in fewer bits, else None.
    """

    result: BucketLayout
    numel: int
    nbytes: int
    scratch: int
    moved: int = 0
    parcel: Parcel | None = None

    @property
    def marks(self) -> int:
        """Elements after the pieces: the marks, and padding to align the next chunk."""
        return self.numel - self.result.numel

    def between_replicas(self, itemsize: int, wire: Wire | None) -> Parcel | None:
        """What a replica sends in the format `wire`; None if it sends its chunk unchanged (`itemsize` bytes each)."""
        return parcel([(at.chunk, at.row) for at in self.result.params], itemsize, wire, self.marks)


def _with_marks(numel: int, marks: int, itemsize: int) -> int:
    """The length of a chunk of `numel` elements and `marks` marks, padded so that the next chunk is aligned."""
    align = max(1, SHARD_ALIGNMENT_BYTES // itemsize)
    return -(-(numel + marks) // align) * align


def reduce_layout(
    shapes: Sequence[tuple[int, ...]],
    world: int,
    itemsize: int,
    dims: Sequence[int],
    route: Route | None,
    slots: Sequence[int] = (),
    rows: Sequence[int] | None = None,
    wire: Wire | None = None,
) -> ReduceLayout:
    """Lay out a reduction of gradients of one dtype.

    Args:
        shapes, dims: unsharded shape and sharded dim of each gradient.
        world: number of ranks.
        itemsize: bytes per element.
        route: the transport's route; None if there is nothing to reduce.
        slots: bytes of the gather's slots. If a slot is larger than the bucket by at most 1/8, the bucket gets the
            slot's size, so that the two can share memory.
        rows: for each parameter, the number of rows whose multiples are shard boundaries; 1 if not given.
        wire: the format in which gradients are sent; None for their dtype.
    """
    result = bucket_layout(shapes, world, dims=dims, rows=rows)
    numel = _with_marks(result.numel, len(shapes), itemsize)
    if route is None:
        return ReduceLayout(result, numel, 0, 0)
    nbytes = world * numel * itemsize
    roomy = [slot for slot in slots if nbytes <= slot <= nbytes * 9 // 8]
    room = min(roomy, default=nbytes)
    sent = parcel([(at.chunk, at.row) for at in result.params], itemsize, wire, numel - result.numel, world)
    if sent is not None:
        return ReduceLayout(result, numel, room, 2 * world * sent.nbytes // itemsize, world * sent.nbytes, sent)
    return ReduceLayout(result, numel, room, world * numel if route.sums else 0, nbytes)
