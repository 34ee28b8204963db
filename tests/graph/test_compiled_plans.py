"""A compiled graph follows the whole schedule of a plan: kept weights, reductions in flight, and the budget.

The tests run on the fabric, in one process. Results are bitwise identical to the eager engine with the same plan.
`EXPECTTEST_ACCEPT=1` rewrites the sequences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _compiling import text_of
from _stepping import pool_of
from composable_shard import testing
from composable_shard.report import watch_graphs

with warnings.catch_warnings():  # raised by the module's own imports
    warnings.simplefilter("ignore")
    import torch._dynamo.testing

P = cs.PrefetchPolicy
WORLD, WIDTH, BLOCKS = 4, 32, 4
WEIGHTS = 4 * 2 * WIDTH * WIDTH  # bytes of a block


class Block(nn.Sequential):
    """Two products in a user-defined forward: torch 2.11 does not compile torch's own modules on their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Chain(nn.Module):
    """A norm in the root's own group, and blocks of two products each, checkpointed or not."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(
            Block(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(BLOCKS)
        )
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


@contextlib.contextmanager
def network() -> Iterator[None]:
    torch._dynamo.reset()
    with testing.fabric(WORLD, latency_s=1e-5, bandwidth_Bps=1e9, clock="streams"):
        yield
    torch._dynamo.reset()


def sharded(checkpoints=False):
    torch.manual_seed(3)
    model, mesh = Chain(checkpoints), init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        cs.fully_shard(block, mesh=mesh)
    cs.fully_shard(model, mesh=mesh)
    model.set_reduce_scatter_max_input_buffers(2)  # otherwise CPUs wait for reductions before they gather
    return model


def steps(run, model, count=2):
    """Losses, gradients and parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    found = []
    for _ in range(count):
        loss = run(torch.randn(3, WIDTH)).square().mean()
        loss.backward()
        found += [loss.detach(), *(param.grad.to_local().clone() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found + [param.detach().to_local().clone() for param in model.parameters()]


def plan_of(model, **schedule):
    """A plan that prefetches one group ahead, with these changes of its schedule."""
    plan = cs.make_plan(model)
    edges = dataclasses.replace(plan.effective_schedule(), **schedule)
    away = {fqn for fqn in plan.order if fqn not in edges.kept}
    backward = tuple((at, tuple(fqn for fqn in those if fqn in away)) for at, those in edges.backward)
    return dataclasses.replace(plan, schedule=dataclasses.replace(edges, backward=backward))


KEPT = ("", "blocks.1", "blocks.3")
SCHEDULES = {
    "two blocks kept": {"kept": KEPT},
    "all kept": {"kept": ("", *(f"blocks.{i}" for i in range(BLOCKS)))},
    "three, one for blocks.1": {"max_reductions": 3, "in_flight": (("blocks.1", 1),)},
    "both": {"kept": KEPT, "max_reductions": 1, "reduces_first": True},
}


def graphs_under(schedules, checkpoints):
    """The graphs compiled under each schedule, as text; results must equal those of eager steps with the same one."""
    found = []
    for name, schedule in schedules.items():
        with network(), watch_graphs() as graphs:
            results = []
            for compiles in (False, True):
                model = sharded(checkpoints)
                model.set_plan(plan_of(model, **schedule))
                run = cs.compile(model, backend="aot_eager") if compiles else model
                results.append(steps(run, model))
        eager, compiled = results
        assert len(eager) == len(compiled)
        assert all(map(torch.equal, eager, compiled)), name
        found.append(f"{name}\n{text_of(graphs)}")
    return "".join(found)


@pytest.mark.matrix
def test_graphs_keep_the_weights_of_the_plan_and_its_number_of_reductions_in_flight():
    assert_expected_inline(
        graphs_under(SCHEDULES, checkpoints=False),
        """\
two blocks kept
forward GwGwGmmwGmmwGmmwmm, saves 19736 bytes
backward GmmmmRmwmmmRGmmmmwRmwmmmwRwRww
all kept
forward GwGwGmmwGmmwGmmwmm, saves 36120 bytes
backward mmmmRmmmmRmmmmwRmmmmwRwRww
three, one for blocks.1
forward GwGwGmmwGmmwGmmwmm, saves 3352 bytes
backward GGmwmmmRGmwmmmRGmwmmmwwRmwmmmRRwww
both
forward GwGwGmmwGmmwGmmwmm, saves 19736 bytes
backward GmmmmRmwmmmwRmmwGmmRmwmmmwRwRw
""",
    )


@pytest.mark.matrix
def test_graphs_of_checkpointed_blocks_follow_the_plan():
    chosen = {name: SCHEDULES[name] for name in ("two blocks kept", "both")}
    assert_expected_inline(
        graphs_under(chosen, checkpoints=True),
        """\
two blocks kept
forward GwGwGmmwGmmwGmmwmm, saves 18200 bytes
backward GmmmmmRwmmmmmRGmmmmmwRwmmmmmwRwRww
both
forward GwGwGmmwGmmwGmmwmm, saves 18200 bytes
backward GmmmmmRwmmmmmwRmmwGmmmRwmmmmmwRwRw
""",
    )


COSTS = {
    "fast compute": (1e-6, 2e-6),
    "slow compute": (1e-4, 2e-4),
}


def timed(model, budget, seconds):
    fqns = ["", *(f"blocks.{i}" for i in range(BLOCKS))]
    forward, backward = (dict.fromkeys(fqns, each) for each in seconds)
    costs = cs.Costs.of(latency=1e-5, bandwidth=1e9, forward=forward, backward=backward)
    return cs.make_plan(model).with_policies(P.auto(), cs.PoolPolicy(budget=budget), costs)


@pytest.mark.parametrize(("blocks", "stay"), [(2.25, 2), pytest.param(4, 3, marks=pytest.mark.matrix)])
def test_a_graph_stays_within_the_budget_including_kept_weights(blocks, stay):
    budget = int(blocks * WEIGHTS)
    most, kept = [], []
    for name, seconds in COSTS.items():
        with network():
            model = sharded()
            plan = timed(model, budget, seconds)
            model.set_plan(plan)
            run = cs.compile(model, backend="aot_eager")
            steps(run, model, 1)
            pool = pool_of(model)
            most.append(pool.peak_bytes)
            loss = run(torch.randn(3, WIDTH)).sum()
            pool.collect()
            kept.append(pool.live_bytes // WEIGHTS)
            assert kept[-1] == len(plan.effective_schedule().kept) - 1, name
            del loss
    assert budget - 1.5 * WEIGHTS < max(most) <= budget, most
    assert max(kept) == stay, "weights that fit in memory are kept"


def test_a_changed_plan_is_traced_once_and_an_earlier_plan_is_not_traced_again():
    with network():
        model = sharded()
        run = cs.compile(model, backend="aot_eager")
        counts = []
        for schedule in ("two blocks kept", "three, one for blocks.1", "two blocks kept"):
            model.set_plan(plan_of(model, **SCHEDULES[schedule]))
            with watch_graphs() as graphs:
                steps(run, model, 3)
            counts.append(len(graphs))
    assert counts == [2, 2, 0]


def test_blocks_compiled_by_their_method_share_code_for_any_plan():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with network():
        model = sharded()
        model.set_plan(plan_of(model, kept=KEPT))
        for block in model.blocks:
            block.compile(backend=counter, fullgraph=True)
        steps(model, model)
    assert counter.frame_count == 1
