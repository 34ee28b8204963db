"""The node's compute copy of a group's parameters, and its refresh over the outer axis (`outer_sharding`).

With `outer_sharding`, a stored parameter is sharded over all ranks of a 2D mesh. The ranks with the same index on the
inner axis together hold one *node's piece* of it. Each of them keeps a copy of that piece in the compute dtype. Gathers
over the inner axis read the copy, in forward and in backward. A *refresh*, one all-gather over the outer axis, makes
the copy from the stored parameters.

A refresh is a collective, so the decision depends on what all ranks do alike: their calls, and the versions of
parameters and of `.grad`. Ranks of all nodes must run the same forwards and change the same parameters.

- An eager root forward refreshes all copies that it will read, except while gradients of an earlier microbatch wait for
  their reduction (`pending`). It refreshes even if no optimizer has stepped, because other code changes parameters too,
  for example with foreach functions, which do not increase versions.
- A compiled graph does not know where a root forward begins. It refreshes at each gather of a forward, unless gradients
  are pending or the copy was refreshed and not read yet.
- Without gradients, and after `unshard()`, parameters are often swapped (EMA). So such a forward always refreshes, and
  so does the next gather after it, even that of a backward.
- A gather of a forward refreshes if the version of a parameter has changed. In a backward it does not: the copy has the
  values with which the forward has computed.

One change is not noticed: by a foreach function or through `.data`, between two forwards in grad mode that both wait
for their backward. The backward of the first one then reads the values of the second one. Without sharding, autograd
refuses such a change, except through `.data`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from .._comm.collectives import Transport
from .._comm.copies import Wholes, regions_in
from .._comm.lanes import Events, Job, Lane, Steps
from .._comm.lowbit import gather_copies
from .._comm.mesh import MeshInfo
from .._faults.seat import Notes
from .._memory.device import DeviceMemory
from .._plan.layout import ParamLayout, gather_layout
from .._policies import Wire
from .._torch.core import current_backward, plainly


def node_shapes(params: Sequence[ParamLayout], rank: int) -> list[tuple[int, ...]]:
    """Return the shapes of the node's pieces, given the layouts over the inner axis and this rank's index in it."""
    return [at.local_shape(rank) for at in params]


class NodeCopy:
    """The node's copy of one bucket's pieces, on the compute device, outside of the pool.

    Args:
        params: the layouts of the bucket's parameters over the inner axis.
        info: the mesh.
        transport: communicates over the outer axis.
        dtype: the dtype of compute.
        wire: the format in which a refresh sends parameters; None for `dtype`.
        stored: the stored shards.
        memory: allocates the copy.
        lane: the lane of the gathers that read the copy. Refreshes run on its second lane, concurrently.

    Attributes:
        pieces: the node's pieces, as views of the copy; empty before the first refresh.
        memory: the memory of the copy, (`nbytes`,) in uint8; None before the first refresh.
        nbytes: bytes of the copy.
        refreshes: number of refreshes so far.
    """

    def __init__(
        self,
        params: Sequence[ParamLayout],
        info: MeshInfo,
        transport: Transport,
        dtype: torch.dtype,
        wire: Wire | None,
        stored: Sequence[torch.Tensor],
        memory: DeviceMemory,
        lane: Lane,
    ) -> None:
        shapes, dims = node_shapes(params, info.shard_rank), [at.dim for at in params]
        layout = gather_layout(shapes, info.replicate_size, dtype.itemsize, dims, transport.route, None, wire)
        like = torch.empty(0, dtype=dtype, device=info.device)
        self._copies = gather_copies(layout, info.outer_rank, transport, stored, info.offloads, like, lane.streams)
        self._layout, self._dtype, self._like = layout, dtype, like
        self._allocator, self._lane = memory, lane
        self.nbytes = layout.places.total * dtype.itemsize
        self.pieces: list[torch.Tensor] = []
        self.memory: torch.Tensor | None = None
        self._wholes: Wholes | None = None
        self._job: Job[None] | None = None
        self.refreshes = 0

    def refresh(self, shards: Sequence[torch.Tensor], after: Events) -> None:
        """Begin to gather the stored shards over the outer axis, after these events."""
        if self._wholes is None:
            self._make()
            after = (*after, *self._allocator.current_events())  # earlier work may still use the new memory
        self.settle()
        self.refreshes += 1
        if self.nbytes:  # else this node has no rows of any parameter, and neither have the others
            self._job = self._lane.second().start(self._steps(shards), after, shards)

    def _make(self) -> None:
        places = self._layout.places
        self.memory = self._allocator.allocate(self.nbytes)
        with plainly():
            flat = self.memory.view(self._dtype)
            regions = regions_in(flat, places, places.begins)
            self._wholes = self._copies.into(regions)
            self.pieces = [region[: at.numel].view(at.shape) for region, at in zip(regions, places.params, strict=True)]

    def _steps(self, shards: Sequence[torch.Tensor]) -> Steps[None]:
        assert self._wholes is not None
        landing = None
        if self._layout.landing is not None:
            # Allocated on the lane's stream, which reuses the memory for the next refresh without waiting.
            buffer = self._like.new_empty(self._layout.landing_bytes, dtype=torch.uint8)
            landing = self._copies.landing(buffer if self._layout.parcel is not None else buffer.view(self._dtype))
        yield from self._copies.steps(self._wholes, landing, list(shards))

    def arrive(self) -> Events:
        """Return the events after which the pieces can be read. On a CPU, the host waits here.

        Gathers are queued on one lane, so only the first one after a refresh waits for an event.
        """
        job, self._job = self._job, None
        if job is None:
            return ()
        if self._lane.streams:
            return job.end_events()
        try:
            job.finish()
        except BaseException as error:
            if not isinstance(error, Exception):  # after an interrupt, the collective may still write to the copy
                self._wholes, self.memory, self.pieces = None, None, []
            raise
        return ()

    def settle(self) -> None:
        """Wait for a refresh that no gather has read: code may change the shards next, or another one may begin."""
        job, self._job = self._job, None
        if job is not None:
            job.finish()

    def forget_event(self) -> None:
        """Let no gather wait for a refresh in flight: a capture has begun or ended since, and the device was idle."""
        if self._job is not None:
            self._job.forget_event()


class CopyState(NamedTuple):
    """The facts that decide about the next refresh of a group.

    Attributes:
        due: whether the next gather refreshes, even in a backward.
        pending: whether gradients of an earlier microbatch wait for their reduction.
        read: whether a gather has read the copies since the last refresh.
    """

    due: bool = True
    pending: bool = False
    read: bool = False


def _again(state: CopyState, with_gradients: bool) -> bool:
    """Whether a gather in the forward of a graph refreshes even if that is not due."""
    return not with_gradients or (state.read and not state.pending)


class Microbatches:
    """Counts, for all groups of an engine, the gradients that graphs have left pending.

    Ranks may use different parameters, but each of them leaves the gradients of some group pending in such a backward.

    Attributes:
        kept: the number so far.
    """

    def __init__(self) -> None:
        self.kept = 0

    def note(self) -> None:
        """Note that the backward of a graph leaves gradients of a group pending."""
        self.kept += 1


class NodeCopies:
    """The node's copies of all buckets of a group, and the decision when to refresh them.

    Args:
        copies: the copy of each bucket.
        members: for each bucket, the indices of its parameters in the group.
        notes, note: the notes of the group before its collectives, and its note before a refresh.
        microbatches: the count of the group's engine.

    Attributes:
        nbytes: bytes of the copies.
    """

    def __init__(
        self,
        copies: Sequence[NodeCopy],
        members: Sequence[Sequence[int]],
        notes: Notes,
        note: str,
        microbatches: Microbatches,
    ) -> None:
        self._copies, self._members = copies, members
        self._notes, self._note = notes, note
        self._state = CopyState()
        self.nbytes = sum(copy.nbytes for copy in copies)
        self._microbatches = microbatches
        # After a forward of a graph without gradient sync: the count then. Once it has increased, a backward has run.
        self._kept_before: int | None = None
        self._reading = 0  # number of gathers of graphs in flight, which read the copies

    @property
    def pending(self) -> bool:
        """Whether gradients of an earlier microbatch wait for their reduction."""
        return self._state.pending or (self._kept_before is not None and self._microbatches.kept > self._kept_before)

    @property
    def state(self) -> CopyState:
        """The facts that decide about the next refresh."""
        return self._state._replace(pending=self.pending)

    def tensors(self) -> list[torch.Tensor]:
        """Return the memory of the copies that exist; a copy is made at its first refresh."""
        return [copy.memory for copy in self._copies if copy.memory is not None]

    def begin_forward(self, grad: bool) -> None:
        """Decide whether a root forward refreshes.

        Args:
            grad: whether it runs in grad mode.
        """
        if not (grad and self.pending):
            self.expire()

    def expire(self) -> None:
        """Make the next gather refresh."""
        self._state = self._state._replace(due=True)

    def change(self) -> None:
        """Note that the stored parameters are about to change, for example by an optimizer step."""
        self.resume(CopyState())

    def end_backward(self, pending: bool) -> None:
        """Note the end of a backward.

        Args:
            pending: whether its gradients wait for a later reduction.
        """
        self.resume(self._state._replace(pending=pending))

    def keep(self) -> None:
        """Note that the backward of a graph leaves the gradients of the group pending."""
        self._microbatches.note()

    def settle(self) -> None:
        """Wait for refreshes that no gather has read, before code changes the stored parameters."""
        for copy in self._copies:
            copy.settle()

    def refresh(self, shards: Sequence[torch.Tensor], after: torch.Event | None) -> None:
        """Begin to refresh all copies from the stored shards of the group, after the event `after`."""
        for ledger in self._notes.refreshes:
            ledger.issue(self._note)
        try:
            for copy, members in zip(self._copies, self._members, strict=True):
                copy.refresh([shards[index] for index in members], (after,))
        except BaseException:
            self._notes.take_back(self._notes.refreshes)
            raise
        self._state = self._state._replace(due=False, read=False)

    def refresh_for_graph(self, shards: Sequence[torch.Tensor], with_gradients: bool, lane: Lane, pends: bool) -> None:
        """Before a graph gathers: refresh if that is due.

        Args:
            shards: the stored shards of the group.
            with_gradients: whether the graph was compiled with gradients enabled.
            lane: the lane of gathers.
            pends: whether the gradients of a forward that runs now will wait for a later reduction.
        """
        state, forward = self.state, current_backward() < 0
        # While another gather reads the copies, the same forward uses the group twice.
        if not self._reading and (state.due or (forward and _again(state, with_gradients))):
            self.refresh(shards, lane.record_current_stream())
        if forward:
            still_pending = state.pending and (pends or not with_gradients)
            self.resume(CopyState(not with_gradients, still_pending, True))
            self._kept_before = self._microbatches.kept if pends and with_gradients else None

    def begin_read(self) -> None:
        """Note a gather of a graph, which reads the copies until `end_read`."""
        self._reading += 1

    def end_read(self) -> None:
        """End a gather of a graph."""
        self._reading -= 1

    def forget_events(self) -> None:
        """Let no gather wait for refreshes in flight: a capture has begun or ended since, and the device was idle."""
        for copy in self._copies:
            copy.forget_event()

    def note_read(self) -> None:
        """Note that a gather reads the copies."""
        if not self._state.read:
            self._state = self._state._replace(read=True)

    def key(self, is_outdated: bool) -> Hashable:
        """Return a value that is equal if the next forward refreshes alike.

        Args:
            is_outdated: whether the stored parameters were written to since the last refresh.

        Returns:
            whether an eager forward refreshes, and whether a compiled one does.
        """
        state = self.state
        due = state.due or is_outdated
        return due or not state.pending, due or (state.read and not state.pending)

    def resume(self, state: CopyState) -> None:
        """Set the state, for example to that after a captured step, which was replayed."""
        self._state, self._kept_before = state, None
