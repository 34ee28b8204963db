"""Where a compiled graph launches its communication and where it waits, so that both overlap with compute.

AOTAutograd hands a graph over with each gather launched where it is needed, and each reduction waited for at once. Only
nodes are moved, never data: the graph computes the same. The schedule is that of the plan, which policies and budgets
have made already: what is gathered when a module begins, and how many reductions fly. For what it does not name, in the
graph of a part of a model for instance, gathers are one ahead, and a reduction is waited for behind the launch of the
next one. Every rank has the same graph, so collectives keep one order.

    forward     GwmGwmGwm        becomes    GwGmwGmwm, two ahead GGwGmwmwm
    backward    mGwmRwGwmRwmRw   becomes    GmwGmRwmRwmRww
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from .._plan.graph_schedule import NOTHING_SAID, GraphSchedule
from .._plan.schedule import ROOT_NAME
from .graphs import (
    GATHER,
    Names,
    bytes_of,
    computes,
    is_backward,
    letter_of,
    module_of,
    name_of,
    takes_gradients,
    weights_of,
)


def place(graph: fx.Graph, schedule: GraphSchedule = NOTHING_SAID) -> None:
    """Launch gathers ahead, and wait for reductions later.

    Args:
        graph: of forward or of backward.
        schedule: that of the plan.
    """
    order = _Order(graph, schedule)
    launches = _launches(order, schedule)
    waits = _follow(order, launches, schedule).waits
    indices = [launch.at for launch in launches]
    if schedule.budget is not None:
        indices = _within(schedule.budget, order, indices, waits, schedule)
    for reduction, at in waits.items():
        _finish_later(reduction.ends, order.fixed(at))
    for gather, at in zip(order.gathers, indices, strict=True):
        _launch_earlier(gather, order.fixed(at))


@dataclass(frozen=True)
class _Gather:
    """A gather of weights.

    Attributes:
        launch, wait: its two halves.
        arrival: the last of the nodes that take the weights from the wait.
        moves: the nodes that move with its launch: itself and the views of inputs for it; empty if it must stay.
        nbytes: of the weights.
    """

    launch: fx.Node
    wait: fx.Node
    arrival: fx.Node
    moves: tuple[fx.Node, ...]
    nbytes: int

    @classmethod
    def of(cls, launch: fx.Node) -> _Gather | None:
        """That of a node; None if it is no gather of a group's shards, or if nobody waits for it."""
        wait = _wait_of(launch) if name_of(launch) == GATHER else None
        if wait is None:
            return None
        return cls(launch, wait, max([wait, *wait.users]), _moves_of(launch), bytes_of(wait))


@dataclass(frozen=True)
class _Reduction:
    """A reduction that can be waited for later: its launch, and what comes of it.

    Attributes:
        launch: takes the gradients.
        ends: the wait, and all that comes of it; nothing of it computes. An all-reduce that follows a reduce-scatter is
            one of them, as it is issued when the reduce-scatter was waited for.
        nbytes: of the gradients.
    """

    launch: fx.Node
    ends: frozenset[fx.Node]
    nbytes: int

    @classmethod
    def of(cls, launch: fx.Node) -> _Reduction | None:
        """That of a node; None if it launches none, or one that cannot be waited for later."""
        if not takes_gradients(launch):
            return None
        (following,) = launch.users
        ends = _ends_of(following)
        gradients = launch.args[0]
        assert isinstance(gradients, (list, tuple))
        nbytes = sum(bytes_of(each) for each in gradients if isinstance(each, fx.Node))
        return None if ends is None else cls(launch, ends, nbytes)


