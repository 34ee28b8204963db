"""What is known of a backward pass while it runs."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from .._group.group import Gradients, ParamGroup
from .._torch.core import node_will_run, queue_backward_callback
from .node import Use

_forward_of, _group_of, _last_of, _number_of = map(attrgetter, ("forward", "group", "last", "number"))


class Token:
    """Held by what autograd drops at the end of a backward pass, be it a good or a bad end."""

    __slots__ = ("__weakref__",)


def _tell(listener: Callable[[], Callable[[], None] | None]) -> None:
    if (there := listener()) is not None:
        there()


def _end(token: Token) -> None:
    """A nested pass has ended; its token goes with it."""


def _backward_place(use: Use) -> tuple[int, int]:
    """Where the backward of a use begins among others: forwards backwards, but what is around others before them."""
    return -use.last, use.number


class Passed(NamedTuple):
    """A use that backward passes: its backward begins, or it ends, and that of `following` is next."""

    use: Use
    begins: bool
    following: ParamGroup | None


def _is_around(outer: Use, use: Use) -> bool:
    return outer.number < use.number <= outer.last


def _repeated(groups: Sequence[ParamGroup]) -> frozenset[ParamGroup]:
    return frozenset(group for group, count in Counter(groups).items() if count > 1)


class Uses:
    """The uses of an engine that a backward may go through."""

    def __init__(self) -> None:
        self._live: dict[int, Use] = {}  # those whose graph lives, in the order of creation
        self._lost: list[Use] = []  # those whose graph does not, but perhaps on other ranks

    def __iter__(self) -> Iterator[Use]:
        return chain(self._live.values(), self._lost)

    def add(self, use: Use) -> None:
        """A forward begins."""
        self._live[use.number] = use

    def graph_gone(self, use: Use) -> None:
        """The graph of a use was freed."""
        self._live.pop(use.number, None)
        if use.group.options.reduce_unused and use.group.trains and use.forward and not use.fired:
            self._lost.append(use)

    def begin_forward(self, waiting: bool) -> None:
        """A forward of the root begins; of those before whose graphs are gone, and if none waits, no backward comes."""
        if self._lost:
            alive = set(map(_forward_of, self._live.values())) if waiting else ()
            self._lost = [use for use in self._lost if use.forward in alive]

    def forget(self, forwards: Container[int] | None = None) -> None:
        """The backward of these forwards is over, or of all."""
        self._lost = [use for use in self._lost if forwards is not None and use.forward not in forwards]

    def all_fired(self) -> bool:
        """Whether no graph lives that a backward has not gone through."""
        return all(use.fired for use in self._live.values())


class BackwardPass:
    """The outermost backward pass on this thread, with those that run inside of it.

    Passes are numbered, nested ones higher. A reentrant checkpoint runs a pass of its own inside of a pass.

    Attributes:
        number: that of the outermost pass.
        current: that of the innermost one that was heard of last.
        repeated: groups of which it runs the nodes of several uses.
        forwards: numbers of the forwards of the root that it goes through.
        newest: the last of them.
        told: uses of which it is known what is gathered with them.
    """

    def __init__(
        self,
        number: int,
        token: Token,
        uses: Iterable[Use],
        on_end: Callable[[], Callable[[], None] | None] = lambda: None,
        opened_by: Use | None = None,
    ) -> None:
        self.number = number
        self._token = weakref.ref(token, lambda _: _tell(on_end))
        self._stack: list[tuple[int, weakref.ref[Token]]] = []
        self.current = -1
        live = [(use, use.node()) for use in uses]
        expected = [use for use, node in live if node is not None and node_will_run(node)]
        self._will_fire = set(expected)
        self._waiting = deque(reversed(expected))
        # Graphs of other forwards may live on one rank and not on another, and say nothing of this pass.
        self.forwards = set(map(_forward_of, expected if opened_by is None else [*expected, opened_by]))
        self.newest = max(self.forwards, default=0)
        self._idle: set[Use] = set()
        self._open: list[Use] = []  # passed, and what is inside of them not yet
        self.told: set[Use] = set()
        self._edge = 0  # index in a schedule's backwards of the next one that was not asked for
        if len(expected) < len(live):
            expected = self._with_others(live)
        self._upcoming = deque(sorted(expected, key=_last_of, reverse=True))  # see `_backward_place`
        self._ready: dict[Use, Gradients] = {}
        groups = list(map(_group_of, self._waiting))
        self.repeated = frozenset() if len(set(groups)) == len(groups) else _repeated(groups)

    def _with_others(self, live: Iterable[tuple[Use, object]]) -> list[Use]:
        """The uses whose node runs, and others of these forwards whose weights may be asked for, as created."""
        found: list[Use] = []
        for use, node in live:
            if use in self._will_fire:
                found.append(use)
            elif use.forward in self.forwards:
                # Other ranks may run the node of a use that this one does not, and gather its weights.
                if use.group.trains and not use.fired and use.group.options.reduce_unused:
                    self._idle.add(use)
                # Frozen groups have no node; while one of their handles lives, their weights may be asked for.
                if node is None or use in self._idle:
                    found.append(use)
        return sorted(found, key=_number_of)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._token() is not None

    def is_of(self, token: Token) -> bool:
        """Whether this is the pass that holds `token`."""
        return self._token() is token

    def note(self, number: int) -> int:
        """Take notice that the pass `number` runs now; returns how deep it is nested, 0 for the outermost."""
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
        """Whether gradients that come in the pass `number` are the last of `use`.

        They are in the pass right inside the one in which the forward ran (the outermost, if it ran in none). Deeper
        ones come from checkpoints inside of the module, and others may follow.
        """
        if number == self.number == self.current and len(self._stack) == 1:
            return True
        return self.note(number) <= self._depth(use.made_in) + 1

    def will_fire(self, use: Use) -> bool:
        """Whether the outermost pass itself runs the node of `use`."""
        return use in self._will_fire

    def next_group(self) -> ParamGroup | None:
        """The group whose backward is expected next."""
        while self._upcoming and self._upcoming[0].entered == self.number:
            self._upcoming.popleft()
        return self._upcoming[0].group if self._upcoming else None

    def next_groups(self, group: ParamGroup) -> Sequence[ParamGroup]:
        """The groups whose backward is expected next after that of this one: those of the next module."""
        first = self.next_group()
        if first is None:
            return ()
        if not (group.companions or first.companions):
            return (first,)
        found: list[ParamGroup] = []
        for use in self._upcoming:
            found.append(use.group)
            if use.group not in group.companions:
                return (*found, *use.group.companions)
        return found

    def expects(self, group: ParamGroup) -> bool:
        """Whether a use of this group is still to come. It may be, where forward made no node, as in a checkpoint."""
        return group.used_in not in self.forwards or any(use.group is group for use in self._upcoming)

    def due(
        self, group: ParamGroup, backwards: Sequence[tuple[ParamGroup, Sequence[ParamGroup]]]
    ) -> tuple[list[ParamGroup], Sequence[ParamGroup]]:
        """What a schedule gathers before the backward of `group` that it was not asked for yet, and with it.

        Where the root returns what its last module does, autograd reaches that module first.
        """
        begin = self._edge
        index = next((i for i in range(begin, len(backwards)) if backwards[i][0] is group), -1)
        if index < 0:
            return [], ()
        self._edge = index + 1
        return [other for _, ahead in backwards[begin:index] for other in ahead], backwards[index][1]

    # Uses that backward passes without reaching them: their node does not run, but on other ranks it may, which gather
    # their weights. And those that return what another one inside of them does: they are reached right behind that.

    def reach(self, use: Use | None) -> Iterable[Passed]:
        """Backward has reached a use, or its end: what it has passed on the way there, which is not expected any more.

        Each use is out of `next_group` when it is given out, and those behind it are not.
        """
        if self._upcoming and self._upcoming[0] is use and not self._open:
            self._upcoming.popleft()
            return ()
        return self._passed(use)

    def leave(self, use: Use) -> Iterable[Passed]:
        """The backward of a use is about to end: what it has passed inside of it, or behind it in forward."""
        queue = self._upcoming
        return self._passed_before(use) if self._open or (queue and queue[0].number > use.number) else ()

    def _passed(self, use: Use | None) -> Iterator[Passed]:
        queue, place = self._upcoming, None if use is None else _backward_place(use)
        while queue and (place is None or _backward_place(queue[0]) <= place):
            first = queue.popleft()
            waits = use is not None and _is_around(first, use) and first in self._will_fire
            if first is not use and (first in self._idle or (waits and first.entered != self.number)):
                yield from self._pass(first)
        yield from self._close(use)

    def _passed_before(self, use: Use) -> Iterator[Passed]:
        queue = self._upcoming
        while queue and queue[0].number > use.number and queue[0] not in self._will_fire:
            first = queue.popleft()
            if first in self._idle:
                yield from self._pass(first)
        while self._open and self._open[-1].number > use.number:
            yield Passed(self._open.pop(), False, self.next_group())

    def _pass(self, use: Use) -> Iterator[Passed]:
        yield from self._close(use)
        if use in self._idle:
            self._open.append(use)
        yield Passed(use, True, None)
        self.told.add(use)

    def _close(self, use: Use | None) -> Iterator[Passed]:
        """End what was passed and is not around this use."""
        while self._open and not (use is not None and _is_around(self._open[-1], use)):
            yield Passed(self._open.pop(), False, self.next_group() if use is None else use.group)

    # Ranks must issue reductions in one order. Autograd runs nodes in the reverse order of their creation, but with
    # several devices only roughly so: a use that is early waits for those before it.

    def in_turn(self, use: Use, gradients: Gradients) -> list[tuple[Use, Gradients]]:
        """Take the complete gradients of a use; returns those whose turn has come, in order."""
        if use not in self._will_fire:
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
        """At the end: what is ready and has waited in vain, in order."""
        out = [(use, self._ready[use]) for use in self._waiting if use in self._ready]
        self._ready.clear()
        return out
