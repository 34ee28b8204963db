"""`ParamGroup`: parameters that share their collectives.

A group installs tensors in modules only through its `entries`. It refers to no other groups except its `companions`.

A table in `phases.py` lists the allowed transitions between parameter phases; only `_set_phase` changes the phase. The
gradients are a separate object with separate phases (`gradients.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, methodcaller
from typing import Protocol

import torch
from torch import nn

from .._comm.collectives import Transports
from .._comm.lanes import Job
from .._faults.seat import summary
from .._memory.slots import Request
from .._plan.schedule import ROOT_NAME
from .._policies import Options, Settings
from .._torch import debug
from .._torch.core import current_backward
from .._torch.distributed import local_tensor
from ..errors import PhaseError, ShardConfigUnsupportedError
from .bucket import Bucket, GatherBucket, Saved
from .edits import changed, lost_edit
from .exchange import Exchange
from .extension import Extension, is_extended
from .extension_bucket import ExtensionBucket
from .gradients import GroupGradients
from .packed import Carried
from .param import ShardedParam, lend_attributes, lent_attributes, run_all
from .phases import AWAY, GATHERING, RESIDENT, SHARDED, TRANSITIONS, UNSHARDED, ParamPhase, Stay, illegal
from .refresh import CopyState, NodeCopies
from .resident import Resident
from .setup import GatherSetup, GroupComm, ReduceSetup, Runtime, frees_queued

_requires_grad, _sharded, _address, _weights = map(attrgetter, ("requires_grad", "sharded", "address", "weights"))
_attributes = attrgetter("__dict__")
_weights_for_use, _leaves = methodcaller("weights_for_use"), methodcaller("leaves")
_is_outdated = methodcaller("is_outdated")


@dataclass(frozen=True, eq=False)
class GroupLayout:
    """The layout of a group's parameters in gather buckets; made again when parameters are converted.

    Attributes:
        members: for each bucket, the indices of its parameters in the group.
        wraps: whether any parameter was a DTensor before it was sharded.
        extended: whether any parameter defines its own all-gather (see `extension.py`).
        packed: the state that its packed parameters carry, by index (see `packed.py`).
        gather_bytes: bytes that a gather leases, without buckets that define their own all-gather.
        weight_bytes: the part of `gather_bytes` that stays leased after the gather, for the unsharded parameters.
        note, refresh_note: the notes of a gather and of a refresh in the ledgers.
        copies: with `outer_sharding`, the node's compute copies of all buckets; else None.
    """

    members: Sequence[Sequence[int]]
    wraps: bool
    extended: bool
    packed: Mapping[int, Carried]
    gather_bytes: int
    weight_bytes: int
    note: str
    refresh_note: str
    copies: NodeCopies | None


class Entries(Protocol):
    """The `_parameters` entries of a group's modules, in which a forward finds its parameters."""

    def install(self, tensors: Sequence[torch.Tensor]) -> None:
        """Install these tensors, in the order of the group's parameters, instead of the sharded ones."""

    def install_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        """Install leaves instead of the sharded parameters; users may freeze, unfreeze or hook these leaves."""

    def adopt_changes(self) -> None:
        """Apply to the sharded parameters what users have done to the leaves.

        `install`, `install_sharded` and `adopt` do this, too.
        """

    def install_sharded(self) -> None:
        """Install the sharded parameters again."""

    def note_assigned(self) -> None:
        """Note tensors that users have assigned over installed ones. `install_sharded` restores them for `adopt`."""

    def adopt(self) -> bool:
        """Take over parameters that users have assigned over sharded ones; returns whether there were any."""

    def follow(self) -> None:
        """Like `adopt`, while Dynamo traces. If parameters were taken over, the next call of `adopt` returns True."""


