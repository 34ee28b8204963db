"""Listeners let tools wrap the backward of a group, as torch's `FSDPMemTracker` does with FSDP2.

Steps without tools must cost nothing. An engine and its parts therefore change their classes when a forward or a
backward begins. While there are listeners, they use the classes below, which call a group's listener where its backward
begins and ends. While only a profiler is active, or actions are logged, they use the classes of `profiling.py`.
Otherwise they use the plain classes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from .._comm.copies import Gradients
from .._group.group import ParamGroup
from .._torch.core import is_profiled
from .actions import Actions, is_logged
from .backward import BackwardPass
from .engine import LISTENERS, Engine
from .gradients import GradientFlow
from .node import Outputs, Use
from .profiling import LoggedActions, ProfiledActions, ProfiledEngine, ProfiledFlow

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


_reduced: weakref.WeakSet[ParamGroup] = weakref.WeakSet()  # groups whose second `POST_BACKWARD` is still to come


def _tell(group: ParamGroup, moment: str, work: Callable[[], None], gradients: Gradients = ()) -> None:
    listener = next((each for each in LISTENERS if each.heard is group), None)
    if listener is None:
        work()
    else:
        listener.around(moment, work, gradients)


class ListenedActions(LoggedActions):
    """Actions that notify listeners."""

    def begin_backward(
        self, use: Use, outputs: Outputs, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]
    ) -> None:
        _tell(use.group, PRE_BACKWARD, partial(super().begin_backward, use, outputs, missed, following))

    def _start_reduce(self, group: ParamGroup, gradients: Gradients, alone: bool = False) -> None:
        super()._start_reduce(group, gradients, alone)
        _reduced.add(group)

    def _settle_oldest(self) -> None:
        super()._settle_oldest()
        self.hand_out()

    def hand_out(self) -> None:
        super().hand_out()
        self._tell_reduced()

    def settle(self) -> None:
        super().settle()
        self._tell_reduced()

    def _tell_reduced(self) -> None:
        flying = [group for group, _ in self._reductions]
        for group in self.groups:
            if group in _reduced and group not in flying and group not in self._sums:
                _reduced.discard(group)
                _tell(group, POST_BACKWARD, _nothing)


def _nothing() -> None:
    """Do nothing: the work of the second `POST_BACKWARD` is done before listeners are notified."""


class ListenedEngine(ProfiledEngine):
    """An engine that notifies listeners."""

    def _complete(self, now: BackwardPass, use: Use, gradients: Gradients) -> None:
        _tell(use.group, POST_BACKWARD, partial(super()._complete, now, use, gradients), gradients)


_PLAIN = Engine, Actions, GradientFlow
_PROFILED = ProfiledEngine, ProfiledActions, ProfiledFlow
_LOGGED = ProfiledEngine, LoggedActions, ProfiledFlow
_LISTENED = ListenedEngine, ListenedActions, ProfiledFlow


def follow_tools(engine: Engine) -> None:
    """Give an engine and its parts the classes that the active tools need."""
    listens = bool(LISTENERS)
    if listens is not engine.pool.owns:
        engine.count_memory(listens)
    kinds = _LISTENED if listens else _LOGGED if is_logged() else _PROFILED if is_profiled() else _PLAIN
    if tuple(map(type, engine.parts())) != kinds:
        for part, kind in zip(engine.parts(), kinds, strict=True):
            part.__class__ = kind
