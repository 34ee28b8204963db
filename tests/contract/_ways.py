"""Test one behaviour with both implementations, in each way in which users run such tests.

    @contract()
    def test_parameters_are_sharded_along_dim_0(t): ...

makes six tests: with torch's `fully_shard` and with ours, each on ranks that are threads (torch's threaded process
group), on ranks that are processes (gloo), and as one rank of torch's fake process group. The asserts are the same in
all of them. In a fake process group no values are correct, so `t.same` compares the shapes and dtypes of tensors, and
not their values. A body that needs values runs only in the ways of `REAL`.

`make test` runs torch's implementation in one of these ways, and `make matrix` in all.
"""

from __future__ import annotations

import copy
import functools
import inspect
import queue
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

import composable_shard
from _engines import forced, named_mesh
from _parity import cut
from _pool import POOL, more
from composable_shard.testing._torch import forget_meshes

M = TypeVar("M", bound=nn.Module)
ENGINES: dict[str, Callable[..., Any]] = {"torch": torch_fully_shard, "ours": composable_shard.fully_shard}
WAYS = ("threads", "processes", "fake")
REAL = ("threads", "processes")
PROCESSES = ("processes",)
SEED = 42


class Rank:
    """The argument of a test body: one rank, and the implementation to test."""

    def __init__(self, engine: str, way: str, rank: int, world: int) -> None:
        self.engine, self.way, self.rank, self.world = engine, way, rank, world
        self.fully_shard = ENGINES[engine]
        self.real = way != "fake"

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A mesh of the world: by default, all ranks on one axis. With two axes, the first one replicates."""
        shape = shape or (self.world,)
        return named_mesh(shape, names or (("shard",) if len(shape) == 1 else ("replicate", "shard")))

    def build(self, make: Callable[[], M]) -> M:
        """A model with the same parameters on every rank. Threads share torch's generator, so values are set here."""
        model = make()
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for param in model.parameters():
                bound = param.shape[-1] ** -0.5
                param.copy_((2 * torch.rand(param.shape, generator=generator) - 1) * bound)
        return model

    def shard(self, model: M, mesh: DeviceMesh | None = None, **options: Any) -> M:
        """Shard each child as a separate group, then the root; by default over all ranks."""
        mesh = mesh or self.mesh()
        for child in model.children():
            self.fully_shard(child, mesh=mesh, **options)
        self.fully_shard(model, mesh=mesh, **options)
        return model

    def pair(self, make: Callable[[], M]) -> tuple[M, M]:
        """Two copies of such a model: one to stay plain, and one to shard."""
        plain = self.build(make)
        return plain, copy.deepcopy(plain)

    def randn(self, *shape: int, step: int = 0, same: bool = False) -> torch.Tensor:
        """Random numbers that differ by rank and step, or only by step."""
        generator = torch.Generator().manual_seed(1000 * (step + 1) + (0 if same else self.rank + 1))
        return torch.randn(shape, generator=generator)

    def same(self, actual: Any, expected: Any, **tolerance: Any) -> None:
        """Check that both are equal; in a fake process group, that shape and dtype are equal."""
        if isinstance(actual, DTensor):
            actual, expected = own_part(actual, whole(expected))
        expected = whole(expected)
        if self.real or not isinstance(actual, torch.Tensor):
            torch.testing.assert_close(actual, expected, **tolerance)
        else:
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)

    def average_grads(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """Average the gradients of a plain copy of the model, as expected values."""
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad, group=group)
                param.grad.div_(dist.get_world_size(group))

    def parity(self, plain: nn.Module, sharded: nn.Module, prefixes_to_ignore: tuple[str, ...] = ()) -> None:
        """Torch's own check that each rank has its part of the plain model's parameters and gradients."""
        if self.real:
            common_fsdp().check_sharded_parity(asserts(), plain, sharded, prefixes_to_ignore)
        else:
            for (name, param), (other, shard) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
                assert name == _without(other, prefixes_to_ignore)
                assert isinstance(shard, DTensor)
                assert shard.shape == param.shape
                assert (shard.grad is None) == (param.grad is None), name

    def train(
        self,
        plain: nn.Module,
        sharded: nn.Module,
        batch: Callable[[int], Any],
        steps: int = 2,
        loss: Callable[[Any], torch.Tensor] = lambda out: out.sum(),
    ) -> None:
        """Train both models; losses, gradients and parameters must agree in each step."""
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, sharded)]
        for step in range(steps):
            losses = []
            inputs = batch(step)
            inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            for model, optimizer in zip((plain, sharded), optimizers, strict=True):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                losses.append(loss(model(*inputs)))
                losses[-1].backward()
            self.average_grads(plain)
            self.same(losses[1], losses[0])
            self.same_params(sharded, plain)
            for optimizer in optimizers:
                optimizer.step()
        self.same_params(sharded, plain)

    def same_params(self, sharded: nn.Module, plain: nn.Module) -> None:
        """Check that gradients and parameters agree, by name."""
        shards = dict(sharded.named_parameters())
        for name, param in plain.named_parameters():
            shard = shards[name]
            self.same(shard, param)
            assert (shard.grad is None) == (param.grad is None), f"gradient of {name}"
            if param.grad is not None:
                self.same(shard.grad, param.grad)


