"""The guard: reads each graph that `torch.compile` makes of a sharded model, and warns if it is not as requested.

Under Inductor the guard runs as the last pass (`torch._inductor.config.post_grad_custom_post_pass`), after the user's
own pass if there is one. It is installed when a sharded model is first traced. It ignores graphs without gathers. Its
version is part of the key of the compile cache, like that of every pass. Graphs from the cache are not read again: the
guard has added a node that warns to each graph with a fault, when the graph was compiled. With other backends, graphs
are read when the model is compiled by `composable_shard.compile`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import uuid
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import fx

from .._plan.graph_schedule import NOTHING_SAID, GraphSchedule
from .._torch.compiler import failed_guards, graph_pass, last_graph_break, last_pass, set_last_pass
from .._torch.core import (
    compilation,
    current_compilation,
    forward_outputs,
    has_side_effect,
    run_while_tracing,
    tracing_context,
)
from ..errors import CompiledGraphWarning
from .graphs import GraphReport, faults, outputs_of, repeated_gathers, report_graph
from .overlap import place

_VERSION = "composable_shard guard 5"
_listeners: list[WatchedGraphs] = []
_forwards: weakref.WeakKeyDictionary[Any, GraphReport] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class FailedGuard:
    """Why a function was compiled again: a guard of its compiled code failed.

    Attributes:
        function: its name.
        place: the file and line in which it begins.
        guard: the guard as torch prints it, after the number of its compilation. A function that was compiled several
            times has a guard of each compilation.
    """

    function: str
    place: str
    guard: str

    def __str__(self) -> str:
        return f"{self.function} ({self.place}) was compiled again because a guard failed: {self.guard}"


class WatchedGraphs(list[GraphReport]):
    """The reports of graphs, in the order of compilation, and the reasons for recompilations."""

    def __init__(self) -> None:
        self._before = Counter({code: len(guards) for code, guards in failed_guards().items()})
        self._failed: list[FailedGuard] = []

    @property
    def failed_guards(self) -> Sequence[FailedGuard]:
        """The guards whose failure caused a recompilation, of sharded modules or not, grouped by function."""
        self.note_failures()
        return tuple(self._failed)

    def note_failures(self) -> None:
        """Add the guards that have failed since the last call."""
        for code, guards in failed_guards().items():
            seen = self._before[code] if self._before[code] <= len(guards) else 0  # else torch has cleared its list
            self._failed += [_failed(code, guard) for guard in guards[seen:]]
            self._before[code] = len(guards)


def _failed(code: CodeType, guard: str) -> FailedGuard:
    guard = guard.partition("\nUser stack trace:")[0]
    return FailedGuard(code.co_name, f"{code.co_filename}:{code.co_firstlineno}", " ".join(guard.split()))


@contextlib.contextmanager
def watch_graphs() -> Iterator[WatchedGraphs]:
    """Collect a report of each graph that is compiled within the context, and the failed guards that caused
    recompilations (`WatchedGraphs.failed_guards`).

    Within the context, graphs in a compile cache are compiled again, because the cache stores no graphs.
    """
    watched = WatchedGraphs()
    _listeners.append(watched)
    try:
        yield watched
    finally:
        watched.note_failures()
        _listeners[:] = [each for each in _listeners if each is not watched]  # by identity: lists may be equal


def read(graph: fx.Graph) -> list[str]:
    """Read one graph; returns texts that describe its faults."""
    report = report_graph(graph, forward_outputs(len(outputs_of(graph))))
    for watched in _listeners:
        watched.append(report)
        watched.note_failures()
    if (number := _number_now()) is not None:
        _reports.setdefault(number, []).append(report)
        while len(_reports) > _MOST_COMPILATIONS:
            _reports.pop(next(iter(_reports)))
    if not report.gathers:
        return []
    context = tracing_context()
    if report.direction == "forward":
        if context is not None:
            _forwards[context] = report
        return faults(report)
    forward = _forwards.get(context) if context is not None else None
    return repeated_gathers(forward, report) if forward is not None and report.direction == "backward" else []


def _say(text: str) -> None:
    warnings.warn(
        f"{text}. Results are correct, but the compiled step needs more memory or more communication than requested. "
        "A selective checkpointing policy, or another partitioner, can be the reason",
        CompiledGraphWarning,
        stacklevel=2,
    )


_library = torch.library.Library("composable_shard_guard", "DEF")  # type: ignore[no-untyped-call]
_library.define("warn(str text) -> ()")  # type: ignore[no-untyped-call]
_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _say(text)


_library.impl("warn", _say_once, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
has_side_effect(torch.ops.composable_shard_guard.warn.default)


def _mark(graph: fx.Graph, warnings: list[str]) -> None:
    """Make the graph itself warn, even if it is loaded from a cache."""
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        for text in warnings:
            graph.call_function(torch.ops.composable_shard_guard.warn.default, (text,))


def guard_pass(before: Any, places: bool = False) -> Any:
    """An Inductor pass that runs `before` (another pass or None), places communication if `places`, and then guards."""
    base: Any = graph_pass()
    version = f"{_VERSION}, {'places' if places else 'reads'}"

    class Guard(base):  # type: ignore[misc]
        chained = before
        kind = version

        def __call__(self, graph: fx.Graph) -> None:
            if before is not None:
                before(graph)
            if places:
                place(graph, _schedule_now())
            _mark(graph, read(graph))

        def __eq__(self, other: object) -> bool:  # models compiled in the same way share code, as equal layers do
            same = getattr(other, "kind", None) == version
            return isinstance(other, base) and same and getattr(other, "chained", self) == before

        def __hash__(self) -> int:
            return hash(version)

        def uuid(self) -> Any:
            now = f"{version}, {_schedule_now()}" if places else version
            now += f", watched {uuid.uuid4()}" if _listeners else ""
            return (now, before.uuid()) if isinstance(before, base) else (now, before)

    return Guard()


def _is_guard(last_pass: Any) -> bool:
    return hasattr(last_pass, "chained")


def install() -> None:
    """Make Inductor run the guard after its own passes and after the user's pass, if there is one."""
    before = last_pass()
    if not _is_guard(before):
        set_last_pass(guard_pass(before))


