"""Describes a compiled graph by its nodes: a sequence of letters, its gathers, and the tensors saved for backward.

A sequence has a letter for each relevant node, in the order of the graph: G all-gather, R reduce-scatter, A
all-reduce, X all-to-all, w a wait for one of them, m a matrix product, k gradients kept for a later backward, s reduced
gradients handed over to `.grad`.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._plan.course import CourseStep
from .._plan.schedule import ROOT_NAME, Kind
from .._torch.core import size_hint
from .operators import is_sent

GATHER = "composable_shard.all_gather_into_tensor"
REDUCES = frozenset(("composable_shard.reduce_scatter_tensor", "composable_shard.all_reduce"))
WAITS = {"composable_shard.wait_weights": Kind.WAIT, "composable_shard.wait_gradients": Kind.REDUCED}
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
    "composable_shard.hand_over": "s",
    **dict.fromkeys(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "mkldnn._linear_pointwise"), "m"),
}
# Operators that only move or cast data: their results are still the gathered weight.
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
    """The letter of a node in a sequence; empty if it has none."""
    name = name_of(node)
    if name in WAITS and isinstance(launch := node.args[0], fx.Node) and not letter_of(launch):
        return ""  # a copy on a single rank, without communication
    return _LETTERS.get(name, "")


def name_of(node: fx.Node) -> str:
    """Name of the operator without its overload, for example ``aten.mm``; empty for other nodes."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).rpartition(".")[0]
    return ""


def computes(node: fx.Node) -> bool:
    """Whether a node computes, and does not just move data or communicate."""
    name = name_of(node)
    return bool(name) and name not in _MOVES and not name.startswith(_COMMUNICATES)


def sequence(graph: fx.Graph) -> str:
    """The graph as a sequence of letters, in order; see `GraphReport`."""
    return "".join(letter_of(node) for node in graph.nodes)


@dataclass(frozen=True)
class Gather:
    """An all-gather of a group's weights in a graph.

    Attributes:
        fqn: the module whose weights are gathered.
        again: whether backward should gather again.
        saved: bytes of the gathered weights that are saved for backward; should be 0 if `again` is set.
    """

    fqn: str
    again: bool
    saved: int


@dataclass(frozen=True)
class GraphReport:
    """A report on one compiled graph.

    Attributes:
        direction: ``forward``, ``backward`` or ``inference``.
        sequence: its operators as letters, in order. G launches an all-gather, R a reduce-scatter, A an all-reduce, X
            an all-to-all; w waits for one of them; m is a matrix product; k keeps gradients for a later reduction, s
            hands reduced gradients over to `.grad`. Other operators have no letter.
        gathers: its all-gathers of weights, in order.
        saved: bytes of the tensors that a forward graph saves for backward and that are not its inputs.
        course: its launches, waits and compute in order, by the paths of modules in the graph. The shares of compute
            are numbers of multiplications.
    """

    direction: str
    sequence: str
    gathers: tuple[Gather, ...]
    saved: int
    course: tuple[CourseStep, ...] = ()

    def __str__(self) -> str:
        return f"{self.direction} {self.sequence}"


def report_graph(graph: fx.Graph, outputs: int | None) -> GraphReport:
    """Report on a graph in the form that AOTAutograd passes to a compiler.

    Args:
        graph: a forward or backward graph, after the partitioner.
        outputs: how many outputs of a forward graph precede those that are saved for backward; None if there is no
            backward.
    """
    backward = is_backward(graph)
    direction = "backward" if backward else "inference" if outputs is None else "forward"
    saved = _saved(graph, outputs) if outputs is not None and not backward else []
    gathers = [n for n in graph.nodes if name_of(n) == GATHER]
    gathered = tuple(_gather(node, saved) for node in gathers)
    return GraphReport(direction, sequence(graph), gathered, sum(map(bytes_of, saved)), course_in(graph))


def outputs_of(graph: fx.Graph) -> list[Any]:
    """The outputs of a graph: nodes and constants."""
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
        (node, *_) = node.all_input_nodes  # the viewed tensor; other inputs of a view are sizes
    return node.op == "placeholder"


def bytes_of(node: fx.Node) -> int:
    """Bytes of the tensors that a node returns, with the sizes at the time when the graph was made."""
    return sum(map(_nbytes, _tensors_of(node)))


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(map(size_hint, tensor.shape)) * tensor.itemsize


def is_backward(graph: fx.Graph) -> bool:
    """Whether this is the graph of a backward."""
    return any(node.op == "placeholder" and "tangents" in node.name for node in graph.nodes)


def module_of(node: fx.Node) -> str:
    """FQN of the module whose forward created a node."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return _fqn(next(reversed(list(stack.values())))[0] if stack else "")


class Names:
    """Maps paths of modules in a graph to the names in a schedule.

    The root of the schedule's names may be nested in other modules of the graph, and the graph does not contain its
    path. The path under which most modules have a name in the schedule is taken as the root.

    Args:
        communicate: paths of the modules that gather or reduce, see `module_of`.
        scheduled: the names in the schedule.
    """

    def __init__(self, communicate: Iterable[str], scheduled: Set[str]) -> None:
        paths = list(communicate)
        parts = [path.split(".") for path in paths]
        roots = {"", *(".".join(path[:depth]) for path in parts for depth in range(len(path)))}
        self._root = max(sorted(roots), key=lambda root: sum(_below(root, path) in scheduled for path in paths))
        self._known = {*scheduled, *(_below(self._root, path) for path in paths)}

    def of(self, path: str) -> str:
        """The innermost named module that contains, or is, the module with this path."""
        path = _below(self._root, path)
        while path and path not in self._known:
            path = path.rpartition(".")[0]
        return path or ROOT_NAME


def _below(root: str, path: str) -> str:
    return ROOT_NAME if path == root else path.removeprefix(f"{root}.")


def takes_gradients(node: fx.Node) -> bool:
    """Whether a node launches the reduction of a group's gradients."""
    return name_of(node) in REDUCES and not isinstance(node.args[0], fx.Node)


