"""Sharded modules combined with modules that torch replicates: both forms of `replicate`, and DDP."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, mesh_of
from _pool import distributed
from _stepping import assert_at_rest


def mean_gradients(plain, world, step):
    """Mean gradients of all ranks, computed in one process."""
    sums = []
    for rank in range(world):
        plain.zero_grad()
        next_token_loss(plain, *token_batch(rank, step)).backward()
        sums.append([p.grad.clone() for p in plain.parameters()])
    return {name: sum(each) / world for (name, _), *each in zip(plain.named_parameters(), *sums, strict=True)}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_all(models, plain, rank, world, call=next_token_loss):
    """Train each model for two steps, and compare with the unsharded model."""
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    optimizers["plain"] = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        want = mean_gradients(plain, world, step)
        for name, model in models.items():
            call(model, *token_batch(rank, step)).backward()
            for key, param in model.named_parameters():
                found = whole(param.grad)
                torch.testing.assert_close(
                    found, want[key.removeprefix("module.")], msg=lambda m, k=key, n=name: f"{n} {k}: {m}"
                )
        for key, param in plain.named_parameters():
            param.grad = want[key]
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


def twins(shard, **options):
    torch.manual_seed(3)
    plain = Transformer(**options)
    models = {name: copy.deepcopy(plain) for name in ENGINES}
    return plain, {name: shard(model, ENGINES[name]) or model for name, model in models.items()}


@distributed(world=2)
def test_replicate_skips_sharded_children(rank, world):
    def shard(model, engine):
        for block in model.blocks:
            engine(block, mesh=mesh_of(2))
        replicate_by_ddp(model)

    plain, models = twins(shard)
    train_all(models, plain, rank, world)
    for model in models.values():
        assert {n.split(".")[0] for n, p in model.named_parameters() if isinstance(p, DTensor)} == {"blocks"}
    assert_at_rest_below(models["ours"])


def assert_at_rest_below(model):
    for block in model.blocks:
        assert_at_rest(block)


@distributed(world=2)
def test_sharding_skips_replicated_children(rank, world):
    """All parameters of the root are sharded, except those that DDP reduces."""

    def shard(model, engine):
        replicate_by_ddp(model.blocks[0])
        engine(model.blocks[1], mesh=mesh_of(2))
        engine(model, mesh=mesh_of(2))

    plain, models = twins(shard)
    train_all(models, plain, rank, world)
    for model in models.values():
        sharded = {n for n, p in model.named_parameters() if isinstance(p, DTensor)}
        assert {n for n, _ in model.named_parameters()} - sharded == {
            n for n, _ in model.named_parameters() if n.startswith("blocks.0.")
        }
    assert_same_kinds(models)


def assert_same_kinds(models):
    kinds = [{n: isinstance(p, DTensor) for n, p in model.named_parameters()} for model in models.values()]
    assert kinds[0] == kinds[1]


@distributed(world=2)
def test_replicate_built_on_fsdp_works_next_to_sharded_modules(rank, world):
    def shard(model, engine):
        engine(model.blocks[0], mesh=mesh_of(2))
        replicate_by_fsdp(model.blocks[1], mesh=mesh_of(2))
        replicate_by_fsdp(model.head, mesh=mesh_of(2))
        replicate_by_fsdp(model.embed, mesh=mesh_of(2))
        replicate_by_fsdp(model.norm, mesh=mesh_of(2))

    plain, models = twins(shard)
    train_all(models, plain, rank, world)
    assert_same_kinds(models)


@distributed(world=2)
def test_ddp_that_ignores_sharded_parameters_trains_correctly(rank, world):
    def shard(model, engine):
        for block in model.blocks:
            engine(block, mesh=mesh_of(2))
        ignored = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        return DistributedDataParallel(model)

    plain, models = twins(shard)
    train_all(models, plain, rank, world)


@pytest.mark.parametrize("api", [replicate_by_ddp, replicate_by_fsdp])
@distributed(world=1)
def test_replicating_a_sharded_module_raises_an_error(rank, world, api):
    for engine in ENGINES.values():
        model = engine(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            api(model)


@distributed(world=1)
def test_a_replicated_module_is_not_sharded_with_its_parent(rank, world):
    """`fully_shard` skips the parameters of a module that torch replicates."""
    found = []
    for engine in ENGINES.values():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        replicate_by_ddp(model[0])
        engine(model)
        found.append([isinstance(p, DTensor) for p in model.parameters()])
    assert found[0] == found[1] == [False, False, True, True]
