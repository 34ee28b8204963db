"""Parameters as matrices: each has an owner, and they travel in buckets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .._errors import ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from .._torch.distributed import local_tensor, spec_of
from ._layout import Box, Layout, Route, layout_of, whole_box
from ._state import Sketch

Cost = Callable[[torch.Size], float]


@dataclass(frozen=True)
class Blocks:
    """A matrix whose blocks of rows are matrices of their own, such as the heads of a fused QKV.

    Args:
        rows: of each block; it divides the rows of the matrix.

    Raises:
        ShardConfigValueError: `rows` is no positive int.
    """

    rows: int

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or isinstance(self.rows, bool) or self.rows < 1:
            raise ShardConfigValueError(f"Blocks: rows must be a positive int, got {self.rows!r}")


def newton_schulz_cost(shape: torch.Size) -> float:
    """Elements times the shorter side: what products of a matrix with itself take, up to a factor."""
    return float(shape.numel() * (min(shape) if len(shape) > 1 else 1))


@dataclass(eq=False)
class Matrix:
    """A matrix that an optimizer steps as a whole.

    Attributes:
        name: its parameter's, with an index where that has several.
        param: the parameter that it is in.
        route: who holds what of it.
        stays: whether one rank holds all of it, so that its owner steps it where it is.
        whole: what the optimizer of its owner holds in its place; None on other ranks. It has memory during a step.
        sketch: of its state, in shards mode, once it has stepped.
        kept: by path, this rank's parts of its state, in shards mode.
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
        """Of the parameter."""
        return self.param.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.route.region.numel * self.dtype.itemsize

    @property
    def steps_here(self) -> bool:
        """Whether this rank is its owner."""
        return self.whole is not None

    def keep(self, sketch: Any) -> None:
        """From now on its state has this sketch, and nothing of it is kept yet; None if it has no state as shards."""
        self.sketch = sketch
        self.kept.clear()

    def state_route(self, sketch: Sketch) -> Route:
        """Who keeps what of a tensor of its state, in shards mode: as of the matrix, or else equal parts of rows."""
        if sketch.shape == self.route.shape:
            return self.route
        cut = self.route.layout.in_chunks(sketch.shape)
        return Route.of(cut, whole_box(sketch.shape), sketch.shape, self.route.owner)

    def value(self) -> torch.Tensor | None:
        """This rank's part of it, as a view of the shard."""
        return self.route.in_shard(shard_of(self.param))

    def gradient(self) -> torch.Tensor | None:
        """This rank's part of its gradient, as a view.

        Raises:
            ShardConfigStateError: the gradient is not cut as the parameter is.
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
                f"parameter {self.name}: its gradient is {kind} of {gradient.dtype}, and not cut as the parameter, "
                f"of {self.dtype}; leave gradients as backward has made them"
            )
        return self.route.in_shard(shard_of(gradient))


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(frozen=True, eq=False)
class Bucket:
    """Matrices that travel together, or that all stay where they are.

    Attributes:
        options: index of the param group whose options hold for them.
        matrices: as many as fit, each with an owner.
        layout: of one of them; all are cut over the same ranks.
        stays: whether they stay.
        inner: the optimizer of those that this rank owns; None if it owns none.
        number: of the bucket.
    """

    options: int
    matrices: tuple[Matrix, ...]
    layout: Layout
    stays: bool
    inner: torch.optim.Optimizer | None
    number: int

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks over which they are cut."""
        return self.layout.group

    def stepped(self) -> list[Matrix]:
        """Those that have a gradient now."""
        return [matrix for matrix in self.matrices if matrix.param.grad is not None]


class Owners:
    """Chooses owners: the ranks of each group get as much to compute, as far as matrices allow.

    Args:
        cost: of a matrix, from its shape.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._loads: dict[dist.ProcessGroup | None, list[float]] = {}

    def assign(self, matrices: Sequence[tuple[Route, bool]]) -> list[tuple[int, int]]:
        """Index and owner of each matrix, those with the most to compute first.

        A matrix that one rank holds stays there. Each other one, in order of cost, goes to the rank with the least.

        Args:
            matrices: the routes, to whatever owner, and whether the matrix trains: one that does not costs nothing.
        """
        costs = [self._cost(torch.Size(route.shape)) if trains else 0.0 for route, trains in matrices]
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
    """The matrices of a parameter, by name: those of a stack, blocks of rows, or the parameter itself.

    Raises:
        ShardConfigValueError: the blocks do not fit.
        ShardConfigUnsupportedError: the parameter is no tensor that is sharded or replicated.
    """
    layout = layout_of(name, param)
    regions = regions_of(name, tuple(param.shape), blocks)
    return {key: Route.of(layout, region, shape, 0) for key, (region, shape) in regions.items()}


def regions_of(name: str, shape: tuple[int, ...], blocks: Blocks | None) -> dict[str, tuple[Box, tuple[int, ...]]]:
    """The matrices of a parameter of a shape, by name: where each lies in it, and its shape.

    Raises:
        ShardConfigValueError: the blocks do not fit.
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
    """Rows of each matrix of a parameter; 0 if it is none of matrices.

    Raises:
        ShardConfigValueError: the blocks do not fit.
    """
    rows = shape[-2] if len(shape) in (2, 3) else 0
    if blocks is None:
        return rows
    if not rows or rows % blocks.rows:
        raise ShardConfigValueError(
            f"parameter {name}: has shape {shape}, which {blocks} does not cut; a matrix, or a stack of matrices, has "
            "rows that the rows of a block divide"
        )
    return blocks.rows


def blocks_by_name(names: Sequence[str], given: Mapping[str, Blocks]) -> dict[str, Blocks]:
    """For each name the blocks whose pattern it matches.

    Raises:
        ShardConfigTypeError: a value is no `Blocks`.
        ShardConfigValueError: a pattern matches no name.
    """
    blocks: dict[str, Blocks] = {}
    for pattern, each in given.items():
        if not isinstance(each, Blocks):
            raise ShardConfigTypeError(f"blocks: {pattern!r} is {each!r}; give cs.optim.Blocks(rows)")
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ShardConfigValueError(f"blocks: no parameter is called {pattern!r}; there are {', '.join(names[:5])}")
        blocks |= dict.fromkeys(matching, each)
    return blocks


def in_buckets(matrices: Sequence[Matrix], nbytes: int) -> list[list[Matrix]]:
    """Matrices in their order, in buckets of which no rank gets more than so many bytes, unless of one matrix.

    Those of other ranks, of another dtype, or that stay are in buckets of their own.
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
