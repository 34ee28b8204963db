"""A group in a plan: its parameters, and the memory and traffic of its gathers and reductions. Frozen data."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._policies import AS_IT_IS, CommPolicy, Wire
from .costs import Moved, Sizes
from .layout import (
    BucketLayout,
    GatherLayout,
    ReduceLayout,
    Route,
    bucket_layout,
    gather_layout,
    reduce_layout,
    slot_bytes,
)
from .parcel import Parcel
from .schedule import ROOT_NAME, Step


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """A parameter of a group.

    Attributes:
        fqn: fully qualified name within the root.
        shape: unsharded shape.
        stored, gathered, reduced: dtypes of the shard, of the unsharded parameter, and of the reduced gradient.
        trains: whether the parameter gets a gradient.
        dim: the dim along which the parameter is sharded.
        rows: shard boundaries are multiples of this number of rows (`Ragged`).
        packed: whether the bytes are not numbers of the dtype (as in packed 4-bit weights). Such parameters are
            gathered separately.
        sent: elements and dtype of each tensor that a rank sends, if the parameter defines its own all-gather and they
            are known. Such parameters are gathered separately.
    """

    fqn: str
    shape: tuple[int, ...]
    stored: torch.dtype
    gathered: torch.dtype
    reduced: torch.dtype
    trains: bool
    dim: int = 0
    rows: int = 1
    packed: bool = False
    sent: tuple[tuple[int, torch.dtype], ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)


class _Members(NamedTuple):
    """The parameters of one dtype: their shapes, and the `dim` and `rows` of each (see `ParamPlan`).

    Parameters that define their own all-gather are gathered as bytes.
    """

    dtype: torch.dtype
    shapes: list[tuple[int, ...]]
    dims: list[int]
    rows: list[int]


class Reduced(NamedTuple):
    """The reduction of the gradients of one dtype.

    Attributes:
        dtype: dtype of the gradients.
        layout: layout of the reduction over the shard axis.
        between: what a replica sends to each other replica in fewer bits; None if gradients are sent in `dtype`.
    """

    dtype: torch.dtype
    layout: ReduceLayout
    between: Parcel | None


@dataclass(frozen=True)
class GroupPlan:
    """A group of parameters that share their collectives.

    Attributes:
        fqn: name of the group's module within the root ("" for the root itself).
        params: the parameters. A tied parameter occurs once.
        shard_size: number of ranks over which each parameter is sharded.
        mesh: description of the mesh.
        is_root: whether this is the root's own group.
        reshard_after_forward: whether the unsharded parameters are resharded between forward and backward.
        route: how the transport handles large and small parameters; None if the shard axis has only one rank.
        small_size: number of ranks to which the weights are resharded after forward; 0 if they are resharded fully.
        reduces_first: whether the group's backward waits for reductions before it gathers.
        frees_queued: whether work that is queued after a reduction may reuse the reduction's memory. This needs a
            stream, and one process group for all collectives. Otherwise the memory is free once the host has waited for
            the reduction.
        reduces_last: whether the gradients are reduced after the whole backward, because some ranks may have none.
        comm_policy: number of bits in which parameters and gradients are communicated.
        outer_size: number of ranks of the outer axis over which the shards are split as well (`outer_sharding`); 1 if
            that axis replicates, or if there is none.
        outer_route: how the transport of that axis handles large and small parameters; None if it does not shard.
    """

    fqn: str
    params: tuple[ParamPlan, ...]
    shard_size: int
    mesh: str
    is_root: bool
    reshard_after_forward: bool
    route: Route | None
    small_size: int = 0
    reduces_first: bool = False
    frees_queued: bool = False
    reduces_last: bool = False
    comm_policy: CommPolicy = AS_IT_IS
    outer_size: int = 1
    outer_route: Route | None = None

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.fqn or ROOT_NAME

    def _by_dtype(self, dtypes: Iterable[torch.dtype], params: Sequence[ParamPlan]) -> list[_Members]:
        """The parameters grouped by dtype. Packed parameters form their own groups."""
        members: dict[tuple[torch.dtype, bool], _Members] = {}
        for dtype, param in zip(dtypes, params, strict=True):
            of_dtype = members.setdefault((dtype, param.packed), _Members(dtype, [], [], []))
            of_dtype.shapes.append(param.shape)
            of_dtype.dims.append(param.dim)
            of_dtype.rows.append(param.rows)
        return list(members.values())

    @functools.cached_property
    def _gathered(self) -> list[tuple[_Members, Wire | None]]:
        """The parameters of each gather, and the format in which they are sent if it is not their dtype."""
        kinds: dict[tuple[torch.dtype, bool, bool], list[ParamPlan]] = {}
        for param in self.params:
            kinds.setdefault((param.gathered, param.packed, bool(param.sent)), []).append(param)
        gathers: list[tuple[_Members, Wire | None]] = []
        for (dtype, packed, own), params in kinds.items():
            if own:
                sizes = [numel * sent.itemsize for param in params for numel, sent in param.sent]
                shapes: list[tuple[int, ...]] = [(self.shard_size * size,) for size in sizes]
                gathers.append((_Members(torch.uint8, shapes, [0] * len(sizes), [1] * len(sizes)), None))
            else:
                (members,) = self._by_dtype([dtype] * len(params), params)
                gathers.append((members, None if packed else self.comm_policy.wire("gather", dtype)))
        return gathers

    @functools.cached_property
    def gather_layouts(self) -> tuple[GatherLayout, ...]:
        """The layout of each dtype's gather."""
        return tuple(
            gather_layout(shapes, self.shard_size, dtype.itemsize, dims, self.route, rows, wire)
            for (dtype, shapes, dims, rows), wire in self._gathered
        )

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the slots of the unsharded parameters, padding included."""
        return self.sizes.weights

    def _resident_layouts(self) -> list[tuple[torch.dtype, BucketLayout]]:
        """By dtype, the bucket for weights that are resharded to `small_size` ranks; empty if `small_size` is 0."""
        members = self._gathered if self.small_size else ()
        return [
            (dtype, bucket_layout(shapes, self.small_size, dtype.itemsize, dims))
            for (dtype, shapes, dims, _), _ in members
        ]

    @property
    def _reduced(self) -> list[_Members]:
        trained = [p for p in self.params if p.trains]
        return self._by_dtype([p.reduced for p in trained], trained)

    def _reduce_layout(self, members: _Members, slots: Sequence[int] = ()) -> ReduceLayout:
        dtype, shapes, dims, rows = members
        wire = self.comm_policy.wire("reduce", dtype)
        return reduce_layout(shapes, self.shard_size, dtype.itemsize, dims, self.route, slots, rows, wire)

    @property
    def _reduce_layouts(self) -> tuple[tuple[torch.dtype, ReduceLayout], ...]:
        """By dtype, the layout of the reduction. Empty if the shard axis has only one rank."""
        if self.route is None:
            return ()
        slots = [layout.nbytes for layout in self.gather_layouts]
        return tuple((members.dtype, self._reduce_layout(members, slots)) for members in self._reduced)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Bytes that the group leases from the pool."""
        gathers, few = self.gather_layouts, self._resident_layouts()
        reductions = 0
        for dtype, layout in self._reduce_layouts:
            reductions += slot_bytes(layout.nbytes)
            reductions += slot_bytes(layout.scratch * dtype.itemsize) if layout.scratch else 0
        return Sizes(
            weights=sum(slot_bytes(layout.nbytes) for layout in gathers),
            landing=sum(slot_bytes(layout.landing_bytes) for layout in gathers if layout.landing),
            reduction=reductions,
            small=sum(slot_bytes(layout.numel * dtype.itemsize) for dtype, layout in few),
            small_landing=sum(slot_bytes(layout.total * dtype.itemsize) for dtype, layout in few),
            frees_queued=self.frees_queued,
        )

    @property
    def moved(self) -> Moved:
        """Bytes that the group's collectives move."""
        layouts = zip(self.gather_layouts, self._gathered, strict=True)
        gather = tuple(layout.moved(of.dtype.itemsize) for layout, (of, _) in layouts) if self.route else ()
        reduce = tuple(layout.moved for _, layout in self._reduce_layouts)
        few = tuple(layout.total * dtype.itemsize for dtype, layout in self._resident_layouts())
        refresh = tuple(layout.moved(dtype.itemsize) for dtype, layout in self.refresh_layouts)
        outer = tuple(layout.moved for _, layout in self.outer_reduce_layouts)
        return Moved(self.shard_size, gather, reduce, self.small_size or 1, few, self.outer_size, refresh, outer)

    @property
    def replica_bytes(self) -> int | None:
        """Bytes that a replica sends to each other replica; None if `comm_policy` has no setting for replicas."""
        if self.comm_policy.replicas is None:
            return None
        return sum(
            each.layout.numel * each.dtype.itemsize if each.between is None else each.between.nbytes
            for each in self.reductions
        )

    @property
    def reductions(self) -> tuple[Reduced, ...]:
        """The reduction of each dtype's gradients."""
        reductions = []
        for members in self._reduced:
            dtype, layout = members.dtype, self._reduce_layout(members)
            between = layout.between_replicas(dtype.itemsize, self.comm_policy.wire("replicas", dtype))
            reductions.append(Reduced(dtype, layout, between))
        return tuple(reductions)

    @property
    def rounding_bytes(self) -> int:
        """Bytes of the rounded shards outside of the pool, for communication in fewer bits."""
        return sum(layout.parcel.nbytes for layout in self.gather_layouts if layout.parcel is not None)

    @property
    def step(self) -> Step:
        """One use of the group, as the scheduler sees it."""
        small = self.small_size > 0
        return Step(
            self.fqn,
            self.is_root,
            self.reshard_after_forward,
            self.trains,
            small,
            self.reduces_first,
            refreshes=self.outer_size > 1,
        )

    @property
    def shard_bytes(self) -> int:
        """Bytes of the stored shards, for a rank without short pieces."""
        shapes, dims = [p.shape for p in self.params], [p.dim for p in self.params]
        layout = bucket_layout(shapes, self.shard_size, dims=dims, rows=[p.rows for p in self.params])
        if self.outer_size > 1:
            layout = bucket_layout([at.local_shape(0) for at in layout.params], self.outer_size, dims=dims)
        return sum(at.piece * p.stored.itemsize for at, p in zip(layout.params, self.params, strict=True))

    @functools.cached_property
    def refresh_layouts(self) -> tuple[tuple[torch.dtype, GatherLayout], ...]:
        """By dtype, the layout of the refresh: the gather of the node's compute copy over the outer axis.

        For a rank whose node holds no short pieces.
        """
        if self.outer_size == 1:
            return ()
        refreshes = []
        for (dtype, shapes, dims, rows), _ in self._gathered:
            pieces = bucket_layout(shapes, self.shard_size, None, dims, rows).params
            own = [at.local_shape(0) for at in pieces]
            wire = self.comm_policy.wire("refresh", dtype)
            layout = gather_layout(own, self.outer_size, dtype.itemsize, dims, self.outer_route, None, wire)
            refreshes.append((dtype, layout))
        return tuple(refreshes)

    @property
    def outer_reduce_layouts(self) -> tuple[tuple[torch.dtype, ReduceLayout], ...]:
        """By dtype, the layout of the reduction over the outer axis, which follows the one over the shard axis.

        For a rank whose node holds no short pieces. Empty without `outer_sharding`.
        """
        if self.outer_size == 1:
            return ()
        reductions = []
        for dtype, shapes, dims, rows in self._reduced:
            pieces = bucket_layout(shapes, self.shard_size, None, dims, rows).params
            own = [at.local_shape(0) for at in pieces]
            wire = self.comm_policy.wire("replicas", dtype)
            layout = reduce_layout(own, self.outer_size, dtype.itemsize, dims, self.outer_route, (), None, wire)
            reductions.append((dtype, layout))
        return tuple(reductions)

    @property
    def copy_bytes(self) -> int:
        """Bytes of the node's compute copy, which a rank holds outside of the pool; 0 without `outer_sharding`."""
        return sum(layout.places.total * dtype.itemsize for dtype, layout in self.refresh_layouts)

    @property
    def trains(self) -> bool:
        """Whether any parameter gets a gradient."""
        return any(p.trains for p in self.params)

    @property
    def dtype(self) -> str:
        """Text: the dtypes in which parameters are stored, gathered and reduced."""
        return joined(_dtype(p) for p in self.params)

    @property
    def transport(self) -> str:
        """Text: the transport of the group, and its communication policy."""
        return self._moved_by if self.comm_policy == AS_IT_IS else f"{self._moved_by}, {self.comm_policy}"

    @property
    def _moved_by(self) -> str:
        if self.route is None:
            return "local"
        layouts = self.gather_layouts
        alone, packed = sum(len(x.alone) for x in layouts), sum(len(x.packed) for x in layouts)
        if not packed:
            return self.route.name if self.route.name != "packed" else "direct"
        return f"{self.route.name}, {packed} packed" if alone else "packed"

    @property
    def reshard(self) -> str:
        """Text: when the weights are resharded."""
        if not self.reshard_after_forward:
            return "after backward"
        return f"after forward, among {self.small_size}" if self.small_size else "after forward"


def _dtype(param: ParamPlan) -> str:
    stored, gathered, reduced = (str(d).removeprefix("torch.") for d in (param.stored, param.gathered, param.reduced))
    sent = dict.fromkeys(str(dtype).removeprefix("torch.") for _, dtype in param.sent)
    arrives = " and ".join(sent) or gathered
    text = stored if arrives == stored else f"{stored} as {arrives}"
    if not param.trains:
        return f"{text} packed" if param.packed else f"{text} frozen"
    return text if reduced == gathered else f"{text}, reduced as {reduced}"


def joined(texts: Iterable[str]) -> str:
    """The distinct texts, separated by commas."""
    return ", ".join(dict.fromkeys(texts))
