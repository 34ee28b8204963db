"""All types of activation checkpointing, in sharded blocks and around them."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._composable import checkpoint as checkpoint_by_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from _models import shard_blocks, shard_lists, shard_nested
from _parity import Case, check_parity, plain_step
from _pool import distributed, more


def save_matmuls(ctx, op, *args, **kwargs):
    """A selective policy: save the results of matrix products, recompute the rest."""
    saved = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


KINDS = {
    "plain": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "selective": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, save_matmuls),
    ),
    "no-early-stop": functools.partial(checkpoint, use_reentrant=False, determinism_check="none"),
}


class Body(nn.Module):
    """A block whose halves can be checkpointed separately."""

    def __init__(self, inside, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.inside, self.dropout = inside, dropout

    def first(self, x):
        return F.gelu(self.up(self.norm(x)))

    def second(self, h):
        return F.dropout(torch.tanh(self.down(h)), self.dropout)

    def forward(self, x):
        if self.inside is None:
            return x + self.second(self.first(x))
        wrap = KINDS[self.inside]
        return x + wrap(self.second, wrap(self.first, x))


class Checkpointed(nn.Module):
    """A model with checkpoints in blocks (`inside`) or around the calls of blocks (`outside`)."""

    def __init__(self, inside=None, outside=None, dropout=0.0):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Body(inside, dropout) for _ in range(3))
        self.head = nn.Linear(6, 4)
        self.outside = outside

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x) if self.outside is None else KINDS[self.outside](block, x)
        return self.head(x)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@distributed(world=(1, 2))
def test_checkpoints_inside_sharded_blocks_are_exact(rank, world, kind, reshard):
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    check_parity(Case(model=functools.partial(Checkpointed, inside=kind), shard=shard), rank, world)


@pytest.mark.parametrize("reshard", [True, more(False)])
@pytest.mark.parametrize("kind", KINDS)
@distributed(world=(1, 2))
def test_checkpoints_around_sharded_blocks_are_exact(rank, world, kind, reshard):
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    check_parity(Case(model=functools.partial(Checkpointed, outside=kind), shard=shard), rank, world)


@pytest.mark.parametrize("outside", ["plain", "reentrant"])
@pytest.mark.parametrize("inside", ["plain", "reentrant", "selective"])
@distributed(world=2)
def test_checkpoints_around_checkpoints_are_exact(rank, world, inside, outside):
    # an outer reentrant checkpoint first runs the inner one without grad, and torch warns about that
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
    model = functools.partial(Checkpointed, inside=inside, outside=outside)
    check_parity(Case(model=model), rank, world)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("plain", "inside"), ("reentrant", "outside"), more("plain", "outside"), more("reentrant", "inside")],
)
@distributed(world=2)
def test_dropout_is_the_same_in_recomputation(rank, world, place, kind):
    model = functools.partial(Checkpointed, dropout=0.4, **{place: kind})
    check_parity(Case(model=model, optimizer="adamw"), rank, world)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reshard", [True, more(False)])
@distributed(world=2)
def test_checkpoints_started_by_module_hooks_are_exact(rank, world, reshard, whole):
    def shard(model, fully_shard, **options):
        for module in [model] if whole else model.blocks:
            checkpoint_by_hooks(module)
        shard_blocks(model, fully_shard, reshard_after_forward=reshard, **options)

    check_parity(Case(model=Checkpointed, shard=shard, optimizer="adamw"), rank, world)


class Scaled(Body):
    """A block with parameters of two dtypes, so two buckets."""

    def __init__(self, inside, dropout):
        super().__init__(inside, dropout)
        self.scale = nn.Parameter(torch.full((4,), 1.5, dtype=torch.float64))

    def second(self, h):
        return super().second(h) * self.scale.mean().float()


class OfTwoDtypes(Checkpointed):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(None, 0.0) for _ in range(3))


def checkpointed_after_the_first_step(run):
    if run.step == 1 and not run.reference:
        for block in run.model.blocks:
            checkpoint_by_hooks(block)
    return plain_step(run)


@pytest.mark.parametrize("make", [Checkpointed, OfTwoDtypes])
@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_checkpoints_added_by_module_hooks_after_a_step_are_exact(rank, world, reshard, make):
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    fsdp2 = make is Checkpointed  # FSDP2 refuses groups of several dtypes
    check_parity(Case(model=make, shard=shard, train=checkpointed_after_the_first_step, fsdp2=fsdp2), rank, world)


GROUPS = {"nested": shard_nested, "lists": shard_lists}


@pytest.mark.parametrize(
    ("place", "kind", "groups"),
    [
        ("inside", "plain", "nested"),
        ("inside", "reentrant", "lists"),
        ("outside", "plain", "lists"),
        ("outside", "reentrant", "nested"),
        more("inside", "plain", "lists"),
        more("inside", "reentrant", "nested"),
        more("outside", "plain", "nested"),
        more("outside", "reentrant", "lists"),
    ],
)
@distributed(world=2)
def test_checkpoints_work_in_nested_and_list_groups(rank, world, place, kind, groups):
    why = "before torch 2.13 FSDP2 raises: it gathers only for the first module of a list, then recomputes with shards"
    fsdp2 = torch.__version__ >= "2.13" or (kind, groups) != ("reentrant", "lists")
    case = Case(model=functools.partial(Checkpointed, **{place: kind}), shard=GROUPS[groups], fsdp2=fsdp2, why=why)
    check_parity(case, rank, world)


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
@distributed(world=2)
def test_a_checkpoint_around_the_whole_model_is_exact(rank, world, kind):
    def loss(model, x):
        if kind == "reentrant":
            x = x.clone().requires_grad_()
        return KINDS[kind](model, x).square().mean()

    check_parity(Case(model=Checkpointed, loss=loss), rank, world)


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
@pytest.mark.parametrize("place", ["inside", "outside"])
@distributed(world=2)
def test_accumulation_with_checkpointing_is_exact(rank, world, place, kind):
    def train(run):
        run.set_sync(False)
        run.backward(run.loss(0))
        run.set_sync(True)
        loss = run.loss(1)
        run.backward(loss)
        return loss

    check_parity(Case(model=functools.partial(Checkpointed, **{place: kind}), train=train), rank, world)


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
@pytest.mark.parametrize("place", ["inside", "outside"])
@distributed(world=2)
def test_checkpoints_work_with_partly_frozen_blocks(rank, world, place, kind):
    def model():
        made = Checkpointed(**{place: kind})
        made.blocks[1].requires_grad_(False)
        made.blocks[0].up.weight.requires_grad_(False)
        return made

    check_parity(Case(model=model), rank, world)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("inside", "outside"), [("plain", None), ("plain", "plain"), more(None, "plain")])
@distributed(world=2)
def test_a_gradient_penalty_with_checkpointing_is_exact(rank, world, inside, outside, frozen):
    def model():
        made = Checkpointed(inside, outside)
        if frozen:
            made.blocks[1].requires_grad_(False)
            made.blocks[0].up.weight.requires_grad_(False)
        return made

    def train(run):
        (x,) = run.batch()
        x.requires_grad_()
        out = run.model(x).square().mean()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + grad.square().sum()
        run.backward(loss)
        return loss

    check_parity(Case(model=model, train=train, fsdp2=False, why="FSDP2 raises"), rank, world)
