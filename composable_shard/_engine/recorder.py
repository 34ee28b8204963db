"""Run the actions of one engine's groups, record each one and, on request, time it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from .._group.group import ParamGroup
from .._memory.pool import BufferPool
from .._plan.record import Record
from .._plan.schedule import Kind
from .history import History
from .order import Order
from .out_of_memory import MemoryUsers, explain
from .stopwatch import Stopwatch

T = TypeVar("T")
LOG = logging.getLogger("composable_shard.engine")
is_logged: Callable[[], bool] = partial(LOG.isEnabledFor, logging.DEBUG)
NO_ARGUMENT = object()
# The actions of a step. Looking up `Kind.UNSHARD` each time would cost host time.
UNSHARD, WAIT, RESHARD, REDUCE, REDUCED = Kind.UNSHARD, Kind.WAIT, Kind.RESHARD, Kind.REDUCE, Kind.REDUCED


class Recorder:
    """Every action of a rank goes through `act`, so that records, logs and profiles miss none.

    Args:
        groups, pool, order: the engine's, for notes about memory.

    Attributes:
        groups: as given.
        history: the actions so far; records are built from it.
        watch: the stopwatch that times all actions; None if nothing is timed.
    """

    def __init__(self, groups: Sequence[ParamGroup], pool: BufferPool, order: Order) -> None:
        self.history = History()
        self.watch: Stopwatch | None = None
        self.groups, self._pool, self._order = groups, pool, order

    def act(self, kind: Kind, group: ParamGroup, work: Callable[..., T], argument: Any = NO_ARGUMENT) -> T:
        """Call `work` (with `argument`, if given), record the action, and return the result.

        If memory runs out, the error gets a note about the memory in use.
        """
        try:
            if self.watch is not None:
                result = self.watch.timed(kind, group.fqn, work, *(() if argument is NO_ARGUMENT else (argument,)))
            else:  # `work(*args)` is slower: it would re-enter the interpreter
                result = work() if argument is NO_ARGUMENT else work(argument)
        except Exception as error:
            self.explain(error)
            raise
        actions = self.history.done  # a flat list, because tuples would add work for the cycle collector
        actions += (kind, group.fqn, self._pool.live_bytes)
        return result

    def explain(self, error: BaseException) -> None:
        """If the error means that memory ran out, add a note about the memory in use."""
        explain(error, [MemoryUsers(self.groups, self._pool, self._order.plan)])

    def end_iteration(self) -> None:
        """The actions of this iteration, if there are any, become the last record."""
        if self.history.roll(() if self.watch is None else self.watch.spans) and self.watch is not None:
            self.watch.clear()

    def so_far(self) -> Record | None:
        """The record since the last one; None if there are no actions. The same object until more actions follow."""
        return self.history.so_far(() if self.watch is None else self.watch.spans)

    def time_by(self, watch: Stopwatch | None) -> None:
        """Time all actions with `watch` from now on; None turns timing off."""
        self.watch = watch
