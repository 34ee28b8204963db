"""Changes that may make a plan faster: other policies, settings, groups and dtypes, each simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from composable_shard._plan.costs import Costs
from composable_shard._plan.plan import GroupPlan, ShardPlan
from composable_shard._plan.schedule import kept_by_setting
from composable_shard._plan.simulation import Prediction
from composable_shard._plan.text import mib
from composable_shard._plan.waits import Cause, Wait
from composable_shard._policies import PrefetchPolicy
from composable_shard.errors import PoolBudgetError

_LEAST_GAIN = {True: 0.005, False: 0.03}  # by `keeps_results`, the least gain to report, as a fraction of the step
_BETWEEN = 1.3  # if a budget exceeds the current memory by more than this factor, a budget in between is tried as well


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a plan, and the step that it results in.

    Attributes:
        what: description of the change.
        how: Python code that makes the change, for a sharded `model`.
        seconds: seconds of a step. If the batch changes, seconds per current batch.
        saved: saved seconds.
        peak: largest number of bytes of unsharded parameters and communication.
        added: additional bytes at the peak.
        keeps_results: whether results of training stay the same, except for rounding in sums.
    """

    what: str
    how: str
    seconds: float
    saved: float
    peak: int
    added: int
    keeps_results: bool = True


class _Candidate(NamedTuple):
    what: str
    how: str
    plan: ShardPlan
    keeps_results: bool = True
    batches: int = 1  # number of current batches in one step


def changes_of(plan: ShardPlan, waits: Sequence[Wait], budget: int | None = None) -> tuple[Change, ...]:
    """Find changes that make the step of a plan faster, the fastest first.

    Changes that are slower than another one and need at least as much memory are left out.

    Args:
        plan: a plan with costs.
        waits: the waits of compute in its step.
        budget: largest number of bytes of the pool that a change may use. The best plan within it is returned even if
            it is not faster.

    Raises:
        PoolBudgetError: even the smallest step does not fit into the budget.
    """
    now, causes = plan.predicted(), {wait.cause for wait in waits}
    makers = (_policies, _more_memory, _kept, _reductions, _together, _of_training)
    changes = [_change(each, now) for make in makers for each in _fitting(make, plan, causes)]
    wanted = [each for each in changes if _is_wanted(each, budget)]
    asked = [] if budget is None else [_change(_within(plan, budget), now)]
    ranked = sorted([*wanted, *asked], key=lambda each: (not each.keeps_results, each.seconds, each.peak))
    beaten = {each for at, each in enumerate(ranked) for other in ranked[:at] if _beats(other, each)}
    return tuple(each for each in ranked if each in asked or each not in beaten)


def _is_wanted(change: Change, budget: int | None) -> bool:
    gains = change.saved >= _LEAST_GAIN[change.keeps_results] * (change.seconds + change.saved)
    return gains and (budget is None or change.peak <= budget)


def _beats(one: Change, other: Change) -> bool:
    """Whether `one` makes `other`, which is ranked after it, unnecessary because it needs no more memory."""
    return one.keeps_results and other.keeps_results and one.peak <= other.peak


def _fitting(
    make: Callable[[ShardPlan, set[Cause]], Iterator[_Candidate]], plan: ShardPlan, causes: set[Cause]
) -> Iterator[_Candidate]:
    """The candidates of `make`, up to the first one that does not fit into the plan's budget."""
    try:
        yield from make(plan, causes)
    except PoolBudgetError:
        return


def _change(candidate: _Candidate, now: Prediction) -> Change:
    made = candidate.plan.predicted()
    assert made.seconds is not None
    assert now.seconds is not None
    seconds = made.seconds / candidate.batches
    return Change(
        candidate.what,
        candidate.how,
        seconds,
        now.seconds - seconds,
        made.peak,
        made.peak - now.peak,
        candidate.keeps_results,
    )


# ---- candidates


def _policies(plan: ShardPlan, _: set[Cause]) -> Iterator[_Candidate]:
    """Other prefetch policies within the current budget."""
    prefetch, auto = plan.prefetch, PrefetchPolicy.auto()
    memory = "the memory of depth(1)" if plan.pool.budget is None else "the budget"
    if prefetch != auto:
        what = f"prefetch early and keep weights, within {memory}"
        yield _Candidate(what, "model.set_prefetch_policy(cs.PrefetchPolicy.auto())", plan.with_policies(auto))
    if prefetch.kind == "depth":
        deeper = PrefetchPolicy.depth((prefetch.amount or 0) + 1)
        how = f"model.set_prefetch_policy(cs.PrefetchPolicy.{deeper})"
        yield _Candidate(f"prefetch {deeper.amount} groups", how, plan.with_policies(deeper))


