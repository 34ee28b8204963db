"""Parity on a two-dimensional mesh (HSDP)."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import DTensor, Replicate, Shard

from _engines import fully_shard, mesh_of
from _models import Stack, shard_blocks, shard_nested
from _parity import Case, check_parity
from _pool import distributed

GROUPINGS = {"blocks": shard_blocks, "nested": shard_nested}


def hsdp_case(shape, grouping="blocks", **options):
    def shard(model, engine):
        GROUPINGS[grouping](model, engine, mesh=mesh_of(*shape))

    return Case(model=Stack, shard=shard, mesh=shape, **options)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("grouping", ["blocks", "nested"])
@distributed(world=4)
def test_two_replicas_of_two_shards_match_the_reference(rank, world, grouping, optimizer):
    check_parity(hsdp_case((2, 2), grouping, optimizer=optimizer), rank, world)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@distributed(world=2)
def test_a_mesh_axis_of_size_one_matches_the_reference(rank, world, shape, optimizer):
    check_parity(hsdp_case(shape, optimizer=optimizer), rank, world)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)], ids=str)
@distributed(world=4)
def test_pure_replication_and_pure_sharding_match_the_reference_on_four_ranks(rank, world, shape):
    order = "in FSDP2's all-reduce over four ranks, gloo decides the order of the sum"
    check_parity(hsdp_case(shape, why=order), rank, world)


@distributed(world=4)
def test_accumulation_with_sync_off_reduces_once_over_both_axes(rank, world):
    def train(run):
        run.set_sync(False)
        run.backward(run.loss(0))
        run.set_sync(True)
        loss = run.loss(1)
        run.backward(loss)
        return loss

    check_parity(hsdp_case((2, 2), train=train), rank, world)


@distributed(world=4)
def test_parameters_are_replicated_on_the_first_axis_and_sharded_on_the_second(rank, world):
    model = Stack()
    shard_blocks(model, fully_shard, mesh=mesh_of(2, 2))
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        assert param.placements == (Replicate(), Shard(0)), name
        assert param.device_mesh.mesh_dim_names == ("replicate", "shard"), name
