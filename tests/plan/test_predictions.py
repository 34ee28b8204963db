"""Plans predict the bytes of a step exactly and its time closely, whether hosts or streams wait."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _stepping import engine_of
from composable_shard.testing import Busy, fabric

P = cs.PrefetchPolicy
CLOCKS = pytest.mark.parametrize("clock", ["virtual", "streams"])
POLICIES = {
    "one ahead": (P.depth(1), None),
    "three ahead": (P.depth(3), None),
    "auto": (P.auto(), None),
    "auto, the least budget": (P.auto(), "least"),
    "auto, the memory of one ahead": (P.auto(), "default"),
}
WIDTHS = (64, 512, 64, 64, 384, 64)
LINK = {"latency": 2e-5, "bandwidth": 1.5e8}
BUSY_S = 4e-4  # seconds of a block's forward
net = functools.partial(fabric, 8, latency_s=LINK["latency"], bandwidth_Bps=LINK["bandwidth"])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread. The matrices are tiny, so threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    """A block. Blocks differ in bytes, but take the same time."""

    dtypes = torch.float32, torch.float32

    def __init__(self, hidden):
        super().__init__()
        one, two = self.dtypes
        self.up, self.down = nn.Linear(32, hidden, False, dtype=one), nn.Linear(hidden, 32, False, dtype=two)
        self.busy = Busy(BUSY_S / 2), Busy(BUSY_S / 2)

    def forward(self, x):
        inner = self.busy[0](self.up(x)).relu().to(self.down.weight.dtype)
        return x + self.busy[1](self.down(inner)).to(x.dtype)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, WIDTHS))
        self.head = nn.Linear(32, 8, bias=False)
        self.turned = False

    def forward(self, x):
        for block in reversed(self.blocks) if self.turned else self.blocks:
            x = block(x)
        return self.head(x)


def built(prefetch, budget=None, reductions=2, reshard=True, mesh=None):
    torch.manual_seed(0)
    model, mesh = Model(), init_device_mesh("cpu", (8,)) if mesh is None else mesh
    for block in model.blocks:
        cs.fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    cs.fully_shard(model, mesh=mesh)
    model.set_reduce_scatter_max_input_buffers(reductions)
    model.set_prefetch_policy(prefetch)
    if budget is not None:
        plan = cs.make_plan(model)
        with pytest.raises(cs.errors.PoolBudgetError) as caught:
            plan.with_policies(pool=cs.PoolPolicy(budget=1))
        model.set_pool_policy(cs.PoolPolicy(caught.value.least if budget == "least" else plan.peak_bytes))
    return model


def train(model, sim, steps=6):
    """Run some steps, and return the exposed seconds of the last step."""
    for step in range(steps):
        sim.reset()
        model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        model.zero_grad()
    return sim.exposed_s


def foreseen(plan, clock):
    """Predicted exposed seconds of the plan's schedule, with the costs that the fabric uses."""
    forward = {group.fqn: BUSY_S if group.fqn else 0.0 for group in plan.groups}
    backward = {fqn: 2 * busy_s for fqn, busy_s in forward.items()}
    costs = cs.Costs.of(**LINK, forward=forward, backward=backward, streams=clock == "streams")
    return replace(plan, costs=costs).predicted().exposed


@pytest.mark.parametrize("name", POLICIES)
@CLOCKS
def test_a_plan_predicts_bytes_exactly_and_with_streams_also_times(clock, name):
    prefetch, budget = POLICIES[name]
    with net(clock=clock) as sim:
        model = built(prefetch, budget)
        exposed = train(model, sim)
        plan, record, pool = cs.make_plan(model), cs.last_record(model), engine_of(model).pool
        assert record.actions == plan.actions()
        assert record.live_bytes == plan.live_bytes()
        assert record.peak_bytes == plan.peak_bytes
        assert budget is None or pool.peak_bytes <= plan.pool.budget
        # A host waits for reductions once half of the weights have been read. This is not exactly half of the backward.
        assert foreseen(plan, clock) == pytest.approx(exposed, rel=0.15 if clock == "virtual" else 1e-9)


