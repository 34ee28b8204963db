"""Drift: differences between a recorded step and its plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from .costs import Times
from .plan import ShardPlan
from .record import Record
from .schedule import ROOT_NAME, Action, Kind

_TIME_TOLERANCE = 0.25  # of the planned seconds
_LEAST_TIME = 0.01  # of the planned compute of a step: smaller differences are ignored


def drift(plan: ShardPlan, record: Record) -> tuple[str, ...]:
    """Describe the differences between a plan and a recorded step, in one line each. Empty if there are none.

    Args:
        plan: the plan of the step.
        record: the recorded step.

    Times are compared if the plan has costs and the record was measured.
    """
    return (*order_drift(plan, record), *_steps(plan, record), *time_drift(plan, dict(record.times)))


class Forwards(Protocol):
    """The forwards of a plan, of a phase's schedule, or of a record. `order` and `around` are those of `Record`."""

    @property
    def order(self) -> tuple[str, ...]: ...
    @property
    def around(self) -> Collection[tuple[str, str]]: ...


def order_drift(planned: Forwards, seen: Forwards) -> list[str]:
    """Differences between planned and recorded forwards, by group: their order and their enclosing groups."""
    inside = sorted(set(seen.around) - set(planned.around))
    return [
        *_orders(planned.order, seen.order),
        *(f"{fqn}: ran inside {outer}, which is not planned" for fqn, outer in inside),
    ]


def _orders(planned: Sequence[str], seen: Sequence[str]) -> list[str]:
    statements = [f"{_name(fqn)}: planned, but did not run" for fqn in dict.fromkeys(planned) if fqn not in seen]
    strange = [fqn for fqn in dict.fromkeys(seen) if fqn not in planned]
    statements += [f"{_name(fqn)}: ran, but is not in the planned order" for fqn in strange]
    if statements or planned == seen:
        return statements
    for number, (expected, fqn) in enumerate(zip(planned, seen, strict=False), 1):
        if expected != fqn:
            return [f"{_name(fqn)}: ran as forward {number}, but {_name(expected)} is planned"]
    return [f"{_name(seen[-1])}: was the last of {len(seen)} forwards, but {len(planned)} are planned"]


def _steps(plan: ShardPlan, record: Record) -> list[str]:
    """The first action that differs. If all actions agree, the first action after which the live bytes differ."""
    if not record.actions or plan.order != record.order:
        return []
    actions, live = _planned(plan, record)
    for number, (planned, done) in enumerate(zip(actions, record.actions, strict=False), 1):
        if planned != done:
            return [f"{_name(done.fqn)}: action {number} was {done}, but {planned} is planned"]
    if len(actions) != len(record.actions):
        longer = max(actions, record.actions, key=len)
        extra = longer[min(len(actions), len(record.actions))]
        what = "was planned, but not done" if longer is actions else "was done, but not planned"
        return [f"{_name(extra.fqn)}: {extra} {what}"]
    for action, planned_bytes, seen_bytes in zip(actions, live, record.live_bytes, strict=False):
        if planned_bytes != seen_bytes:
            where = _name(action.fqn)
            return [f"{where}: {seen_bytes} bytes were live after {action}, but {planned_bytes} are planned"]
    return []


def _planned(plan: ShardPlan, record: Record) -> tuple[tuple[Action, ...], tuple[int, ...]]:
    """The planned actions, and the live bytes after each. Without refreshes, if a later microbatch is recorded."""
    actions, live = plan.actions(), plan.live_bytes()
    if any(action.kind is Kind.REFRESH for action in record.actions):
        return actions, live
    first = sum(action.kind is Kind.REFRESH for action in actions)
    return actions[first:], live[first:]


def time_drift(plan: ShardPlan, times: Mapping[str, Times]) -> list[str]:
    """Describe groups whose times differ from the planned times.

    A difference counts if it exceeds `_TIME_TOLERANCE` of the planned time and `_LEAST_TIME` of the step's compute.
    """
    planned = plan.times() or {}
    least = _LEAST_TIME * sum(each.forward + each.backward for each in planned.values())
    statements = []
    for fqn in [each for each in planned if each in times]:
        for name in Times.__dataclass_fields__:
            expected, measured = getattr(_measurable(planned[fqn]), name), getattr(_measurable(times[fqn]), name)
            if abs(measured - expected) > max(_TIME_TOLERANCE * expected, least):
                words = f"took {1e3 * measured:.3f} ms, but {1e3 * expected:.3f} ms are planned"
                statements.append(f"{_name(fqn)}: its {name.replace('_', ' ')} {words}")
    return statements


def _measurable(times: Times) -> Times:
    """The times as a record measures them: a reduction as a whole, and no refresh, for which nothing waits itself."""
    return replace(times, reduce=times.reduce + times.outer_reduce, refresh=0.0, outer_reduce=0.0, apart=False)


def _name(fqn: str) -> str:
    return fqn or ROOT_NAME
