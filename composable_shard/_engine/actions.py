"""Actions on parameter groups: gather, reduce and reshard, and the waits for gathers.

In an eager step, only this file starts gathers, waits for them and reshards. `reductions.py` does the same for
reductions. Every action goes through `Recorder.act`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from .._comm.copies import Gradients
from .._group.edits import changed, lost_edit
from .._group.group import Entries, ParamGroup
from .._group.phases import AWAY, GATHERING, RESIDENT, SHARDED, UNSHARDED
from .._group.refresh import NodeCopies
from .._group.setup import Runtime
from .._plan.schedule import Kind
from .._torch.core import current_backward, set_grad_enabled
from ..errors import ShardConfigStateError
from .budget import Budget, gathering
from .installed import Installed, LeafHook
from .node import Outputs, Use
from .order import Order
from .recorder import RESHARD, UNSHARD, WAIT, Recorder
from .reductions import Reductions


class Actions:
    """Runs the actions of one engine's groups.

    Args:
        groups: all groups.
        runtime: the pool and lanes that the groups were built with.
        order: the schedules to follow.
        watch_leaf: called once for every unsharded leaf that users can read from a module outside its forward.
        without_group: the entries of sharded modules that have no parameters of their own.

    Attributes:
        groups, pool, order: all groups, their memory, and the current schedules.
        changed: an event recorded after the last change of sharded parameters, for example by an optimizer. The next
            gather waits for it. None after that: later gathers are queued after this one on the same lane, so they
            come after the change, too.
        recorder: runs and records all actions.
        reductions: the reductions in flight, and the finished ones whose `.grad` is not set yet.
        budget: decides which groups to reshard when a step that deviates from the plan needs memory.
        streams: whether a wait for communication blocks only streams and never the host.
        installed: tracks which tensors are installed in the modules.
        staying: groups whose unsharded parameters are needed again within the running backward. They were not resharded
            when the backward of a use ended, because the next use is of the same group or its forward is running.
        may_be_replayed: whether a step was captured in a CUDA graph. A replay may change parameters, and increases no
            version.
        gathered: groups that were gathered since the last backward ended. The same on all ranks, so that it can decide
            about collectives (`GradientFlow`).
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        runtime: Runtime,
        order: Order,
        watch_leaf: LeafHook,
        without_group: Sequence[Entries],
    ) -> None:
        self.groups = groups
        self.pool = runtime.pool
        self.order = order
        self.changed: torch.Event | None = None
        self.budget = Budget(groups, runtime.pool, order)
        self.streams = runtime.gather_lane.streams
        self.recorder = Recorder(groups, runtime.pool, order)
        self.reductions = Reductions(self.recorder, runtime.pool, order)
        self.installed = Installed(watch_leaf)
        self._runtime = runtime
        self._without_group = list(map(weakref.ref, without_group))
        self._refreshed = [group for group in groups if group.layout.copies is not None]  # those that are refreshed
        # Groups to prefetch once all reductions in flight have been waited for; None if no prefetch is held back.
        self._held_prefetches: Sequence[ParamGroup] | None = None
        self.staying: set[ParamGroup] = set()
        self.gathered: set[ParamGroup] = set()
        self.may_be_replayed = False

    # ---- between passes

    def note_capture(self) -> None:
        """Note that a step is captured in a CUDA graph."""
        self.may_be_replayed = True

    def end_reads(self) -> None:
        """Let go of the outputs of nodes: no backward reads weights any more.

        An output holds its graph, and the graph holds the engine, so they would keep each other alive.
        """
        for group in self.groups:
            for bucket in group.buckets:
                bucket.writes.end_reads()

    def install_sharded(self) -> None:
        """Install the sharded parameters of all groups whose forward is not running."""
        for group in self.groups:
            if not group.running:
                self.installed.install_sharded(group)

    # ---- issuing

    def begin_refreshes(self) -> None:
        """At the start of a root forward: refresh the compute copies that it will read (`_group/refresh.py`).

        All refreshes are issued here. They use no memory of the pool, and run concurrently with the gathers and the
        compute of earlier groups. A group that the schedule does not know is refreshed right before its gather.
        """
        if not self._refreshed:
            return
        if any([group.lost_pending for group in self._refreshed]):  # noqa: C419 - `zero_grad` is for all groups
            self.end_pending()
        for group, copies in self._copies():
            # The backward of a group that stays unsharded needs the values that it was gathered from.
            if group.phase is SHARDED:
                copies.begin_forward(torch.is_grad_enabled())
        # In the order of the modules, because the nodes may have seen other orders of their forwards.
        scheduled = {group for group, _ in self.order.forward.forward}
        for group in self._refreshed:
            if group in scheduled and group.needs_refresh:
                self._refresh(group, self.changed)

    def _refresh(self, group: ParamGroup, after: torch.Event | None) -> None:
        """Refresh the compute copies of a group, after this event; if None, after all work on the current stream."""
        watch = self.recorder.watch
        work = group.refresh_and_wait if watch is not None and watch.serial else group.start_refresh
        self.recorder.act(Kind.REFRESH, group, work, after)

    def _copies(self) -> Iterator[tuple[ParamGroup, NodeCopies]]:
        for group in self._refreshed:
            if (copies := group.layout.copies) is not None:
                yield group, copies

    def end_pending(self) -> None:
        """Note that no gradients of earlier microbatches wait any more: they were dropped."""
        for _, copies in self._copies():
            copies.end_backward(pending=False)

    def forget_copies(self) -> None:
        """After a failure or an interrupt: trust no compute copy."""
        for _, copies in self._copies():
            copies.change()

    def end_refreshes(self, interrupted: bool) -> None:
        """At the end of a root forward: wait for refreshes that it has not read, before code changes the parameters.

        A forward without gradients may have read swapped parameters (EMA), so its copies are not trusted any more.

        Args:
            interrupted: whether an interrupt (Ctrl-C) ended the forward. Then nothing is waited for.
        """
        for _, copies in self._copies():
            if not interrupted:
                copies.settle()
            if interrupted or not torch.is_grad_enabled():
                copies.expire()

    def _note_pending(self) -> None:
        """At the end of a backward: note the groups whose gradients wait for a later microbatch."""
        for group, copies in self._copies():
            options = group.settings.current
            waits = not (options.requires_gradient_sync and options.requires_all_reduce)
            copies.end_backward(pending=waits and group.trains)

    def parameters_changed(self, at: torch.Event | None = None) -> None:
        """Make the next gather wait for the event `at`; without one, for the work now queued on the current stream."""
        self.changed = at or self._runtime.gather_lane.record_current_stream()

    def issue_gather(self, group: ParamGroup) -> None:
        """Issue the gather of a sharded or resident group. Only a serial stopwatch (`stopwatch.py`) waits for it."""
        if self.order.forward.kept and group in self.order.forward.kept:
            # Groups that settings keep unsharded note versions in `start_gather`. This one is kept by the schedule. The
            # next root forward then finds out whether its parameters are outdated.
            group.note_versions()
        if self._refreshed and group.needs_refresh:
            self._refresh(group, None)
        # Resident groups gather from pieces, and others from compute copies, which no optimizer changes.
        reads_shards = group.phase is not RESIDENT and group.layout.copies is None
        self.recorder.act(UNSHARD, group, group.start_gather, self.changed)
        if reads_shards:
            self.changed = None
        if self.recorder.watch is not None and self.recorder.watch.serial:  # it times each collective separately
            self._wait_for_gather(group)

    def prefetch(self, groups: Sequence[ParamGroup]) -> None:
        """Prefetch these groups. Groups that do not fit in the budget are gathered later, when they are needed."""
        bounded = self.order.forward.budget is not None
        for group in groups:
            if group.phase in AWAY and not (bounded and self.budget.exceeded_by(gathering(group))):
                self.issue_gather(group)

    def gather(self, group: ParamGroup) -> None:
        """Make a group's unsharded parameters readable: gather them if necessary, and wait.

        A forward may write to shards, for example if a model updates its teacher after its student. Unsharded
        parameters from before the write are then outdated. They are gathered again, unless this step trains the group:
        backward needs the values with which the forward has computed. (If backward has to gather, it gets the new
        values, and raises a StaleStateError.)
        """
        if group.phase in AWAY:
            if self.order.forward.budget is not None:
                self._make_room(group, gathering(group))
            self.issue_gather(group)
        elif not (self.pool.backward or (torch.is_grad_enabled() and group.trains)) and group.is_outdated():
            self.reshard(group)
            self.issue_gather(group)
        if group.phase is GATHERING:
            self._wait_for_gather(group)

    def _make_room(self, to: ParamGroup, nbytes: int) -> None:
        """Free memory until `nbytes` more for the group `to` fit in the budget, if possible.

        A step that follows the plan fits, so this changes nothing. In other steps, first wait for reductions, then
        reshard groups.
        """
        while self.budget.exceeded_by(nbytes) and self.reductions.have_memory:
            self.reductions.wait_for_oldest()
        for group in self.budget.yielding(to, self.staying) if self.budget.exceeded_by(nbytes) else ():
            if self.budget.exceeded_by(nbytes):
                self.reshard(group)

    def _wait_for_gather(self, group: ParamGroup) -> None:
        """Wait for a gather in flight."""
        self.recorder.act(WAIT, group, group.finish_gather)
        self.gathered.add(group)

    def reshard(self, group: ParamGroup, check_edits: bool = True) -> None:
        """Reshard a group in any phase, and install its sharded parameters.

        Args:
            group: the group to reshard.
            check_edits: whether to check for in-place edits of unsharded parameters.

        Raises:
            StaleStateError: an unsharded parameter was edited in place. The group is still resharded.
            ShardConfigStateError: one was written to in a capture of a CUDA graph (`find_edits`).
        """
        edited = self.find_edits(group) if check_edits and group.is_written() else ()
        self.staying.discard(group)
        if (entries := group.entries()) is not None:
            entries.install_sharded()  # first, because the wait below may fail or be interrupted
        if group.phase is GATHERING:
            self._wait_for_gather(group)  # the gather writes to the memory that is released here
        if group.phase is not SHARDED:
            self.recorder.act(RESHARD, group, group.reshard)
        if edited:
            raise lost_edit(edited)

    def find_edits(self, group: ParamGroup) -> list[str]:
        """FQNs of the unsharded parameters whose values user code has changed (`edits.changed`).

        Their versions have changed. A write of equal values also changes versions, so the values are compared with the
        gathered ones, for which the group is gathered again if needed (`edits.py`).

        Raises:
            ShardConfigStateError: in a capture of a CUDA graph, where the host cannot read a comparison.
        """
        if self.pool.memory.capture:
            raise _written_in_capture(group)
        try:
            return changed(group.buckets, partial(self._regather, group))
        except BaseException:
            self.reshard(group, check_edits=False)
            raise

    def _regather(self, group: ParamGroup) -> None:
        self.recorder.act(RESHARD, group, partial(group.reshard, again=True))
        self.issue_gather(group)
        self._wait_for_gather(group)

    def reshard_outdated(self, waiting: bool) -> bool:
        """At the start of a root forward: adopt replaced parameters, and reshard outdated groups.

        Args:
            waiting: whether the backward of an earlier forward may still run (`Iterations.waiting`). If so, and in grad
                mode, the groups that the earlier forward left unsharded stay unsharded for that backward, unless their
                shards have changed.

        Returns:
            whether any parameter was replaced, tied or converted.
        """
        if self._without_group:
            self._check_without_group()
        adopted = False
        for group in self.groups:
            entries = group.entries()
            replaced = entries is not None and entries.adopt()
            adopted |= replaced
            if group.phase is SHARDED or group.running:
                continue
            if replaced or not self._outlives(group, waiting) or group.is_stale():
                self.reshard(group)
        return adopted

    def _outlives(self, group: ParamGroup, waiting: bool) -> bool:
        """Whether unsharded parameters of this group may be used by a root forward that begins now."""
        if self.may_be_replayed and not self.pool.memory.capture:
            return False  # even if a forward is waiting: it may be one whose backward never comes
        if group.stay.pinned:
            return True
        # Code often swaps weights before an evaluation (EMA). Foreach functions do not increase versions, so such a
        # swap would go unnoticed. An evaluation therefore gathers the groups again that no user has unsharded.
        if not torch.is_grad_enabled():
            return False
        # For several microbatches, users set `reshard_after_backward` to False, and back to True for the last one. So
        # what an earlier backward has kept (`stay.kept`) may be used even if the setting is True now.
        return waiting or group.stay.kept or not group.settings.current.reshard_after_backward

    def _check_without_group(self) -> None:
        """Refuse parameters that train and that were added to modules without a group."""
        for known in self._without_group:
            if (entries := known()) is not None:
                entries.adopt()

    def end_root_forward(self, failed: bool) -> None:
        """At the end of a root forward: reshard prefetched groups that were not used; without grad mode, all groups.

        Groups that a user has unsharded stay so, unless they were edited and the forward failed.

        Args:
            failed: whether the forward raised an error. Then no collective is issued, because other ranks may not have
                failed: edited weights are not gathered again for a comparison.
        """
        keeps = torch.is_grad_enabled()
        for group in self.groups:
            if failed and group.is_written():
                group.forget_writes()
                self.reshard(group, check_edits=False)
            if group.phase is not SHARDED and not group.stay.pinned and (group.phase is GATHERING or not keeps):
                self.reshard(group)
        if keeps:  # the loss comes next, which needs memory. Without grad mode, another forward usually comes next
            self.pool.free_idle(between=True)

    def reshard_after_failure(self) -> None:
        """After a failure: reshard groups whose forward is not running, except unedited ones that a user unsharded."""
        for group in self.groups:
            if not group.running and (group.is_written() or not group.stay.pinned):
                group.forget_writes()  # the failure was reported already
                self.reshard(group, check_edits=False)

    def pin(self, group: ParamGroup, wait: bool) -> None:
        """Gather a group and keep it unsharded, as described at `FSDPModule.unshard`."""
        away = group.phase in AWAY
        group.stay.pin()  # before the gather, which notes versions for groups that stay
        if away:
            copies = group.layout.copies
            if copies is not None:
                copies.expire()
            self.parameters_changed()  # users call this between steps, after any change that they have made
            self.issue_gather(group)
            if copies is not None:
                copies.expire()  # users may swap parameters around the call
        # A group that is unsharded already may have its shards installed, for example after a backward that kept it. No
        # handle has to be waited for, so its unsharded parameters are installed now, unless its forward is using them.
        if wait or (group.phase is UNSHARDED and not group.running):
            self.gather(group)
            self.installed.install_leaves(group)

    def open_backward(self, repeated: frozenset[ParamGroup]) -> None:
        """Begin a backward pass.

        Args:
            repeated: groups that get gradients from several uses in it.
        """
        self.reductions.open_backward(repeated)
        self.installed.open_backward()
        self.pool.backward = True
        self.order.begin_backward()
        if self.order.forward.budget is not None:
            self.budget.begin_backward()

    def close_backward(self) -> None:
        """End a backward pass, successful or not."""
        self.staying.clear()
        self.installed.close_backward()
        self.budget.unread.clear()
        self.pool.backward = False

    def end_root_backward(self, ends_pins: bool) -> None:
        """At the end of a backward: reshard groups that have `reshard_after_backward`, and prefetched, unused groups.

        Other groups stay unsharded, but their sharded parameters are installed, which clipping and optimizers read.
        Groups whose forward is running are left alone.

        Args:
            ends_pins: whether also to reshard groups that users have unsharded with `unshard()`. If such a group has a
                use, the end of that use reshards it. A group may have a use on other ranks and none on this one, and
                must be resharded here as well.
        """
        self.staying.clear()
        self.budget.unread.clear()
        self._note_pending()
        for group in self.groups:
            if group.phase is SHARDED or group.running or (group.stay.pinned and not ends_pins):
                continue
            unused = group.phase is GATHERING and not group.stay.pinned
            if group.settings.current.reshard_after_backward or unused or self.pool.memory.capture:
                self.reshard(group)
            else:
                self.installed.install_sharded(group)
                group.stay.keep()
        self.pool.free_idle()

    def reduce(self, group: ParamGroup, gradients: Gradients) -> None:
        """Issue the reduction of a group's gradients. If too many reductions are in flight, wait for the oldest first.

        `.grad` is set when this reduction has been waited for, or a little later (see `reductions.py`).
        """
        if self.reductions.in_flight:
            self.reductions.make_way(group)
        if self.order.forward.budget is not None:
            self._make_room(group, group.gradients.reduce_bytes)
        self.reductions.start(group, gradients)
        if self.recorder.watch is not None and self.recorder.watch.serial:
            self.reductions.wait_for_oldest()

    def reduce_now(self, group: ParamGroup, gradients: Gradients) -> dict[int, torch.Tensor]:
        """Reduce and wait; does not set `.grad`. Returns this rank's shard of each gradient, by parameter index."""
        self.reductions.finish_all()  # reductions are waited for in the order of issue
        if self.order.forward.budget is not None:
            self._make_room(group, group.gradients.reduce_bytes)
        self.reductions.start(group, gradients, alone=True)
        return self.reductions.finish_newest()

    def discard_reductions(self) -> None:
        """Wait for all reductions and discard their results, and issue no gathers that were held back for them."""
        self._held_prefetches = None
        self.reductions.discard()

    def begin_forward(self, group: ParamGroup) -> None:
        """Begin the forward of a group, outside of any backward."""
        self.recorder.history.begins(group)
        if self.recorder.watch is not None:
            self.recorder.watch.begin(Kind.FORWARD, group.fqn)

    def end_forward(self, group: ParamGroup, stays: bool, failed: bool = False) -> None:
        """End the forward of a group: reshard it, keep it unsharded, or keep pieces of it (`ParamGroup.shrink`).

        Args:
            group: the group.
            stays: whether the forward was a recomputation in the group's own backward, which needs the unsharded
                parameters next. Then the group is not resharded. If the backward is itself recorded (`create_graph`),
                its modules get copies of the weights.
            failed: whether the forward raised an error. Then no pieces are kept: they need memory, which may be what
                was missing, and no backward follows.
        """
        if self.recorder.watch is not None:
            self.recorder.watch.end(Kind.FORWARD)
        if stays:
            self.installed.install_copies(group)
            return
        if not self.order.forward.reshards(group):
            self.installed.install_leaves(group)
        elif failed or not group.shrinks:
            self.reshard(group)
        elif group.phase is UNSHARDED:  # not if user code has resharded it in its forward
            self._shrink(group)
        # After the last group has begun, nothing will be gathered in this forward, so memory without leased slots is
        # freed here. The root's forward may end later: it may compute the loss.
        if not (self.pool.arena.keeps_idle or self.pool.backward) and self.order.all_have_begun():
            self.pool.free_idle()

    def end_failed_forward(self, group: ParamGroup, stays: bool, written: bool) -> None:
        """Like `end_forward`, but after a failure, and without a check for edits: other ranks may not have failed.

        Args:
            group, stays: as in `end_forward`.
            written: whether the forward wrote to what was installed: outputs of its node, or leaves.
        """
        written |= group.is_written()
        group.forget_writes()
        # In backward, a checkpoint stops a recomputation early by an exception. That is no failure.
        failed = current_backward() < 0
        self.end_forward(group, stays, failed)
        if failed and written:
            self.reshard(group, check_edits=False)

    def _shrink(self, group: ParamGroup) -> None:
        """Keep pieces of a group's unsharded parameters, and install these pieces in the modules."""
        self.installed.install_sharded(group)
        edited = self.find_edits(group) if group.is_written() else ()
        self.recorder.act(Kind.SHRINK, group, group.shrink)
        if edited:
            raise lost_edit(edited)
        self.recorder.history.add_bytes(group.layout.weight_bytes)  # they were live together with the pieces
        if (entries := group.entries()) is not None:
            entries.install_leaves(group.pieces())

    def begin_backward(
        self, use: Use, outputs: Outputs, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]
    ) -> None:
        """Begin the backward of a use: gather and install its unsharded parameters, and prefetch the next groups.

        With `reduces_first` of the group (usual on a CPU) or of the schedule, a gather can reuse the memory of a
        reduction only after the host has waited for that reduction. So all reductions in flight are waited for before
        anything is gathered:

        - If the use's group, or one in `missed`, must be gathered: here.
        - Otherwise: when half of the weights that the use has saved in its first bucket have been read
          (`Use.reads`, `issue_held_prefetches`). The reductions overlap with the first half of the use's backward.

        In both cases, the next groups are prefetched when half of the weights have been read, so their gathers overlap
        with the second half. If the use has saved at most one weight, they are prefetched here.

        Args:
            use: the use.
            outputs: the outputs of the use's node. They are installed again, because a checkpoint may recompute the
                forward.
            missed: groups that the schedule gathers with earlier uses which backward skipped. They are gathered first.
            following: the groups to prefetch with this use.
        """
        if self._held_prefetches is not None:
            self.issue_held_prefetches()
        group = use.group
        self.staying.discard(group)
        # Note which weights were edited since the forward. `begin_reads` takes the outputs of one bucket, and `outputs`
        # are those of all. If the group has several buckets, this is done later, at the first read of each bucket: its
        # handles know the bucket's outputs (`Handle.shown`).
        if len(group.buckets) == 1:
            bucket = group.buckets[0]
            bucket.writes.begin_reads(outputs, bucket.here)
        if self.order.forward.budget is not None:
            self.budget.reached(use, outputs)
        holds = bool(self.reductions.in_flight) and self._put_reductions_first(group, missed, following)
        if missed:
            self.prefetch(missed)
        # With `set_unshard_in_backward(False)`, backward is said to read no weights. If the group is unsharded all the
        # same, they are installed.
        if group.gathers_in_backward or group.phase not in AWAY:
            self.gather(group)
            self.installed.install_outputs(use, outputs)
            if torch.is_grad_enabled():
                self.installed.install_new_copies(use, outputs)
        # If the root returns the output of its last module, backward reaches that module first and the root right after
        # it. The compute that follows is the module's.
        if self.recorder.watch is not None and not (group.is_root and self.recorder.watch.runs(Kind.BACKWARD)):
            self.recorder.watch.begin(Kind.BACKWARD, group.fqn)
        if not holds:
            self.prefetch(following)
            return
        self._held_prefetches = following
        if use.reads > 1:
            group.buckets[0].reads_left = use.reads // 2
        else:
            self.issue_held_prefetches()

    def _put_reductions_first(
        self, group: ParamGroup, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]
    ) -> bool:
        """If gathers must follow reductions, wait for these if anything is gathered now; see `begin_backward`.

        Returns:
            whether to hold back the prefetches.
        """
        if not (self.order.backward.reduces_first or group.reduces_first):
            return False
        if group.phase in AWAY or any(each.phase in AWAY for each in missed):
            self._wait_for_reductions()
            return True
        return any(each.phase in AWAY for each in following)

    def gather_again(self, group: ParamGroup) -> None:
        """Make a group readable again that the budget, or user code, may have resharded since backward reached it.

        The budget may have resharded it while a checkpoint was still to recompute its forward (`Budget.unread`). Then
        the outputs of its use's node are installed again, which the recomputation will read.
        """
        self.gather(group)
        if (reached := self.budget.unread.get(group)) is not None:
            self.installed.install_outputs(*reached)

    def skip_use(self, group: ParamGroup, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]) -> None:
        """Gather for a use that backward skips, in the order in which `begin_backward` gathers on other ranks."""
        self.budget.unread.pop(group, None)
        own = (group,) if group.gathers_in_backward else ()
        self._issue_held_before(group, (*missed, *own))
        self.prefetch(missed)
        if own:
            self.gather(group)
        self._issue_held_before(group, following)
        self.prefetch(following)

    def _issue_held_before(self, group: ParamGroup, gathers: Sequence[ParamGroup]) -> None:
        """Issue the prefetches held back, before `gathers`. If gathers must follow reductions, wait for these first.

        `issue_held_prefetches` also waits for reductions, but only if prefetches are held back.
        """
        first = self.order.backward.reduces_first or group.reduces_first
        if first and any(each.phase in AWAY for each in gathers):
            self._wait_for_reductions()
        self.issue_held_prefetches()

    def end_use(self, group: ParamGroup, following: ParamGroup | None) -> None:
        """End the backward of a use: reshard its group, unless it must stay unsharded.

        It stays unsharded in three cases:

        - One of its forwards is still running.
        - It is `following`, the group whose backward is expected next, and the schedule allows that.
        - Its settings request it.
        """
        if self._held_prefetches is not None:
            self.issue_held_prefetches()
        self.installed.end_use(group)
        stays = group.running or (following is group and self.order.backward.stays_for_next)
        if not stays and group.settings.current.reshard_after_backward:
            self.reshard(group)
            return
        for bucket in group.buckets:
            bucket.writes.end_reads()
        if stays:
            self.staying.add(group)
        else:
            self.installed.install_sharded(group)  # it stays unsharded, but clipping and optimizers must see shards

    def issue_held_prefetches(self) -> None:
        """If prefetches are held back: wait for all reductions in flight, then issue the prefetches."""
        following, self._held_prefetches = self._held_prefetches, None
        if following is not None:
            self._wait_for_reductions()
            self.prefetch(following)

    def _wait_for_reductions(self) -> None:
        grad = torch.is_grad_enabled()  # True in a backward with create_graph; setting `.grad` must not be recorded
        set_grad_enabled(False)
        try:
            while self.reductions.in_flight:
                self.reductions.wait_for_oldest()
        finally:
            set_grad_enabled(grad)

    def rebuild(self, groups: Sequence[ParamGroup]) -> None:
        """Re-create the buckets of those groups that are sharded, and free the pool's memory (`start_over`)."""
        for group in groups:
            if group.phase is SHARDED:
                group.rebuild()
        self.pool.start_over()

    def plan_memory(self) -> None:
        """Between two steps: place the pool's slots in an arena, if all groups are sharded.

        If a group is kept unsharded, its memory must not move. A later step makes the arena.
        """
        if all(group.phase is SHARDED for group in self.groups):
            for group in self.groups:
                group.leave_slots()
            self.pool.make_arena()


def _written_in_capture(group: ParamGroup) -> ShardConfigStateError:
    return ShardConfigStateError(
        f"group {group.name}: a forward writes to its unsharded parameters while a CUDA graph is being captured. "
        "Resharding loses such a write, which is allowed only if it changes no value, and the host cannot compare "
        "values in a capture. Write to the sharded parameters outside of the graph, or do not capture this step"
    )
