"""Tensor subclasses that define their own all-gather, under this library and under torch's FSDP2."""

from __future__ import annotations

import copy
import functools
import gc
import time
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, fsdp2, fully_shard, mesh_of
from _extended import Halved, InTwo, Scaled, Ternary, Wrapping, precompute_scales
from _pool import distributed, more
from _stepping import assert_at_rest, engine_of
from composable_shard._faults.watch import WATCHER
from composable_shard.errors import StaleStateError


class Net(nn.Module):
    def __init__(self, kind, sizes=(8, 8), frozen=False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in zip((8, *sizes), (*sizes, 8), strict=True))
        for block in self.blocks:
            block.weight = nn.Parameter(kind(block.weight.detach()), requires_grad=not frozen)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def make(kind, **options):
    torch.manual_seed(3)
    return Net(kind, **options)


def shard(model, engine, **options):
    for block in model.blocks:
        engine(block, **options)
    engine(model, **options)
    return model


def batch(rank, step):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def value(tensor):
    return tensor.inner if isinstance(tensor, Wrapping) else tensor


def train(models, rank, steps=3, compare=True):
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.5) for name, m in models.items()}
    for step in range(steps):
        losses = {}
        for name, model in models.items():
            optimizers[name].zero_grad()
            losses[name] = model(batch(rank, step)).square().mean()
            losses[name].backward()
        assert compare is False or torch.equal(losses["ours"], losses["fsdp2"])
        for (name, mine), (_, theirs) in zip(*(m.named_parameters() for m in models.values()), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                assert torch.equal(mine.grad.to_local(), theirs.grad.to_local()), name
        for optimizer in optimizers.values():
            optimizer.step()
    for (name, mine), (_, theirs) in zip(*(m.named_parameters() for m in models.values()), strict=True):
        assert torch.equal(value(mine.to_local()), value(theirs.to_local())), name


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", [Halved, InTwo])
@distributed(world=2)
def test_training_is_bitwise_identical_to_fsdp2(rank, world, kind, reshard):
    models = {side: shard(make(kind), engine, reshard_after_forward=reshard) for side, engine in ENGINES.items()}
    assert isinstance(models["ours"].blocks[0].weight.to_local(), kind)
    train(models, rank)
    assert_at_rest(models["ours"])


def unflatten_keywords(cls, tensors, context, *, outer_size, outer_stride):
    assert len(outer_size) == len(outer_stride)
    return cls(*tensors.values(), *([outer_size] if cls.__name__ == "Whole" else []))


def unflatten_size(cls, tensors, context, size):
    return unflatten_keywords(cls, tensors, context, outer_size=size, outer_stride=size)


def unflatten_two(cls, tensors, context):
    shape = next(iter(tensors.values())).shape
    return unflatten_keywords(cls, tensors, context, outer_size=shape, outer_stride=shape)


@pytest.mark.parametrize("kind", [Halved, InTwo])
@pytest.mark.parametrize("unflatten", [unflatten_keywords, unflatten_size, unflatten_two])
@distributed(world=2)
def test_a_subclass_may_define_unflatten_with_other_arguments(rank, world, unflatten, kind):
    with (
        mock.patch.object(Wrapping, "__tensor_unflatten__", classmethod(unflatten)),
        mock.patch.object(InTwo.Whole, "__tensor_unflatten__", classmethod(unflatten)),
    ):
        models = {side: shard(make(kind), engine) for side, engine in ENGINES.items()}
        train(models, rank)
        assert_at_rest(models["ours"])


@distributed(world=2)
def test_a_subclass_whose_unflatten_fails_is_sharded_as_with_fsdp2(rank, world):
    with mock.patch.object(Wrapping, "__tensor_unflatten__", None):
        models = {side: shard(make(Halved), engine) for side, engine in ENGINES.items()}
        train(models, rank)


@distributed(world=2)
def test_uneven_shards_are_sent_padded(rank, world):
    models = {side: shard(make(InTwo, sizes=(7, 5)), engine) for side, engine in ENGINES.items()}
    train(models, rank)
    assert_at_rest(models["ours"])


@distributed(world=2)
def test_landing_memory_from_before_the_arena_is_freed(rank, world):
    model = shard(make(InTwo, sizes=(7, 5)), fully_shard)
    step(model, rank)
    pool = engine_of(model).pool
    before = [weakref.ref(slot) for slot in pool.addresses]
    assert before
    assert not pool.arena.is_planned
    step(model, rank, 1)
    assert pool.arena.is_planned
    gc.collect()
    assert not [slot for ref in before if (slot := ref()) is not None]


@distributed(world=2)
def test_frozen_parameters_are_resharded_in_backward_right_after_their_use(rank, world):
    models = {side: shard(make(InTwo, frozen=True), engine) for side, engine in ENGINES.items()}
    train(models, rank)
    assert_at_rest(models["ours"])
    names = [group.name for group in engine_of(models["ours"]).groups]
    models["ours"](batch(rank, 9)).square().mean().backward()
    resident = 0
    for action in cs.last_record(models["ours"]).actions:
        resident += (action.kind == "UNSHARD") - (action.kind == "RESHARD")
        assert resident <= 3, names


def members_of(model):
    return [m for group in engine_of(model).groups for b in group.buckets for m in getattr(b, "_members", ())]


def step(model, rank, number=0):
    loss = model(batch(rank, number)).square().mean()
    loss.backward()
    return loss.detach()


@distributed(world=2)
def test_memory_is_freed_and_allocated_again_while_the_unsharded_tensor_stays(rank, world):
    model = shard(make(Halved), fully_shard, reshard_after_forward=True)
    step(model, rank)
    member = members_of(model)[0]
    whole = member.tensor
    assert whole.untyped_storage().nbytes() == 0
    step(model, rank, 1)
    assert member.tensor is whole
    first = model.blocks[0]
    first.unshard()
    assert whole.untyped_storage().nbytes() == 8 * 8 * 4
    assert [t.untyped_storage().nbytes() for t in member.outputs] == [0], "the outputs are freed after the copy"
    assert engine_of(model).pool.live_bytes >= 8 * 8 * 4
    assert torch.equal(first.weight, make(Halved).blocks[0].weight.inner.to(torch.bfloat16).float())
    first.reshard()
    assert whole.untyped_storage().nbytes() == 0
    assert_at_rest(model)
    model.set_keep_unsharded_storage(True)
    step(model, rank, 2)
    assert whole.untyped_storage().nbytes() == 8 * 8 * 4


@distributed(world=2)
def test_all_gather_methods_may_be_set_on_the_shards(rank, world):
    """Users without a subclass do so."""
    models = {side: shard(make(lambda weight: weight), engine) for side, engine in ENGINES.items()}
    calls = []
    for side, model in models.items():
        for block in model.blocks:
            local = block.weight._local_tensor

            def before(local, mesh):
                return (local,), 7

            def after(outputs, metadata, param_dtype, *, out=None, side=side):
                calls.append((side, metadata, out is None))
                return (outputs[0], ()) if out is None else None

            local.fsdp_pre_all_gather = functools.partial(before, local.detach())
            local.fsdp_post_all_gather = after
    train(models, rank)
    found = [[(metadata, first) for name, metadata, first in calls if name == side] for side in ENGINES]
    assert found[0] == found[1]
    assert {metadata for metadata, _ in found[0]} == {7}


@distributed(world=4)
def test_an_extension_gets_the_shard_mesh_on_a_mesh_with_replicas(rank, world):
    models = {side: shard(make(Halved), engine, mesh=mesh_of(2, 2)) for side, engine in ENGINES.items()}
    train(models, rank)
    assert models["ours"].blocks[0].weight.placements == (Replicate(), Shard(0))


@distributed(world=1)
def test_a_single_rank_is_exact_where_fsdp2_fails(rank, world):
    plain, model, theirs = make(lambda weight: weight), shard(make(InTwo), fully_shard), shard(make(InTwo), fsdp2)
    for number in range(2):
        step(plain, rank, number)
        step(model, rank, number)
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad.to_local(), want.grad)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        step(theirs, rank)


