"""Decoders, and settings of sharded decoders, for the scenarios of `testing.races`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

import composable_shard as cs
from _blocks import TENSOR_PARALLEL
from _extended import Halved
from _race_training import decoder
from composable_shard import PoolPolicy, testing
from composable_shard._comm.collectives import RankOrdered
from composable_shard._comm.mesh import MeshInfo
from composable_shard._fsdp2 import listening
from composable_shard._group.reduction import ReduceBucket
from composable_shard._memory.offload import take_over
from composable_shard._memory.state_on_host import StateOnHost
from composable_shard._torch.distributed import local_tensor


def three_quarters(model: Any, checked: testing.Checked) -> None:
    model.set_pool_policy(PoolPolicy(budget=cs.make_plan(model).peak_bytes * 3 // 4))


def held(model: Any, checked: testing.Checked) -> None:
    """Every other reduction keeps its memory until it is waited for. The memory of the others is reused earlier."""
    plan = cs.make_plan(model)
    names = tuple(f"blocks.{index}" for index in range(0, len(model.blocks), 2))
    model.set_plan(replace(plan, schedule=replace(plan.effective_schedule(), holds=names)))


def idle_memory_goes_back(model: Any, checked: testing.Checked) -> None:
    model.set_pool_policy(PoolPolicy(keep_idle=False))


def freeze(model: Any) -> nn.Module:
    for parameter in (*model.embed.parameters(), *model.blocks[0].attention.parameters()):
        parameter.requires_grad_(False)
    return model


def parallelize(model: Any, mesh: Any) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], TENSOR_PARALLEL)
        block.attention.heads, block.attention.kv_heads = 2, 1


class InDouble(nn.Module):
    """A layer that computes in float64, and has inputs and outputs of another dtype."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.double()).to(x.dtype)


def in_two_dtypes() -> nn.Module:
    """Each block has a gather and a reduction in float32, and one in float64."""
    model: Any = decoder()
    for block in model.blocks:
        block.feed_forward = InDouble(block.feed_forward)
    return model


def extended() -> nn.Module:
    model: Any = decoder()
    for block in model.blocks:
        up = block.feed_forward.up
        up.weight = nn.Parameter(Halved(up.weight.detach().clone()))
    return model


class Gathers:
    """Custom communication of the user (torch's `AllGather`)."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatters(Gathers):
    """Custom communication of the user (torch's `ReduceScatter`)."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def own_communication(model: Any, checked: testing.Checked) -> None:
    for module in (*model.blocks, model):
        module.set_custom_all_gather(Gathers())
        module.set_custom_reduce_scatter(Scatters())


@contextlib.contextmanager
def offloading() -> Iterator[None]:
    """Keep shards on the host. The CPU is both the simulated accelerator and the host."""
    real = ReduceBucket._at_home

    def at_home(bucket: ReduceBucket, out: Tensor) -> Tensor:
        home = real(bucket, out)
        _checked[-1].on_host(home)
        return home

    with (
        mock.patch.object(MeshInfo, "offloads", property(lambda info: True)),
        mock.patch.object(ReduceBucket, "_at_home", at_home),
    ):
        yield
        _checked.clear()


_checked: list[testing.Checked] = []


def shards_on_host(model: Any, checked: testing.Checked) -> None:
    _checked.append(checked)
    checked.on_host(*[local_tensor(parameter) for parameter in model.parameters()])


def note(model: Any, checked: testing.Checked) -> None:
    _checked.append(checked)


def stepped_on_host(params: Any) -> torch.optim.Optimizer:
    """An optimizer whose state and steps are on the host."""
    return take_over(torch.optim.SGD(params, lr=0.1, momentum=0.9), StateOnHost(pins=False, fused=False), True)


@contextlib.contextmanager
def copying_to_host() -> Iterator[None]:
    """Copy a few parameters at a time to the host. The CPU is both the simulated accelerator and the host."""
    real = StateOnHost._copy

    def copy(keeper: StateOnHost, tensor: Tensor) -> Tensor:
        made = real(keeper, tensor)
        _checked[-1].on_host(local_tensor(made))
        return made

    with (
        mock.patch.object(StateOnHost, "_copy", copy),
        mock.patch("composable_shard._memory.state_on_host._PART", 1000),
    ):
        yield
        _checked.clear()


@contextlib.contextmanager
def sums_of_ranks() -> Iterator[None]:
    """Use the transport of gloo, which needs scratch memory."""

    def transports_of(group: Any, device: Any, given: Any = None) -> dict[str, Any]:
        return {"direct": RankOrdered(group)}

    with mock.patch("composable_shard._comm.transports.transports_of", transports_of):
        yield


def on_the_network() -> contextlib.AbstractContextManager[object]:
    """Run collectives on a separate stream, like backends other than NCCL."""
    return mock.patch("composable_shard._comm.collectives._ON_LANE", ())


class Deaf:
    """A memory tracker. While one is active, a slot has memory only while it is leased."""

    heard = None


@contextlib.contextmanager
def counting() -> Iterator[None]:
    tool = Deaf()
    listening.add(tool)
    try:
        yield
    finally:
        listening.discard(tool)


@contextlib.contextmanager
def debugging() -> Iterator[None]:
    with mock.patch("composable_shard._torch.debug.debugging", True):
        yield


def setting(method: str, *arguments: Any) -> Callable[..., object]:
    return lambda model, checked: getattr(model, method)(*arguments)
