"""Tools that put methods of their own in the place of a group's, as torch's `FSDPMemTracker` does with FSDP2.

While there is such a listener, engines and their parts are of the classes below, which call it where a backward of its
group begins and ends; while only a profiler runs, of those of `_profiled`; at other times of their own, so that
listening costs nothing. They are changed where a forward or a backward begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from .._group.group import Gradients, ParamGroup
from .._torch.core import is_profiled
from .actions import Actions
from .backward import BackwardPass
from .engine import Engine
from .gradients import GradientFlow
from .node import Outputs, Use
from .profiling import ProfiledActions, ProfiledEngine, ProfiledFlow

PRE_BACKWARD, POST_BACKWARD = "pre_backward", "post_backward"


class Listener(Protocol):
    """Who is called around what is done."""

    @property
    def heard(self) -> ParamGroup | None:
        """Of which group it hears; None while there is no engine."""

    def around(self, moment: str, work: Callable[[], None], gradients: Gradients = ()) -> None:
        """Have `work` done: where a backward begins, or where it ends, with the unsharded gradients of it.

        The end is told twice: when the gradients are there, and again when the sharded parameters have theirs.
        """


LISTENERS: weakref.WeakSet[Listener] = weakref.WeakSet()
_reduced: weakref.WeakSet[ParamGroup] = weakref.WeakSet()  # whose sharded parameters will have theirs


def _tell(group: ParamGroup, moment: str, work: Callable[[], None], gradients: Gradients = ()) -> None:
    listener = next((each for each in LISTENERS if each.heard is group), None)
    if listener is None:
        work()
    else:
        listener.around(moment, work, gradients)


class ListenedActions(ProfiledActions):
    """Actions of which listeners hear."""

    def begin_backward(
        self, use: Use, outputs: Outputs, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]
    ) -> None:
        _tell(use.group, PRE_BACKWARD, partial(super().begin_backward, use, outputs, missed, following))

    def _start_reduce(self, group: ParamGroup, gradients: Gradients) -> None:
        super()._start_reduce(group, gradients)
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
    """The work was done before."""


class ListenedEngine(ProfiledEngine):
    """The engine's events, of which listeners hear."""

    def _complete(self, now: BackwardPass, use: Use, gradients: Gradients) -> None:
        _tell(use.group, POST_BACKWARD, partial(super()._complete, now, use, gradients), gradients)


_PLAIN = Engine, Actions, GradientFlow
_PROFILED = ProfiledEngine, ProfiledActions, ProfiledFlow
_LISTENED = ListenedEngine, ListenedActions, ProfiledFlow


def follow_tools(engine: Engine) -> None:
    """Give an engine and its parts the classes that they should have now."""
    listens = bool(LISTENERS)
    if listens is not engine.pool.owns:
        engine.count_memory(listens)
    kinds = _LISTENED if listens else _PROFILED if is_profiled() else _PLAIN
    if type(engine) is not kinds[0]:
        for part, kind in zip(engine.parts(), kinds, strict=True):
            part.__class__ = kind
