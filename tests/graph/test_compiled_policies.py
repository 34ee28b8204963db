"""The policies of a model place the communication of its compiled graphs, without changing results."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

import composable_shard as cs
from _compiling import LIMIT_S, Sides, make_twins, text_of
from _models import Stack, shard_blocks, vectors
from _pool import distributed
from composable_shard.report import watch_graphs

P = cs.PrefetchPolicy
POLICIES = {
    "nothing asked": (None, None),
    "none ahead": (P.depth(0), None),
    "all ahead, within a budget": (P.depth(9), cs.PoolPolicy(budget=4096)),
}


def loss_of(model, rank, step):
    return model(*vectors(rank, step)).square().mean()


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_gathers_of_a_graph_are_launched_as_far_ahead_as_in_the_policy(rank, world):
    texts = []
    for name, (prefetch, pool) in POLICIES.items():
        sides = Sides(*make_twins(Stack(3, dim=8, hidden=16), shard_blocks))
        if prefetch is not None:
            sides.model.set_prefetch_policy(prefetch)
        if pool is not None:
            sides.model.set_pool_policy(pool)
        with watch_graphs() as found:
            sides.train(lambda each, step: loss_of(each, rank, step), steps=2)
        texts.append(f"{name}\n{text_of(found)}")
    if rank == 0:
        assert_expected_inline(
            "".join(texts),
            """\
nothing asked
forward GwGmwGmmwGmmwmmm, saves 3288 bytes
backward GmmwGmmmmRwmmwGmmRwmmmmwRmwRw
none ahead
forward GwmGwmmGwmmGwmmm, saves 3288 bytes
backward mmGwmmmmRwGwmmmmRwGwmmmmRmwRw
all ahead, within a budget
forward GwGmwmmGwmmGwmmm, saves 3288 bytes
backward GmmwmmmmRwGwmmmmRwGwmmmmRmRww
""",
        )


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_another_policy_leads_to_another_graph(rank, world):
    sides = Sides(*make_twins(Stack(2, dim=8, hidden=16), shard_blocks))
    found = []
    for prefetch in (P.depth(1), P.depth(2), P.depth(1)):
        sides.model.set_prefetch_policy(prefetch)
        with watch_graphs() as graphs:
            sides.train(lambda each, step: loss_of(each, rank, step), steps=1)
        found.append([graph.sequence for graph in graphs])
    assert [len(each) for each in found] == [2, 2, 0], "a policy that was seen needs no new graph"
    assert found[0] != found[1]
    assert torch.equal(sides.eager.inp.weight.to_local(), sides.model.inp.weight.to_local())
