"""A plan as text: its table, and its differences from another plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .group_plan import GroupPlan, joined
from .schedule import ROOT_NAME, Schedule
from .simulation import Prediction

_GROUP_WORDS: tuple[tuple[str, Callable[[GroupPlan], object]], ...] = (
    ("ranks", lambda group: group.shard_size),
    ("mesh", lambda group: group.mesh),
    ("dtype", lambda group: group.dtype),
    ("reshard", lambda group: group.reshard),
    ("transport", lambda group: f"{group.route.name}: {group.transport}" if group.route else group.transport),
    ("unsharded bytes", lambda group: group.unsharded_bytes),
    ("reduction bytes", lambda group: group.reduce_bytes),
)
_HEAD = ("group", "parameters", "shard", "unsharded", "dtype", "reshard", "transport")
_MILLISECONDS = ("gather ms", "compute ms", "reduce ms", "exposed ms")
_LEFT = (0, 4, 5, 6)


def plan_text(
    groups: Sequence[GroupPlan],
    schedule: Schedule | None,
    why: str,
    predicted: Prediction,
    phases: Sequence[tuple[str, Sequence[str]]] = (),
) -> str:
    """A plan as a table.

    Args:
        groups: in the order of their first use, those that were not used last.
        schedule: None for the default one, which goes without saying.
        why: what the schedule was made from.
        predicted: of one training step.
        phases: those that were seen, each with its order if that is another one.
    """
    params = sum(p.numel for g in groups for p in g.params)
    title = f"plan: {len(groups)} groups, {params:,} parameters, {joined(g.mesh for g in groups)}"
    peak = f"peak of unsharded parameters and communication in a training step: {mib(predicted.peak)}"
    times = {each.fqn: each for each in predicted.groups or ()}
    rows: list[tuple[str, ...]] = [_HEAD if predicted.groups is None else _HEAD + _MILLISECONDS]
    for group in groups:
        row: tuple[str, ...] = (
            group.name,
            f"{sum(p.numel for p in group.params):,}",
            mib(group.shard_bytes),
            mib(group.unsharded_bytes),
            group.dtype,
            group.reshard if schedule is None else _reshard(group, schedule),
            group.transport,
        )
        if predicted.groups is not None:
            time = times.get(group.fqn)
            seconds = (0.0,) * 4 if time is None else (time.gather, time.compute, time.reduce, time.exposed)
            row += tuple(f"{1e3 * each:.3f}" for each in seconds)
        rows.append(row)
    lines = [title, *_table(rows), peak]
    if schedule is not None:
        kinds = (("weights", predicted.weights), ("landing", predicted.landing), ("reductions", predicted.reductions))
        lines.append("of each kind at most: " + ", ".join(f"{name} {mib(nbytes)}" for name, nbytes in kinds))
        lines.append(f"between forward and backward: {mib(predicted.kept)}")
    if predicted.exposed is not None and predicted.seconds is not None:
        lines.append(f"exposed: {1e3 * predicted.exposed:.3f} of {1e3 * predicted.seconds:.3f} ms a step")
    for phase, order in phases:
        if order:
            lines.append(f"order in {phase}: {', '.join(fqn or ROOT_NAME for fqn in order)}")
    return "\n".join(lines if schedule is None else [*lines, why, *_schedule_lines(schedule)])


def _reshard(group: GroupPlan, schedule: Schedule) -> str:
    if group.fqn in schedule.kept:
        return "after backward" if not group.reshard_after_forward else "after backward (planned)"
    return group.reshard if group.reshard_after_forward else "after forward (budget)"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.ljust(w) if i in _LEFT else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return [line.rstrip() for line in lines]


def _schedule_lines(schedule: Schedule) -> list[str]:
    lines = [f"  {event} gathers {groups}" for event, groups in _edges(schedule).items()]
    first = ", before gathers of backward" if schedule.reduces_first else ""
    others = "".join(f", {number} with that of {fqn or ROOT_NAME}" for fqn, number in schedule.in_flight)
    lines.append(f"  reductions in flight: {schedule.max_reductions}{others}{first}")
    return lines if schedule.stays_for_next else [*lines, "  weights are gathered anew for each backward of a group"]


def _edges(schedule: Schedule) -> dict[str, str]:
    """The groups that each event gathers, by its text, with the number of the use if its group has several uses."""
    found: dict[str, str] = {}
    for event, uses in schedule.ahead().items():
        for number, groups in enumerate(uses, 1):
            at = f"{event} ({number})" if len(uses) > 1 else str(event)
            found |= {at: ", ".join(fqn or ROOT_NAME for fqn in groups)} if groups else {}
    return found


def mib(nbytes: int) -> str:
    """Bytes in MiB."""
    return f"{nbytes / 2**20:.2f} MiB"


# ---- differences


def other_model(mine: Sequence[GroupPlan], other: Sequence[GroupPlan]) -> str:
    """The first difference that shows that `other` are groups of another model; empty if the model is the same."""
    for one, two in zip(mine, other, strict=False):
        if one.fqn != two.fqn:
            return f"group {one.name} is here, group {two.name} there"
        if one.shard_size != two.shard_size:
            return f"group {one.name} is sharded over {one.shard_size} ranks here, over {two.shard_size} there"
        for ours, theirs in zip(one.params, two.params, strict=False):
            if ours.fqn != theirs.fqn:
                return f"group {one.name}: parameter {ours.fqn} is here, {theirs.fqn} there"
            for field in dataclasses.fields(ours):
                here, there = getattr(ours, field.name), getattr(theirs, field.name)
                if here != there:
                    return f"parameter {ours.fqn}: {field.name} is {here} here, {there} there"
        if len(one.params) != len(two.params):
            return f"group {one.name} has {len(one.params)} parameters here, {len(two.params)} there"
    if len(mine) != len(other):
        longer, where = (mine, "here") if len(mine) > len(other) else (other, "there")
        return f"group {longer[min(len(mine), len(other))].name} is {where} alone"
    return ""


def group_changes(old: Sequence[GroupPlan], new: Sequence[GroupPlan]) -> list[str]:
    """A line for each group that was added, removed or changed."""
    before, after = {g.fqn: g for g in old}, {g.fqn: g for g in new}
    lines = [f"group {group.name}: removed" for fqn, group in before.items() if fqn not in after]
    lines += [f"group {group.name}: added" for fqn, group in after.items() if fqn not in before]
    for fqn in (fqn for fqn in before if fqn in after and before[fqn] != after[fqn]):
        one, two = before[fqn], after[fqn]
        found = [f"{word} {f(one)} -> {f(two)}" for word, f in _GROUP_WORDS if f(one) != f(two)]
        ours, theirs = {p.fqn: p for p in one.params}, {p.fqn: p for p in two.params}
        found += [f"parameter {name} removed" for name in ours if name not in theirs]
        found += [f"parameter {name} added" for name in theirs if name not in ours]
        shared = [name for name in ours if name in theirs]
        found += [
            f"shape of {name} {ours[name].shape} -> {theirs[name].shape}"
            for name in shared
            if ours[name].shape != theirs[name].shape
        ]
        found += [] if found else [_other_fields(one, two)]
        lines.append(f"group {one.name}: {'; '.join(found)}")
    if not lines and [g.fqn for g in old] != [g.fqn for g in new]:
        lines.append("groups: the same ones, declared in another order")
    return lines


def _other_fields(one: GroupPlan, two: GroupPlan) -> str:
    """The names of fields that differ, for differences that have no text of their own."""
    names = [f.name for f in dataclasses.fields(one) if getattr(one, f.name) != getattr(two, f.name)]
    return f"other {', '.join(names)}"


def order_changes(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The first difference of the orders of forwards, as one line."""
    if old == new:
        return []
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    here, there = (order[at] or ROOT_NAME if at < len(order) else "nothing" for order in (old, new))
    return [f"order: forward {at + 1} is {here} -> {there}"]