@distributed(world=2)
def test_the_compute_dtype_is_passed_on(rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = {side: shard(make(Halved), engine, mp_policy=policy) for side, engine in ENGINES.items()}
    train(models, rank)
    models["ours"].blocks[0].unshard()
    assert models["ours"].blocks[0].weight.dtype == torch.bfloat16


@distributed(world=2)
def test_a_group_shared_with_plain_parameters_supports_accumulation_and_checkpoints(rank, world):
    models = {side: make(InTwo) for side in ENGINES}
    for side, engine in ENGINES.items():
        engine(models[side])
    for sync in (False, True):
        for model in models.values():
            model.set_requires_gradient_sync(sync)
            torch.utils.checkpoint.checkpoint(model, batch(rank, 0), use_reentrant=False).square().mean().backward()
    for mine, theirs in zip(*(m.parameters() for m in models.values()), strict=True):
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())
    models["ours"].zero_grad()
    models["fsdp2"].zero_grad()
    train(models, rank)


class Unchanged(Halved):
    """A weight that is gathered as it is, and used in the memory of the gather's output."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (outputs[0], outputs)


@distributed(world=2)
def test_a_checkpoint_of_unsharded_layers_around_sharded_ones_recomputes_them(rank, world):
    models = {side: make(Unchanged) for side in ENGINES}
    for side, engine in ENGINES.items():
        layers = [nn.Sequential(nn.LayerNorm(8), block) for block in models[side].blocks]
        for layer in layers:
            engine(layer[1])
            layer.requires_grad_()
            layer[0].requires_grad_(False)
        run = nn.ModuleList(layers)
        for _ in range(2):
            x = batch(rank, 0)
            for layer in run:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            x.square().mean().backward()
    for mine, theirs in zip(*(m.parameters() for m in models.values()), strict=True):
        assert torch.equal(value(mine.grad.to_local()), value(theirs.grad.to_local()))


@distributed(world=2)
def test_state_dicts_copies_and_no_grad_forwards_are_exact(rank, world):
    model, other = (shard(make(Halved), fully_shard) for _ in range(2))
    step(model, rank)
    with torch.no_grad():
        want = model(batch(rank, 1))
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(batch(rank, 1)), want)
    made = copy.deepcopy(model)
    for each in (model, other, made):
        each.zero_grad()
        step(each, rank, 2)
    for a, b, c in zip(model.parameters(), other.parameters(), made.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())
        assert torch.equal(a.grad.to_local(), c.grad.to_local())
    assert isinstance(made.blocks[1].weight.to_local(), Halved)


@distributed(world=2)
def test_a_step_between_forward_and_backward_is_an_error(rank, world):
    model = shard(make(Halved), fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, rank)
    loss = model(batch(rank, 1)).square().mean()
    optimizer.step()
    with pytest.raises(StaleStateError, match=r"an optimizer, a load or a write"):
        loss.backward()


@distributed(world=2)
def test_an_exception_leaves_no_parameter_unsharded(rank, world):
    model = shard(make(InTwo), fully_shard)
    step(model, rank)

    def fail(*args):
        raise ZeroDivisionError

    hook = model.blocks[1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(batch(rank, 0))
    hook.remove()
    model.zero_grad()
    twin = shard(make(InTwo), fully_shard)
    for each in (model, twin):
        step(each, rank)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())
    assert_at_rest(model)


class OnlyBefore(Wrapping):
    fsdp_pre_all_gather = Halved.fsdp_pre_all_gather


class OfThree(Halved):
    def fsdp_pre_all_gather(self, mesh, size, stride):
        raise AssertionError


class Unpadded(Halved):
    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None


@distributed(world=2)
def test_mistakes_are_errors(rank, world):
    for kind, words in ((OnlyBefore, "has fsdp_pre_all_gather but not fsdp_post"), (OfThree, "must take .mesh. or")):
        model = make(kind)
        with pytest.raises(TypeError, match=f"parameter weight: .*{words}"):
            shard(model, fully_shard)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    model = shard(make(Unpadded, sizes=(7, 5)), fully_shard)
    if rank == 1:  # the rank with the smaller shard
        with pytest.raises(ValueError, match=r"parameter weight: .*padded sharded size, of 4 rows"):
            model.blocks[0].unshard()
        end = time.monotonic() + 30
        while not any(ledger.fault for ledger in WATCHER.ledgers()) and time.monotonic() < end:
            time.sleep(0.05)  # until this rank learns that the other one has stopped
    else:
        with pytest.raises(cs.errors.PeerLostError, match=r"rank 1 failed .*parameter weight: .*padded"):
            model.blocks[0].unshard()


def quiet_dynamo():
    """Ignore what Dynamo does to unsharded weights that consist of other tensors."""
    warnings.filterwarnings("ignore", message=".*autograd.function.Function'> should not be instantiated")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


@distributed(world=2)
@pytest.mark.parametrize("kind", [Halved, Ternary, more(Scaled), more(InTwo)])
def test_compiled_blocks_are_exact(rank, world, kind):
    """Graphs save inner tensors of unsharded weights: some that the next gather overwrites, and scales that stay."""
    quiet_dynamo()
    theirs, eager, model = (shard(make(kind), engine) for engine in (fsdp2, fully_shard, fully_shard))
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for number in range(3):
        for each in (theirs, eager, model):
            each.zero_grad()
            step(each, rank, number)
        for wanted, *found in zip(theirs.parameters(), eager.parameters(), model.parameters(), strict=True):
            for each in found:
                assert torch.equal(each.grad.to_local(), wanted.grad.to_local())


def decoder(kind, engine):
    torch.manual_seed(3)
    model = Transformer()
    for block in model.blocks:
        for linear in (each for each in block.modules() if isinstance(each, nn.Linear)):
            linear.weight = nn.Parameter(kind(linear.weight.detach()))
    return shard(model, engine)


@distributed(world=2)
@pytest.mark.parametrize(("kind", "ahead"), [(Ternary, False), (Scaled, False), (Scaled, True)])
def test_compiled_decoder_blocks_with_scales_are_exact(rank, world, kind, ahead):
    quiet_dynamo()
    theirs, model = (decoder(kind, engine) for engine in (fsdp2, fully_shard))
    torch._dynamo.reset()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (theirs, model)]
    for each in (theirs, model):
        for block in each.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    for number in range(3):
        losses = []
        for each, optimizer in zip((theirs, model), optimizers, strict=True):
            if ahead:
                precompute_scales(each)
            losses.append(next_token_loss(each, *token_batch(rank, number)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)
        for wanted, found in zip(theirs.parameters(), model.parameters(), strict=True):
            assert torch.equal(value(found.to_local()), value(wanted.to_local()))
        with torch.no_grad():
            assert torch.equal(*(next_token_loss(each, *token_batch(rank, 9)) for each in (theirs, model)))


@distributed(world=2)
def test_frozen_weights_that_consist_of_other_tensors_are_exact(rank, world):
    models = {side: shard(make(Scaled), engine) for side, engine in ENGINES.items()}
    for model in models.values():
        model.blocks[1].requires_grad_(False)
    train(models, rank)
