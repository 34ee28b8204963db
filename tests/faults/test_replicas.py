"""`check_replicas` finds values that must be equal on ranks and differ; `broadcast_state` makes them equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _decoders import Training
from _pool import distributed


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


def differ(words, model, *others):
    with pytest.raises(cs.errors.RankMismatchError, match=words):
        cs.check_replicas(model, *others)


@distributed(world=2)
def test_ranks_initialized_differently_before_sharding_are_reported(rank, world):
    torch.manual_seed(rank)
    model = Normed()
    differ("ranks 0 and 1 differ in: parameter up.weight, parameter up.bias, parameter down.weight", model)
    cs.broadcast_state(model)
    cs.check_replicas(model)
    torch.manual_seed(0)
    for (name, mine), first in zip(model.named_parameters(), Normed().parameters(), strict=True):
        assert torch.equal(mine, first), name


@distributed(world=2)
def test_buffers_that_differ_between_ranks_are_named_and_fixed(rank, world):
    torch.manual_seed(0)
    model = cs.fully_shard(Normed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cs.check_replicas(model, optimizer)
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))).sum().backward()
    optimizer.step()
    differ("differ in: buffer norm.running_mean, buffer norm.running_var.*broadcast_state", model, optimizer)
    cs.broadcast_state(model, optimizer)
    cs.check_replicas(model, optimizer)


@distributed(world=2)
def test_different_optimizer_settings_or_steps_are_named(rank, world):
    run = Training(rank, world)
    run.step()
    cs.check_replicas(run.model, run.optimizer)
    run.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank)
    differ(r"lr of the optimizer's param group 0 \(0.001 and 0.002\)", run.model, run.optimizer)
    run.optimizer.param_groups[0]["lr"] = 1e-3
    state = run.optimizer.state[run.model.norm.weight]
    state["step"] += rank
    differ(r"step of the optimizer for norm.weight \(1.0 and 2.0\)", run.model, run.optimizer)
    cs.broadcast_state(run.model, run.optimizer)
    cs.check_replicas(run.model, run.optimizer)
    run.step()
    run.check()


@distributed(world=4)
def test_one_different_number_in_a_shard_of_one_replica_is_an_error_on_all_ranks(rank, world):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = cs.fully_shard(nn.Linear(5, 3), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    cs.check_replicas(model, optimizer)
    if rank == 3:  # this rank holds a row
        model.weight._local_tensor.data.view(-1)[1] += 1e-6
    differ("ranks 1 and 3 differ in: parameter weight", model, optimizer)
    cs.broadcast_state(model, optimizer)
    cs.check_replicas(model, optimizer)
    if rank == 2:
        optimizer.state[model.weight]["exp_avg"]._local_tensor.view(-1)[0] = float("nan")
    differ("ranks 0 and 2 differ in: exp_avg of the optimizer for weight", model, optimizer)


@distributed(world=1)
def test_a_single_rank_has_nothing_to_compare(rank, world):
    cs.check_replicas(Normed())
    cs.broadcast_state(cs.fully_shard(Normed()))
