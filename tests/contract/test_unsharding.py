"""Explicit and early gathers, and resharding."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from contract import _ways
from contract._ways import common_fsdp, contract

layers = functools.partial(_ways.layers, 4)


@contract()
@pytest.mark.parametrize("asynchronous", [True, False])
def test_unshard_installs_unsharded_parameters_and_reshard_the_sharded_ones(t, asynchronous):
    plain, model = t.pair(layers)
    t.shard(model)
    handle = model[0].unshard(async_op=asynchronous)
    assert (handle is not None) == asynchronous
    if asynchronous:
        handle.wait()
    weight = model[0][0].weight
    assert not isinstance(weight, DTensor)
    assert isinstance(weight, nn.Parameter)
    t.same(weight, plain[0][0].weight)
    assert isinstance(model[1][0].weight, DTensor)
    model[0].reshard()
    assert isinstance(model[0][0].weight, DTensor)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_a_module_can_be_unsharded_before_there_is_a_root(t):
    plain, model = t.pair(lambda: nn.Linear(8, 8))
    t.fully_shard(model, mesh=t.mesh())
    model.unshard()
    t.same(model.weight, plain.weight)
    model.reshard()
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_forward_waits_for_gathers_that_were_started_early(t):
    class Reduces(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), last

        def forward(self, x):
            handle = self.last.unshard(async_op=True)
            y = self.first(x)
            assert handle is not None
            return self.last(y)

    plain, model = t.pair(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    inner = model[1]
    t.fully_shard(inner, mesh=t.mesh())
    whole = Reduces(inner)
    whole.first = model[0]
    t.fully_shard(whole, mesh=t.mesh())
    for step in range(2):
        x = t.randn(2, 8, step=step)
        out, expected = whole(x), plain(x)
        t.same(out, expected)
        out.sum().backward()
        expected.sum().backward()
        t.average_grads(plain)
        t.same(inner.weight.grad, plain[1].weight.grad)
        t.same(whole.first.weight.grad, plain[0].weight.grad)
        plain.zero_grad()
        whole.zero_grad()


@contract()
@pytest.mark.parametrize("ahead", [1, 2])
def test_explicit_prefetching_of_one_and_more_modules(t, ahead):
    plain, model = t.pair(layers)
    t.shard(model)
    for place, layer in enumerate(model):
        layer.set_modules_to_forward_prefetch([model[i] for i in range(place + 1, min(place + 1 + ahead, len(model)))])
        layer.set_modules_to_backward_prefetch([model[i] for i in range(place - 1, max(place - 1 - ahead, -1), -1)])
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))
    with pytest.raises(ValueError, match=r"FSDPModule|sharded"):
        model[0].set_modules_to_forward_prefetch([nn.Linear(2, 2)])


@contract(transport="torch")
def test_each_group_is_gathered_in_forward_and_again_in_backward_by_one_collective(t):
    model = t.shard(t.build(layers))
    helpers = common_fsdp()
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)
    model(t.randn(2, 8)).sum().backward()
    seen = []

    def count(*args, **kwargs):
        seen.append(None)
        return original(*args, **kwargs)

    with helpers.patch_all_gather(count):
        out = model(t.randn(2, 8, step=1)).sum()
        forward = len(seen)
        out.backward()
    if t.way != "threads":  # threads patch the same function
        assert forward == 4
        assert len(seen) == 8


@contract(transport="torch")
def test_without_reshard_after_forward_backward_gathers_nothing(t):
    model = t.shard(t.build(layers), reshard_after_forward=False)
    helpers = common_fsdp()
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)
    model(t.randn(2, 8)).sum().backward()
    out = model(t.randn(2, 8, step=1)).sum()

    def refuse(*args, **kwargs):
        raise AssertionError("backward gathers")

    with helpers.patch_all_gather(refuse):
        out.backward()
    assert getattr(dist, name) is original


@contract()
def test_an_embedding_may_stay_sharded_in_backward(t):
    make = lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8))  # noqa: E731
    plain, model = t.pair(make)
    t.shard(model)
    model[0].set_unshard_in_backward(False)
    tokens = torch.arange(6)
    t.train(plain, model, lambda step: tokens + t.rank + step)


@contract()
def test_unshard_with_async_op_for_all_gathers(t):
    plain, model = t.pair(layers)
    t.shard(model)
    model._set_unshard_async_op(True)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_weights_changed_between_steps_are_gathered_again(t):
    plain, model = t.pair(layers)
    t.shard(model)
    x = t.randn(2, 8)
    model(x)
    with torch.no_grad():
        for each in (plain, model):
            for param in each.parameters():
                param.mul_(0.5)
    model.reshard()
    t.same(model(x), plain(x))


@contract()
def test_an_unsharded_model_can_read_its_weights_outside_of_forward(t):
    plain, model = t.pair(layers)
    t.shard(model)
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    for (name, param), (other, reference) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert not isinstance(param, DTensor)
        t.same(param, reference)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    assert all(isinstance(p, DTensor) for p in model.parameters())


@contract()
def test_the_next_gathers_may_wait_for_an_event_after_the_optimizer_step(t):
    plain, model = t.pair(layers)
    t.shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(t.randn(2, 8, step=step)).sum().backward()
            if each is plain:
                t.average_grads(plain)
            optimizer.step()
        model.set_post_optim_event(torch.cpu.current_stream().record_event())
        t.same_params(model, plain)
