"""The engine: the parts of a backward (recomputations, outputs, several graphs), and the state after it."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from _engines import fully_shard
from _leases import lease
from _models import Block, Stack, generator, shard_blocks, shard_nested, vectors
from _pool import distributed
from _stepping import (
    assert_at_rest,
    assert_same_gradients,
    counted_gathers,
    engine_of,
    loss_of,
    resident,
    train_step,
    twins,
)
from composable_shard import last_record, make_plan, shard_by_class

# ---- checkpointing


class Checkpointed(Stack):
    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class CheckpointedInside(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class StackOfThem(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(CheckpointedInside(6, 10) for _ in range(3))


@pytest.mark.parametrize("model_type", [Checkpointed, StackOfThem])
@distributed(world=(1, 2))
def test_a_recomputation_is_not_a_second_use(rank, world, model_type):
    model, plain = twins(model_type)
    for step in range(2):
        train_step(model, step)
        train_step(plain, step)
    record = last_record(model)
    assert record.actions == make_plan(model).actions()
    assert record.order == ("", "blocks.0", "blocks.1", "blocks.2")
    assert engine_of(model).uses._count == 2 * 4, "a use was made for a recomputation"
    assert_same_gradients(model, plain)


# ---- outputs


class Giving(nn.Module):
    """Returns its weight, as a whole and in part."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return {"out": self.lin(x), "weight": self.lin.weight, "part": [self.lin.weight[1:3].t()]}


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=(1, 2))
def test_an_output_that_is_a_view_of_weights_is_copied_differentiably(rank, world, reshard):
    torch.manual_seed(3)
    plain = Giving()
    model = copy.deepcopy(plain)
    fully_shard(model, reshard_after_forward=reshard)
    for step in range(2):
        for m in (model, plain):
            out = m(*vectors(0, step))
            if m is model:
                assert all(
                    engine_of(m).pool.addresses.find(t.data_ptr()) is None for t in (out["weight"], *out["part"])
                )
            (out["out"].sum() + out["weight"].square().sum() + (out["part"][0] * 3).sum()).backward()
        assert_same_gradients(model, plain)
    assert_at_rest(model)


@distributed(world=2)
def test_an_output_that_is_a_view_of_weights_is_copied_without_gradients_too(rank, world):
    model = Giving()
    want = model.lin.weight.detach().clone()
    fully_shard(model)
    with torch.no_grad():
        given = model(*vectors(0, 0))["weight"]
        model(*vectors(0, 1))
    lease(engine_of(model).pool, given.nbytes).typed(torch.uint8).fill_(255)
    assert torch.equal(given, want)


# ---- accumulation, retained graphs, records


@distributed(world=(1, 2))
def test_weights_kept_after_backward_are_gathered_once_for_all_microbatches(rank, world):
    model, plain = twins(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    with counted_gathers() as gathers:
        for micro in range(3):
            train_step(model, micro)
    for micro in range(3):
        train_step(plain, micro)
    assert sorted(gathers) == ["", "blocks.0", "blocks.1", "blocks.2"]
    for module in [model, *model.blocks]:
        module.reshard()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@distributed(world=2)
def test_model_parameters_after_backward_have_the_gradients(rank, world, strategy):
    """Otherwise `clip_grad_norm_(model.parameters(), ...)` silently clips nothing."""
    model, plain = twins(lambda: Stack(2), shard=lambda m, _: shard_by_class(m, {Block}, strategy=strategy))
    norms = []
    for m in (model, plain):
        train_step(m)
        norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3))
    torch.testing.assert_close(*[n.full_tensor() if isinstance(n, DTensor) else n for n in norms])


@distributed(world=(1, 2))
def test_the_end_of_a_graph_without_a_backward_ends_its_use(rank, world):
    model, _ = twins()
    loss = loss_of(model)
    engine = engine_of(model)
    assert len(list(engine.uses)) == 4
    del loss
    assert list(engine.uses) == []


@pytest.mark.parametrize("shard", [shard_blocks, shard_nested])
@distributed(world=(1, 2))
def test_a_backward_through_any_part_of_the_graph_ends_with_all_groups_at_rest(rank, world, shard):
    model, _ = twins(shard=shard, reshard_after_forward=False)
    kept = []
    model.blocks[1].register_forward_hook(lambda module, args, out: kept.append(out))
    x = torch.randn(5, 4, generator=generator(0, 0), requires_grad=True)
    for _ in range(2):
        out = model(x).sum()
        kept.pop().sum().backward(retain_graph=True)
        assert engine_of(model)._pass is None
        torch.autograd.grad(out, x)
        assert engine_of(model)._pass is None
        del out
        gc.collect()
        assert_at_rest(model)


@distributed(world=2)
def test_the_engine_ignores_optimizers_of_other_parameters(rank, world):
    """A step of an optimizer without sharded parameters has no cost and no effect."""
    model, plain = twins(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    train_step(model)
    train_step(plain)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert len(resident(model)) == 4
    for module in [model, *model.blocks]:
        module.reshard()


@distributed(world=(1, 2))
def test_two_models_train_side_by_side(rank, world):
    model, plain = twins()
    other, other_plain = twins(lambda: Stack(2))
    for step in range(2):
        for first, second in ((model, other), (plain, other_plain)):
            x = first(*vectors(0, step))
            F.mse_loss(second(x), x.detach()).backward()
    assert_same_gradients(model, plain)
    assert_same_gradients(other, other_plain)
    assert_at_rest(model)
    assert_at_rest(other)
