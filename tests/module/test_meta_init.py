"""Models on the meta device are sharded, materialised, initialised and trained."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _engines import fully_shard
from _models import Stack, shard_blocks, vectors
from _parity import Case, check_parity, cut
from _pool import distributed


def on_meta(make):
    def build():
        with torch.device("meta"):
            return make()

    return build


def materialise(model):
    """Allocate storage, then set values that depend only on the position of the parameter."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for number, (_, param) in enumerate(model.named_parameters()):
            values = torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.2
            if isinstance(param, DTensor):
                param.to_local().copy_(cut(values, (param.device_mesh, param.placements)))
            else:
                param.copy_(values)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@distributed(world=(1, 2))
def test_a_model_from_meta_trains_exactly(rank, world, optimizer):
    check_parity(Case(model=on_meta(Stack), prepare=materialise, optimizer=optimizer), rank, world)


@distributed(world=2)
def test_reset_parameters_on_shards_gives_a_trainable_model(rank, world):
    model = on_meta(Stack)()
    shard_blocks(model, fully_shard)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        loss = model(*vectors(rank, 0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@distributed(world=2)
def test_initialising_in_full_parameters_gives_the_values_of_an_unsharded_model(rank, world):
    def reset(model, around):
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                with around(module):
                    module.reset_parameters()

    plain, model = Stack(), on_meta(Stack)()
    shard_blocks(model, fully_shard)
    model.to_empty(device="cpu")
    reset(plain, nullcontext)
    reset(model, partial(cs.checkpoint.full_parameters, recurse=False))
    full = cs.checkpoint.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())


@distributed(world=2)
def test_loading_with_assign_materialises_a_meta_model(rank, world):
    source = Stack()
    shard_blocks(source, fully_shard)
    model = on_meta(Stack)()
    shard_blocks(model, fully_shard)
    model.load_state_dict(source.state_dict(), assign=True)
    x = vectors(rank, 0)
    out, want = model(*x), source(*x)
    assert torch.equal(out, want)
    out.sum().backward()
    assert all(isinstance(p, nn.Parameter) and p.grad is not None for p in model.parameters())
