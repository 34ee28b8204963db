"""Forecast the memory and communication of an `owned` optimizer from shapes, without process group or memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._plan.boxes import chunks_of, whole_box
from ._layout import Layout, Route
from ._matrices import Blocks, Matrix, Owners, in_buckets, regions_of


class Sharded(NamedTuple):
    """A parameter that is sharded along its first dim.

    Attributes:
        shape, dtype: shape and dtype of the full parameter.
        chunk: number of rows of the largest shard.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk: int


@dataclass(frozen=True)
class Forecast:
    """Forecast of a step of an `owned` optimizer in which all matrices have a gradient.

    Attributes:
        sent: bytes that each rank sends to other ranks: gradients and values to the owners, and values back. Without
            sharded optimizer state (``state="shards"``).
        owned: shapes of the matrices that each rank owns.
        owned_bytes: bytes of the matrices that each rank owns. Each state tensor of their shape needs as many.
        buckets: number of exchanges in each direction.
        buffer_bytes: peak bytes of each rank's buffers in a step, including values and gradients of its matrices.
    """

    sent: tuple[int, ...]
    owned: tuple[tuple[tuple[int, ...], ...], ...]
    owned_bytes: tuple[int, ...]
    buckets: int
    buffer_bytes: tuple[int, ...]

    def __str__(self) -> str:
        matrices = sum(map(len, self.owned))
        return (
            f"{matrices} matrices on {len(self.owned)} ranks, {self.buckets} exchanges in each direction; at most, a "
            f"rank owns {max(self.owned_bytes):,} bytes of matrices, sends {max(self.sent):,} bytes in a step, and has "
            f"{max(self.buffer_bytes):,} bytes of buffers"
        )


def forecast(
    params: Mapping[str, Sharded],
    world: int,
    *,
    blocks: Mapping[str, Blocks] | None = None,
    bucket_bytes: int = 64 << 20,
) -> Forecast:
    """Forecast a step of `owned` with parameters that are sharded over `world` ranks of one mesh axis.

    Args:
        params: parameters by name, in the order of the optimizer.
        world: number of ranks.
        blocks: blocks by name of the parameter.
        bucket_bytes: as in `owned`.
    """
    matrices = _owned(params, world, blocks or {})
    buckets = in_buckets(matrices, bucket_bytes)
    travel = [bucket for bucket in buckets if not bucket[0].stays]
    ranks = range(world)
    return Forecast(
        sent=tuple(sum(_sent(rank, bucket) for bucket in travel) for rank in ranks),
        owned=tuple(tuple(matrix.route.shape for matrix in _of(matrices, rank)) for rank in ranks),
        owned_bytes=tuple(_held(matrices, rank) for rank in ranks),
        buckets=len(travel),
        buffer_bytes=tuple(_beside(travel, rank) for rank in ranks),
    )


def _owned(params: Mapping[str, Sharded], world: int, blocks: Mapping[str, Blocks]) -> list[Matrix]:
    """The matrices of the parameters with their owners, in the order of the optimizer."""
    routes: list[tuple[str, Route, torch.dtype]] = []
    for name, param in params.items():
        layout = _layout(param, world)
        regions = regions_of(name, param.shape, blocks.get(name))
        routes += [(key, Route.of(layout, region, shape, 0), param.dtype) for key, (region, shape) in regions.items()]
    chosen = Owners().assign([(route, True) for _, route, _ in routes])
    return [_matrix(*routes[index], owner) for index, owner in chosen]


def _matrix(name: str, route: Route, dtype: torch.dtype, owner: int) -> Matrix:
    like = torch.empty(route.shape, dtype=dtype, device="meta")
    return Matrix(name, like, route.to(owner), route.stays_at is not None, None)


def _of(matrices: Sequence[Matrix], rank: int) -> list[Matrix]:
    return [matrix for matrix in matrices if matrix.route.owner == rank]


def _layout(param: Sharded, world: int) -> Layout:
    """The layout of a parameter, without a process group and as rank 0."""
    boxes = chunks_of(whole_box(param.shape), world, rows=param.chunk or 1)
    return Layout(torch.device("meta"), None, 0, boxes, None, ())


def _parts(matrix: Matrix, rank: int) -> int:
    """Bytes of the part of a matrix that a rank holds."""
    part = matrix.route.parts[rank]
    return 0 if part is None else part.numel * matrix.dtype.itemsize


def _held(matrices: Sequence[Matrix], rank: int) -> int:
    return sum(matrix.nbytes for matrix in _of(matrices, rank))


def _sent(rank: int, bucket: Sequence[Matrix]) -> int:
    """Bytes that a rank sends for a bucket: gradients and values to owners, and values of its own matrices back."""
    going = 2 * sum(_parts(matrix, rank) for matrix in bucket if matrix.route.owner != rank)
    back = sum(matrix.nbytes - _parts(matrix, rank) for matrix in bucket if matrix.route.owner == rank)
    return going + back


def _beside(buckets: Sequence[Sequence[Matrix]], rank: int) -> int:
    """Peak bytes of a rank's buffers: for the current bucket, the next one in transfer, and the previous one.

    Each transfer has a send buffer and a receive buffer. Both include this rank's own part.
    """
    held = [2 * _held(bucket, rank) for bucket in buckets]  # values and gradients
    shards = [sum(_parts(matrix, rank) for matrix in bucket) for bucket in buckets]
    most = 0
    for index, whole in enumerate(held):
        following, before = held[index + 1 : index + 2], held[max(index - 1, 0) : index]
        coming = 2 * sum(shards[index + 1 : index + 2]) + sum(following)
        going = sum(before) // 2 + sum(shards[max(index - 1, 0) : index])
        most = max(most, 2 * whole, whole + coming + going, whole + whole // 2 + shards[index] + coming)
    return most
