"""`GroupGradients`: accumulates and reduces the gradients of one group before they are added to `.grad`.

A table in `phases.py` lists the allowed transitions between phases; only `_set_phase` changes the phase.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_, is_not
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from .._comm.copies import Gradients
from .._comm.lanes import Job
from .._faults.seat import Notes, summary
from .._policies import Options, Settings, reduce_dtypes
from .._torch.capturing import capture_number
from .._torch.core import HANDLES, Hook, any_gradient_hooks, without_torch_function
from .._torch.distributed import dtensor_of, local_tensor, new_dtensor, spec_of
from ..errors import ShardConfigStateError, ShardConfigValueError
from .accumulation import AccumulatedGradients, Held
from .param import ShardedParam, reduced_as, run_all
from .phases import TRANSITIONS, GradPhase, illegal
from .reduction import GroupReduced, ReduceBucket, Reduced, Reduction, UnusedBefore, free_queued, reduce_buckets
from .setup import ReduceSetup

_requires_grad, _sharded, _grad = map(attrgetter, ("requires_grad", "sharded", "grad"))


class BucketSet(NamedTuple):
    """The buckets of a group's reductions that have the same parameters and options.

    Attributes:
        buckets: one for each dtype of the reduction.
        nbytes: bytes that a reduction leases.
        note: the note of a reduction, for comparison with other ranks.
    """

    buckets: list[ReduceBucket]
    nbytes: int
    note: str


class GroupGradients:
    """Accumulates and reduces the gradients of one group, and holds its users' hooks while a backward runs.

    Args:
        name: the group's name, for messages.
        params: its parameters.
        shards: the sharded parameters, as users and optimizers see them.
        settings: its options.
        setup: the meshes, transports and memory of its reductions.
        notes: the notes of the group before its collectives.

    Attributes:
        phase: the phase of the gradients: none, accumulated or being reduced.
        hooks_taken: whether hooks of its parameters were removed from autograd and not yet restored.
        bucket_sets: the reduce buckets, by all that they depend on (parameters that train, dtypes, divisors).
    """

    __slots__ = (
        "_accumulated", "_handles_seen", "_in_flight", "_name", "_new", "_notes", "_on_nodes", "_params", "_settings",
        "_setup", "_shards", "_unused_before", "bucket_sets", "hooks_taken", "phase",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        params: Sequence[ShardedParam],
        shards: Sequence[torch.Tensor],
        settings: Settings,
        setup: ReduceSetup,
        notes: Notes,
    ) -> None:
        self._notes = notes
        self._name, self._params, self._settings = name, params, settings
        self._new = new_dtensor if all(param.rows == 1 for param in params) else dtensor_of
        self._shards, self._setup = shards, setup
        self.phase = GradPhase.NONE
        self._accumulated = AccumulatedGradients(params, partial(_kept_dtypes, params, settings), setup.lane.streams)
        self._in_flight = 0  # reductions
        self._unused_before: UnusedBefore = {}
        self.hooks_taken = False
        # For `may_have_hooks`: how many hook handles torch had made for other code (`HANDLES.of_others`) at a time when
        # no parameter of the group had a hook. While that number is the same, no parameter has one. -1 if unknown.
        self._handles_seen = min([p.hooks.handles_seen for p in params], default=-1)
        self._on_nodes: list[dict[int, Hook]] | None = None  # torch's own dictionaries of node hooks; None if unknown
        self.bucket_sets: dict[tuple[object, ...], BucketSet] = {}

    def rebuild(self, shards: Sequence[torch.Tensor], setup: ReduceSetup) -> None:
        """Make buckets and look for hooks again, because parameters were converted or transports changed.

        Args:
            shards, setup: as for `__init__`.
        """
        self._shards, self._setup = shards, setup
        self._handles_seen, self._on_nodes = -1, None
        self.bucket_sets.clear()

    def leave_slots(self) -> None:
        """Drop all views of slots, because the pool is about to replace its slots."""
        self.bucket_sets.clear()

    def _set_phase(self, new: GradPhase) -> None:
        if new not in TRANSITIONS[self.phase]:
            raise illegal(self._name, self.phase, new)
        self.phase = new

    # ---- hooks of users

    @property
    def may_have_hooks(self) -> bool:
        """Whether any parameter may have hooks; False only if none has one."""
        if self._handles_seen == HANDLES.of_others():  # registering any type of hook makes a handle
            return False
        return self._on_nodes is None or any(self._on_nodes) or any_gradient_hooks(self._shards)

    def take_hooks_of(self, indices: Sequence[int]) -> None:
        """Like `take_hooks`, but only those of some parameters."""
        taken = [self._params[index].hooks.take(self._params[index].sharded) for index in indices]
        self.hooks_taken = self.hooks_taken or any(taken)

    def take_hooks(self) -> None:
        """Remove the users' hooks from autograd, before it can call them with gradients that are not reduced."""
        seen = HANDLES.of_others()
        self.hooks_taken = any([param.hooks.take(param.sharded) for param in self._params])  # noqa: C419 - of all
        if not self.hooks_taken:
            self._handles_seen = seen
        on_nodes = [param.hooks.on_node for param in self._params]
        self._on_nodes = None if None in on_nodes else [hooks for both in on_nodes if both for hooks in both]

    def give_hooks_back(self) -> None:
        """Restore the users' hooks in autograd at the end of a backward."""
        self.hooks_taken = any([param.hooks.give_back(param.sharded) for param in self._params])  # noqa: C419 - of all

    # ---- `.grad`

    def any_set(self) -> bool:
        """Whether any sharded parameter has a `.grad`."""
        with without_torch_function():  # or each DTensor's `__torch_function__` would run
            return any(map(is_not, map(_grad, self._shards), itertools.repeat(None)))

    def waiting(self) -> list[torch.Tensor]:
        """Return the accumulated gradients, which wait for a later backward to reduce them."""
        return self._accumulated.tensors()

    def add(self, pieces: Mapping[int, torch.Tensor], unused: Sequence[int] = ()) -> None:
        """Add this rank's pieces of reduced gradients, by the index of the parameter, to `.grad`; call users' hooks.

        Args:
            pieces: the pieces.
            unused: parameters that had no gradient on any rank: their `.grad` stays None.
        """
        try:
            if self._accumulated.whole or self._accumulated.pieces:
                with self._accumulated.marked():
                    self._add(pieces)
            else:
                self._add(pieces)
        except RuntimeError:
            self._check_grad_dtypes()
            raise
        if unused:
            self._accumulated.unmake(unused)

    def _check_grad_dtypes(self) -> None:
        """Explain torch's refusal to set a `.grad` of another dtype than `grad_dtype`, if it was changed too late."""
        for param in self._params:
            param.check_grad_dtype()

    def _add(self, pieces: Mapping[int, torch.Tensor]) -> None:
        params = list(map(self._params.__getitem__, pieces))
        if self.hooks_taken:
            for param, piece in zip(params, pieces.values(), strict=True):
                param.add_gradient(piece)
            return
        with without_torch_function():
            shards = list(map(_sharded, params))
            before = list(map(_grad, shards))
            if all(map(is_, before, itertools.repeat(None))):
                made = map(self._new, pieces.values(), map(spec_of, shards))
                run_all(map(setattr, shards, itertools.repeat("grad"), made))
                return
            added = [
                (local_tensor(grad), pieces[at]) for grad, at in zip(before, pieces, strict=True) if grad is not None
            ]
        torch._foreach_add_([grad for grad, _ in added], [piece for _, piece in added])
        for param, piece, grad in zip(params, pieces.values(), before, strict=True):
            if grad is None:
                param.add_gradient(piece)

    # ---- accumulation

    def accumulate(self, gradients: Gradients, overwritten: bool = False) -> None:
        """Add unsharded gradients to the accumulated ones, which wait for a backward with gradient sync.

        Args:
            gradients: the gradients, in the order of the parameters; None where there is none.
            overwritten: whether their memory may be overwritten after this call.
        """
        options = self._settings.current
        self._accumulated.note_wanted()
        new = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        if new:
            try:
                self._accumulated.add(new, [param.sum_dtype(options) for param in self._params], overwritten)
            except RuntimeError:
                self._check_grad_dtypes()
                raise
        if self._accumulated.whole:
            self._set_phase(GradPhase.ACCUMULATED)

    def own_accumulated(self) -> None:
        """At the end of a backward: copy the accumulated gradients that other code holds too."""
        self._accumulated.own()

    def take_assigned(self) -> None:
        """Accumulate unsharded gradients that code has assigned to `.grad` of shards: tensors that are no DTensors."""
        assigned: list[torch.Tensor | None] = [None] * len(self._params)
        for index, param in enumerate(self._params):
            grad = param.sharded.grad
            if grad is not None and not isinstance(grad, DTensor):
                assigned[index] = grad
                param.set_gradient(None)
        if any(grad is not None for grad in assigned):
            self.accumulate(assigned)

    def check_unused(self) -> None:
        """Check that every gradient has a dtype even if no rank computes it, because it is then reduced as zeros.

        Raises:
            ShardConfigValueError: one has none.
        """
        policy = self._settings.current.mp_policy
        free = [p.fqn for p in self._params if p.grad_dtype == (True, None) and p.sharded.requires_grad]
        if free and policy.reduce_dtype is None:
            raise ShardConfigValueError(  # as in torch
                "Reducing unused parameters with grad_dtype=None requires an explicit "
                "MixedPrecisionPolicy.reduce_dtype so every rank can build zero gradients of the same dtype: "
                f"{free[0]}. Set reduce_dtype to the dtype its gradients already have."
            )

    def accumulated(self, index: int) -> torch.Tensor | None:
        """Return the accumulated unsharded gradient of a parameter."""
        return self._accumulated.whole.get(index)

    def take(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Return the sums of these gradients and the accumulated ones, which the group no longer holds."""
        total = self._accumulated.take(gradients) if self._accumulated.whole else list(gradients)
        if self.phase is GradPhase.ACCUMULATED and self._in_flight:
            self._set_phase(GradPhase.REDUCING)
        return total

    def held_now(self) -> Held:
        """Return the gradients that are held now, between two steps."""
        return self._accumulated.held_now()

    def resume(self, held: Held) -> None:
        """Hold these gradients instead, after a replay of a captured step has made them."""
        self._accumulated.resume(held)
        self.phase = GradPhase.ACCUMULATED if held.whole or held.pieces else GradPhase.NONE

    def forget(self) -> None:
        """Drop all accumulated gradients."""
        self._accumulated.forget()
        if self.phase is GradPhase.ACCUMULATED:
            self._set_phase(GradPhase.NONE)

    def check_reduced(self, stepped: Container[int], now: str = "the optimizer steps") -> None:
        """Check, before an optimizer steps the parameters with these ids, that none of their gradients is accumulated.

        Args:
            stepped: the ids.
            now: the event before which the check runs, in words.

        Raises:
            ShardConfigStateError: a gradient still waits for its reduction.
        """
        if names := self._accumulated.held(stepped):
            setting = "set_requires_gradient_sync" if self._accumulated.whole else "set_requires_all_reduce"
            raise ShardConfigStateError(
                f"group {self._name}: {now} {', '.join(names)}, but gradients of a backward under "
                f"{setting}(False) still wait for their reduction; first run the last microbatch under "
                f"{setting}(True), or call zero_grad() to drop them"
            )

    @property
    def must_reduce(self) -> bool:
        """Whether the next backward must reduce accumulated gradients, even if it does not use the group."""
        options, accumulated = self._settings.current, self._accumulated
        pending = accumulated.whole or (accumulated.pieces and options.requires_all_reduce)
        return bool(pending) and options.requires_gradient_sync

    # ---- reductions

    @property
    def reduce_bytes(self) -> int:
        """Bytes that a reduction leases."""
        return self._bucket_set().nbytes

    def _bucket_set(self) -> BucketSet:
        """Return the buckets of a reduction that begins now."""
        trains = self._trains()
        if wanted := self._accumulated.wanted:
            trains = tuple(trained or index in wanted for index, trained in enumerate(trains))
        options = self._settings.current
        key = trains, options.mp_policy.reduce_dtype, options.divide_factor, options.only_sums
        existing = self.bucket_sets.get(key)
        if existing is None:
            indices = [index for index, trained in enumerate(trains) if trained]
            buckets = reduce_buckets(self._params, indices, self._setup.under(options))
            note = self._notes.reduce(_reduced(self._params, trains, options))
            existing = self.bucket_sets[key] = BucketSet(buckets, sum(bucket.nbytes for bucket in buckets), note)
        return existing

    def planned_note(self) -> str:
        """Return the note of a reduction of all parameters that currently require gradients."""
        return self._notes.reduce(_reduced(self._params, self._trains(), self._settings.current))

    def _trains(self) -> tuple[bool, ...]:
        with without_torch_function():  # or each DTensor's `__torch_function__` would run
            return tuple(map(_requires_grad, self._shards))

    def start_reduce(self, gradients: Gradients, alone: bool = False, holds: bool = False) -> Reduction:
        """Issue the reduction of unsharded gradients, in the order of the parameters; None counts as zeros.

        Args:
            gradients: the gradients.
            alone: whether to reduce only these gradients, over all ranks, regardless of accumulated gradients and of
                `requires_all_reduce`.
            holds: whether its memory stays leased until the wait for it, even on a stream.
        """
        whole = alone or self._setup.transports.replicate is None or self._settings.current.requires_all_reduce
        buckets, nbytes, note = self._bucket_set()
        ledgers = self._notes.reduces if whole else self._notes.gathers
        for ledger in ledgers:
            ledger.issue(note)
        accumulated = self._accumulated
        pieces = accumulated.take_partial() if not alone and (accumulated.pieces or accumulated.wanted) else None
        jobs: list[tuple[ReduceBucket, Job[Reduced]]] = []
        frees = self._setup.frees_queued and not holds
        asked = self._asked(gradients, buckets) if whole else []
        captured = bool(asked) and capture_number(self._setup.info.device) != 0
        try:
            for bucket in buckets:
                asks = bool(asked) and self._setup.lane.streams and not captured
                jobs.append((bucket, bucket.start(gradients, pieces, whole, asks, frees)))
        except BaseException:
            self._notes.take_back(ledgers)
            free_queued(self._setup.pool, jobs)
            _give_up(jobs)
            raise
        queued = free_queued(self._setup.pool, jobs)
        self._set_phase(GradPhase.REDUCING)
        self._in_flight += 1
        return Reduction(jobs, asked, whole, queued, nbytes - queued, captured)

    def _asked(self, gradients: Gradients, buckets: Sequence[ReduceBucket]) -> list[int]:
        """Return the members of these buckets whose `.grad` stays None if no rank has a gradient for them."""
        if self._settings.current.reduce_unused or not any(map(is_, gradients, itertools.repeat(None))):
            return []
        return [index for bucket in buckets for index in bucket.indices if gradients[index] is None]

    def finish_reduce(self, reduction: Reduction) -> GroupReduced:
        """Wait for a reduction.

        Returns:
            The reduced gradients. Parameters that had no gradient on any rank are left out, unless the options ask for
            zeros. Empty if the reduction stops before the all-reduce over replicas: the group then holds its pieces.
        """
        done: list[tuple[list[int], Reduced]] = []
        waited = iter(reduction.jobs)
        try:
            for bucket, job in waited:
                done.append((bucket.indices, job.finish()))
            if not reduction.whole:
                self._accumulate_pieces(done)
                done = []
        finally:  # a reduction whose wait has failed is no longer in flight, either
            _give_up(waited)
            self._in_flight -= 1
            if self._in_flight == 0:
                waits = self._accumulated.whole or self._accumulated.pieces
                self._set_phase(GradPhase.ACCUMULATED if waits else GradPhase.NONE)
        awaited = self._to_await(reduction) if self._setup.lane.streams else ()
        return GroupReduced(done, reduction.asked, awaited, self._unused_before, reduction.captured)

    def _to_await(self, reduction: Reduction) -> list[Job[Reduced]]:
        """Return the jobs that copy results to the host. The host must wait for them before it reads the results."""
        copied = reduction.whole and (self._setup.info.offloads or (reduction.asked and not reduction.captured))
        return [job for _, job in reduction.jobs] if copied else []

    def _accumulate_pieces(self, done: Sequence[tuple[list[int], Reduced]]) -> None:
        """Keep the pieces of a reduction that waits for its all-reduce over replicas."""
        for indices, reduced in done:
            parts = reduced.parts()
            self._accumulated.add_partial(indices, parts.pieces, list(parts.used))


def _give_up(jobs: Iterable[tuple[ReduceBucket, Job[Reduced]]]) -> None:
    """After an error, wait for the remaining jobs, which use memory that is released. Ignores their errors."""
    for _, job in jobs:
        with contextlib.suppress(Exception):
            job.finish()


def _kept_dtypes(params: Sequence[ShardedParam], settings: Settings) -> list[torch.dtype]:
    """Return the dtype of `.grad` of each parameter of a group."""
    reduced = reduced_as(params, settings.current)
    return [param.grad_dtype.kept(param.dtype, dtype) for param, dtype in zip(params, reduced, strict=True)]


def _reduced(params: Sequence[ShardedParam], trains: Sequence[bool], options: Options) -> str:
    """Describe a reduction for a note."""
    wanted = [param for param, trained in zip(params, trains, strict=True) if trained]
    dtypes = reduce_dtypes([p.sum_dtype(options) for p in wanted], [p.grad_dtype for p in wanted])
    numels = [math.prod(param.shape) * dtype.itemsize for param, dtype in zip(wanted, dtypes, strict=True)]
    text = f"{len(wanted)} parameters, {summary(sum(numels), dtypes)}"
    return text if options.divide_factor is None else f"{text}, divided by {options.divide_factor}"
