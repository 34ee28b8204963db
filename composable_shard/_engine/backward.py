"""A running backward pass: which uses it will reach, in which order, and how far it has come.

Autograd runs backwards from the last use to the first, but which groups are gathered and resharded also depends on how
modules are nested. For example, let a root R contain blocks A and B, and let B contain a sharded C. One forward makes
these uses, numbered when their forwards begin; `last` is the number of the newest use when a forward ends:

    use     number   last     forward ran from ... to
    R          1       4      |--------------------|
    A          2       2         |--|
    B          3       4               |--------|
    C          4       4                 |----|

Backward reaches an enclosing use before the uses in it, because its outputs come first. Sorted by `_backward_place`,
which is (-last, number), the order is R (-4, 1), B (-4, 3), C (-4, 4), A (-2, 2). So B is gathered, then C, while B
stays unsharded. The node of C runs first, then those of B, A and R, in the reverse order of creation. A use ends when
its node has run: its group is resharded and its gradients are reduced.

Two things make this harder:

1. B may return the output of C unchanged. Then backward reaches C first, and B only right after it. B is *skipped*: its
   gather is issued before that of C all the same. On other ranks B may return something else, so that backward reaches
   B first, and all ranks must issue the same gathers in the same order.
2. With `reduce_unused`, other ranks may run nodes that this rank does not. Such a use is *idle* here. Its group is
   gathered and resharded at the same places as there.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from .._comm.copies import Gradients
from .._group.group import ParamGroup
from .._torch.core import node_will_run, queue_backward_callback
from .node import Use

_forward_of, _group_of, _last_of, _number_of = map(attrgetter, ("forward", "group", "last", "number"))


class Token:
    """Tells whether a backward pass is still running, by being alive.

    Only a callback that is queued in autograd holds it. Autograd deletes the callback when the pass is over: after it
    has called it or, if the pass failed, without calling it. Whoever has a weak reference to the token learns of both.
    """

    __slots__ = ("__weakref__",)


def _end(token: Token) -> None:
    """Do nothing: the callback of a nested pass only holds the token."""


def _backward_place(use: Use) -> tuple[int, int]:
    """Sort key for the order in which backwards begin: reversed, except that an enclosing use precedes the enclosed."""
    return -use.last, use.number


class Skipped(NamedTuple):
    """A use that backward skips: its turn has come, but this rank reaches it only later, or never.

    A use whose node may run only on other ranks is reported twice: where its backward would begin, and where it would
    end. A use that this rank reaches later is reported only where its backward would begin.

    Attributes:
        use: the use.
        begins: True where its backward would begin, False where it would end.
        following: the group whose backward comes next, where this one would end; None where it would begin.
    """

    use: Use
    begins: bool
    following: ParamGroup | None


def _is_around(outer: Use, use: Use) -> bool:
    return outer.number < use.number <= outer.last


def _repeated(groups: Sequence[ParamGroup]) -> frozenset[ParamGroup]:
    return frozenset(group for group, count in Counter(groups).items() if count > 1)


class BackwardPass:
    """The outermost backward pass on this thread, with the passes nested in it.

    Autograd numbers its passes; a nested pass has a higher number. A reentrant checkpoint runs a nested pass. Here, the
    running passes are a stack, from the outermost to the innermost.

    Args:
        number: number of the outermost pass.
        token: an object that is freed when the pass ends, successfully or not.
        uses: all uses that a backward may go through (see `Uses`).
        on_end: returns the function to call when the token is freed, or None.
        opened_by: the use that backward reached first, if known. Its forward belongs to the pass even if no node will
            run, as for a frozen group.

    Attributes:
        number: number of the outermost pass.
        current: number of the pass, possibly a nested one, that the engine has seen last.
        alive: whether the pass is still running.
        entered: uses that the pass has reached.
        repeated: groups that have several uses whose nodes the pass runs.
        forwards: numbers of the root forwards that the pass goes through.
        newest: the highest of these numbers; 0 if there are none.
        will_fire: uses whose node the outermost pass itself runs.
        skipped: uses that backward skipped. Their gathers were issued then, and are not issued again.
    """

    def __init__(
        self,
        number: int,
        token: Token,
        uses: Iterable[Use],
        on_end: Callable[[], Callable[[], None] | None] = lambda: None,
        opened_by: Use | None = None,
    ) -> None:
        self.number = self.current = number
        self.alive = True

        def ended(_: object) -> None:
            self.alive = False
            if (call := on_end()) is not None:
                call()

        self._stack = [(number, weakref.ref(token, ended))]
        self.entered: set[Use] = set()
        live: list[tuple[Use, Any]] = []
        expected: list[Use] = []
        for use in uses:
            node = use.node()
            live.append((use, node))
            if node is not None and node_will_run(node):
                expected.append(use)
        self.will_fire = set(expected)
        self._waiting = deque(reversed(expected))
        # Only uses of these forwards count (`_with_others`): graphs of others may be alive on one rank only, and all
        # ranks must decide alike.
        self.forwards = set(map(_forward_of, expected if opened_by is None else [*expected, opened_by]))
        self.newest = max(self.forwards, default=0)
        self._idle: set[Use] = set()
        self._open: list[Use] = []  # idle uses that were skipped and have not ended, the outermost first
        self.skipped: set[Use] = set()
        self._next_entry = 0  # for `due`: index of the first entry of the schedule that it has not looked at
        if len(expected) < len(live):
            expected = self._with_others(live)
        # In the order of `_backward_place`: the sort is stable, and `expected` is sorted by number.
        self._upcoming = deque(sorted(expected, key=_last_of, reverse=True))
        self._ready: dict[Use, Gradients] = {}
        groups = list(map(_group_of, self._waiting))
        self.repeated = frozenset() if len(set(groups)) == len(groups) else _repeated(groups)

    def _with_others(self, live: Iterable[tuple[Use, object]]) -> list[Use]:
        """The uses whose node this pass runs, and other uses of its forwards whose weights may be needed.

        They are sorted by creation.
        """
        expected: list[Use] = []
        for use, node in live:
            if use in self.will_fire:
                expected.append(use)
            elif use.forward in self.forwards:
                # Other ranks may run the node of a use that this one does not, and gather its weights.
                if use.group.trains and not use.fired and use.group.options.reduce_unused:
                    self._idle.add(use)
                # Frozen groups have no node. Backward may unpack their weights while one of their handles is alive.
                if node is None or use in self._idle:
                    expected.append(use)
        return sorted(expected, key=_number_of)

    def note(self, number: int) -> int:
        """Note that the pass `number` is running; returns its nesting depth, 0 for the outermost."""
        if self.current == number:
            return len(self._stack) - 1
        self._stack = [(each, token) for each, token in self._stack if token() is not None]
        if all(each != number for each, _ in self._stack):
            token = Token()
            queue_backward_callback(partial(_end, token))
            self._stack.append((number, weakref.ref(token)))
        self.current = self._stack[-1][0]
        return self._depth(number)

    def _depth(self, number: int) -> int:
        numbers = [each for each, _ in self._stack]
        return numbers.index(number) if number in numbers else -1

    def completes(self, use: Use, number: int) -> bool:
        """Whether the gradients that arrive in the pass `number` are the last ones of `use`.

        A reentrant checkpoint recomputes a forward within a pass, and then runs a nested pass over what it has
        recomputed. So the gradients of a use that was recomputed in the pass `use.made_in` arrive one level deeper than
        that pass. A use that was not recomputed has -1 as `made_in` and as its depth, so its gradients arrive at depth
        0. At deeper levels, checkpoints within the module bring a part of the gradients, and more follow.
        """
        if number == self.number == self.current and len(self._stack) == 1:  # no pass is nested; saves the calls below
            return True
        return self.note(number) <= self._depth(use.made_in) + 1

    def next_group(self) -> ParamGroup | None:
        """The group whose backward is expected next."""
        while self._upcoming and self._upcoming[0] in self.entered:
            self._upcoming.popleft()
        return self._upcoming[0].group if self._upcoming else None

    def next_groups(self, group: ParamGroup) -> Sequence[ParamGroup]:
        """The groups whose backward is expected after that of `group`, up to and including those of the next module."""
        first = self.next_group()
        if first is None:
            return ()
        if not (group.companions or first.companions):
            return (first,)
        groups: list[ParamGroup] = []
        for use in self._upcoming:
            groups.append(use.group)
            if use.group not in group.companions:
                return (*groups, *use.group.companions)
        return groups

    def expects(self, group: ParamGroup) -> bool:
        """Whether this pass may still reach a use of this group.

        Either a use is expected. Or the forwards of this pass have made no node for the group (`used_in` is the last
        forward that has made one). Then a checkpoint may have run it without gradients, and will make the use when it
        recomputes.
        """
        return group.used_in not in self.forwards or any(use.group is group for use in self._upcoming)

    def due(
        self, group: ParamGroup, backwards: Sequence[tuple[ParamGroup, Sequence[ParamGroup]]]
    ) -> tuple[list[ParamGroup], Sequence[ParamGroup]]:
        """Look up the backward of `group` in a schedule, starting after the entry of the last look-up.

        Entries may be skipped: if the root returns its last module's output, autograd reaches that module first.

        Returns:
            the groups to gather for the skipped entries, and the groups to gather for the entry of `group`.
        """
        begin = self._next_entry
        index = next((i for i in range(begin, len(backwards)) if backwards[i][0] is group), -1)
        if index < 0:
            return [], ()
        self._next_entry = index + 1
        return [other for _, ahead in backwards[begin:index] for other in ahead], backwards[index][1]

    # Backward skips two types of uses:
    # - Idle uses: their node does not run here, but may run on other ranks, which then gather the weights.
    # - Uses that return the output of an enclosed use: backward reaches them only right after the enclosed use.

    def reach(self, use: Use | None) -> Iterable[Skipped]:
        """The uses that backward skipped on its way to `use`, or to the end of the pass (None).

        The result may be an iterator that changes this object as it is consumed: a use counts as expected
        (`next_group`) until it has been yielded. So handle each use before the next one is taken.
        """
        if self._open or (self._upcoming and self._upcoming[0] is not use):
            return self._skipped_until(use)
        if self._upcoming:
            self._upcoming.popleft()
        return ()

    def leave(self, use: Use) -> Iterable[Skipped]:
        """When the backward of `use` is about to end: skip the uses that began after it and whose node does not run.

        Returns:
            where the backward of those with `reduce_unused` would begin and end (`Skipped`). The others are only
            dropped from the expected uses.
        """
        queue = self._upcoming
        return self._skipped_before(use) if self._open or (queue and queue[0].number > use.number) else ()

    def _skipped_until(self, use: Use | None) -> Iterator[Skipped]:
        queue, place = self._upcoming, None if use is None else _backward_place(use)
        while queue and (place is None or _backward_place(queue[0]) <= place):
            first = queue.popleft()
            if first is not use and (first in self._idle or self._comes_later(first, use)):
                yield from self._skip(first)
        yield from self._close(use)

    def _comes_later(self, outer: Use, use: Use | None) -> bool:
        """Whether `outer` encloses `use` and is reached only after it, because `outer` returns the output of `use`."""
        return use is not None and _is_around(outer, use) and outer in self.will_fire and outer not in self.entered

    def _skipped_before(self, use: Use) -> Iterator[Skipped]:
        queue = self._upcoming
        while queue and queue[0].number > use.number and queue[0] not in self.will_fire:
            first = queue.popleft()
            if first in self._idle:
                yield from self._skip(first)
        while self._open and self._open[-1].number > use.number:
            yield Skipped(self._open.pop(), False, self.next_group())

    def _skip(self, use: Use) -> Iterator[Skipped]:
        yield from self._close(use)
        if use in self._idle:
            self._open.append(use)
        yield Skipped(use, True, None)
        self.skipped.add(use)

    def _close(self, use: Use | None) -> Iterator[Skipped]:
        """End the open uses that do not enclose `use`, the innermost first."""
        while self._open and not (use is not None and _is_around(self._open[-1], use)):
            yield Skipped(self._open.pop(), False, self.next_group() if use is None else use.group)

    # All ranks must issue reductions in the same order. Autograd runs the nodes of one device in the reverse order of
    # their creation. It has a thread for each device, so nodes of several devices may run in any order. A use whose
    # gradients arrive too early therefore waits for its turn.

    def in_turn(self, use: Use, gradients: Gradients) -> list[tuple[Use, Gradients]]:
        """Take the complete gradients of a use; returns the uses whose turn has come, with their gradients."""
        if use not in self.will_fire:
            return [(use, gradients)]
        if self._waiting and self._waiting[0] is use and not self._ready:
            self._waiting.popleft()
            return [(use, gradients)]
        self._ready[use] = gradients
        out = []
        while self._waiting and self._waiting[0] in self._ready:
            first = self._waiting.popleft()
            out.append((first, self._ready.pop(first)))
        return out

    def left_over(self) -> list[tuple[Use, Gradients]]:
        """At the end of the pass: the uses whose turn never came, with their gradients, in order."""
        if not self._ready:
            return []
        out = [(use, self._ready[use]) for use in self._waiting if use in self._ready]
        self._ready.clear()
        return out
