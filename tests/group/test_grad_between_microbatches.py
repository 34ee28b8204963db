"""`.grad` while gradients are accumulated elsewhere: zeros that take no memory until code uses their values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import composable_shard as cs
from _engines import fully_shard
from _models import Stack, shard_blocks, vectors
from _pool import distributed, more, simulated


def is_negative_zero(tensor):
    return bool((tensor == 0).all() and torch.signbit(tensor).all())


def accumulated(rank, between, **options):
    """Gradients after one microbatch without sync, a change of `.grad`, and one with sync."""
    torch.manual_seed(0)
    model = Stack()
    shard_blocks(model, fully_shard, **options)
    model.set_requires_gradient_sync(False)
    model(*vectors(rank, 0)).square().mean().backward()
    between(model)
    model.set_requires_gradient_sync(True)
    model(*vectors(rank, 1)).square().mean().backward()
    return [param.grad.to_local().clone() for param in model.parameters()]


@simulated(world=2)
def test_grad_can_be_read_in_inference_mode(rank, world):
    def read(model):
        with torch.inference_mode():
            assert all(param.grad.norm().full_tensor() == 0 for param in model.parameters())

    assert all(map(torch.equal, accumulated(rank, read), accumulated(rank, lambda _: None)))


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, cs.clip_grad_norm_])
@distributed(world=2)
def test_clipping_between_microbatches_changes_nothing(rank, world, clip):
    """FSDP2 has no `.grad` there, and also returns a norm of 0."""
    norms = []
    found = accumulated(rank, lambda model: norms.append(clip(model.parameters(), 0.1)))
    assert float(norms[0]) == 0
    assert all(map(torch.equal, found, accumulated(rank, lambda _: None)))


@pytest.mark.parametrize("foreach", [False, True])
@distributed(world=2)
def test_values_that_code_adds_between_microbatches_are_part_of_the_sum(rank, world, foreach):
    def add(model):
        grads = [param.grad for param in model.parameters()]
        with torch.no_grad():
            if foreach:
                torch._foreach_add_(grads, 0.5)
            else:
                for grad in grads:
                    grad.add_(0.5)

    expected = [grad + 0.5 for grad in accumulated(rank, lambda _: None)]
    torch.testing.assert_close(accumulated(rank, add), expected)


@pytest.mark.parametrize("kind", [{"fused": True}, more({"foreach": True}), {"foreach": False}])
@distributed(world=2)
def test_an_optimizer_can_step_with_cleared_gradients(rank, world, kind):
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    model = fully_shard(copy.deepcopy(plain))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5, **kind) for each in (model, plain)]
    model.set_requires_gradient_sync(False)
    for each in (model, plain):
        each(torch.ones(2, 6)).sum().backward()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), plain.get_parameter(name))


@simulated(world=2)
def test_grad_can_be_read_and_shown_between_microbatches(rank, world):
    model = fully_shard(nn.Linear(6, 4))
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 6)).sum().backward()
    assert "tensor" in repr(model.weight.grad)
    assert is_negative_zero(model.weight.grad.full_tensor())
    assert is_negative_zero(copy.deepcopy(model.weight.grad.to_local()))
