"""The waits of compute in a step, and their causes."""

from __future__ import annotations

import random

import pytest

import composable_shard as cs
from _plans import block_plan, costs_of
from composable_shard._plan.schedule import Kind
from composable_shard._plan.waits import Cause, waits_of

DEPTH, AUTO = cs.PrefetchPolicy.depth, cs.PrefetchPolicy.auto()


def planned(rows=(256, 256, 256), prefetch=None, budget=None, reduces_first=False, **costs):
    plan = block_plan(rows, reduces_first=reduces_first, frees_queued=costs.get("streams", False))
    return plan.with_policies(prefetch or DEPTH(1), cs.PoolPolicy(budget=budget), costs_of(plan, **costs))


def causes(plan):
    """The causes of all waits, by kind, group and direction."""
    names = {Kind.UNSHARD: "gather", Kind.REDUCE: "reduction"}
    return {f"{names[each.kind]} {each.fqn} {'fb'[each.backward]}": each.cause for each in waits_of(plan)}


@pytest.mark.parametrize("streams", [False, True])
def test_waits_add_up_to_the_exposed_time(streams):
    rng, seen = random.Random(1), 0
    for _ in range(25):
        rows = [rng.choice([16, 64, 256, 512, 900]) for _ in range(rng.randint(1, 7))]
        policy = rng.choice([DEPTH(rng.randint(0, 3)), cs.PrefetchPolicy.bytes(10**6), AUTO])
        budget = rng.choice([None, 3 << 20])
        speed = {"bandwidth": 10 ** rng.uniform(8, 10), "latency": 10 ** rng.uniform(-6, -4)}
        plan = planned(rows, policy, budget, rng.random() < 0.3, streams=streams, **speed)
        waits = waits_of(plan)
        assert sum(wait.waited for wait in waits) == pytest.approx(plan.predicted().exposed, abs=1e-12)
        seen += len(waits)
    assert seen > 80


def test_a_plan_without_costs_has_no_waits():
    assert waits_of(block_plan()) == ()


def test_the_first_gathers_and_the_last_reduction_cannot_be_hidden():
    plan = planned(backward=4e-3, forward=4e-3)  # the root also computes, before the first block
    assert causes(plan) == {
        "gather  f": Cause.FIRST,
        "reduction blocks.0 b": Cause.LAST,
        "reduction  b": Cause.LAST,
    }
    fqns = plan.order
    compute = {fqn: 4e-3 if fqn else 0.0 for fqn in fqns}
    costs = cs.Costs.of(latency=1e-5, bandwidth=2e9, forward=compute, backward=compute)
    assert causes(plan.with_policies(costs=costs))["gather blocks.2 b"] is Cause.TURN


def test_late_issue_by_the_policy_is_distinguished_from_a_busy_link():
    late = planned(prefetch=DEPTH(0), bandwidth=2e9)
    assert {cause for where, cause in causes(late).items() if "gather blocks" in where} == {Cause.POLICY}
    waits = [wait for wait in waits_of(late) if wait.kind is Kind.UNSHARD and wait.fqn]
    assert all(wait.issued_in == wait.fqn and wait.hidden == 0 for wait in waits)
    busy = planned(prefetch=DEPTH(3), bandwidth=2e8)
    assert causes(busy)["gather blocks.2 f"] is Cause.LINK
    assert causes(late.with_policies(DEPTH(2))).keys() < causes(late).keys()


def test_a_gather_that_the_budget_delays_would_be_issued_earlier_without_it():
    rows = (256, 512, 64, 768, 64)
    held, free = (planned(rows, DEPTH(2), budget, bandwidth=1e9) for budget in (1_700_000, None))
    assert causes(held)["gather blocks.3 f"] is Cause.BUDGET
    assert causes(free).get("gather blocks.3 f") is not Cause.BUDGET
    within_one_ahead = planned(rows, AUTO, bandwidth=2e9)
    assert causes(within_one_ahead)["gather blocks.3 f"] is Cause.BUDGET


def test_reductions_first_and_the_limit_in_flight_cause_waits():
    first = planned((256, 512, 64, 768, 64), reduces_first=True, bandwidth=1e9)
    assert causes(first)["reduction blocks.3 b"] is Cause.REDUCES_FIRST
    waits = {wait.fqn: wait for wait in waits_of(first) if wait.cause is Cause.REDUCES_FIRST}
    assert waits["blocks.3"].holds_up == "blocks.1"
    kept = block_plan((256,) * 5, reshard_after_forward=False)  # backward gathers nothing
    slow = {fqn: 3e-3 if fqn == "blocks.4" else 1e-5 for fqn in kept.order}
    waits = [wait for wait in waits_of(kept.with_policies(costs=costs_of(kept, reduce=slow))) if wait.backward]
    assert [(wait.fqn, wait.cause, wait.holds_up) for wait in waits[:1]] == [("blocks.4", Cause.IN_FLIGHT, "blocks.2")]


def test_a_gather_that_waits_on_the_link_names_the_collective_before_it():
    plan = block_plan((768, 768, 64, 64, 768, 64))
    slow = {fqn: 3e-3 if fqn == "blocks.4" else 1e-5 for fqn in plan.order}
    waits = waits_of(plan.with_policies(costs=costs_of(plan, reduce=slow)))
    [wait] = [wait for wait in waits if wait.backward and wait.kind is Kind.UNSHARD]
    assert (wait.fqn, wait.cause, str(wait.behind)) == ("blocks.2", Cause.LINK, "REDUCE blocks.4")
    assert wait.queued == pytest.approx(3e-3)


def test_small_groups_on_a_busy_link_wait_for_its_latency():
    plan = planned((2048, 16, 16, 16, 16), latency=1e-3, bandwidth=1e10)
    waits = [wait for wait in waits_of(plan) if wait.cause is Cause.LATENCY]
    assert waits
    assert {wait.fqn for wait in waits} <= {f"blocks.{number}" for number in range(1, 5)}
    assert all(0.9 * wait.takes < wait.fixed < wait.takes for wait in waits)


def test_with_streams_a_gather_waits_for_its_memory():
    plan = planned((256, 512, 64, 768, 64), bandwidth=1e9, streams=True)
    assert causes(plan)["gather blocks.1 b"] is Cause.MEMORY
