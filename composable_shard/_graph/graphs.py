"""What a compiled graph does, read from its nodes: its sequence as short text, its gathers, what it saves for backward.

A sequence has a letter for each node that counts, in the order of the graph: G all-gather, R reduce-scatter, A
all-reduce, X all-to-all, w a wait for one of them, m a matrix product, k gradients kept for a later backward.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._plan.schedule import ROOT_NAME
from .._torch.core import size_hint

GATHER = "composable_shard.all_gather_into_tensor"
REDUCES = frozenset(("composable_shard.reduce_scatter_tensor", "composable_shard.all_reduce"))
WAITS = frozenset(("composable_shard.wait_weights", "composable_shard.wait_gradients"))
_LETTERS = {
    GATHER: "G",
    "composable_shard.reduce_scatter_tensor": "R",
    "composable_shard.all_reduce": "A",
    **dict.fromkeys(WAITS, "w"),
    "_c10d_functional.all_gather_into_tensor": "G",
    "_c10d_functional.reduce_scatter_tensor": "R",
    "_c10d_functional.all_reduce": "A",
    "_c10d_functional.all_reduce_": "A",
    "_c10d_functional.all_to_all_single": "X",
    "_c10d_functional.wait_tensor": "w",
    "composable_shard.keep": "k",
    **dict.fromkeys(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "mkldnn._linear_pointwise"), "m"),
}
# What only moves or casts data: its result is still the gathered weight.
_MOVES = frozenset(
    f"aten.{name}"
    for name in [
        "view",
        "view_as_complex",
        "reshape",
        "_unsafe_view",
        "alias",
        "detach",
        "clone",
        "t",
        "transpose",
        "permute",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "split_with_sizes_copy",
        "as_strided",
        "expand",
        "squeeze",
        "unsqueeze",
        "narrow",
        "cat",
        "_to_copy",
    ]
) | {"_c10d_functional.wait_tensor", "composable_shard.wait_weights", "prims.convert_element_type", "prims.view_of"}
_COMMUNICATES = ("_c10d_functional.", "composable_shard.")


def letter_of(node: fx.Node) -> str:
    """The letter of a node in a sequence; empty if it does not count."""
    name = name_of(node)
    if name in WAITS and isinstance(launch := node.args[0], fx.Node) and not letter_of(launch):
        return ""  # one rank has copied, and nothing was communicated
    return _LETTERS.get(name, "")


def name_of(node: fx.Node) -> str:
    """Name of the operator without its overload, as ``aten.mm``; empty for what is no operator."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).rpartition(".")[0]
    return ""


def computes(node: fx.Node) -> bool:
    """Whether a node computes, and does not only move data or communicate."""
    name = name_of(node)
    return bool(name) and name not in _MOVES and not name.startswith(_COMMUNICATES)


def sequence(graph: fx.Graph) -> str:
    """The graph as a sequence of letters."""
    return "".join(letter_of(node) for node in graph.nodes)


@dataclass(frozen=True)
class Gather:
    """An all-gather of the weights of a group, in a graph.

    Attributes:
        fqn: the module that gathers.
        again: whether backward shall gather again.
        saved: what of the gathered weights is saved for backward all the same, in bytes.
    """

    fqn: str
    again: bool
    saved: int


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph.

    Attributes:
        direction: ``forward``, ``backward`` or ``inference``.
        sequence: its letters.
        gathers: its all-gathers of weights, in order.
        saved: bytes of the tensors that a forward graph saves for backward and that are not its inputs.
    """

    direction: str
    sequence: str
    gathers: tuple[Gather, ...]
    saved: int

    def __str__(self) -> str:
        return f"{self.direction} {self.sequence}"


def report_graph(graph: fx.Graph, outputs: int | None) -> GraphReport:
    """Read a graph as AOTAutograd hands it to a compiler.

    Args:
        graph: forward or backward, after the partitioner.
        outputs: how many outputs of a forward graph come before those that are saved for backward; None if there is no
            backward.
    """
    backward = is_backward(graph)
    direction = "backward" if backward else "inference" if outputs is None else "forward"
    saved = _saved(graph, outputs) if outputs is not None and not backward else []
    gathers = [n for n in graph.nodes if name_of(n) == GATHER]
    gathered = tuple(_gather(node, saved) for node in gathers)
    return GraphReport(direction, sequence(graph), gathered, sum(map(bytes_of, saved)))


def outputs_of(graph: fx.Graph) -> list[Any]:
    """What a graph returns: nodes and constants."""
    last = next(node for node in reversed(graph.nodes) if node.op == "output")
    listed = last.args[0]
    assert isinstance(listed, (list, tuple))
    return list(listed)


def _saved(graph: fx.Graph, outputs: int) -> list[fx.Node]:
    behind = dict.fromkeys(outputs_of(graph)[outputs:])
    return [n for n in behind if isinstance(n, fx.Node) and not _is_input(n)]


def _is_input(node: fx.Node) -> bool:
    """Whether a node is an input of its graph, or a view of one."""
    while name_of(node) in ("aten.view", "aten.detach", "aten.alias"):
        (node, *_) = node.all_input_nodes  # behind it may stand sizes
    return node.op == "placeholder"


def bytes_of(node: fx.Node) -> int:
    """Bytes of the tensors that a node gives, of sizes as they were when the graph was made."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    sizes = [math.prod(map(size_hint, t.shape)) * t.itemsize for t in tensors if isinstance(t, torch.Tensor)]
    return sum(sizes)


def is_backward(graph: fx.Graph) -> bool:
    """Whether it is the graph of a backward."""
    return any(node.op == "placeholder" and "tangents" in node.name for node in graph.nodes)


def module_of(node: fx.Node) -> str:
    """FQN of the module whose forward a node comes from."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return _fqn(next(reversed(list(stack.values())))[0] if stack else "")


def _gather(node: fx.Node, saved: list[fx.Node]) -> Gather:
    policy = str(node.meta.get("recompute"))
    kept = set(weights_of(node)) & set(saved)
    return Gather(module_of(node), "RECOMPUTE" in policy, sum(map(bytes_of, kept)))


def _fqn(path: str) -> str:
    """``L['self'].blocks.0`` -> ``blocks.0``."""
    return path.partition(".")[2].replace("_orig_mod.", "") or ROOT_NAME


def weights_of(gather: fx.Node) -> Iterator[fx.Node]:
    """All nodes that hold what was gathered."""
    to_do, seen = [gather], {gather}
    while to_do:
        node = to_do.pop()
        yield node
        for user in node.users:
            moves = name_of(user) in _MOVES or user.target is operator.getitem
            if moves and user not in seen:
                seen.add(user)
                to_do.append(user)


def faults(forward: GraphReport) -> list[str]:
    """In words, what of the promise a forward graph does not hold."""
    return [
        f"{gather.fqn}: its weights should be gathered again in backward, but the compiled forward keeps "
        f"{gather.saved} bytes of them"
        for gather in forward.gathers
        if gather.again and gather.saved
    ]


def repeated_gathers(forward: GraphReport, backward: GraphReport) -> list[str]:
    """In words, what a backward graph gathers that it should not."""
    wanted = Counter(gather.fqn for gather in forward.gathers if gather.again)
    counts = Counter(gather.fqn for gather in backward.gathers)
    return [
        f"{fqn}: is gathered {counts[fqn]} times in the compiled backward, {wanted[fqn]} times expected"
        for fqn in counts
        if counts[fqn] > wanted[fqn]
    ]