def _more_memory(plan: ShardPlan, _: set[Cause]) -> Iterator[_Candidate]:
    """`auto` within the least budget that hides as much as any budget, and with half of the additional memory."""
    sizes = [group.sizes for group in plan.groups]
    most = 4 * sum(size.weights + size.landing + size.reduction for size in sizes)
    budget = _auto_under(plan, most).peak_bytes
    if budget > plan.peak_bytes:
        yield _within(plan, budget)
        if budget > _BETWEEN * plan.peak_bytes:
            yield _within(plan, (plan.peak_bytes + budget) // 2)


def _within(plan: ShardPlan, budget: int) -> _Candidate:
    auto = "" if plan.prefetch.kind == "auto" else "model.set_prefetch_policy(cs.PrefetchPolicy.auto()); "
    how = f"{auto}model.set_pool_policy(cs.PoolPolicy(budget={budget}))"
    return _Candidate(f"prefetch and keep weights within {mib(budget)}", how, _auto_under(plan, budget))


def _auto_under(plan: ShardPlan, budget: int) -> ShardPlan:
    return plan.with_policies(PrefetchPolicy.auto(), replace(plan.pool, budget=budget))


def _kept(plan: ShardPlan, causes: set[Cause]) -> Iterator[_Candidate]:
    """Keep weights between forward and backward: those of the first backward, or all. `auto` tries that itself."""
    if plan.prefetch.kind == "auto":
        return
    steps = plan.schedule_inputs()[0]
    kept = kept_by_setting(steps)
    last = next((fqn for step in plan.backward_order() if (fqn := step.fqn) not in kept), None)
    if last is not None and Cause.TURN in causes:
        what = f"keep the weights of {plan.group(last).name}, the first group of backward"
        how = f"{_module(last)}.set_reshard_after_forward(False)"
        yield _Candidate(what, how, _keeping(plan, {last}))
    resharded = {step.fqn for step in steps} - {*kept}
    if len(resharded) > 1:
        what = f"keep the weights of all {len(resharded)} groups that are resharded (ZeRO-2)"
        yield _Candidate(what, "model.set_reshard_after_forward(False)", _keeping(plan, resharded))


def _module(fqn: str) -> str:
    return f"model.get_submodule({fqn!r})" if fqn else "model"


def _keeping(plan: ShardPlan, fqns: set[str]) -> ShardPlan:
    return _anew(plan, [_kept_group(each) if each.fqn in fqns else each for each in plan.groups])


def _kept_group(group: GroupPlan) -> GroupPlan:
    return replace(group, reshard_after_forward=False, small_size=0)


def _reductions(plan: ShardPlan, causes: set[Cause]) -> Iterator[_Candidate]:
    """More reductions in flight."""
    if any(group.reduces_first for group in plan.groups):
        groups = [replace(each, reduces_first=False) for each in plan.groups]
        what = "gather in backward while reductions are in flight, which share the cores of a CPU"
        yield _Candidate(what, "model.set_reduce_scatter_max_input_buffers(2)", _anew(plan, groups))
    if Cause.IN_FLIGHT in causes and plan.pool.budget is None:
        schedule = plan.effective_schedule()
        most = 2 * schedule.max_reductions
        how = f"model.set_plan(replace(plan, schedule=replace(plan.effective_schedule(), max_reductions={most})))"
        more = replace(plan, schedule=replace(schedule, max_reductions=most, in_flight=()))
        yield _Candidate(f"allow {most} reductions in flight", how, more)


def _together(plan: ShardPlan, _: set[Cause]) -> Iterator[_Candidate]:
    """Shard two consecutive groups as one."""
    pairs = list(_pairs(plan))
    if pairs:
        one, two = pairs[0]
        what = f"shard two blocks together: {len(pairs)} groups instead of {2 * len(pairs)}"
        how = f"cs.fully_shard([{_module(one.fqn)}, {_module(two.fqn)}]), and so on, before the model runs"
        yield _Candidate(what, how, _merged(plan, pairs))


def _pairs(plan: ShardPlan) -> Iterator[tuple[GroupPlan, GroupPlan]]:
    """Pairs of groups that run one after the other, once each, and are sharded in the same way."""
    nested = {fqn for pair in plan.around for fqn in pair}
    before: GroupPlan | None = None
    for fqn in plan.order:
        group = plan.group(fqn)
        if before is not None and _alike(before, group) and not {before.fqn, fqn} & nested:
            yield before, group
            before = None
        else:
            before = None if group.is_root or plan.order.count(fqn) > 1 else group


def _alike(one: GroupPlan, two: GroupPlan) -> bool:
    return replace(one, fqn="", params=()) == replace(two, fqn="", params=())


def _merged(plan: ShardPlan, pairs: Sequence[tuple[GroupPlan, GroupPlan]]) -> ShardPlan:
    assert plan.costs is not None
    names = {each.fqn: f"{one.fqn}, {two.fqn}" for one, two in pairs for each in (one, two)}
    merged = {one.fqn: replace(one, fqn=names[one.fqn], params=(*one.params, *two.params)) for one, two in pairs}
    second = {two.fqn for _, two in pairs}
    groups = tuple(merged.get(each.fqn, each) for each in plan.groups if each.fqn not in second)
    order = tuple(names.get(fqn, fqn) for fqn in plan.order if fqn not in second)
    costs = _merged_costs(plan, plan.costs, pairs, names)
    return replace(plan, groups=groups, order=order, phases=(), schedule=None, places=(), costs=costs).with_policies()


def _merged_costs(
    plan: ShardPlan, costs: Costs, pairs: Sequence[tuple[GroupPlan, GroupPlan]], names: Mapping[str, str]
) -> Costs:
    """The costs of merged groups. Compute times add up. The smaller group's bytes get the best measured rate."""

    def added(part: str) -> tuple[tuple[str, float], ...]:
        seconds: dict[str, float] = {}
        for fqn, took in getattr(costs, part):
            seconds[names.get(fqn, fqn)] = seconds.get(names.get(fqn, fqn), 0.0) + took
        return tuple(sorted(seconds.items()))

    def sent(part: str) -> tuple[tuple[str, float], ...]:
        seconds = dict(getattr(costs, part))
        rate = min(_rates(plan, part, seconds), default=0.0)
        for one, two in pairs:
            both = [(seconds.pop(each.fqn, None), sum(getattr(each.moved, part))) for each in (one, two)]
            known = [(took, nbytes) for took, nbytes in both if took is not None]
            if len(known) == len(both):
                least, most = sorted(known, key=lambda each: each[1])
                seconds[names[one.fqn]] = most[0] + min(least[0], least[1] * rate)
        return tuple(sorted(seconds.items()))

    return replace(
        costs, forward=added("forward"), backward=added("backward"), gather=sent("gather"), reduce=sent("reduce")
    )


def _rates(plan: ShardPlan, part: str, seconds: Mapping[str, float]) -> Iterator[float]:
    """Seconds per byte of the measured collectives."""
    for fqn, took in seconds.items():
        nbytes = sum(getattr(plan.group(fqn).moved, part)) if fqn in plan.order else 0
        if nbytes and took:
            yield took / nbytes


def _of_training(plan: ShardPlan, _: set[Cause]) -> Iterator[_Candidate]:
    """Changes that also affect training: gathers in bfloat16, and a batch of twice the size."""
    assert plan.costs is not None
    wide = {group.fqn for group in plan.groups if any(param.gathered == torch.float32 for param in group.params)}
    if wide:
        groups = [_narrow(each) if each.fqn in wide else each for each in plan.groups]
        halved = tuple((fqn, took / 2 if fqn in wide else took) for fqn, took in plan.costs.gather)
        what = "gather and compute in bfloat16 (faster compute is not counted)"
        how = "mp_policy=cs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        yield _Candidate(what, how, _anew(plan, groups, costs=replace(plan.costs, gather=halved)), False)
    doubled = plan.costs.scaled(dict.fromkeys(plan.order, 2.0))
    what = "double the batch (times are for the current batch)"
    yield _Candidate(what, "twice the samples on each rank", plan.with_policies(costs=doubled), False, 2)


def _narrow(group: GroupPlan) -> GroupPlan:
    params = tuple(
        replace(param, gathered=torch.bfloat16) if param.gathered == torch.float32 else param for param in group.params
    )
    return replace(group, params=params)


def _anew(plan: ShardPlan, groups: Sequence[GroupPlan], **changes: Any) -> ShardPlan:
    """The plan with other groups, scheduled again by its policies."""
    return replace(plan, groups=tuple(groups), schedule=None, places=(), **changes).with_policies()
