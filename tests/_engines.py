"""The implementations that tests call "ours" and "fsdp2".

COMPOSABLE_SHARD_TEST_ENGINE=fsdp2 uses torch's FSDP2 as "ours". Tests that fail then show the differences.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

FullyShard = Callable[..., Any]


def _pick_ours() -> FullyShard:
    if os.environ.get("COMPOSABLE_SHARD_TEST_ENGINE") == "fsdp2":
        return fsdp2
    import composable_shard

    return composable_shard.fully_shard


fully_shard = _pick_ours()
ENGINES: dict[str, FullyShard] = {"ours": fully_shard, "fsdp2": fsdp2}


# Weak references, because a mesh keeps its process groups and their threads alive.
_MESHES: weakref.WeakValueDictionary[Any, DeviceMesh] = weakref.WeakValueDictionary()


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    world = dist.group.WORLD
    assert world is not None
    key = shape, names, weakref.ref(world)
    mesh = _MESHES.get(key)
    if mesh is None:
        mesh = _MESHES[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh over the default group, cached while it is used. `mesh_of(2, 2)` replicates over axis 0."""
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    return _mesh(shape, names)


def named_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over the default group with named axes. It is cached, because torch's FSDP2 requires the same object."""
    return _mesh(shape, names)


TRANSPORT = "COMPOSABLE_SHARD_TRANSPORT"


@contextlib.contextmanager
def forced(transport: str | None) -> Iterator[None]:
    """Force a transport in this process; None changes nothing."""
    kept = os.environ.get(TRANSPORT)
    if transport is not None:
        os.environ[TRANSPORT] = transport
    try:
        yield
    finally:
        if kept is not None:
            os.environ[TRANSPORT] = kept
        elif transport is not None:
            del os.environ[TRANSPORT]
