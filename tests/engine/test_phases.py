"""Forwards of other phases between training steps: each follows its own schedule and affects no other."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _stepping import engine_of
from composable_shard import testing
from composable_shard._plan.schedule import Kind

WIDTH = 64


class Turning(nn.Module):
    """Layers that run in any order, in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, turned=False):
        layers = self.layers[::-1] if turned else self.layers
        return checkpoint(
            lambda x: functools.reduce(lambda x, layer: torch.tanh(layer(x)), layers, x), x, use_reentrant=False
        )


def gathers_of(engine, since):
    done = engine._actions.recorder.history.done[since:]
    return [fqn for kind, fqn in zip(done[::3], done[1::3], strict=True) if kind is Kind.UNSHARD]


def test_an_evaluation_between_forward_and_backward_keeps_the_recomputations_schedule():
    def body(here):
        torch.manual_seed(0)
        model = Turning()
        for layer in model.layers:
            cs.fully_shard(layer, mesh=here.mesh)
        cs.fully_shard(model, mesh=here.mesh)
        x = torch.randn(3, WIDTH, requires_grad=True)

        def evaluate():
            with torch.no_grad():
                model(x, turned=True)

        for _ in range(3):
            model(x).sum().backward()
            evaluate()
        plan = cs.make_plan(model)
        everything = replace(plan.effective_schedule(), kept=tuple(filter(None, plan.order)), backward=())
        model.set_plan(replace(plan, schedule=everything))
        for _ in range(2):
            loss = model(x).sum()
            evaluate()
            engine = engine_of(model)
            before = len(engine._actions.recorder.history.done)
            loss.backward()
        return gathers_of(engine, before)

    # Evaluation reshards all groups. They are gathered once, because the recomputation keeps them for its backward.
    assert testing.spmd(2)(body) == [[f"layers.{at}" for at in range(4)]] * 2


def test_views_kept_by_one_rank_change_no_decision_under_a_budget():
    size = 256 * 256 * 4

    def body(here):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
        for layer in model:
            cs.fully_shard(layer, mesh=here.mesh)
        cs.fully_shard(model, mesh=here.mesh)

        def step():
            model(torch.randn(2, 256)).sum().backward()
            model.zero_grad()

        step()
        model.set_pool_policy(cs.PoolPolicy(budget=2 * size + 4096))
        step()
        kept = []
        handles = [
            layer.register_forward_pre_hook(lambda layer, _: kept.append(layer.weight.view(-1)))
            for layer in (model[:2] if here.rank == 0 else [])
        ]
        step()
        pool = engine_of(model).pool
        assert pool.lent_bytes == pool.live_bytes
        assert (pool.lent_bytes >= 2 * size) == (here.rank == 0)
        actions = cs.last_record(model).actions
        kept.clear()
        for handle in handles:
            handle.remove()
        step()
        step()
        assert (pool.lent_bytes, pool.live_bytes) == (0, 0)
        return actions

    first, second = testing.spmd(2, timeout=30)(body)
    assert first == second


def test_a_module_used_only_in_evaluation_needs_no_memory_for_a_reduction():
    low = cs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    class Evaluated(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(256, 256, bias=False), nn.Linear(256, 512, bias=False)

        def forward(self, x):
            return self.body(x) if torch.is_grad_enabled() else self.head(self.body(x))

    def body(here):
        model = Evaluated()
        for each in (model.body, model.head, model):
            cs.fully_shard(each, mesh=here.mesh, mp_policy=low)
        weights = {name: 2 * param.numel() for name, param in model.named_parameters()}
        budget = sum(weights.values()) + 4096
        for at in range(4):
            model(torch.randn(2, 256)).sum().backward()
            if at == 1:
                model.set_pool_policy(cs.PoolPolicy(budget))
            with torch.no_grad():
                model(torch.randn(2, 256))
        own = cs.make_plan(model).in_phase("no_grad")
        assert own.order == ("body", "head")
        return own.peak_bytes <= budget < 4 * weights["head.weight"]

    assert testing.spmd(2)(body) == [True, True]


def test_fake_weights_assigned_over_others_run():
    with testing.fake(2) as world, FakeTensorMode():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for layer in model:
            cs.fully_shard(layer, mesh=world.mesh)
        cs.fully_shard(model, mesh=world.mesh)
        model.to_empty(device="cpu")
        for _ in range(2):
            model(torch.randn(2, 8)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
