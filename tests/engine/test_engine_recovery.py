"""The engine: no stale or partial state remains after failures, and leaves may be used outside forward."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import composable_shard
from _models import Stack, vectors
from _pool import distributed
from _stepping import assert_at_rest, assert_same_gradients, engine_of, kinds, loss_of, resident, train_step, twins
from composable_shard import last_record, make_plan

# ---- recovery


class BoomError(Exception):
    pass


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise BoomError


class Fused(Stack):
    """If armed, fails in the backward between blocks 1 and 2, when one reduction has been issued."""

    def __init__(self):
        super().__init__()
        self.armed = False

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](self.inp(x)))
        x = Boom.apply(x) if self.armed else x
        return self.head(self.blocks[2](x))


@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(world=(1, 2))
def test_the_forward_after_a_failed_backward_discards_its_leftovers(rank, world, reshard):
    model, plain = twins(Fused, reshard_after_forward=reshard)
    train_step(model)
    train_step(plain)
    model.armed = True
    with pytest.raises(BoomError):
        train_step(model, 1)
    model.armed = False
    gc.collect()  # the traceback held the graph
    with torch.no_grad():
        model(*vectors(0, 1))
    assert_at_rest(model)
    assert_same_gradients(model, plain)  # gradients of the failed pass were not added
    train_step(model, 2)
    train_step(plain, 2)
    assert_same_gradients(model, plain)
    assert last_record(model).actions == make_plan(model).actions()
    assert_at_rest(model)


# ---- no copy outlives its values


@distributed(world=2)
def test_no_unsharded_copy_outlives_an_optimizer_step(rank, world):
    model, plain = twins()
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            train_step(m, step)
            if m is model:
                assert resident(model) == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
            optimizer.step()
            optimizer.zero_grad()
        assert resident(model) == []
    for name, param in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), param), name


@distributed(world=2)
def test_an_optimizer_step_affects_only_groups_whose_parameters_it_has(rank, world):
    models = [twins(reshard_after_forward=False)[0] for _ in range(2)]
    optimizer = torch.optim.SGD(models[0].blocks[1].parameters(), lr=0.1)
    for model in models:
        model.set_reshard_after_backward(False)
        train_step(model)
    optimizer.step()
    assert resident(models[0]) == ["(root)", "blocks.0", "blocks.2"]
    assert resident(models[1]) == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    for model in models:
        for module in [model, *model.blocks]:
            module.reshard()
        assert_at_rest(model)


def in_place(param):
    param.mul_(0.5)


def copied(param):
    param.copy_(param * 0.5)


def by_local(param):
    (param.to_local() if isinstance(param, DTensor) else param).mul_(0.5)


@pytest.mark.parametrize("update", [in_place, copied, by_local])
@pytest.mark.parametrize("kept", ["after backward", "unshard"])
@distributed(world=2)
def test_no_unsharded_copy_outlives_a_manual_update(rank, world, update, kept):
    model, plain = twins(reshard_after_forward=False)
    if kept == "after backward":
        model.set_reshard_after_backward(False)
    shards = dict(model.named_parameters())
    for step in range(3):
        train_step(model, step)
        train_step(plain, step)
        assert_same_shards(shards, plain)
        if kept == "unshard":
            for module in [model, *model.blocks]:
                module.unshard()
        with torch.no_grad():
            for param in [*shards.values(), *plain.parameters()]:
                update(param)
    train_step(model, 3)
    train_step(plain, 3)
    assert_same_shards(shards, plain)


def assert_same_shards(shards, plain):
    for name, param in plain.named_parameters():
        assert torch.equal(shards[name].grad.full_tensor(), param.grad), name


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_backward_after_an_optimizer_step_raises_as_in_plain_torch(rank, world, reshard):
    for model in reversed(twins(reshard_after_forward=reshard)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_step(model)
        loss = loss_of(model, 1)
        optimizer.step()
        with pytest.raises(RuntimeError):
            loss.backward()


@distributed(world=2)
def test_an_optimizer_of_unsharded_copies_is_an_error_at_its_first_step(rank, world):
    model, _ = twins(reshard_after_forward=False)
    loss_of(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        composable_shard.errors.ShardConfigStateError, match=r"copies of inp\.weight, inp\.bias, .* and 17 more"
    ):
        optimizer.step()


# ---- leaves that are used outside forward


def head_penalty(model):
    return model.head.weight.square().sum()


def inp_penalty(model):
    return (model.inp.weight.sum() * model.head.bias).sum()


def own_penalty(model):
    return model.blocks[1].up.weight.pow(3).sum() if not isinstance(model.blocks[1].up.weight, DTensor) else 0.0


PENALTIES = {"head": head_penalty, "product": inp_penalty}


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("reshard", [None, False])
@distributed(world=(1, 2))
def test_a_penalty_on_a_weight_of_the_root_after_forward_is_exact(rank, world, reshard, penalty):
    model, plain = twins(reshard_after_forward=reshard)
    for step in range(3):
        for m in (model, plain):
            (loss_of(m, step) + PENALTIES[penalty](m)).backward()
        assert_same_gradients(model, plain)
        assert_at_rest(model)
    assert kinds(last_record(model), "REDUCE").count("") == 1, "one reduction for both gradients"


@distributed(world=(1, 2))
def test_a_penalty_on_a_block_that_stays_unsharded_is_exact(rank, world):
    model, plain = twins(reshard_after_forward=False)
    for step in range(3):
        for m in (model, plain):
            (loss_of(m, step) + own_penalty(m)).backward()
        assert_same_gradients(model, plain)
    assert_at_rest(model)


@distributed(world=(1, 2))
def test_a_backward_of_the_penalty_alone_and_then_of_the_loss_is_exact(rank, world):
    model, plain = twins(reshard_after_forward=False)
    for step in range(2):
        for m in (model, plain):
            loss, penalty = loss_of(m, step), own_penalty(m) + head_penalty(m)
            penalty.backward()
            loss.backward()
        assert_same_gradients(model, plain)
        assert_at_rest(model)


@distributed(world=(1, 2))
def test_a_penalty_without_gradient_sync_is_accumulated_and_reduced_later(rank, world):
    model, plain = twins(reshard_after_forward=False)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        for m in (model, plain):
            (loss_of(m, micro) + head_penalty(m) + own_penalty(m)).backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)


@distributed(world=(1, 2))
def test_a_stale_read_of_such_a_weight_raises_after_its_slot_was_reused(rank, world):
    model, _ = twins()
    loss = loss_of(model)
    penalty = head_penalty(model)  # outside forward, autograd saves the weight itself
    loss.backward()
    assert_at_rest(model)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        penalty.backward()
    train_step(model, 1)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("boom")


@distributed(world=2)
def test_an_interrupt_during_cleanup_after_a_failure_leaves_the_next_step_exact(rank, world):
    model, plain = twins(Stack)
    model.set_reduce_scatter_max_input_buffers(4)
    train_step(model)
    hook = model.blocks[0].register_forward_hook(lambda module, args, out: _Failing.apply(out))
    with pytest.raises(RuntimeError, match="boom"):
        train_step(model, 1)
    hook.remove()
    in_flight = [reduction for _, reduction in engine_of(model)._actions.reductions.in_flight]
    assert len(in_flight) > 1
    bucket, job = in_flight[1].jobs[0]

    def finish(*args):
        job.finish(*args)
        raise KeyboardInterrupt

    in_flight[1].jobs[0] = bucket, mock.Mock(finish=finish)
    with pytest.raises(KeyboardInterrupt):
        train_step(model, 1)
    for step in (2, 3):
        for each in (model, plain):
            each.zero_grad()
            train_step(each, step)
        assert_same_gradients(model, plain)
    assert_at_rest(model)
