"""Where a compiled graph launches its communication and where it waits, so that both overlap with compute.

AOTAutograd hands a graph over with each gather launched where it is needed, and each reduction waited for at once. Only
nodes are moved, never data: the graph computes the same. The schedule is that of eager: gathers as far ahead as the
policy says, one if it says nothing, and one reduction in flight while the next group's backward runs. Every rank has
the same graph, so collectives keep one order.

    forward     GwmGwmGwm        becomes    GwGmwGmwm, two ahead GGwGmwmwm
    backward    mGwmRwGwmRwmRw   becomes    GmwGmRwmRwmRww
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ._graphs import is_backward, letter_of, module_of, name_of
from ._policies import PrefetchPolicy
from ._schedule import ROOT_NAME

_PACK_SHARDS, _UNPACK = "composable_shard.pack", "composable_shard.unpack"
_PACK_GRADIENTS = "composable_shard.pack_gradients"


ONE_AHEAD = PrefetchPolicy.depth(1)

Listed = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Ahead:
    """What is to be gathered when a module begins, in the place of what a policy says of it.

    Attributes:
        forward, backward: by FQN of a module, those of the modules to gather when its forward, or backward, begins.
        free: FQNs of modules that the policy gathers ahead nevertheless, for no list can name them.
    """

    forward: Listed = field(default_factory=dict)
    backward: Listed = field(default_factory=dict)
    free: Sequence[str] = ()

    def to_text(self) -> str:
        """As text, which compiled code can be guarded by; empty if nothing is listed."""
        if not self.forward and not self.backward:
            return ""
        return json.dumps([dict(self.forward), dict(self.backward), list(self.free)], sort_keys=True)

    @classmethod
    def of_text(cls, text: str) -> Ahead:
        """The inverse of `to_text`."""
        return cls(*json.loads(text)) if text else cls()


NOTHING_LISTED = Ahead()


def place(
    graph: fx.Graph,
    policy: PrefetchPolicy = ONE_AHEAD,
    budget: int | None = None,
    ahead: Ahead = NOTHING_LISTED,
) -> None:
    """Launch gathers ahead, and wait for reductions behind the launch of the next one.

    Args:
        graph: of forward or of backward.
        policy: how far ahead; `auto` is one ahead, for a graph knows no times.
        budget: the most bytes that gathers in flight and the weights that have arrived last may take, and the most that
            reductions in flight may, with what they send and fill; None for no limit.
        ahead: what users have listed, or what follows from measured times; it goes before the policy.
    """
    gathers = [node for node in graph.nodes if letter_of(node) == "G" and _pack_of(node) is not None]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    places = [inputs[-1] if inputs else None, *map(_arrival_of, gathers)]
    nbytes = [_bytes_of(gather) for gather in gathers]
    leads = _leads(nbytes, policy)
    if ahead != NOTHING_LISTED:
        listed = ahead.backward if is_backward(graph) else ahead.forward
        names = _below_root([module_of(gather) for gather in gathers], ahead)
        leads = _listed_leads(names, leads, listed, ahead.free)
    leads = _within(budget, nbytes, leads)
    last: fx.Node | None = None
    for at, (gather, lead) in enumerate(zip(gathers, leads, strict=True)):
        behind = places[at + 1 - lead] if lead else None
        if behind is not None and last is not None and behind < last:
            behind = last  # gathers keep their order
        last = _launch_earlier(gather, behind) or last
    launches = [_launch_of(node) for node in graph.nodes if name_of(node) == _PACK_GRADIENTS]
    for reduction, following in itertools.pairwise(launches):
        if reduction is None or following is None:
            continue
        if budget is None or _bytes_in_flight(reduction) + _bytes_in_flight(following) <= budget:
            _finish_later(_wait_of(reduction), following)


def _bytes_in_flight(reduction: fx.Node) -> int:
    """Bytes of what a reduction sends and of what it fills."""
    sent = reduction.args[0]
    return _bytes_of(reduction) + (_bytes_of(sent) if isinstance(sent, fx.Node) else 0)


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


def _within(budget: int | None, nbytes: Sequence[int], leads: Sequence[int]) -> list[int]:
    """The same, as far as the budget allows."""
    if budget is None:
        return list(leads)
    found: list[int] = []
    for k, lead in enumerate(leads):
        fitting = _last_within(budget, nbytes[: k + 1])  # the weights that have arrived last are one of them
        found.append(lead if fitting == k + 1 else min(lead, max(0, fitting - 1)))
    return found


def _below_root(names: Sequence[str], ahead: Ahead) -> list[str]:
    """FQNs of modules as lists have them: below the sharded root, which may be within other modules of the graph.

    The graph does not say where the root is: it is where most of the names are known.
    """
    listed = [*ahead.forward.items(), *ahead.backward.items()]
    known = {*ahead.free, *(name for at, those in listed for name in (at, *those))} - {ROOT_NAME}
    parts = [name.split(".") for name in names]
    roots = {"", *(".".join(path[:depth]) for path in parts for depth in range(len(path)))}

    def below(root: str) -> list[str]:
        return [ROOT_NAME if name == root else name.removeprefix(f"{root}.") for name in names]

    return max(map(below, sorted(roots)), key=lambda found: sum(name in known for name in found))


def _listed_leads(names: Sequence[str], leads: Sequence[int], listed: Listed, free: Sequence[str]) -> list[int]:
    """The same, where modules have lists: what these name, and nothing else, is launched when such a module begins.

    Args:
        names: FQNs of the modules that gather, in order.
        leads: by the policy.
        listed: by FQN of a module, whom it gathers.
        free: FQNs for which the policy holds always.
    """
    found = []
    for k, name in enumerate(names):
        begins = [i for i in range(k) if name in listed.get(names[i], ())]
        if ROOT_NAME not in names and name in listed.get(ROOT_NAME, ()):
            begins.append(-1)  # the root has its weights, so it begins with the graph
        by_policy = k - leads[k]
        of = names[by_policy] if by_policy >= 0 else ROOT_NAME
        if name in free or of not in listed:
            begins.append(by_policy)
        found.append(k - min(begins, default=k))
    return found


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


def _launch_earlier(gather: fx.Node, place: fx.Node | None) -> fx.Node | None:
    """Move a gather, and the packing of what it sends, behind `place`, if that comes before it; returns the gather."""
    pack = _pack_of(gather)
    if place is None or pack is None or gather < place:
        return None
    for node in _with_inputs([pack, gather], place) or ():
        if node is not place.next:
            place.append(node)
        place = node
    return gather


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


def _with_inputs(nodes: Sequence[fx.Node], place: fx.Node) -> list[fx.Node] | None:
    """These nodes and the views of inputs that they need and that come after `place`; None if they need more."""
    found, to_do = set(nodes), [each for node in nodes for each in node.all_input_nodes]
    while to_do:
        node = to_do.pop()
        if node in found or node <= place:
            continue
        if node.op != "call_function" or letter_of(node) or len(node.all_input_nodes) != 1:
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


def _finish_later(wait: fx.Node | None, place: fx.Node) -> None:
    """Move a wait, and all that comes of what it waits for, behind `place`; but no compute."""
    found: set[fx.Node] = set() if wait is None else {wait}
    to_do = list(found)
    while to_do:
        for user in to_do.pop().users:
            if letter_of(user) == "m" or user is place:
                return
            if user.op != "output" and user not in found:
                found.add(user)
                to_do.append(user)
    for node in sorted((node for node in found if node < place), reverse=True):
        place.append(node)
