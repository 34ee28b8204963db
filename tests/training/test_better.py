"""Cases that torch's FSDP2 gets wrong or rejects. Each test runs both implementations.

Other files compare with FSDP2 too: full tensors, copies, and optimizers that were created before sharding
(test_copies), the divide factor on gloo (test_methods), offloading without an accelerator (test_offload), ignored
parameters and several meshes with foreach optimizers and clipping (test_optimizers).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from _engines import ENGINES, fully_shard, mesh_of
from _models import Stack, shard_blocks, vectors
from _pool import distributed
from _stepping import assert_at_rest, shard_whole, train_step


def pair(make=Stack, shard=shard_blocks, **options):
    """The same model sharded by ours and by FSDP2, and unsharded."""
    torch.manual_seed(3)
    plain = make()
    found = []
    for engine in ENGINES.values():
        found.append(copy.deepcopy(plain))
        shard(found[-1], engine, **options)
    return (*found, plain)


def first_gradient(model):
    param = next(model.parameters())
    return param.grad if type(param) is nn.Parameter else param.grad.full_tensor()


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(world=2)
def test_zero_grad_clears_gradients_accumulated_without_sync(rank, world, set_to_none):
    ours, theirs, plain = pair()
    for model in (ours, theirs):
        model.set_requires_gradient_sync(False)
        train_step(model)
        model.zero_grad(set_to_none)
        model.set_requires_gradient_sync(True)
        train_step(model)
    train_step(plain)
    assert torch.equal(first_gradient(ours), first_gradient(plain))
    torch.testing.assert_close(first_gradient(theirs), 2 * first_gradient(plain))


@distributed(world=2)
def test_forwards_without_backward_do_not_accumulate_objects(rank, world):
    ours, theirs, _ = pair()
    counts = []
    for _ in range(4):
        for step in range(20):
            ours(*vectors(rank, step))
        gc.collect()
        counts.append(len(gc.get_objects()))
    # threads that start or end change the number by a few
    assert counts[-1] - counts[1] < 40, "more than one object per forward"
    lengths = []
    for step in range(3):
        theirs(*vectors(rank, step))
        lengths.append(len(theirs._get_fsdp_state()._comm_ctx.post_forward_order))
    assert lengths[0] < lengths[1] < lengths[2]


class Sliced(nn.Module):
    """Slices and reshapes activations, like gathers do with weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 4)

    def forward(self, x):
        left, right = x[:, :2], x[:, 2:].view(-1, 2)
        return self.linear(left) + torch.tanh(self.linear(right)).view(-1, 4)


class SavesAll(nn.Sequential):
    """Blocks with selective activation checkpointing that saves the output of each operation."""

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
        for block in self:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


@distributed(world=2)
def test_a_selective_checkpoint_sees_only_the_operations_of_the_module(rank, world):
    def shard(model, engine):
        for block in model:
            engine(block, mesh=mesh_of(2))
        engine(model, mesh=mesh_of(2))

    ours, theirs, plain = pair(lambda: SavesAll(Sliced(), Sliced()), shard)
    for step in range(2):
        for model in (ours, plain):
            train_step(model, step)
        assert torch.equal(first_gradient(ours), first_gradient(plain))
    with pytest.raises(CheckpointError):
        train_step(theirs)


@distributed(world=4)
def test_reshard_to_a_number_of_ranks_works_with_other_dims(rank, world):
    def shard(model, engine):
        for block in model:
            engine(
                block, mesh=mesh_of(4), reshard_after_forward=2, shard_placement_fn=lambda param: Shard(param.ndim - 1)
            )
        engine(model, mesh=mesh_of(4))

    ours, theirs, plain = pair(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), shard)
    for model in (ours, plain):
        train_step(model)
    torch.testing.assert_close(first_gradient(ours), first_gradient(plain))
    with pytest.raises(IndexError):
        train_step(theirs)


@distributed(world=(1, 2))
def test_training_works_after_inference_mode(rank, world):
    ours, theirs, plain = pair()
    for model in (ours, plain):
        with torch.inference_mode():
            out = model(*vectors(0, 0))
        train_step(model)
    with torch.inference_mode():
        assert torch.equal(out, plain(*vectors(0, 0)))
    assert torch.equal(first_gradient(ours), first_gradient(plain))

    def evaluate_and_train():
        with torch.inference_mode():
            theirs(*vectors(0, 0))
        train_step(theirs)

    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        evaluate_and_train()


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


