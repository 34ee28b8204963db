"""Compare a compiled step with its plan: its collectives as a table, its course and memory as a figure, warnings."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from composable_shard._graph.graphs import GraphReport, Names
from composable_shard._graph.guard import graphs_compiled
from composable_shard._module.state import states_below
from composable_shard._module.status import make_plan
from composable_shard._plan.costs import Times
from composable_shard._plan.course import (
    COMPUTE,
    LAUNCHES,
    Course,
    CourseStep,
    Flight,
    by_module,
    exposed,
    flights_of,
    live_bytes,
    sequence_of,
    spans_of,
)
from composable_shard._plan.plan import ShardPlan
from composable_shard._plan.schedule import NO_GRAD, ROOT_NAME, Kind
from composable_shard._plan.text import table
from composable_shard.errors import CompiledGraphWarning, ShardConfigStateError, ShardConfigValueError
from composable_shard.report._plots import MIB, figure

_DIRECTIONS = ("forward", "backward")
_COLORS = {"compute": "#1f3d57", "gathers": "#9cc3e0", "reductions": "#e3a15f", "waits": "#d1495b"}
_PLANNED = "#6b7280"


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step and the plan that it follows. Its `str` is a table of its collectives.

    Attributes:
        compiled: the courses of the forward graph and of the backward graph. The latter is empty without a backward.
        planned: the courses of the plan.
        times: by module, the seconds of one use, if the plan knows them. Times of compute are distributed by the number
            of multiplications.
    """

    compiled: tuple[Course, Course]
    planned: tuple[Course, Course]
    times: Mapping[str, Times] | None

    @property
    def exposed(self) -> tuple[str, ...]:
        """The collectives that are exposed in the graphs but hidden in the plan, one sentence each."""
        return tuple(
            _exposure(direction, mine, plan)
            for direction, compiled, planned in self._directions()
            for mine, plan in exposed(compiled, planned)
        )

    def _directions(self) -> Iterator[tuple[str, list[Flight], list[Flight]]]:
        for direction, compiled, planned in zip(_DIRECTIONS, self.compiled, self.planned, strict=True):
            if compiled:
                yield direction, list(flights_of(compiled, self.times)), list(flights_of(planned, self.times))

    def __str__(self) -> str:
        peak, planned_peak = (max(live_bytes([*one, *two]), default=0) for one, two in (self.compiled, self.planned))
        lines = [f"peak bytes of weights and of gradients in flight: {peak:,}; planned {planned_peak:,}"]
        for direction, compiled, planned in self._directions():
            at = _DIRECTIONS.index(direction)
            lines.append(f"{direction}: {sequence_of(self.compiled[at])}; planned {sequence_of(self.planned[at])}")
            lines += [f"  {line}" for line in table(_rows(compiled, planned), left=(0, 2, 3, 4))]
        return "\n".join([*lines, *(f"exposed: {text}" for text in self.exposed)])

    def draw(self, path: str | Path) -> None:
        """Draw the compiled step and the plan over time, above the live bytes.

        If the plan has no times, every launch, wait and piece of compute is drawn with the same length.

        Args:
            path: the picture to write. Its extension selects the format.

        Raises:
            ImportError: matplotlib is missing.
        """
        sides = {"compiled": [*self.compiled[0], *self.compiled[1]], "planned": [*self.planned[0], *self.planned[1]]}
        with figure(path, width=10.0, height=7.0, rows=2) as (above, below):
            _draw_tracks(above, sides, self.times)
            _draw_bytes(below, sides, self.times)


