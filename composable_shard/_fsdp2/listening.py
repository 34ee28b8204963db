"""Lets a tool wrap the backward of a group and see each allocation, as torch's `FSDPMemTracker` does with FSDP2.

While there are listeners, an engine and its parts use the classes below (see `_engine/tools.py`), which call a group's
listener where its backward begins and ends, and the pool allocates each lease separately.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from .._comm.copies import Gradients
from .._engine.backward import BackwardPass
from .._engine.engine import CHOOSERS, Engine
from .._engine.node import Outputs, Use
from .._engine.profiling import LoggedRecorder, ProfiledActions, ProfiledEngine, ProfiledFlow
from .._engine.reductions import Reductions
from .._engine.tools import change_class
from .._group.group import ParamGroup
from .._memory.pool import BufferPool
from .._memory.slots import Request, Slot

PRE_BACKWARD, POST_BACKWARD = "pre_backward", "post_backward"


class Listener(Protocol):
    """A tool that is called around the backwards of one group."""

    @property
    def heard(self) -> ParamGroup | None:
        """The group that it listens to; None while there is no engine."""

    def around(self, moment: str, work: Callable[[], None], gradients: Gradients = ()) -> None:
        """Call `work`, and around it the tool's own code for `moment`, which is `PRE_BACKWARD` or `POST_BACKWARD`.

        `POST_BACKWARD` comes twice in a backward: with the unsharded gradients, and again when `.grad` is set.
        """


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_tracked: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines that notify listeners
_reduced: weakref.WeakSet[ParamGroup] = weakref.WeakSet()  # groups whose second `POST_BACKWARD` is still to come


def _tell(group: ParamGroup, moment: str, work: Callable[[], None], gradients: Gradients = ()) -> None:
    listener = next((each for each in _listeners if each.heard is group), None)
    if listener is None:
        work()
    else:
        listener.around(moment, work, gradients)


class ListenedActions(ProfiledActions):
    """Actions that notify listeners before a backward."""

    def begin_backward(
        self, use: Use, outputs: Outputs, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]
    ) -> None:
        _tell(use.group, PRE_BACKWARD, partial(super().begin_backward, use, outputs, missed, following))


class ListenedReductions(Reductions):
    """Reductions that notify listeners when `.grad` of a group is set."""

    def start(self, group: ParamGroup, gradients: Gradients, alone: bool = False) -> None:
        super().start(group, gradients, alone)
        _reduced.add(group)

    def wait_for_oldest(self) -> None:
        super().wait_for_oldest()
        self.set_gradients()

    def set_gradients(self) -> None:
        super().set_gradients()
        self._tell_reduced()

    def finish_all(self) -> None:
        super().finish_all()
        self._tell_reduced()

    def _tell_reduced(self) -> None:
        in_flight = [group for group, _ in self.in_flight]
        for group in self._recorder.groups:
            if group in _reduced and group not in in_flight and group not in self._sums:
                _reduced.discard(group)
                _tell(group, POST_BACKWARD, _nothing)


def _nothing() -> None:
    """Do nothing: the work of the second `POST_BACKWARD` is done before listeners are notified."""


class ListenedEngine(ProfiledEngine):
    """An engine that notifies listeners."""

    def _complete(self, now: BackwardPass, use: Use, gradients: Gradients) -> None:
        _tell(use.group, POST_BACKWARD, partial(super()._complete, now, use, gradients), gradients)


class TrackedPool(BufferPool):
    """A pool whose memory a tool counts.

    Ranks may differ in this, so no collective may depend on it.

    Attributes:
        shows: whether each lease is visible to dispatch modes.
        owns: whether each name has its own slot, which is allocated at each lease and freed at release.
    """

    shows = owns = False

    def track(self, wanted: bool, rebuild: Callable[[], bool]) -> None:
        """Set `shows` and, if `rebuild` can free all memory of the pool now, `owns`."""
        self.shows = wanted
        if self.owns is not wanted and rebuild():
            self.owns = wanted

    def lease(self, request: Request, owner: weakref.ref[object] | None = None) -> Slot:
        slot = super().lease(request, owner)
        if self.shows:
            slot.show()
        return slot

    def loses_memory(self, request: Request) -> bool:
        return self.owns or super().loses_memory(request)

    def _unplanned(self, request: Request) -> Slot:
        return self._own_slot(request) if self.owns else super()._unplanned(request)

    @property
    def wants_arena(self) -> bool:
        return not self.owns and super().wants_arena

    def free_idle(self, between: bool = False) -> None:
        if not self.owns:
            super().free_idle(between)

    def free_all(self) -> None:
        if self.owns:
            self._own.clear()
        super().free_all()


def add(listener: Listener) -> None:
    """Notify a listener of the backwards of its group, from the next forward or backward on."""
    _listeners.add(listener)
    if _choose not in CHOOSERS:
        CHOOSERS.append(_choose)


def discard(listener: Listener) -> None:
    """Stop notifying a listener."""
    _listeners.discard(listener)


_CLASSES = ListenedEngine, ListenedActions, LoggedRecorder, ListenedReductions, ProfiledFlow


def _choose(engine: Engine) -> tuple[type, ...] | None:
    """The classes of an engine while there are listeners; part of the interface of `CHOOSERS`."""
    listens = bool(_listeners)
    if listens or engine in _tracked:
        _track(engine, listens)
    if not listens and not _tracked:
        CHOOSERS.remove(_choose)
    return _CLASSES if listens else None


def _track(engine: Engine, wanted: bool) -> None:
    """Make each lease a separate allocation that tools see, or undo this.

    Leases are shown immediately. The allocation of slots changes only when no work uses the pool's memory.
    """
    pool = engine.pool
    _tracked.add(engine)
    if not isinstance(pool, TrackedPool):
        change_class(pool, TrackedPool)
    assert isinstance(pool, TrackedPool)
    pool.track(wanted, engine.rebuild_if_idle)
    if not pool.shows and not pool.owns:
        change_class(pool, BufferPool)
        _tracked.discard(engine)
