"""Plans as text: the table of a plan, and the differences between two plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from .group_plan import GroupPlan, ParamPlan, joined
from .schedule import ROOT_NAME, Schedule
from .simulation import GroupTimes, Prediction

_GROUP_WORDS: tuple[tuple[str, Callable[[GroupPlan], object]], ...] = (
    ("ranks", lambda group: group.shard_size),
    ("mesh", lambda group: group.mesh),
    ("dtype", lambda group: group.dtype),
    ("reshard", lambda group: group.reshard),
    ("comm policy", lambda group: group.comm_policy),
    ("transport", lambda group: f"{group.route.name}: {group.transport}" if group.route else group.transport),
    ("unsharded bytes", lambda group: group.unsharded_bytes),
    ("reduction bytes", lambda group: group.sizes.reduction),
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
    """Format a plan as a table.

    Args:
        groups: the groups in the order of their first use, followed by unused groups.
        schedule: the schedule to print; None for the default schedule, which is not printed.
        why: one line about the inputs of the schedule (policies and budget).
        predicted: the prediction for one training step.
        phases: name and order of each phase that was seen. The order is empty if it is that of the plan.
    """
    params = sum(p.numel for g in groups for p in g.params)
    title = f"plan: {count(len(groups), 'group')}, {count(params, 'parameter')}, {joined(g.mesh for g in groups)}"
    lines = [title, *table(_rows(groups, schedule, predicted))]
    lines.append(f"peak of unsharded parameters and communication in a training step: {mib(predicted.peak)}")
    lines += _copies_lines(groups)
    lines += [] if schedule is None else _memory_lines(predicted)
    lines += _time_lines(predicted)
    lines += [f"order in {phase}: {_listed(order)}" for phase, order in phases if order]
    return "\n".join(lines if schedule is None else [*lines, why, *_schedule_lines(schedule)])


def _time_lines(predicted: Prediction) -> list[str]:
    if predicted.exposed is None or predicted.seconds is None:
        return []
    outer = sum(each.outer for each in predicted.groups or ())
    lines = [f"exposed: {1e3 * predicted.exposed:.3f} of {1e3 * predicted.seconds:.3f} ms per step"]
    return [*lines, f"on the outer link: {1e3 * outer:.3f} ms per step"] if outer else lines


def _copies_lines(groups: Sequence[GroupPlan]) -> list[str]:
    copies, ranks = sum(group.copy_bytes for group in groups), max((group.outer_size for group in groups), default=1)
    return [f"compute copies: {mib(copies)}, refreshed over {ranks} ranks"] if copies else []


def _memory_lines(predicted: Prediction) -> list[str]:
    kinds = (("weights", predicted.weights), ("landing", predicted.landing), ("reductions", predicted.reductions))
    most = ", ".join(f"{name} {mib(nbytes)}" for name, nbytes in kinds)
    return [f"peak by type: {most}", f"kept between forward and backward: {mib(predicted.kept)}"]


def _rows(groups: Sequence[GroupPlan], schedule: Schedule | None, predicted: Prediction) -> Iterator[tuple[str, ...]]:
    """The rows of a plan's table, header first. Time columns are included if times are known."""
    times = {each.fqn: each for each in predicted.groups or ()}
    yield _HEAD if predicted.groups is None else _HEAD + _MILLISECONDS
    for group in groups:
        row = (
            group.name,
            f"{sum(p.numel for p in group.params):,}",
            mib(group.shard_bytes),
            mib(group.unsharded_bytes),
            group.dtype,
            group.reshard if schedule is None else _reshard(group, schedule),
            group.transport,
        )
        yield row if predicted.groups is None else row + _milliseconds(times.get(group.fqn))


def _milliseconds(time: GroupTimes | None) -> tuple[str, ...]:
    seconds = (0.0,) * 4 if time is None else (time.gather, time.compute, time.reduce, time.exposed)
    return tuple(f"{1e3 * each:.3f}" for each in seconds)


def _listed(fqns: Sequence[str]) -> str:
    return ", ".join(fqn or ROOT_NAME for fqn in fqns)


def _reshard(group: GroupPlan, schedule: Schedule) -> str:
    if group.fqn in schedule.kept:
        return "after backward" if not group.reshard_after_forward else "after backward (planned)"
    return group.reshard if group.reshard_after_forward else "after forward (budget)"


def table(rows: Iterable[Sequence[str]], left: Sequence[int] = _LEFT) -> list[str]:
    """Format rows as lines. The columns with the indices `left` are left-aligned, the others right-aligned."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return [line.rstrip() for line in lines]


def _schedule_lines(schedule: Schedule) -> list[str]:
    lines = [f"  {event} gathers {groups}" for event, groups in _edges(schedule).items()]
    first = ", before gathers of backward" if schedule.reduces_first else ""
    others = "".join(f", {number} for {fqn or ROOT_NAME}" for fqn, number in schedule.in_flight)
    lines.append(f"  reductions in flight: {schedule.max_reductions}{others}{first}")
    if schedule.holds:
        lines.append(f"  reductions that keep their memory: {_listed([fqn or ROOT_NAME for fqn in schedule.holds])}")
    return (
        lines
        if schedule.stays_for_next
        else [*lines, "  weights are resharded between consecutive backward passes of a group"]
    )


def _edges(schedule: Schedule) -> dict[str, str]:
    """The groups that each event gathers, by the event's text. Events of repeated groups include a use number."""
    edges: dict[str, str] = {}
    for event, uses in schedule.ahead().items():
        for number, groups in enumerate(uses, 1):
            if groups:
                edges[f"{event} ({number})" if len(uses) > 1 else str(event)] = _listed(groups)
    return edges


