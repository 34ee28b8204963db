"""`Exchange`: the gathers and reductions of a group for compiled graphs, with the group's copies, transports and slots.

A graph passes in shards or gradients and gets unsharded parameters or reduced pieces. It does not report the last read
of a parameter: the compiler decides when that is, and may save a parameter for backward, return it, or reuse its memory
for another tensor. So the pool reclaims a slot of unsharded parameters when no tensor refers to their storages any
more.

An exchange holds no parameter, module or engine, so the backward of a graph can run after the model was freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch

from .._comm.copies import Gradients, regions_in
from .._comm.lanes import Job, Lane
from .._faults.seat import Notes
from .._memory.pool import BufferPool
from .._memory.slots import Slot
from .._policies import GradDtype, Options
from .._torch.core import alias, plainly
from .bucket import Bucket, GatherBucket, Gatherer
from .extension_bucket import ExtensionBucket
from .extension_gathers import Arriving, ExtensionGathers
from .faces import Face, weights_in
from .param import ShardedParam
from .reduction import ReduceBucket, Reduced, free_queued, reduce_buckets
from .refresh import NodeCopies
from .setup import ReduceSetup


class _Facts(NamedTuple):
    """The facts about a parameter that a reduction needs."""

    fqn: str
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    rows: int
    grad_dtype: GradDtype
    sums: torch.dtype

    def sum_dtype(self, options: Options, /) -> torch.dtype:
        """Return the dtype in which its gradients are accumulated. The dtypes of the options do not change."""
        return self.sums


class _Gathers:
    """The gathers of one bucket of parameters.

    Args:
        bucket: its copies, transport and requests are used; the bucket itself is not held.
        members: indices of its parameters in the group.
        pool, lane: the source of memory, and the queue of gathers.
    """

    def __init__(self, bucket: GatherBucket, members: Sequence[int], pool: BufferPool, lane: Lane) -> None:
        self.members = members
        self._dtype = bucket.dtype
        self._layout = bucket.places
        self._requests = bucket.for_weights
        self._gatherer = Gatherer(bucket.copies, bucket.dtype, bucket.for_landing, pool, lane)
        self._pool, self._lane = pool, lane
        self._node_copy = bucket.node_copy
        self._faces: dict[Slot, Face] = {}

    def start(self, shards: list[torch.Tensor]) -> _Gathering:
        """Begin to gather `shards`, the shards of the members, or the node's pieces if there is a copy of them."""
        # Code in the graph may have written the shards on the current stream, for example an optimizer.
        pool, after = self._pool, [self._lane.record_current_stream()]
        if self._node_copy is not None:
            after += self._node_copy.arrive()
            shards = self._node_copy.pieces
        # A slot that loses its memory at release cannot be lent: the graph may read it then. So allocate other memory,
        # which lives as long as the tensors.
        if pool.loses_memory(self._requests[0]):
            memory = pool.memory.allocate(self._requests[0].nbytes)
            flat = memory.view(self._dtype)
            with plainly():
                wholes = self._gatherer.copies.into(regions_in(flat, self._layout, self._layout.begins))
            return _Gathering(self, self._gatherer.start_into(wholes, shards, after), None, flat)
        slot = pool.lease(self._requests[pool.backward])
        try:
            return _Gathering(self, self._gatherer.start(slot, shards, (*after, *slot.free_after)), slot, None)
        except BaseException:
            pool.release_failed([slot])
            raise

    def _wait(self, gathering: _Gathering) -> None:
        try:
            gathering.job.finish()
        except Exception:  # not after an interrupt: the gather may still write to the slot, which then stays leased
            if gathering.slot is not None:
                self._pool.release_failed([gathering.slot])
            raise

    def finish(self, gathering: _Gathering) -> list[torch.Tensor]:
        """Wait for the unsharded parameters, each of which has its own storage, and return them."""
        self._wait(gathering)
        slot = gathering.slot
        if slot is None:
            assert gathering.memory is not None
            with plainly():
                return weights_in(gathering.memory.view(torch.uint8), self._dtype, self._layout, alias)
        face = self._faces.get(slot)
        if face is None or face.begin != slot.begin:
            face = self._faces[slot] = Face(slot, self._dtype, self._layout)
        # Aliases for the graph. `is_used` is about them: it counts the users of the storages besides the face itself.
        weights = [weight.detach() for weight in face.weights]
        self._pool.lend(slot, face.is_used)
        return weights

    def abandon(self, gathering: _Gathering) -> None:
        """Give the gather to the pool, which waits for it and reclaims its memory: no one uses the parameters."""
        self._pool.finish_later(partial(self._drop, gathering))

    def _drop(self, gathering: _Gathering) -> None:
        self._wait(gathering)
        if gathering.slot is not None:
            self._pool.release(gathering.slot, self._lane.record_current_stream())

    def leave_slots(self) -> None:
        """Drop all views of slots."""
        self._gatherer.leave_slots()
        self._faces.clear()


