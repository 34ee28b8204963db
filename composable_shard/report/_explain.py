"""Explain a plan: where the time of a step goes, which communication is exposed and why, and what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composable_shard._plan.drift import drift
from composable_shard._plan.plan import ShardPlan
from composable_shard._plan.record import Record
from composable_shard._plan.schedule import Kind
from composable_shard._plan.simulation import GroupTimes
from composable_shard._plan.waits import Wait, waits_of
from composable_shard.errors import ShardConfigValueError
from composable_shard.report._changes import Change, changes_of
from composable_shard.report._explain_text import Section, explanation_text, sections_of, why
from composable_shard.report._measured import (
    GroupSeconds,
    Measured,
    check_record,
    costs_of_record,
    measured,
    slower,
)


@dataclass(frozen=True)
class Explanation:
    """A plan explained, with the measurements of a record. Its `str` is the text.

    Attributes:
        plan: the plan, with costs.
        times_from: the source of the times.
        seconds: predicted seconds of a step.
        compute: seconds of compute.
        link: seconds in which the link is busy.
        least_link: seconds in which the link would be busy if all weights were kept between forward and backward.
        groups: seconds of each group, the longest first.
        waits: the waits of compute and their causes, the longest first.
        changes: changes that would make the step faster, each simulated, the fastest first. Changes that also affect
            training come last.
        measured: the measurements of the record; None without a record, or if the model was not watched.
        slower: the groups that computed longer than planned.
        drift: differences between the recorded step and the plan.
    """

    plan: ShardPlan
    times_from: str
    seconds: float
    compute: float
    link: float
    least_link: float
    groups: tuple[GroupSeconds, ...]
    waits: tuple[Wait, ...]
    changes: tuple[Change, ...]
    measured: Measured | None = None
    slower: tuple[str, ...] = ()
    drift: tuple[str, ...] = ()

    @property
    def least(self) -> float:
        """Lower bound of the seconds of any schedule of these groups: all compute, or all communication."""
        return max(self.compute, self.least_link)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections of the text, with tables as cells."""
        return tuple(sections_of(self))

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain data for JSON, without the plan."""
        others = [field.name for field in dataclasses.fields(self) if field.name != "plan"]
        content = {name: _plain(getattr(self, name)) for name in others}
        reasons = [why(wait, self.plan) for wait in self.waits]
        content["waits"] = [{**each, "why": text} for each, text in zip(content["waits"], reasons, strict=True)]
        return {**content, "least": self.least, "peak": self.plan.peak_bytes}

    def __str__(self) -> str:
        return explanation_text(self.sections)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def explain(plan: ShardPlan, record: Record | None = None, *, budget: int | None = None) -> Explanation:
    """Explain a plan: where the time of a step goes, which communication is exposed and why, and what to change.

    Nothing runs. Exposed communication comes from the simulation that made the plan. Each change is simulated: other
    prefetch policies, more memory, weights that are kept, more reductions in flight, and groups that are sharded
    together. Changes that also affect training (bfloat16, a larger batch) are listed separately.

    Args:
        plan: for example `make_plan(model)`. Its costs are the times; `PrefetchPolicy.auto` measures them. A plan
            without costs uses the times of the record.
        record: `last_record(model)` of a step of that plan. If the model was watched, measured times are shown next to
            the predicted ones. On an accelerator they are host times, so give a plan with costs there.
        budget: largest number of bytes of unsharded parameters and communication that a change may use. The best plan
            within it is shown even if it is not faster.

    Returns:
        the explanation. Print it. All times are in seconds, all sizes in bytes.

    Raises:
        ShardConfigValueError: neither the plan nor the record has times, or the record is of another model.
        PoolBudgetError: even the smallest step does not fit into `budget`.
    """
    times_from = "times from the record" if plan.costs is None else "times from the plan's costs"
    plan = with_times(plan, record)
    predicted, times, waits = plan.predicted(), plan.times() or {}, waits_of(plan)
    assert predicted.groups is not None
    assert predicted.seconds is not None
    groups = _groups(predicted.groups, waits)
    seen = None if record is None else measured(record)
    return Explanation(
        plan,
        times_from,
        predicted.seconds,
        sum(group.compute for group in predicted.groups),
        sum(group.gather + group.reduce for group in predicted.groups),
        sum(group.reduce + times[group.fqn].gather for group in predicted.groups),
        groups,
        tuple(sorted(waits, key=lambda wait: -wait.waited)),
        changes_of(plan, waits, budget),
        seen,
        () if seen is None else slower(groups, seen),
        () if record is None else drift(plan, record),
    )


def with_times(plan: ShardPlan, record: Record | None) -> ShardPlan:
    """Return the plan with a schedule and costs. If it has no costs, use those of the record.

    Raises:
        ShardConfigValueError: there are neither, or the record is of another model.
    """
    if record is not None:
        check_record(plan, record)
    if plan.costs is not None:
        return plan
    if record is None:
        raise ShardConfigValueError(
            "plan: has no times. Use a plan that PrefetchPolicy.auto() has measured, give it costs with "
            "plan.with_policies(costs=cs.Costs.of(...)), or add the record of a step of a model under cs.watch"
        )
    return dataclasses.replace(plan, costs=costs_of_record(plan, record))


def _groups(predicted: Sequence[GroupTimes], waits: Sequence[Wait]) -> tuple[GroupSeconds, ...]:
    seconds = {group.fqn: [group.compute, 0.0, 0.0] for group in predicted}
    for wait in waits:
        seconds[wait.fqn][1 if wait.kind is Kind.UNSHARD else 2] += wait.waited
    groups = [GroupSeconds(fqn, *each) for fqn, each in seconds.items()]
    return tuple(sorted(groups, key=lambda each: -each.all))
