"""A step as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: what is predicted beside what was measured.

The format is Chrome's: one JSON object an event; "X" is a slice with a beginning and a length in microseconds, "C" a
value of a counter, "M" a name. A process is a side, a thread of it a track.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composable_shard._errors import ShardConfigValueError
from composable_shard._plan.schedule import ROOT_NAME, Action, Kind

if TYPE_CHECKING:
    from composable_shard._plan.plan import ShardPlan
    from composable_shard._plan.record import Record

_COMPUTE = (Kind.FORWARD, Kind.BACKWARD)
_WAITS = (Kind.WAIT, Kind.REDUCED)
_ENDS = {Kind.UNSHARD: Kind.WAIT, Kind.REDUCE: Kind.REDUCED}  # what is issued, and what ends it
_SENT = {Kind.UNSHARD: "gathers", Kind.REDUCE: "reductions"}
_WORDS = {**_SENT, Kind.WAIT: "wait for a gather", Kind.REDUCED: "wait for a reduction"}


class _Slice(NamedTuple):
    kind: Kind
    fqn: str
    begin: float  # seconds, as is the next
    end: float


class _Side(NamedTuple):
    """One side of the trace: tracks by name, and the live bytes at their times."""

    name: str
    tracks: dict[str, list[_Slice]]
    memory: list[tuple[float, int]]


def timeline(plan: ShardPlan, record: Record | None, path: str | Path) -> None:
    """Write what a step did, beside what the plan predicts of it, as a trace for ui.perfetto.dev or chrome://tracing.

    Each side has tracks for compute, gathers, reductions and waits, a slice a group, and a counter of live bytes. The
    predicted side is there if the plan has costs. Its gathers and reductions are on the link; measured ones last from
    their issue to the end of the wait for them, since nobody sees the link; those that overlap have tracks of their
    own.
    The measured compute of a root lies around that of the groups below it, the predicted one where it begins. On an
    accelerator measured times are those of the host.

    Args:
        plan: what was expected, for example `make_plan(model)`.
        record: what happened, `last_record(model)`; it has times if the model was watched.
        path: the JSON file to write; times in it are in microseconds.

    Raises:
        ShardConfigValueError: there is no record, or none with the times of a whole iteration.
    """
    if record is None or not record.spans:
        raise ShardConfigValueError(
            "timeline: the record has no times; call cs.watch(model), run one more iteration, and take its last_record"
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
    compute = [each for each in slices if each.kind in _COMPUTE]
    sent = {name: [each for each in slices if each.kind is kind] for kind, name in _SENT.items()}
    waits = [each for each in slices if each.kind in _WAITS]
    memory = list(zip(step.done, plan.live_bytes(), strict=True))
    yield _Side("predicted", {"compute": compute, **sent, "waits": waits}, memory)


def _measured(record: Record) -> _Side:
    origin = record.spans[0].begin
    spans = [_Slice(span.kind, span.fqn, span.begin - origin, span.end - origin) for span in record.spans]
    acts = _by_action(record.actions, spans)
    memory = [(act.end, live) for act, live in zip(acts, record.live_bytes, strict=True)]
    tracks = {"compute": [each for each in spans if each.kind in _COMPUTE]}
    for kind, name in _SENT.items():
        for number, lane in enumerate(_lanes(_in_flight(acts, kind)), start=1):
            tracks[name if number == 1 else f"{name} {number}"] = lane
    tracks["waits"] = [each for each in acts if each.kind in _WAITS and each.end > each.begin]
    return _Side("measured", tracks, memory)


def _by_action(actions: Iterable[Action], spans: Iterable[_Slice]) -> list[_Slice]:
    """The span of each action. Spans go by their beginnings, and clocks may stand still, so each is found by its name.

    Raises:
        ShardConfigValueError: an action has none: watching began or ended on the way.
    """
    waiting: dict[tuple[Kind, str], list[_Slice]] = {}
    for span in spans:
        waiting.setdefault((span.kind, span.fqn), []).append(span)
    slices = []
    for action in actions:
        if not waiting.get((action.kind, action.fqn)):
            raise ShardConfigValueError(
                f"timeline: {action} has no times: the model was watched for a part of the iteration. Call "
                "cs.watch(model) between two iterations, and run a whole one"
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
    """Tracks on which no slice begins before the last one has ended."""
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