def guarded(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the compiler of an AOTAutograd backend: place the communication and run the guard before it compiles."""

    @functools.wraps(compiler)
    def compile_graph(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        place(module.graph, _schedule_now())
        module.recompile()
        for text in read(module.graph):
            _say(text)
        return compiler(module, inputs, **options)

    return compile_graph


# ---- graphs that break

_begun_in = ""


_schedules: weakref.WeakKeyDictionary[object, GraphSchedule] = weakref.WeakKeyDictionary()  # by compilation


def _schedule_now() -> GraphSchedule:
    """The schedule of the model that is being compiled."""
    now = compilation()
    return NOTHING_SAID if now is None else _schedules.get(now, NOTHING_SAID)


_count = itertools.count()
_numbers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()  # by compilation
_reports: dict[int, list[GraphReport]] = {}  # by number of compilation, for the latest compilations
_MOST_COMPILATIONS = 256


def _number_now() -> int | None:
    """The number of the current compilation; None if no sharded module was traced in it."""
    now = compilation()
    return None if now is None else _numbers.get(now)


def graphs_compiled(number: int) -> Sequence[GraphReport]:
    """The graphs that the guard has read in a compilation, by the number that `begin_trace` returned.

    Empty if they came from a cache, or if many others were compiled since.
    """
    return _reports.get(number, ())


@run_while_tracing
def begin_trace(schedule: str) -> int:
    """Begin to trace a sharded module. The graphs of a compilation follow the schedule of its outermost module.

    Args:
        schedule: text of its `GraphSchedule`.

    Returns:
        the number of the compilation; -1 if nothing is being compiled.
    """
    global _begun_in
    _begun_in = current_compilation()
    install()
    if (now := compilation()) is None:
        return -1
    _schedules.setdefault(now, GraphSchedule.of_text(schedule))
    return _numbers.setdefault(now, next(_count))


@run_while_tracing
def same_graph() -> bool:
    """Whether the current trace belongs to the same graph in which the trace of its module began."""
    return current_compilation() == _begun_in


def say_broken(what: str) -> None:
    """Warn that the graph broke within a sharded module; `what` names it."""
    _say_once(
        f"torch.compile broke the graph inside a sharded {what} ({last_graph_break() or 'reason unknown'}): its "
        "gathered weights become outputs of the graph and stay in memory until backward. Pass fullgraph=True to turn "
        "the graph break into an error that shows its location"
    )
