"""User actions between two backwards of a step: no gradient is lost, and no discarded gradient is counted.

First elements of gradients are 0 here, because the mark for gradients accumulated elsewhere is stored in them.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import composable_shard as cs
from _stepping import engine_of
from composable_shard import testing
from composable_shard._comm.lanes import Job
from composable_shard._group.reduction import ReduceBucket, Reduced

REPLICAS = {"replicate": 2, "shard": 2}


def inputs(rank, at):
    """Three rows for which the first element of each gradient is 0."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * at + rank))
    x[:, 0] = 0
    return x


class Chain(nn.Sequential):
    """Projections, each a group, all used in the same way."""

    def __init__(self, layers):
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(4, 4, bias=False) for _ in range(layers)))
        for layer in self:
            nn.init.eye_(layer.weight)


def sharded(world, layers=1):
    model = Chain(layers)
    for layer in model:
        cs.fully_shard(layer, mesh=world.mesh)
    return cs.fully_shard(model, mesh=world.mesh)


def backward(model, rank, at):
    model(inputs(rank, at)).sum().backward()


def means(world, layers, batches):
    """Gradients of the unsharded model for the mean over ranks of the sum over these batches."""
    model = Chain(layers)
    for rank in range(world.size):
        for at in batches:
            (model(inputs(rank, at)).sum() / world.size).backward()
    return [param.grad for param in model.parameters()]


def check(model, expected):
    for param, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), want)


def on_ranks(run, mesh=None, size=2):
    testing.spmd(4 if mesh else size, **({"mesh": mesh} if mesh else {}))(run)


@pytest.mark.parametrize("layers", [1, 4])
def test_pieces_of_a_backward_without_all_reduce_are_part_of_the_next_all_reduce(layers):
    def run(world):
        model = sharded(world, layers)
        model.set_reduce_scatter_max_input_buffers(8)
        model.set_requires_all_reduce(False)
        model.set_is_last_backward(False)
        backward(model, world.rank, 0)
        model.set_requires_all_reduce(True)
        model.set_is_last_backward(True)
        backward(model, world.rank, 1)
        check(model, means(world, layers, [0, 1]))

    on_ranks(run, REPLICAS)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("layers", [1, 4])
def test_an_added_gradient_does_not_erase_the_mark_of_another(layers, last):
    def run(world):
        model = sharded(world, layers)
        model.set_is_last_backward(last)
        backward(model, world.rank, 0)
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(True)
        backward(model, world.rank, 1)
        model.set_requires_gradient_sync(True)
        backward(model, world.rank, 2)
        check(model, means(world, layers, [0, 1, 2]))

    on_ranks(run)


def test_autograd_grad_returns_only_its_own_gradients_and_keeps_accumulated_ones():
    def run(world):
        model = sharded(world)
        params = list(model.parameters())
        model.set_requires_all_reduce(False)
        backward(model, world.rank, 0)
        (gradient,) = torch.autograd.grad(model(inputs(world.rank, 1)).sum(), params)
        torch.testing.assert_close(gradient.full_tensor(), means(world, 1, [1])[0])
        model.set_requires_all_reduce(True)
        (gradient,) = torch.autograd.grad(model(inputs(world.rank, 2)).sum(), params)
        torch.testing.assert_close(gradient.full_tensor(), means(world, 1, [2])[0])
        backward(model, world.rank, 3)
        check(model, means(world, 1, [0, 3]))

    on_ranks(run, REPLICAS)


def test_a_parameter_frozen_after_autograd_grad_keeps_its_accumulated_gradient():
    def run(world):
        model = sharded(world, 2)
        params = list(model.parameters())
        model.set_requires_gradient_sync(False)
        backward(model, world.rank, 0)
        model.set_requires_gradient_sync(True)
        torch.autograd.grad(model(inputs(world.rank, 1)).sum(), params)
        params[0].requires_grad_(False)
        backward(model, world.rank, 2)
        (first, _), (_, second) = means(world, 2, [0]), means(world, 2, [0, 2])
        check(model, [first, second])

    on_ranks(run)


def test_an_unused_parameter_has_no_gradient_while_pieces_wait_for_their_all_reduce():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.used(x)

    def run(world):
        model = cs.fully_shard(Partly(), mesh=world.mesh)
        for at, whole in enumerate((False, False, True)):
            model.set_requires_all_reduce(whole)
            backward(model, world.rank, at)
        assert model.used.weight.grad is not None
        assert model.idle.weight.grad is None

    on_ranks(run, REPLICAS)


@pytest.mark.parametrize("mesh", [None, REPLICAS])
def test_zero_grad_after_a_backward_that_is_not_the_last_clears_all_gradients(mesh):
    def run(world):
        model = sharded(world, 4)
        model.set_is_last_backward(False)
        backward(model, world.rank, 0)
        model.zero_grad()
        model.set_is_last_backward(True)
        backward(model, world.rank, 1)
        check(model, means(world, 4, [1]))

    on_ranks(run, mesh)


def test_the_norm_after_a_backward_that_is_not_the_last_covers_all_gradients():
    def run(world):
        model = sharded(world, 4)
        model.set_is_last_backward(False)
        backward(model, world.rank, 0)
        norm = cs.clip_grad_norm_(model.parameters(), 1e9)
        expected = torch.nn.utils.get_total_norm(means(world, 4, [0]))
        torch.testing.assert_close(getattr(norm, "full_tensor", lambda: norm)(), expected)

    on_ranks(run)