def compiled_step(model: nn.Module) -> CompiledStep:
    """Compare the last compiled step of a sharded model with its plan.

    Shows gathers, reductions, waits and compute in the order of the graphs, the compute that hides each collective, and
    the live bytes.

    Args:
        model: compiled by `composable_shard.compile`, or under Inductor.

    Returns:
        the compiled step. Print it, or call its method `draw`.

    Raises:
        ShardConfigValueError: the model has no sharded module.
        ShardConfigStateError: it has run no compiled graph with communication, or its graphs are not known.

    Warns:
        CompiledGraphWarning: a collective is exposed in the graphs but hidden in the plan.
    """
    states = states_below(model)
    if not states:
        raise ShardConfigValueError(f"model: {type(model).__name__} contains no sharded module; call fully_shard first")
    number = next((state.compiled_as for state in states if state.compiled_as >= 0), None)
    if number is None:
        raise ShardConfigStateError(
            "compiled_step: the model has run no compiled graph that gathers. Run one step of cs.compile(model) first. "
            "With block.compile(), the engine gathers outside the graphs; use cs.last_record(model) instead"
        )
    reports = graphs_compiled(number)
    if not reports:
        raise ShardConfigStateError(
            "compiled_step: the graphs of this model are not known: they came from a compile cache, the backend is "
            "neither Inductor nor one of cs.compile, or many other graphs were compiled since. Use "
            "report.watch_graphs() around the first compiled step"
        )
    step = step_of(reports, make_plan(model))
    if step.exposed:
        first, *others = step.exposed
        text = f"{first} (and {len(others)} more; print the compiled step to list them)" if others else first
        warnings.warn(
            f"{text}. Results are correct, but the step takes longer. Compile with cs.compile, which places "
            "communication as planned",
            CompiledGraphWarning,
            stacklevel=2,
        )
    return step


def step_of(reports: Sequence[GraphReport], plan: ShardPlan) -> CompiledStep:
    """Compare the last of these graphs with a plan."""
    backward = next((report.course for report in reversed(reports) if report.direction == "backward"), ())
    forward = next((report for report in reversed(reports) if report.direction != "backward"), None)
    if forward is not None and forward.direction == "inference":
        plan, backward = plan.in_phase(NO_GRAD), ()
    times = plan.times()
    if times is not None:
        times = by_module(times)
    planned = plan.courses()
    both = (() if forward is None else forward.course, backward)
    names = Names(
        (step.module for course in both for step in course if step.kind in LAUNCHES),
        {step.module for course in planned for step in course},
    )
    compiled = tuple(_named(course, names, other, times) for course, other in zip(both, planned, strict=True))
    return CompiledStep(_closed(*compiled), planned, times)


def _named(course: Course, names: Names, planned: Course, times: Mapping[str, Times] | None) -> list[CourseStep]:
    """A graph's course with the plan's names of modules. The compute of each module is scaled to that of the plan."""
    steps: list[CourseStep] = []
    for step in course:
        step = step._replace(module=names.of(step.module))
        if steps and step.kind in COMPUTE and steps[-1][:2] == step[:2]:
            step = step._replace(share=step.share + steps.pop().share)
        steps.append(step)
    whole, uses = _computes(steps), _computes(planned)
    steps = [
        step._replace(share=step.share / whole[step.module] * (uses[step.module] or 1)) if step.share else step
        for step in steps
    ]
    return steps if times is None else _root_first(steps)


def _computes(course: Course) -> Counter[str]:
    shares: Counter[str] = Counter()
    for step in course:
        shares[step.module] += step.share  # type: ignore[assignment]
    return shares


def _root_first(course: list[CourseStep]) -> list[CourseStep]:
    """Move all compute of the root to its beginning, where a plan with times counts it."""
    of_root = [step for step in course if step.module == ROOT_NAME and step.kind in COMPUTE]
    others = [step for step in course if step not in of_root]
    if not of_root:
        return course
    begins = (at for at, step in enumerate(others) if step.module != ROOT_NAME and step.kind not in LAUNCHES)
    at = next(begins, len(others))
    return [*others[:at], of_root[0]._replace(share=sum(step.share for step in of_root)), *others[at:]]


def _closed(forward: list[CourseStep], backward: list[CourseStep]) -> tuple[Course, Course]:
    """Add the reshards of weights that forward saves: after the last compute of their module."""
    kept = Counter(step.module for step in (*forward, *backward) if step.kind is Kind.UNSHARD)
    kept.subtract(step.module for step in (*forward, *backward) if step.kind is Kind.RESHARD)
    for module in (module for module, number in kept.items() if number > 0):
        computes = [at for at, step in enumerate(backward) if step.module == module and step.kind in COMPUTE]
        at = len(backward) if module == ROOT_NAME or not computes else computes[-1] + 1
        backward[at:at] = [CourseStep(Kind.RESHARD, module)] * kept[module]
    return forward, backward


