"""What an iteration has done so far, and what the last one did: the record, made up when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._group.group import ParamGroup
from .._plan.record import Record, Span
from .._plan.schedule import Action

Done = tuple[list[Any], list[ParamGroup], list[ParamGroup | None], tuple[Span, ...]]  # what a record is made of


class History:
    """Written by whoever issues actions, in plain lists: it must cost next to nothing.

    Attributes:
        done: what the running iteration has done: kind, FQN and live bytes of each action, one after the other.
        seen: groups in the order in which their forwards began in this iteration.
        seen_in: for each of them the innermost group but the root's in whose forward that was.
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
        """A forward begins, outside of any backward."""
        running = self._running
        outer = running[-1] if running else None
        self.seen.append(group)
        self.seen_in.append(None if outer is None or outer.is_root else outer)
        running.append(group)

    def ended(self, group: ParamGroup) -> None:
        """The forward of a group is over, be it a recomputation."""
        running = self._running
        if running and running[-1] is group:
            running.pop()
        elif group in running:
            running.remove(group)

    def lasted(self, nbytes: int) -> None:
        """So many bytes more were live while the last action lasted."""
        self.done[-1] += nbytes

    def roll(self, spans: tuple[Span, ...]) -> bool:
        """An iteration has ended: what was done becomes the last record; false if nothing was."""
        if not self.done:
            return False
        self._last = self.done, self.seen, self.seen_in, spans
        self._last_record = self._so_far = None
        self.done, self.seen, self.seen_in = [], [], []
        return True

    def interrupted(self) -> None:
        """No forward runs any more, whatever was said."""
        self._running.clear()

    @property
    def last(self) -> Record | None:
        """What the last iteration did."""
        if self._last_record is None and self._last is not None:
            self._last_record = _record(*self._last)
        return self._last_record

    def so_far(self, spans: tuple[Span, ...]) -> Record | None:
        """What was done since the last record; None if nothing was. The same object until more is done."""
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
    """Groups that ran in the forward of another one, each with that one; by FQN."""
    pairs = {(group.fqn, outer.fqn) for group, outer in zip(seen, seen_in, strict=True) if outer is not None}
    return tuple(sorted(pairs))