def layers(count: int = 3, dim: int = 8) -> nn.Sequential:
    """A chain of linear layers, each with its activation."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in range(count)))


def own_part(value: DTensor, of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a tensor and the same part of another; the full tensors if parts are not contiguous."""
    if any(p.is_partial() or isinstance(p, _StridedShard) for p in value.placements) or value.shape != of.shape:
        return whole(value), of
    return value.to_local(), cut(of, (value.device_mesh, value.placements))


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _without(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        name = name.replace(prefix, "")
    return name


@functools.cache
def common_fsdp() -> Any:
    """Torch's helpers, which its own tests and users' tests share."""
    from torch.testing._internal import common_fsdp as module

    return module


@functools.cache
def asserts() -> Any:
    """An object with the methods of a test case that torch's helpers call."""
    from torch.testing._internal.common_utils import TestCase

    return TestCase()


def contract(
    world: int = 2, ways: tuple[str, ...] = WAYS, transport: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a body into tests of both implementations in each of these ways.

    Args:
        world: number of ranks.
        ways: some of `WAYS`.
        transport: transport of our implementation; "torch" if the body patches or counts torch's collectives.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(engine: str, way: str, **kwargs: Any) -> None:
            kwargs |= {"engine": engine, "way": way}
            _RUN[way](test, world, kwargs)

        def on_rank(rank: int, world: int, engine: str, way: str, **kwargs: Any) -> None:
            with forced(transport if way == "processes" else None):
                body(Rank(engine, way, rank, world), **kwargs)

        test.__wrapped__ = on_rank  # type: ignore[attr-defined]
        test.transport = transport  # type: ignore[attr-defined]
        own = [p for p in inspect.signature(body).parameters.values() if p.name != "t"]
        named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("engine", "way")]
        test.__signature__ = inspect.Signature(named + own)  # type: ignore[attr-defined]
        return pytest.mark.parametrize(("engine", "way"), _cases(ways))(test)

    return decorate


def _cases(ways: tuple[str, ...]) -> list[Any]:
    """The marks of a way: torch's implementation, which validates the asserts, runs in one way, else in the matrix."""
    first = "processes" if "processes" in ways else ways[0]
    return [("torch", way) if way == first else more("torch", way) for way in ways] + [("ours", way) for way in ways]


def _in_processes(test: Any, world: int, kwargs: dict[str, Any]) -> None:
    POOL.run(f"{test.__module__}:{test.__qualname__}", world, kwargs)


def _in_threads(test: Any, world: int, kwargs: dict[str, Any]) -> None:
    from torch.testing._internal.common_distributed import MultiThreadedTestCase, spawn_threads_and_init_comms

    def body(case: Any) -> None:
        test.__wrapped__(rank=dist.get_rank(), world=world, **kwargs)

    MultiThreadedTestCase.exception_queue = queue.Queue()
    with forced(test.transport):
        spawn_threads_and_init_comms(body, world_size=world)(None)


def _in_a_fake_group(test: Any, world: int, kwargs: dict[str, Any]) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with forced(test.transport):
            test.__wrapped__(rank=0, world=world, **kwargs)
    finally:
        dist.destroy_process_group()
        forget_meshes()


_RUN: dict[str, Callable[[Any, int, dict[str, Any]], None]] = {
    "threads": _in_threads,
    "processes": _in_processes,
    "fake": _in_a_fake_group,
}
