"""Decides where a compiled graph launches its communication and where it waits, to overlap both with compute.

AOTAutograd launches each gather where it is needed, and waits for each reduction immediately. This pass only moves
nodes, so the graph still computes the same. The schedule is that of the plan and already includes policies and budgets:
which groups are gathered when a module begins, and how many reductions are in flight. For modules that are not in the
schedule, for example in the graph of a part of a model, gathers are launched one module ahead, and each reduction is
waited for after the launch of the next one. Every rank has the same graph, so collectives stay in the same order.

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
    """Launch gathers earlier, and wait for reductions later.

    Args:
        graph: a forward or backward graph.
        schedule: the plan's schedule.
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
        moves: the nodes that move with its launch: the launch and the views of inputs for it; empty if it must stay.
        nbytes: bytes of the weights.
    """

    launch: fx.Node
    wait: fx.Node
    arrival: fx.Node
    moves: tuple[fx.Node, ...]
    nbytes: int

    @classmethod
    def of(cls, launch: fx.Node) -> _Gather | None:
        """The gather that a node launches; None if it does not gather a group's shards, or has no wait."""
        wait = _wait_of(launch) if name_of(launch) == GATHER else None
        if wait is None:
            return None
        return cls(launch, wait, max([wait, *wait.users]), _moves_of(launch), bytes_of(wait))


@dataclass(frozen=True)
class _Reduction:
    """A reduction that can be waited for later.

    Attributes:
        launch: the node that takes the gradients.
        ends: the wait and all nodes that depend on it; none of them computes. If an all-reduce follows a
            reduce-scatter, it is one of them, because it is issued after the wait for the reduce-scatter.
        nbytes: bytes of the gradients.
    """

    launch: fx.Node
    ends: frozenset[fx.Node]
    nbytes: int

    @classmethod
    def of(cls, launch: fx.Node) -> _Reduction | None:
        """The reduction that a node launches; None if it launches none, or one that cannot be waited for later."""
        if not takes_gradients(launch):
            return None
        (following,) = launch.users
        ends = _ends_of(following)
        gradients = launch.args[0]
        assert isinstance(gradients, (list, tuple))
        nbytes = sum(bytes_of(each) for each in gradients if isinstance(each, fx.Node))
        return None if ends is None else cls(launch, ends, nbytes)


