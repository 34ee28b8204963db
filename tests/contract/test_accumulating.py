"""Gradient accumulation, with and without a reduction in each microbatch, and microbatches of pipelines."""

from __future__ import annotations

import pytest
import torch.nn as nn
from torch.distributed.tensor import DTensor

from _blocks import Transformer, next_token_loss, token_batch
from contract._ways import REAL, contract


def layers(count=3, dim=8):
    return nn.Sequential(*(nn.Linear(dim, dim) for _ in range(count)))


@contract()
@pytest.mark.parametrize(("recurse", "reshard"), [(True, True), (False, False)])
def test_gradients_are_reduced_in_the_last_microbatch_only(t, recurse, reshard):
    plain, model = t.pair(layers)
    t.shard(model, reshard_after_forward=reshard)
    for step in range(2):
        for micro in range(3):
            last = micro == 2
            for module in [model] if recurse else model.modules():
                if hasattr(module, "set_requires_gradient_sync"):
                    module.set_requires_gradient_sync(last, recurse=recurse)
            x = t.randn(2, 8, step=10 * step + micro)
            for each in (plain, model):
                each(x).sum().backward()
        t.average_grads(plain)
        t.same_params(model, plain)
        for each in (plain, model):
            each.zero_grad()


@contract()
def test_gradients_reduced_in_each_microbatch_add_up(t):
    plain, model = t.pair(layers)
    t.shard(model)
    for micro in range(3):
        for each in (plain, model):
            each(t.randn(2, 8, step=micro)).sum().backward()
    t.average_grads(plain)
    t.same_params(model, plain)


@contract()
def test_some_modules_reduce_in_each_microbatch_and_others_in_the_last(t):
    plain, model = t.pair(layers)
    t.shard(model)
    for micro in range(3):
        model[0].set_requires_gradient_sync(micro == 2)
        for each in (plain, model):
            each(t.randn(2, 8, step=micro)).sum().backward()
    t.average_grads(plain)
    t.same_params(model, plain)


@contract()
def test_gradients_are_none_until_they_are_reduced(t):
    model = t.build(layers)
    t.shard(model)
    model.set_requires_gradient_sync(False)
    model(t.randn(2, 8)).sum().backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())


@contract()
def test_parameters_may_stay_unsharded_between_microbatches(t):
    plain, model = t.pair(layers)
    t.shard(model)
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        model.set_reshard_after_backward(micro == 2)
        for each in (plain, model):
            each(t.randn(2, 8, step=micro)).sum().backward()
    t.average_grads(plain)
    t.same_params(model, plain)


@contract(world=4)
@pytest.mark.parametrize("scatter", [True, False])
def test_replicas_all_reduce_in_the_last_microbatch_only(t, scatter):
    plain, model = t.pair(layers)
    t.shard(model, mesh=t.mesh(2, 2))
    for step in range(2):
        for micro in range(3):
            last = micro == 2
            if scatter:
                model.set_requires_all_reduce(last)
            else:
                model.set_requires_gradient_sync(last)
            for each in (plain, model):
                each(t.randn(2, 8, step=10 * step + micro)).sum().backward()
        t.average_grads(plain)
        t.same_params(model, plain)
        for each in (plain, model):
            each.zero_grad()


@contract()
def test_all_forwards_before_all_backwards(t):
    plain, model = t.pair(Transformer)
    for block in model.blocks:
        t.fully_shard(block, mesh=t.mesh(), reshard_after_forward=False)
    t.fully_shard(model, mesh=t.mesh(), reshard_after_forward=False)
    losses = {}
    for name, each in (("plain", plain), ("model", model)):
        losses[name] = [next_token_loss(each, *token_batch(t.rank, micro)) for micro in range(3)]
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for micro, loss in enumerate(losses["model"]):
        if micro == 2:
            model.set_is_last_backward(True)
            model.set_reshard_after_backward(True)
            model.set_requires_gradient_sync(True)
        loss.backward()
    sum(losses["plain"]).backward()
    t.average_grads(plain)
    t.same_params(model, plain)


@contract()
def test_alternating_forwards_and_backwards_like_pipelines(t):
    plain, model = t.pair(layers)
    t.shard(model, reshard_after_forward=False)
    for each in (plain, model):
        if each is model:
            model.set_is_last_backward(False)
            model.set_reshard_after_backward(False)
            model.set_requires_gradient_sync(False)
        waiting = [each(t.randn(2, 8, step=0)).sum(), each(t.randn(2, 8, step=1)).sum()]
        for micro in range(2, 4):
            waiting.pop(0).backward()
            waiting.append(each(t.randn(2, 8, step=micro)).sum())
        waiting.pop(0).backward()
        if each is model:
            model.set_is_last_backward(True)
            model.set_reshard_after_backward(True)
            model.set_requires_gradient_sync(True)
        waiting.pop(0).backward()
    t.average_grads(plain)
    t.same_params(model, plain)
    assert all(isinstance(p, DTensor) for p in model.parameters())


@contract(ways=REAL)
def test_a_head_that_runs_in_chunks_of_the_loss(t):
    class Chunked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, x):
            return self.body(x)

    plain, model = t.pair(Chunked)
    t.fully_shard(model.head, mesh=t.mesh(), reshard_after_forward=False)
    t.fully_shard(model, mesh=t.mesh())
    for step in range(2):
        for each in (plain, model):
            hidden = each(t.randn(4, 8, step=step))
            cut = hidden.detach().requires_grad_()
            if each is model:
                each.head.unshard()
                each.head.set_reshard_after_backward(False)
                each.head.set_requires_gradient_sync(False)
            chunks = cut.chunk(2)
            for place, chunk in enumerate(chunks):
                if each is model and place == 1:
                    each.head.set_reshard_after_backward(True)
                    each.head.set_requires_gradient_sync(True)
                each.head(chunk).square().sum().backward()
            hidden.backward(cut.grad)
        t.average_grads(plain)
        t.same_params(model, plain)
        for each in (plain, model):
            each.zero_grad()


@contract()
def test_zeroed_gradients_accumulate_like_none(t):
    plain, model = t.pair(layers)
    t.shard(model)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad(set_to_none=step == 1)
            each(t.randn(2, 8, step=step)).sum().backward()
        t.average_grads(plain)
        t.same_params(model, plain)
