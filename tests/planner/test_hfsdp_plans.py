"""Plans of `hfsdp` and of resharding to the ranks of a node: bytes, times on both links, and recommendations."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

import composable_shard as cs
from composable_shard._policies import AS_IT_IS
from composable_shard.cli.bits import add_bits, bits_of
from composable_shard.planner import KNOWN, Layout, Link, Shape, Strategy, advise, text
from composable_shard.planner.advise import Planner
from composable_shard.planner.precision import PRECISIONS
from composable_shard.planner.rehearsal import rehearse_source
from composable_shard.planner.rounding import passing_bytes
from composable_shard.planner.sources import source_of
from composable_shard.planner.strategies import (
    moved_bytes,
    plan_of,
    reducing,
    shard_bytes,
    strategies,
    strategy_named,
)
from composable_shard.planner.timing import compute_seconds, costs_of, has_two_links, on_links, sent

EVEN = Shape(layers=3, width=256, heads=4, vocabulary=256, sequence=64, hidden=512)  # all sizes are multiples of 8
MIXED = PRECISIONS["bfloat16-mixed"]
NODES, RANKS = 2, 4
OUTER, INNER = Link(1e9, 1e-4), Link(8e9, 1e-5)
MACHINE = replace(KNOWN["h100"], devices_per_node=RANKS, intra_node=INNER, inter_node=OUTER)
HFSDP = strategy_named("hfsdp", NODES * RANKS, replicas=NODES)
HSDP = strategy_named("hsdp", NODES * RANKS, replicas=NODES)


def plan_for(strategy, machine=MACHINE, comm=AS_IT_IS):
    base = source_of(EVEN).plan(MIXED, 1, comm)
    return base, plan_of(base, strategy, machine)


def costs_for(strategy, machine=MACHINE):
    computed = compute_seconds(source_of(EVEN).traced(MIXED, "none", 1), machine, strategy.layout)
    plan = plan_for(strategy, machine)[1]
    return plan, costs_of(plan, strategy, computed, machine)


def test_hfsdp_splits_what_is_stored_over_all_ranks_and_copies_over_a_node():
    memory = Planner(source_of(EVEN), MIXED, 1).estimate(HFSDP, MACHINE).memory.most
    size = EVEN.parameters
    assert memory.parameters == memory.gradients == 4 * size // (NODES * RANKS)
    assert memory.optimizer == 2 * 4 * size // (NODES * RANKS)
    assert memory.copies == 2 * size // RANKS
    in_replicas = Planner(source_of(EVEN), MIXED, 1).estimate(HSDP, MACHINE).memory.most
    assert in_replicas.parameters == NODES * memory.parameters
    assert in_replicas.copies == 0
    assert in_replicas.unsharded == memory.unsharded
    base, plan = plan_for(HFSDP)
    assert shard_bytes(base, plan) == {
        group.fqn: (4 * numel // 8, 4 * numel // 8)
        for group in plan.groups
        for numel in [sum(param.numel for param in group.params)]
    }


def test_reductions_of_hfsdp_allocate_a_result_and_a_bucket_of_a_node():
    _, plan = plan_for(HFSDP)
    for group in plan.groups:
        node = sum(4 * param.numel for param in group.params) // RANKS
        marks = -(-len(group.params) // 4) * 16  # bytes at the end of a rank's chunk
        assert reducing(plan, HFSDP, MACHINE).nbytes[group.fqn] == node + node + NODES * marks


def test_hfsdp_moves_the_refresh_and_half_of_an_all_reduce_between_nodes():
    moved = {strategy.name: moved_bytes(plan_for(strategy)[1], strategy) for strategy in (HFSDP, HSDP)}
    node = EVEN.parameters // RANKS
    # HSDP: an all-reduce in float32. HFSDP: a gather in bfloat16 and a reduce-scatter in float32.
    saved = 0.5 * (2 * 4 - (2 + 4)) * node
    assert moved["hsdp"] - moved["hfsdp"] == pytest.approx(saved, rel=0.01)


def test_gradients_in_fewer_bits_take_memory_while_they_are_added():
    _, plan = plan_for(HFSDP, comm=cs.CommPolicy(replicas="int8", refresh="int8"))
    block = plan.groups[1]
    exact = plan_for(HFSDP)[1].groups[1]
    assert passing_bytes(block, NODES, True) > passing_bytes(exact, NODES, True) == 0
    assert sum(block.moved.refresh) < 0.6 * sum(exact.moved.refresh)
    assert sum(block.moved.outer_reduce) < 0.3 * sum(exact.moved.outer_reduce)


def test_commands_accept_a_format_of_refreshes():
    parser = argparse.ArgumentParser()
    add_bits(parser)
    assert bits_of(parser.parse_args(["--refresh=int8"])) == cs.CommPolicy(refresh="int8")
    assert bits_of(parser.parse_args([])) == AS_IT_IS


def test_the_outer_axis_has_a_link_of_its_own_if_it_leaves_the_node():
    plan, costs = costs_for(HFSDP)
    reductions, refreshes = dict(costs.outer_reduce), dict(costs.refresh)
    for group in plan.groups:
        (refresh,), (outer,) = group.moved.refresh, group.moved.outer_reduce
        assert refresh == 2 * sum(param.numel for param in group.params) // RANKS
        assert refreshes[group.fqn] == OUTER.latency + 0.5 * refresh / OUTER.bandwidth
        assert reductions[group.fqn] == OUTER.latency + 0.5 * outer / OUTER.bandwidth
        assert dict(costs.gather)[group.fqn] == sum(sent(INNER, RANKS, nbytes) for nbytes in group.moved.gather)
    _, replicated = costs_for(HSDP)
    assert dict(replicated.refresh) == dict.fromkeys(refreshes, 0.0)
    assert all(1.9 * reductions[fqn] < 2 * each for fqn, each in dict(replicated.outer_reduce).items())
    one_node = replace(MACHINE, devices_per_node=8)
    assert has_two_links(MACHINE, HSDP.layout)
    assert not has_two_links(one_node, HSDP.layout)
    for machine in (one_node, replace(MACHINE, backend="gloo")):  # one link for all, as the host waits in order
        assert set(dict(costs_for(HSDP, machine)[1].outer_reduce).values()) == {0.0}
    ours, inner = (dict(each.reduce)[""] for each in (costs_for(HSDP, one_node)[1], replicated))
    assert ours > inner


def test_a_step_of_hfsdp_exposes_its_first_refresh_and_its_last_reduction():
    """If compute hides everything between, these are left: the root's collectives, and the first gather of a block."""
    fast = replace(MACHINE, flops={"float32": 1e9}, launch=0.0)
    plan, costs = costs_for(HFSDP, fast)
    timed = plan.with_policies(costs=costs)
    first = {"": 1e-12} | dict.fromkeys(list(plan.order)[1:], 1.0)
    timed = plan.with_policies(costs=replace(costs, forward=tuple(first.items()), backward=tuple(first.items())))
    times, block = timed.times(), plan.order[1]
    # The root is refreshed, then gathered. Meanwhile, the first block is refreshed. Then it is gathered.
    ends = max(times[""].refresh + times[""].gather, times[""].refresh + times[block].refresh)
    ahead = ends + times[block].gather
    backward = times[plan.order[-1]].gather  # the last block is gathered again when backward begins
    behind = max(times[block].reduce + times[block].outer_reduce, times[block].reduce + times[""].reduce)
    behind += times[""].outer_reduce
    assert timed.predicted().exposed == pytest.approx(ahead + backward + behind, rel=1e-6)


