"""Where a compiled graph launches its communication and where it waits, so that both overlap with compute.

AOTAutograd hands a graph over with each gather launched where it is needed, and each reduction waited for at once. Only
nodes are moved, never data: the graph computes the same. The schedule is that of eager. Where a plan is followed, it is
the plan's: what is gathered when a module begins, and how many reductions fly. Else gathers are as far ahead as the
policy says, one if it says nothing, and one reduction is in flight while the next group's backward runs. Every rank has
the same graph, so collectives keep one order.

    forward     GwmGwmGwm        becomes    GwGmwGmwm, two ahead GGwGmwmwm
    backward    mGwmRwGwmRwmRw   becomes    GmwGmRwmRwmRww
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .._plan.graph_schedule import NOTHING_SAID, GraphSchedule
from .._plan.schedule import ROOT_NAME
from .._policies import ONE_AHEAD, PrefetchPolicy
from .graphs import computes, is_backward, letter_of, module_of, name_of, weights_of

_PACK_SHARDS, _UNPACK = "composable_shard.pack", "composable_shard.unpack"
_PACK_GRADIENTS = "composable_shard.pack_gradients"


def place(
    graph: fx.Graph,
    policy: PrefetchPolicy = ONE_AHEAD,
    budget: int | None = None,
    schedule: GraphSchedule = NOTHING_SAID,
) -> None:
    """Launch gathers ahead, and wait for reductions later.

    Args:
        graph: of forward or of backward.
        policy: how far ahead; `auto` is one ahead, for a graph knows no times.
        budget: the most bytes that weights may take from the launch of their gather, or from forward on, to their last
            use, and buckets of gradients until their reduction is over; None for no limit. What yields to it is first
            gathering ahead, then reductions in flight.
        schedule: what goes before the policy.
    """
    order = _Order(graph, schedule)
    launches, waits = _wanted(order, policy, schedule)
    if budget is not None:
        launches, waits = _within(budget, order, launches, waits, schedule)
    for reduction, at in zip(order.reductions, waits, strict=True):
        _finish_later(reduction.ends, order.fixed(at))
    for gather, at in zip(order.gathers, launches, strict=True):
        _launch_earlier(gather, order.fixed(at))


@dataclass(frozen=True)
class _Reduction:
    """A reduction that can be waited for later: the bucket of its gradients, its launch and wait, and what comes of it.

    Attributes:
        ends: the wait, and all that comes of it; nothing of it computes.
    """

    pack: fx.Node
    launch: fx.Node
    wait: fx.Node
    ends: frozenset[fx.Node]

    @classmethod
    def of(cls, pack: fx.Node) -> _Reduction | None:
        """That of a bucket; None if there is none, or if it cannot be waited for later."""
        launch = _launch_of(pack)
        wait = _wait_of(launch) if launch is not None else None
        ends = _ends_of(wait) if wait is not None else None
        return None if launch is None or wait is None or ends is None else cls(pack, launch, wait, ends)


class _Order:
    """A graph before anything is moved. Places are numbers of nodes; what is put at one comes before its node.

    Attributes:
        nodes, at: its nodes, and the number of each.
        first, last: numbers of the first node that is no input, and of the last one.
        backward: whether it is the graph of a backward.
        gathers, names: of weights; of which modules, as schedules have them.
        arrivals: places where all weights of a gather are there.
        reductions: those that can be waited for later.
    """

    def __init__(self, graph: fx.Graph, schedule: GraphSchedule) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.at = {node: number for number, node in enumerate(self.nodes)}
        self.first = next(number for number, node in enumerate(self.nodes) if node.op != "placeholder")
        self.last = len(self.nodes) - 1
        self.backward = is_backward(graph)
        self.gathers = [node for node in self.nodes if letter_of(node) == "G" and _pack_of(node) is not None]
        self.arrivals = [self.at[_arrival_of(gather) or gather] + 1 for gather in self.gathers]
        packs = [node for node in self.nodes if name_of(node) == _PACK_GRADIENTS]
        self.reductions = [found for found in map(_Reduction.of, packs) if found is not None]
        self._root = _root_of([module_of(node) for node in (*self.gathers, *packs)], schedule.modules)
        self.names = [_below(self._root, module_of(gather)) for gather in self.gathers]
        self._known = schedule.modules | set(self.names)
        self._moving = {node for gather in self.gathers for node in _moved_with(gather) or ()}
        self._moving |= {node for reduction in self.reductions for node in reduction.ends}
        self._computes: dict[str, list[int]] = {}
        for number, node in enumerate(self.nodes):
            if computes(node) and node not in self._moving:
                self._computes.setdefault(self.module_of(node), []).append(number)

    def module_of(self, node: fx.Node) -> str:
        """The innermost module around a node that a schedule can name."""
        path = _below(self._root, module_of(node))
        while path and path not in self._known:
            path = path.rpartition(".")[0]
        return path or ROOT_NAME

    def fixed(self, place: int) -> fx.Node:
        """The first node from there on that is not moved."""
        return next(node for node in self.nodes[place:] if node not in self._moving)

    def begin(self, module: str) -> int | None:
        """Where a forward, or the root, has its weights, or a backward begins to compute; None if it is not here."""
        if module in self.names and (module == ROOT_NAME or not self.backward):
            return self.arrivals[self.names.index(module)]
        if module == ROOT_NAME:
            return self.first
        return self._computes[module][0] if module in self._computes else None

    def middle(self, module: str) -> int:
        """Half-way through what a module computes."""
        found = self._computes.get(module) or [self.first]
        return found[len(found) // 2]

    def end(self, module: str) -> int:
        """Behind all that a module computes; of the root, at the end."""
        return self.last if module == ROOT_NAME else self._computes.get(module, [self.first])[-1] + 1


def _wanted(order: _Order, policy: PrefetchPolicy, schedule: GraphSchedule) -> tuple[list[int], list[int]]:
    """Places at which gathers are to be launched, and reductions to be waited for."""
    leads = _leads([_bytes_of(gather) for gather in order.gathers], policy)
    lists = schedule.backward if order.backward else schedule.forward
    launches: list[tuple[int, str]] = []  # and whose beginning it is
    for k, (gather, name, lead) in enumerate(zip(order.gathers, order.names, leads, strict=True)):
        found = [(order.at[gather], name)]
        at, of = (order.arrivals[k - lead], order.names[k - lead]) if lead <= k else (order.first, ROOT_NAME)
        if lead and of not in lists:
            found.append((at, of))
        begins = {module: order.begin(module) for module, those in lists.items() if name in those or module == name}
        found += [(begin, module) for module, begin in begins.items() if begin is not None]
        launches.append(max([min(found), *launches[-1:]]))  # gathers keep their order
    if schedule.in_flight:
        return _by_plan(order, launches, schedule)
    waits = [order.at[reduction.launch] + 1 for reduction in order.reductions[1:]]
    waits += [order.at[reduction.wait] for reduction in order.reductions[-1:]]
    return [at for at, _ in launches], waits


def _by_plan(order: _Order, begins: Sequence[tuple[int, str]], schedule: GraphSchedule) -> tuple[list[int], list[int]]:
    """The same, where a plan says how many reductions fly, and whether they are waited for before a gather.

    Args:
        begins: where gathers are to be launched, and whose beginning that is.
    """
    launches = [at for at, _ in begins]
    waits = dict.fromkeys(order.reductions, order.last)
    flying: deque[tuple[str, list[_Reduction]]] = deque()  # by module: one with several dtypes has several

    def settle(most: int, at: int) -> None:
        while len(flying) > most:
            waits.update(dict.fromkeys(flying.popleft()[1], at))

    gathers = [(at, k, None) for k, (at, _) in enumerate(begins)]
    for at, k, reduction in sorted(
        [*gathers, *((order.at[r.pack], 0, r) for r in order.reductions)], key=lambda e: e[0]
    ):
        if reduction is None:
            module = begins[k][1]
            if module in schedule.reduces_first and flying:
                if module != order.names[k]:  # as in eager: when half of what the module saved was read
                    launches[k] = max(at, min(order.middle(module), order.at[order.gathers[k]]))
                settle(0, launches[k])
            continue
        module = order.module_of(reduction.pack)
        if flying and flying[-1][0] == module:
            flying[-1][1].append(reduction)
            continue
        settle(schedule.in_flight.get(module, 1) - 1, at)
        flying.append((module, [reduction]))
    return launches, list(waits.values())


def _within(
    budget: int, order: _Order, launches: Sequence[int], waits: Sequence[int], schedule: GraphSchedule
) -> tuple[list[int], list[int]]:
    """The same, as near as the budget allows."""
    live = [0] * len(order.nodes)

    def hold(begin: int, end: int, nbytes: int, always: bool = False) -> bool:
        """Take so many bytes from one place to the other, if there are."""
        if not always and max(live[begin:end], default=0) + nbytes > budget:
            return False
        live[begin:end] = [each + nbytes for each in live[begin:end]]
        return True

    for gather in order.gathers:
        users = [order.at[user] for node in weights_of(gather) for user in node.users]
        hold(order.at[gather], max(users) + 1, _bytes_of(gather), always=True)
    for module, nbytes in schedule.kept.items() if order.backward else ():
        hold(0, order.end(module), nbytes, always=True)
    for reduction in order.reductions:
        hold(order.at[reduction.pack], order.at[reduction.wait], _bytes_of(reduction.pack), always=True)
    found_waits = []
    following = [*(order.at[reduction.pack] for reduction in order.reductions[1:]), order.last]
    for reduction, wanted, sooner in zip(order.reductions, waits, following, strict=False):
        at, nbytes = order.at[reduction.wait], _bytes_of(reduction.pack)
        found_waits.append(next((each for each in (wanted, min(wanted, sooner)) if hold(at, each, nbytes)), at))
    found_waits = list(itertools.accumulate(reversed(found_waits), min))[::-1]  # the oldest is waited for first
    places = sorted({*order.arrivals, *launches, *filter(None, map(order.begin, schedule.modules))})
    found: list[int] = []
    for gather, wanted in zip(order.gathers, launches, strict=True):
        at = order.at[gather]
        for place in reversed(places):
            if max([wanted, *found[-1:]]) <= place < at:
                if not hold(place, at, _bytes_of(gather)):
                    break
                at = place
        found.append(at)
    return found, found_waits


def _leads(nbytes: Sequence[int], policy: PrefetchPolicy) -> list[int]:
    """For each gather, how many arrivals before its own it is launched; 0 where it is needed.

    Launched behind the arrival of gather j - 1, gather k is in flight with all from j on.
    """
    found: list[int] = []
    for k in range(len(nbytes)):
        if policy.kind == "bytes":
            wanted = _last_within(policy.amount or 0, nbytes[: k + 1])
        else:
            wanted = min(k + 1, 1 if policy.amount is None else policy.amount)
        found.append(wanted)
    return found


def _root_of(paths: Sequence[str], known: set[str]) -> str:
    """FQN of the sharded root, below which schedules name modules: it may be within other modules of the graph.

    The graph does not say where the root is: it is where most of the names are known.
    """
    parts = [path.split(".") for path in paths]
    roots = {"", *(".".join(path[:depth]) for path in parts for depth in range(len(path)))}
    return max(sorted(roots), key=lambda root: sum(_below(root, path) in known for path in paths))


def _below(root: str, path: str) -> str:
    return ROOT_NAME if path == root else path.removeprefix(f"{root}.")


def _last_within(limit: int, nbytes: Sequence[int]) -> int:
    """How many of these, counted from the last one, take no more than `limit` bytes together."""
    taken = itertools.accumulate(reversed(nbytes))
    return sum(1 for _ in itertools.takewhile(limit.__ge__, taken))


def _bytes_of(node: fx.Node) -> int:
    """Bytes of what a node gives; 0 if the graph does not know."""
    value = node.meta.get("val")
    try:
        return int(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0
    except (TypeError, RuntimeError, NotImplementedError):  # of a size that depends on data
        return 0


def _launch_earlier(gather: fx.Node, place: fx.Node) -> None:
    """Move a gather, and what it needs, before `place`, which is no later than its wait."""
    for node in _moved_with(gather) or ():
        if place < node or node in (gather, gather.args[0]):
            place.prepend(node)


def _finish_later(ends: Iterable[fx.Node], place: fx.Node) -> None:
    """Move the end of a reduction before `place`, but for what is behind it anyway."""
    for node in sorted(node for node in ends if node < place):
        place.prepend(node)


def _arrival_of(gather: fx.Node) -> fx.Node | None:
    """The node behind which all weights of a gather lie in their places, and its buffer is not needed any more."""
    wait = _wait_of(gather)
    unpacks = [node for node in wait.users if name_of(node) == _UNPACK] if wait is not None else []
    return max(node for unpack in unpacks for node in (unpack, *unpack.users)) if unpacks else wait


def _pack_of(gather: fx.Node) -> fx.Node | None:
    """The packing of a group's shards that a gather sends; None for a gather of another kind."""
    sent = gather.args[0]
    return sent if isinstance(sent, fx.Node) and name_of(sent) == _PACK_SHARDS else None


