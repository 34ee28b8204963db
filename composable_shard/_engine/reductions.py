"""The reductions of one engine's groups, from the reduce-scatter to `.grad`.

`start` issues a reduction, which is then *in flight*. All ranks issue reductions in the same order, and wait for them
in that order. When a reduction has been waited for, its result is added to `.grad`, in three cases only later:

    _batch    the group has no `.grad` yet: `.grad` of several groups is set together, which costs less host time
    _unread   the host must read from the result which parameters are unused, or gradients are offloaded: it waits
              for the device once for all groups, after backward
    _sums     the group has hooks and several uses in this backward: hooks run once, on the sum, after backward

`finish_all` waits for all reductions and empties these three.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from .._comm.copies import Gradients
from .._group.group import ParamGroup
from .._group.reduction import GroupReduced, Reduction
from .._memory.pool import BufferPool
from .._plan.schedule import MAX_REDUCTIONS
from .order import Order
from .recorder import REDUCE, REDUCED, Recorder

_BATCH = 4  # setting `.grad` for this many groups together takes half the host time of setting it one by one


class Reductions:
    """Issues reductions, limits how many are in flight, waits for them, and sets `.grad`.

    Args:
        recorder: runs and records the actions.
        pool: the memory of the groups.
        order: its backward schedule limits the reductions in flight.

    Attributes:
        in_flight: the reductions that were issued and not waited for, with their groups, the oldest first.
        repeated: groups that get gradients from several uses in the current backward.
    """

    def __init__(self, recorder: Recorder, pool: BufferPool, order: Order) -> None:
        self._recorder = recorder
        self._pool = pool
        self._order = order
        self.repeated: frozenset[ParamGroup] = frozenset()
        self._before_next: Callable[[], None] | None = None
        self.in_flight: deque[tuple[ParamGroup, Reduction]] = deque()
        self._batch: dict[ParamGroup, GroupReduced] = {}
        self._unread: list[tuple[ParamGroup, GroupReduced]] = []
        # By group: pieces, by the index of the parameter, and the parameters that had no gradient in some use.
        self._sums: dict[ParamGroup, tuple[dict[int, torch.Tensor], set[int]]] = {}

    @property
    def have_memory(self) -> bool:
        """Whether waiting for a reduction in flight would release memory of the pool."""
        return any(reduction.leased_bytes for _, reduction in self.in_flight)

    def forget_events(self) -> None:
        """Let no stream wait for reductions in flight: the capture in which they were issued has ended."""
        for _, reduction in self.in_flight:
            for _, job in reduction.jobs:
                job.forget_event()

    def call_before_next(self, call: Callable[[], None]) -> None:
        """Call `call` once, before the next reduction is issued; if it raises, again before the following one."""
        self._before_next = call

    def open_backward(self, repeated: frozenset[ParamGroup]) -> None:
        """Begin a backward pass, in which the groups `repeated` get gradients from several uses."""
        if self.in_flight:  # from a backward that the caller finishes itself
            self.finish_all()
        self.repeated = repeated

    # ---- start

    def make_way(self, group: ParamGroup) -> None:
        """Wait for the oldest reductions, so that the limit holds after one of `group` is issued."""
        most = self._limit(group)
        while len(self.in_flight) >= most:
            self.wait_for_oldest()

    def _limit(self, group: ParamGroup) -> int:
        """How many reductions may be in flight, including this group's; at least 1."""
        # The slot of a large reduction has no memory before the lease (`Region.is_large`). Wait for all others first,
        # so that their memory is freed before this is allocated. Ranks may have different arenas, and so disagree on
        # what is large. So only wait if that issues no collective: a wait may issue an all-reduce (`issues_in_wait`),
        # and it runs users' hooks, which may issue others.
        large = group.gradients.reduce_bytes > self._pool.arena.least_large
        if large and not any(each.issues_in_wait or each.gradients.hooks_taken for each, _ in self.in_flight):
            return 1
        schedule, allowed = self._order.backward, group.settings.current.max_reductions
        planned = schedule.in_flight.get(group, schedule.max_reductions)
        return min(filter(None, (planned, allowed)), default=MAX_REDUCTIONS)  # None or 0: no limit of this kind

    def start(self, group: ParamGroup, gradients: Gradients, alone: bool = False) -> None:
        """Issue the reduction of a group's gradients.

        Args:
            group: the group.
            gradients: unsharded gradients, in the order of the group's parameters.
            alone: whether to reduce only these gradients, without accumulated ones, and also over the replicas,
                whatever the settings.
        """
        if self._before_next is not None:
            self._before_next()
            self._before_next = None
        start = group.gradients.start_reduce
        if alone or group in self._order.backward.holds:
            start = partial(start, alone=alone, holds=group in self._order.backward.holds)
        reduction = self._recorder.act(REDUCE, group, start, gradients)
        self.in_flight.append((group, reduction))
        # These bytes were live in the action, and are released already (`free_queued`).
        self._recorder.history.add_bytes(reduction.queued_bytes)

    def finish_newest(self) -> dict[int, torch.Tensor]:
        """Wait for the reduction issued last, without setting `.grad`; return its pieces by parameter index."""
        group, reduction = self.in_flight.pop()
        return self._wait_for(group, reduction).pieces()

    # ---- wait

    def _wait_for(self, group: ParamGroup, reduction: Reduction) -> GroupReduced:
        return self._recorder.act(REDUCED, group, group.gradients.finish_reduce, reduction)

    def wait_for_oldest(self) -> None:
        """Wait for the reduction issued first, and set `.grad` now or later (see the top of this file)."""
        group, reduction = self.in_flight.popleft()
        reduced = self._wait_for(group, reduction)
        # Not outside of a backward: code reads `.grad` next. Not with hooks: they run in the order of the reductions.
        may_postpone = self._pool.backward and not group.gradients.hooks_taken
        if may_postpone and not reduced.host_may_read and group not in self.repeated:
            self._unread.append((group, reduced))
        elif may_postpone and reduced.is_uncut and group not in self._batch and not group.gradients.any_set():
            self._batch[group] = reduced
            if len(self._batch) == _BATCH:
                self.set_gradients()
        else:
            self._add(group, reduced)

    def _add(self, group: ParamGroup, reduced: GroupReduced) -> None:
        """Add the result of a reduction to `.grad` or, if hooks must see the sum over several uses, to that sum."""
        if group in self.repeated and any(param.hooks for param in group.params):
            self._add_to_sum(group, reduced)
        else:
            self.set_gradients()  # in the order of the reductions
            group.gradients.add(reduced.pieces(), reduced.unused)

    def _add_to_sum(self, group: ParamGroup, reduced: GroupReduced) -> None:
        """Add the gradients of one use to the sum over all uses."""
        sums, unused = self._sums.setdefault(group, ({}, set()))
        # The batch may have the gradients of the first use, from before the group was known to have hooks.
        for each in filter(None, (self._batch.pop(group, None), reduced)):
            for index, piece in each.pieces().items():
                sums[index] = sums[index] + piece if index in sums else piece
            unused.update(each.unused)

    # ---- set `.grad`

    def set_gradients(self) -> None:
        """Set `.grad` for the groups of the batch."""
        batch, self._batch = self._batch, {}
        for group, reduced in batch.items():
            group.gradients.add(reduced.pieces(), reduced.unused)

    def finish_all(self) -> None:
        """Wait for all reductions, and set `.grad` for all groups."""
        while self.in_flight:
            self.wait_for_oldest()
        self.set_gradients()
        unread, self._unread = self._unread, []
        for group, reduced in unread:
            group.gradients.add(reduced.pieces(), reduced.unused)
        sums, self._sums = self._sums, {}
        for group, (pieces, unused) in sums.items():
            group.gradients.add(pieces, sorted(unused - pieces.keys()))

    def discard(self) -> None:
        """Wait for all reductions and discard their results."""
        self._sums.clear()
        self._batch.clear()
        self._unread.clear()
        while self.in_flight:  # remove each before waiting: after a failure it must not be waited for again
            self._wait_for(*self.in_flight.popleft())
