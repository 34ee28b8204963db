"""The actions of this iteration and of the last one; `Record` objects are made of them only on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._group.group import ParamGroup
from .._plan.record import Record, Span
from .._plan.schedule import Action

Done = tuple[list[Any], list[ParamGroup], list[ParamGroup | None], tuple[Span, ...]]  # `done`, `seen`, `seen_in`, spans


class History:
    """Lists to which `Actions` appends, as noting an action must cost next to nothing.

    Attributes:
        done: the actions of this iteration, flat: kind, FQN and live bytes of the first, then of the next.
        seen: groups in the order in which their forwards began in this iteration.
        seen_in: for each group of `seen` its innermost enclosing group; None if that is the root's, or there is none.
    """

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.seen: list[ParamGroup] = []
        self.seen_in: list[ParamGroup | None] = []
        self._running: list[ParamGroup] = []  # groups whose forwards run, from the outermost
        self._last: Done | None = None
        self._last_record: Record | None = None
        self._so_far: Record | None = None

    def begins(self, group: ParamGroup) -> None:
        """The forward of a group begins, outside of any backward."""
        running = self._running
        outer = running[-1] if running else None
        self.seen.append(group)
        self.seen_in.append(None if outer is None or outer.is_root else outer)
        running.append(group)

    def ended(self, group: ParamGroup) -> None:
        """The forward of a group is over; it may have been a recomputation."""
        running = self._running
        if running and running[-1] is group:
            running.pop()
        elif group in running:
            running.remove(group)

    def lasted(self, nbytes: int) -> None:
        """`nbytes` more than noted were live during the last action."""
        self.done[-1] += nbytes

    def roll(self, spans: tuple[Span, ...]) -> bool:
        """An iteration has ended: its actions become the last record; false if there are none."""
        if not self.done:
            return False
        self._last = self.done, self.seen, self.seen_in, spans
        self._last_record = self._so_far = None
        self.done, self.seen, self.seen_in = [], [], []
        return True

    def interrupted(self) -> None:
        """Forget forwards whose end was not reported; none runs any more."""
        self._running.clear()

    @property
    def last(self) -> Record | None:
        """The record of the last iteration."""
        if self._last_record is None and self._last is not None:
            self._last_record = _record(*self._last)
        return self._last_record

    def so_far(self, spans: tuple[Span, ...]) -> Record | None:
        """The record since the last one; None if nothing was done. The same object until more is done."""
        if self.done and (self._so_far is None or len(self._so_far.actions) * 3 != len(self.done)):
            self._so_far = _record(self.done, self.seen, self.seen_in, spans)
        return self._so_far


def _record(
    done: Sequence[Any], seen: Sequence[ParamGroup], seen_in: Sequence[ParamGroup | None], spans: tuple[Span, ...]
) -> Record:
    return Record(
        actions=tuple(Action(kind, fqn) for kind, fqn in zip(done[::3], done[1::3], strict=True)),
        live_bytes=tuple(done[2::3]),
        order=tuple(group.fqn for group in seen),
        spans=spans,
        around=around(seen, seen_in),
    )


def around(seen: Sequence[ParamGroup], seen_in: Sequence[ParamGroup | None]) -> tuple[tuple[str, str], ...]:
    """Pairs of FQNs: a group, and its enclosing group."""
    pairs = {(group.fqn, outer.fqn) for group, outer in zip(seen, seen_in, strict=True) if outer is not None}
    return tuple(sorted(pairs))