def _wait_of(collective: fx.Node) -> fx.Node | None:
    return next((user for user in collective.users if letter_of(user) == "w"), None)


def _moved_with(gather: fx.Node) -> list[fx.Node] | None:
    """A gather, the packing of what it sends, and the views of inputs for that; None if it needs more."""
    found, to_do = {gather}, list(gather.all_input_nodes)
    while to_do:
        node = to_do.pop()
        if node in found or node.op == "placeholder":
            continue
        if (
            node.op != "call_function"
            or letter_of(node)
            or (len(node.all_input_nodes) != 1 and node != _pack_of(gather))
        ):
            return None
        found.add(node)
        to_do += node.all_input_nodes
    return sorted(found)


def _launch_of(pack: fx.Node) -> fx.Node | None:
    """The collective that begins the reduction of packed gradients; None if there is none."""
    node = pack
    while len(node.users) == 1:
        (node,) = node.users
        if letter_of(node):
            return node
    return None


def _ends_of(wait: fx.Node) -> frozenset[fx.Node] | None:
    """A wait and all that comes of it, without the output; None if some of it computes, or is reduced."""
    found, to_do = {wait}, [wait]
    while to_do:
        for user in to_do.pop().users:
            if letter_of(user) == "m" or name_of(user) == _PACK_GRADIENTS:
                return None
            if user.op != "output" and user not in found:
                found.add(user)
                to_do.append(user)
    return frozenset(found)
