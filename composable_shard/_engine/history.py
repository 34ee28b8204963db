"""The actions of this iteration and of the last one. `Record` objects are built from them only on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._group.group import ParamGroup
from .._plan.record import Record, Span
from .._plan.schedule import Action

_Parts = tuple[list[Any], list[str], list[tuple[str, str]], tuple[Span, ...]]  # arguments of `_record`
Position = tuple[int, int, int]  # lengths of `done`, `order` and `around` at some time


class History:
    """The actions of this iteration in plain lists, because appending an action must cost little host time.

    Attributes:
        done: the actions of this iteration in one flat list: kind, FQN and live bytes of the first, then of the second,
            and so on.
        order: FQNs of the groups in the order in which their forwards began in this iteration.
        around: pairs of FQNs: a group whose forward began while another group's forward was running, and that other
            group, which encloses it. The root's own group does not count as enclosing.
    """

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.order: list[str] = []
        self.around: list[tuple[str, str]] = []
        # Groups whose forwards are nested, the outermost first. `begins` removes those that have ended.
        self._begun: list[ParamGroup] = []
        self._last: Record | _Parts | None = None
        self._so_far: Record | None = None

    def begins(self, group: ParamGroup) -> None:
        """Begin the forward of a group, outside of any backward."""
        begun = self._begun
        while begun and (begun[-1] is group or not begun[-1].running):
            begun.pop()
        if begun and not begun[-1].is_root:
            self.around.append((group.fqn, begun[-1].fqn))
        self.order.append(group.fqn)
        begun.append(group)

    def add_bytes(self, nbytes: int) -> None:
        """Add to the bytes recorded for the last action, because it has released `nbytes` at its end.

        A record shows how many bytes were live while an action ran.
        """
        self.done[-1] += nbytes

    def roll(self, spans: tuple[Span, ...]) -> bool:
        """End an iteration: its actions become the last record. Returns False if there are none."""
        if not self.done:
            return False
        self._last = self.done, self.order, self.around, spans
        self._so_far = None
        self.done, self.order, self.around = [], [], []
        return True

    @property
    def last(self) -> Record | None:
        """The record of the last iteration."""
        if isinstance(self._last, tuple):
            self._last = _record(*self._last)
        return self._last

    def so_far(self, spans: tuple[Span, ...]) -> Record | None:
        """The record since the last one; None if there are no actions. The same object until more actions follow."""
        # `done` has three entries for each action.
        if self.done and (self._so_far is None or len(self._so_far.actions) * 3 != len(self.done)):
            self._so_far = _record(self.done, self.order, self.around, spans)
        return self._so_far

    def position(self) -> Position:
        """How far this iteration has come; pass this to `since`."""
        return len(self.done), len(self.order), len(self.around)

    def since(self, begin: Position) -> Record:
        """The record of the actions since `begin`, in the same iteration."""
        done, order, around = begin
        return _record(self.done[done:], self.order[order:], self.around[around:], ())


def _record(
    done: Sequence[Any], order: Sequence[str], around: Sequence[tuple[str, str]], spans: tuple[Span, ...]
) -> Record:
    return Record(
        actions=tuple(Action(kind, fqn) for kind, fqn in zip(done[::3], done[1::3], strict=True)),
        live_bytes=tuple(done[2::3]),
        order=tuple(order),
        spans=spans,
        around=tuple(sorted(set(around))),
    )
