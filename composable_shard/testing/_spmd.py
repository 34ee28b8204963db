"""`spmd`: run a function on all ranks of a simulated world, in this process."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._torch.distributed import store_of_one_process
from ..errors import ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from ._exchange import BACKEND, HERE, Exchange, exchange_here
from ._process_group import DEVICES, register
from ._torch import forget_meshes, world_per_thread
from ._turns import RandomState, Turns

T = TypeVar("T")
Axes = Mapping[str, int]
_one_world = threading.Lock()


@dataclass(frozen=True)
class World:
    """The world in which a function runs.

    Attributes:
        rank: rank that runs this call, from 0.
        size: world size.
        mesh: a mesh of all ranks, with the requested axes or one axis ``shard``.
    """

    rank: int
    size: int
    mesh: DeviceMesh


def check_world(world_size: int, mesh: Axes | None) -> dict[str, int]:
    """The axes of the mesh of a world.

    Raises:
        ShardConfigTypeError: an argument has the wrong type.
        ShardConfigValueError: the world has no rank, or the product of the axes is not the world size.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        raise ShardConfigTypeError(f"world_size: expected a number of ranks, got {world_size!r}")
    if world_size < 1:
        raise ShardConfigValueError(f"world_size: expected at least 1 rank, got {world_size}")
    if mesh is None:
        return {"shard": world_size}
    if not isinstance(mesh, Mapping):
        raise ShardConfigTypeError(f"mesh: expected axes with their sizes, as in {{'dp': 2, 'tp': 2}}, got {mesh!r}")
    product = 1
    for size in mesh.values():
        product *= size
    if not mesh or product != world_size:
        raise ShardConfigValueError(
            f"mesh: the sizes {dict(mesh)} have the product {product if mesh else 0}, but the world has {world_size} "
            "ranks; the product must be the world size"
        )
    return dict(mesh)


def check_no_group(what: str) -> None:
    """Check that no world is active.

    Raises:
        ShardConfigStateError: this process has a default process group, or this thread is a rank of a simulated world.
    """
    if HERE.exchange is not None:
        raise ShardConfigStateError(f"{what}: was called by a rank of a simulated world; worlds cannot be nested")
    if dist.is_initialized():
        raise ShardConfigStateError(
            f"{what}: this process has a default process group already (backend {dist.get_backend()}, "
            f"{dist.get_world_size()} ranks); call torch.distributed.destroy_process_group() first"
        )


class Spmd:
    """See `spmd`."""

    def __init__(self, world_size: int, mesh: Axes | None, device: str, seed: int, timeout: float) -> None:
        self.world_size = world_size
        self._axes = check_world(world_size, mesh)
        if device not in DEVICES or (device != "cpu" and not torch.get_device_module(device).is_available()):
            raise ShardConfigValueError(
                f"device: a simulated world cannot use {device!r} here; expected {' or '.join(DEVICES)}, and a device "
                "that is available"
            )
        self._device = device
        self._seed = seed
        self._timeout = timeout

    def __call__(self, body: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Run `body(world, *args, **kwargs)` on every rank. Returns a list with the result of each rank."""
        __tracebackhide__ = True
        results: list[Any] = [None] * self.world_size
        with _simulation(self.world_size) as (exchange, turns):

            def run(rank: int) -> None:
                __tracebackhide__ = True
                with self._as_rank(exchange, rank) as world:
                    results[rank] = body(world, *args, **kwargs)

            threads = [
                threading.Thread(target=turns.run, args=(rank, functools.partial(run, rank)), name=f"rank {rank}")
                for rank in range(self.world_size)
            ]
            for thread in threads:
                thread.daemon = True  # a thread that hangs in C code must not keep the process alive
                thread.start()
            turns.start()
            turns.join(self._timeout)
            if turns.failed is None:
                for thread in threads:
                    thread.join()
                exchange.check_nothing_is_left()
        if turns.failed is not None:
            rank, error = turns.failed
            if rank is not None:
                error.add_note(f"raised by rank {rank} of {self.world_size} in a simulated world")
            raise error
        return results

    @contextlib.contextmanager
    def _as_rank(self, exchange: Exchange, rank: int) -> Iterator[World]:
        """Within this context, the current thread is a rank."""
        HERE.exchange, HERE.rank = exchange, rank
        torch.manual_seed(self._seed)
        np.random.seed(self._seed % 2**32)
        random.seed(self._seed)
        store = store_of_one_process()
        with torch.autograd.set_multithreading_enabled(False):
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=self.world_size)
            try:
                mesh = init_device_mesh(
                    self._device, tuple(self._axes.values()), mesh_dim_names=tuple(self._axes.keys())
                )
                yield World(rank, self.world_size, mesh)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
                forget_meshes()


@contextlib.contextmanager
def one_kernel_thread() -> Iterator[None]:
    """Run kernels on the calling thread. With more threads, sums have another order and each rank has a thread pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _simulation(size: int) -> Iterator[tuple[Exchange, Turns]]:
    """Give each thread its own process groups, and restore the caller's random state at the end."""
    check_no_group("spmd")
    if not _one_world.acquire(blocking=False):
        raise ShardConfigStateError("spmd: another thread of this process runs a simulated world; run one at a time")
    before, hook = RandomState.now(), sys.excepthook
    try:
        register(BACKEND, exchange_here)
        turns = Turns(size)
        with one_kernel_thread(), world_per_thread():
            yield Exchange(size, turns), turns
    finally:
        before.restore()
        sys.excepthook = hook  # init_process_group installs a hook that prints the rank before every line
        _one_world.release()


def spmd(
    world_size: int, *, mesh: Axes | None = None, device: str = "cpu", seed: int = 0, timeout: float = 60.0
) -> Spmd:
    """Run functions on `world_size` simulated ranks in this process.

        def body(world):
            layer = cs.fully_shard(nn.Linear(8, 8), mesh=world.mesh)
            ...
            return loss.item()

        losses = testing.spmd(4)(body)  # by rank

        @pytest.mark.world(4, mesh={"dp": 2, "tp": 2})  # a test that runs on every rank
        def test_layer(world): ...

    Every rank is a thread with its own default process group (backend ``simulated``). The ranks take turns: a rank runs
    until it waits for a collective of the others. So every run is the same. Collectives copy and reduce in memory, in
    the order of the ranks, without a launcher, a port or another process. An output that is read before the wait of its
    collective is NaN.

    Each rank has its own state of the default random generators of torch, numpy and Python. All ranks start from
    `seed`, so the same constructor creates the same model. The state of the caller is restored at the end. Kernels run
    on one thread. All other globals of the process are shared.

    If a rank raises, all others are stopped. Its exception is raised here, with a note that names the rank.

    Args:
        world_size: number of ranks, at least 1.
        mesh: names and sizes of the axes of `world.mesh`; one axis ``shard`` if None.
        device: device type of the mesh: ``cpu``, or ``cuda`` if it is available. All ranks share the device.
        seed: random seed of each rank.
        timeout: seconds after which a run is stopped with an error that shows where its ranks are.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: the arguments do not describe a world, or the device is not
            available.

    A run raises:
        ShardConfigStateError: this process has a default process group or a simulated world already.
        CollectiveMismatchError: ranks have issued different collectives at the same point of a group.
        DeadlockError: all ranks wait for each other; the message shows where each one waits.
        WorldTimeoutError: the run took longer than `timeout`.
    """
    return Spmd(world_size, mesh, device, seed, timeout)
