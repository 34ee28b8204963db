"""A sharded model is freed with its last reference, without the cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

import composable_shard
from _engines import fully_shard
from _models import Block, Stack, shard_blocks, shard_lists, shard_nested, vectors
from _pool import distributed
from composable_shard._torch.core import active_saved_tensors_hooks


@contextlib.contextmanager
def without_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def watch(model):
    """Weak references to the modules and to the parameters."""
    found = {name or "root": weakref.ref(module) for name, module in model.named_modules()}
    return found | {f"parameter {name}": weakref.ref(p) for name, p in model.named_parameters()}


def alive(refs):
    return sorted(name for name, ref in refs.items() if ref() is not None)


def use_not_at_all(model, rank):
    pass


def use_in_training(model, rank):
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        model(*vectors(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def use_forward_only(model, rank):
    model(*vectors(rank, 0))


def use_without_grad(model, rank):
    with torch.no_grad():
        model(*vectors(rank, 0))


def use_unshard(model, rank):
    model.unshard()


class Fails(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("planted")


def use_failed_penalty(model, rank):
    (x,) = vectors(rank, 0)
    x.requires_grad_()
    output = model(Fails.apply(x)).square().mean()
    with pytest.raises(ArithmeticError, match="planted"):
        torch.autograd.grad(output, x, create_graph=True)


USES = [use_not_at_all, use_in_training, use_forward_only, use_without_grad, use_unshard, use_failed_penalty]


@pytest.mark.parametrize("use", USES)
@distributed(world=(1, 2))
def test_a_deleted_model_is_freed_without_the_garbage_collector(rank, world, use):
    with without_collector():
        model = Stack()
        shard_blocks(model, fully_shard)
        use(model, rank)
        refs = watch(model)
        assert alive(refs)
        del model
        assert alive(refs) == []


@pytest.mark.parametrize("shard", [shard_nested, shard_lists], ids=["nested", "lists"])
@distributed(world=2)
def test_a_deleted_model_is_freed_with_any_grouping(rank, world, shard):
    with without_collector():
        model = Stack()
        shard(model, fully_shard)
        use_in_training(model, rank)
        refs = watch(model)
        del model
        assert alive(refs) == []


def shard_by_class(model, engine):
    composable_shard.shard_by_class(model, {Block})


def shard_by_size(model, engine):
    composable_shard.shard_by_size(model, min_bytes=200)


def shard_auto(model, engine):
    composable_shard.shard_auto(model)


@pytest.mark.parametrize("shard", [shard_by_class, shard_by_size, shard_auto])
@distributed(world=2)
def test_wrap_helpers_do_not_keep_the_model_alive(rank, world, shard):
    with without_collector():
        model = Stack()
        shard(model, fully_shard)
        refs = watch(model)
        del model
        assert alive(refs) == []


@distributed(world=(1, 2))
def test_backward_works_after_the_model_is_deleted(rank, world):
    torch.manual_seed(3)
    model, twin = Stack(), Stack()
    twin.load_state_dict(model.state_dict())
    shard_blocks(model, fully_shard)
    params = dict(model.named_parameters())
    modules = {name: weakref.ref(module) for name, module in model.named_modules()}
    x = vectors(0, 0)  # the same on all ranks, so that the mean gradient is the gradient of one rank
    with without_collector():
        loss = model(*x).square().mean()
        del model
        assert alive(modules) == []
        loss.backward()
    twin(*x).square().mean().backward()
    for name, param in params.items():
        assert torch.equal(param.grad.full_tensor(), twin.get_parameter(name).grad), name


@distributed(world=2)
def test_an_autograd_graph_keeps_no_module_alive(rank, world):
    with without_collector():
        model = Stack()
        shard_blocks(model, fully_shard)
        out = model(*vectors(rank, 0))
        refs = {name: weakref.ref(module) for name, module in model.named_modules()}
        del model
        assert alive(refs) == []
        del out


@distributed(world=2)
def test_a_copy_of_the_saved_tensor_hooks_keeps_nothing_alive(rank, world):
    """gloo's threads copy the thread-local state of the thread that issues a collective, and drop it at any time."""
    with without_collector():
        model = Stack()
        shard_blocks(model, fully_shard)
        hooks = []
        model.inp.register_forward_hook(lambda *_: hooks.append(active_saved_tensors_hooks()))
        use_forward_only(model, rank)
        refs = watch(model)
        del model
        assert hooks[0] is not None
        assert alive(refs) == []


@distributed(world=2)
def test_creating_and_deleting_models_does_not_leak(rank, world):
    def cycle():
        model = Stack(blocks=2)
        shard_blocks(model, fully_shard)
        use_in_training(model, rank)

    for _ in range(3):
        cycle()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(10):
        cycle()
    gc.collect()
    assert len(gc.get_objects()) - before < 50
