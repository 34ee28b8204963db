"""Several forwards before a backward, a module used twice in one forward, forwards without backward."""

from __future__ import annotations

import functools
import gc
import sys

import pytest
import torch
import torch.nn as nn

import composable_shard as cs
from _engines import fully_shard
from _models import Block, InOrder, Stack, shard_blocks, shard_nested, vectors
from _parity import Case, check_parity, plain_step
from _pool import distributed, more, simulated
from _stepping import loss_of, twins

ADDS_UNREDUCED = "FSDP2 adds the uses of a group before it reduces them"


def one_backward_of_two_forwards(run):
    loss = run.loss(0) + run.loss(1)
    run.backward(loss)
    return loss


def backwards_in_order(run):
    first, second = run.loss(0), run.loss(1)
    run.backward(first)
    run.backward(second)
    return first + second


def backwards_in_reverse(run):
    first, second = run.loss(0), run.loss(1)
    run.backward(second)
    run.backward(first)
    return first + second


@pytest.mark.parametrize("reshard", [more(None), True, False])
@pytest.mark.parametrize("train", [one_backward_of_two_forwards, backwards_in_order, backwards_in_reverse])
@distributed(world=2)
def test_two_forwards_before_backward_are_exact(rank, world, train, reshard):
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    case = Case(model=Stack, shard=shard, train=train, per_use=True, atol_fsdp2=1e-6, why=ADDS_UNREDUCED)
    check_parity(case, rank, world)


@distributed(world=(1, 4))
def test_two_forwards_before_backward_are_exact_at_other_world_sizes(rank, world):
    train = one_backward_of_two_forwards
    case = Case(model=Stack, train=train, per_use=True, atol_fsdp2=2e-6, why=ADDS_UNREDUCED)
    check_parity(case, rank, world)


class Twice(nn.Module):
    """Runs its blocks twice; each is a group that is used twice in one forward."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block(6, 10) for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for block in [*self.blocks, *self.blocks, self.blocks[0]]:
            x = block(x)
        return x


@pytest.mark.parametrize("grouping", ["blocks", "nested"])
@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_a_module_used_twice_in_one_forward_is_exact(rank, world, grouping, reshard):
    shard = functools.partial({"blocks": shard_blocks, "nested": shard_nested}[grouping], reshard_after_forward=reshard)
    case = Case(model=Twice, shard=shard, per_use=True, atol_fsdp2=1e-6, why=ADDS_UNREDUCED)
    check_parity(case, rank, world)


@pytest.mark.parametrize("train", [one_backward_of_two_forwards, backwards_in_reverse])
@distributed(world=2)
def test_two_forwards_of_a_model_that_uses_modules_twice_are_exact(rank, world, train):
    case = Case(model=Twice, train=train, per_use=True, atol_fsdp2=1e-6, why=ADDS_UNREDUCED)
    check_parity(case, rank, world)


@distributed(world=2)
def test_gradients_of_several_uses_without_sync_are_summed_before_the_reduction(rank, world):
    def train(run):
        run.set_sync(False)
        run.backward(run.loss(0))
        run.set_sync(True)
        return plain_step(run)

    case = Case(model=Twice, train=train, per_use=True, atol_fsdp2=1e-6, why=ADDS_UNREDUCED)
    check_parity(case, rank, world)


def drop_forwards_then_step(run):
    dropped = [run.model(*run.batch(7)) for _ in range(3)]
    del dropped[0]
    return plain_step(run)


def step_then_drop_a_forward(run):
    loss = plain_step(run)
    run.model(*run.batch(7))
    return loss


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=(1, 2))
def test_forwards_without_backward_do_not_disturb_training(rank, world, reshard):
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    check_parity(Case(model=Stack, shard=shard, train=drop_forwards_then_step), rank, world)


@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(world=(1, 2))
def test_a_forward_before_the_optimizer_step_leaves_no_stale_weights(rank, world, reshard):
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    why = "FSDP2 computes with the weights from before the optimizer step"
    train = step_then_drop_a_forward
    check_parity(Case(model=Stack, shard=shard, train=train, ends_sharded=False, fsdp2=False, why=why), rank, world)


@distributed(world=2)
def test_a_submodule_may_run_alone_between_steps(rank, world):
    def train(run):
        h = torch.randn(3, 6, generator=torch.Generator().manual_seed(run.step))
        with torch.no_grad():
            run.record("alone", run.model.blocks[1](h))
        return plain_step(run)

    def warmed(run):
        return plain_step(run) if run.step == 0 else train(run)

    check_parity(Case(model=Stack, train=warmed), rank, world)


RUNS_TWICE = {
    "in a row": (0, 0, 1, 1),
    "one of two in a row": (0, 1, 1, 0),
    "in turns": (0, 1, 0, 1),
}


@pytest.mark.parametrize("case", RUNS_TWICE)
@pytest.mark.parametrize("tight", [True, False])
@simulated(world=2)
def test_a_budget_holds_for_modules_that_run_twice(rank, world, case, tight):
    model, plain = twins(functools.partial(InOrder, RUNS_TWICE[case]))
    for each in (model, plain):
        loss_of(each).backward()
    with pytest.raises(cs.errors.PoolBudgetError) as caught:
        model.set_pool_policy(cs.PoolPolicy(budget=1))
    policy = cs.PoolPolicy(budget=caught.value.least if tight else 1 << 20)
    model.set_pool_policy(policy)
    for _ in range(2):
        for each in (model, plain):
            loss_of(each).backward()
        record = cs.last_record(model)
        assert record.peak_bytes <= policy.budget
        done = [str(action) for action in record.actions]
        assert done.count("REDUCE blocks.0") == 2
        if case == "in a row":
            assert done.count("UNSHARD blocks.0") == (4 if tight else 3), "weights stay if there is enough memory"
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)


@pytest.mark.parametrize("sync", [True, False])
@simulated(world=2)
def test_autograd_grad_stays_within_a_budget(rank, world, sync):
    model, plain = twins(functools.partial(InOrder, (0, 0, 1, 1)))
    loss_of(model).backward()
    with pytest.raises(cs.errors.PoolBudgetError) as caught:
        model.set_pool_policy(cs.PoolPolicy(budget=1))
    policy = cs.PoolPolicy(budget=caught.value.least)
    model.set_pool_policy(policy)
    model.set_requires_gradient_sync(sync)
    params = list(model.parameters())
    for _ in range(2):
        found = torch.autograd.grad(loss_of(model), params)
        for mine, want in zip(found, torch.autograd.grad(loss_of(plain), list(plain.parameters())), strict=True):
            torch.testing.assert_close(mine.full_tensor(), want)
        assert cs.last_record(model).peak_bytes <= policy.budget


def footprint():
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks()


@pytest.mark.parametrize("grad", [True, more(False)])
@distributed(world=(1, more(2)))
def test_a_thousand_forwards_without_backward_do_not_increase_memory(rank, world, grad):
    model = Stack(blocks=2)
    shard_blocks(model, fully_shard)
    x = vectors(rank, 0)
    with torch.set_grad_enabled(grad):
        for _ in range(300):  # the record holds up to 256 of them, because a backward may follow
            model(*x)
        objects, blocks = footprint()
        for _ in range(4 * 256):
            model(*x)
        grown = footprint()
    assert grown[0] - objects < 90, "Python objects grow with forwards"
    assert grown[1] - blocks < 450, "Python memory grows with forwards"