class Escapes(nn.Module):
    """Keeps an intermediate tensor as an attribute, or returns its output in another object."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.lin = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        hidden = torch.tanh(self.lin(x))
        if self.how == "opaque":
            return Opaque(self.out(hidden))
        self.kept = self.out(hidden).square().mean()
        return self.out(hidden)

    def loss(self, x):
        found = self(x)
        return found.tensor.square().mean() if self.how == "opaque" else self.kept


@pytest.mark.parametrize("how", ["opaque", "kept"])
@distributed(world=2)
def test_tensors_that_escape_a_forward_can_be_differentiated(rank, world, how):
    ours, theirs, plain = pair(lambda: Escapes(how), shard_whole, reshard_after_forward=True)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for model in (ours, plain):
        model.loss(x).backward()
    assert torch.equal(first_gradient(ours), first_gradient(plain))
    assert_at_rest(ours)
    with pytest.raises(RuntimeError, match="storage"):
        theirs.loss(x).backward()


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(x).view(-1)


@distributed(world=2)
def test_an_output_that_is_a_view_can_be_modified_in_place(rank, world):
    def shard(model, engine):
        engine(model[0], reshard_after_forward=True)
        engine(model)

    ours, theirs, plain = pair(lambda: nn.Sequential(Views()), shard)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for model in (ours, plain):
        model(x).add_(1).square().sum().backward()
    assert torch.equal(first_gradient(ours), first_gradient(plain))
    assert_at_rest(ours)
    with pytest.raises((UserWarning, RuntimeError), match=r"view|storage"):
        theirs(x).add_(1).square().sum().backward()


class Shares(nn.Module):
    """Raises an error if asked to."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.fails = False

    def forward(self, x):
        x = self.lin(x)
        if self.fails:
            raise ZeroDivisionError
        return x


@distributed(world=2)
def test_after_an_exception_parameters_are_sharded_and_the_next_step_is_exact(rank, world):
    def shard(model, engine):
        engine(model[0])
        engine(model)

    ours, theirs, plain = pair(lambda: nn.Sequential(Shares()), shard)
    for model in (ours, theirs, plain):
        model[0].fails = True
        with contextlib.suppress(ZeroDivisionError):
            train_step(model)
        model[0].fails = False
    assert isinstance(ours[0].lin.weight, torch.distributed.tensor.DTensor)
    assert not isinstance(theirs[0].lin.weight, torch.distributed.tensor.DTensor)
    for model in (ours, plain):
        train_step(model)
    assert torch.equal(first_gradient(ours), first_gradient(plain))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        return self.b(self.a(x).double()).float()


@distributed(world=2)
def test_parameters_of_several_dtypes_train_in_one_group(rank, world):
    ours, theirs, plain = pair(Mixed, shard_whole)
    for model in (ours, plain):
        train_step(model)
    assert torch.equal(first_gradient(ours), first_gradient(plain))
    with pytest.raises(AssertionError, match="dtype"):
        train_step(theirs)


@distributed(world=2)
def test_sharding_the_parent_first_raises_an_error(rank, world):
    def shard(model, engine):
        engine(model)
        engine(model.blocks[0])

    with pytest.raises(ValueError, match="call fully_shard on inner modules before outer ones"):
        shard(Stack(), fully_shard)
    with pytest.raises(TypeError, match="value was None"):
        shard(Stack(), ENGINES["fsdp2"])


@distributed(world=2)
def test_parameters_added_after_sharding_raise_an_error(rank, world):
    ours, theirs, _ = pair()
    for model in (ours, theirs):
        model.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="parameters extra: were added after fully_shard"):
        train_step(ours)
    train_step(theirs)
    assert type(theirs.extra) is nn.Parameter  # it is not sharded


@distributed(world=2)
def test_pickling_a_sharded_module_raises_an_error(rank, world):
    ours, theirs, _ = pair()
    with pytest.raises(RuntimeError, match="cannot be pickled; save its state_dict"):
        pickle.dumps(ours)
    with pytest.raises(Exception):  # noqa: B017 - of any kind
        pickle.dumps(theirs)


@distributed(world=2)
def test_a_deleted_model_is_freed_without_the_cycle_collector(rank, world):
    models = dict(zip(ENGINES, pair(), strict=False))
    for model in models.values():
        train_step(model)
    params = {name: [weakref.ref(p) for p in model.parameters()] for name, model in models.items()}
    gc.collect()
    gc.disable()
    try:
        del model
        models.clear()
        alive = {name: sum(ref() is not None for ref in refs) for name, refs in params.items()}
    finally:
        gc.enable()
    assert alive["ours"] == 0
    assert alive["fsdp2"] > 0
