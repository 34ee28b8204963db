"""Write a step as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: the predicted and the measured step.

The format is Chrome's, one JSON object per event. "X" is a slice with a beginning and a duration in microseconds, "C" a
value of a counter, "M" a name. The predicted and the measured step are processes, and their tracks are threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composable_shard._plan.course import COMPUTE, WAITS
from composable_shard._plan.schedule import ROOT_NAME, Action, Kind
from composable_shard.errors import ShardConfigValueError

if TYPE_CHECKING:
    from composable_shard._plan.plan import ShardPlan
    from composable_shard._plan.record import Record

_ENDS = {Kind.UNSHARD: Kind.WAIT, Kind.REDUCE: Kind.REDUCED}  # the issue of a collective, and the wait that ends it
_SENT = {Kind.UNSHARD: "gathers", Kind.REDUCE: "reductions"}
_WORDS = {**_SENT, Kind.REFRESH: "refreshes", Kind.WAIT: "wait for a gather", Kind.REDUCED: "wait for a reduction"}


class _Slice(NamedTuple):
    kind: Kind
    fqn: str
    begin: float  # in seconds, like `end`
    end: float


class _Side(NamedTuple):
    """The predicted or the measured step: tracks by name, and the live bytes over time."""

    name: str
    tracks: dict[str, list[_Slice]]
    memory: list[tuple[float, int]]


def timeline(plan: ShardPlan, record: Record | None, path: str | Path) -> None:
    """Write a step and its prediction as a trace for ui.perfetto.dev or chrome://tracing.

    The measured and the predicted step each have tracks for compute, gathers, reductions and waits, with a slice per
    group, and a counter of live bytes. The prediction is included if the plan has costs.

    Predicted gathers and reductions show the time on the link. Measured ones last from their issue to the end of the
    wait for them, because the link cannot be observed. Collectives that overlap have separate tracks. The measured
    compute of a root encloses that of its groups; the predicted compute of a root is at its beginning. On an
    accelerator, measured times are host times.

    Args:
        plan: the expected step, for example `make_plan(model)`.
        record: the actual step, `last_record(model)`. It has times if the model was watched.
        path: the JSON file to write. Its times are in microseconds.

    Raises:
        ShardConfigValueError: there is no record, or it lacks the times of a whole iteration.
    """
    if record is None or not record.spans:
        raise ShardConfigValueError(
            "timeline: the record has no times; call cs.watch(model), run one more iteration, and use its last_record"
        )
    sides = [*_predicted(plan), _measured(record)]
    events = [event for number, side in enumerate(sides, start=1) for event in _events(number, side)]
    lines = ",\n".join(json.dumps(event) for event in events)
    Path(path).write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n', encoding="utf-8")


def _predicted(plan: ShardPlan) -> Iterator[_Side]:
    step = plan.trace()
    if step is None:
        return
    slices = [_Slice(*span) for span in step.spans]
    compute = [each for each in slices if each.kind in COMPUTE]
    sent = {name: [each for each in slices if each.kind is kind] for kind, name in _SENT.items()}
    waits = [each for each in slices if each.kind in WAITS]
    outer = {"outer link": [_Slice(*span) for span in step.outer]} if step.outer else {}
    memory = list(zip(step.done, plan.live_bytes(), strict=True))
    yield _Side("predicted", {"compute": compute, **sent, **outer, "waits": waits}, memory)


def _measured(record: Record) -> _Side:
    origin = record.spans[0].begin
    spans = [_Slice(span.kind, span.fqn, span.begin - origin, span.end - origin) for span in record.spans]
    acts = _by_action(record.actions, spans)
    memory = [(act.end, live) for act, live in zip(acts, record.live_bytes, strict=True)]
    tracks = {"compute": [each for each in spans if each.kind in COMPUTE]}
    for kind, name in _SENT.items():
        for number, lane in enumerate(_lanes(_in_flight(acts, kind)), start=1):
            tracks[name if number == 1 else f"{name} {number}"] = lane
    tracks["waits"] = [each for each in acts if each.kind in WAITS and each.end > each.begin]
    return _Side("measured", tracks, memory)


def _by_action(actions: Iterable[Action], spans: Iterable[_Slice]) -> list[_Slice]:
    """Find the span of each action by its name. Spans are in order of their beginnings, which may be equal.

    Raises:
        ShardConfigValueError: an action has no span, because watching began or ended during the iteration.
    """
    waiting: dict[tuple[Kind, str], list[_Slice]] = {}
    for span in spans:
        waiting.setdefault((span.kind, span.fqn), []).append(span)
    slices = []
    for action in actions:
        if not waiting.get((action.kind, action.fqn)):
            raise ShardConfigValueError(
                f"timeline: {action} has no times: the model was watched for a part of the iteration. Call "
                "cs.watch(model) between two iterations, then run a whole iteration"
            )
        slices.append(waiting[action.kind, action.fqn].pop(0))
    return slices


def _in_flight(acts: Iterable[_Slice], kind: Kind) -> list[_Slice]:
    """Collectives from their issue to the end of the wait."""
    open_: dict[str, list[_Slice]] = {}
    slices = []
    for act in acts:
        if act.kind is kind:
            open_.setdefault(act.fqn, []).append(act)
        elif act.kind is _ENDS[kind]:
            slices.append(open_[act.fqn].pop(0)._replace(end=act.end))
    return sorted(slices, key=lambda each: each.begin)


def _lanes(slices: Sequence[_Slice]) -> list[list[_Slice]]:
    """Distribute slices to tracks so that the slices of a track do not overlap."""
    lanes: list[list[_Slice]] = [[]]
    for each in slices:
        free = next((lane for lane in lanes if not lane or lane[-1].end <= each.begin), None)
        if free is None:
            lanes.append(free := [])
        free.append(each)
    return lanes


def _events(side: int, of: _Side) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": side, "name": "process_name", "args": {"name": of.name}}
    for number, (name, slices) in enumerate(of.tracks.items(), start=1):
        yield {"ph": "M", "pid": side, "tid": number, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": side, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
        for each in slices:
            begin, end = _us(each.begin), _us(each.end)
            yield {
                "ph": "X",
                "pid": side,
                "tid": number,
                "name": each.fqn or ROOT_NAME,
                "cat": _WORDS.get(each.kind, each.kind.lower()),
                "ts": begin,
                "dur": round(end - begin, 3),
            }
    for at, live in of.memory:
        yield {"ph": "C", "pid": side, "name": "memory", "ts": _us(at), "args": {"bytes": live}}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
