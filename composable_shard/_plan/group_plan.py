"""A group in a plan: its parameters, and the bytes that their gathers and reductions take. Frozen data."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._policies import AS_IT_IS, CommPolicy
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
        fqn: its name within the root.
        shape: its unsharded shape.
        stored, gathered, reduced: dtypes of its shard, its unsharded parameter, and its gradient in the reduction.
        trains: whether it gets a gradient.
        dim: the dim along which it is cut.
        rows: of which the cuts are multiples.
        packed: whether its bytes are no numbers of its dtype, so that it is gathered apart from those that are.
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

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


class _Members(NamedTuple):
    """The shapes of parameters of one dtype, along which dims they are cut, and at multiples of how many rows."""

    dtype: torch.dtype
    shapes: list[tuple[int, ...]]
    dims: list[int]
    rows: list[int]


class Reduced(NamedTuple):
    """How gradients of one dtype are reduced.

    Attributes:
        dtype: of them.
        layout: of the reduction over the shards.
        sent: what a rank sends to each other one there in fewer bits; None if they travel as they are.
        between: likewise, what a replica sends to each other one.
    """

    dtype: torch.dtype
    layout: ReduceLayout
    sent: Parcel | None
    between: Parcel | None


@dataclass(frozen=True)
class GroupPlan:
    """A group of parameters that share their collectives.

    Attributes:
        fqn: name of its module within the root ("" for the root itself).
        params: its members, tied ones once.
        shard_size: number of ranks over which each parameter is sharded.
        mesh: the mesh in words.
        is_root: whether it is the root's own group.
        reshard_after_forward: whether the unsharded parameters are given up between forward and backward.
        route: how its transport takes parameters; None if the shard axis has one rank only.
        small_size: how many ranks share the weights between forward and backward; 0 if they are resharded fully.
        reduces_first: whether its backward waits for reductions before it gathers.
        frees_queued: whether the memory of its reductions is free for what is queued behind them, as on a stream, and
            not only once the host has waited for them.
        reduces_last: whether its gradients are reduced only when backward is over, because not all ranks may have
            gradients.
        comm_policy: in how many bits it travels.
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

    @property
    def name(self) -> str:
        """The name for users."""
        return self.fqn or ROOT_NAME

    def _by_dtype(self, dtypes: Iterable[torch.dtype], params: Sequence[ParamPlan]) -> list[_Members]:
        """The parameters of each dtype, packed ones apart."""
        members: dict[tuple[torch.dtype, bool], _Members] = {}
        for dtype, param in zip(dtypes, params, strict=True):
            of_dtype = members.setdefault((dtype, param.packed), _Members(dtype, [], [], []))
            of_dtype.shapes.append(param.shape)
            of_dtype.dims.append(param.dim)
            of_dtype.rows.append(param.rows)
        return list(members.values())

    @property
    def _gathered(self) -> list[_Members]:
        return self._by_dtype([p.gathered for p in self.params], self.params)

    @functools.cached_property
    def gather_layouts(self) -> tuple[GatherLayout, ...]:
        """The layout of the gather of each dtype."""
        kinds = dict.fromkeys((p.gathered, p.packed) for p in self.params)
        wires = [None if packed else self.comm_policy.wire("gather", dtype) for dtype, packed in kinds]
        return tuple(
            gather_layout(shapes, self.shard_size, dtype.itemsize, dims, self.route, rows, wire)
            for (dtype, shapes, dims, rows), wire in zip(self._gathered, wires, strict=True)
        )

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the slots of the unsharded parameters, padding included."""
        return self.sizes.weights

    @property
    def landing_bytes(self) -> int:
        """Bytes of the landing buffers, which a gather needs beside the unsharded parameters until it is done."""
        return self.sizes.landing

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the buffers that a reduction needs until it is done."""
        return self.sizes.reduction

    def _resident_layouts(self) -> list[tuple[torch.dtype, BucketLayout]]:
        """By dtype, the bucket in which a few ranks share the weights and gather them again; none if they do not."""
        members = self._gathered if self.small_size else ()
        return [
            (dtype, bucket_layout(shapes, self.small_size, dtype.itemsize, dims)) for dtype, shapes, dims, _ in members
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
        """By dtype, the layout of the reduction; none if the shard axis has one rank only."""
        if self.route is None:
            return ()
        slots = [layout.nbytes for layout in self.gather_layouts]
        return tuple((members.dtype, self._reduce_layout(members, slots)) for members in self._reduced)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Bytes that the group takes of the pool."""
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
        gather = tuple(layout.moved(of.dtype.itemsize) for layout, of in layouts) if self.route else ()
        reduce = tuple(layout.moved for _, layout in self._reduce_layouts)
        few = tuple(layout.total * dtype.itemsize for dtype, layout in self._resident_layouts())
        return Moved(self.shard_size, gather, reduce, self.small_size or 1, few)

    @property
    def replica_bytes(self) -> int | None:
        """Bytes that a replica sends to each other one in fewer bits; None if its gradients travel as they are."""
        if self.comm_policy.replicas is None:
            return None
        return sum(
            each.layout.numel * each.dtype.itemsize if each.between is None else each.between.nbytes
            for each in self.reductions
        )

    @property
    def reductions(self) -> tuple[Reduced, ...]:
        """Of each dtype, how its gradients are reduced, and in which bits."""
        reductions = []
        for members in self._reduced:
            dtype, layout = members.dtype, self._reduce_layout(members)
            between = layout.between_replicas(dtype.itemsize, self.comm_policy.wire("replicas", dtype))
            reductions.append(Reduced(dtype, layout, layout.parcel, between))
        return tuple(reductions)

    @property
    def rounding_bytes(self) -> int:
        """Bytes that stay beside the pool for what travels in fewer bits: rounded shards, and what rounding leaves."""
        kept = sum(layout.parcel.nbytes for layout in self.gather_layouts if layout.parcel is not None)
        if not self.comm_policy.error_feedback:
            return kept
        for each in self.reductions:
            for sent, ranks in ((each.sent, self.shard_size), (each.between, 1)):
                kept += 4 * ranks * _rounded(each.layout, sent)
        return kept

    @property
    def step(self) -> Step:
        """What the schedule must know of a use of the group."""
        small = self.small_size > 0
        return Step(self.fqn, self.is_root, self.reshard_after_forward, self.trains, small, self.reduces_first)

    @property
    def shard_bytes(self) -> int:
        """Bytes of the stored shards of a rank with full pieces."""
        shapes, dims = [p.shape for p in self.params], [p.dim for p in self.params]
        layout = bucket_layout(shapes, self.shard_size, dims=dims, rows=[p.rows for p in self.params])
        return sum(at.piece * p.stored.itemsize for at, p in zip(layout.params, self.params, strict=True))

    @property
    def trains(self) -> bool:
        """Whether any member gets a gradient."""
        return any(p.trains for p in self.params)

    @property
    def dtype(self) -> str:
        """In words: the dtypes of its parameters as stored, gathered and reduced."""
        return joined(_dtype(p) for p in self.params)

    @property
    def transport(self) -> str:
        """In words: how it is moved."""
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
        """In words: when its weights are given up."""
        if not self.reshard_after_forward:
            return "after backward"
        return f"after forward, among {self.small_size}" if self.small_size else "after forward"


def _rounded(layout: ReduceLayout, sent: Parcel | None) -> int:
    """Elements of a chunk that travel in fewer bits."""
    parts = () if sent is None else sent.parts
    return sum(layout.result.params[index].piece for part in parts if part.form for index in part.members)


def _dtype(param: ParamPlan) -> str:
    stored, gathered, reduced = (str(d).removeprefix("torch.") for d in (param.stored, param.gathered, param.reduced))
    text = stored if gathered == stored else f"{stored} as {gathered}"
    if not param.trains:
        return f"{text} packed" if param.packed else f"{text} frozen"
    return text if reduced == gathered else f"{text}, reduced as {reduced}"


def joined(texts: Iterable[str]) -> str:
    """The distinct texts, separated by commas."""
    return ", ".join(dict.fromkeys(texts))