class _Order:
    """The order of a graph before any move. Places are indices of nodes; a node put at a place precedes the node there.

    Attributes:
        at: the index of each node.
        first, last: indices of the first node that is not an input, and of the last node.
        gathers: the gathers of weights.
        reductions: the reductions that can be waited for later.
        names: the names of the modules.
        backward: whether this is the graph of a backward.
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
        """The innermost named module around a node."""
        return self.names.of(module_of(node))

    def arrival(self, gather: _Gather) -> int:
        """The index after the node at which all weights of a gather are available."""
        return self.at[gather.arrival] + 1

    def fixed(self, index: int) -> fx.Node:
        """The first node from `index` on that is not moved."""
        return next(node for node in self._nodes[index:] if node not in self._moving)

    def last_use(self, gather: _Gather) -> int:
        """The index of the last node that reads the weights of a gather."""
        return max(self.at[user] for node in weights_of(gather.launch) for user in node.users)

    def begin(self, module: str) -> int:
        """The index where a module begins to compute: the first for the root, the last for modules not in the graph."""
        return self.first if module == ROOT_NAME else self._computes.get(module, [self.last])[0]

    def ready(self, module: str) -> int:
        """Where a module prefetches, as in eager steps: after its own gather or, in backward, where it begins."""
        own = module in self._arrivals and (module == ROOT_NAME or not self.backward)
        return self._arrivals[module] if own else self.begin(module)

    def middle(self, module: str) -> int:
        """The index of the middle one of a module's compute nodes."""
        numbers = self._computes.get(module) or [self.first]
        return numbers[len(numbers) // 2]

    def end(self, module: str) -> int:
        """The index after all compute of a module; for the root, the last index."""
        return self.last if module == ROOT_NAME else self._computes.get(module, [self.first])[-1] + 1


class _Launch(NamedTuple):
    """Where to launch a gather, and the module that begins there."""

    at: int
    module: str


def _launches(order: _Order, schedule: GraphSchedule) -> list[_Launch]:
    """Where to launch each gather."""
    gathered_by = schedule.gathered_by(order.backward)
    launches: list[_Launch] = []
    one_ahead = _Launch(order.first, ROOT_NAME)  # where the weights of the previous gather are available
    for gather in order.gathers:
        module = order.name(gather.launch)
        wanted = [_Launch(order.at[gather.launch], module)]  # where it is needed
        if module in gathered_by:
            wanted.append(_Launch(order.begin(module), module))
        ahead = [_Launch(order.ready(each), each) for each in gathered_by.get(module, ())]
        if module not in gathered_by or (ahead and min(ahead) > wanted[0]):
            ahead = [one_ahead]  # not in the schedule, or scheduled with a module that begins too late in this graph
        launches.append(max([min(wanted + ahead), *launches[-1:]]))  # gathers keep their order
        one_ahead = _Launch(order.arrival(gather), module)
    return launches


class _Flight:
    """The reductions in flight, during a walk through a graph.

    Attributes:
        waits: by reduction, the index of the node at which to wait for it.
    """

    def __init__(self, order: _Order, schedule: GraphSchedule) -> None:
        self.waits = dict.fromkeys(order.reductions, order.last)
        self._order = order
        self._most = schedule.in_flight
        self._flying: deque[tuple[str, list[_Reduction]]] = deque()  # by module; one per dtype

    def settle(self, at: int, most: int = 0) -> None:
        """Wait for the oldest reductions at index `at`, until at most `most` modules have reductions in flight."""
        while len(self._flying) > most:
            self.waits.update(dict.fromkeys(self._flying.popleft()[1], at))

    def launch(self, reduction: _Reduction) -> None:
        """Add a reduction that is launched now."""
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
    """Decide the waits for reductions; launches of gathers that must follow these waits are moved."""
    flight = _Flight(order, schedule)
    events: list[tuple[int, int | _Reduction]] = [(launch.at, k) for k, launch in enumerate(launches)]
    events += [(order.at[reduction.launch], reduction) for reduction in order.reductions]
    for at, event in sorted(events, key=lambda event: event[0]):
        if isinstance(event, _Reduction):
            flight.launch(event)
        elif flight and (module := launches[event].module) in schedule.reduces_first:
            gather = order.gathers[event].launch
            if module != order.name(gather):  # as in eager steps: when half of the module's saved tensors were read
                launches[event] = _Launch(max(at, min(order.middle(module), order.at[gather])), module)
            flight.settle(launches[event].at)
    return flight


def _within(
    budget: int, order: _Order, launches: Sequence[int], waits: Mapping[_Reduction, int], schedule: GraphSchedule
) -> list[int]:
    """The same launches, except prefetches that would exceed the budget: these move to where they are needed.

    The plan is within its budget already. Steps that deviate from the plan, or that use prefetch lists of users, may
    not be; eager steps handle this in the same way.
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
    """Move a gather, and the nodes that it needs, before `target`, which is no later than its wait."""
    for node in gather.moves:
        if target < node or node is gather.launch:
            target.prepend(node)


def _finish_later(ends: Iterable[fx.Node], target: fx.Node) -> None:
    """Move the end of a reduction before `target`, except for nodes that come after it already."""
    for node in sorted(node for node in ends if node < target):
        target.prepend(node)


def _wait_of(collective: fx.Node) -> fx.Node | None:
    return next((user for user in collective.users if letter_of(user) == "w"), None)


def _moves_of(launch: fx.Node) -> tuple[fx.Node, ...]:
    """A gather, and the views of inputs for it; empty if it needs other nodes."""
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
    """A wait and all nodes that depend on it, except the output; None if any of them computes or is reduced."""
    ends, to_do = {wait}, [wait]
    while to_do:
        for user in to_do.pop().users:
            if letter_of(user) == "m" or takes_gradients(user):
                return None
            if user.op != "output" and user not in ends:
                ends.add(user)
                to_do.append(user)
    return frozenset(ends)
