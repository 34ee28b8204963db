"""Many modules, and deeply nested ones: they are built and train, in time proportional to their number.

The models are compared with the same unsharded models, which get the data of all ranks.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import composable_shard as cs
from _pool import distributed

LIMIT_S = 600.0


class Layer(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), inner

    def forward(self, x):
        x = x + 0.1 * torch.tanh(self.linear(x))
        return x if self.inner is None else self.inner(x)


def in_a_row(count):
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(count)])


def nested(count):
    torch.manual_seed(0)
    model = None
    for _ in range(count):
        model = Layer(model)
    return model


def shard_each_layer(model):
    """Shard each layer, the innermost ones first."""
    for layer in reversed([module for module in model.modules() if isinstance(module, Layer) and module is not model]):
        cs.fully_shard(layer)
    return cs.fully_shard(model)


def batch(rank, step):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(1009 * step + rank))


def seconds_to_train(make, count, world, steps=3):
    """Build, shard and train a model next to an unsharded one.

    Returns:
        seconds for sharding, for the first step and for each later one.
    """
    rank = dist.get_rank()
    model, plain = make(count), make(count)
    begin = time.perf_counter()
    shard_each_layer(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    seconds = [time.perf_counter() - begin]
    for step in range(steps):
        begin = time.perf_counter()
        model(batch(rank, step)).square().mean().backward()
        seconds.append(time.perf_counter() - begin)
        for other in range(world):
            (plain(batch(other, step)).square().mean() / world).backward()
        compare([param.grad for param in model.parameters()], [param.grad for param in plain.parameters()])
        begin = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds[-1] += time.perf_counter() - begin
    compare([*model.parameters()], [*plain.parameters()])
    return seconds[0], seconds[1], statistics.mean(seconds[2:])


def compare(sharded, plain):
    """Compare this rank's shards with the same rows of the unsharded model."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for mine, whole in zip(sharded, plain, strict=True):
        torch.testing.assert_close(mine.to_local(), whole.chunk(world)[rank])


@pytest.mark.matrix
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(("make", "count"), [(in_a_row, 5000), (nested, 196)], ids=["5000 in a row", "196 nested"])
@distributed(world=2, limit_s=LIMIT_S)
def test_many_modules_are_built_and_train_exactly(rank, world, make, count):
    seconds = seconds_to_train(make, count, world)
    if "SCALE" in os.environ:
        Path(f"{os.environ['SCALE']}-{count}-{rank}").write_text("{:.1f} s, {:.1f} s, {:.1f} s".format(*seconds))


@pytest.mark.matrix
@pytest.mark.timeout(LIMIT_S + 60)
@distributed(world=2, limit_s=LIMIT_S)
def test_twice_as_many_modules_take_about_twice_as_long(rank, world):
    seconds_to_train(in_a_row, 100, world)
    once, twice = (sum(seconds_to_train(in_a_row, count, world)) for count in (400, 800))
    assert twice < 3 * once, (once, twice)