def course_in(graph: fx.Graph) -> tuple[CourseStep, ...]:
    """The course of a graph, see `GraphReport`."""
    read_last: dict[fx.Node, list[str]] = {}  # by node, the modules whose weights no later node reads
    for gather in [node for node in graph.nodes if name_of(node) == GATHER]:
        read_last.setdefault(_last_read(gather), []).append(module_of(gather))
    compute = Kind.BACKWARD if is_backward(graph) else Kind.FORWARD
    course: list[CourseStep] = []
    for node in graph.nodes:
        step = _step(node, compute)
        if step is not None and course and step.kind is compute and course[-1][:2] == step[:2]:
            course[-1] = step._replace(share=course[-1].share + step.share)
        elif step is not None:
            course.append(step)
        if node.op != "output":  # weights that are saved for backward are not resharded
            course += [CourseStep(Kind.RESHARD, module) for module in read_last.get(node, ())]
    return tuple(course)


def _step(node: fx.Node, compute: Kind) -> CourseStep | None:
    """The step of a node in the course of its graph; None if it has none."""
    name = name_of(node)
    if name == GATHER:
        return _launch(Kind.UNSHARD, node, map(_weights_in, node.users))
    if takes_gradients(node):
        return _launch(Kind.REDUCE, node, map(_tensors_of, _nodes_in(node.args[0])))
    if name in WAITS and letter_of(node):
        launch = node
        while launch.args and isinstance(launch.args[0], fx.Node):
            launch = launch.args[0]
        return CourseStep(WAITS[name], module_of(launch))
    return CourseStep(compute, module_of(node), _multiplications(node)) if computes(node) else None


def _last_read(gather: fx.Node) -> fx.Node:
    """The last node that reads the weights of a gather."""
    return max([gather, *(user for node in weights_of(gather) for user in node.users)])


def _launch(kind: Kind, node: fx.Node, communicated: Iterable[Sequence[torch.Tensor]]) -> CourseStep:
    tensors = [tensor for each in communicated for tensor in each]
    return CourseStep(kind, module_of(node), 0.0, sum(map(_nbytes, tensors)), _dtypes_of(tensors))


def _nodes_in(argument: Any) -> list[fx.Node]:
    return [node for node in argument if isinstance(node, fx.Node)]


def _weights_in(wait: fx.Node) -> list[torch.Tensor]:
    """The gathered tensors among the results of a wait: without metadata, which is not sent, and without the mark."""
    *tensors, _ = _tensors_of(wait)
    sent = is_sent(str(wait.args[-1]))
    return [tensor for tensor, gathered in zip(tensors, sent, strict=True) if gathered]


def _dtypes_of(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """The distinct dtypes, as text."""
    return tuple(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))


def _multiplications(node: fx.Node) -> float:
    """The approximate number of multiplications of a node: exact for matrix products, else one per output element."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 1.0
    matrix = node.args[0 if "linear" in name_of(node) else -2] if letter_of(node) == "m" else None
    inner = matrix.meta["val"].shape[-1] if isinstance(matrix, fx.Node) and "val" in matrix.meta else 1
    return float(math.prod(map(size_hint, (*value.shape, inner))))


def _gather(node: fx.Node, saved: list[fx.Node]) -> Gather:
    policy = str(node.meta.get("recompute"))
    kept = set(weights_of(node)) & set(saved)
    return Gather(module_of(node), "RECOMPUTE" in policy, sum(map(bytes_of, kept)))


def _fqn(path: str) -> str:
    """``L['self'].blocks.0`` -> ``blocks.0``."""
    return path.partition(".")[2].replace("_orig_mod.", "") or ROOT_NAME


def weights_of(gather: fx.Node) -> Iterator[fx.Node]:
    """All nodes that hold the gathered weights."""
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
    """Texts that describe gathered weights which a forward graph saves although backward gathers them again."""
    return [
        f"{gather.fqn}: its weights should be gathered again in backward, but the compiled forward keeps "
        f"{gather.saved} bytes of them"
        for gather in forward.gathers
        if gather.again and gather.saved
    ]


def repeated_gathers(forward: GraphReport, backward: GraphReport) -> list[str]:
    """Texts that describe gathers of a backward graph that were not requested."""
    wanted = Counter(gather.fqn for gather in forward.gathers if gather.again)
    counts = Counter(gather.fqn for gather in backward.gathers)
    return [
        f"{fqn}: the compiled backward gathers its weights {counts[fqn]} times, expected {wanted[fqn]}"
        for fqn in counts
        if counts[fqn] > wanted[fqn]
    ]
