"""What a plan says of a step, beside the step, where hosts wait and where streams do: bytes equal, time near."""

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
BUSY_S = 4e-4  # forward of a block
net = functools.partial(fabric, 8, latency_s=LINK["latency"], bandwidth_Bps=LINK["bandwidth"])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The matrices are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    """Uneven in bytes, even in time."""

    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(32, hidden, bias=False), nn.Linear(hidden, 32, bias=False)
        self.busy = Busy(BUSY_S / 2), Busy(BUSY_S / 2)

    def forward(self, x):
        return x + self.busy[1](self.down(self.busy[0](self.up(x)).relu()))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, WIDTHS))
        self.head = nn.Linear(32, 8, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def built(prefetch, budget=None, reductions=2):
    torch.manual_seed(0)
    model, mesh = Model(), init_device_mesh("cpu", (8,))
    for block in model.blocks:
        cs.fully_shard(block, mesh=mesh, reshard_after_forward=True)
    cs.fully_shard(model, mesh=mesh)
    model.set_reduce_scatter_max_input_buffers(reductions)
    model.set_prefetch_policy(prefetch)
    if budget is not None:
        plan = cs.make_plan(model)
        with pytest.raises(cs.PoolBudgetError) as caught:
            plan.with_policies(pool=cs.PoolPolicy(budget=1))
        model.set_pool_policy(cs.PoolPolicy(caught.value.least if budget == "least" else plan.peak_bytes))
    return model


def train(model, sim, steps=6):
    """The last step's exposed seconds."""
    for step in range(steps):
        sim.reset()
        model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        model.zero_grad()
    return sim.exposed_s


def foreseen(plan):
    """Exposed seconds of its schedule, from what the fabric was told."""
    forward = {group.fqn: BUSY_S if group.fqn else 0.0 for group in plan.groups}
    costs = cs.Costs.of(**LINK, forward=forward, backward={fqn: 2 * busy_s for fqn, busy_s in forward.items()})
    return replace(plan, costs=costs).predicted().exposed


@pytest.mark.parametrize("name", POLICIES)
@CLOCKS
def test_a_plan_foretells_bytes_exactly_and_exposed_time_within_a_seventh(clock, name):
    prefetch, budget = POLICIES[name]
    with net(clock=clock) as sim:
        model = built(prefetch, budget)
        exposed = train(model, sim)
        plan, record, pool = cs.current_plan(model), cs.last_record(model), engine_of(model).pool
        assert record.actions == plan.actions()
        assert record.live_bytes == plan.live_bytes()
        assert record.peak_bytes == plan.peak_bytes
        assert budget is None or pool.peak_bytes <= plan.pool.budget
        assert exposed <= 1.15 * foreseen(plan)
        # A stream gathers into memory that is free already: it may be earlier than the host that stands by.
        assert clock == "streams" or foreseen(plan) <= 1.15 * exposed


@CLOCKS
def test_as_many_reductions_fly_as_the_plan_says_group_by_group(clock):
    with net(clock=clock) as sim:
        model = built(P.depth(2))
        plan = cs.make_plan(model)
        fewer = (("blocks.4", 1), ("blocks.1", 1))
        schedule = replace(plan.with_policies(P.depth(2)).edges(), in_flight=fewer)
        model.set_plan(replace(plan, schedule=schedule))
        train(model, sim, 3)
        record, followed = cs.last_record(model), cs.current_plan(model)
        assert (
            record.actions
            == followed.actions()
            != replace(followed, schedule=replace(schedule, in_flight=())).actions()
        )
        assert record.live_bytes == followed.live_bytes()
        assert "2, 1 with that of blocks.4, 1 with that of blocks.1" in str(followed)
        assert cs.ShardPlan.from_json(followed.to_json()) == followed


class BrokenError(Exception):
    pass


def test_a_reduction_that_fails_gives_its_memory_back(monkeypatch):
    with net(clock="virtual") as sim:
        model = built(P.depth(1))
        train(model, sim, 2)
        pool = engine_of(model).pool
        sim_wait, calls = sim.wait, []

        def wait(event, finish_s):
            if event.kind == "reduce_scatter" and not calls:
                calls.append(event)
                raise BrokenError
            sim_wait(event, finish_s)

        monkeypatch.setattr(sim, "wait", wait)
        with pytest.raises(BrokenError):
            train(model, sim, 1)
        train(model, sim, 1)
        assert calls
        assert pool.live_bytes == 0