@dataclass(frozen=True)
class _Gathering:
    """A gather in flight.

    Attributes:
        gathers: the object that has begun it.
        job: the gather.
        slot: the destination; None if it is not a slot.
        memory: the destination if it is not a slot, as a 1D tensor of the parameters' dtype.
    """

    gathers: _Gathers
    job: Job[None]
    slot: Slot | None
    memory: torch.Tensor | None

    @property
    def members(self) -> Sequence[int]:
        return self.gathers.members

    @property
    def arriving(self) -> Sequence[Arriving]:
        return ()

    def finish(self) -> list[list[torch.Tensor]]:
        return [[weight] for weight in self.gathers.finish(self)]

    def abandon(self) -> None:
        self.gathers.abandon(self)


class _InFlight(Protocol):
    """The gather of one bucket, in flight."""

    @property
    def members(self) -> Sequence[int]:
        """Indices of its parameters in the group."""

    @property
    def arriving(self) -> Sequence[Arriving]:
        """Its parameters, if they define their own all-gather."""

    def finish(self) -> list[list[torch.Tensor]]:
        """Wait; returns for each parameter the unsharded one, or the tensors from which it is made."""

    def abandon(self) -> None:
        """Wait later, because no one uses the parameters."""


class Gather:
    """The gathers of all buckets of a group, in flight."""

    def __init__(self, parts: list[_InFlight], copies: NodeCopies | None = None) -> None:
        self._parts = parts
        self._copies = copies if parts else None
        if self._copies is not None:
            self._copies.begin_read()

    @property
    def arriving(self) -> list[Arriving]:
        """The parameters that define their own all-gather."""
        return [each for part in self._parts for each in part.arriving]

    def finish(self) -> list[torch.Tensor]:
        """Wait for the unsharded parameters, and return them in the order of the group's parameters.

        For parameters that define their own all-gather, return the tensors from which they are made.
        """
        tensors: dict[int, list[torch.Tensor]] = {}
        try:
            while self._parts:
                part = self._parts.pop(0)
                tensors.update(zip(part.members, part.finish(), strict=True))
        except BaseException:
            self.abandon()
            raise
        self._end_read()
        return [tensor for index in range(len(tensors)) for tensor in tensors[index]]

    def abandon(self) -> None:
        """Abandon all gathers that were not finished."""
        self._end_read()
        while self._parts:
            self._parts.pop(0).abandon()

    def _end_read(self) -> None:
        if self._copies is not None:
            self._copies.end_read()
            self._copies = None


class Reduction:
    """The reductions of all buckets of a group, in flight.

    Args:
        jobs: the job of each bucket.
        on_host: whether the host waits for the results, because it reads them.
        pool: the source of the reductions' memory.
    """

    def __init__(self, jobs: list[tuple[ReduceBucket, Job[Reduced]]], on_host: bool, pool: BufferPool) -> None:
        self._jobs, self._on_host, self._pool = jobs, on_host, pool

    def advance(self) -> None:
        """Wait for the reduce-scatters, and issue the all-reduces over the replicas."""
        try:
            for _, job in self._jobs:
                job.advance()
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Wait, and return by index this rank's pieces, each with a mark: positive if any rank had that gradient."""
        done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        try:
            while self._jobs:
                bucket, job = self._jobs.pop(0)
                result = job.finish()
                if self._on_host:
                    job.wait_on_host()
                pieces, used = result.parts()
                done.update(zip(bucket.indices, zip(pieces, used.unbind(), strict=True), strict=True))
        except BaseException:
            self.abandon()
            raise
        return done

    def abandon(self) -> None:
        """Give the reductions to the pool, which waits for them and reclaims their memory: no one uses the pieces."""
        while self._jobs:
            self._pool.finish_later(self._jobs.pop(0)[1].finish)


