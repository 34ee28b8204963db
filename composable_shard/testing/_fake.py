"""`fake`: one rank of a world of any size, to look at shapes, plans and memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..errors import ShardConfigValueError
from ._spmd import Axes, World, check_no_group, check_world
from ._torch import fake_group, forget_meshes


@contextlib.contextmanager
def fake(world_size: int, rank: int = 0, *, mesh: Axes | None = None, device: str = "cpu") -> Iterator[World]:
    """Make this process one rank of a world whose other ranks do not exist.

    Collectives return immediately, and their results are meaningless. Shapes, plans, records and memory are those of a
    world of that size:

        with testing.fake(512) as world:
            cs.fully_shard(layer, mesh=world.mesh)
            layer(x).sum().backward()
            testing.assert_peak_bytes(layer, at_most=3 << 20)

    Under torch's ``FakeTensorMode`` (from ``torch._subclasses.fake_tensor``), tensors take no memory and compute takes
    no time. You can create, shard and trace a model of any size there, with any batch and sequence length:

        with testing.fake(512, mesh={"dp": 64, "tp": 8}) as world, FakeTensorMode():
            ...
            print(testing.trace(model, step))

    The default process group is destroyed at the end, also after an exception.

    Args:
        world_size: number of ranks, at least 1.
        rank: the rank of this process.
        mesh: names and sizes of the axes of `world.mesh`; one axis ``shard`` if None.
        device: device type of the mesh.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: the arguments do not describe a world, or it has no such rank.
        ShardConfigStateError: this process has a default process group already.
    """
    axes = check_world(world_size, mesh)
    if not 0 <= rank < world_size:
        raise ShardConfigValueError(f"rank: a world of {world_size} has ranks 0 to {world_size - 1}, got {rank}")
    check_no_group("fake")
    hook = sys.excepthook
    fake_group(world_size, rank)
    try:
        yield World(rank, world_size, init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        sys.excepthook = hook  # init_process_group installs a hook that prints the rank before every line
