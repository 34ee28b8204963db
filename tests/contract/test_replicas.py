"""Meshes with replicas, and hooks after the reduction."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from _blocks import Transformer, next_token_loss, token_batch
from contract._ways import REAL, contract


def layers(dim=8):
    return nn.Sequential(nn.Linear(dim, 12), nn.ReLU(), nn.Linear(12, dim))


@contract(world=4)
@pytest.mark.parametrize(("shape", "reshard"), [((2, 2), True), ((2, 2), False), ((4, 1), True), ((1, 4), True)])
def test_gradients_are_averaged_over_all_ranks(t, shape, reshard):
    plain, model = t.pair(layers)
    t.shard(model, t.mesh(*shape), reshard_after_forward=reshard)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract(world=4)
def test_a_transformer_that_is_partly_replicated(t):
    plain, model = t.pair(Transformer)
    for block in model.blocks:
        t.fully_shard(block, mesh=t.mesh(2, 2))
    t.fully_shard(model, mesh=t.mesh(4))
    for each in (plain, model):
        next_token_loss(each, *token_batch(t.rank, 0)).backward()
    t.average_grads(plain)
    t.same_params(model, plain)


@contract(world=4, ways=REAL)
def test_rank_0_broadcasts_its_replica(t):
    model = t.build(layers)
    mesh = t.mesh(2, 2)
    if mesh.get_local_rank(0):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
    expected = t.build(layers)
    t.shard(model, mesh)
    group = mesh.get_group(0)
    for param in model.parameters():
        dist.broadcast(param.to_local().detach(), src=dist.get_global_rank(group, 0), group=group)
    t.parity(expected, model)


@contract(world=4, ways=REAL)
def test_a_custom_hook_may_reduce_over_replicas(t):
    plain, model = t.pair(layers)
    mesh = t.mesh(2, 2)
    t.shard(model, mesh["shard"])
    calls = []

    def reduce(output):
        calls.append(output.shape)
        dist.all_reduce(output, group=mesh.get_group("replicate"))
        output.div_(2)

    for module in (model, *model):
        if any(True for _ in module.parameters()):
            module.set_all_reduce_hook(reduce)
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(t.randn(2, 8, step=step)).sum().backward()
        t.average_grads(plain)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            t.same(a.grad, b.grad)
    assert len(calls) == 4


@contract(world=4)
def test_reshard_to_the_full_shard_axis_is_reshard(t):
    plain, model = t.pair(layers)
    t.shard(model, t.mesh(2, 2), reshard_after_forward=2)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))
