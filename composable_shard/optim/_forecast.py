"""What an `owned` optimizer will hold and send, from shapes alone: no process group and no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from ._layout import Box, Layout, Route
from ._matrices import Blocks, Cost, Matrix, Owners, in_buckets, newton_schulz_cost, regions_of


class Sharded(NamedTuple):
    """A parameter that is cut along its first dim.

    Attributes:
        shape, dtype: of all of it.
        chunk: rows of the largest shard.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk: int


@dataclass(frozen=True)
class Forecast:
    """What the ranks of an `owned` optimizer do in a step, if all matrices have a gradient.

    Attributes:
        sent: bytes that each rank sends to others: gradients and values to the owners, values back. State that is kept
            as shards is not among them.
        owned: by rank, the shapes of the matrices that it steps.
        owned_bytes: bytes of these, which is what each tensor of state of their shape takes at that rank.
        buckets: number of exchanges in each direction.
        beside: most bytes of each rank's buffers in a step, with values and gradients of what it owns.
    """

    sent: tuple[int, ...]
    owned: tuple[tuple[tuple[int, ...], ...], ...]
    owned_bytes: tuple[int, ...]
    buckets: int
    beside: tuple[int, ...]

    def __str__(self) -> str:
        matrices = sum(map(len, self.owned))
        return (
            f"{matrices} matrices at {len(self.owned)} ranks, {self.buckets} exchanges each way; a rank owns "
            f"{max(self.owned_bytes):,} bytes of them at most, sends {max(self.sent):,} bytes in a step, and has "
            f"{max(self.beside):,} bytes of buffers"
        )


def forecast(
    params: Mapping[str, Sharded],
    world: int,
    *,
    blocks: Mapping[str, Blocks] | None = None,
    bucket_bytes: int = 64 << 20,
    cost: Cost = newton_schulz_cost,
) -> Forecast:
    """What `owned` will do with parameters that are cut over `world` ranks of one axis.

    Args:
        params: by name, in the order of the optimizer.
        world: how many ranks.
        blocks: by name.
        bucket_bytes, cost: as of `owned`.
    """
    matrices = _owned(params, world, blocks or {}, cost)
    buckets = in_buckets(matrices, bucket_bytes)
    travel = [bucket for bucket in buckets if not bucket[0].stays]
    ranks = range(world)
    return Forecast(
        sent=tuple(sum(sent_by(rank, bucket) for bucket in travel) for rank in ranks),
        owned=tuple(tuple(matrix.route.shape for matrix in _of(matrices, rank)) for rank in ranks),
        owned_bytes=tuple(_held(matrices, rank) for rank in ranks),
        buckets=len(travel),
        beside=tuple(_beside(travel, rank) for rank in ranks),
    )


def _owned(params: Mapping[str, Sharded], world: int, blocks: Mapping[str, Blocks], cost: Cost) -> list[Matrix]:
    """The matrices of the parameters with their owners, in the order of the optimizer."""
    routes: list[tuple[str, Route, torch.dtype]] = []
    for name, param in params.items():
        layout = _layout(param, world)
        regions = regions_of(name, param.shape, blocks.get(name))
        routes += [(key, Route.of(layout, region, shape, 0), param.dtype) for key, (region, shape) in regions.items()]
    chosen = Owners(cost).assign([(route, True) for _, route, _ in routes])
    return [_matrix(*routes[index], owner) for index, owner in chosen]


def _matrix(name: str, route: Route, dtype: torch.dtype, owner: int) -> Matrix:
    like = torch.empty(route.shape, dtype=dtype, device="meta")
    return Matrix(name, like, route.to(owner), route.stays_at is not None, None)


def _of(matrices: Sequence[Matrix], rank: int) -> list[Matrix]:
    return [matrix for matrix in matrices if matrix.route.owner == rank]


def _layout(param: Sharded, world: int) -> Layout:
    """As that of the parameter would be, seen by nobody in particular."""
    rest = param.shape[1:]
    begins = [min(param.chunk * rank, param.shape[0]) for rank in range(world + 1)]
    boxes = [Box((begin, *[0] * len(rest)), (end - begin, *rest)) for begin, end in pairwise(begins)]
    return Layout(torch.device("meta"), None, 0, tuple(boxes), None, ())


def _parts(matrix: Matrix, rank: int) -> int:
    """Bytes of what a rank holds of a matrix."""
    part = matrix.route.parts[rank]
    return 0 if part is None else part.numel * matrix.dtype.itemsize


def _held(matrices: Sequence[Matrix], rank: int) -> int:
    return sum(matrix.nbytes for matrix in _of(matrices, rank))


def sent_by(rank: int, bucket: Sequence[Matrix]) -> int:
    """Bytes that a rank sends to others for a bucket: gradients and values there, values of its own matrices back."""
    going = 2 * sum(_parts(matrix, rank) for matrix in bucket if matrix.route.owner != rank)
    back = sum(matrix.nbytes - _parts(matrix, rank) for matrix in bucket if matrix.route.owner == rank)
    return 0 if bucket[0].stays else going + back


def _beside(buckets: Sequence[Sequence[Matrix]], rank: int) -> int:
    """Most bytes of a rank's buffers: of a bucket that is stepped, the next one on its way, and the one before.

    Each travels in a buffer as sent and one as received, this rank's own part included.
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
