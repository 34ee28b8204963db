"""`ParamGroup`: parameters that share their collectives. A group knows no module and no other group.

Two small tables (`phases.py`) say which group phase may follow which, one for the parameters and one for the gradients.
Only `_set_params` and `_set_grads` change these phases.
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
    """The pool and the lanes that all groups of one engine share."""

    pool: BufferPool
    gather_lane: Lane
    reduce_lane: Lane


class Entries(Protocol):
    """The `_parameters` entries of a group's modules, under which a forward finds its parameters."""

    def show(self, tensors: Sequence[torch.Tensor]) -> None:
        """Install these tensors, in the order of the group's parameters, instead of the sharded ones."""

    def hide(self) -> None:
        """Install the sharded parameters again."""

    def there(self, index: int) -> torch.Tensor:
        """The tensor that is installed for a parameter now."""

    def adopt(self) -> bool:
        """Take over parameters that users have assigned over sharded ones; True if there were any."""


class ParamGroup:
    """Parameters that are gathered together and whose gradients are reduced together.

    Attributes:
        fqn: name of its module within the root.
        entries: returns the `_parameters` entries of its modules; None if the modules were freed.
        params: its parameters; a tied one counts once.
        is_root: whether it is the root's own group.
        phase: where the parameters are: sharded, gathering, unsharded or resident.
        away: whether `phase` is sharded or resident: a gather must be issued before the weights can be read.
        grad_phase: where the gradients are: none, accumulated or being reduced.
        running: how many forwards of its modules have begun and not ended.
        used_in: number of the last forward of the root in which a node was made for this group.
        shards: the sharded parameters, as users and optimizers see them.
        wraps: whether any parameter was a DTensor before it was sharded.
        buckets: the gather buckets, one for each dtype, apart for parameters that define their own all-gather.
        residents: for each gather bucket, the pieces that a few ranks keep of it; empty until `shrink` is called.
        reduces: the reduce buckets, by all that they depend on (who trains, dtypes, divisors).
        gather_bytes, weight_bytes: bytes that a gather leases, and those of them that the weights keep after it.
        extended: whether any parameter defines its own all-gather (see `extension.py`).
        hooks_taken: whether hooks of its parameters were taken from autograd and not given back.
        handles_seen: how many hook handles torch had given to others when no parameter had a hook (while that number
            stays, none has one); -1: unknown.
        settings: the options, and whether a plan keeps this group gathered after forward; compiled graphs follow both.
        companions: groups of the same module on other meshes, whose forwards begin right after this one's.
        pinned: whether a user asked for the unsharded parameters (`unshard`), so that no forward reshards them.
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
        """A node was made for this group in the forward of the root that has this number."""
        self.used_in = forward

    def begin_forward(self) -> None:
        """The forward of one of its modules begins."""
        self.running += 1

    def end_forward(self) -> bool:
        """The forward of one of its modules ends; returns whether no other one still runs."""
        self.running -= 1
        return not self.running

    def forget_forwards(self) -> None:
        """Count all forwards as ended: one that has failed, or was stopped, does not report its end."""
        self.running = 0

    def set_companions(self, following: Sequence[ParamGroup]) -> None:
        """Set the groups of the same module that begin right after this one; an empty list changes nothing."""
        self.companions = following or self.companions

    # ---- facts

    @property
    def name(self) -> str:
        """The name for messages."""
        return self.fqn or ROOT_NAME

    @property
    def shard_size(self) -> int:
        """The number of ranks among which each parameter is sharded."""
        return self._info.shard_size

    @property
    def options(self) -> Options:
        """The options in force now."""
        return self.settings.current

    @property
    def resharding(self) -> bool:
        """Whether the options have forward reshard the group."""
        return self.settings.current.reshards(self.is_root)

    @property
    def reduces_first(self) -> bool:
        """Whether backward waits for reductions before it gathers this group.

        Never on a mesh of replicas: there, the wait for a reduction may issue its all-reduce.
        """
        return self._transports.replicate is None and self.settings.current.reduces_first(self._streams)

    @property
    def trains(self) -> bool:
        """Whether any parameter requires a gradient now."""
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
        """Issue the all-gather, ordered after the event `after` (the last change of the sharded parameters)."""
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
        """A gather has failed: wait for those that were begun, which write to the memory that is freed here."""
        for _, job in self._gathers:
            with contextlib.suppress(Exception):  # the caller raises the first error already
                job.finish()
        self._gathers, self.pinned = [], False
        after = self._runtime.gather_lane.mark()
        for bucket in self.buckets:
            bucket.release(after)

    def _leave_gathers(self) -> None:
        """The wait was interrupted (Ctrl-C, say): wait for no gather, and never reuse the memory that it may write."""
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
        """A forward is over: from now on, do not reuse memory of weights that anybody keeps views of.

        Args:
            dropped: views that the caller is about to drop, which do not count.
        """
        for bucket in self.buckets:
            bucket.end_use(dropped)

    def reshard(self) -> None:
        """Give the unsharded parameters up, or the pieces that a few ranks keep of them."""
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
        """Whether the weights stay cut among a few ranks after forward (``reshard_after_forward=n``)."""
        return self._small is not None and self.settings.current.few_ranks > 0 and not self.extended

    def shrink(self) -> None:
        """Give the unsharded parameters up, but keep pieces of them, such that a few ranks together have them whole."""
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
        """The pieces that this rank keeps after `shrink`, as DTensor parameters on the mesh of the few ranks."""
        return self._in_order([resident.shown() for resident in self.residents])

    def note_versions(self) -> None:
        """The next gather will outlive its use: note the versions of the parameters it is made from, for `is_stale`."""
        if self.phase is SHARDED:  # the pieces of a few ranks were made from older versions, noted by then
            self._versions = self._versions_now()

    def pin(self) -> None:
        """Keep the unsharded parameters, for which a user has asked, until `reshard`."""
        self.pinned = True

    def is_stale(self) -> bool:
        """Whether a parameter was replaced or edited since the versions were noted, as far as versions tell."""
        return self._versions != self._versions_now()

    def _versions_now(self) -> list[int]:
        return [x for p in self.params for x in (id(p.local), p.local._version, p.sharded._version)]

    @property
    def slots(self) -> tuple[object, ...]:
        """The slot of each bucket; when they differ from earlier ones, the weights have moved."""
        return tuple(map(_slot, self.buckets))

    def weights(self, for_use: bool = False) -> list[torch.Tensor]:
        """The unsharded parameters, in the order of `params`, without autograd history.

        Args:
            for_use: whether a node is about to be made over them; `begin_use` must follow.
        """
        return self._in_order([b.weights_for_use() if for_use else b.weights for b in self.buckets])

    def begin_use(self, outputs: Sequence[torch.Tensor]) -> None:
        """The node of a use was made, with these outputs, in the order of `params`."""
        if len(self.buckets) == 1:
            self.buckets[0].begin_use(outputs)
            return
        for bucket, members in zip(self.buckets, self._members, strict=True):
            bucket.begin_use([outputs[index] for index in members])

    def leaves(self) -> list[torch.Tensor]:
        """The unsharded parameters as leaf Parameters, with the `requires_grad` and attributes of the sharded ones."""
        leaves = self._in_order([b.leaves() for b in self.buckets])
        for leaf, param in zip(leaves, self.params, strict=True):
            if self.extended:
                lend_attributes(leaf, param.sharded)
            else:
                leaf.__dict__.update(param.sharded.__dict__)  # attributes that users set
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
        """Make all buckets anew, since dtypes or devices of parameters changed, or transports; only while sharded."""
        assert self.phase is SHARDED
        self._transports = transports or self._transports
        self.reduces.clear()
        for bucket in self.buckets:
            bucket.forget()
        self.handles_seen = -1
        self._build_buckets()

    def leave_slots(self) -> None:
        """Drop all views of slots, since the pool is about to replace its slots; only while sharded."""
        self.reduces.clear()
        self.residents = []
        for bucket in self.buckets:
            bucket.leave_slots()

    # ---- gradients

    @property
    def may_have_hooks(self) -> bool:
        """Whether any parameter may have hooks; False only if certainly none has."""
        if self.handles_seen == HANDLES.of_others():  # every kind of hook comes with a handle
            return False
        return self._on_nodes is None or any(self._on_nodes) or any_gradient_hooks(self.shards)

    def take_hooks(self) -> None:
        """Take the users' hooks on the parameters from autograd, before it can call them with gradients not reduced."""
        seen = HANDLES.of_others()
        self.hooks_taken = any([param.take_hooks() for param in self.params])  # noqa: C419 - of all
        if not self.hooks_taken:
            self.handles_seen = seen
        found = [param.hooks_on_node for param in self.params]
        self._on_nodes = None if None in found else [hooks for each in found if each is not None for hooks in each]

    def give_hooks_back(self) -> None:
        """A backward is over: give autograd the users' hooks back."""
        self.hooks_taken = any([param.give_hooks_back() for param in self.params])  # noqa: C419 - of all

    def keep(self, gradients: Gradients) -> None:
        """Add unsharded gradients to the accumulated ones, which wait for a backward with gradient sync."""
        self._kept.note_wanted()
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._kept.add(index, gradient, self.options.reduce_dtype(self.params[index].dtype))
        if self._kept.whole:
            self._set_grads(GradPhase.KEPT)

    def kept_gradient(self, index: int) -> torch.Tensor | None:
        """The accumulated unsharded gradient of a parameter."""
        return self._kept.whole.get(index)

    def take_kept(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """The sums of these gradients and the accumulated ones, which the group holds no longer."""
        total = self._kept.take(gradients)
        if self.grad_phase is GradPhase.KEPT and self._in_flight:
            self._set_grads(GradPhase.REDUCING)
        return total

    def forget_gradients(self) -> None:
        """Drop all accumulated gradients."""
        self._kept.forget()
        if self.grad_phase is GradPhase.KEPT:
            self._set_grads(GradPhase.NONE)

    def check_reduced(self, theirs: Container[int]) -> None:
        """An optimizer is about to step parameters with these ids: none of their gradients may still be accumulated.

        Raises:
            ShardConfigStateError: a gradient still waits for its reduction.
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
        """Whether accumulated gradients must be reduced by the next backward, even one that does not use the group."""
        options, kept = self.settings.current, self._kept
        pending = kept.whole or (kept.pieces and options.requires_all_reduce)
        return bool(pending) and options.requires_gradient_sync

    def start_reduce(self, gradients: Gradients) -> Reduction:
        """Issue the reduction of unsharded gradients, in the order of `params`; None counts as zeros."""
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
        """Bytes that a reduction of its gradients leases."""
        return sum(bucket.nbytes for bucket in self.reduce_buckets())

    def reduce_buckets(self) -> list[ReduceBucket]:
        """The buckets of a reduction that begins now, one for each dtype of reduction."""
        with without_torch_function():  # else each DTensor is asked for a `__torch_function__`
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
            The reduced gradients. Parameters that had no gradient on any rank are left out, unless the options ask for
            zeros. Empty if the reduction stops before the all-reduce over replicas: the group holds its pieces then.
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
