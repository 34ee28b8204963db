"""What an `owned` optimizer will hold and send, from shapes alone: no process group and no memory."""

from __future__ import annotations

import math
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
    routes: dict[str, tuple[Route, torch.dtype]] = {}
    for name, param in params.items():
        layout = _layout(param, world)
        regions = regions_of(name, param.shape, (blocks or {}).get(name))
        for key, (region, shape) in regions.items():
            routes[key] = Route.of(layout, region, shape, 0), param.dtype
    chosen = Owners(cost).assign([(route, True) for route, _ in routes.values()])
    names = list(routes)
    matrices = []
    for index, owner in chosen:
        route, dtype = routes[names[index]]
        stays = route.stays_at is not None
        like = torch.empty(route.shape, dtype=dtype, device="meta")
        matrices.append(Matrix(names[index], like, route.to(owner), stays, None))
    buckets = in_buckets(matrices, bucket_bytes)
    return Forecast(
        sent=tuple(sum(sent_by(rank, bucket) for bucket in buckets) for rank in range(world)),
        owned=tuple(tuple(m.route.shape for m in matrices if m.route.owner == rank) for rank in range(world)),
        owned_bytes=tuple(_held(matrices, rank) for rank in range(world)),
        buckets=sum(not bucket[0].stays for bucket in buckets),
        beside=tuple(_beside([bucket for bucket in buckets if not bucket[0].stays], rank) for rank in range(world)),
    )


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
    return sum(math.prod(m.route.shape) * m.dtype.itemsize for m in matrices if m.route.owner == rank)


def sent_by(rank: int, bucket: Sequence[Matrix]) -> int:
    """Bytes that a rank sends to others for a bucket: gradients and values there, values of its own matrices back."""
    there = 2 * sum(_parts(matrix, rank) for matrix in bucket if matrix.route.owner != rank)
    back = sum(matrix.nbytes - _parts(matrix, rank) for matrix in bucket if matrix.route.owner == rank)
    return 0 if bucket[0].stays else there + back


def _beside(buckets: Sequence[Sequence[Matrix]], rank: int) -> int:
    """Most bytes of a rank's buffers: of a bucket that is stepped, the next one on its way, and the one before.

    Each travels in a buffer as sent and one as received, this rank's own part included.
    """
    held = [2 * _held(bucket, rank) for bucket in buckets]  # values and gradients
    shards = [sum(_parts(matrix, rank) for matrix in bucket) for bucket in buckets]
    most = 0
    for index, whole in enumerate(held):
        coming = sum(2 * shards[at] + held[at] for at in (index + 1,) if at < len(held))
        going = sum(held[at] // 2 + shards[at] for at in (index - 1,) if at >= 0)
        arriving = 2 * whole  # as received, and put together
        most = max(most, arriving, whole + coming + going, whole + whole // 2 + shards[index] + coming)
    return most
