"""Gather buckets: the parameters of one dtype that one all-gather communicates."""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._comm.copies import GatherCopies, Landing, Wholes, regions_in
from .._comm.lanes import Events, Job, Lane
from .._comm.lowbit import gather_copies
from .._memory.pool import BufferPool
from .._memory.slots import Place, Request, Slot
from .._plan.layout import gather_layout
from .._policies import Wire
from .._torch import debug
from .._torch.core import address_of, has_memory, plainly, without_torch_function
from .._torch.distributed import local_part, local_tensor
from .edits import BitSums, Writes, bit_sums
from .faces import Faces, Leaves
from .param import ShardedParam
from .refresh import NodeCopy
from .setup import GatherSetup

_version, _shape, _dim, _rows, _sharded = map(attrgetter, ("_version", "shape", "dim", "rows", "sharded"))


class _Members(dict[Place, int]):
    """The index of the parameter at a `Place`, found by the byte offsets at which parameters begin."""

    def __init__(self, begins: list[int]) -> None:
        self._begins = begins

    def __missing__(self, place: Place) -> int:
        index = self[place] = max(bisect_right(self._begins, place.offset) - 1, 0)
        return index


# Attribute of a node's outputs that later gathers may make from other tensors: a weak reference to the bucket, and the
# parameter's index in it.
OUTPUT_OF = "_output_of"
# Parameters of which autograd has saved handles: by place in a slot, or by index if they are not in a slot.
Saved = set[tuple["Bucket", Place | int]]


class Gatherer:
    """Queues the gathers of one bucket. Views are made once per slot and kept, so each step only repeats the copies.

    Args:
        copies: the copies and the collective of a gather.
        dtype: the dtype of the gathered parameters.
        for_landing: the pool's requests, in forward and backward, for the landing buffer that small parameters share;
            None if no parameters share one.
        pool, lane: the source of memory, and the queue of gathers.
        begins: offsets of the parameters in a slot, in elements, if they differ from the layout's. A gather among a few
            ranks (`Resident`) has a layout of its own, but fills a slot as a gather among all ranks does.

    Attributes:
        copies, for_landing: as given.
    """

    def __init__(
        self,
        copies: GatherCopies,
        dtype: torch.dtype,
        for_landing: tuple[Request, Request] | None,
        pool: BufferPool,
        lane: Lane,
        begins: Sequence[int] = (),
    ) -> None:
        self.copies, self._dtype = copies, dtype
        self._landed_as = dtype if copies.layout.parcel is None else torch.uint8
        self._begins = begins or copies.layout.places.begins
        self.for_landing = for_landing
        self._pool, self._lane = pool, lane
        self._seen: dict[Slot, Wholes] = {}
        self._landed: dict[Slot, Landing] = {}

    def start(self, slot: Slot, shards: list[torch.Tensor], after: Events, read: Sequence[Slot] = ()) -> Job[None]:
        """Begin to gather `shards` into a slot.

        Args:
            slot: the destination.
            shards: this rank's shards.
            after: events that the gather waits for.
            read: slots that contain the shards, to be released when the gather is done.
        """
        wholes = self._seen.get(slot)
        if wholes is None:
            with plainly():
                flat = slot.typed(self._dtype, written=True)
                regions = regions_in(flat, self.copies.layout.places, self._begins)
                wholes = self._seen[slot] = self.copies.into(regions)
        # A straight gather reads the shards and writes the slot without copies, so it leases and releases nothing.
        if self.copies.is_straight:
            assert self.copies.transport is not None
            assert not read
            return self._lane.launch(self.copies.transport.all_gather, (wholes.regions, shards), after, None)
        return self.start_into(wholes, shards, after, read)

    def start_into(
        self, wholes: Wholes, shards: list[torch.Tensor], after: Events, read: Sequence[Slot] = ()
    ) -> Job[None]:
        """Like `start`, but gather into any memory, given as the views that a gather fills."""
        leased: list[Slot] = []
        try:
            landing = None
            if self.for_landing is not None:
                leased.append(slot := self._pool.lease(self.for_landing[self._pool.backward]))
                after = *after, *slot.free_after
                landing = self._landed.get(slot)
                if landing is None:
                    buffer = slot.typed(self._landed_as, written=True)
                    landing = self._landed[slot] = self.copies.landing(buffer)
            done = functools.partial(self._pool.release_all, [*leased, *read]) if leased or read else None
            return self._lane.start(self.copies.steps(wholes, landing, shards), after, shards, done)
        except BaseException:
            self._pool.release_failed(leased)
            raise

    def leave_slots(self) -> None:
        """Drop all views of slots."""
        self._seen.clear()
        self._landed.clear()


