"""What the collectives of a group are made from: meshes, transports, memory and lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._comm.collectives import Transport, Transports
from .._comm.lanes import Lane
from .._comm.mesh import MeshInfo
from .._comm.rounding import Rounding
from .._faults.seat import NOTHING_NOTED, Notes
from .._memory.pool import BufferPool
from .._policies import Options
from .refresh import Microbatches


@dataclass(frozen=True)
class Runtime:
    """What all groups of one engine share.

    Attributes:
        pool: the memory.
        gather_lane, reduce_lane: the lanes of gathers and of reductions.
        has_one_mesh: whether all groups are sharded over the same ranks.
        microbatches: counts the gradients that graphs have left pending.
    """

    pool: BufferPool
    gather_lane: Lane
    reduce_lane: Lane
    has_one_mesh: bool
    microbatches: Microbatches = field(default_factory=Microbatches)


def frees_queued(streams: bool, has_one_mesh: bool, options: Options) -> bool:
    """Whether a reduction of a group releases its memory as soon as it is queued, instead of when it is waited for.

    This needs a stream. It saves memory, and is always correct, because the next user of the memory waits for the
    reduction. But a gather that gets the memory cannot overlap with the reduction. If both use one process group, they
    could not overlap anyway: collectives of one process group run one after the other. If they use several, because of
    several meshes or of `set_separate_reduce_scatter_group`, they can, so this is False.
    """
    return streams and has_one_mesh and options.comms.reduce_group is None


@dataclass(frozen=True, eq=False)
class GroupComm:
    """The meshes, transports and rounding with which a group communicates.

    Attributes:
        info: the mesh over which it is sharded.
        transports: communicate its parameters and gradients.
        small: the mesh of the few ranks that keep its parameters between forward and backward; None if there is none.
        notes: the notes that it makes before its collectives, for comparison with other ranks.
        rounding: the state of rounding its gradients, if they are sent in fewer bits.
    """

    info: MeshInfo
    transports: Transports
    small: MeshInfo | None = None
    notes: Notes = NOTHING_NOTED
    rounding: Rounding = field(default_factory=Rounding)


@dataclass(frozen=True, eq=False)
class GatherSetup:
    """What the gather buckets of a group are made from.

    Attributes:
        group: returns the group; None if it was freed.
        info: the mesh over which the parameters are sharded.
        transport: gathers them; None if there is only one rank.
        outer: gathers the node's compute copy over the outer axis, if that axis shards as well; else None.
        pool, lane: the memory and the lane of the gathers.
    """

    group: Callable[[], Any]
    info: MeshInfo
    transport: Transport | None
    outer: Transport | None
    pool: BufferPool
    lane: Lane


@dataclass(frozen=True, eq=False)
class ReduceSetup:
    """What the reduce buckets of a group are made from.

    Attributes:
        info, transports: the mesh and the transports of the group.
        options: the options under which gradients are reduced.
        pool, lane: the memory and the lane of the reductions.
        frees_queued: whether a reduction releases its memory as soon as it is queued (`frees_queued`).
        slots: sizes in bytes of the slots of unsharded parameters. A reduction that nearly fills one requests its size.
        rounding: the state of rounding gradients, if they are sent in fewer bits.
    """

    info: MeshInfo
    transports: Transports
    options: Options
    pool: BufferPool
    lane: Lane
    frees_queued: bool
    slots: Sequence[int]
    rounding: Rounding

    def under(self, options: Options) -> ReduceSetup:
        """Return the same setup for other options."""
        return replace(self, options=options)
