"""Where each parameter lies in a bucket: integers only.

A *bucket* is what one collective moves: `world` chunks of `numel` elements, one per rank. Each parameter is cut along
one dim (0, if nobody asks for another) into `world` pieces of `chunk` rows (the last ones may be shorter or empty, as
`torch.chunk` cuts), and its piece of every rank starts at the same `offset` of that rank's chunk. Pieces are padded to
`chunk` rows, so that all ranks send equally much. Another dim than 0 must divide evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHARD_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """One parameter within a bucket; counts are in elements unless they say rows.

    Attributes:
        shape: the unsharded shape, at least one dim.
        world: number of pieces.
        chunk: rows of a full piece, ``ceil(shape[dim] / world)``.
        row: elements of one row.
        offset: where the piece starts in each rank's chunk.
        dim: the dim that is cut; what it counts are the rows.
    """

    shape: tuple[int, ...]
    world: int
    chunk: int
    row: int
    offset: int
    dim: int = 0

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.shape[self.dim] * self.row

    @property
    def piece(self) -> int:
        """Elements of one padded piece."""
        return self.chunk * self.row

    def rows_of(self, rank: int) -> int:
        """Rows that `rank` really holds."""
        return max(0, min(self.chunk, self.shape[self.dim] - rank * self.chunk))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the piece that `rank` really holds."""
        return (*self.shape[: self.dim], self.rows_of(rank), *self.shape[self.dim + 1 :])

    @property
    def even(self) -> bool:
        """Whether no piece needs padding."""
        return self.chunk * self.world == self.shape[self.dim]

    @property
    def full_pieces(self) -> int:
        """How many ranks hold a piece of `chunk` rows."""
        return self.world if self.chunk == 0 else self.shape[self.dim] // self.chunk

    @property
    def rest(self) -> int:
        """Elements of the one shorter piece that follows the full ones (0 if there is none)."""
        return self.numel - self.full_pieces * self.piece


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """All parameters of a bucket; `numel` is the length of one rank's chunk."""

    world: int
    params: tuple[ParamLayout, ...]
    numel: int

    @property
    def total(self) -> int:
        """Elements of the whole bucket, all ranks."""
        return self.world * self.numel

    @property
    def packs(self) -> bool:
        """Whether the gathered bucket must be copied apart: not if one piece a rank is already the parameter."""
        return self.world > 1 and (len(self.params) > 1 or self.params[0].dim > 0)


def goes_direct(layout: BucketLayout, casts: bool) -> bool:
    """Whether each parameter can be gathered from its shard straight into its place: not padded, cast or turned."""
    return not casts and all(param.even and param.piece and param.dim == 0 for param in layout.params)


def bucket_layout(
    shapes: Sequence[tuple[int, ...]], world: int, itemsize: int | None = None, dims: Sequence[int] | None = None
) -> BucketLayout:
    """Lay parameters of the given unsharded `shapes` one after the other.

    Args:
        shapes: unsharded shapes, each with at least one dim.
        world: number of ranks that share the bucket.
        itemsize: bytes of one element; each piece is then aligned to 16 bytes. Without it they follow closely.
        dims: the dim along which each is cut; 0 if not given.
    """
    align = 1 if itemsize is None else max(1, SHARD_ALIGNMENT_BYTES // itemsize)
    params, end = [], 0
    for shape, dim in zip(shapes, dims or [0] * len(shapes), strict=True):
        offset = -(-end // align) * align
        row = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
        layout = ParamLayout(tuple(shape), world, -(-shape[dim] // world), row, offset, dim)
        params.append(layout)
        end = offset + layout.piece
    return BucketLayout(world, tuple(params), end)
