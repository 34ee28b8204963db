"""Ignored parameters stay plain, with local gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from _engines import fully_shard
from _models import Stack
from _parity import Case, check_parity
from _pool import distributed

IGNORED = ("blocks.0.norm.weight", "blocks.2.up.bias", "head.bias")


def ignored_of(model):
    return {p for n, p in model.named_parameters() if n in IGNORED}


def shard_but_ignored(model, engine):
    ignored = ignored_of(model)
    for block in model.blocks:
        engine(block, ignored_params=ignored)
    engine(model, ignored_params=ignored)


def train_and_reduce_ignored(run):
    """A step in which the user averages the gradients of ignored parameters."""
    loss = run.loss()
    run.backward(loss)
    if not run.reference:
        for name in IGNORED:
            dist.all_reduce(run.params[name].grad)
            run.params[name].grad /= run.world
    return loss


def ignoring(**options):
    return Case(model=Stack, shard=shard_but_ignored, train=train_and_reduce_ignored, **options)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@distributed(world=2)
def test_training_with_ignored_parameters_is_exact(rank, world, optimizer):
    sgd = optimizer == "sgd"
    case = ignoring(optimizer=optimizer, fsdp2=not sgd, why="FSDP2 raises in SGD, which is foreach by default")
    check_parity(case, rank, world)


@distributed(world=2)
def test_ignored_parameters_stay_plain_with_local_gradients(rank, world):
    model = Stack()
    before = {n: p for n, p in model.named_parameters() if n in IGNORED}
    shard_but_ignored(model, fully_shard)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    for name, param in before.items():
        assert model.get_parameter(name) is param
        assert type(param) is nn.Parameter
        assert not isinstance(param.grad, DTensor)
        both = [torch.empty_like(param.grad) for _ in range(world)]
        dist.all_gather(both, param.grad)
        assert not torch.equal(both[0], both[1]), f"the gradient of {name} was reduced"
