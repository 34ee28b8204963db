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


@dataclass(frozen=True)
class Runtime:
    """The pool and the lanes that all groups of one engine share."""

    pool: BufferPool
    gather_lane: Lane
    reduce_lane: Lane


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
        pool, lane: the memory and the lane of the gathers.
    """

    group: Callable[[], Any]
    info: MeshInfo
    transport: Transport | None
    pool: BufferPool
    lane: Lane


@dataclass(frozen=True, eq=False)
class ReduceSetup:
    """What the reduce buckets of a group are made from.

    Attributes:
        info, transports: the mesh and the transports of the group.
        options: the options under which gradients are reduced.
        pool, lane: the memory and the lane of the reductions.
        slots: sizes in bytes of the slots of unsharded parameters. A reduction that nearly fits one requests its size.
        rounding: the state of rounding gradients, if they are sent in fewer bits.
    """

    info: MeshInfo
    transports: Transports
    options: Options
    pool: BufferPool
    lane: Lane
    slots: Sequence[int]
    rounding: Rounding

    def under(self, options: Options) -> ReduceSetup:
        """Return the same setup for other options."""
        return replace(self, options=options)
