"""Tensor subclasses that define their own all-gather: memory that must not be freed, and failures."""

from __future__ import annotations

import copy
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.nn as nn
from test_extensions import batch, make, shard, step, train
from torch.utils import _pytree as pytree

from _engines import ENGINES, fully_shard
from _extended import Halved, InTwo, Wrapping, aten
from _pool import distributed
from _stepping import assert_at_rest, engine_of
from composable_shard._group.extension_bucket import ExtensionBucket
from composable_shard._group.phases import GATHERING
from composable_shard.errors import StaleStateError


class Coded(Wrapping):
    """Gathered as multiples of a unit. The unit belongs to the shard and outlives the unsharded parameter."""

    class Whole(torch.Tensor):
        @staticmethod
        def __new__(cls, codes, unit):
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=unit.dtype, device=unit.device)

        def __init__(self, codes, unit):
            self.codes, self.unit = codes, unit

        def __tensor_flatten__(self):
            return ["codes", "unit"], None

        @classmethod
        def __tensor_unflatten__(cls, tensors, context, shape, stride):
            return cls(tensors["codes"], tensors["unit"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is aten.detach.default:
                return cls(args[0].codes, args[0].unit)
            if func is aten.as_strided.default:
                return cls(args[0].codes[: args[1][0]], args[0].unit)
            args, kwargs = pytree.tree_map_only(cls, lambda t: t.codes * t.unit, (args, kwargs or {}))
            return func(*args, **kwargs)

    UNIT = torch.tensor(2.0**-10)

    def fsdp_pre_all_gather(self, mesh):
        return ((self.inner / self.UNIT).round().to(torch.int16),), self.UNIT

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (Coded.Whole(outputs[0], metadata), ())


@distributed(world=2)
def test_tensors_that_the_unsharded_parameter_shares_with_the_shard_are_not_freed(rank, world):
    models = {side: shard(make(Coded), engine) for side, engine in ENGINES.items()}
    train(models, rank)
    assert torch.equal(Coded.UNIT, torch.tensor(2.0**-10))
    assert_at_rest(models["ours"])


@distributed(world=2)
def test_a_returned_parameter_keeps_its_value(rank, world):
    model = shard(make(Halved), fully_shard, reshard_after_forward=True)
    want = make(Halved).blocks[0].weight.inner.to(torch.bfloat16).float()
    model.blocks[0].forward = lambda x: (x, model.blocks[0].weight)
    with torch.no_grad():
        step_in = torch.zeros(2, 8)
        _, weight = model.blocks[0](step_in)
    assert torch.equal(weight, want)


@distributed(world=2)
def test_a_direct_read_of_a_parameter_that_has_changed_is_an_error(rank, world):
    model = shard(make(Halved), fully_shard)
    first = model.blocks[0]
    first.unshard()
    out = (first.weight * torch.ones(8, 8, requires_grad=True)).sum()
    first.reshard()
    with torch.no_grad():
        first.weight.to_local().inner.mul_(2)
    first.unshard()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


class Changing(Halved):
    """Sends another dtype in each gather."""

    number = 0

    def fsdp_pre_all_gather(self, mesh):
        Changing.number += 1
        return (self.inner.to((torch.bfloat16, torch.float16)[Changing.number % 2]),), None


@distributed(world=2)
def test_a_parameter_that_was_made_again_between_forward_and_backward_is_an_error(rank, world):
    model = fully_shard(nn.Linear(8, 8))
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(Changing(model.weight.detach()))
    fully_shard(model, reshard_after_forward=True)
    x = torch.ones(2, 8, requires_grad=True)
    loss = model(x).square().mean()
    with pytest.raises(StaleStateError, match="weights of the group with weight"):
        loss.backward()


class Failing(Halved):
    where = ""

    def fsdp_pre_all_gather(self, mesh):
        if Failing.where == "before":
            raise ZeroDivisionError
        return super().fsdp_pre_all_gather(mesh)

    def fsdp_post_all_gather(self, *args, **kwargs):
        if Failing.where == "after":
            raise ZeroDivisionError
        return super().fsdp_post_all_gather(*args, **kwargs)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("keeps", [True, False])
@distributed(world=2)
def test_a_failure_in_an_all_gather_extension_leaves_no_memory_and_no_state(rank, world, where, keeps):
    model, twin = (shard(make(Failing), fully_shard) for _ in range(2))
    model.set_reshard_after_backward(not keeps)
    step(model, rank)
    model.zero_grad()
    model.reshard()
    for block in model.blocks:
        block.reshard()
    for _ in range(3):
        Failing.where = where
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 8))
        Failing.where = ""
        assert engine_of(model).pool.live_bytes == 0
    for each in (model, twin):
        step(each, rank)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())