def _exposure(direction: str, mine: Flight, plan: Flight) -> str:
    behind = ", ".join(plan.behind) or "nothing"
    if mine.waited is not None and plan.waited is not None:
        waits = f"exposed for {_ms(mine.waited)} ms in the compiled {direction}, {_ms(plan.waited)} ms planned"
    else:
        waits = f"no compute overlaps with it in the compiled {direction}"
    return f"{mine}: {waits}; the plan hides it behind {behind}"


def _rows(compiled: Iterable[Flight], planned: Iterable[Flight]) -> Iterator[tuple[str, ...]]:
    """The rows of a table of collectives, its header first."""
    mine, plans = {each.key: each for each in compiled}, {each.key: each for each in planned}
    timed = any(each.seconds is not None for each in (*mine.values(), *plans.values()))
    head = ("", "bytes", "dtype", "behind", "planned behind")
    yield (*head, "takes ms", "waited ms", "planned ms") if timed else head
    for key in {**mine, **plans}:
        one, two = mine.get(key), plans.get(key)
        either = one or two
        assert either is not None
        nbytes, dtypes = (f"{one.nbytes:,}", ", ".join(one.dtypes)) if one else ("-", "-")
        row = str(either), nbytes, dtypes, _behind(one), _behind(two)
        seconds = either.seconds, one and one.waited, two and two.waited
        yield (*row, *map(_ms, seconds)) if timed else row


def _behind(flight: Flight | None) -> str:
    return "-" if flight is None else ", ".join(flight.behind) or "nothing"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"


def _draw_tracks(axes: Any, sides: Mapping[str, Course], times: Mapping[str, Times] | None) -> None:
    """Draw a track for each type of event of each course, from the top."""
    tracks = [(f"{name}: {kind}", kind, bars) for name, c in sides.items() for kind, bars in _bars(c, times).items()]
    scale = _scale(times)
    for height, (_, kind, bars) in enumerate(reversed(tracks)):
        spans = [(scale * begin, scale * (end - begin)) for begin, end in bars]
        axes.broken_barh(spans, (height - 0.4, 0.8), facecolor=_COLORS[kind], edgecolor="white", linewidth=0.6)
    axes.set_yticks(range(len(tracks)), [label for label, *_ in reversed(tracks)])
    axes.set_title("Compiled step and plan")


def _bars(course: Course, times: Mapping[str, Times] | None) -> dict[str, list[tuple[float, float]]]:
    """The begin and the end of each event, by type of track."""
    spans = list(zip(course, spans_of(course, times), strict=True))
    flights = list(flights_of(course, times))
    return {
        "compute": [span for step, span in spans if step.kind in COMPUTE],
        "gathers": [(each.begin, each.end) for each in flights if each.kind is Kind.UNSHARD],
        "reductions": [(each.begin, each.end) for each in flights if each.kind is Kind.REDUCE],
        "waits": [span for step, span in spans if step.kind in (Kind.WAIT, Kind.REDUCED)],
    }


def _draw_bytes(axes: Any, sides: Mapping[str, Course], times: Mapping[str, Times] | None) -> None:
    for (name, course), color in zip(sides.items(), (_COLORS["compute"], _PLANNED), strict=True):
        ends = [_scale(times) * span.end for span in spans_of(course, times)]
        live = [nbytes / MIB for nbytes in live_bytes(course)]
        label = f"{name}, at most {max(live, default=0.0):.2f} MiB"
        axes.step([0.0, *ends], [0.0, *live], where="post", color=color, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("steps of the course" if times is None else "ms")
    axes.set_ylabel("weights and gradients\nin flight (MiB)")
    axes.legend(frameon=False)


def _scale(times: Mapping[str, Times] | None) -> float:
    return 1.0 if times is None else 1e3
