"""Shards that are stored on the CPU."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from _engines import ENGINES, fully_shard
from _models import Stack, shard_blocks, vectors
from _parity import Case, check_parity
from _pool import distributed
from composable_shard import CPUOffloadPolicy, OffloadPolicy

needs_accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="offloading needs an accelerator")


@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)], ids=["none", "cpu"])
@distributed(world=2)
def test_without_an_accelerator_offloading_changes_nothing(rank, world, policy):
    check_parity(Case(model=Stack, shard=functools.partial(shard_blocks, offload_policy=policy)), rank, world)


@distributed(world=2)
def test_pinning_without_an_accelerator_is_exact_and_fails_with_fsdp2(rank, world):
    model = Stack()
    shard_blocks(model, fully_shard, offload_policy=CPUOffloadPolicy())
    model(*vectors(rank, 0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"pin|accelerator|driver"):
        shard_blocks(Stack(), ENGINES["fsdp2"], offload_policy=CPUOffloadPolicy())


@distributed(world=1)
def test_another_type_of_policy_is_an_error(rank, world):
    with pytest.raises(TypeError, match="offload_policy: expected an OffloadPolicy, got bool"):
        fully_shard(nn.Linear(2, 2), offload_policy=True)


@needs_accelerator
@pytest.mark.parametrize("pin", [True, False])
@distributed(world=1)
def test_shards_gradients_and_optimizer_states_stay_on_the_cpu_and_train_exactly(rank, world, pin):
    device = torch.accelerator.current_accelerator()
    mesh = init_device_mesh(device.type, (1,))
    torch.manual_seed(3)
    plain = Stack().to(device)
    model = Stack()
    model.load_state_dict(plain.state_dict())
    shard_blocks(model, fully_shard, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=pin))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        x = vectors(rank, step)[0].to(device)
        for each in (model, plain):
            each(x).square().mean().backward()
        for name, param in model.named_parameters():
            assert param.to_local().device.type == "cpu", name
            assert param.to_local().is_pinned() is pin, name
            torch.testing.assert_close(param.grad.to_local().to(device), plain.get_parameter(name).grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.to_local().to(device), plain.get_parameter(name).detach())
