"""The text of an explanation: sentences about each wait, and tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from composable_shard._plan.plan import ShardPlan
from composable_shard._plan.schedule import ROOT_NAME, Kind
from composable_shard._plan.text import count, first_names, mib, table
from composable_shard._plan.waits import Cause, Wait
from composable_shard.report._changes import Change
from composable_shard.report._measured import GroupSeconds, Measured

if TYPE_CHECKING:
    from composable_shard.report._explain import Explanation

_WIDTH = 110
_MOST = 10  # limit of rows in a table of groups or changes
_NAMED = 4  # limit of groups that a line names
_LABEL = re.compile(r" +|\S+ {2,}")  # label at the beginning of a line; its continuation lines are indented to its end
_LITTLE = 0.005  # fraction of a step; shorter waits are summed up without explanation


class Section(NamedTuple):
    """A section of the text: sentences, then a table. Either may be empty. Columns in `left` are left-aligned."""

    title: str
    lines: Sequence[str] = ()
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    left: Sequence[int] = (0,)


def explanation_text(sections: Sequence[Section]) -> str:
    """Format sections as plain text."""
    return "\n\n".join("\n".join(_lines(section)) for section in sections)


def _lines(section: Section) -> Iterator[str]:
    yield from [section.title] if section.title else []
    indent = "  " if section.title else ""
    for line in section.lines:
        label = _LABEL.match(line)
        hanging = indent + " " * (0 if label is None else label.end())
        yield from textwrap.wrap(indent + line, _WIDTH, subsequent_indent=hanging)
    if section.rows:
        yield from (f"{indent}{line}" for line in table([section.heads, *section.rows], section.left))


def sections_of(step: Explanation) -> Iterator[Section]:
    """The sections of the text, from the summary to the details."""
    yield Section("", list(_summary(step)))
    yield _by_group(step.groups, "Where the time goes, in ms")
    if step.waits:
        yield Section("Exposed communication", list(_reasons(step)))
    yield from _changes(step)
    if step.measured is not None:
        yield _measured(step, step.measured)
    if step.drift:
        yield Section("Differences from the plan", step.drift)


def ms(seconds: float) -> str:
    """Format seconds as milliseconds, as in plans."""
    return f"{1e3 * seconds:,.3f}"


def _name(fqn: str) -> str:
    return fqn or ROOT_NAME


def _names(fqns: Sequence[str]) -> str:
    return first_names([_name(fqn) for fqn in dict.fromkeys(fqns)], _NAMED)


# ---- summary


def _summary(step: Explanation) -> Iterator[str]:
    plan, waited = step.plan, _sum(step.waits)
    gathers = _sum([wait for wait in step.waits if wait.kind is Kind.UNSHARD])
    budget = "no budget" if plan.pool.budget is None else f"budget {mib(plan.pool.budget)}"
    ranks = max((group.shard_size for group in plan.groups), default=1)
    size = f"{count(len(plan.groups), 'group')} over {count(ranks, 'rank')}"
    yield f"{size}, prefetch {plan.prefetch}, {budget}; {step.times_from}"
    parts = f"{ms(step.compute)} compute, {ms(gathers)} exposed gathers, {ms(waited - gathers)} exposed reductions"
    yield f"step    {ms(step.seconds)} ms: {parts}"
    link = f"communication {ms(step.link)}, or {ms(step.least_link)} if all weights are kept"
    yield f"bound   at least {ms(step.least)} ms: compute {ms(step.compute)}, {link}"
    yield f"memory  peak {mib(plan.peak_bytes)} of unsharded parameters and communication"
    yield f"advice  {_verdict(step, waited)}"


def _verdict(step: Explanation, waited: float) -> str:
    best = next((change for change in step.changes if change.keeps_results and change.saved > 0), None)
    if waited <= _LITTLE * step.seconds:
        text = "almost no communication is exposed, so no other schedule can save more than that"
    elif best is None:
        text = "no simulated change is faster: no schedule hides the remaining communication"
    else:
        text = f"the first change below reduces the step to {ms(best.seconds)} ms, {best.saved / step.seconds:.0%} less"
    if step.least_link > step.compute:
        text += (
            ". Communication takes longer than compute, so every schedule exposes some of it. A larger batch, a "
            "smaller dtype, or replicas (HSDP) whose gathers stay within a faster link would change that"
        )
    return text


def _by_group(groups: Sequence[GroupSeconds], title: str) -> Section:
    heads = ("group", "compute", "exposed gathers", "exposed reductions", "total")
    parts = [(group.compute, group.gathers, group.reductions, group.all) for group in groups]
    rows = [(_name(group.fqn), *map(ms, each)) for group, each in zip(groups, parts, strict=True)]
    if len(rows) > _MOST:
        sums = [sum(column) for column in zip(*parts[_MOST - 1 :], strict=True)]
        rows = [*rows[: _MOST - 1], (f"{len(groups) - _MOST + 1} more", *map(ms, sums))]
    sums = [sum(column) for column in zip(*parts, strict=True)]
    return Section(title, (), heads, [*rows, ("all", *map(ms, sums))])


# ---- waits


def _reasons(step: Explanation) -> Iterator[str]:
    """One line for all waits of a direction, type and cause, the longest sum first. The longest wait is explained."""
    alike: dict[tuple[Kind, bool, Cause], list[Wait]] = {}
    for wait in step.waits:
        alike.setdefault((wait.kind, wait.backward, wait.cause), []).append(wait)
    ranked = sorted(alike.values(), key=lambda waits: -_sum(waits))
    shown = [waits for waits in ranked if _sum(waits) >= _LITTLE * step.seconds] or ranked[:1]
    for waits in shown:
        yield from _reason(waits, step.plan)
    if rest := ranked[len(shown) :]:
        yield f"{ms(sum(map(_sum, rest)))} ms for the others"


def _reason(waits: Sequence[Wait], plan: ShardPlan) -> Iterator[str]:
    longest = max(waits, key=lambda wait: wait.waited)
    what = "gather" if longest.kind is Kind.UNSHARD else "reduction"
    where = "backward" if longest.backward else "forward"
    kind = f"the {what} of" if len(waits) == 1 else f"{len(waits)} {what}s:"
    yield f"{ms(_sum(waits))} ms in {where} for {kind} {_names([wait.fqn for wait in waits])}"
    example = f"{_name(longest.fqn)} {ms(longest.waited)} ms: " if len(waits) > 1 else ""
    yield f"  {example}{why(longest, plan)}"


def _sum(waits: Sequence[Wait]) -> float:
    return sum(wait.waited for wait in waits)


def why(wait: Wait, plan: ShardPlan) -> str:
    """Explain why compute waits."""
    return _WORDS[wait.cause](wait, plan)


def _first(wait: Wait, plan: ShardPlan) -> str:
    return f"no compute precedes it in the step, so it is fully exposed; it takes {ms(wait.takes)} ms on the link"


def _turn(wait: Wait, plan: ShardPlan) -> str:
    return (
        f"backward begins with this group, right after forward has resharded it. The gather takes {ms(wait.takes)} ms, "
        "and no compute runs in between. Keep the weights to avoid it"
    )


def _latency(wait: Wait, plan: ShardPlan) -> str:
    nbytes = mib(plan.group(wait.fqn).unsharded_bytes)
    return (
        f"the group is small ({nbytes}): {ms(wait.fixed)} of the {ms(wait.takes)} ms on the link are latency, compared "
        "with the large groups. Use fewer and larger groups"
    )


def _link(wait: Wait, plan: ShardPlan) -> str:
    before = _queued(wait, "waits {} there, then ")
    return (
        f"the link was busy with other collectives: it {before}takes {ms(wait.takes)} ms, but only {ms(wait.hidden)} "
        f"ms of compute run between its issue, in {_name(wait.issued_in)}, and its use. The bandwidth of the link is "
        "the limit"
    )


def _policy(wait: Wait, plan: ShardPlan) -> str:
    if wait.issued_in == wait.fqn:
        return (
            f"it is issued only when it is needed ({plan.prefetch}), and takes {ms(wait.takes)} ms. Before that, the "
            f"link was idle for {ms(wait.idle)} ms"
        )
    return (
        f"{plan.prefetch} issues it too late, when {_name(wait.issued_in)} begins: {ms(wait.hidden)} ms of compute "
        f"for {ms(wait.takes + wait.queued)} ms on the link. Before that, the link was idle for {ms(wait.idle)} ms"
    )


def _budget(wait: Wait, plan: ShardPlan) -> str:
    within = "the memory of depth(1)" if plan.pool.budget is None else f"the budget of {mib(plan.pool.budget)}"
    return (
        f"{within} delays it: it is issued in {_name(wait.issued_in)}, only {ms(wait.hidden)} ms of compute before its "
        f"use, and takes {ms(wait.takes + wait.queued)} ms. Before that, the link was idle for {ms(wait.idle)} ms"
    )


def _memory(wait: Wait, plan: ShardPlan) -> str:
    return (
        f"memory for it becomes free only {ms(wait.hidden)} ms of compute before its use, and it takes "
        f"{ms(wait.takes + wait.queued)} ms. With more memory it could begin earlier"
    )


def _refresh(wait: Wait, plan: ShardPlan) -> str:
    return (
        f"it reads the node's compute copy, whose refresh over the outer axis ends {ms(wait.queued)} ms after its "
        f"issue. It takes {ms(wait.takes)} ms itself. The bandwidth of the outer link is the limit"
    )


def _last(wait: Wait, plan: ShardPlan) -> str:
    queued = _queued(wait, ", after it has waited {}")
    return f"no compute follows it, so the rest of it is exposed; it takes {ms(wait.takes)} ms{queued}"


def _in_flight(wait: Wait, plan: ShardPlan) -> str:
    schedule = plan.effective_schedule()
    most = dict(schedule.in_flight).get(wait.holds_up or "", schedule.max_reductions)
    limit = "one reduction" if most == 1 else f"{most} reductions"
    return (
        f"at most {limit} may be in flight (max_reductions), so the reduction of {_name(wait.holds_up or '')} is "
        f"issued only when this one has finished; {_partly(wait)}"
    )


def _reduces_first(wait: Wait, plan: ShardPlan) -> str:
    saves = plan.effective_schedule().reduces_first
    who = "to stay within the budget" if saves else "the default on a CPU"
    return f"backward gathers {_name(wait.holds_up or '')} only after this reduction, {who}; {_partly(wait)}"


def _queued(wait: Wait, words: str) -> str:
    if wait.behind is None:
        return ""
    what = "gather" if wait.behind.kind is Kind.UNSHARD else "reduction"
    return words.format(f"{ms(wait.queued)} ms for the {what} of {_name(wait.behind.fqn)}")


def _partly(wait: Wait) -> str:
    part = f", partly hidden by {ms(wait.hidden)} ms of compute" if wait.hidden else ", and no compute runs meanwhile"
    return f"it takes {ms(wait.takes)} ms{part}"


_WORDS = {
    Cause.FIRST: _first,
    Cause.TURN: _turn,
    Cause.LATENCY: _latency,
    Cause.LINK: _link,
    Cause.POLICY: _policy,
    Cause.BUDGET: _budget,
    Cause.REFRESH: _refresh,
    Cause.MEMORY: _memory,
    Cause.LAST: _last,
    Cause.IN_FLIGHT: _in_flight,
    Cause.REDUCES_FIRST: _reduces_first,
}


# ---- changes


def _changes(step: Explanation) -> Iterator[Section]:
    for keeps, title in ((True, "What to change"), (False, "Changes that also affect training")):
        changes = [change for change in step.changes if change.keeps_results is keeps][:_MOST]
        if changes:
            rows = [_change_row(number, change) for number, change in enumerate(changes, start=1)]
            heads = ("", "change", "step ms", "saved", "peak MiB", "added")
            how = [f"{number}  {change.how}" for number, change in enumerate(changes, start=1)]
            yield Section(title, (), heads, rows, (1,))
            yield Section(f"{title}: how", how)


def _change_row(number: int, change: Change) -> tuple[str, ...]:
    share = change.saved / (change.seconds + change.saved)
    sizes = f"{change.peak / 2**20:.2f}", f"{round(change.added / 2**20, 2) + 0.0:+.2f}"
    return str(number), change.what, ms(change.seconds), f"{share:.1%}", *sizes


# ---- the record


def _measured(step: Explanation, seen: Measured) -> Section:
    planned = {group.fqn: group for group in step.groups}
    rows = []
    for group in seen.groups[:_MOST]:
        expected = planned.get(group.fqn, GroupSeconds(group.fqn, 0.0, 0.0, 0.0))
        note = "slower" if group.fqn in step.slower else ""
        pairs = (expected.compute, group.compute, expected.all - expected.compute, group.all - group.compute)
        rows.append((_name(group.fqn), *map(ms, pairs), note))
    outside = f"including {ms(seen.elsewhere)} ms outside all groups"
    lines = [f"the step took {ms(seen.seconds)} ms, {outside}; {ms(step.seconds)} ms were predicted"]
    if step.slower:
        lines.append(f"more than a quarter slower than planned: {_names(step.slower)}")
    if len(seen.groups) > _MOST:
        lines.append(f"the {_MOST} of {len(seen.groups)} groups that took longest:")
    heads = ("group", "planned compute", "measured", "planned waits", "measured", "")
    return Section("Measured and predicted, in ms", lines, heads, rows, (0, 5))