class Bucket:
    """Parameters of one group that one collective gathers, with the state that handles of them check.

    A subclass decides how they are gathered and where: `GatherBucket` into a slot of the pool, `ExtensionBucket` as the
    parameters themselves define it.

    Attributes:
        group: returns the group; None if it was freed.
        params: the parameters, as members of this bucket.
        fqns: their names.
        dtype: the dtype in which they are used. `is_complex` tells whether tensors of it may be lazy conjugates.
        address: the address of the memory that was gathered into last; 0 if it does not belong to the pool.
        readable: whether the gather is done, so that the unsharded parameters can be read.
        generation: increased when saved handles become stale: the sharded parameters have changed, or memory outside of
            the pool was replaced.
        shown: during a forward whose modules have outputs of an autograd node (`_engine/node.py`), these outputs, by
            index; else empty.
        here: the leaves over the memory in which the unsharded parameters are now; None if none were made over it.
            Modules have leaves when they do not have outputs of a node, for example in an evaluation (`faces.py`).
        writes: the writes to the unsharded parameters; see `edits.py`.
        saved: number of handles made so far.
        reads_left: how many more handles backward will read before `Engine.halfway` is called; 0 if it is not to be
            called.
        gather_bytes: bytes that a gather leases from the pool; 0 for an `ExtensionBucket`, whose sizes are known only
            when it gathers.
    """

    __slots__ = (
        "__weakref__", "_sharded", "_versions", "address", "dtype", "fqns", "gather_bytes", "generation", "group",
        "here", "is_complex", "params", "readable", "reads_left", "saved", "shown", "writes",
    )  # fmt: skip

    def __init__(self, params: Sequence[ShardedParam], dtype: torch.dtype, group: Callable[[], Any]) -> None:
        self.group = group
        self.params = list(params)
        self._sharded = list(map(_sharded, params))
        self.fqns = [p.fqn for p in params]
        self.dtype, self.is_complex = dtype, dtype.is_complex
        self.address = 0
        self.readable = False
        self._versions: list[int] = []  # versions of the shards at the last gather
        self.generation = self.saved = self.reads_left = self.gather_bytes = 0
        self.shown: Sequence[torch.Tensor] = ()
        self.here: Leaves | None = None
        self.writes = Writes(len(params))

    @property
    def weights(self) -> list[torch.Tensor]:
        """The unsharded parameters, without autograd history."""
        raise NotImplementedError

    def count_saved(self) -> None:
        """Count a handle."""
        self.saved += 1

    def whole(self, index: int) -> torch.Tensor:
        """Return an unsharded parameter as the last gather has made it, if outputs of nodes have `OUTPUT_OF`."""
        raise NotImplementedError

    def name_of(self, place: Place | int) -> str:
        """Return the name of the parameter at a place, or with an index."""
        assert isinstance(place, int)
        return self.fqns[place]

    def weights_for_use(self) -> list[torch.Tensor]:
        """Return the unsharded parameters for the node of a forward that begins; `begin_forward` must follow."""
        return self.weights

    def begin_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note the node of a use: these are its outputs for the members, and modules have them installed."""
        self.shown = outputs
        self.writes.packed.clear()

    def end_forward(self, dropped: Sequence[torch.Tensor]) -> bool:
        """Note the end of a forward, while the outputs of its node or the leaves are still installed.

        Args:
            dropped: views in the module's outputs, which the caller has replaced by copies and is about to drop.

        Returns:
            whether the forward has written to unsharded parameters, judging by versions.
        """
        shown, self.shown = self.shown, ()
        if any(map(_version, shown)):
            self.writes.note_shown(shown)
            return True
        # Without outputs, the forward has used the leaves, if any. Otherwise, writes to leaves are found at release.
        return not shown and self.here is not None and bool(self.here.written())

    def note_kept(self) -> None:
        """At the end of a use's backward, note which of its parameters other code keeps."""

    def leaves(self) -> list[torch.nn.Parameter]:
        """Return the unsharded parameters as leaves: the same objects whenever they are in the same memory."""
        assert self.here is not None
        return self.here.params

    def replace_leaves(self, leaves: Leaves | None) -> Leaves | None:
        """Set the leaves of this gather, or None after it, and return the previous ones."""
        previous, self.here = self.here, leaves
        return previous

    def start(self, after: torch.Event | None) -> Job[None]:
        """Begin to gather, ordered after the event `after` (the last change of the sharded parameters)."""
        raise NotImplementedError

    def expire_handles(self) -> None:
        """Make saved handles stale: backward raises an error if it reads one."""
        self.generation += 1

    def note_shards(self, shards: Sequence[torch.Tensor]) -> None:
        """Note a gather of these shards. If they were written to since the last one, saved handles become stale."""
        with without_torch_function():  # or each DTensor's `__torch_function__` would run
            versions = [*map(_version, self._sharded), *map(_version, shards)]
        if versions != self._versions:
            self._versions = versions
            self.generation += 1

    def is_outdated(self) -> bool:
        """Whether shards were written to since the last gather began, judging by versions."""
        with without_torch_function():
            return [*map(_version, self._sharded), *map(_version, map(local_tensor, self._sharded))] != self._versions

    def arrived(self) -> None:
        """Mark the gather as done: the unsharded parameters can be read."""
        self.readable = True

    def changed_bits(self) -> list[str]:
        """When debugging: FQNs of parameters whose bits have changed since they were gathered (checksums)."""
        return []

    def await_memory(self) -> None:
        """After a failed gather: make the current stream wait for earlier uses of the memory.

        The gather may have failed before it waited for them. The event of the release, which the caller records next,
        must come after them all the same.
        """

    def release(self, after: torch.Event | None, reserve: bool = False) -> None:
        """Release the unsharded parameters, if they are gathered.

        Args:
            after: an event that was recorded after all work that reads them.
            reserve: whether to keep their memory for the next gather.
        """
        raise NotImplementedError

    def lose(self) -> None:
        """Drop the unsharded parameters without reusing their memory: an abandoned gather may still write to it."""
        self.readable = False

    def keeps_views(self) -> bool:
        """Whether user code has views of memory that is reserved for the next gather."""
        return False

    def forget(self) -> None:
        """Release memory that is reserved for the next gather: this bucket will not be used again."""
        raise NotImplementedError

    def leave_slots(self) -> None:
        """Drop all views of slots, while no slot is leased."""
        raise NotImplementedError

    # A handle stands for a parameter as it was gathered, and resharding discards anything written to it. So an edit is
    # an error, raised at the end of the forward that made the edit, at the release of the parameters, or when backward
    # finds that a parameter was edited after it was saved.

    def risen(self) -> set[int]:
        return set(self.writes.risen(self.here))

    def sums(self, indices: Iterable[int]) -> dict[int, BitSums]:
        return {}

    def accept(self, edited: Collection[int] = ()) -> None:
        self.writes.accept()
        if self.here is not None:
            self.here.note_versions(edited)