def test_weights_that_are_resharded_to_a_node_are_gathered_there_in_backward():
    few = Strategy("zero3", Layout(1, NODES * RANKS), few=RANKS)
    plan, costs = costs_for(few)
    assert {group.small_size for group in plan.groups} == {RANKS}
    times = plan.with_policies(costs=costs).times()
    for group in plan.groups:
        (gathered,), (small,) = group.moved.gather, group.moved.small_gather
        assert small == gathered == 2 * sum(param.numel for param in group.params)
        # A ring over two nodes of four ranks leaves each node once, over four adapters of 1 GB/s each.
        ring = Link(4 * OUTER.bandwidth, OUTER.latency + INNER.latency)
        assert times[group.fqn].gather == pytest.approx(sent(ring, NODES * RANKS, gathered))
        assert times[group.fqn].small_gather == pytest.approx(sent(INNER, RANKS, small))
    most = {
        each: Planner(source_of(EVEN), MIXED, 1).estimate(each, MACHINE).memory.most.unsharded
        for each in (few, replace(few, few=0))
    }
    assert most[few] > most[replace(few, few=0)]
    with pytest.raises(cs.errors.ShardConfigValueError, match="few 4: resharding to a few ranks cannot be rehearsed"):
        rehearse_source(source_of(EVEN), few, MIXED, 1)


