"""Split parameters into matrices, assign an owner to each, and group them into buckets for communication."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .._plan.boxes import Box, whole_box
from .._torch.distributed import local_tensor, spec_of
from ..errors import ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from ._layout import Layout, Route, layout_of
from ._state import Sketch


@dataclass(frozen=True)
class Blocks:
    """Split a matrix into blocks of rows that are stepped as separate matrices, such as the heads of a fused QKV.

    Args:
        rows: number of rows of each block. Must divide the number of rows of the matrix.

    Raises:
        ShardConfigValueError: `rows` is not a positive int.
    """

    rows: int

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or isinstance(self.rows, bool) or self.rows < 1:
            raise ShardConfigValueError(f"Blocks: rows must be a positive int, got {self.rows!r}")


def newton_schulz_cost(shape: torch.Size) -> float:
    """Number of elements times the smaller dim: proportional to the FLOPs of the product of a matrix with itself."""
    return float(shape.numel() * (min(shape) if len(shape) > 1 else 1))


@dataclass(eq=False)
class Matrix:
    """A matrix that an optimizer steps as a whole.

    Attributes:
        name: name of its parameter, with an index if the parameter has several matrices.
        param: parameter that contains it.
        route: its owner, and the part that each rank holds.
        stays: whether one rank holds the full matrix, so that its owner steps it in place.
        whole: parameter of the owner's optimizer for this matrix. It has memory only during a step. None on other
            ranks.
        sketch: in shards mode, sketch of its state after the first step.
        kept: in shards mode, this rank's parts of its state, by path.
    """

    name: str
    param: torch.Tensor
    route: Route
    stays: bool
    whole: nn.Parameter | None
    sketch: Any = None
    kept: dict[Any, torch.Tensor | None] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameter."""
        return self.param.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the full matrix."""
        return self.route.region.numel * self.dtype.itemsize

    @property
    def steps_here(self) -> bool:
        """Whether this rank is its owner."""
        return self.whole is not None

    def keep(self, sketch: Any) -> None:
        """Set the sketch of its sharded state, and clear `kept`. None if it has no sharded state."""
        self.sketch = sketch
        self.kept.clear()

    def state_route(self, sketch: Sketch) -> Route:
        """The route of a state tensor in shards mode: the matrix's if shapes are equal, else evenly split rows."""
        if sketch.shape == self.route.shape:
            return self.route
        cut = self.route.layout.in_chunks(sketch.shape)
        return Route.of(cut, whole_box(sketch.shape), sketch.shape, self.route.owner)

    def value(self) -> torch.Tensor | None:
        """This rank's part of the matrix, as a view of the shard."""
        return self.route.in_shard(shard_of(self.param))

    def gradient(self) -> torch.Tensor | None:
        """This rank's part of its gradient, as a view.

        Raises:
            ShardConfigStateError: the gradient is not sharded like the parameter.
        """
        gradient = self.param.grad
        assert gradient is not None
        if isinstance(self.param, DTensor):
            fits = isinstance(gradient, DTensor) and spec_of(gradient).placements == spec_of(self.param).placements
        else:
            fits = not isinstance(gradient, DTensor) and not gradient.is_sparse
        if not fits or gradient.dtype != self.dtype:
            kind = "a DTensor" if isinstance(gradient, DTensor) else f"a {gradient.layout} tensor"
            raise ShardConfigStateError(
                f"parameter {self.name}: its gradient is {kind} of {gradient.dtype}, which does not match the "
                f"placements or the dtype {self.dtype} of the parameter; do not replace the gradients of backward"
            )
        return self.route.in_shard(shard_of(gradient))


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, or the tensor itself."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(frozen=True, eq=False)
class Bucket:
    """Matrices that are communicated together, or that are all stepped in place.

    Attributes:
        options: index of their param group.
        matrices: the matrices, each with an owner.
        layout: layout of one of them. All are sharded over the same ranks.
        stays: whether they are stepped in place.
        inner: optimizer of the matrices that this rank owns. None if it owns none.
        number: number of the bucket.
    """

    options: int
    matrices: tuple[Matrix, ...]
    layout: Layout
    stays: bool
    inner: torch.optim.Optimizer | None
    number: int

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group over which they are sharded."""
        return self.layout.group

    def stepped(self) -> list[Matrix]:
        """The matrices that have a gradient."""
        return [matrix for matrix in self.matrices if matrix.param.grad is not None]


class Owners:
    """Assigns owners so that the total cost is balanced over the ranks of each process group."""

    def __init__(self) -> None:
        self._loads: dict[dist.ProcessGroup | None, list[float]] = {}

    def assign(self, matrices: Sequence[tuple[Route, bool]]) -> list[tuple[int, int]]:
        """Assign owners. Returns index and owner of each matrix, in the order of assignment.

        If one rank holds a full matrix, it is the owner. The other matrices follow in order of decreasing cost, each to
        the rank with the lowest total cost.

        Args:
            matrices: route of each matrix (its owner is ignored), and whether the matrix is trained. An untrained
                matrix has no cost.
        """
        costs = [newton_schulz_cost(torch.Size(route.shape)) if trains else 0.0 for route, trains in matrices]
        order = sorted(range(len(matrices)), key=lambda index: (-costs[index], index))
        stay = [index for index in order if matrices[index][0].stays_at is not None]
        travel = [index for index in order if matrices[index][0].stays_at is None]
        chosen = []
        for index in (*stay, *travel):
            route = matrices[index][0]
            loads = self._loads.setdefault(route.layout.group, [0.0] * len(route.parts))
            owner = loads.index(min(loads)) if route.stays_at is None else route.stays_at
            loads[owner] += costs[index]
            chosen.append((index, owner))
        return chosen


def routes_of(name: str, param: torch.Tensor, blocks: Blocks | None) -> dict[str, Route]:
    """The routes of a parameter's matrices, by name: of a stack, of blocks of rows, or of the parameter itself.

    Raises:
        ShardConfigValueError: the blocks do not divide the rows, or the parameter is neither sharded nor replicated.
    """
    layout = layout_of(name, param)
    regions = regions_of(name, tuple(param.shape), blocks)
    return {key: Route.of(layout, region, shape, 0) for key, (region, shape) in regions.items()}


def regions_of(name: str, shape: tuple[int, ...], blocks: Blocks | None) -> dict[str, tuple[Box, tuple[int, ...]]]:
    """The box and the shape of each matrix of a parameter, by name.

    Raises:
        ShardConfigValueError: the blocks do not divide the rows.
    """
    step = _rows_of_a_matrix(name, shape, blocks)
    if len(shape) == 3:
        corners = itertools.product(range(shape[0]), range(0, shape[1], max(step, 1)))
        regions = [Box((index, begin, 0), (1, step, shape[2])) for index, begin in corners]
    elif len(shape) == 2 and step < shape[0]:
        regions = [Box((begin, 0), (step, shape[1])) for begin in range(0, shape[0], step)]
    else:
        return {name: (whole_box(shape), shape)}
    return {f"{name}[{i}]": (region, region.shape[-2:]) for i, region in enumerate(regions)}


def _rows_of_a_matrix(name: str, shape: tuple[int, ...], blocks: Blocks | None) -> int:
    """Number of rows of each matrix of a parameter; 0 if it has neither 2 nor 3 dims.

    Raises:
        ShardConfigValueError: the blocks do not divide the rows.
    """
    rows = shape[-2] if len(shape) in (2, 3) else 0
    if blocks is None:
        return rows
    if not rows or rows % blocks.rows:
        raise ShardConfigValueError(
            f"parameter {name}: has shape {shape}, which {blocks} does not split evenly; use blocks only for 2D or 3D "
            "parameters whose number of rows is a multiple of the block's rows"
        )
    return blocks.rows


def blocks_by_name(names: Sequence[str], given: Mapping[str, Blocks]) -> dict[str, Blocks]:
    """The blocks whose pattern matches, by parameter name.

    Raises:
        ShardConfigTypeError: a value is not a `Blocks`.
        ShardConfigValueError: a pattern matches no name.
    """
    blocks: dict[str, Blocks] = {}
    for pattern, each in given.items():
        if not isinstance(each, Blocks):
            raise ShardConfigTypeError(f"blocks: {pattern!r} is {each!r}; pass cs.optim.Blocks(rows)")
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ShardConfigValueError(f"blocks: no parameter matches {pattern!r}; some names: {', '.join(names[:5])}")
        blocks |= dict.fromkeys(matching, each)
    return blocks


def in_buckets(matrices: Sequence[Matrix], nbytes: int) -> list[list[Matrix]]:
    """Group matrices, in order, into buckets of at most `nbytes` bytes per owner. A larger matrix is allowed alone.

    Matrices of different process groups, dtypes or devices, and matrices that are stepped in place, are not mixed.
    """
    made: dict[tuple[Any, ...], list[list[Matrix]]] = {}
    for matrix in matrices:
        kind = (matrix.route.layout.group, matrix.dtype, matrix.route.layout.device, matrix.stays)
        buckets = made.setdefault(kind, [[]])
        bytes_of_owner = sum([each.nbytes for each in buckets[-1] if each.route.owner == matrix.route.owner])
        if buckets[-1] and not matrix.stays and bytes_of_owner + matrix.nbytes > nbytes:
            buckets.append([])
        buckets[-1].append(matrix)
    return [bucket for buckets in made.values() for bucket in buckets]
