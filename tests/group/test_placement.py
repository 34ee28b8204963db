"""Parameters that are sharded along a dim other than 0."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from _engines import fully_shard, mesh_of
from _models import Stack, shard_blocks
from _parity import Case, check_parity
from _pool import distributed, more


def widest(param):
    """Shard along the largest dim; a dim other than 0 is counted from the end."""
    dim = max(range(param.ndim), key=lambda d: param.shape[d])
    return Shard(dim - param.ndim) if dim else None


def second(param):
    return Shard(1) if param.ndim > 1 else None


def last_of_many(param):
    return Shard(param.ndim - 1)


EVEN = functools.partial(Stack, dim=8, hidden=16, out=4)


@pytest.mark.parametrize("fn", [widest, second, last_of_many])
@pytest.mark.parametrize("optimizer", ["sgd", more("adamw")])
@distributed(world=(1, 2, 4))
def test_other_dims_train_exactly(rank, world, fn, optimizer):
    shard = functools.partial(shard_blocks, shard_placement_fn=fn)
    check_parity(Case(model=EVEN, shard=shard, optimizer=optimizer), rank, world)


@distributed(world=4)
def test_other_dims_train_exactly_on_a_mesh_with_replicas(rank, world):
    def shard(model, engine):
        shard_blocks(model, engine, mesh=mesh_of(2, 2), shard_placement_fn=second)

    check_parity(Case(model=EVEN, shard=shard, mesh=(2, 2)), rank, world)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3)
        self.only = nn.Linear(24, 4, bias=False)

    def forward(self, x):
        return self.only(self.conv(x.view(-1, 1, 1, 4).expand(-1, 4, 4, 4)).flatten(1))


def shard_conv(model, engine, **options):
    engine(model.conv, shard_placement_fn=lambda p: Shard(1) if p.ndim == 4 else None)
    engine(model.only, shard_placement_fn=lambda p: Shard(1))  # a single parameter must still be copied separately
    engine(model)


@distributed(world=2)
def test_a_dim_in_the_middle_and_a_group_of_one_parameter_train_exactly(rank, world):
    check_parity(Case(model=Conv, shard=shard_conv), rank, world)


@distributed(world=2)
def test_pieces_and_state_dict_are_sharded_along_the_chosen_dim(rank, world):
    model = EVEN()
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    shard_blocks(model, fully_shard, shard_placement_fn=second)
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(1),)
    assert weight.to_local().is_contiguous()
    assert torch.equal(weight.to_local(), full["blocks.0.up.weight"].chunk(world, 1)[rank])
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), full[name]), name
    hsdp = EVEN()
    shard_blocks(hsdp, fully_shard, mesh=mesh_of(1, 2), shard_placement_fn=second)
    assert hsdp.blocks[0].up.weight.placements == (Replicate(), Shard(1))


@pytest.mark.parametrize(
    ("placement", "kind", "words"),
    [
        (1, TypeError, "Invalid shard_placement_fn result: 1 for parameter weight; expected None, Shard"),
        (Replicate(), TypeError, "Invalid shard_placement_fn result: Replicate"),
        (Shard(2), ValueError, r"returned S\(2\) for parameter weight. Shard dim 2 is invalid for 2D tensor: .*\[4, 3"),
        (Shard(-3), ValueError, r"returned S\(-3\) for parameter weight. Shard dim -1 is invalid for 2D tensor"),
        (Shard(1), ValueError, r"parameter weight: .* uneven sharding on dim 1: .*\[4, 3\]\) \(world size: 2"),
    ],
)
@distributed(world=2)
def test_invalid_placements_are_errors(rank, world, placement, kind, words):
    with pytest.raises(kind, match=words):
        fully_shard(nn.Linear(3, 4), shard_placement_fn=lambda param: placement)
    with pytest.raises(TypeError, match="shard_placement_fn: expected a function, got str"):
        fully_shard(nn.Linear(3, 4), shard_placement_fn="no function")


@distributed(world=2)
def test_a_parameter_replaced_by_one_with_another_placement_is_an_error(rank, world):
    model = fully_shard(nn.Linear(4, 4))
    twin = fully_shard(nn.Linear(4, 4), shard_placement_fn=second)
    model.weight = twin.weight
    with pytest.raises(RuntimeError, match="weight: was replaced by a DTensor"):
        model(torch.randn(2, 4))
