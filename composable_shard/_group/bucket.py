"""What one all-gather moves: weights of one dtype. Views are made once per slot and kept: a step only replays them."""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from .. import _debug
from .._comm.collectives import Transport
from .._comm.copies import by_rank
from .._comm.lanes import Job, Lane, Steps
from .._comm.mesh import MeshInfo
from .._errors import ShardConfigStateError
from .._memory.pool import BufferPool
from .._memory.slots import Place, Slot
from .._plan.layout import BucketLayout, GatherLayout, ParamLayout, gather_layout
from .._torch.core import alias, has_memory, plainly, storage_id, storage_uses
from .._torch.distributed import local_tensors
from .param import ShardedParam

if TYPE_CHECKING:
    from .group import ParamGroup

LEAF_OF = "_unsharded_copy_of"  # marks a leaf, for whoever takes it for the parameter


class _Members(dict[Place, int]):
    """The index of the parameter that lies at a place, by the bytes at which each begins."""

    def __init__(self, begins: list[int]) -> None:
        self._begins = begins

    def __missing__(self, place: Place) -> int:
        index = self[place] = max(bisect_right(self._begins, place.offset) - 1, 0)
        return index


class _Views(NamedTuple):
    """One slot, seen as the unsharded parameters, to write to.

    Attributes:
        wholes: the parameters.
        places: of those that are packed, by rank: (world, piece), or (world, *local shape) if not cut along dim 0.
        own: where the pieces go that this rank copies before they are gathered.
        regions: of those that are gathered alone, (world * piece,).
        sent: and what this rank sends of each: its place among them, or None for the shard itself.
    """

    wholes: list[torch.Tensor]
    places: list[torch.Tensor]
    own: list[torch.Tensor]
    regions: list[torch.Tensor]
    sent: list[torch.Tensor | None]


class _Landed(NamedTuple):
    """One slot, seen as the buffer of the packed: whole, this rank's part, its pieces, and those of all ranks."""

    flat: torch.Tensor
    chunk: torch.Tensor
    own: list[torch.Tensor]
    pieces: list[torch.Tensor]


def _apart(slot: Slot, part: torch.Tensor) -> torch.Tensor:
    """A view of a slot that shares no storage with others of it, unless the slot's memory resizes."""
    return part.data if slot.resizes else alias(part)


class _Face:
    """The unsharded parameters in one slot, to read, over storages of their own: so it is known who else reads there.

    Each has its own: operators such as `torch.cond` take no tensors that share one.

    Attributes:
        weights: the unsharded parameters, without autograd history.
        alone: how many tensors share each storage while nobody uses the face.
        at_rest: likewise, while only the outputs of a node do, of which there is one set at a time.
    """

    __slots__ = ("_storages", "alone", "at_rest", "weights")

    def __init__(self, slot: Slot, dtype: torch.dtype, layout: BucketLayout) -> None:
        with plainly():
            flat = slot.typed(torch.uint8)  # bytes: not every dtype can be exchanged
            size = dtype.itemsize
            starts = [size * layout.world * at.offset for at in layout.params]
            self.weights = [
                _apart(slot, flat[begin : begin + size * at.numel]).view(dtype).view(at.shape)
                for begin, at in zip(starts, layout.params, strict=True)
            ]
        # Memory that resizes is good for views at the next gather, too, wherever that is.
        self._storages = [] if slot.resizes else [storage_id(weight) for weight in self.weights if has_memory(weight)]
        self.alone = self.users()
        self.at_rest: list[int] = []  # as counted when they are made for the first time

    @property
    def has_outputs(self) -> bool:
        """Whether a node shows it: its outputs come and go together, so one tells of all."""
        return bool(self._storages) and storage_uses(self._storages[0]) != self.alone[0]

    def users(self) -> list[int]:
        """How many tensors share each storage now; those that are fake are not counted."""
        return list(map(storage_uses, self._storages))

    def others(self, users: list[int], dropped: Iterable[torch.Tensor]) -> bool:
        """Whether others than the outputs of a node, and than these views, are among the users."""
        gone = Counter(map(storage_id, dropped))
        counts = zip(users, self.at_rest, self._storages, strict=True)
        return any(now - gone[storage] > at_rest for now, at_rest, storage in counts)