def test_a_failed_backward_keeps_the_gradients_of_the_previous_one():
    def run(world):
        model = sharded(world, 4)
        model.set_is_last_backward(False)
        backward(model, world.rank, 0)

        def fail(*_):
            raise RuntimeError("planned")

        handle = model[3].register_full_backward_hook(fail)
        with pytest.raises(RuntimeError, match="planned"):
            backward(model, world.rank, 1)
        handle.remove()
        model.set_is_last_backward(True)
        backward(model, world.rank, 2)
        for param, want in list(zip(model.parameters(), means(world, 4, [0, 2]), strict=True))[:3]:
            torch.testing.assert_close(param.grad.full_tensor(), want)

    on_ranks(run)


def replaced(param):
    param.grad = param.grad.clone()


def scaled(param):
    param.grad = param.grad * 0.5


def decayed(param):
    param.grad.add_(param.detach(), alpha=0.5)


@pytest.mark.parametrize(("change", "adds"), [(replaced, 0), (scaled, 0), (decayed, 0.5)])
def test_a_users_change_of_a_gradient_is_not_taken_for_zero_grad(change, adds):
    def run(world):
        model = sharded(world)
        model.set_requires_gradient_sync(False)
        backward(model, world.rank, 0)
        change(model[0].weight)
        model.set_requires_gradient_sync(True)
        backward(model, world.rank, 1)
        check(model, [means(world, 1, [0, 1])[0] + adds * torch.eye(4)])

    on_ranks(run)


@pytest.mark.parametrize("size", [2, 3])
def test_zero_grad_of_one_parameter_that_is_empty_on_some_ranks_clears_only_that_one(size):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole, self.short = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(1, 4))

        def forward(self, x):
            return x @ self.whole.T + x * self.short

    def run(world):
        model = cs.fully_shard(Two(), mesh=world.mesh)
        x = torch.ones(1, 4)
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()
        torch.optim.SGD([model.short]).zero_grad(set_to_none=False)
        model.set_requires_gradient_sync(True)
        model(x).sum().backward()
        torch.testing.assert_close(model.short.grad.full_tensor(), torch.ones(1, 4))
        torch.testing.assert_close(model.whole.grad.full_tensor(), torch.full((4, 4), 2.0))

    on_ranks(run, size=size)


class TwoDtypes(nn.Module):
    """A module whose gradients are reduced in two buckets."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(64))
        self.wide = nn.Parameter(torch.ones(64, dtype=torch.float64))

    def forward(self, x):
        return (self.narrow * x).sum() + (self.wide * x).sum()


@pytest.mark.parametrize("where", ["start", "finish"])
def test_an_error_in_one_bucket_leaves_no_memory_of_another_bucket_leased(where, monkeypatch):
    """The error is the one raised for the bucket, and the next backward is exact."""
    real, failing = getattr({"start": ReduceBucket, "finish": Job}[where], where), []

    def start(bucket, *args):
        if failing and bucket.dtype is torch.float64:
            raise RuntimeError("planned")
        return real(bucket, *args)

    def finish(job):
        result = real(job)
        if failing and isinstance(result, Reduced):
            failing.clear()
            raise RuntimeError("planned")
        return result

    def run(world):
        model = cs.fully_shard(TwoDtypes(), mesh=world.mesh)
        x = torch.ones(64)
        for _ in range(2):
            model(x).backward()
            model.zero_grad()
        pool = engine_of(model).pool
        before = pool.live_bytes
        for _ in range(3):
            failing.append(True)
            with pytest.raises(RuntimeError, match="planned"):
                model(x).backward()
            failing.clear()
            model.zero_grad()
        model(x).backward()
        assert pool.live_bytes == before
        for param in model.parameters():
            torch.testing.assert_close(param.grad.full_tensor(), torch.ones(64, dtype=param.dtype))

    monkeypatch.setattr(*((ReduceBucket, "start", start) if where == "start" else (Job, "finish", finish)))
    on_ranks(run, size=1)


def test_hooks_that_communicate_run_in_the_same_order_on_ranks_with_different_arenas():
    """One rank keeps outputs, and with them weights, so its arena differs."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(4000, 16)
            self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
            self.head = nn.Linear(16, 4000, bias=False)

        def forward(self, ids):
            return self.head(self.layers(self.embed(ids)))

    def run(world):
        torch.manual_seed(0)
        model = Tied()
        for module in (model.embed, *model.layers, model.head, model):
            cs.fully_shard(module, mesh=world.mesh)
        model.set_pool_policy(cs.PoolPolicy(keep_idle=False))
        total = torch.zeros(())
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: dist.all_reduce(total, group=world.mesh.get_group()))
        kept = []
        for _ in range(4):
            out, other = model(torch.arange(8)), model(torch.arange(8))
            if world.rank == 0:
                kept.append(other)
            del other
            out.sum().backward()
            model.zero_grad()

    on_ranks(run)


@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_a_deep_copy_between_microbatches_is_an_error_because_it_would_lack_gradients(setting):
    def run(world):
        model = sharded(world)
        backward(model, world.rank, 0)
        copy.deepcopy(model)  # reduced gradients are copied
        getattr(model, setting)(False)
        backward(model, world.rank, 1)
        with pytest.raises(
            cs.errors.ShardConfigStateError, match=rf"a deep copy is made of 0\.weight.*{setting}\(True\)"
        ):
            copy.deepcopy(model)
        model.zero_grad()
        getattr(model, setting)(True)
        twin = copy.deepcopy(model)
        for each in (model, twin):
            backward(each, world.rank, 2)
        check(twin, means(world, 1, [2]))
        check(model, means(world, 1, [2]))

    on_ranks(run, REPLICAS)
