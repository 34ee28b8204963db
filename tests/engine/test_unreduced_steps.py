"""Optimizer steps are refused if their parameters have unreduced gradients, and allowed otherwise."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, fully_shard
from _pool import distributed, simulated

WAITS = r"still wait for their reduction; first run the last microbatch under {}\(True\), or call zero_grad"


def shard(model, engine=fully_shard, **options):
    for block in model.blocks:
        engine(block, **options)
    engine(model, **options)
    return model


def made(**options):
    torch.manual_seed(0)
    return shard(Transformer(), **options)


def backward(model, rank, step=0):
    next_token_loss(model, *token_batch(rank, step)).backward()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def values(model):
    return [param.to_local().clone() for param in model.parameters()]


@distributed(world=2)
def test_a_step_without_gradient_sync_is_an_error_that_names_the_group_and_the_fix(rank, world):
    """FSDP2 ignores this case and steps nothing."""
    model = made()
    theirs = shard(Transformer(), ENGINES["fsdp2"])
    optimizers = [sgd(each.parameters()) for each in (model, theirs)]
    before = values(model), values(theirs)
    for each in (model, theirs):
        each.set_requires_gradient_sync(False)
        backward(each, rank)
    with pytest.raises(cs.errors.ShardConfigStateError, match=WAITS.format("set_requires_gradient_sync")) as caught:
        optimizers[0].step()
    assert "the optimizer steps embed.weight, norm.weight, head.weight" in str(caught.value)
    optimizers[1].step()
    for each, values_before in zip((model, theirs), before, strict=True):
        assert all(map(torch.equal, values(each), values_before))
    # The refused step changed nothing: a further microbatch that follows the message makes a step of both.
    twin = made()
    for each in (model, twin):
        each.set_requires_gradient_sync(True)
    backward(model, rank, 1)
    backward(twin, rank, 0)
    backward(twin, rank, 1)
    optimizers[0].step()
    sgd(twin.parameters()).step()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.to_local(), other.to_local(), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("via", ["model", "optimizer"])
@distributed(world=2)
def test_a_discarded_microbatch_does_not_prevent_a_step(rank, world, via, set_to_none):
    model, twin = made(), made()
    optimizers = [sgd(each.parameters()) for each in (model, twin)]
    model.set_requires_gradient_sync(False)
    backward(model, rank, 5)
    (model if via == "model" else optimizers[0]).zero_grad(set_to_none=set_to_none)
    if via == "model":
        optimizers[0].step()  # without gradients
    model.set_requires_gradient_sync(True)
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        backward(each, rank)
        optimizer.step()
    assert all(map(torch.equal, values(model), values(twin)))


@distributed(world=2)
def test_only_an_optimizer_with_unreduced_gradients_is_refused(rank, world):
    model = made()
    first, second = sgd(model.blocks[0].parameters()), sgd(model.blocks[1].parameters())
    other = sgd([torch.nn.Parameter(torch.ones(2))])
    model.embed.requires_grad_(False)
    frozen = sgd(model.embed.parameters())
    model.blocks[1].set_requires_gradient_sync(False)
    backward(model, rank)
    for optimizer in (first, other, frozen):
        optimizer.step()
    with pytest.raises(cs.errors.ShardConfigStateError, match=r"group blocks\.1: the optimizer steps blocks\.1"):
        second.step()
    model.blocks[1].zero_grad()
    second.step()


@distributed(world=4)
def test_a_step_before_the_all_reduce_over_replicas_is_refused(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, twin = made(mesh=mesh), made(mesh=mesh)
    optimizers = [sgd(each.parameters()) for each in (model, twin)]
    model.set_requires_all_reduce(False)
    backward(model, rank)
    with pytest.raises(cs.errors.ShardConfigStateError, match=WAITS.format("set_requires_all_reduce")):
        optimizers[0].step()
    model.set_requires_all_reduce(True)
    for each, steps in ((model, (1,)), (twin, (0, 1))):
        for step in steps:
            backward(each, rank, step)
    for optimizer in optimizers:
        optimizer.step()
    for mine, other in zip(values(model), values(twin), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("named", [False, True])
@simulated(world=2)
def test_a_step_with_a_closure_is_checked_for_the_gradients_of_the_closure(rank, world, named):
    model = made()
    optimizer = sgd(model.parameters())

    def closure(sync):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(sync)
        loss = next_token_loss(model, *token_batch(rank, 0))
        loss.backward()
        return loss

    def step(sync):
        its = partial(closure, sync)
        return optimizer.step(closure=its) if named else optimizer.step(its)

    model.set_requires_gradient_sync(False)
    backward(model, rank)
    before = values(model)
    step(True)
    assert not all(map(torch.equal, values(model), before))
    with pytest.raises(cs.errors.ShardConfigStateError, match="still wait for their reduction"):
        step(False)


@simulated(world=2)
def test_a_refused_step_does_not_affect_a_forward_that_waits_for_its_backward(rank, world):
    model = made(reshard_after_forward=False)
    twin = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    model.set_requires_gradient_sync(False)
    backward(model, rank)
    model.set_requires_gradient_sync(True)
    loss = next_token_loss(model, *token_batch(rank, 1))
    with pytest.raises(cs.errors.ShardConfigStateError, match="still wait for their reduction"):
        optimizer.step()
    loss.backward()
    for step in range(2):
        backward(twin, rank, step)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local(), other.grad.to_local())


@distributed(world=2)
def test_a_step_of_a_parameter_with_an_empty_shard_is_refused_where_it_can_be_detected(rank, world):
    model = torch.nn.Linear(1, 1)  # rank 1 has an empty shard
    fully_shard(model)
    optimizer = sgd(model.parameters())
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 1)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    model(torch.ones(2, 1)).sum().backward()
    if rank == 0:
        with pytest.raises(cs.errors.ShardConfigStateError, match="group"):
            optimizer.step()