def _own(row: torch.Tensor, param: ParamLayout, rank: int) -> torch.Tensor:
    """Of a rank's padded piece, (piece,), what it really holds."""
    return row[: param.rows_of(rank) * param.row].view(param.local_shape(rank))


def _views(slot: Slot, dtype: torch.dtype, layout: GatherLayout, rank: int, copied: Sequence[int]) -> _Views:
    with plainly():
        flat, params = slot.typed(dtype, written=True), layout.places.params
        world = layout.places.world
        regions = [flat[world * at.offset :][: world * at.piece] for at in params]
        wholes = [region[: at.numel].view(at.shape) for region, at in zip(regions, params, strict=True)]
        places = [
            regions[i].view(world, -1) if params[i].dim == 0 else by_rank(wholes[i], params[i]) for i in layout.packed
        ]
        rows = {i: regions[i].view(world, -1)[rank] for i in copied}
        own = [_own(row, params[i], rank) for i, row in rows.items()]
        return _Views(wholes, places, own, [regions[i] for i in layout.alone], [rows.get(i) for i in layout.alone])


def _landed(slot: Slot, dtype: torch.dtype, layout: BucketLayout, rank: int) -> _Landed:
    with plainly():
        flat = slot.typed(dtype, written=True)[: layout.total]
        chunks = flat.view(layout.world, layout.numel)
        pieces = [chunks[:, at.offset : at.offset + at.piece] for at in layout.params]
        own = [_own(piece[rank], at, rank) for piece, at in zip(pieces, layout.params, strict=True)]
        cut = [
            piece if at.dim == 0 else piece.view(layout.world, *at.local_shape(rank))
            for piece, at in zip(pieces, layout.params, strict=True)
        ]
        return _Landed(flat, chunks[rank], own, cut)


_version = attrgetter("_version")


class Leaves:
    """The unsharded parameters in one place as leaf Parameters, the same whenever they are there.

    Attributes:
        params: the leaves.
        versions: of each, as long as nobody has edited it since its weights were gathered.
        face: over which they lie, if they lie in a slot.
    """

    __slots__ = ("face", "params", "versions")

    def __init__(self, params: list[torch.nn.Parameter], face: _Face | None = None) -> None:
        self.params = params
        self.face = face
        self.note_versions()

    def note_versions(self) -> None:
        """What they hold was gathered."""
        self.versions: list[int] = list(map(_version, self.params))

    def are_edited(self) -> bool:
        """Whether any was edited since."""
        return list(map(_version, self.params)) != self.versions

    def give_up(self) -> None:
        """Have autograd refuse what it has saved of them outside of a forward, where no handle stands for it."""
        torch.autograd.graph.increment_version(self.params)
        self.note_versions()