class _Order:
    """A graph before anything is moved. Places are numbers of nodes; what is put at one comes before its node.

    Attributes:
        at: the number of each node.
        first, last: numbers of the first node that is no input, and of the last one.
        gathers: of weights.
        reductions: those that can be waited for later.
        names: of the modules.
        backward: whether it is the graph of a backward.
    """

    def __init__(self, graph: fx.Graph, schedule: GraphSchedule) -> None:
        self._nodes: list[fx.Node] = list(graph.nodes)
        self.at = {node: number for number, node in enumerate(self._nodes)}
        self.first = next(number for number, node in enumerate(self._nodes) if node.op != "placeholder")
        self.last = len(self._nodes) - 1
        self.gathers = list(filter(None, map(_Gather.of, self._nodes)))
        self.reductions = list(filter(None, map(_Reduction.of, self._nodes)))
        reduces = filter(takes_gradients, self._nodes)
        communicate = [*(gather.launch for gather in self.gathers), *reduces]
        self.names = Names(map(module_of, communicate), schedule.modules)
        moves = [each.moves for each in self.gathers] + [tuple(each.ends) for each in self.reductions]
        self._moving = {node for nodes in moves for node in nodes}
        self._computes: dict[str, list[int]] = {}
        for node in self._nodes:
            if computes(node) and node not in self._moving:
                self._computes.setdefault(self.name(node), []).append(self.at[node])
        self.backward = is_backward(graph)
        self._arrivals = {self.name(each.launch): self.arrival(each) for each in reversed(self.gathers)}

    def name(self, node: fx.Node) -> str:
        """The innermost module around a node that has a name."""
        return self.names.of(module_of(node))

    def arrival(self, gather: _Gather) -> int:
        """The index of the node at which all weights of a gather have come."""
        return self.at[gather.arrival] + 1

    def fixed(self, index: int) -> fx.Node:
        """The first node from there on that is not moved."""
        return next(node for node in self._nodes[index:] if node not in self._moving)

    def last_use(self, gather: _Gather) -> int:
        """The index of the last node that reads the weights of a gather."""
        return max(self.at[user] for node in weights_of(gather.launch) for user in node.users)

    def begin(self, module: str) -> int:
        """Where a module begins to compute, the root before all else; behind the graph if it is not here."""
        return self.first if module == ROOT_NAME else self._computes.get(module, [self.last])[0]

    def ready(self, module: str) -> int:
        """Where a module gathers ahead, as in eager: behind its own weights, or where its backward begins."""
        own = module in self._arrivals and (module == ROOT_NAME or not self.backward)
        return self._arrivals[module] if own else self.begin(module)

    def middle(self, module: str) -> int:
        """Half-way through what a module computes."""
        numbers = self._computes.get(module) or [self.first]
        return numbers[len(numbers) // 2]

    def end(self, module: str) -> int:
        """Behind all that a module computes; of the root, at the end."""
        return self.last if module == ROOT_NAME else self._computes.get(module, [self.first])[-1] + 1


class _Launch(NamedTuple):
    """Where a gather is to be launched, and the module that begins there."""

    at: int
    module: str


def _launches(order: _Order, schedule: GraphSchedule) -> list[_Launch]:
    """Where gathers are to be launched."""
    gathered_by = schedule.gathered_by(order.backward)
    launches: list[_Launch] = []
    one_ahead = _Launch(order.first, ROOT_NAME)  # where the weights of the gather before have come
    for gather in order.gathers:
        module = order.name(gather.launch)
        wanted = [_Launch(order.at[gather.launch], module)]  # where it is needed
        if module in gathered_by:
            wanted.append(_Launch(order.begin(module), module))
        ahead = [_Launch(order.ready(each), each) for each in gathered_by.get(module, ())]
        if module not in gathered_by or (ahead and min(ahead) > wanted[0]):
            ahead = [one_ahead]  # the schedule does not know it, or has it gathered by what begins only later here
        launches.append(max([min(wanted + ahead), *launches[-1:]]))  # gathers keep their order
        one_ahead = _Launch(order.arrival(gather), module)
    return launches


class _Flight:
    """The reductions in flight, while one goes through a graph.

    Attributes:
        waits: the indices of the nodes at which reductions are to be waited for.
    """

    def __init__(self, order: _Order, schedule: GraphSchedule) -> None:
        self.waits = dict.fromkeys(order.reductions, order.last)
        self._order = order
        self._most = schedule.in_flight
        self._flying: deque[tuple[str, list[_Reduction]]] = deque()  # by module: one with several dtypes has several

    def settle(self, at: int, most: int = 0) -> None:
        """Wait for the oldest, until so many modules have reductions in flight."""
        while len(self._flying) > most:
            self.waits.update(dict.fromkeys(self._flying.popleft()[1], at))

    def launch(self, reduction: _Reduction) -> None:
        """One more is launched."""
        module = self._order.name(reduction.launch)
        if module not in self._most:
            self.settle(self._order.at[reduction.launch] + 1)
        elif self._flying and self._flying[-1][0] == module:
            self._flying[-1][1].append(reduction)
            return
        else:
            self.settle(self._order.at[reduction.launch], self._most[module] - 1)
        self._flying.append((module, [reduction]))

    def __bool__(self) -> bool:
        return bool(self._flying)


def _follow(order: _Order, launches: list[_Launch], schedule: GraphSchedule) -> _Flight:
    """The waits for reductions; launches of gathers that come behind them move."""
    flight = _Flight(order, schedule)
    events: list[tuple[int, int | _Reduction]] = [(launch.at, k) for k, launch in enumerate(launches)]
    events += [(order.at[reduction.launch], reduction) for reduction in order.reductions]
    for at, event in sorted(events, key=lambda event: event[0]):
        if isinstance(event, _Reduction):
            flight.launch(event)
        elif flight and (module := launches[event].module) in schedule.reduces_first:
            gather = order.gathers[event].launch
            if module != order.name(gather):  # as in eager: when half of what the module saved was read
                launches[event] = _Launch(max(at, min(order.middle(module), order.at[gather])), module)
            flight.settle(launches[event].at)
    return flight


def _within(
    budget: int, order: _Order, launches: Sequence[int], waits: Mapping[_Reduction, int], schedule: GraphSchedule
) -> list[int]:
    """The same launches, but for those ahead that would exceed the budget, which come where they are needed.

    The plan holds its budget already. An eager step does likewise where it does not run as planned, or where users have
    listed what is gathered ahead.
    """
    live = [0] * order.last

    def hold(begin: int, end: int, nbytes: int) -> None:
        live[begin:end] = [each + nbytes for each in live[begin:end]]

    for gather in order.gathers:
        hold(order.at[gather.launch], order.last_use(gather) + 1, gather.nbytes)
    for reduction, at in waits.items():
        launch = order.at[reduction.launch]
        hold(launch, launch + 1 if schedule.frees_queued else at, reduction.nbytes)
    for module, nbytes in schedule.kept.items() if order.backward else ():
        hold(0, order.end(module), nbytes)
    bounded: list[int] = []
    for gather, wanted in zip(order.gathers, launches, strict=True):
        needed, nbytes = order.at[gather.launch], gather.nbytes
        at = max([wanted, *bounded[-1:]])
        if max(live[at:needed], default=0) + nbytes > budget:
            at = needed
        hold(at, needed, nbytes)
        bounded.append(at)
    return bounded


def _launch_earlier(gather: _Gather, target: fx.Node) -> None:
    """Move a gather, and what it needs, before `target`, which is no later than its wait."""
    for node in gather.moves:
        if target < node or node is gather.launch:
            target.prepend(node)


def _finish_later(ends: Iterable[fx.Node], target: fx.Node) -> None:
    """Move the end of a reduction before `target`, but for what is behind it anyway."""
    for node in sorted(node for node in ends if node < target):
        target.prepend(node)


def _wait_of(collective: fx.Node) -> fx.Node | None:
    return next((user for user in collective.users if letter_of(user) == "w"), None)


def _moves_of(launch: fx.Node) -> tuple[fx.Node, ...]:
    """A gather, and the views of inputs for it; empty if it needs more."""
    moves, to_do = {launch}, list(launch.all_input_nodes)
    while to_do:
        node = to_do.pop()
        if node.op != "placeholder" and node not in moves:
            if node.op != "call_function" or letter_of(node) or len(node.all_input_nodes) != 1:
                return ()
            moves.add(node)
            to_do += node.all_input_nodes
    return tuple(sorted(moves))


def _ends_of(wait: fx.Node) -> frozenset[fx.Node] | None:
    """A wait and all that comes of it, without the output; None if some of it computes, or is reduced."""
    ends, to_do = {wait}, [wait]
    while to_do:
        for user in to_do.pop().users:
            if letter_of(user) == "m" or takes_gradients(user):
                return None
            if user.op != "output" and user not in ends:
                ends.add(user)
                to_do.append(user)
    return frozenset(ends)
