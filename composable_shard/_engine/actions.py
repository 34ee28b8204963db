"""Actions on groups: gathers, reductions and resharding, and the waits for them. Each action is recorded.

In an eager step, nothing outside of this file starts or awaits a gather or a reduction, or gives weights up. Here, to
*drop* a group is to reshard it and to install its sharded parameters.
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
_AT_ONCE = 4  # set `.grad` for this many reduced groups together: half the host time of setting it group by group
_NOTHING = object()


class Actions:
    """Acts on the groups of one engine, and records every action.

    Args:
        groups: all groups.
        runtime: pool and lanes that the groups were built with.
        order: the schedules to follow.
        watch_leaf: called once with every leaf that users may find in a module outside of its forward.
        without_group: the entries of sharded modules that have no parameters of their own.

    Attributes:
        groups, pool, order: all groups, their memory, and the schedules in force.
        changed: the event behind the last change of the parameters, for which the next gather waits; None if one has.
        repeated: groups that get gradients from several uses in the backward that runs now.
        budget: which weights are given up when a step that is not the planned one needs memory.
        streams: whether waiting for communication blocks only streams, never the host.
        watch: the stopwatch that times all actions; None if nobody asked for times.
        history: the actions so far, from which records are made.
        installed: which tensors stand in the modules.
        staying: groups that were not resharded when the backward of a use ended, because the group's next use, or a
            forward of it that still runs, needs the weights.
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
        self._ask_first: Callable[[], None] | None = None  # before anything is reduced
        self._reductions: deque[tuple[ParamGroup, Reduction]] = deque()
        # Groups to gather once all reductions in flight were waited for; None if no gathers are held back.
        self._gathers_behind: Sequence[ParamGroup] | None = None
        self._unset: dict[ParamGroup, GroupReduced] = {}  # reductions that were waited for; `.grad` is not set yet
        # Likewise, of which the host must read something: it waits for the accelerator once, when backward is over.
        self._unread: list[tuple[ParamGroup, GroupReduced]] = []
        # For groups with hooks and several uses in a backward: the hooks are called once, with the sum over all uses.
        self._sums: dict[ParamGroup, dict[int, torch.Tensor]] = {}
        self.staying: set[ParamGroup] = set()
        self.gathered: set[ParamGroup] = set()

    # ---- the record

    def roll_record(self) -> None:
        """An iteration has ended: its actions, if there are any, become the last record."""
        if self.history.roll(() if self.watch is None else self.watch.spans) and self.watch is not None:
            self.watch.take()

    def record_so_far(self) -> Record | None:
        """The record since the last one; None if nothing was done. The same object until more is done."""
        return self.history.so_far(() if self.watch is None else self.watch.spans)

    def before_first_reduction(self, ask: Callable[[], None]) -> None:
        """Have `ask` called before the next reduction; if it raises, again before the one after that."""
        self._ask_first = ask

    def explain(self, error: BaseException) -> None:
        """If memory has run out, note on the error who holds what."""
        explain(error, [Part(self.groups, self.pool, self.order.plan)])

    def time_by(self, watch: Stopwatch | None) -> None:
        """From now on `watch` times what is done; None for nobody."""
        self.watch = watch

    # ---- between passes

    def end_reads(self) -> None:
        """No backward reads weights now: forget the outputs of nodes, which would keep the engine alive."""
        for group in self.groups:
            for bucket in group.buckets:
                bucket.writes.end_reads()

    def hide_idle(self) -> None:
        """Install the sharded parameters of all groups whose forward does not run."""
        for group in self.groups:
            if not group.running:
                self.installed.hide(group)

    # ---- issuing

    def _act(self, kind: Kind, group: ParamGroup, work: Callable[..., T], given: Any = _NOTHING) -> T:
        """Call `work` (with `given`, if there is one) and record it as an action; all actions of a rank pass here."""
        try:
            if self.watch is not None:
                result = self.watch.timed(kind, group.fqn, work, *(() if given is _NOTHING else (given,)))
            else:  # no `work(*args)`, which is slower: it would re-enter the interpreter
                result = work() if given is _NOTHING else work(given)
        except Exception as error:
            self.explain(error)
            raise
        done = self.history.done
        done += (kind, group.fqn, self.pool.live_bytes)  # flat: tuples would keep the cycle collector busy
        return result

    def parameters_changed(self, at: torch.Event | None = None) -> None:
        """All later gathers wait for the event `at`; without one, for the work queued on the current stream so far."""
        self.changed = at or self._runtime.gather_lane.mark()

    def ahead(self, group: ParamGroup | None) -> None:
        """Issue the gather of a group without waiting for it, if it is not issued or gathered already."""
        if group is not None and group.phase in AWAY:
            if self.order.forward.kept and group in self.order.forward.kept:
                group.note_versions()
            here = group.phase is RESIDENT  # then nothing is read that an optimizer changes
            self._act(UNSHARD, group, group.start_gather, self.changed)
            if not here:  # all gathers are on one lane, and what it has waited for once, it need not wait for again
                self.changed = None
            if self.watch is not None and self.watch.serial:
                self._arrive(group)

    def prefetch(self, groups: Sequence[ParamGroup]) -> None:
        """Gather these groups ahead; those that do not fit in the budget are left until they are needed."""
        for group in groups:
            bounded = self.order.forward.budget is not None
            if group.phase in AWAY and not (bounded and self.budget.exceeded_by(gathering(group))):
                self.ahead(group)

    def need(self, group: ParamGroup) -> None:
        """Make the weights of a group readable: gather them if necessary, and wait for that.

        A forward may write to shards, as that of a model that moves its teacher after its student. What was gathered
        of them before is of no use then. Where a backward follows, it notices that itself.
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
        """Free memory until `nbytes` more for the group `to` fit in the budget, if they can.

        A step that runs as planned fits anyway. Otherwise reductions are waited for first, then weights are given up.
        """
        while self.budget.exceeded_by(nbytes) and any(each.leased_bytes for _, each in self._reductions):
            self._settle_oldest()
        for group in self.budget.yielding(to, self.staying) if self.budget.exceeded_by(nbytes) else ():
            if self.budget.exceeded_by(nbytes):
                self.drop(group)

    def _arrive(self, group: ParamGroup) -> None:
        """Wait for a gather that was issued."""
        self._act(WAIT, group, group.finish_gather)
        self.gathered.add(group)

    def drop(self, group: ParamGroup, check_edits: bool = True) -> None:
        """Reshard a group, whatever its phase is, and install its sharded parameters.

        Args:
            group: the group to reshard.
            check_edits: whether an in-place edit of its unsharded parameters is an error.

        Raises:
            StaleStateError: an unsharded parameter was edited in place. The group is resharded then, too.
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
        """Versions of unsharded parameters have risen: FQNs of those whose values have changed; see `edits.changed`."""
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
        """A forward of the root begins: adopt parameters that were replaced, and drop weights that are out of date.

        Args:
            waiting: whether the backward of an earlier forward may still come. If so, the unsharded parameters that
                this forward left unsharded are kept for that backward. The caller decides this by the calls of the
                program and not by which graphs are alive, because ranks may differ in the latter.

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
        """Whether weights that are gathered when a forward of the root begins may be used in it."""
        if group.stay.pinned:
            return True
        # An evaluation may follow a swap of weights by foreach functions, which raise no version. It drops all weights
        # when it ends, so none need be kept for it.
        if not torch.is_grad_enabled():
            return False
        # What counts is the setting of the backward that has kept the weights. In the last one of several micro-batches
        # it is True again.
        return waiting or group.stay.kept or not group.settings.current.reshard_after_backward

    def _adopt_without_group(self) -> None:
        """Users may have added parameters to modules that had none of their own."""
        for known in self._without_group:
            if (entries := known()) is not None:
                entries.adopt()

    def drop_after_forward(self, failed: bool) -> None:
        """A forward of the root is over: drop gathers that were not used and, without grad mode, all weights.

        Args:
            failed: whether by an error; then nothing is done for which other ranks are needed.
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
        """After a failure: drop all groups whose forward does not run and that no user has pinned."""
        for group in self.groups:
            if not group.running and (group.is_written() or not group.stay.pinned):
                group.forget_writes()  # what has failed was said
                self.drop(group, check_edits=False)

    def pin(self, group: ParamGroup, wait: bool) -> None:
        """Gather a group and keep it until `reshard`, its next use, or a change of its parameters."""
        if group.phase in AWAY:
            self.parameters_changed()
        group.stay.pin()
        self.ahead(group)
        if wait:
            self.need(group)
            self.installed.show_leaves(group)

    def open_backward(self, repeated: frozenset[ParamGroup]) -> None:
        """A backward pass begins.

        Args:
            repeated: groups that get gradients from several uses in it.
        """
        if self._reductions:  # of one that is to be ended by hand
            self.settle()
        self.repeated = repeated
        self.installed.open_backward()
        self.pool.backward = True
        self.order.begin_backward()
        if self.order.forward.budget is not None:
            self.budget.begin_backward()

    def close_backward(self) -> None:
        """The pass is over, or has failed."""
        self.staying.clear()
        self.installed.close_backward()
        self.budget.unread.clear()
        self.pool.backward = False

    def drop_after_backward(self, pinned: bool) -> None:
        """A backward is over: drop the groups that are to be resharded after backward, and gathers that nobody used.

        Groups whose forward runs are left alone. The remaining ones keep their weights, but get their sharded
        parameters installed.

        Args:
            pinned: whether pinned groups are treated like all others. A rank that has not run such a group must end
                with it sharded, like ranks that have: else clipping would miss its gradients.
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
        """Issue the reduction of a group's gradients, after waiting for the oldest ones if too many are in flight.

        `.grad` is set when this reduction is waited for, or a little later by `hand_out`.
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
        """How many reductions may be in flight when that of a group is issued; at least 1."""
        large = group.gradients.reduce_bytes > self.pool.arena.least_large
        # Arenas of ranks may differ, so only where the wait issues nothing, nor do the hooks that are called then.
        if large and not any(each.issues_in_wait or each.gradients.hooks_taken for each, _ in self._reductions):
            return 1  # their memory goes back to the allocator before this one's comes from it
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
        """Reduce and wait; returns this rank's piece of each gradient, by parameter index, and sets no `.grad`."""
        self.settle()
        if self.order.forward.budget is not None:
            self._make_room(group, group.gradients.reduce_bytes)
        self._start_reduce(group, gradients, alone=True)
        _, reduction = self._reductions.pop()
        return self._act(REDUCED, group, group.gradients.finish_reduce, reduction).pieces()

    def begin_forward(self, group: ParamGroup) -> None:
        """The forward of a group begins, outside of any backward."""
        self.history.begins(group)
        if self.watch is not None:
            self.watch.begin(Kind.FORWARD, group.fqn)

    def end_forward(self, group: ParamGroup, stays: bool) -> None:
        """The forward of a group is over: reshard it, keep its weights, or keep pieces of them (`ParamGroup.shrink`).

        Args:
            group: the group.
            stays: whether the forward was a recomputation in the group's own backward, which needs the weights next;
                then nothing is done.
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
            self.pool.rest()  # also where the loss is made within the root's forward

    def end_failed_forward(self, group: ParamGroup, stays: bool, written: bool) -> None:
        """`end_forward` of a forward that has failed. Edits are not looked for: other ranks may not have failed.

        Args:
            group, stays: as of `end_forward`.
            written: whether the forward has written to outputs of its node.
        """
        written |= group.is_written()
        group.forget_writes()
        self.end_forward(group, stays)
        # A checkpoint may also stop a recomputation in backward by an error.
        if written and current_backward() < 0:
            self.drop(group, check_edits=False)

    def _shrink(self, group: ParamGroup) -> None:
        """Keep pieces of a group's weights, and show these to its modules."""
        self.installed.hide(group)
        edited = self.find_edits(group) if group.is_written() else ()
        self._act(Kind.SHRINK, group, group.shrink)
        if edited:
            raise lost_edit(edited)
        self.history.lasted(group.layout.weight_bytes)  # for a moment weights and pieces were both live
        if (entries := group.entries()) is not None:
            entries.lend(group.pieces())

    def begin_backward(
        self, use: Use, outputs: Outputs, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]
    ) -> None:
        """Backward has reached a use: gather and install its weights, and prefetch the groups that follow.

        Where the memory of a reduction is free for gathers only once the host has waited for it (`reduces_first`), all
        reductions in flight are waited for before anything is gathered. If the weights of this use, or of `missed`,
        must be gathered, that wait is here. The prefetches, and otherwise that wait, too, come when half of the use's
        saved weights were read: reductions overlap with the first half of its backward, prefetched gathers with
        the second.

        Args:
            use: the use.
            outputs: those of the use's node; they are installed again, because a checkpoint may recompute the forward.
            missed: groups that the schedule gathers with earlier uses which backward has skipped; they are gathered
                first.
            following: the groups to prefetch with this use.
        """
        if self._gathers_behind is not None:
            self.catch_up()
        group = use.group
        self.staying.discard(group)
        if len(group.buckets) == 1:  # else the outputs of each bucket are known to its handles alone
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
        # If the root returns its last module's output, backward reaches that module before the root. The compute that
        # is timed now belongs to the module, so the root must not take it over.
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
        """Whether prefetches must come after the reductions in flight.

        If this group, or one of `missed`, must be gathered at once, the reductions are waited for here.
        """
        if not (self.order.backward.reduces_first or group.reduces_first):
            return False
        if group.phase in AWAY or any(each.phase in AWAY for each in missed):
            self._gathers_behind = ()
            self.catch_up()
            return True
        return any(each.phase in AWAY for each in following)

    def gather_again(self, group: ParamGroup) -> None:
        """Make a group's weights readable again, which may have been given up since backward reached the group.

        If they were given up for the budget before a checkpoint has recomputed, the outputs of the use's node are also
        installed again.
        """
        self.need(group)
        if (reached := self.budget.unread.get(group)) is not None:
            self.installed.show_again(*reached)

    def pass_over(self, group: ParamGroup, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]) -> None:
        """Issue the gathers of a use that backward goes past (see `Engine._pass_over`); arguments as above."""
        self.budget.unread.pop(group, None)
        own = (group,) if group.gathers_in_backward else ()
        self._settle_for(group, (*missed, *own))
        self.prefetch(missed)
        if own:
            self.need(group)
        self._settle_for(group, following)
        self.prefetch(following)

    def _settle_for(self, group: ParamGroup, gathers: Sequence[ParamGroup]) -> None:
        """Call `catch_up`, after making it wait for all reductions if these gathers must come after them."""
        first = self.order.backward.reduces_first or group.reduces_first
        if first and any(each.phase in AWAY for each in gathers):
            self._gathers_behind = self._gathers_behind or ()
        self.catch_up()

    def end_use(self, group: ParamGroup, following: ParamGroup | None) -> None:
        """The backward of a use is over: drop its group, unless the weights are to stay.

        They stay if a setting says so, if a forward of the group still runs, or (unless the schedule says otherwise) if
        the group is also `following`, the one whose backward is expected next.
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
            self.installed.hide(group)  # the weights stay, but clipping and optimizers must find sharded parameters

    def catch_up(self) -> None:
        """If gathers wait behind reductions: wait for the reductions, then issue the gathers."""
        following, self._gathers_behind = self._gathers_behind, None
        if following is None:
            return
        grad = torch.is_grad_enabled()  # with create_graph
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
        """Set `.grad`, or add to it: now, or together with others if it may wait."""
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
        """Whether the host would have to wait for an accelerator. Not if more results of the group are to be held."""
        return not reduced.is_awaited and group not in self.repeated

    def _is_first(self, group: ParamGroup) -> bool:
        """Whether there is no gradient yet: adding to one would free the new one's memory at once."""
        return group not in self._unset and not group.gradients.any_set()

    def _add_up(self, group: ParamGroup, reduced: GroupReduced) -> None:
        """Add reduced gradients of one of several uses to the sum that hooks will see."""
        sums = self._sums.setdefault(group, {})
        for each in filter(None, (self._unset.pop(group, None), reduced)):
            for index, piece in each.pieces().items():
                sums[index] = sums[index] + piece if index in sums else piece

    def hand_out(self) -> None:
        """Set `.grad` for the groups whose reduction was waited for."""
        unset, self._unset = self._unset, {}
        for group, reduced in unset.items():
            group.gradients.add(reduced.pieces(), reduced.unused)

    def discard(self) -> None:
        """Wait for all reductions and throw their results away."""
        self._sums.clear()
        self._unset.clear()
        self._unread.clear()
        self._gathers_behind = None
        while self._reductions:  # each is taken before it is waited for: one that fails must not be waited for again
            group, reduction = self._reductions.popleft()
            self._act(REDUCED, group, group.gradients.finish_reduce, reduction)

    def rebuild(self, groups: Sequence[ParamGroup]) -> None:
        """Make the buckets of the sharded ones of these groups anew, and free all memory that is not leased."""
        for group in groups:
            if group.phase is SHARDED:
                group.rebuild()
        self.pool.forget()

    def plan_memory(self) -> None:
        """Between two steps: lay the pool's slots out in an arena, if no group uses them."""
        if all(group.phase is SHARDED for group in self.groups):
            for group in self.groups:
                group.leave_slots()
            self.pool.make_arena()