@pytest.mark.parametrize("name", ["one ahead", "auto, the least budget"])
def test_a_plan_with_two_dtypes_knows_both_slots_and_predicts_times_within_a_thirtieth(name, monkeypatch):
    """Each group then has two slots. The plan treats them as one slot that is free when both are."""
    monkeypatch.setattr(Block, "dtypes", (torch.float32, torch.float64))
    with net(clock="streams") as sim:
        model = built(*POLICIES[name])
        exposed = train(model, sim)
        plan, pool = cs.make_plan(model), engine_of(model).pool
        assert plan is cs.make_plan(model)
        assert plan.arena().nbytes == pool.arena_bytes
        assert len(plan.arena().lifetimes) > len(plan.lifetimes()), "one slot per dtype"
        assert foreseen(plan, "streams") == pytest.approx(exposed, rel=1 / 30)
        again = cs.ShardPlan.from_json(plan.to_json())
        assert (again.places, again.digest) == (plan.places, plan.digest)
        assert again == replace(plan, places=()), "plans that differ only in places are equal"


@CLOCKS
def test_a_plan_predicts_gathers_among_a_few_ranks(clock):
    with net(clock=clock) as sim:
        model = built(P.depth(2), reshard=4)
        exposed = train(model, sim, 3)
        plan, record = cs.make_plan(model), cs.last_record(model)
        assert (record.actions, record.live_bytes) == (plan.actions(), plan.live_bytes())
        assert foreseen(plan, clock) == pytest.approx(exposed, rel=1e-9)


NODES = {"ranks_per_node": 2, "inter_latency_s": 3e-5}


def costs_on(plan, **kwargs):
    forward = {group.fqn: BUSY_S if group.fqn else 0.0 for group in plan.groups}
    backward = {fqn: 2 * busy_s for fqn, busy_s in forward.items()}
    return cs.Costs.of(forward=forward, backward=backward, streams=True, **kwargs)


@pytest.mark.parametrize("bandwidth", [5e7, 3e8])
def test_a_plan_predicts_reductions_over_replicas_on_the_link_between_nodes(bandwidth):
    with net(clock="streams", inter_bandwidth_Bps=bandwidth, **NODES) as sim:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicate", "shard"))
        model = built(P.depth(1), mesh=mesh)
        exposed = train(model, sim)
        plan = cs.make_plan(model)
        between = {
            group.fqn: sum(each.layout.numel * each.dtype.itemsize for each in group.reductions)
            for group in plan.groups
        }
    outer = {fqn: 2 * (NODES["inter_latency_s"] + 3 / 4 * nbytes / bandwidth) for fqn, nbytes in between.items()}
    assert replace(plan, costs=costs_on(plan, **LINK, outer_reduce=outer)).predicted().exposed == pytest.approx(exposed)
    times = replace(plan, costs=costs_on(plan, **LINK)).times()
    on_one_link = {fqn: times[fqn].reduce + seconds for fqn, seconds in outer.items()}
    more = replace(plan, costs=costs_on(plan, **LINK, reduce=on_one_link)).predicted().exposed
    assert more > 1.1 * exposed


def test_a_plan_predicts_gathers_among_the_ranks_of_a_node():
    with net(clock="streams", inter_bandwidth_Bps=1e8, **NODES) as sim:
        model = built(P.depth(2), reshard=2)
        exposed = train(model, sim, 3)
        plan = cs.make_plan(model)
    in_node = replace(plan, costs=costs_on(plan, **LINK)).times()
    costs = costs_on(
        plan,
        latency=NODES["inter_latency_s"],
        bandwidth=1e8,
        small_gather={fqn: times.small_gather for fqn, times in in_node.items()},
    )
    # Gathers of the node do not wait for reductions, which are on the link between nodes.
    assert replace(plan, costs=costs).predicted().exposed == pytest.approx(exposed)


