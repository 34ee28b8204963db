"""Modules that get no gradient on one rank: gathers and reductions still have the same order on all ranks."""

from __future__ import annotations

import copy
import random

import pytest
import torch

import composable_shard as cs
from _engines import fully_shard
from _nests import POLICIES, Nests, shard_nests
from _pool import more
from composable_shard import testing

MARKED = {
    "all": lambda nest: True,
    "leaves": lambda nest: not nest.inner,
    "all but the outermost": lambda nest: not nest.is_outermost,
}


def leave_out(model, marked, seed):
    """Skip some branches with only marked groups; the branches differ between ranks."""
    rng = random.Random(seed)
    for nest in model.all_nests:
        free = [all(map(marked, nest.inner[at].nests)) for at in nest.calls]
        nest.left_out = [rng.random() < 0.4 and its for its in free]


def train(world, seed, marks, policy, more_bytes):
    """The actions of a rank in some steps, each with other skipped branches on each rank."""
    torch.manual_seed(seed)
    plain = Nests(random.Random(seed), whole=True)
    for nest in plain.all_nests:
        nest.is_outermost, nest.returns_inner = nest in [*plain.nests], False
    model = copy.deepcopy(plain)
    shard_nests(model, fully_shard, mesh=world.mesh, reshard_after_forward=True)
    for nest in filter(MARKED[marks], model.all_nests):
        nest.set_reduce_scatter_unused_params(True, recurse=False)
    if policy is not None:
        model.set_prefetch_policy(policy)
    issued = []
    for step in range(4):
        if step == 2 and more_bytes is not None:
            with pytest.raises(cs.errors.PoolBudgetError) as caught:
                model.set_pool_policy(cs.PoolPolicy(budget=1))
            model.set_pool_policy(cs.PoolPolicy(budget=caught.value.least + more_bytes))
        batches = torch.randn(world.size, 2, 4, generator=torch.Generator().manual_seed(step))
        for each in (model, plain):
            each.zero_grad()
        leave_out(model, MARKED[marks], 7 * step + world.rank)
        model(batches[world.rank]).sum().backward()
        for rank in range(world.size):
            leave_out(plain, MARKED[marks], 7 * step + rank)
            (plain(batches[rank]).sum() / world.size).backward()
        for name, param in plain.named_parameters():
            got, want = model.get_parameter(name).grad, param.grad
            assert (want is None or not want.any()) if got is None else True, name
            if got is not None:
                full = got.full_tensor()
                torch.testing.assert_close(full, torch.zeros_like(full) if want is None else want)
        record = cs.last_record(model)
        assert step < 2 or more_bytes is None or record.peak_bytes <= caught.value.least + more_bytes
        issued.append([str(action) for action in record.actions if action.kind in ("UNSHARD", "REDUCE")])
    return issued


@pytest.mark.parametrize("seed", [*range(6), *(more(seed) for seed in range(6, 56))])
def test_modules_without_a_gradient_are_gathered_and_reduced_where_other_ranks_do(seed):
    rng = random.Random(seed)
    marks, policy, more_bytes = rng.choice([*MARKED]), rng.choice(POLICIES), rng.choice([None, None, 0, 300])
    one, other = testing.spmd(2)(train, seed, marks, policy, more_bytes)
    assert one == other
