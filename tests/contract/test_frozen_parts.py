"""Frozen parameters next to and between trained ones."""

from __future__ import annotations

import pytest
import torch.nn as nn
from torch.distributed.tensor import DTensor

from _blocks import Transformer, next_token_loss, token_batch
from contract._ways import contract, layers


@contract()
@pytest.mark.parametrize("reshard", [True, False])
def test_some_parameters_of_each_group_are_frozen(t, reshard):
    plain, model = t.pair(layers)
    for each in (plain, model):
        for layer in each:
            layer[0].bias.requires_grad_(False)
    t.shard(model, reshard_after_forward=reshard)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))
    assert all(layer[0].bias.grad is None for layer in model)


@contract()
@pytest.mark.parametrize("frozen", [(0,), (1,), (1, 2)])
def test_all_parameters_of_some_groups_are_frozen(t, frozen):
    plain, model = t.pair(layers)
    for each in (plain, model):
        for place in frozen:
            each[place].requires_grad_(False)
    t.shard(model)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))
    assert all(isinstance(p, DTensor) for p in model.parameters())


@contract()
def test_requires_grad_may_change_between_steps(t):
    plain, model = t.pair(layers)
    t.shard(model)
    for step in range(3):
        for each in (plain, model):
            for place, layer in enumerate(each):
                layer.requires_grad_(place != step)
            each.zero_grad()
            each(t.randn(2, 8, step=step)).sum().backward()
        t.average_grads(plain)
        t.same_params(model, plain)


@contract()
def test_a_frozen_module_that_runs_several_times(t):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.frozen, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.frozen.weight.requires_grad_(False)

        def forward(self, x):
            return self.last(self.frozen(self.frozen(self.first(x)).relu()))

    plain, model = t.pair(Model)
    for child in model.children():
        t.fully_shard(child, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_low_rank_adapters_on_a_frozen_transformer(t):
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    def make():
        model = Transformer().requires_grad_(False)
        for block in model.blocks:
            block.attention.q, block.attention.v = Adapted(block.attention.q), Adapted(block.attention.v)
        return model

    plain, model = t.pair(make)
    for block in model.blocks:
        t.fully_shard(block, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    for step in range(2):
        losses = [next_token_loss(each, *token_batch(t.rank, step)) for each in (plain, model)]
        t.same(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        t.average_grads(plain)
        t.same_params(model, plain)
        plain.zero_grad()
        model.zero_grad()


@contract()
def test_a_fully_frozen_model_computes_gradients_of_its_input(t):
    plain, model = t.pair(lambda: layers().requires_grad_(False))
    t.shard(model)
    grads = []
    for each in (plain, model):
        x = t.randn(2, 8).requires_grad_()
        each(x).sum().backward()
        grads.append(x.grad)
    t.same(grads[1], grads[0])
