"""Actions on parameter groups: gather, reduce and reshard, and the waits for gathers and reductions.

In an eager step, only this file starts or waits for gathers and reductions, and only this file reshards. Every action
is recorded. To *drop* a group means to reshard it and to install its sharded parameters in the modules.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from .._comm.copies import Gradients
from .._group.edits import changed, lost_edit
from .._group.group import Entries, ParamGroup, Runtime
from .._group.phases import AWAY, GATHERING, RESIDENT, SHARDED, UNSHARDED
from .._group.reduction import GroupReduced, Reduction
from .._plan.record import Record
from .._plan.schedule import MAX_REDUCTIONS, Kind
from .._torch.core import current_backward, set_grad_enabled
from .budget import Budget, gathering
from .history import History
from .installed import Installed, LeafHook
from .node import Outputs, Use
from .order import Order
from .out_of_memory import Part, explain
from .stopwatch import Stopwatch

T = TypeVar("T")
LOG = logging.getLogger("composable_shard.engine")
is_logged: Callable[[], bool] = partial(LOG.isEnabledFor, logging.DEBUG)
UNSHARD, WAIT, RESHARD, REDUCE, REDUCED = Kind.UNSHARD, Kind.WAIT, Kind.RESHARD, Kind.REDUCE, Kind.REDUCED
_AT_ONCE = 4  # set `.grad` for this many reduced groups together, which halves the host time compared with one by one
_NOTHING = object()


class Actions:
    """Runs the actions of one engine's groups and records each one.

    Args:
        groups: all groups.
        runtime: the pool and lanes that the groups were built with.
        order: the schedules to follow.
        watch_leaf: called once for every unsharded leaf that users can read from a module outside its forward.
        without_group: the entries of sharded modules that have no parameters of their own.

    Attributes:
        groups, pool, order: all groups, their memory, and the current schedules.
        changed: the event recorded after the last parameter change. The next gather waits for it; None if a gather
            already has.
        repeated: groups that get gradients from several uses in the current backward.
        budget: decides which groups to reshard when a step that deviates from the plan needs memory.
        streams: whether a wait for communication blocks only streams and never the host.
        watch: the stopwatch that times all actions; None if nothing is timed.
        history: the actions so far; records are built from it.
        installed: tracks which tensors are installed in the modules.
        staying: groups that were not resharded at the end of a use's backward, because the group's next use, or one of
            its forwards that is still running, needs the unsharded parameters.
        gathered: groups that were gathered since the last backward ended; the same on all ranks.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        runtime: Runtime,
        order: Order,
        watch_leaf: LeafHook,
        without_group: Sequence[Entries] = (),
    ) -> None:
        self.groups = groups
        self.pool = runtime.pool
        self.order = order
        self.changed: torch.Event | None = None
        self.repeated: frozenset[ParamGroup] = frozenset()
        self.budget = Budget(groups, runtime.pool, order)
        self.watch: Stopwatch | None = None
        self.streams = runtime.gather_lane.streams
        self.history = History()
        self.installed = Installed(watch_leaf)
        self._runtime = runtime
        self._without_group = list(map(weakref.ref, without_group))
        self._ask_first: Callable[[], None] | None = None  # called before the first reduction
        self._reductions: deque[tuple[ParamGroup, Reduction]] = deque()
        # Groups to gather after waiting for all reductions in flight; None if no gathers are held back.
        self._gathers_behind: Sequence[ParamGroup] | None = None
        self._unset: dict[ParamGroup, GroupReduced] = {}  # finished reductions whose `.grad` is not set yet
        # Finished reductions with values that the host must read. The host synchronizes once for all, after backward.
        self._unread: list[tuple[ParamGroup, GroupReduced]] = []
        # For groups with hooks and several uses in a backward: the hooks run once, on the sum over all uses.
        self._sums: dict[ParamGroup, dict[int, torch.Tensor]] = {}
        self.staying: set[ParamGroup] = set()
        self.gathered: set[ParamGroup] = set()

    # ---- the record

    def roll_record(self) -> None:
        """End an iteration: its actions, if there are any, become the last record."""
        if self.history.roll(() if self.watch is None else self.watch.spans) and self.watch is not None:
            self.watch.take()

    def record_so_far(self) -> Record | None:
        """The record since the last one; None if there are no actions. The same object until more actions follow."""
        return self.history.so_far(() if self.watch is None else self.watch.spans)

    def before_first_reduction(self, ask: Callable[[], None]) -> None:
        """Call `ask` before the next reduction. If it raises, call it again before the following one."""
        self._ask_first = ask

    def explain(self, error: BaseException) -> None:
        """If the error means that memory ran out, add a note about the memory in use."""
        explain(error, [Part(self.groups, self.pool, self.order.plan)])

    def time_by(self, watch: Stopwatch | None) -> None:
        """Time all actions with `watch` from now on; None turns timing off."""
        self.watch = watch

    # ---- between passes

    def end_reads(self) -> None:
        """Release the outputs of nodes when no backward reads weights; otherwise they would keep the engine alive."""
        for group in self.groups:
            for bucket in group.buckets:
                bucket.writes.end_reads()

    def hide_idle(self) -> None:
        """Install the sharded parameters of all groups whose forward is not running."""
        for group in self.groups:
            if not group.running:
                self.installed.hide(group)

    # ---- issuing

    def _act(self, kind: Kind, group: ParamGroup, work: Callable[..., T], given: Any = _NOTHING) -> T:
        """Call `work` (with `given`, if passed) and record the action. All actions of a rank go through this method."""
        try:
            if self.watch is not None:
                result = self.watch.timed(kind, group.fqn, work, *(() if given is _NOTHING else (given,)))
            else:  # `work(*args)` is slower: it would re-enter the interpreter
                result = work() if given is _NOTHING else work(given)
        except Exception as error:
            self.explain(error)
            raise
        done = self.history.done
        done += (kind, group.fqn, self.pool.live_bytes)  # a flat list: tuples would add work for the cycle collector
        return result

    def parameters_changed(self, at: torch.Event | None = None) -> None:
        """Make later gathers wait for the event `at`; without one, for the work queued on the current stream so far."""
        self.changed = at or self._runtime.gather_lane.mark()

    def ahead(self, group: ParamGroup | None) -> None:
        """Issue a group's gather without waiting for it, unless it is issued or complete already."""
        if group is not None and group.phase in AWAY:
            if self.order.forward.kept and group in self.order.forward.kept:
                group.note_versions()
            here = group.phase is RESIDENT  # then the gather reads nothing that an optimizer changes
            self._act(UNSHARD, group, group.start_gather, self.changed)
            if not here:  # all gathers share one lane, so it waits for each event only once
                self.changed = None
            if self.watch is not None and self.watch.serial:
                self._arrive(group)

    def prefetch(self, groups: Sequence[ParamGroup]) -> None:
        """Prefetch these groups. Groups that do not fit in the budget are gathered later, when they are needed."""
        for group in groups:
            bounded = self.order.forward.budget is not None
            if group.phase in AWAY and not (bounded and self.budget.exceeded_by(gathering(group))):
                self.ahead(group)

    def need(self, group: ParamGroup) -> None:
        """Make a group's unsharded parameters readable: gather them if necessary, and wait.

        A forward may write to shards, for example if a model updates its teacher after its student. The unsharded
        parameters from before are outdated then. They are gathered again here unless a backward follows, which detects
        the change itself.
        """
        if group.phase in AWAY:
            if self.order.forward.budget is not None:
                self._make_room(group, gathering(group))
            self.ahead(group)
        elif not (self.pool.backward or (torch.is_grad_enabled() and group.trains)) and group.is_outdated():
            self.drop(group)
            self.ahead(group)
        if group.phase is GATHERING:
            self._arrive(group)

    def _make_room(self, to: ParamGroup, nbytes: int) -> None:
        """Free memory until `nbytes` more for the group `to` fit in the budget, if possible.

        A step that follows the plan fits already. In other steps, first wait for reductions, then reshard groups.
        """
        while self.budget.exceeded_by(nbytes) and any(each.leased_bytes for _, each in self._reductions):
            self._settle_oldest()
        for group in self.budget.yielding(to, self.staying) if self.budget.exceeded_by(nbytes) else ():
            if self.budget.exceeded_by(nbytes):
                self.drop(group)

    def _arrive(self, group: ParamGroup) -> None:
        """Wait for a gather in flight."""
        self._act(WAIT, group, group.finish_gather)
        self.gathered.add(group)

    def drop(self, group: ParamGroup, check_edits: bool = True) -> None:
        """Reshard a group in any phase, and install its sharded parameters.

        Args:
            group: the group to reshard.
            check_edits: whether to check for in-place edits of unsharded parameters.

        Raises:
            StaleStateError: an unsharded parameter was edited in place. The group is still resharded.
        """
        edited = self.find_edits(group) if check_edits and group.is_written() else ()
        self.staying.discard(group)
        if (entries := group.entries()) is not None:
            entries.hide()
        if group.phase is GATHERING:
            self._arrive(group)
        if group.phase is not SHARDED:
            self._act(RESHARD, group, group.reshard)
        if edited:
            raise lost_edit(edited)

    def find_edits(self, group: ParamGroup) -> list[str]:
        """FQNs of the unsharded parameters whose values changed, given that their versions did; see `edits.changed`."""
        try:
            return changed(group.buckets, partial(self._gather_again, group))
        except BaseException:
            self.drop(group, check_edits=False)
            raise

    def _gather_again(self, group: ParamGroup) -> None:
        self._act(RESHARD, group, partial(group.reshard, again=True))
        self.ahead(group)
        self._arrive(group)

    def drop_outdated(self, waiting: bool) -> bool:
        """At the start of a root forward: adopt replaced parameters, and reshard outdated groups.

        Args:
            waiting: whether the backward of an earlier forward may still run. If so, the groups that the earlier
                forward left unsharded stay unsharded for that backward. The caller decides this by the calls that the
                program makes and not by which graphs are alive, because ranks may differ in the latter.

        Returns:
            whether any parameter was replaced.
        """
        if self._without_group:
            self._adopt_without_group()
        adopted = False
        for group in self.groups:
            entries = group.entries()
            adopted |= entries is not None and entries.adopt()
            if group.phase is SHARDED or group.running:
                continue
            if adopted or not self._outlives(group, waiting) or group.is_stale():
                self.drop(group)
        return adopted

    def _outlives(self, group: ParamGroup, waiting: bool) -> bool:
        """Whether a root forward that begins now may use the unsharded parameters of this group."""
        if group.stay.pinned:
            return True
        # Foreach functions do not increase versions, so a swap of weights by them before an evaluation goes unnoticed.
        # An evaluation reshards all groups when it ends, so none need to be kept for it.
        if not torch.is_grad_enabled():
            return False
        # `stay.kept` stores the setting from the backward that kept the weights: the current setting is True again in
        # the last of several microbatches.
        return waiting or group.stay.kept or not group.settings.current.reshard_after_backward

    def _adopt_without_group(self) -> None:
        """Adopt parameters that users added to modules that had none of their own."""
        for known in self._without_group:
            if (entries := known()) is not None:
                entries.adopt()

    def drop_after_forward(self, failed: bool) -> None:
        """At the end of a root forward: reshard prefetched groups that were not used; without grad mode, all groups.

        Args:
            failed: whether the forward raised an error. Then nothing is done that requires other ranks.
        """
        keeps = torch.is_grad_enabled()
        for group in self.groups:
            if failed and group.is_written():
                group.forget_writes()
                self.drop(group, check_edits=False)
            if group.phase is not SHARDED and not group.stay.pinned and (group.phase is GATHERING or not keeps):
                self.drop(group)
        if keeps:
            self.pool.rest(between=True)

    def give_up_idle(self) -> None:
        """After a failure: reshard all groups whose forward is not running, except those that a user unsharded."""
        for group in self.groups:
            if not group.running and (group.is_written() or not group.stay.pinned):
                group.forget_writes()  # the failure was reported already
                self.drop(group, check_edits=False)

    def pin(self, group: ParamGroup, wait: bool) -> None:
        """Gather a group and keep it unsharded until `reshard`, its next use, or a change of its parameters."""
        if group.phase in AWAY:
            self.parameters_changed()
        group.stay.pin()
        self.ahead(group)
        if wait:
            self.need(group)
            self.installed.show_leaves(group)

    def open_backward(self, repeated: frozenset[ParamGroup]) -> None:
        """Begin a backward pass.

        Args:
            repeated: groups that get gradients from several uses in it.
        """
        if self._reductions:  # from a backward that the user ends manually
            self.settle()
        self.repeated = repeated
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

    def drop_after_backward(self, pinned: bool) -> None:
        """At the end of a backward: reshard groups that have `reshard_after_backward`, and prefetched, unused groups.

        Groups whose forward is running are skipped. All others stay unsharded, but their sharded parameters are
        installed.

        Args:
            pinned: whether groups that a user unsharded are treated like all others. A rank that has not run such a
                group must end with it sharded, like the ranks that have: otherwise clipping would miss its gradients.
        """
        self.staying.clear()
        self.budget.unread.clear()
        for group in self.groups:
            if group.phase is SHARDED or group.running or (group.stay.pinned and not pinned):
                continue
            if group.settings.current.reshard_after_backward or (group.phase is GATHERING and not group.stay.pinned):
                self.drop(group)
            else:
                self.installed.hide(group)
                group.stay.keep()
        self.pool.rest()

    def reduce(self, group: ParamGroup, gradients: Gradients) -> None:
        """Issue the reduction of a group's gradients. If too many reductions are in flight, wait for the oldest first.

        `.grad` is set when this reduction has been waited for, or a little later by `hand_out`.
        """
        if self._reductions:
            most = self._most_before(group)
            while len(self._reductions) >= most:
                self._settle_oldest()
        if self.order.forward.budget is not None:
            self._make_room(group, group.gradients.reduce_bytes)
        self._start_reduce(group, gradients)
        if self.watch is not None and self.watch.serial:
            self._settle_oldest()

    def _most_before(self, group: ParamGroup) -> int:
        """How many reductions may be in flight when this group's is issued; at least 1."""
        large = group.gradients.reduce_bytes > self.pool.arena.least_large
        # The arenas of ranks may differ, so this is allowed only if neither the wait nor the hooks issue collectives.
        if large and not any(each.issues_in_wait or each.gradients.hooks_taken for each, _ in self._reductions):
            return 1  # the allocator gets back the memory of earlier reductions before this one allocates
        schedule, allowed = self.order.backward, group.settings.current.max_reductions
        planned = schedule.in_flight.get(group, schedule.max_reductions)
        return min(planned, allowed) if planned and allowed else planned or allowed or MAX_REDUCTIONS

    def _start_reduce(self, group: ParamGroup, gradients: Gradients, alone: bool = False) -> None:
        if self._ask_first is not None:
            self._ask_first()
            self._ask_first = None
        start = group.gradients.start_reduce
        if alone or group in self.order.backward.holds:
            start = partial(start, alone=alone, holds=group in self.order.backward.holds)
        reduction = self._act(REDUCE, group, start, gradients)
        self._reductions.append((group, reduction))
        self.history.lasted(reduction.queued_bytes)

    def reduce_now(self, group: ParamGroup, gradients: Gradients) -> dict[int, torch.Tensor]:
        """Reduce and wait; does not set `.grad`. Returns this rank's shard of each gradient, by parameter index."""
        self.settle()
        if self.order.forward.budget is not None:
            self._make_room(group, group.gradients.reduce_bytes)
        self._start_reduce(group, gradients, alone=True)
        _, reduction = self._reductions.pop()
        return self._act(REDUCED, group, group.gradients.finish_reduce, reduction).pieces()

    def begin_forward(self, group: ParamGroup) -> None:
        """Begin the forward of a group, outside of any backward."""
        self.history.begins(group)
        if self.watch is not None:
            self.watch.begin(Kind.FORWARD, group.fqn)

    def end_forward(self, group: ParamGroup, stays: bool) -> None:
        """End the forward of a group: reshard it, keep it unsharded, or keep pieces of it (`ParamGroup.shrink`).

        Args:
            group: the group.
            stays: whether the forward was a recomputation in the group's own backward, which needs the unsharded
                parameters next. Then the group is not resharded.
        """
        if self.watch is not None:
            self.watch.end(Kind.FORWARD)
        if stays:
            self.installed.show_copies(group)
            return
        if not self.order.forward.reshards(group):
            self.installed.show_leaves(group)
        elif not group.shrinks:
            self.drop(group)
        elif group.phase is UNSHARDED:
            self._shrink(group)
        if not (self.pool.arena.keeps_idle or self.pool.backward) and self.order.all_have_begun():
            self.pool.rest()  # here as well, because the root's forward may compute the loss

    def end_failed_forward(self, group: ParamGroup, stays: bool, written: bool) -> None:
        """Like `end_forward`, but after a failure, and without a check for edits: other ranks may not have failed.

        Args:
            group, stays: as in `end_forward`.
            written: whether the forward wrote to outputs of its node.
        """
        written |= group.is_written()
        group.forget_writes()
        self.end_forward(group, stays)
        # A checkpoint also stops a recomputation in backward early by raising an exception.
        if written and current_backward() < 0:
            self.drop(group, check_edits=False)

    def _shrink(self, group: ParamGroup) -> None:
        """Keep pieces of a group's unsharded parameters, and install these pieces in the modules."""
        self.installed.hide(group)
        edited = self.find_edits(group) if group.is_written() else ()
        self._act(Kind.SHRINK, group, group.shrink)
        if edited:
            raise lost_edit(edited)
        self.history.lasted(group.layout.weight_bytes)  # for a moment, full weights and pieces were both live
        if (entries := group.entries()) is not None:
            entries.lend(group.pieces())

    def begin_backward(
        self, use: Use, outputs: Outputs, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]
    ) -> None:
        """Begin the backward of a use: gather and install its unsharded parameters, and prefetch the next groups.

        With `reduces_first`, gathers can reuse a reduction's memory only after the host has waited for that reduction.
        So all reductions in flight are waited for before anything is gathered. If this use or a group in `missed` must
        be gathered, the wait happens here. Otherwise, the wait happens when half of the use's saved weights have been
        read. Prefetches are then issued at that point in both cases, so reductions overlap with the first half of the
        use's backward, and prefetched gathers overlap with the second half.

        Args:
            use: the use.
            outputs: the outputs of the use's node. They are installed again, because a checkpoint may recompute the
                forward.
            missed: groups that the schedule gathers with earlier uses which backward skipped. They are gathered first.
            following: the groups to prefetch with this use.
        """
        if self._gathers_behind is not None:
            self.catch_up()
        group = use.group
        self.staying.discard(group)
        if len(group.buckets) == 1:  # with several buckets, only handles tell which outputs belong to which bucket
            bucket = group.buckets[0]
            bucket.writes.begin_reads(outputs, bucket.here)
        if self.order.forward.budget is not None:
            self.budget.reached(use, outputs)
        waits = bool(self._reductions) and self._wait_before(group, missed, following)
        if missed:
            self.prefetch(missed)
        if group.gathers_in_backward or group.phase not in AWAY:
            self.need(group)
            self.installed.show_again(use, outputs)
            if torch.is_grad_enabled():
                self.installed.copy(use, outputs)
        # If the root returns its last module's output, backward reaches that module before the root. The compute timed
        # now belongs to the module and must not be attributed to the root.
        if self.watch is not None and not (group.is_root and self.watch.runs(Kind.BACKWARD)):
            self.watch.begin(Kind.BACKWARD, group.fqn)
        if not waits:
            self.prefetch(following)
            return
        self._gathers_behind = following
        if use.reads > 1:
            group.buckets[0].reads_left = use.reads // 2
        else:
            self.catch_up()

    def _wait_before(self, group: ParamGroup, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]) -> bool:
        """Whether prefetches must be issued after the reductions in flight.

        If this group or a group in `missed` must be gathered now, wait for the reductions here.
        """
        if not (self.order.backward.reduces_first or group.reduces_first):
            return False
        if group.phase in AWAY or any(each.phase in AWAY for each in missed):
            self._gathers_behind = ()
            self.catch_up()
            return True
        return any(each.phase in AWAY for each in following)

    def gather_again(self, group: ParamGroup) -> None:
        """Make a group readable again that may have been resharded since backward reached it.

        If it was resharded for the budget before a checkpoint recomputed, the outputs of the use's node are also
        installed again.
        """
        self.need(group)
        if (reached := self.budget.unread.get(group)) is not None:
            self.installed.show_again(*reached)

    def pass_over(self, group: ParamGroup, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]) -> None:
        """Issue the gathers of a use that backward skips (see `Engine._pass_over`, `begin_backward`)."""
        self.budget.unread.pop(group, None)
        own = (group,) if group.gathers_in_backward else ()
        self._settle_for(group, (*missed, *own))
        self.prefetch(missed)
        if own:
            self.need(group)
        self._settle_for(group, following)
        self.prefetch(following)

    def _settle_for(self, group: ParamGroup, gathers: Sequence[ParamGroup]) -> None:
        """Call `catch_up`. If these gathers must follow the reductions, wait for all reductions first."""
        first = self.order.backward.reduces_first or group.reduces_first
        if first and any(each.phase in AWAY for each in gathers):
            self._gathers_behind = self._gathers_behind or ()
        self.catch_up()

    def end_use(self, group: ParamGroup, following: ParamGroup | None) -> None:
        """End the backward of a use: drop its group, unless it must stay unsharded.

        A group stays unsharded if its settings request it or if one of its forwards is still running. It also stays if
        it is `following`, the group whose backward is expected next, unless the schedule forbids that.
        """
        if self._gathers_behind is not None:
            self.catch_up()
        self.installed.end_use(group)
        stays = group.running or (following is group and self.order.backward.stays_for_next)
        if not stays and group.settings.current.reshard_after_backward:
            self.drop(group)
            return
        for bucket in group.buckets:
            bucket.writes.end_reads()
        if stays:
            self.staying.add(group)
        else:
            self.installed.hide(group)  # stays unsharded, but clipping and optimizers must see sharded parameters

    def catch_up(self) -> None:
        """If gathers are held back behind reductions: wait for the reductions, then issue the gathers."""
        following, self._gathers_behind = self._gathers_behind, None
        if following is None:
            return
        grad = torch.is_grad_enabled()  # True with create_graph
        set_grad_enabled(False)
        try:
            while self._reductions:
                self._settle_oldest()
        finally:
            set_grad_enabled(grad)
        self.prefetch(following)

    def settle(self) -> None:
        """Wait for all reductions and set `.grad`."""
        while self._reductions:
            self._settle_oldest()
        self.hand_out()
        unread, self._unread = self._unread, []
        for group, reduced in unread:
            group.gradients.add(reduced.pieces(), reduced.unused)
        sums, self._sums = self._sums, {}
        for group, pieces in sums.items():
            group.gradients.add(pieces)

    def _settle_oldest(self) -> None:
        group, reduction = self._reductions.popleft()
        reduced = self._act(REDUCED, group, group.gradients.finish_reduce, reduction)
        waits = self.pool.backward and not group.gradients.hooks_taken
        if waits and self._is_read_last(group, reduced):
            self._unread.append((group, reduced))
        else:
            self._take(group, reduced, waits)

    def _take(self, group: ParamGroup, reduced: GroupReduced, waits: bool) -> None:
        """Set or accumulate `.grad`: now, or together with other groups if `waits`."""
        if waits and reduced.is_uncut and self._is_first(group):
            self._unset[group] = reduced
            if len(self._unset) == _AT_ONCE:
                self.hand_out()
        elif group in self.repeated and any(param.hooks for param in group.params):
            self._add_up(group, reduced)
        else:
            self.hand_out()
            group.gradients.add(reduced.pieces(), reduced.unused)

    def _is_read_last(self, group: ParamGroup, reduced: GroupReduced) -> bool:
        """Whether the host would wait for an accelerator here. False if more results of the group will follow."""
        return not reduced.is_awaited and group not in self.repeated

    def _is_first(self, group: ParamGroup) -> bool:
        """Whether the group has no gradient yet. If it has one, add now: this frees the new gradient's memory."""
        return group not in self._unset and not group.gradients.any_set()

    def _add_up(self, group: ParamGroup, reduced: GroupReduced) -> None:
        """Add the reduced gradients of one use to the sum over all uses, on which the hooks will run."""
        sums = self._sums.setdefault(group, {})
        for each in filter(None, (self._unset.pop(group, None), reduced)):
            for index, piece in each.pieces().items():
                sums[index] = sums[index] + piece if index in sums else piece

    def hand_out(self) -> None:
        """Set `.grad` for the groups whose reduction has been waited for."""
        unset, self._unset = self._unset, {}
        for group, reduced in unset.items():
            group.gradients.add(reduced.pieces(), reduced.unused)

    def discard(self) -> None:
        """Wait for all reductions and discard their results."""
        self._sums.clear()
        self._unset.clear()
        self._unread.clear()
        self._gathers_behind = None
        while self._reductions:  # remove each before waiting: after a failure it must not be waited for again
            group, reduction = self._reductions.popleft()
            self._act(REDUCED, group, group.gradients.finish_reduce, reduction)

    def rebuild(self, groups: Sequence[ParamGroup]) -> None:
        """Re-create the buckets of those groups that are sharded, and free all memory that is not leased."""
        for group in groups:
            if group.phase is SHARDED:
                group.rebuild()
        self.pool.forget()

    def plan_memory(self) -> None:
        """Between two steps: place the pool's slots in an arena, if all groups are sharded."""
        if all(group.phase is SHARDED for group in self.groups):
            for group in self.groups:
                group.leave_slots()
            self.pool.make_arena()
