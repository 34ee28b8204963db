"""Test a sharded layer in one process, without a launcher.

Copy this file, replace `Layer` by your layer, and run ``pytest tutorials/04_test_a_layer.py``. It needs pytest.
``python tutorials/04_test_a_layer.py`` also draws the memory of a step to runs/04/memory.png, and needs matplotlib.

`composable_shard` installs a pytest plugin with the marker `world`, which runs a test on simulated ranks. They start in
a few hundredths of a second. Ranks are threads that take turns, so tests are deterministic, and a deadlock is an error
instead of a hang.
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
    """The layer under test. Replace it by yours."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 60)
        self.down = nn.Linear(60, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def make_inputs(batch: int, step: int) -> torch.Tensor:
    """Return the input of one rank for one step, shape (4, 16)."""
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + batch))


# 1. Does the sharded layer train like the unsharded one? Outputs, gradients and updated parameters must be bitwise
#    identical to those of an unsharded layer that gets the mean of all ranks' gradients.


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_layer_trains_like_unsharded_layer(world_size):
    testing.assert_matches_unsharded(Layer, make_inputs, world_size=world_size)


def test_two_replicas_train_like_unsharded_layer():
    testing.assert_matches_unsharded(Layer, make_inputs, world_size=4, mesh={"replicate": 2, "shard": 2})


# 2. Your own checks: a test with the marker `world` runs on every rank.


def sharded(mesh):
    return cs.fully_shard(Layer(), mesh=mesh, reshard_after_forward=True)


@pytest.mark.world(4)
def test_each_rank_holds_a_quarter_of_the_weight(world, mesh):
    layer = sharded(mesh)
    assert isinstance(layer.up.weight, DTensor)
    assert layer.up.weight.to_local().shape == (15, 16)
    assert world.rank == mesh.get_local_rank()


# 3. Which collectives does a step run, in which order, and what is its peak memory?


@pytest.mark.world(2)
def test_a_step_gathers_twice_and_reduces_once(world, mesh):
    layer, x = sharded(mesh), make_inputs(world.rank, 0)
    testing.assert_collectives(lambda: layer(x).sum().backward(), all_gather=2, reduce_scatter=1)
    actions = testing.trace(layer, lambda: layer(x).sum().backward()).splitlines()
    assert [action.removesuffix(" (root)") for action in actions] == (
        ["UNSHARD", "WAIT", "COMPUTE", "RESHARD"]  # forward
        + ["UNSHARD", "WAIT", "COMPUTE (root) backward", "RESHARD", "REDUCE", "REDUCED"]
    )


def test_peak_memory_on_512_ranks_equals_the_plan():
    with testing.fake(512) as world:
        layer = sharded(world.mesh)
        layer(make_inputs(0, 0)).sum().backward()
        testing.assert_peak_bytes(layer)


# 4. How is memory used during a step of several layers?


def draw_memory(path, layers=4, world_size=512):
    """Draw planned and measured memory of one rank: bytes by type, and positions in the arena."""
    with testing.fake(world_size) as world:
        model = nn.Sequential(*(sharded(world.mesh) for _ in range(layers)))
        cs.fully_shard(model, mesh=world.mesh)
        for step in range(2):  # the first step records the order of the groups
            model(make_inputs(0, step)).sum().backward()
        report.memory(cs.make_plan(model), path, cs.last_record(model))


def test_memory_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw_memory(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


# 5. For real collectives, use gloo processes, which are reused between tests: `@pytest.mark.world(2, processes=True)`.


if __name__ == "__main__":
    picture = Path("runs/04/memory.png")
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_memory(picture)
    print(f"memory of a step of four layers on 512 ranks: {picture}")
    sys.exit(pytest.main([__file__]))