def test_plans_move_to_the_links_of_another_machine():
    plan, costs = costs_for(HFSDP)
    faster = replace(MACHINE, inter_node=Link(2e9, 1e-4))
    times = on_links(plan.with_policies(costs=costs), faster).times()
    for group in plan.groups:
        assert times[group.fqn].refresh == pytest.approx(sent(faster.inter_node, NODES, sum(group.moved.refresh)))


def test_strategies_that_use_nodes_are_considered_for_several_whole_nodes():
    def names(devices, per_node, tensor=(1,)):
        return {str(each) for each in strategies(devices, per_node, tensor)}

    assert {"hfsdp 4x8", "zero3, few 8", "hfsdp 4x8, full checkpointing"} <= names(32, 8)
    assert {"hfsdp 4x4, tp 2", "zero3, few 4, tp 2"} <= names(32, 8, (2,))
    assert not any("hfsdp" in name or "few" in name for name in names(8, 8) | names(12, 8) | names(8, 1))
    assert not any("offload" in name for name in names(32, 8) if "hfsdp" in name or "few" in name)
    assert str(HFSDP) == "hfsdp 2x4"
    with pytest.raises(cs.errors.ShardConfigValueError, match="replicas: 8 devices cannot be divided evenly into 3"):
        strategy_named("hfsdp", 8, replicas=3)


@pytest.mark.matrix
def test_hfsdp_is_recommended_if_replicas_do_not_fit_and_gathers_between_nodes_are_slow():
    wide = Shape(3, 1024, 8, 4096, 128)
    machine = replace(KNOWN["a100-80gb"], devices_per_node=4, inter_node=Link(2e9, 1e-5))
    settings = {"devices": 16, "batch": 4}

    def of(advice, strategy):
        return next(each for each in advice.estimates if str(each.strategy) == strategy)

    free = advise(wide, machine=machine, **settings)
    ours = of(free, "hfsdp 4x4")
    smaller = of(free, "hsdp 4x4").needed - 1
    assert ours.needed < smaller
    tight = advise(wide, machine=replace(machine, memory=smaller), **settings)
    assert str(tight.recommended.strategy) == "hfsdp 4x4"
    assert not of(tight, "hsdp 4x4").fits
    assert of(tight, "zero3").tokens_per_second < 0.8 * ours.tokens_per_second
    assert "hfsdp gathers within a node, from compute copies of" in tight.reason
    assert "hsdp 4x4 keeps a whole optimizer state in each node" in tight.reason
    assert "which does not fit. zero3 gathers between nodes, which exposes" in tight.reason
    lines = text.script(tight, tight.recommended)
    assert 'strategy="hfsdp",\n    replicas=4,' in lines
    assert "    reshard_after_forward=4,\n" in text.script(tight, of(tight, "zero3, few 4"))


def test_hfsdp_is_not_recommended_for_a_small_model_on_fast_links():
    advice = advise(EVEN, devices=16, machine="h100", batch=8)
    assert advice.recommended.strategy.name == "ddp"
    best = {each.strategy.name: each for each in reversed(advice.estimates) if not each.strategy.offloads}
    # A refresh costs another latency between nodes, which is more than the bytes that the reduction saves.
    assert best["hsdp"].time.seconds < best["hfsdp"].time.seconds
