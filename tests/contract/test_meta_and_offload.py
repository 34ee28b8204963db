"""Models on the meta device, and shards that are offloaded to the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from contract._ways import REAL, contract


def layers(dim=8):
    return nn.Sequential(nn.Linear(dim, 12), nn.LayerNorm(12), nn.Linear(12, dim))


@contract(world=4)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_meta_model_is_sharded_materialised_and_initialised(t, shape):
    with torch.device("meta"):
        model = layers()
    t.shard(model, mesh=t.mesh(*shape))
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.is_meta
        assert param.to_local().is_meta
    model.to_empty(device="cpu")
    for module in model:
        for param in module.parameters():
            nn.init.constant_(param, 0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = layers()
    for param in plain.parameters():
        nn.init.constant_(param, 0.25)
    x = t.randn(2, 8)
    for each in (plain, model):
        each(x).square().sum().backward()
    t.average_grads(plain)
    t.same_params(model, plain)
    optimizer.step()


@contract()
def test_reset_parameters_works_after_sharding(t):
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    t.shard(model)
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    t.same(model[0].weight, torch.ones(8))
    t.same(model[0].bias, torch.zeros(8))


@contract()
def test_parameters_still_on_meta_at_the_first_forward_are_listed(t):
    with torch.device("meta"):
        model = layers()
    t.shard(model)
    with pytest.raises(RuntimeError, match=r"meta[\s\S]*0\.weight"):
        model(t.randn(2, 8))


@contract()
def test_buffers_are_materialised_with_the_parameters(t):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    t.shard(model)
    model.to_empty(device="cpu")
    assert model[1].running_mean.device.type == "cpu"
    assert model[1].running_mean.shape == (8,)


@contract()
def test_offloaded_shards_train(t):
    plain, model = t.pair(layers)
    t.shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))
    assert all(p.device.type == "cpu" and p.grad.device.type == "cpu" for p in model.parameters())


@contract()
def test_offloaded_shards_with_accumulation(t):
    plain, model = t.pair(layers)
    t.shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        for each in (plain, model):
            each(t.randn(2, 8, step=micro)).sum().backward()
    t.average_grads(plain)
    t.same_params(model, plain)


@contract(ways=REAL)
def test_rank_0_broadcasts_values_to_ranks_with_a_meta_model(t):
    plain = t.build(layers)
    with torch.device("meta"):
        model = layers()
    t.shard(model)
    state = {}
    for name, param in model.state_dict().items():
        value = plain.state_dict()[name].clone() if t.rank == 0 else torch.empty(param.shape)
        dist.broadcast(value, src=0)
        state[name] = nn.Parameter(distribute_tensor(value, param.device_mesh, param.placements))
    model.load_state_dict(state, strict=True, assign=True)
    t.parity(plain, model)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))