class ParamGroup:
    """Parameters that are gathered together and whose gradients are reduced together.

    Args:
        fqn: name of its module within the root.
        params: its parameters; a tied one counts once.
        settings: the options, and whether a plan keeps the group gathered after forward.
        is_root: whether it is the root's own group.
        comm: its meshes and transports.
        runtime: the pool and the lanes of its engine.
        entries: returns the `_parameters` entries of its modules; None if the modules were freed.

    Attributes:
        fqn, params, settings, is_root, entries: as given.
        shards: the sharded parameters, as users and optimizers see them.
        buckets: the gather buckets, one per dtype. Packed parameters have separate ones, and so have those that
            define their own all-gather.
        layout: the layout of these buckets.
        residents: for each gather bucket, the pieces that a few ranks keep of it; empty until `shrink` is called.
        phase: the phase of the parameters: sharded, gathering, unsharded or resident.
        gradients: its gradients, accumulated or being reduced.
        running: number of forwards of its modules that have begun and not ended.
        used_in: number of the last root forward (`Iterations.forward`) in which a node was made for this group.
        companions: groups of the same module on other meshes, whose forwards begin right after this one's.
        stay: the reasons why the unsharded parameters outlive their use.
    """

    def __init__(
        self,
        fqn: str,
        params: Sequence[ShardedParam],
        settings: Settings,
        is_root: bool,
        comm: GroupComm,
        runtime: Runtime,
        entries: Callable[[], Entries | None],
    ) -> None:
        self.entries = entries
        self.fqn = fqn
        self.params = list(params)
        self.is_root = is_root
        self.running = self.used_in = 0
        self.companions: Sequence[ParamGroup] = ()
        self.stay = Stay()
        self.settings = settings
        self._comm, self._runtime = comm, runtime
        self.phase: ParamPhase = SHARDED
        self._gathers: list[tuple[Bucket, Job[None]]] = []
        self._exchange: Exchange | None = None
        self._versions: list[int] = []
        self.residents: list[Resident] = []
        self.shards = [p.sharded for p in self.params]
        self.buckets, self.layout = self._laid_out()
        self.gradients = GroupGradients(self.name, self.params, self.shards, settings, self._reduce_setup(), comm.notes)

    def _laid_out(self) -> tuple[list[Bucket], GroupLayout]:
        """Make the gather buckets for the current parameters, and their layout."""
        by_kind = self._by_kind()
        buckets = [self._bucket([self.params[i] for i in members], *kind) for kind, members in by_kind.items()]
        layout = GroupLayout(
            members=list(by_kind.values()),
            wraps=any(p.parallel for p in self.params),
            extended=any(extended for extended, _, _ in by_kind),
            packed={index: p.carried for index, p in enumerate(self.params) if p.carried is not None},
            gather_bytes=sum(bucket.gather_bytes for bucket in buckets),
            weight_bytes=sum(b.for_weights[0].nbytes for b in buckets if isinstance(b, GatherBucket)),
            note=self._comm.notes.gather(self._summary()),
            refresh_note=self._comm.notes.refresh(self._summary()),
            copies=self._node_copies(buckets, list(by_kind.values())),
        )
        return buckets, layout

    def _by_kind(self) -> dict[tuple[bool, bool, torch.dtype], list[int]]:
        """Return indices of the parameters by whether they define their own all-gather, are packed, and by dtype."""
        options = self.options
        by_kind: dict[tuple[bool, bool, torch.dtype], list[int]] = {}
        for index, p in enumerate(self.params):
            kind = is_extended(p), p.carried is not None, p.compute_dtype(options)
            by_kind.setdefault(kind, []).append(index)
        return by_kind

    def _bucket(self, params: list[ShardedParam], extended: bool, packed: bool, dtype: torch.dtype) -> Bucket:
        options, comm, run = self.options, self._comm, self._runtime
        outer = comm.transports.replicate if comm.info.shards_outer else None
        setup = GatherSetup(weakref.ref(self), comm.info, comm.transports.gather, outer, run.pool, run.gather_lane)
        if extended and comm.info.shards_outer:  # set on the sharded parameter, or by a replaced one
            raise ShardConfigUnsupportedError(
                f"parameter {params[0].fqn}: defines fsdp_pre_all_gather, which gathers over one axis; with "
                "outer_sharding, remove it, or leave out outer_sharding"
            )
        if extended:
            return ExtensionBucket(params, dtype, setup, options.mp_policy)
        wire, refresh = (None if packed else options.comm_policy.wire(kind, dtype) for kind in ("gather", "refresh"))
        return GatherBucket(params, dtype, setup, wire, refresh)

    def _node_copies(self, buckets: Sequence[Bucket], members: Sequence[Sequence[int]]) -> NodeCopies | None:
        if not self._comm.info.shards_outer:
            return None
        copies = [bucket.node_copy for bucket in buckets if isinstance(bucket, GatherBucket) and bucket.node_copy]
        notes = self._comm.notes
        return NodeCopies(copies, members, notes, notes.refresh(self._summary()), self._runtime.microbatches)

    def _reduce_setup(self) -> ReduceSetup:
        comm, run = self._comm, self._runtime
        slots, frees = [bucket.nbytes for bucket in self._in_slots()], self.frees_queued
        return ReduceSetup(
            comm.info, comm.transports, self.options, run.pool, run.reduce_lane, frees, slots, comm.rounding
        )

    def _summary(self) -> str:
        """Describe the parameters for the note of a gather or of a refresh."""
        dtypes = [p.compute_dtype(self.options) for p in self.params]
        nbytes = sum(math.prod(p.shape) * dtype.itemsize for p, dtype in zip(self.params, dtypes, strict=True))
        return summary(nbytes, dtypes)

    def _in_slots(self) -> list[GatherBucket]:
        """The buckets that gather into slots of the pool."""
        return [bucket for bucket in self.buckets if isinstance(bucket, GatherBucket)]

    def requests(self) -> Iterator[tuple[str, bool, list[Request]]]:
        """Iterate over the group's requests to the pool.

        Yields:
            a purpose, whether the requests are those of backward where forward has others, and the requests. A purpose
            may come several times.
        """
        yield "small", False, [resident.for_pieces for resident in self.residents]
        yield "landing", False, [resident.for_landing for resident in self.residents]
        for buckets, _, _ in self.gradients.bucket_sets.values():
            yield "reduction", False, [request for bucket in buckets for request in bucket.requests]
        for backward in (False, True):
            yield "weights", backward, [bucket.for_weights[backward] for bucket in self._in_slots()]
            yield "landing", backward, [b.for_landing[backward] for b in self._in_slots() if b.for_landing is not None]

    def extensions(self) -> dict[int, Extension]:
        """Return the parameters that define their own all-gather, by index."""
        pairs = zip(self.buckets, self.layout.members, strict=True)
        own = [(bucket.extensions, members) for bucket, members in pairs if isinstance(bucket, ExtensionBucket)]
        return {index: each for extensions, members in own for index, each in zip(members, extensions, strict=True)}

    # ---- forwards

    def set_companions(self, following: Sequence[ParamGroup]) -> None:
        """Set the groups of the same module, on other meshes, that begin right after this one."""
        self.companions = following

    # ---- facts

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.fqn or ROOT_NAME

    @property
    def gathers_of_graphs(self) -> int:
        """How often compiled graphs have gathered it since its buckets were made."""
        return 0 if self._exchange is None else self._exchange.gathers

    @property
    def shard_size(self) -> int:
        """The number of ranks among which each parameter is sharded."""
        return self._comm.info.shard_size

    @property
    def options(self) -> Options:
        """The current options."""
        return self.settings.current

    @property
    def issues_in_wait(self) -> bool:
        """Whether waiting for one of its reductions may issue an all-reduce, so that all ranks must wait alike."""
        return not self._runtime.gather_lane.streams and self._comm.transports.replicate is not None

    @property
    def offloads(self) -> bool:
        """Whether its parameters are stored on the CPU."""
        return self._comm.info.offloads

    @property
    def rounds_gradients(self) -> bool:
        """Whether its gradients are sent in fewer bits."""
        policy = self.options.comm_policy
        dtypes = {param.sum_dtype(self.options) for param in self.params}
        return any(policy.wire(kind, dtype) is not None for kind in ("reduce", "replicas") for dtype in dtypes)

    @property
    def reduces_first(self) -> bool:
        """Whether backward waits for reductions before it gathers this group.

        True on a CPU, unless a limit of reductions in flight was set: only waiting frees memory there, and overlapped
        work competes for the same cores. On an accelerator, False: streams order gathers behind reductions. On a mesh
        with replicas, False: waiting for a reduction may issue its all-reduce, and all ranks must issue it at the same
        place.
        """
        waits = not self._runtime.gather_lane.streams and self._comm.transports.replicate is None
        return waits and self.settings.current.max_reductions is None

    @property
    def frees_queued(self) -> bool:
        """Whether its reductions release their memory as soon as they are queued (see `setup.py`)."""
        return frees_queued(self._runtime.reduce_lane.streams, self._runtime.has_one_mesh, self.options)

    @property
    def gathers_in_backward(self) -> bool:
        """Whether backward gathers the group before a handle is read.

        Always for packed parameters: layers read them through views of their own, not through handles.
        """
        return self.settings.current.unshard_in_backward or bool(self.layout.packed)

    @property
    def trains(self) -> bool:
        """Whether any parameter requires a gradient now."""
        return any(map(_requires_grad, self.shards))

    def all_have_saved(self, saved: Saved) -> bool:
        """Whether each module of the group has a parameter among these saved ones, or never saves any.

        Embeddings save none. Parameters whose module was freed, or is not known yet, count as those of one module.
        """
        names = {bucket.name_of(place) for bucket, place in saved}
        holders: dict[int, bool] = {}
        for param in self.params:
            module = param.module() if param.module is not None else None
            saves_none = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            holders[id(module)] = holders.get(id(module), saves_none) or param.fqn in names
        return all(holders.values())

    # ---- parameters

    def _set_phase(self, new: ParamPhase) -> None:
        if new not in TRANSITIONS[self.phase]:
            raise illegal(self.name, self.phase, new)
        self.phase = new

    @property
    def needs_refresh(self) -> bool:
        """Whether a gather must refresh the node's compute copies first (`refresh.py`)."""
        copies = self.layout.copies
        if copies is None or self.phase is not SHARDED:
            return False
        return copies.state.due or (not self._runtime.pool.backward and self.is_outdated())

    @property
    def lost_pending(self) -> bool:
        """Whether gradients of an earlier microbatch were pending, and `.grad` has changed since: by `zero_grad`."""
        copies = self.layout.copies
        return copies is not None and copies.pending and self.gradients.held_now().is_voided

    def copies_key(self) -> Hashable:
        """Return a value that is equal if the next forward refreshes its compute copies alike; None without copies."""
        copies = self.layout.copies
        return None if copies is None else copies.key(self.is_outdated())

    def start_refresh(self, after: torch.Event | None) -> None:
        """Issue the gather of the node's compute copies over the outer axis, ordered after the event `after`."""
        assert self.layout.copies is not None
        shards = self._note_refresh()
        self.layout.copies.refresh(shards, after or self._runtime.gather_lane.record_current_stream())

    def refresh_and_wait(self, after: torch.Event | None) -> None:
        """Like `start_refresh`, and wait: for a stopwatch that times each collective separately."""
        assert self.layout.copies is not None
        self.start_refresh(after)
        self.layout.copies.settle()

    def _note_refresh(self) -> list[torch.Tensor]:
        """Note the versions of the shards, which a refresh reads, and return them."""
        shards = [param.local for param in self.params]
        for bucket, members in zip(self.buckets, self.layout.members, strict=True):
            bucket.note_shards([shards[index] for index in members])
        return shards

    def before_graph(self) -> None:
        """Before a graph gathers: decide whether its compute copies are outdated."""
        assert self.layout.copies is not None
        if current_backward() >= 0:
            return
        if self.lost_pending:
            self.layout.copies.end_backward(pending=False)
        if self.is_outdated():
            self.layout.copies.expire()
            self._note_refresh()

    def resume_copies(self, state: CopyState) -> None:
        """Set the state of its compute copies to that after a captured step, which was replayed."""
        assert self.layout.copies is not None
        self.layout.copies.resume(state)
        self._note_refresh()  # if they were outdated before the replay, it has refreshed them (`copies_key`)

    def start_gather(self, after: torch.Event | None) -> None:
        """Issue the all-gather, ordered after the event `after` (the last change of the sharded parameters)."""
        if self.phase not in AWAY:
            raise illegal(self.name, self.phase, GATHERING)
        for ledger in self._comm.notes.gathers:
            ledger.issue(self.layout.note)
        self._gathers = []
        if self.layout.copies is not None:
            self.layout.copies.note_read()
        try:
            if self.phase is RESIDENT:
                for bucket, resident in zip(self.buckets, self.residents, strict=True):
                    self._gathers.append((bucket, resident.start()))
            else:
                if self.stay.pinned or self.settings.outlives[self.is_root]:  # otherwise no code reads these versions
                    self._versions = self._versions_now()
                for bucket in self.buckets:
                    self._gathers.append((bucket, bucket.start(after)))
        except BaseException:  # for example out of memory: the group is sharded then, even if it was resident
            self._comm.notes.take_back(self._comm.notes.gathers)
            self._give_up_gathers()
            raise
        self._set_phase(GATHERING)

    def _give_up_gathers(self) -> None:
        """Clean up after a failed gather: wait for gathers that have begun, which write to the memory freed here."""
        for _, job in self._gathers:
            with contextlib.suppress(Exception):  # the caller already raises the first error
                job.finish()
        self._gathers = []
        self.stay.end()
        for bucket in self.buckets:
            bucket.await_memory()
        after = self._runtime.gather_lane.record_current_stream()
        for bucket in self.buckets:
            bucket.release(after)
        if self.phase is RESIDENT:  # some pieces are released already, by jobs that had begun
            for resident in self.residents:
                resident.release()
            self._set_phase(SHARDED)

    def _leave_gathers(self) -> None:
        """Clean up after an interrupted wait, for example by Ctrl-C: wait for no gather, and never reuse its memory."""
        self._gathers = []
        self.stay.end()
        for bucket in self.buckets:
            bucket.lose()

    def finish_gather(self) -> None:
        """Wait until the unsharded parameters can be read."""
        self._set_phase(UNSHARDED)  # before the wait: after an error, the group goes from there to SHARDED
        try:
            for bucket, job in self._gathers:
                job.finish()
                bucket.arrived()
        except BaseException as error:
            if isinstance(error, Exception):
                self._give_up_gathers()
            else:
                self._leave_gathers()
            self._set_phase(SHARDED)
            raise
        self._gathers = []

    def forget_events(self) -> None:
        """Let no stream wait for a gather in flight: a capture has begun or ended since, and the device was idle."""
        for _, job in self._gathers:
            job.forget_event()
        if self.layout.copies is not None:
            self.layout.copies.forget_events()

    def is_outdated(self) -> bool:
        """Whether sharded parameters were written to since the last gather was issued, judging by versions."""
        return any(map(_is_outdated, self.buckets))

    def end_forward(self, dropped: Sequence[torch.Tensor]) -> bool:
        """Note the end of a forward. If user code keeps views of parameters, their memory is not released (`Faces`).

        Args:
            dropped: views in the module's outputs, which the caller has replaced by copies and is about to drop. They
                do not count.

        Returns:
            whether the forward has written to unsharded parameters, judging by versions.
        """
        if len(self.buckets) == 1:
            return self.buckets[0].end_forward(dropped)
        return any([bucket.end_forward(dropped) for bucket in self.buckets])  # noqa: C419 - all of them

    def reshard(self, again: bool = False) -> None:
        """Release the unsharded parameters, or the pieces that a few ranks keep of them.

        Args:
            again: whether they are gathered again immediately, into the same memory. Then `stay` is not reset.

        Raises:
            StaleStateError: when debugging: the bits of a parameter have changed. The group is still resharded.
        """
        edited = self._changed_bits() if debug.debugging else ()
        was_resident = self.phase is RESIDENT
        self._set_phase(SHARDED)
        if not again and (self.stay.pinned or self.stay.kept):  # rare; a call would cost host time in each step
            self.stay.end()
        if was_resident:
            for resident in self.residents:
                resident.release()
            return
        after, reserve = self._runtime.gather_lane.record_current_stream(), again or self.settings.current.keep_storage
        for bucket in self.buckets:
            bucket.release(after, reserve)
        if edited:
            raise lost_edit(edited)

    def _changed_bits(self) -> list[str]:
        return [fqn for bucket in self.buckets for fqn in bucket.changed_bits()]

    def is_written(self) -> bool:
        """Whether leaves (see `leaves`) were written to since the gather, judging by versions."""
        for bucket in self.buckets:  # noqa: SIM110 - a generator would take more host time
            if bucket.here is not None and bucket.here.written():
                return True
        return False

    def check_unedited(self) -> None:
        """Check, without a collective, that no leaf (see `leaves`) was edited.

        Raises:
            StaleStateError: one was edited; or one was written to, and only a gather could tell whether it has changed.
        """
        if self.is_written() and (edited := changed(self.buckets, _cannot_gather)):
            raise lost_edit(edited)

    def forget_writes(self) -> None:
        """Accept all writes to unsharded parameters after a failed forward, without checking for edits."""
        for bucket in self.buckets:
            bucket.accept()

    @property
    def shrinks(self) -> bool:
        """Whether the parameters stay sharded among a few ranks after forward (``reshard_after_forward=n``)."""
        return self._comm.small is not None and self.settings.current.few_ranks > 0 and not self.layout.extended

    def shrink(self) -> None:
        """Release the unsharded parameters except for a piece of each: a few ranks together keep all pieces.

        Backward then gathers among these few ranks only (``reshard_after_forward=n``).
        """
        if self.phase is not UNSHARDED:
            raise illegal(self.name, self.phase, RESIDENT)
        small, transport, run = self._comm.small, self._comm.transports.small, self._runtime
        assert small is not None
        assert transport is not None
        if not self.residents:
            self.residents = [
                Resident(bucket, small, transport, run.pool, run.gather_lane) for bucket in self._in_slots()
            ]
        edited = self._changed_bits() if debug.debugging else ()
        self._keep_pieces()
        self._set_phase(RESIDENT)
        after = run.gather_lane.record_current_stream()
        for bucket in self.buckets:
            bucket.release(after)
        if edited:
            raise lost_edit(edited)

    def _keep_pieces(self) -> None:
        try:
            for resident in self.residents:
                resident.keep()
        except BaseException:  # for example out of memory: the group stays unsharded
            for resident in self.residents:
                resident.release()
            raise

    def pieces(self) -> list[torch.Tensor]:
        """Return the pieces that this rank keeps after `shrink`, as DTensor parameters on the small mesh."""
        return self._in_order([resident.shown() for resident in self.residents])

    def note_versions(self) -> None:
        """Note the versions of the sharded parameters for `is_stale`, before a gather that will outlive its use."""
        # A resident group is gathered from pieces. They were made from the versions that are already noted.
        if self.phase is SHARDED:
            self._versions = self._versions_now()

    def is_stale(self) -> bool:
        """Whether a sharded parameter was replaced or edited since `note_versions`: for groups that stay unsharded.

        Unlike `is_outdated`, this is asked in a later step, when `params` may have other tensors.
        """
        return self._versions != self._versions_now()

    def _versions_now(self) -> list[int]:
        now = list(map(_sharded, self.params))
        pairs = zip(map(local_tensor, now), now, strict=True)
        return [x for local, sharded in pairs for x in (id(local), local._version, sharded._version)]

    @property
    def places(self) -> tuple[int, ...]:
        """The address of each bucket's unsharded parameters, which changes when the memory moves."""
        return tuple(map(_address, self.buckets))

    def weights(self) -> list[torch.Tensor]:
        """Return the unsharded parameters, in the order of `params`, without autograd history."""
        return self._in_order(list(map(_weights, self.buckets)))

    def weights_for_use(self) -> list[torch.Tensor]:
        """Return the unsharded parameters for a node that is about to be made; `begin_forward` must follow."""
        return self._in_order(list(map(_weights_for_use, self.buckets)))

    def wrapped(self, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the unsharded parameters as modules see them: as DTensors if they were DTensors before."""
        pairs = zip(weights, self.params, strict=True)
        return tuple([weight if p.parallel is None else p.parallel.around(weight) for weight, p in pairs])

    def local_gradients(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of the gathered tensors, given the gradients of the results of `wrapped`."""
        options = self.settings.current
        pairs = zip(gradients, self.params, strict=True)
        return [None if gradient is None else p.local_gradient(gradient, options) for gradient, p in pairs]

    def begin_forward(self, outputs: Sequence[torch.Tensor], forward: int) -> None:
        """Note the node of a use: it was made, and its outputs are installed.

        Args:
            outputs: the outputs of the node, in the order of `params`.
            forward: number of the root's running forward; 0 for a recomputation.
        """
        if forward:
            self.used_in = forward
        if len(self.buckets) == 1:
            self.buckets[0].begin_forward(outputs)
            return
        for bucket, members in zip(self.buckets, self.layout.members, strict=True):
            bucket.begin_forward([outputs[index] for index in members])

    def leaves(self) -> list[torch.Tensor]:
        """Return the unsharded parameters as leaves, with the `requires_grad` and attributes of the sharded ones."""
        leaves = self._in_order(list(map(_leaves, self.buckets)))
        shards = [param.sharded for param in self.params]
        if self.layout.extended:
            run_all(map(lend_attributes, leaves, shards))
        else:
            run_all(map(dict.update, map(_attributes, leaves), lent_attributes(shards)))
        for leaf, param in zip(leaves, self.params, strict=True):
            if leaf.requires_grad != param.sharded.requires_grad:
                leaf.requires_grad_(param.sharded.requires_grad)
        self.lend_carried(leaves)
        return leaves

    def lend_carried(self, wholes: Sequence[torch.Tensor]) -> None:
        """Set the state of packed parameters on unsharded ones, which already have the sharded ones' attributes."""
        for index, carried in self.layout.packed.items():
            carried.lend(wholes[index])

    def _in_order(self, lists: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        if len(lists) == 1:
            return list(lists[0])
        by_index = dict(zip(itertools.chain(*self.layout.members), itertools.chain(*lists), strict=True))
        return [by_index[index] for index in range(len(self.params))]

    def having(self) -> tuple[bool, ...]:
        """Return for each parameter whether it has a gradient."""
        return tuple([shard.grad is not None for shard in self.shards])

    def forget_gradients(self) -> None:
        """Drop all accumulated gradients."""
        self.gradients.forget()
        if self.layout.copies is not None:
            self.layout.copies.end_backward(pending=False)

    def before_change(self) -> None:
        """Note that an optimizer or a load is about to change the sharded parameters, so saved handles become stale.

        Comparing versions is not enough (`Bucket.note_shards`): foreach functions do not increase those of DTensors.
        """
        for bucket in self.buckets:
            bucket.expire_handles()
        if self.layout.copies is not None:
            self.layout.copies.change()

    def rebuild(self, transports: Transports | None = None) -> None:
        """Make all buckets again, because dtypes, devices or transports have changed; only while sharded."""
        assert self.phase is SHARDED
        if transports is not None:
            self._comm = replace(self._comm, transports=transports)
        for bucket in self.buckets:
            bucket.forget()
        self.shards = [p.sharded for p in self.params]
        self.buckets, self.layout = self._laid_out()
        self.residents, self._exchange = [], None
        self.gradients.rebuild(self.shards, self._reduce_setup())

    def leave_reserved(self) -> bool:
        """Release memory that is reserved for the next gather, only while sharded; False if user code has views of it.

        A graph must not gather into memory from outside, which may be freed later.
        """
        if any(bucket.keeps_views() for bucket in self.buckets):
            return False
        for bucket in self.buckets:
            bucket.forget()
        return True

    def leave_slots(self) -> None:
        """Drop all views of slots, because the pool is about to replace its slots; only while sharded."""
        self.gradients.leave_slots()
        if self._exchange is not None:
            self._exchange.leave_slots()
        self.residents = []
        for bucket in self.buckets:
            bucket.leave_slots()

    def exchange(self) -> Exchange:
        """Return its gathers and reductions for compiled graphs, made at the first call, and again after `rebuild`."""
        if self._exchange is None:
            members = dict(zip(self.buckets, self.layout.members, strict=True))
            lane, notes = self._runtime.gather_lane, self._comm.notes
            self._exchange = Exchange(
                self.params, members, lane, self._reduce_setup(), notes, self.layout.note, self.layout.copies
            )
        return self._exchange

    def __repr__(self) -> str:
        return f"ParamGroup({self.name}, {len(self.params)} parameters, {self.phase.value})"


def _cannot_gather() -> None:
    raise PhaseError("not all ranks gather here")  # not seen by users: `changed` replaces it by a StaleStateError