def around_changes(old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each enclosing group that only one of the plans has."""
    lines = [f"order: {fqn} inside of {outer} no more" for fqn, outer in old if (fqn, outer) not in new]
    return lines + [f"order: {fqn} inside of {outer} now" for fqn, outer in new if (fqn, outer) not in old]


def schedule_changes(old: Schedule, new: Schedule) -> list[str]:
    """A line for each difference in prefetch edges, kept groups and reductions."""
    before, after = _edges(old), _edges(new)
    lines = [
        f"prefetch: {event} gathers {before.get(event, 'nothing')} -> {after.get(event, 'nothing')}"
        for event in dict.fromkeys([*before, *after])
        if before.get(event) != after.get(event)
    ]
    lines += [f"kept after forward: {fqn or ROOT_NAME} no more" for fqn in old.kept if fqn not in new.kept]
    lines += [f"kept after forward: {fqn or ROOT_NAME} now" for fqn in new.kept if fqn not in old.kept]
    for name in ("max_reductions", "in_flight", "reduces_first", "stays_for_next"):
        here, there = getattr(old, name), getattr(new, name)
        lines += [f"{name}: {here} -> {there}"] if here != there else []
    if not lines and old.kept != new.kept:
        lines.append("kept after forward: the same groups, in another order")
    return lines
