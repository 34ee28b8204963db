"""A plan explained: where the time of a step goes, what compute waits for and why, and what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composable_shard._errors import ShardConfigValueError
from composable_shard._plan.drift import drift
from composable_shard._plan.plan import ShardPlan
from composable_shard._plan.record import Record
from composable_shard._plan.schedule import Kind
from composable_shard._plan.simulation import GroupTimes
from composable_shard._plan.waits import Wait, waits_of
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
    """A plan explained, and what a record has measured of it; `str` of it is the text.

    Attributes:
        plan: the plan, with costs.
        times_from: what the times come from, in words.
        seconds: of a step, predicted.
        compute: seconds of compute alone.
        link: seconds in which the link is busy.
        least_link: seconds that it would be busy if all weights were kept between forward and backward.
        groups: seconds of each group, those that take longest first.
        waits: what compute waits for, and why, the longest first.
        changes: what would make the step faster, the fastest first, each simulated; those that change the training
            as well come last.
        measured: what the record has measured; None without a record, or if the model was not watched.
        slower: the groups that have computed longer than planned.
        drift: what the recorded step did otherwise than the plan says.
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
        """Seconds that no schedule of these groups goes below: all compute, or all that the link must carry."""
        return max(self.compute, self.least_link)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The parts of the text, its tables as cells."""
        return tuple(sections_of(self))

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON; the plan itself is left out."""
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
    """Explain a plan: where the time of a training step goes, what compute waits for and why, and what to change.

    Nothing runs. Waits are read off the simulation that the plan is made by, and each change is simulated: other
    look-aheads, more memory, weights that are kept, more reductions in flight, groups sharded together; and, apart from
    these, what changes the training too: bfloat16, and a larger batch.

    Args:
        plan: `make_plan(model)`, for example. Its costs are the times; `PrefetchPolicy.auto` measures them. A plan
            without costs takes them from the record.
        record: `last_record(model)` of a step of that plan; measured times are shown beside the predicted ones if the
            model was watched. On an accelerator these are the host's, so give a plan with costs there.
        budget: the most bytes that a change may take of unsharded parameters and communication. What a search within it
            finds is shown even if it is no gain.

    Returns:
        what can be printed. All times in it are in seconds, all sizes in bytes.

    Raises:
        ShardConfigValueError: neither the plan nor the record has times, or the record is of another model.
        PoolBudgetError: not even the least step fits into `budget`.
    """
    times_from = "times are the record's" if plan.costs is None else "times are the plan's costs"
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
    """A plan with its schedule and costs; those of the record if it has none itself.

    Raises:
        ShardConfigValueError: there are neither; or the record is of another model.
    """
    if record is not None:
        check_record(plan, record)
    if plan.costs is not None:
        return plan
    if record is None:
        raise ShardConfigValueError(
            "plan: has no times. Take one that PrefetchPolicy.auto() has measured, give it costs by "
            "plan.with_policies(costs=cs.Costs.of(...)), or add the record of a step of a model under cs.watch"
        )
    return dataclasses.replace(plan, costs=costs_of_record(plan, record))


def _groups(predicted: Sequence[GroupTimes], waits: Sequence[Wait]) -> tuple[GroupSeconds, ...]:
    seconds = {group.fqn: [group.compute, 0.0, 0.0] for group in predicted}
    for wait in waits:
        seconds[wait.fqn][1 if wait.kind is Kind.UNSHARD else 2] += wait.waited
    groups = [GroupSeconds(fqn, *each) for fqn, each in seconds.items()]
    return tuple(sorted(groups, key=lambda each: -each.all))