def test_a_plan_keeps_the_memory_of_reductions_that_get_a_process_group_of_their_own():
    """Their memory is released at the wait then, because a gather that got it earlier could not overlap with them."""
    with net(clock="streams") as sim:
        model = built(P.depth(2))
        train(model, sim)
        shared = cs.make_plan(model)
        model.set_separate_reduce_scatter_group()
        train(model, sim)
        plan, record = cs.make_plan(model), cs.last_record(model)
        assert all(group.frees_queued for group in shared.groups)
        assert not any(group.frees_queued for group in plan.groups)
        assert (record.actions, record.live_bytes) == (plan.actions(), plan.live_bytes())
        assert record.live_bytes != shared.live_bytes()


def evaluated(model, x):
    with torch.no_grad():
        model(x)


def accumulated(model, x):
    model.set_requires_gradient_sync(False)
    model(x).square().mean().backward()
    model.set_requires_gradient_sync(True)


@pytest.mark.parametrize("turned", [False, True], ids=["in the order of training", "in another order"])
@pytest.mark.parametrize(("phase", "once"), [("no_grad", evaluated), ("train, no sync", accumulated)])
@pytest.mark.parametrize("name", ["three ahead", "auto, the memory of one ahead"])
def test_a_phase_leases_the_bytes_of_its_plan_within_the_budget(phase, once, turned, name):
    with net(clock="virtual") as sim:
        model = built(*POLICIES[name])
        train(model, sim, 1)
        pool = engine_of(model).pool
        for step in range(4):
            train(model, sim, 1)
            sim.reset()
            model.turned, pool.peak_bytes = turned, 0
            once(model, torch.randn(4, 32, generator=torch.Generator().manual_seed(step)))
            model.turned = False
        plan = cs.make_plan(model)
        own = plan.in_phase(phase)
        assert (phase in plan.own_orders) == turned
        kept, usual = (set(each.effective_schedule().kept) for each in (own, plan))
        assert plan.pool.budget is None or (kept != usual) == turned
        record = cs.last_record(model)
        assert (record.actions, record.live_bytes) == (own.actions(), own.live_bytes())
        assert pool.peak_bytes == own.peak_bytes <= plan.peak_bytes <= (plan.pool.budget or plan.peak_bytes)


def test_a_second_forward_before_backward_stays_within_the_budget_and_computes_the_same():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(7))
    seen = []
    for name in ("one ahead", "auto, the memory of one ahead"):
        with net(clock="virtual") as sim:
            model = built(*POLICIES[name])
            train(model, sim)
            (model(x) + model(2 * x)).square().mean().backward()
            seen.append([param.grad.to_local() for param in model.parameters()])
            plan, pool = cs.make_plan(model), engine_of(model).pool
    assert len(plan.effective_schedule().kept) > 1, "weights of the first forward stay unsharded"
    assert pool.peak_bytes <= plan.pool.budget
    assert all(map(torch.equal, *seen))


@CLOCKS
def test_each_group_has_the_planned_number_of_reductions_in_flight(clock):
    with net(clock=clock) as sim:
        model = built(P.depth(2))
        plan = cs.make_plan(model)
        fewer = (("blocks.4", 1), ("blocks.1", 1))
        schedule = replace(plan.with_policies(P.depth(2)).effective_schedule(), in_flight=fewer)
        model.set_plan(replace(plan, schedule=schedule))
        train(model, sim, 3)
        record, followed = cs.last_record(model), cs.make_plan(model)
        assert (
            record.actions
            == followed.actions()
            != replace(followed, schedule=replace(schedule, in_flight=())).actions()
        )
        assert record.live_bytes == followed.live_bytes()
        assert "2, 1 for blocks.4, 1 for blocks.1" in str(followed)
        assert cs.ShardPlan.from_json(followed.to_json()) == followed


class BrokenError(Exception):
    pass


def test_a_failed_reduction_releases_its_memory(monkeypatch):
    with net(clock="virtual") as sim:
        model = built(P.depth(1))
        train(model, sim, 2)
        pool = engine_of(model).pool
        sim_wait, calls = sim._wait, []

        def wait(event, finish_s):
            if event.kind == "reduce_scatter" and not calls:
                calls.append(event)
                raise BrokenError
            sim_wait(event, finish_s)

        monkeypatch.setattr(sim, "_wait", wait)
        with pytest.raises(BrokenError):
            train(model, sim, 1)
        train(model, sim, 1)
        assert calls
        assert pool.live_bytes == 0
