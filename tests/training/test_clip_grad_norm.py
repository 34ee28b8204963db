"""Clip sharded gradients with torch's functions.

The norm is a sum over shards. Its rounding differs from that of a sum over the full tensor, so there is a tolerance.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.tensor import DTensor

from _engines import fully_shard, mesh_of
from _models import Stack, shard_blocks, vectors
from _parity import Case, check_parity
from _pool import distributed, more

WHY = "the norm is summed by shards"


@pytest.mark.parametrize("optimizer", ["sgd", more("adamw")])
@pytest.mark.parametrize("clip", [0.05, 100.0])
@distributed(world=(1, 2, 4))
def test_clipped_training_matches_the_reference(rank, world, optimizer, clip):
    case = Case(model=Stack, optimizer=optimizer, clip=clip, atol_reference=1e-6, why=WHY)
    shots = check_parity(case, rank, world)
    assert (float(shots["ours"][0].records["norm"]) > clip) == (clip < 1)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)], ids=str)
@distributed(world=4)
def test_clipped_training_with_hsdp_matches_the_reference(rank, world, shape):
    def shard(model, engine):
        shard_blocks(model, engine, mesh=mesh_of(*shape))

    check_parity(Case(model=Stack, shard=shard, mesh=shape, clip=0.05, atol_reference=1e-6, why=WHY), rank, world)


@distributed(world=2)
def test_clipping_uneven_and_empty_shards_matches_the_reference(rank, world):
    model = functools.partial(Stack, dim=3, hidden=1, out=1)
    check_parity(Case(model=model, clip=0.05, atol_reference=1e-6, why=WHY), rank, world)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False])
@distributed(world=2)
def test_every_norm_type_matches_the_unsharded_model(rank, world, norm_type, foreach):
    model, plain = Stack(), Stack()
    plain.load_state_dict(model.state_dict())
    shard_blocks(model, fully_shard)
    for module in (model, plain):
        module(*vectors(0, 0)).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach)
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type, foreach=foreach)
    assert isinstance(norm, DTensor)
    torch.testing.assert_close(norm.full_tensor(), want, rtol=1e-5, atol=0)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-8)


@distributed(world=2)
def test_clipping_skips_frozen_parameters(rank, world):
    model = Stack()
    model.blocks[1].requires_grad_(False)
    shard_blocks(model, fully_shard)
    model(*vectors(rank, 0)).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert float(norm.full_tensor()) > 1e-3
    assert all(p.grad is None for p in model.blocks[1].parameters())
