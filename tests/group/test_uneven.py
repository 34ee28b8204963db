"""Parameters whose first dimension does not divide by the world size, is smaller than it, or is empty."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn

from _engines import fully_shard
from _models import Stack, shard_blocks, shard_root
from _parity import Case, check_parity
from _pool import distributed, more

SIZES = [(5, 7, 3), (3, 1, 1), (1, 9, 2)]


@pytest.mark.parametrize(
    ("world", "optimizer", "dim", "hidden", "out"),
    [
        *((2, "adamw-foreach", *sizes) for sizes in SIZES),
        *((4, "sgd", *sizes) for sizes in SIZES),
        *(more(2, "sgd", *sizes) for sizes in SIZES),
        *(more(4, "adamw-foreach", *sizes) for sizes in SIZES),
    ],
)
@distributed(world=None)
def test_uneven_and_empty_shards_train_exactly(rank, world, dim, hidden, out, optimizer):
    model = functools.partial(Stack, dim=dim, hidden=hidden, out=out, blocks=2)
    check_parity(Case(model=model, optimizer=optimizer), rank, world)


@distributed(world=4)
def test_a_rank_may_have_only_empty_shards(rank, world):
    model = functools.partial(Stack, dim=1, hidden=2, out=1, blocks=2)
    shots = check_parity(Case(model=model, shard=shard_root), rank, world)
    if rank == 3:
        held = {n: p.numel() for n, p in shots["ours"][0].params.items()}
        assert held == dict.fromkeys(held, 0)


@distributed(world=2)
def test_uneven_shards_accumulate_exactly_without_resharding(rank, world):
    def train(run):
        run.set_sync(False)
        run.backward(run.loss(0))
        run.set_sync(True)
        loss = run.loss(1)
        run.backward(loss)
        return loss

    model = functools.partial(Stack, dim=5, hidden=3)
    shard = functools.partial(shard_blocks, reshard_after_forward=False)
    check_parity(Case(model=model, shard=shard, train=train), rank, world)


class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x):
        return torch.cat([self.lin(x), x @ self.empty.t()], dim=1)


@distributed(world=(1, 2))
def test_a_model_with_an_empty_parameter_trains_exactly(rank, world):
    case = Case(model=WithEmpty, shard=shard_root, fsdp2=False, why="FSDP2 raises on empty parameters")
    check_parity(case, rank, world)


@distributed(world=4)
def test_local_shapes_are_the_canonical_chunks(rank, world):
    model = nn.Linear(4, 6, bias=False)
    fully_shard(model)
    sizes = [p.to_local().shape[0] for p in model.parameters()]
    assert sizes == [[2, 2, 2, 0][rank]]