def first_names(names: Sequence[str], most: int) -> str:
    """Join names for a message: all names, or the first `most` and the number of the others if that is above 1."""
    more = len(names) - most
    return ", ".join(names) if more < 2 else f"{', '.join(names[:most])} and {more} more"


def count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 group``, ``2 groups``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def mib(nbytes: int) -> str:
    """Format bytes in MiB."""
    return f"{nbytes / 2**20:.2f} MiB"


# ---- differences


def other_model(mine: Sequence[GroupPlan], other: Sequence[GroupPlan]) -> str:
    """Describe the first difference between a plan's groups and a model's groups. Empty if the models agree.

    Args:
        mine: the groups of the plan.
        other: the groups of the model.
    """
    for one, two in zip(mine, other, strict=False):
        if one.fqn != two.fqn:
            return f"the plan has group {one.name}, the model has group {two.name}"
        if one.shard_size != two.shard_size:
            sizes = f"{one.shard_size} ranks in the plan, over {two.shard_size} in the model"
            return f"group {one.name} is sharded over {sizes}"
        if difference := _other_params(one, two):
            return difference
    if len(mine) != len(other):
        longer, where = (mine, "plan") if len(mine) > len(other) else (other, "model")
        return f"group {longer[min(len(mine), len(other))].name} exists only in the {where}"
    return ""


def _other_params(one: GroupPlan, two: GroupPlan) -> str:
    for param, peer in zip(one.params, two.params, strict=False):
        if param.fqn != peer.fqn:
            return f"group {one.name}: the plan has parameter {param.fqn}, the model has {peer.fqn}"
        for name in _differing(param, peer):
            values = f"{getattr(param, name)} in the plan, {getattr(peer, name)} in the model"
            return f"parameter {param.fqn}: {name} is {values}"
    if len(one.params) != len(two.params):
        return f"group {one.name} has {len(one.params)} parameters in the plan, {len(two.params)} in the model"
    return ""


def _differing(one: GroupPlan | ParamPlan, two: GroupPlan | ParamPlan) -> list[str]:
    """The names of the fields that differ."""
    return [f.name for f in dataclasses.fields(one) if getattr(one, f.name) != getattr(two, f.name)]


def group_changes(old: Sequence[GroupPlan], new: Sequence[GroupPlan]) -> list[str]:
    """Describe each group that was added, removed or changed in one line."""
    lines = _apart([group.name for group in old], [group.name for group in new], "group {}: removed", "group {}: added")
    after = {group.fqn: group for group in new}
    for group in old:
        if after.get(group.fqn, group) != group:
            lines.append(f"group {group.name}: {'; '.join(_of_group(group, after[group.fqn]))}")
    if not lines and [g.fqn for g in old] != [g.fqn for g in new]:
        lines.append("groups: same groups, declared in a different order")
    return lines


def _of_group(one: GroupPlan, two: GroupPlan) -> list[str]:
    """The changes of a group. Differences without their own text are named by field."""
    changes = [f"{word} {f(one)} -> {f(two)}" for word, f in _GROUP_WORDS if f(one) != f(two)]
    before, after = {p.fqn: p.shape for p in one.params}, {p.fqn: p.shape for p in two.params}
    changes += _apart(list(before), list(after), "parameter {} removed", "parameter {} added")
    shaped = [name for name, shape in before.items() if after.get(name, shape) != shape]
    changes += [f"shape of {name} {before[name]} -> {after[name]}" for name in shaped]
    return changes or [f"other {', '.join(_differing(one, two))}"]


def _apart(old: Sequence[str], new: Sequence[str], removed: str, added: str) -> list[str]:
    """Format each name that occurs only in `old`, then each name that occurs only in `new`, as one line each."""
    before, after = set(old), set(new)
    lines = [removed.format(each) for each in old if each not in after]
    return lines + [added.format(each) for each in new if each not in before]


def order_changes(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Describe the first difference between two orders of forwards in one line."""
    if old == new:
        return []
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    before, after = (order[at] or ROOT_NAME if at < len(order) else "nothing" for order in (old, new))
    return [f"order: forward {at + 1} is {before} -> {after}"]


def around_changes(old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]) -> list[str]:
    """Describe each pair of group and enclosing group that occurs in only one of the plans, in one line each."""
    before, after = ([f"{fqn} inside {outer}" for fqn, outer in around] for around in (old, new))
    return _apart(before, after, "order: no longer {}", "order: now {}")


def schedule_changes(old: Schedule, new: Schedule) -> list[str]:
    """Describe each difference in prefetch edges, kept groups and reductions in one line."""
    before, after = _edges(old), _edges(new)
    lines = [
        f"prefetch: {event} gathers {before.get(event, 'nothing')} -> {after.get(event, 'nothing')}"
        for event in dict.fromkeys([*before, *after])
        if before.get(event) != after.get(event)
    ]
    kept, keeps = ([fqn or ROOT_NAME for fqn in schedule.kept] for schedule in (old, new))
    lines += _apart(kept, keeps, "kept after forward: {} removed", "kept after forward: {} added")
    for name in ("max_reductions", "in_flight", "reduces_first", "stays_for_next", "holds"):
        old_value, new_value = getattr(old, name), getattr(new, name)
        lines += [f"{name}: {old_value} -> {new_value}"] if old_value != new_value else []
    if not lines and old.kept != new.kept:
        lines.append("kept after forward: same groups, in a different order")
    return lines
