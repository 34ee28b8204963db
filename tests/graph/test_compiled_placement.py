"""Prefetch lists, plans and budgets place the communication of compiled graphs without changing results.

Results are bitwise identical to the same model under plain `torch.compile`, which issues communication where it is
needed. ``EXPECTTEST_ACCEPT=1`` rewrites the sequences.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _compiling import LIMIT_S, local, text_of
from _engines import fully_shard
from _models import shard_blocks, vectors
from _pool import distributed
from composable_shard._engine import measuring
from composable_shard.report import watch_graphs

P = cs.PrefetchPolicy
TIGHT = 5888  # bytes: enough for the root and two blocks, without a reduction


class Chain(nn.Module):
    """An input layer in the root's own group, and blocks of two products each, checkpointed or not."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.Tanh())
            for _ in range(4)
        )
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def made(checkpoints=False):
    torch.manual_seed(3)
    model = Chain(checkpoints)
    shard_blocks(model, fully_shard)
    torch._dynamo.reset()
    return model


def two_steps(run, model, rank):
    """Losses, gradients and parameters on this rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        loss = run(*vectors(rank, step)).square().mean()
        loss.backward()
        found += [loss.detach(), *(local(param.grad).clone() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found + [local(param.detach()) for param in model.parameters()]


def without_placement(rank, checkpoints=False):
    model = made(checkpoints)
    return two_steps(torch.compile(model, backend="aot_eager", fullgraph=True), model, rank)


class Outer(nn.Module):
    """An unsharded module around a sharded one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def placed(model, rank, expected):
    """The graphs of `cs.compile` for a module around the model, as text; checks that results are as expected."""
    with watch_graphs() as graphs:
        found = two_steps(cs.compile(Outer(model), backend="aot_eager"), model, rank)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    return text_of(graphs)


def with_lists(model, rank):
    a, b, c, d = model.blocks
    model.set_modules_to_forward_prefetch([a, b])
    a.set_modules_to_forward_prefetch([c, d])
    b.set_modules_to_forward_prefetch([])
    c.set_modules_to_forward_prefetch([])
    model.set_modules_to_backward_prefetch([d])
    d.set_modules_to_backward_prefetch([c, b])
    c.set_modules_to_backward_prefetch([])
    b.set_modules_to_backward_prefetch([])


def with_given_plan(model, rank):
    model.set_plan(cs.make_plan(model).with_policies(P.depth(3), cs.PoolPolicy(budget=TIGHT)))


def seconds(plan, record):
    """Only compute after the root's forward and backward hides gathers."""
    found = {(part, fqn): 1e-3 for part in ("forward", "backward") for fqn in plan.order}
    found |= {("forward", ""): 9e-3, ("backward", ""): 9e-3}
    return found | {(part, fqn): 3e-3 for part in ("gather", "reduce") for fqn in plan.order}


def with_measured_plan(model, rank):
    model.set_prefetch_policy(P.auto())
    model.set_pool_policy(cs.PoolPolicy(budget=13000))  # some weights stay for backward, but not all
    with mock.patch.object(measuring, "_seconds", seconds):
        for step in range(5):
            model(*vectors(rank, step)).sum().backward()
            model.zero_grad()
    assert cs.make_plan(model).costs is not None


def within(budget, prefetch):
    def ask(model, rank):
        model.set_prefetch_policy(prefetch)
        model.set_pool_policy(cs.PoolPolicy(budget=budget))

    return ask


def texts_of(asked, rank, checkpoints=False):
    expected = without_placement(rank, checkpoints)
    texts = []
    for name, ask in asked.items():
        model = made(checkpoints)
        ask(model, rank)
        texts.append(f"{name}\n{placed(model, rank, expected)}")
    return "".join(texts)


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_lists_plans_and_budgets_place_the_communication_of_graphs(rank, world):
    asked = {
        "lists": with_lists,
        "a given plan": with_given_plan,
        "a measured plan": with_measured_plan,
        "one ahead within a budget": within(TIGHT, P.depth(1)),
    }
    text = texts_of(asked, rank)
    if rank == 0:
        assert_expected_inline(
            text,
            """\
lists
forward GwGGmwGGmmwmmwmmwmm, saves 2880 bytes
backward GGGmwmmmRmwmmmwRmwmmmwRwGmwmmmRmwRw
a given plan
forward GwGmwmmGwmmGwmmGwmm, saves 2880 bytes
backward GmwmmmRwGmwmmmRwGmwmmmRwGmwmmmRmwRw
a measured plan
forward GwGGmwGmmwmmwGmmwmm, saves 6976 bytes
backward GmwmmmRmmmmwRmmwGmmRmwmmmwRmwRw
one ahead within a budget
forward GwGmwmmGwmmGwmmGwmm, saves 2880 bytes
backward GmwmmmRwGmwmmmRwGmwmmmRwGmwmmmRmwRw
""",
        )


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_policies_place_the_gathers_of_checkpointed_blocks(rank, world):
    asked = {"two ahead": within(None, P.depth(2)), "two ahead within a budget": within(TIGHT, P.depth(2))}
    text = texts_of(asked, rank, checkpoints=True)
    if rank == 0:
        assert_expected_inline(
            text,
            """\
two ahead
forward GwGGmwGmmwGmmwmmwmm, saves 1280 bytes
backward GGwGmmmmmmRwmmwGmmmRwmmmmmwRwmmmmmwRmwRw
two ahead within a budget
forward GwGmwmmGwmmGwmmGwmm, saves 1280 bytes
backward GwmmmmmmRwGwmmmmmRwGwmmmmmRwGwmmmmmRmwRw
""",
        )
