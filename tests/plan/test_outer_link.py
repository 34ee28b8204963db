"""The outer link: refreshes of compute copies, and the part of reductions over the outer axis of a mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

import composable_shard as cs
from _plans import block_plan, costs_of, group_plan
from composable_shard._plan.costs import Costs, Times
from composable_shard._plan.drift import time_drift
from composable_shard._plan.layout import Route
from composable_shard._plan.schedule import Action, Kind, Step, one_ahead, timed_step
from composable_shard._plan.simulation import simulate, trace
from composable_shard._plan.waits import Cause, waits_of

DIRECT = Route("direct", gather_from=0)
FORWARD, BACKWARD, GATHER, REDUCE = 2.0, 4.0, 1.0, 1.0


def timeline(refresh=0.0, outer_reduce=0.0, blocks=2):
    """The times of a chain of blocks of 6 seconds each, whose collectives on the inner link take a second each."""
    steps = [Step(f"b{i}", False, True, True, refreshes=refresh > 0) for i in range(blocks)]
    times = Times(FORWARD, BACKWARD, GATHER, REDUCE, refresh=refresh, outer_reduce=outer_reduce)
    return simulate(timed_step(steps, one_ahead(steps)), {step.fqn: times for step in steps})


def outer_plan(rows=(256, 512, 768), **kwargs):
    plan = block_plan(rows)
    outer = {"outer_size": 4, "outer_route": DIRECT, **kwargs}
    return replace(plan, groups=tuple(replace(group, **outer) for group in plan.groups))


def test_only_the_first_refresh_is_exposed_if_refreshes_are_short():
    # b0: refreshed from 0 to 0.5, gathered until 1.5. b1 is refreshed at 1.0, before its gather is issued.
    line = timeline(refresh=0.5)
    assert line.waits[Action(Kind.FORWARD, "b0")] == 1.5
    assert Action(Kind.FORWARD, "b1") not in line.waits
    assert line.exposed == timeline().exposed + 0.5


def test_a_gather_starts_no_earlier_than_its_refresh_ends():
    # b0: refreshed until 4, gathered until 5, computes until 7. b1: refreshed until 8, gathered until 9.
    line = timeline(refresh=4.0)
    assert line.waits[Action(Kind.FORWARD, "b0")] == 5.0
    assert line.waits[Action(Kind.FORWARD, "b1")] == 2.0
    assert line.begins[:2] == (5.0, 9.0)
    # Backward reads the same copy, so only b1's gather is exposed, as without refreshes.
    assert line.waits[Action(Kind.BACKWARD, "b1")] == timeline().waits[Action(Kind.BACKWARD, "b1")] == 1.0


def test_an_outer_reduction_starts_after_the_inner_one_and_the_last_one_is_exposed():
    # Forward ends at 5. b1's backward: 6 to 10. Its reduction: 10 to 11 on the inner link, 11 to 14 on the outer one.
    # b0's backward: 10 to 14. Its reduction: 14 to 15 on the inner link, 15 to 18 on the outer one.
    line = timeline(outer_reduce=3.0)
    assert line.waits[Action(Kind.REDUCED, "b0")] == 4.0
    assert Action(Kind.REDUCED, "b1") not in line.waits
    assert (line.seconds, line.compute, line.exposed) == (18.0, 12.0, 6.0)
    # A longer outer reduction of b1, from 11 to 17, delays that of b0.
    assert timeline(outer_reduce=6.0).seconds == 17.0 + 6.0


def test_outer_reductions_do_not_delay_gathers():
    steps = [Step(f"b{i}", False, True, True) for i in range(6)]
    on_outer = {step.fqn: Times(1.0, 2.0, 1.0, 1.0, outer_reduce=4.0) for step in steps}
    on_inner = {fqn: replace(times, reduce=5.0, outer_reduce=0.0) for fqn, times in on_outer.items()}
    schedule = replace(one_ahead(steps), max_reductions=6)
    two, one = (simulate(timed_step(steps, schedule), times).waits for times in (on_outer, on_inner))
    gathers = [Action(Kind.BACKWARD, f"b{i}") for i in range(5)]
    assert not any(gather in two for gather in gathers)
    assert all(gather in one for gather in gathers[:-1])


def test_a_group_without_outer_costs_has_the_times_of_one_link():
    plan, outer = block_plan(), outer_plan()
    costs = costs_of(plan)
    assert outer.with_policies(costs=costs).predicted().exposed == plan.with_policies(costs=costs).predicted().exposed


def test_bytes_over_the_outer_axis_follow_from_the_shards():
    group = group_plan("block", 256, outer_size=4, outer_route=DIRECT)  # 256 x 257 parameters over 2 x 4 ranks
    numel = 256 * 257
    assert group.shard_bytes == 4 * numel // 8
    assert group.copy_bytes == sum(group.moved.refresh) == 4 * numel // 2
    marks = 4 * 16  # each rank's chunk ends with 2 marks, padded to 16 bytes
    assert sum(group.moved.outer_reduce) == 4 * numel // 2 + marks
    costs = Costs.of(
        latency=0.0,
        bandwidth=8e9,
        forward={"block": 0.0},
        backward={"block": 0.0},
        outer_latency=1e-3,
        outer_bandwidth=1e9,
    )
    times = costs.times({"block": group.moved})["block"]
    assert times.refresh == pytest.approx(1e-3 + 0.75 * group.copy_bytes / 1e9)
    assert times.outer_reduce == pytest.approx(1e-3 + 0.75 * (group.copy_bytes + marks) / 1e9)
    fixed = replace(costs, small_gather=(("block", 3.0),), refresh=(("block", 1.0),), outer_reduce=(("block", 2.0),))
    times = fixed.times({"block": group.moved})["block"]
    assert (times.small_gather, times.refresh, times.outer_reduce) == (3.0, 1.0, 2.0)


def test_costs_of_the_outer_link_are_checked():
    with pytest.raises(cs.errors.ShardConfigValueError, match=r"Costs\.outer_bandwidth=0"):
        Costs.of(latency=0.0, bandwidth=1.0, forward={}, backward={}, outer_bandwidth=0.0)
    with pytest.raises(cs.errors.ShardConfigValueError, match=r"Costs.refresh\['a'\]=-1.0"):
        Costs.of(latency=0.0, bandwidth=1.0, forward={}, backward={}, refresh={"a": -1.0})


@pytest.mark.parametrize("policy", [cs.PrefetchPolicy.depth(1), cs.PrefetchPolicy.auto()], ids=str)
@pytest.mark.parametrize("streams", [False, True])
def test_waits_for_both_links_add_up_to_the_exposed_time_and_name_the_refresh(policy, streams):
    plan = outer_plan()
    plan = plan.with_policies(policy, costs=costs_of(plan, outer_bandwidth=2e8, streams=streams))
    waits, predicted = waits_of(plan), plan.predicted()
    assert sum(wait.waited for wait in waits) == pytest.approx(predicted.exposed, abs=1e-12)
    refreshed = {wait.fqn: wait for wait in waits if wait.cause is Cause.REFRESH}
    assert "blocks.2" in refreshed
    assert str(refreshed["blocks.2"].behind) == "REFRESH blocks.2"
    last = [wait for wait in waits if wait.cause is Cause.LAST][-1]
    assert last.takes == pytest.approx(plan.times()[last.fqn].reduce + plan.times()[last.fqn].outer_reduce)
    assert f"on the outer link: {1e3 * sum(group.outer for group in predicted.groups):.3f} ms per step" in str(plan)
    assert "refresh over the outer axis" in str(cs.report.explain(plan))


def test_the_outer_link_runs_one_collective_at_a_time():
    plan = outer_plan()
    plan = plan.with_policies(costs=costs_of(plan, outer_bandwidth=2e8))
    step = trace(plan.timed(), plan.times())
    ends = [end for *_, end in step.outer]
    assert [kind for kind, *_ in step.outer] == [Kind.REFRESH] * 4 + [Kind.REDUCE] * 4
    assert all(begin >= end - 1e-12 for (_, _, begin, _), end in zip(step.outer[1:], ends, strict=False))


def test_costs_of_both_links_survive_json():
    plan = outer_plan()
    plan = plan.with_policies(costs=costs_of(plan, outer_bandwidth=2e8, outer_reduce={"": 1.0}))
    assert cs.ShardPlan.from_json(plan.to_json()) == plan


def test_a_measured_reduction_is_compared_with_both_parts_of_the_planned_one():
    plan = outer_plan()
    plan = plan.with_policies(costs=costs_of(plan, outer_bandwidth=2e8, small_gather={"": 0.0}))
    measured = {
        fqn: replace(times, reduce=times.reduce + times.outer_reduce, outer_reduce=0.0, refresh=0.0, apart=False)
        for fqn, times in plan.times().items()
    }
    assert time_drift(plan, measured) == []
    slower = {fqn: replace(times, reduce=2 * times.reduce) for fqn, times in measured.items()}
    assert "blocks.2: its reduce took" in "".join(time_drift(plan, slower))