class GatherBucket(Bucket):
    """Parameters that are gathered unchanged, cast to one dtype, into a slot of the pool.

    Attributes:
        slot: the slot of the unsharded parameters, or of the running gather; None while sharded.
        copies: the copies and the collective of a gather.
        places: the layout of the parameters in a slot.
        begins: offset of each parameter in a slot, in elements.
        for_weights, for_landing: the pool's requests, in forward and in backward, for the unsharded parameters and for
            the landing buffer that small parameters share (None if there is none).
        members: by `Place`, the index of the parameter there.
        nbytes: bytes that the unsharded parameters need in a slot.
        node_copy: with `outer_sharding`, the copy of the node's pieces, which gathers send; else None.
    """

    __slots__ = (
        "_faces", "_gatherer", "_pool", "_reserved", "_self", "_sums", "begins", "copies", "for_landing",
        "for_weights", "members", "nbytes", "node_copy", "places", "slot",
    )  # fmt: skip

    def __init__(
        self,
        params: Sequence[ShardedParam],
        dtype: torch.dtype,
        setup: GatherSetup,
        wire: Wire | None = None,
        refresh_wire: Wire | None = None,
    ) -> None:
        info, transport, pool, lane = setup.info, setup.transport, setup.pool, setup.lane
        shapes, dims = list(map(_shape, params)), list(map(_dim, params))
        route = None if transport is None else transport.route
        rows = list(map(_rows, params))
        layout = gather_layout(shapes, info.shard_size, dtype.itemsize, dims, route, rows, wire)
        super().__init__(params, dtype, setup.group)
        self.slot: Slot | None = None
        self._faces = Faces(dtype, layout.places, params)
        pieces = list(map(local_tensor, self._sharded))
        self.node_copy = (
            None
            if setup.outer is None
            else NodeCopy(layout.places.params, info, setup.outer, dtype, refresh_wire, pieces, pool.memory, lane)
        )
        like = torch.empty(0, dtype=dtype, device=info.device)
        # The node's pieces are sent as they are.
        sent, offloads = (pieces, info.offloads) if self.node_copy is None else ([], False)
        self.copies = gather_copies(layout, info.shard_rank, transport, sent, offloads, like, lane.streams)
        self.for_weights = pool.requests(f"weights {self.fqns[0]}", layout.nbytes, refills=_are_packed(params))
        landing = f"landing {self.fqns[0]}"
        self.for_landing = None if layout.landing is None else pool.requests(landing, layout.landing_bytes)
        self._gatherer = Gatherer(self.copies, dtype, self.for_landing, pool, lane)
        self._pool = pool
        self._self = weakref.ref(self)
        self._sums: list[int] | None = None  # checksums of the gathered parameters, when debugging
        self._reserved: Slot | None = None  # the slot that the next gather must take
        self.nbytes = layout.nbytes
        requests = (self.for_weights, self.for_landing)
        self.gather_bytes = sum(forward.nbytes for forward, _ in filter(None, requests))
        self.places, self.begins = layout.places, layout.places.begins
        self.members = _Members([begin * dtype.itemsize for begin in self.begins])

    @property
    def weights(self) -> list[torch.Tensor]:
        assert self.slot is not None
        return self._faces.unused(self.slot)

    def weights_for_use(self) -> list[torch.Tensor]:
        assert self.slot is not None
        return self._faces.unused(self.slot, for_use=True)

    def name_of(self, place: Place | int) -> str:
        assert isinstance(place, Place)
        return self.fqns[self.members[place]]

    # These methods run in each step. They name the base class, because `super()` takes more host time.
    # A selective checkpoint may keep unsharded parameters. So may a function that puts them on its ``ctx``, or a module
    # that caches them. No handle stands for these tensors, so `Faces` finds them at the end of a forward.

    def begin_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        self._faces.begin_forward(outputs)
        Bucket.begin_forward(self, outputs)

    def end_forward(self, dropped: Sequence[torch.Tensor]) -> bool:
        self._faces.end_forward(self.shown, dropped, self.here)
        return Bucket.end_forward(self, dropped)

    def note_kept(self) -> None:
        if self.writes.noted:
            self._faces.note_kept(self.writes.noted)

    def leaves(self) -> list[torch.nn.Parameter]:
        if self.slot is not None:
            self.here = self._faces.use_leaves(self.slot)
            self.writes.packed.clear()
        return Bucket.leaves(self)

    def open(self) -> Slot:
        """Lease the slot into which parameters will be gathered, or resume the reserved one."""
        slot, self._reserved = self._reserved, None
        if slot is None:
            slot = self._pool.lease(self.for_weights[self._pool.backward], self._self)
        else:
            self._pool.take_back(slot, self._self)
        self.slot, self.address = slot, slot.begin
        self.here = self._faces.enter(slot)  # last, because it may raise: then `release` finds the slot
        return slot

    def start(self, after: torch.Event | None) -> Job[None]:
        slot = self.open()
        if self.node_copy is None:
            shards = list(map(local_tensor, self._sharded))
            self.note_shards(shards)
            events: Events = (after,)
        else:  # its refresh has noted the shards, and was ordered after their last change
            events, shards = self.node_copy.arrive(), self.node_copy.pieces
        return self._gatherer.start(slot, shards, (*events, *slot.free_after))

    def arrived(self) -> None:
        self.readable = True
        writes = self.writes
        if writes.sums_next or writes.gathered:
            writes.note_gathered(self._sums_in_slot(writes.sums_next))
        self._sums = self._checksums(self.slot) if debug.debugging and self.slot is not None else None

    def release(self, after: torch.Event | None, reserve: bool = False) -> None:
        """Release the slot, or reserve it for the next gather if requested or if user code keeps views of it."""
        slot, leaves = self.slot, self.here
        self.slot = self.here = None
        self.readable = False
        if self.writes.noted is not None:  # without a backward there is nothing to end; a call would cost host time
            self.writes.end_reads()
        if slot is None:
            return
        faces = self._faces
        # Code may keep views of leaves at any time, because users see them between forwards. Views of outputs were
        # found at the end of the forward. Views that code takes in backward are not found (`saved_tensors.py`).
        lent = (leaves is not None or faces.lent) and faces.release(leaves)
        if lent or reserve:
            self._reserved = slot
            self._pool.retain(slot, after, for_views=not reserve)
            return
        if faces.kept:
            faces.hide_kept(slot)
        self._pool.release(slot, after)

    def await_memory(self) -> None:
        if self.slot is not None:
            self.slot.wait_until_free()

    def lose(self) -> None:
        super().lose()
        self.slot = self._sums = None

    def sums(self, indices: Iterable[int]) -> dict[int, BitSums]:
        written = self.writes.risen(self.here)
        read = self._read_before(written)
        here = [i for i in indices if i not in read and all(self._lies(each, i) for each in written.get(i, ()))]
        return self._sums_in_slot(here)

    def _read_before(self, written: dict[int, list[torch.Tensor]]) -> set[int]:
        """Return those of the parameters in `written` that autograd saved as a leaf before the last write to the leaf.

        Such a parameter counts as edited, even if its bits are equal to the gathered ones again. For example, a forward
        doubles a weight, computes with it, and halves it. Backward would compute with the halved one.

        This check is for leaves only. For outputs of a node, backward compares versions when it reads (`Writes`). It
        cannot for leaves, whose versions increase at each release. If a leaf is a DTensor, any write counts as a later
        one: `Writes.packed` has versions of local tensors, which a write through a DTensor does not increase.
        """
        versions = {i: {each._version for each in w if not isinstance(each, DTensor)} for i, w in written.items()}
        packed = [(self.members[place], version) for place, version in self.writes.packed]
        return {index for index, version in packed if index in versions and version not in versions[index]}

    def _lies(self, tensor: torch.Tensor, index: int) -> bool:
        """Whether an unsharded parameter still has its address and shape, which `set_` may change."""
        assert self.slot is not None
        local = local_part(tensor)
        place = self.slot.begin + self.begins[index] * self.dtype.itemsize
        shape = self.places.params[index].shape
        return has_memory(local) and address_of(local) == place and local.shape == shape and local.is_contiguous()

    def _sums_in_slot(self, indices: Iterable[int]) -> dict[int, BitSums]:
        assert self.slot is not None
        flat, params = self.slot.typed(torch.uint8), self.places.params
        if not has_memory(flat):
            return {}
        size = self.dtype.itemsize
        with plainly():
            parts = {i: flat.narrow(0, size * self.begins[i], size * params[i].numel) for i in indices}
            return {i: bit_sums(part.view(self.dtype).view(params[i].shape)) for i, part in parts.items()}

    def _checksums(self, slot: Slot) -> list[int]:
        memory, size = slot.typed(torch.uint8), self.dtype.itemsize
        lying = zip(self.begins, self.places.params, strict=True)
        return [debug.checksum(memory.narrow(0, size * begin, size * each.numel)) for begin, each in lying]

    def changed_bits(self) -> list[str]:
        before, self._sums = self._sums, None
        if before is None or self.slot is None:
            return []
        compared = zip(self.fqns, before, self._checksums(self.slot), strict=True)
        return [fqn for fqn, was, now in compared if was != now]

    def keeps_views(self) -> bool:
        return self._reserved is not None and self._faces.release(None)

    def forget(self) -> None:
        if self._reserved is not None:
            if self._faces.kept:
                self._faces.hide_kept(self._reserved)
            self._pool.take_back(self._reserved)
            self._pool.release_failed((self._reserved,))
            self._reserved = None

    def leave_slots(self) -> None:
        self._gatherer.leave_slots()
        self._faces.clear()


def _are_packed(params: Sequence[ShardedParam]) -> bool:
    return all(param.carried is not None for param in params)