class Bucket(Protocol):
    """Parameters of one group that one collective gathers.

    Attributes:
        group: whose it is, weakly.
        fqns: names of its members.
        dtype: in which they are used.
        slot: where they are now, or will be when the gather is done; None if nowhere.
        readable: whether they are there.
        generation: how often an optimizer has changed the sharded parameters.
        shown: what the forward that runs now has been given of a node, by index; empty if that is leaves.
        here: the leaves in the place of the weights, if any were made there.
        edited: whether a leaf there was edited before the forward that runs now.
        unedited: what a forward was shown, if the backward that runs now has found that nobody has edited it since.
        saved: how many handles stand for its weights since the last forward began.
        gather_bytes: that a gather leases from the pool.
        reads_left: after how many reads of a handle the engine wants to hear that a use is half way; 0 if it does not.
    """

    group: Callable[[], ParamGroup | None]
    fqns: list[str]
    dtype: torch.dtype
    slot: Slot | None
    readable: bool
    generation: int
    shown: Sequence[torch.Tensor]
    here: Leaves | None
    edited: bool
    unedited: Sequence[torch.Tensor] | None
    saved: int
    reads_left: int
    gather_bytes: int

    @property
    def weights(self) -> list[torch.Tensor]:
        """The unsharded parameters, without autograd history."""

    def weights_for_use(self) -> list[torch.Tensor]:
        """The same for a forward that begins; `begin_use` follows when its node is made."""

    def begin_use(self, outputs: Sequence[torch.Tensor]) -> None:
        """All that a node shows of the weights is made: its outputs."""

    def end_use(self, dropped: Sequence[torch.Tensor]) -> None:
        """After a forward, while the module still has what it was shown: notice who else keeps views.

        A selective checkpoint does, or a function that keeps them on its ``ctx``, or a module that caches them: no
        handle stands for those. They must stay true as long as they live.

        Args:
            dropped: views that will be gone at once.
        """

    def leaves(self) -> list[torch.nn.Parameter]:
        """The unsharded parameters as leaves; the same objects whenever the bucket is in the same place."""

    def start(self, after: torch.Event | None) -> Job[None]:
        """Begin to gather, behind the event `after` (the parameters' last change)."""

    def arrived(self) -> None:
        """The weights can be read."""

    def release(self, after: torch.Event | None, reserve: bool = False) -> None:
        """Give the memory back, or reserve it for the next gather; nothing, if there is none."""

    def lose(self) -> None:
        """Give the weights up and leave their memory leased: a gather that nobody waits for may still write to it."""

    def forget(self) -> None:
        """Reserve nothing any more; this bucket will not be used again."""

    def leave_slots(self) -> None:
        """Hold no view of any slot, while none is leased."""
        return

    # A handle stands for what was gathered. What was edited before it was saved is saved as a copy, for the edit is
    # lost when the weights are given up; what is edited afterwards, backward must not read.

    def was_edited(self, index: int, version: int) -> bool:
        """Whether a weight that is about to be saved is not what was gathered any more; `version` is that of a view."""
        if self.shown or self.here is None:
            return version > 0 or self.edited
        return version != self.here.versions[index]

    def find_edited(self, shown: Sequence[torch.Tensor]) -> set[int]:
        """The weights that were edited since a forward that was shown these began, or since they were gathered.

        A backward that has found none looks no more: to look costs as much as the rest of reading a saved weight.
        """
        found = {index for index, out in enumerate(shown) if out._version} if any(map(_version, shown)) else set()
        if self.here is not None and self.here.are_edited():
            now = zip(self.here.params, self.here.versions, strict=True)
            found |= {index for index, (leaf, version) in enumerate(now) if leaf._version != version}
        self.unedited = None if found else shown
        return found


