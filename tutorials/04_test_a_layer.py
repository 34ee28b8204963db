"""Test a sharded layer: on a laptop, without a launcher, in one process.

Copy this file, put your layer in the place of `Layer`, and run it: ``pytest tutorials/04_test_a_layer.py``.
``python tutorials/04_test_a_layer.py`` draws the memory of a step first, in runs/04/memory.png. It needs pytest, and
matplotlib for the picture: ``pip install pytest matplotlib``.

`composable_shard` brings a pytest plugin; it knows the marker `world`. A simulated world takes some hundredths of a
second. Ranks are threads that take turns, so a test does the same every time, and what would hang is an error at once.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import composable_shard as cs
from composable_shard import report, testing


class Layer(nn.Module):
    """The layer to test: replace it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 60)
        self.down = nn.Linear(60, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def make_inputs(batch: int, step: int) -> torch.Tensor:
    """The inputs of one rank in one step; each has its own."""
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + batch))


# 1. Does it train as it does unsharded? Outputs, gradients and updated parameters are compared to the bit, with those
#    of one unsharded layer that gets the mean of all ranks' gradients.


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_sharded_layer_trains_as_the_unsharded_one(world_size):
    testing.assert_matches_unsharded(Layer, make_inputs, world_size=world_size)


def test_two_copies_of_it_do_too():
    testing.assert_matches_unsharded(Layer, make_inputs, world_size=4, mesh={"replicate": 2, "shard": 2})


# 2. Whatever else you want to know: a test with the marker `world` runs as every rank of it.


def sharded(mesh):
    return cs.fully_shard(Layer(), mesh=mesh, reshard_after_forward=True)


@pytest.mark.world(4)
def test_each_rank_holds_a_quarter(world, mesh):
    layer = sharded(mesh)
    assert isinstance(layer.up.weight, DTensor)
    assert layer.up.weight.to_local().shape == (15, 16)
    assert world.rank == mesh.get_local_rank()


# 3. What does a step do, how often does it communicate, and how much memory does it take?


@pytest.mark.world(2)
def test_a_step_gathers_twice_and_reduces_once(world, mesh):
    layer, x = sharded(mesh), make_inputs(world.rank, 0)
    testing.assert_collectives(lambda: layer(x).sum().backward(), all_gather=2, reduce_scatter=1)
    actions = testing.trace(layer, lambda: layer(x).sum().backward()).splitlines()
    assert [action.removesuffix(" (root)") for action in actions] == (
        ["UNSHARD", "WAIT", "COMPUTE", "RESHARD"]  # forward
        + ["UNSHARD", "WAIT", "COMPUTE (root) backward", "RESHARD", "REDUCE", "REDUCED"]
    )


def test_memory_at_512_ranks_is_what_the_plan_says():
    with testing.fake(512) as world:
        layer = sharded(world.mesh)
        layer(make_inputs(0, 0)).sum().backward()
        testing.assert_peak_bytes(layer)


# 4. What does the memory of such a step look like, when several of these layers follow one another?


def draw_memory(path, layers=4, world_size=512):
    """Bytes by kind and their places in the arena, as planned and as they were, on one rank of so many."""
    with testing.fake(world_size) as world:
        model = nn.Sequential(*(sharded(world.mesh) for _ in range(layers)))
        cs.fully_shard(model, mesh=world.mesh)
        for step in range(2):  # the first one learns the order
            model(make_inputs(0, step)).sum().backward()
        report.memory(cs.make_plan(model), path, cs.last_record(model))


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw_memory(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


# 5. Tests that need a real network run on gloo, in processes that stay warm: `@pytest.mark.world(2, processes=True)`.


if __name__ == "__main__":
    picture = Path("runs/04/memory.png")
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_memory(picture)
    print(f"the memory of a step of four layers on 512 ranks: {picture}")
    sys.exit(pytest.main([__file__]))
