"""`.grad` while gradients are accumulated elsewhere: zeros that take no memory until code uses their values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _engines import fully_shard
from _models import Stack, shard_blocks, vectors
from _pool import distributed, more, simulated
from composable_shard import testing
from composable_shard._group.lazy_zeros import LazyZeros
from composable_shard._torch.distributed import local_tensor


def zeros(*shape, dtype=torch.float32):
    return LazyZeros(torch.Size(shape), dtype, torch.device("cpu"))


def is_negative_zero(tensor):
    return bool((tensor == 0).all() and torch.signbit(tensor).all())


def test_the_values_are_negative_zeros_in_memory_only_after_an_operator_used_them():
    lazy = zeros(3, 4, dtype=torch.bfloat16)
    assert (lazy.shape, lazy.dtype, lazy.device.type) == ((3, 4), torch.bfloat16, "cpu")
    assert lazy.is_untouched
    assert lazy.content is None
    assert is_negative_zero(lazy.clone())
    assert type(lazy.clone()) is torch.Tensor
    assert not lazy.is_untouched


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("clear", [lambda lazy: lazy.zero_(), lambda lazy: torch._foreach_zero_([torch.ones(2), lazy])])
def test_setting_to_zero_is_noticed_and_takes_no_memory(clear, used_before):
    lazy = zeros(5)
    if used_before:
        lazy.add_(1)
    clear(lazy)
    assert lazy.is_cleared
    assert (lazy.content is None) is not used_before
    assert torch.equal(lazy + 0.0, torch.zeros(5))
    assert not torch.signbit(lazy).any()


def test_operators_in_place_return_and_change_the_tensor():
    lazy, other = zeros(2, 3), torch.ones(2, 3)
    assert lazy.add_(2.0) is lazy
    torch._foreach_mul_([other, lazy], 3.0)
    assert torch.equal(lazy + other, torch.full((2, 3), 9.0))
    lazy.reset()
    assert lazy.is_untouched
    assert is_negative_zero(lazy.detach())


def test_it_works_among_fake_tensors():
    with testing.fake(4):
        model = fully_shard(nn.Linear(8, 8))
        model.set_requires_gradient_sync(False)
        model(torch.randn(2, 8)).sum().backward()
        assert cs.clip_grad_norm_(model.parameters(), 1.0).shape == ()
        assert model.weight.grad.to_local().shape == (2, 8)


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
    assert not any(isinstance(local_tensor(param.grad), LazyZeros) for param in model.parameters())
    return [param.grad.to_local().clone() for param in model.parameters()]


@distributed(world=(2, more(3)))
def test_grad_takes_no_memory_between_microbatches(rank, world):
    def check(model):
        for param in model.parameters():
            assert isinstance(param.grad, DTensor)
            assert param.grad.shape == param.shape
            assert local_tensor(param.grad).is_untouched

    accumulated(rank, check)


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
