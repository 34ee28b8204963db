"""`spmd`: a function as all ranks of a world, in this process."""

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

from .._errors import ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from .._torch.distributed import store_of_one_process
from ._exchange import BACKEND, HERE, Exchange, exchange_here
from ._process_group import DEVICES, register
from ._torch import forget_meshes, world_per_thread
from ._turns import RandomState, Turns

T = TypeVar("T")
Axes = Mapping[str, int]
_one_world = threading.Lock()


@dataclass(frozen=True)
class World:
    """What a function knows of the world that it runs in.

    Attributes:
        rank: of this call, from 0.
        size: number of ranks.
        mesh: over all ranks: with the axes that were asked for, else one axis ``shard``.
    """

    rank: int
    size: int
    mesh: DeviceMesh


def check_world(world_size: int, mesh: Axes | None) -> dict[str, int]:
    """The axes of the mesh of a world.

    Raises:
        ShardConfigTypeError: an argument has the wrong type.
        ShardConfigValueError: the world has no rank, or the axes do not make it up.
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
            f"mesh: {dict(mesh)} has {product if mesh else 0} places for a world of {world_size} ranks; the product of "
            "its sizes must be the world size"
        )
    return dict(mesh)


def check_no_group(what: str) -> None:
    """Raises ShardConfigStateError if this process has a default process group, or is a simulated world itself."""
    if HERE.exchange is not None:
        raise ShardConfigStateError(f"{what}: runs inside of a rank of a simulated world; worlds cannot be nested")
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
                f"device: a simulated world of {device!r} cannot be made here; expected {' or '.join(DEVICES)}, a type "
                "that this process has"
            )
        self._device = device
        self._seed = seed
        self._timeout = timeout

    def __call__(self, body: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Run `body(world, *args, **kwargs)` as every rank; returns what each has returned, by rank."""
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
                thread.daemon = True  # one that hangs in C does not keep the process alive
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

    def wrap(self, body: Callable[..., T]) -> Callable[..., list[T]]:
        """Decorate a function that runs as every rank whenever it is called, without its first argument, the world."""

        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> list[T]:
            return self(body, *args, **kwargs)

        del run.__wrapped__  # pytest would look there for arguments
        return run

    @contextlib.contextmanager
    def _as_rank(self, exchange: Exchange, rank: int) -> Iterator[World]:
        """Make this thread a rank."""
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
    """Kernels run on the thread that calls them: on more they add in another order, and cost each rank a pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _simulation(size: int) -> Iterator[tuple[Exchange, Turns]]:
    """A world of its own for each thread, and the caller's random numbers as they were."""
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
        sys.excepthook = hook  # torch puts the rank before every line
        _one_world.release()


def spmd(
    world_size: int, *, mesh: Axes | None = None, device: str = "cpu", seed: int = 0, timeout: float = 60.0
) -> Spmd:
    """A world of `world_size` ranks in this process, to run functions in.

        def body(world):
            layer = cs.fully_shard(nn.Linear(8, 8), mesh=world.mesh)
            ...
            return loss.item()

        losses = testing.spmd(4)(body)  # by rank

        @testing.spmd(4, mesh={"dp": 2, "tp": 2}).wrap  # a test without a plugin
        def test_layer(world): ...

    Every rank is a thread with a default process group of its own (backend ``simulated``), and they take turns: one
    runs until it waits for a collective of the others, so a run is the same every time. Collectives move and add in
    memory, sums in the order of the ranks; there is no launcher, no port and no other process. What is read before the
    wait of its collective is NaN.

    torch's, numpy's and Python's default random generators belong to the rank whose turn it is, as if each had a
    process of its own; all start from `seed`, so that equal constructors give equal models. The caller's are put back
    at the end. Kernels run on one thread. All other globals of the process are shared.

    A rank that raises ends all others; its exception is raised here, with a note that names the rank.

    Args:
        world_size: number of ranks, at least 1.
        mesh: names and sizes of the axes of `world.mesh`; one axis ``shard`` if None.
        device: type of device of the mesh: ``cpu``, or ``cuda`` where there is one. All ranks share it.
        seed: from which each rank starts its random numbers.
        timeout: seconds after which a run ends with an error that shows what its ranks do.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: the arguments make no world, or this process lacks the device.

    A run of it raises:
        ShardConfigStateError: this process has a default process group, or is a simulated world already.
        CollectiveMismatchError: ranks have issued different collectives at one point of a group.
        DeadlockError: all ranks wait for one another; it says where each is.
        WorldTimeoutError: it has taken longer than `timeout`.
    """
    return Spmd(world_size, mesh, device, seed, timeout)
