"""Where what happened left the plan."""

from __future__ import annotations

from ._plan import ShardPlan
from ._record import Record
from ._schedule import ROOT_NAME
from ._simulation import Times

TIME_TOLERANCE = 0.25  # of the planned seconds


def drift(plan: ShardPlan, record: Record, tolerance: float = TIME_TOLERANCE) -> tuple[str, ...]:
    """What a step did otherwise than its plan says, a statement each; none if it kept to it.

    Args:
        plan: what was expected.
        record: what happened.
        tolerance: by what share of it a time may differ from the planned one.

    Times are compared where both sides have them: a record that was measured, a plan with costs.
    """
    return (*_order(plan, record), *_steps(plan, record), *_times(plan, record, tolerance))


def _order(plan: ShardPlan, record: Record) -> list[str]:
    missing = [fqn for fqn in dict.fromkeys(plan.order) if fqn not in record.order]
    strange = [fqn for fqn in dict.fromkeys(record.order) if fqn not in plan.order]
    found = [f"{_name(fqn)}: planned, and has not run" for fqn in missing]
    found += [f"{_name(fqn)}: has run, and is not in the planned order" for fqn in strange]
    if found or plan.order == record.order:
        return found
    for place, (planned, seen) in enumerate(zip(plan.order, record.order, strict=False), 1):
        if planned != seen:
            return [f"{_name(seen)}: was forward {place}, where {_name(planned)} is planned"]
    return [f"{_name(record.order[-1])}: ended the forwards at {len(record.order)}, and {len(plan.order)} are planned"]


def _steps(plan: ShardPlan, record: Record) -> list[str]:
    """Where the actions part; where they do not, where the bytes do."""
    if not record.actions or plan.order != record.order:
        return []
    actions, live = plan.actions(), plan.live_bytes()
    for place, (planned, done) in enumerate(zip(actions, record.actions, strict=False), 1):
        if planned != done:
            return [f"{_name(done.fqn)}: action {place} was {done}, and {planned} is planned"]
    if len(actions) != len(record.actions):
        longer = max(actions, record.actions, key=len)
        extra = longer[min(len(actions), len(record.actions))]
        what = "was planned and not done" if longer is actions else "was done and not planned"
        return [f"{_name(extra.fqn)}: {extra} {what}"]
    for action, planned_bytes, seen_bytes in zip(actions, live, record.live_bytes, strict=False):
        if planned_bytes != seen_bytes:
            where = _name(action.fqn)
            return [f"{where}: {seen_bytes} bytes were live after {action}, and {planned_bytes} are planned"]
    return []


def _times(plan: ShardPlan, record: Record, tolerance: float) -> list[str]:
    planned = plan.times() or {}
    found = []
    for fqn, seen in record.times:
        if fqn not in planned:
            continue
        for name in Times.__dataclass_fields__:
            expected, measured = getattr(planned[fqn], name), getattr(seen, name)
            if abs(measured - expected) > tolerance * expected:
                words = f"took {1e3 * measured:.3f} ms, and {1e3 * expected:.3f} ms are planned"
                found.append(f"{_name(fqn)}: its {name.replace('_', ' ')} {words}")
    return found


def _name(fqn: str) -> str:
    return fqn or ROOT_NAME
