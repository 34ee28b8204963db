"""`ParamGroup`: parameters that share their collectives. It knows no module and no sibling.

What can happen to it stands in two small tables (see `_phases`), one for its parameters and one for its gradients, each
with one writer.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Protocol

import torch

from .._comm.collectives import Transports
from .._comm.lanes import Job, Lane
from .._comm.mesh import MeshInfo
from .._errors import ShardConfigStateError
from .._memory.pool import BufferPool
from .._plan.schedule import ROOT_NAME
from .._policies import Options, Settings
from .._torch.core import HANDLES, Hook, any_gradient_hooks, without_torch_function
from .accumulation import KeptGradients
from .bucket import Bucket, GatherBucket
from .extension import ExtensionBucket, is_extended
from .param import ShardedParam, lend_attributes
from .phases import GATHERING, RESIDENT, SHARDED, TRANSITIONS, UNSHARDED, GradPhase, ParamPhase, illegal
from .reduction import GroupReduced, ReduceBucket, Reduction, reduce_buckets, unused
from .resident import Resident

Gradients = Sequence[torch.Tensor | None]
_requires_grad, _slot = attrgetter("requires_grad"), attrgetter("slot")


@dataclass(frozen=True)
class Runtime:
    """What all groups of an engine share."""

    pool: BufferPool
    gather_lane: Lane
    reduce_lane: Lane


class Entries(Protocol):
    """Where a module's parameters are looked up: what forward finds under their names."""

    def show(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put these tensors, in the order of the group's parameters, in the place of the sharded ones."""

    def hide(self) -> None:
        """Put the sharded parameters back."""

    def there(self, index: int) -> torch.Tensor:
        """What is in the place of a parameter now."""

    def adopt(self) -> bool:
        """Look for parameters that users have put in the place of sharded ones; True if there are any."""


class ParamGroup:
    """Parameters that are gathered together and whose gradients are reduced together.

    Attributes:
        fqn: name of its module within the root.
        entries: gives the places where its modules look its parameters up; None if the modules are gone.
        params: its parameters, tied ones once.
        is_root: whether it is the root's own group.
        phase: where the weights are; only the group itself changes it.
        away: whether by that they must be gathered before they can be read, and no gather was issued.
        grad_phase: where the gradients are; likewise.
        running, used_in: forwards of its modules that have begun and not ended; the root's last one with a node of its.
        shards: the sharded parameters themselves.
        wraps: whether any of them was a DTensor before it was sharded.
        buckets: what is gathered, by dtype; `residents` keep some of it, `reduces` are the way back.
        gather_bytes, weight_bytes: what a gather leases, and what of it stays when that is over.
        extended: whether any of them says itself what is gathered (see `_extension`).
        hooks_taken: whether hooks of its parameters were taken from autograd and not given back.
        handles_seen: how many handles of hooks others had been given when no parameter had a hook; -1: unknown.
        settings: the options, and what a plan keeps in training, which graphs follow.
        companions: groups of the same module, on other meshes, that begin right behind this one.
        pinned: whether a user asked for the unsharded parameters (`unshard`), so that no forward gives them up.
    """

    __slots__ = (
        "__weakref__", "_gathers", "_in_flight", "_info", "_kept", "_members", "_offloads", "_on_nodes", "_runtime",
        "_small", "_streams", "_transports", "_versions", "away", "buckets", "companions", "entries", "extended", "fqn",
        "gather_bytes", "grad_phase", "handles_seen", "hooks_taken", "is_root", "params", "phase", "pinned", "reduces",
        "residents", "running", "settings", "shards", "used_in", "weight_bytes", "wraps",
    )  # fmt: skip

    def __init__(
        self,
        fqn: str,
        params: Sequence[ShardedParam],
        info: MeshInfo,
        settings: Settings,
        is_root: bool,
        transports: Transports,
        runtime: Runtime,
        entries: Callable[[], Entries | None] = lambda: None,
        small: MeshInfo | None = None,
    ) -> None:
        self.entries = entries
        self.fqn = fqn
        self.params = list(params)
        self.is_root = is_root
        self.running = self.used_in = 0
        self.companions: Sequence[ParamGroup] = ()
        self.pinned = self.hooks_taken = False
        self.handles_seen = min([p.handles_seen for p in self.params], default=-1)
        self._info, self._offloads, self._small = info, info.offloads, small
        self.settings = settings
        self._transports = transports
        self._runtime, self._streams = runtime, runtime.gather_lane.streams
        self.phase, self.away = SHARDED, True
        self.grad_phase = GradPhase.NONE
        self._gathers: list[tuple[Bucket, Job[None]]] = []
        self._in_flight = 0
        self._versions: list[int] = []
        self._kept = KeptGradients(self.params)
        self.reduces: dict[tuple[object, ...], list[ReduceBucket]] = {}
        self._build_buckets()

    def _build_buckets(self) -> None:
        options = self.options
        self.shards = [p.sharded for p in self.params]
        self._on_nodes: list[dict[int, Hook]] | None = None
        self.wraps = any(p.parallel for p in self.params)
        by_kind: dict[tuple[bool, torch.dtype], list[int]] = {}
        for index, p in enumerate(self.params):
            by_kind.setdefault((is_extended(p), p.compute_dtype(options)), []).append(index)
        self._members = list(by_kind.values())
        how = weakref.ref(self), self._info, self._transports.gather, self._runtime.pool, self._runtime.gather_lane
        self.buckets: list[Bucket] = []
        for (extended, dtype), members in by_kind.items():
            its = [self.params[i] for i in members], dtype, *how
            self.buckets.append(ExtensionBucket(*its, options.mp_policy) if extended else GatherBucket(*its))
        self.extended = any(extended for extended, _ in by_kind)
        self.residents: list[Resident] = []
        self.gather_bytes = sum(bucket.gather_bytes for bucket in self.buckets)
        self.weight_bytes = sum(b.for_weights[0].nbytes for b in self.buckets if isinstance(b, GatherBucket))

    # ---- forwards

    def note_use(self, forward: int) -> None:
        """A forward of the root, by its number, has made a node for it."""
        self.used_in = forward

    def begin_forward(self) -> None:
        """A module of the group runs."""
        self.running += 1

    def end_forward(self) -> bool:
        """A module of it has run; returns whether that was the last one."""
        self.running -= 1
        return not self.running

    def forget_forwards(self) -> None:
        """No forward of it runs any more, whatever was said."""
        self.running = 0

    def set_companions(self, following: Sequence[ParamGroup]) -> None:
        """These groups of the same module begin right behind this one, if there are any."""
        self.companions = following or self.companions

    # ---- facts

    @property
    def name(self) -> str:
        """The name to show."""
        return self.fqn or ROOT_NAME

    @property
    def shard_size(self) -> int:
        """Among how many ranks it is sharded."""
        return self._info.shard_size

    @property
    def options(self) -> Options:
        """The settings as they are now."""
        return self.settings.current

    @property
    def resharding(self) -> bool:
        """Whether forward gives up the unsharded parameters, by the settings."""
        return self.settings.current.reshards(self.is_root)

    @property
    def reduces_first(self) -> bool:
        """Whether reductions are waited for before backward gathers for it; not if their waits issue collectives."""
        return self._transports.replicate is None and self.settings.current.reduces_first(self._streams)

    @property
    def trains(self) -> bool:
        """Whether any parameter wants a gradient now."""
        return any(map(_requires_grad, self.shards))

    # ---- the phase tables

    def _set_params(self, new: ParamPhase) -> None:
        if new not in TRANSITIONS[self.phase]:
            raise illegal(self.name, self.phase, new)
        self.phase, self.away = new, new is SHARDED or new is RESIDENT

    def _set_grads(self, new: GradPhase) -> None:
        if new not in TRANSITIONS[self.grad_phase]:
            raise illegal(self.name, self.grad_phase, new)
        self.grad_phase = new

    # ---- parameters

    def start_gather(self, after: torch.Event | None) -> None:
        """Issue the all-gather, behind the event `after` (the last change of the parameters)."""
        if not self.away:
            raise illegal(self.name, self.phase, GATHERING)
        if self.phase is RESIDENT:
            self._gathers = [(b, resident.start()) for b, resident in zip(self.buckets, self.residents, strict=True)]
            self._set_params(GATHERING)
            return
        if self.pinned or self.settings.outlives[self.is_root]:
            self._versions = self._versions_now()
        self._gathers = []
        try:
            for bucket in self.buckets:
                self._gathers.append((bucket, bucket.start(after)))
        except BaseException:  # out of memory, say: the group is sharded as before
            self._give_up_gathers()
            raise
        self._set_params(GATHERING)

    def _give_up_gathers(self) -> None:
        """Something went wrong on the way to the weights: end what was begun, for it writes to what is freed here."""
        for _, job in self._gathers:
            with contextlib.suppress(Exception):  # of which the first is on its way
                job.finish()
        self._gathers, self.pinned = [], False
        after = self._runtime.gather_lane.mark()
        for bucket in self.buckets:
            bucket.release(after)

    def _leave_gathers(self) -> None:
        """The wait was interrupted, and nothing more is waited for: what is still written to goes to nobody else."""
        self._gathers, self.pinned = [], False
        for bucket in self.buckets:
            bucket.lose()

    def finish_gather(self) -> None:
        """Wait until the weights can be read."""
        self._set_params(UNSHARDED)
        try:
            for bucket, job in self._gathers:
                job.finish()
                bucket.arrived()
        except BaseException as error:
            if isinstance(error, Exception):
                self._give_up_gathers()
            else:
                self._leave_gathers()
            self._set_params(SHARDED)
            raise
        self._gathers = []

    def end_use(self, dropped: Sequence[torch.Tensor]) -> None:
        """After a forward: memory of which others keep views than these goes to nobody else."""
        for bucket in self.buckets:
            bucket.end_use(dropped)

    def reshard(self) -> None:
        """Give the unsharded parameters up."""
        was_resident = self.phase is RESIDENT
        self._set_params(SHARDED)
        self.pinned = False
        if was_resident:
            for resident in self.residents:
                resident.release()
            return
        after = self._runtime.gather_lane.mark()
        for bucket in self.buckets:
            bucket.release(after, reserve=self.settings.current.keep_storage)

    @property
    def shrinks(self) -> bool:
        """Whether forward leaves the weights cut among a few ranks."""
        return self._small is not None and self.settings.current.few_ranks > 0 and not self.extended

    def shrink(self) -> None:
        """Give the unsharded parameters up but for what a few ranks keep among them."""
        small, transport, run = self._small, self._transports.small, self._runtime
        assert small is not None
        assert transport is not None
        self._set_params(RESIDENT)
        if not self.residents:
            how = small, transport, run.pool, run.gather_lane
            self.residents = [Resident(b, *how) for b in self.buckets if isinstance(b, GatherBucket)]
        for resident in self.residents:
            resident.keep()
        after = run.gather_lane.mark()
        for bucket in self.buckets:
            bucket.release(after)

    def pieces(self) -> list[torch.Tensor]:
        """What this rank keeps of them, as DTensor parameters on the mesh of the few ranks."""
        return self._in_order([resident.shown() for resident in self.residents])

    def note_versions(self) -> None:
        """What is gathered next will stay: remember of which values it was made, for `is_stale`."""
        if self.phase is SHARDED:  # what a few ranks keep was made of older ones
            self._versions = self._versions_now()

    def pin(self) -> None:
        """A user asks for the unsharded parameters, until they are given up."""
        self.pinned = True

    def is_stale(self) -> bool:
        """Whether a parameter has visibly changed since the gather."""
        return self._versions != self._versions_now()

    def _versions_now(self) -> list[int]:
        return [x for p in self.params for x in (id(p.local), p.local._version, p.sharded._version)]

    @property
    def slots(self) -> tuple[object, ...]:
        """What tells one place of the weights from another."""
        return tuple(map(_slot, self.buckets))

    def weights(self, for_use: bool = False) -> list[torch.Tensor]:
        """The unsharded parameters, in the order of `params`, without history; `begin_use` follows one for a use."""
        return self._in_order([b.weights_for_use() if for_use else b.weights for b in self.buckets])

    def begin_use(self, outputs: Sequence[torch.Tensor]) -> None:
        """All that a node shows of the weights is made."""
        if len(self.buckets) == 1:
            self.buckets[0].begin_use(outputs)
            return
        for bucket, members in zip(self.buckets, self._members, strict=True):
            bucket.begin_use([outputs[index] for index in members])

    def leaves(self) -> list[torch.Tensor]:
        """The unsharded parameters as leaf Parameters that want gradients exactly where the sharded ones do."""
        leaves = self._in_order([b.leaves() for b in self.buckets])
        for leaf, param in zip(leaves, self.params, strict=True):
            if self.extended:
                lend_attributes(leaf, param.sharded)
            else:
                leaf.__dict__.update(param.sharded.__dict__)  # what users wrote on it
            if leaf.requires_grad != param.sharded.requires_grad:
                leaf.requires_grad_(param.sharded.requires_grad)
        return leaves

    def _in_order(self, lists: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        if len(lists) == 1:
            return list(lists[0])
        found = dict(zip(itertools.chain(*self._members), itertools.chain(*lists), strict=True))
        return [found[index] for index in range(len(self.params))]

    def stepped(self) -> None:
        """An optimizer or a load is about to change the sharded parameters."""
        for bucket in self.buckets:
            bucket.note_change()

    def rebuild(self, transports: Transports | None = None) -> None:
        """Take notice of parameters whose dtype or device has changed, or of new transports; only while sharded."""
        assert self.phase is SHARDED
        self._transports = transports or self._transports
        self.reduces.clear()
        for bucket in self.buckets:
            bucket.forget()
        self.handles_seen = -1
        self._build_buckets()

    def leave_slots(self) -> None:
        """Hold no view of any slot, for others will take their place; only while sharded."""
        self.reduces.clear()
        self.residents = []
        for bucket in self.buckets:
            bucket.leave_slots()

    # ---- gradients

    @property
    def may_have_hooks(self) -> bool:
        """Whether users may have registered hooks on the parameters since they were taken."""
        if self.handles_seen == HANDLES.of_others():  # for hooks of every kind
            return False
        return self._on_nodes is None or any(self._on_nodes) or any_gradient_hooks(self.shards)

    def take_hooks(self) -> None:
        """Take over what users have registered on the parameters, before autograd can call it."""
        seen = HANDLES.of_others()
        self.hooks_taken = any([param.take_hooks() for param in self.params])  # noqa: C419 - of all
        if not self.hooks_taken:
            self.handles_seen = seen
        found = [param.hooks_on_node for param in self.params]
        self._on_nodes = None if None in found else [hooks for each in found if each is not None for hooks in each]

    def give_hooks_back(self) -> None:
        """A backward is over: let autograd have them again."""
        self.hooks_taken = any([param.give_hooks_back() for param in self.params])  # noqa: C419 - of all

    def keep(self, gradients: Gradients) -> None:
        """Add unsharded gradients to those that wait for a backward with gradient sync."""
        self._kept.note_wanted()
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._kept.add(index, gradient, self.options.reduce_dtype(self.params[index].dtype))
        if self._kept.whole:
            self._set_grads(GradPhase.KEPT)

    def kept_gradient(self, index: int) -> torch.Tensor | None:
        """The unsharded gradient that is kept of a parameter."""
        return self._kept.whole.get(index)

    def take_kept(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """These gradients plus those that were kept, which are kept no longer."""
        total = self._kept.take(gradients)
        if self.grad_phase is GradPhase.KEPT and self._in_flight:
            self._set_grads(GradPhase.REDUCING)
        return total

    def forget_gradients(self) -> None:
        """Keep nothing any more."""
        self._kept.forget()
        if self.grad_phase is GradPhase.KEPT:
            self._set_grads(GradPhase.NONE)

    def check_reduced(self, theirs: Container[int]) -> None:
        """An optimizer steps these parameters, by id: none of their gradients may still wait for its reduction.

        Raises:
            ShardConfigStateError: one does.
        """
        if names := self._kept.held(theirs):
            setting = "set_requires_gradient_sync" if self._kept.whole else "set_requires_all_reduce"
            raise ShardConfigStateError(
                f"group {self.name}: the optimizer steps {', '.join(names)}, but gradients of a backward under "
                f"{setting}(False) still wait for their reduction; run the last micro-batch before the step under "
                f"{setting}(True), or call zero_grad() to drop them"
            )

    @property
    def awaits_reduction(self) -> bool:
        """Whether gradients are kept that a backward must reduce, whether it uses the group or not."""
        options, kept = self.settings.current, self._kept
        pending = kept.whole or (kept.pieces and options.requires_all_reduce)
        return bool(pending) and options.requires_gradient_sync

    def start_reduce(self, gradients: Gradients) -> Reduction:
        """Issue the reduction of unsharded gradients; None stands for zeros."""
        whole = self._transports.replicate is None or self.settings.current.requires_all_reduce
        buckets, partial = self.reduce_buckets(), self._kept.take_partial()
        jobs = [(bucket, bucket.start(bucket.chosen(gradients), partial, whole)) for bucket in buckets]
        self._set_grads(GradPhase.REDUCING)
        self._in_flight += 1
        lacks = any(map(is_, gradients, itertools.repeat(None)))
        missing = [index for index, gradient in enumerate(gradients) if gradient is None] if lacks else []
        return Reduction(jobs, missing, whole)

    @property
    def reduce_bytes(self) -> int:
        """What the reduction of its gradients leases."""
        return sum(bucket.nbytes for bucket in self.reduce_buckets())

    def reduce_buckets(self) -> list[ReduceBucket]:
        """What is reduced now, one bucket per dtype."""
        with without_torch_function():  # which would be looked for in each
            trains = tuple(map(_requires_grad, self.shards))
        if self._kept.wanted:
            trains = tuple(wants or index in self._kept.wanted for index, wants in enumerate(trains))
        options = self.settings.current
        key = trains, options.mp_policy.reduce_dtype, options.divide_factor, options.only_sums
        buckets = self.reduces.get(key)
        if buckets is None:
            run = self._runtime
            slots = [bucket.nbytes for bucket in self.buckets if isinstance(bucket, GatherBucket)]
            how = self._info, self._transports, options, run.pool, run.reduce_lane, slots
            buckets = self.reduces[key] = reduce_buckets(self.params, trains, *how)
        return buckets

    def finish_reduce(self, reduction: Reduction) -> GroupReduced:
        """Wait for a reduction.

        Returns:
            what it gave; parameters that had no gradient on any rank are left out, unless zeros are wanted for them.
            Nothing, if the reduction stops before the replicas: the group keeps it.
        """
        on_host = self._offloads and reduction.whole
        done = [(bucket.indices, job.finish(on_host)) for bucket, job in reduction.jobs]
        if not reduction.whole:
            for indices, reduced in done:
                for index, piece, used in zip(indices, *reduced.parts(), strict=True):
                    self._kept.add_partial(index, piece, used)
            done = []
        asked = reduction.missing and not self.settings.current.reduce_unused
        found = GroupReduced(done, unused(done, reduction.missing) if asked else ())
        self._in_flight -= 1
        if self._in_flight == 0:
            self._set_grads(GradPhase.KEPT if self._kept.whole or self._kept.pieces else GradPhase.NONE)
        return found

    def __repr__(self) -> str:
        return f"ParamGroup({self.name}, {len(self.params)} parameters, {self.phase.value})"