def _gathers_of(bucket: Bucket, members: Sequence[int], pool: BufferPool, lane: Lane) -> _Gathers | ExtensionGathers:
    if isinstance(bucket, ExtensionBucket):
        return ExtensionGathers(bucket, members, pool)
    assert isinstance(bucket, GatherBucket)
    return _Gathers(bucket, members, pool, lane)


class Exchange:
    """The gathers and reductions of a group for compiled graphs.

    Args:
        params: the group's parameters; they are not held.
        buckets: its gather buckets, and for each the indices of its parameters in the group.
        gather_lane: the lane of its gathers.
        setup: the meshes, transports, memory and options of its reductions. Of the options, only the dtypes and the
            number of bits in which tensors are sent are used here.
        notes, note: the notes of the group before its collectives, and its note before a gather.
        copies: with `outer_sharding`, the node's compute copies, which gathers read; else None.

    Attributes:
        pool: the pool.
        gathers: number of gathers so far.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        buckets: Mapping[Bucket, Sequence[int]],
        gather_lane: Lane,
        setup: ReduceSetup,
        notes: Notes,
        note: str,
        copies: NodeCopies | None = None,
    ) -> None:
        self._notes, self._note = notes, note
        self._copies, self._gather_lane = copies, gather_lane
        self._facts = [
            _Facts(p.fqn, p.shape, p.dim, p.dtype, p.rows, p.grad_dtype, p.sum_dtype(setup.options)) for p in params
        ]
        self._gathers = [_gathers_of(bucket, members, setup.pool, gather_lane) for bucket, members in buckets.items()]
        self._setup = setup
        self._reduces: dict[tuple[object, ...], list[ReduceBucket]] = {}
        self.pool = setup.pool
        self.gathers = 0

    @property
    def name(self) -> str:
        """The first parameter's name, for messages."""
        return self._facts[0].fqn

    def gather(self, shards: Sequence[torch.Tensor], with_gradients: bool = True, pends: bool = False) -> Gather:
        """Begin to gather shards.

        Args:
            shards: the shards, in the order of the group's parameters.
            with_gradients: whether the graph was compiled with gradients enabled.
            pends: whether the gradients of a forward that runs now will wait for a later reduction.
        """
        self.gathers += 1
        if self._copies is not None:
            self._copies.refresh_for_graph(shards, with_gradients, self._gather_lane, pends)
        for ledger in self._notes.gathers:
            ledger.issue(self._note)
        started: list[_InFlight] = []
        try:
            for gathers in self._gathers:
                started.append(gathers.start([shards[index] for index in gathers.members]))
        except BaseException:
            Gather(started).abandon()
            raise
        return Gather(started, self._copies)

    def reduce(self, gradients: Gradients, wanted: Sequence[int], factor: float | None, only_sums: bool) -> Reduction:
        """Begin to average unsharded gradients over the ranks.

        Args:
            gradients: the gradients, in the order of the group's parameters; None counts as zeros.
            wanted: indices of the parameters whose gradients are reduced, the same on all ranks.
            factor, only_sums: the options `divide_factor` and `only_sums`.
        """
        if self._notes.reduces:
            note = self._notes.reduce(f"parameters {', '.join(map(str, wanted))}, divided by {factor}")
            for ledger in self._notes.reduces:
                ledger.issue(note)
        jobs: list[tuple[ReduceBucket, Job[Reduced]]] = []
        reduction = Reduction(jobs, self._setup.info.offloads, self.pool)
        try:
            for bucket in self._reduce_buckets(tuple(wanted), factor, only_sums):
                jobs.append((bucket, bucket.start(gradients, frees=self._setup.frees_queued)))
        except BaseException:
            free_queued(self.pool, jobs)
            reduction.abandon()
            raise
        free_queued(self.pool, jobs)
        return reduction

    def _reduce_buckets(self, wanted: tuple[int, ...], factor: float | None, only_sums: bool) -> list[ReduceBucket]:
        key = wanted, factor, only_sums
        buckets = self._reduces.get(key)
        if buckets is None:
            options = replace(self._setup.options, divide_factor=factor, only_sums=only_sums)
            buckets = self._reduces[key] = reduce_buckets(self._facts, wanted, self._setup.under(options))
        return buckets

    def leave_slots(self) -> None:
        """Drop all views of slots, because the pool is about to replace its slots."""
        self._reduces.clear()
        for gathers in self._gathers:
            gathers.leave_slots()