class GatherBucket(Bucket):
    """Parameters that are gathered as they are, cast to one dtype, into a slot of the pool.

    Attributes:
        params: its members.
        for_weights, for_landing: what it asks the pool for, in forward and in backward.
        members: by place, the index of the parameter that lies there.
    """

    __slots__ = (
        "_copied", "_dropped", "_face", "_faces", "_held_by_views", "_landed", "_lane", "_layout", "_leaves",
        "_lent", "_offloads", "_pool", "_rank", "_reserved", "_seen", "_self", "_sharded", "_straight", "_sum",
        "_transport", "dtype", "edited", "for_landing", "for_weights", "fqns", "gather_bytes", "generation", "group",
        "here", "members", "nbytes", "params", "readable", "reads_left", "saved", "shown", "slot", "unedited",
    )  # fmt: skip

    def __init__(
        self,
        params: Sequence[ShardedParam],
        dtype: torch.dtype,
        group: Callable[[], ParamGroup | None],
        info: MeshInfo,
        transport: Transport | None,
        pool: BufferPool,
        lane: Lane,
    ) -> None:
        self.group = group
        self.params = list(params)
        self.fqns = [p.fqn for p in params]
        self._sharded = [p.sharded for p in params]
        self.dtype = dtype
        shapes, dims = [p.shape for p in params], [p.dim for p in params]
        route = None if transport is None else transport.route
        self._layout = layout = gather_layout(shapes, info.shard_size, dtype.itemsize, dims, route)
        self._rank = info.shard_rank
        self._transport, self._offloads = transport, info.offloads
        self._pool, self._lane = pool, lane
        self.nbytes = layout.nbytes
        self.for_weights = pool.requests(f"weights {self.fqns[0]}", layout.nbytes)
        self.for_landing = pool.requests(f"landing {self.fqns[0]}", layout.landing_bytes) if layout.landing else None
        self._self = weakref.ref(self)
        self.gather_bytes = self.for_weights[0].nbytes + (self.for_landing[0].nbytes if self.for_landing else 0)
        self._copied = [i for i in (layout.alone if transport else range(len(params))) if self._must_copy(i)]
        self._straight = not self._copied and not layout.packed  # shards go into their places as they are
        self.slot: Slot | None = None
        self.readable = False
        self.generation = self.saved = self.reads_left = 0
        self._sum: int | None = None  # of their bytes, when debugging
        self._reserved: Slot | None = None  # where they will be again
        self._held_by_views = 0  # bytes of that, if it is reserved for those alone who keep views
        self._seen: dict[Slot, _Views] = {}
        self._landed: dict[Slot, _Landed] = {}
        self._faces: dict[Slot, list[_Face]] = {}
        self._face: _Face | None = None  # what the forward that runs now reads
        self._lent: list[_Face] = []  # those of which somebody keeps views
        self._leaves: dict[Slot, Leaves] = {}
        self._dropped: list[weakref.ref[torch.Tensor]] = []  # views that are about to go
        self.shown: Sequence[torch.Tensor] = ()
        self.here: Leaves | None = None
        self.edited = False
        self.unedited: Sequence[torch.Tensor] | None = None
        self.members = _Members([layout.places.world * at.offset * dtype.itemsize for at in layout.places.params])

    def _must_copy(self, index: int) -> bool:
        """Whether a shard itself cannot be sent: it must be cast, padded or moved first, or there is nobody else."""
        at = self._layout.places.params[index]
        short, param = at.rows_of(self._rank) < at.chunk, self.params[index]
        as_it_is = param.dtype == self.dtype and param.local.is_contiguous()
        return self._transport is None or short or self._offloads or not as_it_is

    def _views_of(self, slot: Slot) -> _Views:
        views = self._seen.get(slot)
        if views is None:
            views = self._seen[slot] = _views(slot, self.dtype, self._layout, self._rank, self._copied)
        return views

    def _idle_face(self) -> _Face:
        assert self.slot is not None
        faces = self._faces.setdefault(self.slot, [])
        for face in faces:
            if not face.has_outputs and (face not in self._lent or face.users() == face.alone):
                return face
        faces.append(_Face(self.slot, self.dtype, self._layout.places))
        return faces[-1]

    @property
    def weights(self) -> list[torch.Tensor]:
        return self._idle_face().weights

    def weights_for_use(self) -> list[torch.Tensor]:
        self._face = face = self._idle_face()
        if self._lent and face in self._lent:
            self._lent.remove(face)  # nobody has views of it any more
        return face.weights

    def begin_use(self, outputs: Sequence[torch.Tensor]) -> None:
        assert self._face is not None
        if not self._face.at_rest:
            self._face.at_rest = self._face.users()
        self.shown = outputs
        if self.here is not None:
            self.edited = self.here.are_edited()

    def end_use(self, dropped: Sequence[torch.Tensor]) -> None:
        self.shown, face = (), self._face
        if face is None or (users := face.users()) == face.at_rest or face in self._lent:
            return
        views = {id(t): t for t in dropped if not isinstance(t, torch.nn.Parameter)}
        if face.others(users, views.values()):
            self._lent.append(face)
        elif self.here is not None and face is self.here.face:
            self._dropped = list(map(weakref.ref, views.values()))

    def leaves(self) -> list[torch.nn.Parameter]:
        assert self.slot is not None
        found = self.here
        if found is None:
            with plainly():
                face = _Face(self.slot, self.dtype, self._layout.places)
                # `.data` gives each a version counter of its own, which `release` moves.
                leaves = [
                    torch.nn.Parameter(p.parallel.wrap(w.data) if p.parallel else w.data, requires_grad=False)
                    for w, p in zip(face.weights, self.params, strict=True)
                ]
            for leaf, fqn in zip(leaves, self.fqns, strict=True):
                leaf.__dict__[LEAF_OF] = fqn
            face.alone = face.at_rest = face.users()
            found = self.here = self._leaves[self.slot] = Leaves(leaves, face)
        self._face = found.face
        return found.params

    def open(self) -> Slot:
        """Lease the slot into which weights will be gathered."""
        if self._reserved is None:
            slot = self._pool.lease_for(self.for_weights[self._pool.backward], self._self)
        else:
            slot, self._reserved = self._reserved, None
            slot.owner = self._self
            self._taken_back()
        self.slot = slot
        self.here = self._leaves.get(slot)
        return slot

    def _taken_back(self) -> None:
        self._pool.lent_bytes -= self._held_by_views
        self._held_by_views = 0

    def wholes_in(self, slot: Slot) -> list[torch.Tensor]:
        """The unsharded parameters in a slot, to write to."""
        return self._views_of(slot).wholes

    def start(self, after: torch.Event | None) -> Job[None]:
        slot = self.open()
        if self._straight and self._transport is not None:
            regions, shards = self._views_of(slot).regions, local_tensors(self._sharded)
            return self._lane.launch(self._transport.all_gather, (regions, shards), (after, *slot.free_after), None)
        wanted = self.for_landing
        landing = None if wanted is None else self._pool.lease_for(wanted[self._pool.backward])
        events = (after, *slot.free_after, *(() if landing is None else landing.free_after))
        shards = local_tensors(self._sharded)
        try:
            done = None if landing is None else functools.partial(self._pool.release, landing)
            return self._lane.start(self._steps(slot, landing, shards), events, shards, done)
        except BaseException:
            self._pool.give_up([landing] if landing is not None else [])
            raise

    def _steps(self, slot: Slot, landing: Slot | None, shards: list[torch.Tensor]) -> Steps[None]:
        """Gather large parameters alone, straight into their places, the others as one, to be copied there."""
        views = self._views_of(slot)
        if views.own:
            torch._foreach_copy_(views.own, [shards[i] for i in self._copied], non_blocking=self._offloads)
        if self._transport is None:
            return
        alone = self._layout.alone
        sent = [shards[i] if own is None else own for i, own in zip(alone, views.sent, strict=True)]
        if landing is None:
            yield self._transport.all_gather(views.regions, sent)
            return
        landed = self._landed_in(landing)
        torch._foreach_copy_(landed.own, [shards[i] for i in self._layout.packed], non_blocking=self._offloads)
        yield self._transport.all_gather([*views.regions, landed.flat], [*sent, landed.chunk])
        torch._foreach_copy_(views.places, landed.pieces)

    def _landed_in(self, landing: Slot) -> _Landed:
        landed = self._landed.get(landing)
        if landed is None:
            assert self._layout.landing is not None
            landed = self._landed[landing] = _landed(landing, self.dtype, self._layout.landing, self._rank)
        return landed

    def release(self, after: torch.Event | None, reserve: bool = False) -> None:
        """Give the slot back, or reserve it for the next gather, as also while others keep views of it."""
        if self.slot is None:
            return
        if self._sum is not None:
            self._check_unchanged(self.slot)
        kept = self.here is not None and self._leave(self.here)
        if self._lent:
            self._lent = [face for face in self._lent if face.users() != face.alone]
        if reserve or kept or self._lent:
            self._reserved, self.slot.owner = self.slot, None
            self._held_by_views = 0 if reserve else self.slot.nbytes
            self._pool.lent_bytes += self._held_by_views
            self.slot.free_after = () if after is None else (after,)
        else:
            self._pool.release(self.slot, after)
        self.slot = self.here = self.unedited = None
        self.readable = self.edited = False

    def _leave(self, leaves: Leaves) -> bool:
        """Give the leaves up; whether somebody keeps views of them."""
        leaves.give_up()
        face, dropped, self._dropped = leaves.face, self._dropped, []
        assert face is not None
        users = face.users()
        return users != face.alone and face.others(users, [view for ref in dropped if (view := ref()) is not None])

    def lose(self) -> None:
        self.slot, self.readable, self._sum = None, False, None

    def arrived(self) -> None:
        self.readable = True
        self._sum = _debug.checksum(self._bytes_in(self.slot)) if _debug.debugging and self.slot is not None else None

    def _bytes_in(self, slot: Slot) -> torch.Tensor:
        return slot.typed(torch.uint8)[: self.nbytes]

    def _check_unchanged(self, slot: Slot) -> None:
        before, self._sum = self._sum, None
        if _debug.checksum(self._bytes_in(slot)) != before:
            raise ShardConfigStateError(
                f"unsharded parameters of the group with {', '.join(self.fqns)}: were written to while gathered; such "
                "a change is lost. Change the sharded parameters instead, outside of forward and backward"
            )

    def forget(self) -> None:
        if self._reserved is not None:
            self._pool.release(self._reserved, *self._reserved.free_after)
            self._reserved = None
            self._taken_back()

    def leave_slots(self) -> None:
        for views in (self._seen, self._landed, self._faces, self._leaves):
            views.clear()
        self._face = None