class Uncut(Wrapping):
    """Cannot be sharded."""

    fsdp_pre_all_gather, fsdp_post_all_gather = Halved.fsdp_pre_all_gather, Halved.fsdp_post_all_gather

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.new_zeros.default:
            raise NotImplementedError
        return super().__torch_dispatch__(func, types, args, kwargs)


@distributed(world=2)
def test_a_tensor_that_cannot_be_sharded_leaves_the_module_unchanged(rank, world):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = list(model.parameters())
    model[1].weight = nn.Parameter(Uncut(model[1].weight.detach()))
    with pytest.raises(NotImplementedError):
        fully_shard(model)
    model[1].weight = before[2]
    assert [*map(id, before)] == [*map(id, model.parameters())]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    fully_shard(model)


@distributed(world=2)
def test_copying_a_shard_with_its_own_methods_is_an_error(rank, world):
    model = shard(make(lambda weight: weight), fully_shard)
    local = model.blocks[0].weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
    local.fsdp_post_all_gather = lambda outputs, metadata, dtype, *, out=None: (outputs[0], ())
    with pytest.raises(RuntimeError, match="weight: fsdp_pre_all_gather is an attribute of its local tensor"):
        copy.deepcopy(model)


@distributed(world=4)
def test_extended_parameters_are_gathered_among_all_ranks_instead_of_a_few(rank, world):
    models = [shard(make(InTwo), fully_shard, reshard_after_forward=reshard) for reshard in (2, True)]
    for model in models:
        step(model, rank)
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())


@pytest.mark.parametrize("kind", [Halved, InTwo])
@distributed(world=2)
def test_a_model_is_freed_with_its_last_reference(rank, world, kind):
    model = shard(make(kind), fully_shard)
    model(batch(rank, 0)).square().mean().backward()
    modules = {name: weakref.ref(module) for name, module in model.named_modules()}
    gc.collect()
    gc.disable()
    try:
        del model
        assert [name for name, module in modules.items() if module() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [Halved, InTwo])
@distributed(world=2)
def test_memory_that_an_interrupted_gather_may_still_write_is_not_freed(rank, world, kind):
    models = {side: shard(make(kind), engine) for side, engine in ENGINES.items()}
    train(models, rank, steps=1)
    models["ours"].blocks[0].unshard(async_op=True)
    (group,) = [group for group in engine_of(models["ours"]).groups if group.phase is GATHERING]
    jobs = [job for _, job in group._gathers]
    (extension,) = [bucket for bucket in group.buckets if isinstance(bucket, ExtensionBucket)]
    arriving = [storage for member in extension._members for storage in member._arriving.storages.values()]
    sizes = [storage.nbytes() for storage in arriving]
    interrupted = mock.Mock(finish=mock.Mock(side_effect=KeyboardInterrupt))
    group._gathers = [(bucket, interrupted) for bucket, _ in group._gathers]
    with pytest.raises(KeyboardInterrupt):
        group.finish_gather()
    assert [storage.nbytes() for storage in arriving] == sizes
    for job in jobs:
        job.finish()  # so that both ranks finish the same collectives
    train(models, rank)
