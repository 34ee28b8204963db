"""Attributes that users set on parameters: unsharded parameters have them, except those for fused accumulation.

Layers of Megatron and TransformerEngine add the gradient of a weight to `weight.main_grad` and return none to autograd.
That gradient is only this rank's. Torch's FSDP2 copies no attributes, so there the layers return it to autograd.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import composable_shard as cs
from _blocks import Attention, rotary
from _compiling import quiet
from _engines import ENGINES, fully_shard
from _pool import distributed, simulated
from _sides import whole


class Fused(torch.autograd.Function):
    """A linear layer that adds to `main_grad` if the weight has one."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.w = w
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        dw = g.flatten(0, -2).T @ x.flatten(0, -2)
        weight = ctx.w
        if hasattr(weight, "main_grad") or hasattr(weight, "get_main_grad"):
            (weight.get_main_grad() if hasattr(weight, "get_main_grad") else weight.main_grad).add_(dw)
            dw = None
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
            dw = torch.zeros_like(w) if getattr(weight, "zero_out_wgrad", False) else torch.full_like(w, torch.nan)
        return g @ w, dw


class Block(nn.Module):
    """Attention, and a feed-forward layer with fused gradient accumulation."""

    def __init__(self):
        super().__init__()
        self.attention = Attention(16, 4, 2, 0.0)
        self.up, self.down = nn.Parameter(torch.randn(24, 16) * 0.3), nn.Parameter(torch.randn(16, 24) * 0.3)
        self.register_buffer("cos", rotary(6, 4)[0], persistent=False)
        self.register_buffer("sin", rotary(6, 4)[1], persistent=False)

    def forward(self, x):
        x = x + self.attention(x, self.cos, self.sin)
        return x + Fused.apply(Fused.apply(x, self.up).relu(), self.down)


def give(model, how):
    """Set the attributes that the layers of these libraries use on each fused weight."""
    for block in model:
        for weight in (block.up, block.down):
            buffer = torch.zeros(weight.shape)
            if how == "get_main_grad":
                weight.get_main_grad = lambda buffer=buffer: buffer
            else:
                weight.main_grad = buffer
            if how in ("grad_added_to_main_grad", "zero_out_wgrad"):
                weight.grad_added_to_main_grad = False
                weight.zero_out_wgrad = how == "zero_out_wgrad"
            weight.is_expert = True


WAYS = "main_grad", "get_main_grad", "grad_added_to_main_grad", "zero_out_wgrad"


def models(blocks=2):
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(blocks)))
    return plain, copy.deepcopy(plain), copy.deepcopy(plain)


def shard(model, engine, **options):
    for block in model:
        engine(block, **options)
    return engine(model, **options)


def loss_of(model, rank, step=0):
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(7 * step + rank))
    return model(x).square().mean()


def steps(plain, sharded, rank, world, first=0, runs=None):
    """Train for two steps, compared with the unsharded model; then evaluate."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, *sharded)]
    for step in range(first, first + 2):
        (sum(loss_of(plain, r, step) for r in range(world)) / world).backward()
        for index, model in enumerate(sharded):
            loss_of((runs or sharded)[index], rank, step).backward()
            for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None, name
                torch.testing.assert_close(whole(mine.grad), other.grad, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for model in runs or sharded:
            torch.testing.assert_close(loss_of(model, rank), loss_of(plain, rank))


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_gradients_of_fused_layers_are_reduced(rank, world, reshard):
    for how in WAYS:
        plain, ours, theirs = models()
        give(ours, how)  # before sharding
        give(theirs, how)
        shard(ours, fully_shard, reshard_after_forward=reshard)
        shard(theirs, ENGINES["fsdp2"], reshard_after_forward=reshard)
        assert not hasattr(ours[0].up, how)
        steps(plain, (ours, theirs), rank, world)
        give(ours, how)  # between steps
        give(theirs, how)
        # Without resharding, FSDP2 computes with the tensors on which the attributes were set, and loses the gradients.
        steps(plain, (ours, theirs) if reshard else (ours,), rank, world, 2)
        assert not reshard or hasattr(ours[0].up, how), "the attribute stays on the sharded parameter"
        for block in ours:
            block.unshard()
        give(ours, how)  # on unsharded parameters
        plain.zero_grad()
        (sum(loss_of(plain, r, 5) for r in range(world)) / world).backward()
        loss_of(ours, rank, 5).backward()
        for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), other.grad)


@distributed(world=2)
def test_fused_layers_train_after_a_load_has_replaced_their_parameters(rank, world):
    plain, ours, theirs = models()
    shard(ours, fully_shard)
    shard(theirs, ENGINES["fsdp2"])
    steps(plain, (ours, theirs), rank, world)
    for model in (ours, theirs):
        before = model[0].up
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        assert model[0].up is not before
    for first in (2, 4):  # the first forward adopts the new parameters
        for param in (*ours.parameters(), *theirs.parameters()):  # all, so that none differs from the others
            param.main_grad = torch.zeros(param.shape)
        steps(plain, (ours, theirs), rank, world, first)


@pytest.mark.matrix
@distributed(world=2)
def test_fused_layers_train_exactly_in_compiled_code(rank, world):
    plain, ours, whole_model = models()
    shard(ours, fully_shard)
    shard(whole_model, fully_shard)
    give(ours, "main_grad")
    give(whole_model, "main_grad")
    torch._dynamo.reset()
    for block in ours:
        block.compile(backend="aot_eager")
    runs = ours, cs.compile(whole_model, backend="aot_eager")
    quiet(lambda: steps(plain, (ours, whole_model), rank, world, runs=runs))  # Dynamo makes torch warn


@simulated(world=2)
def test_other_attributes_are_copied_to_unsharded_parameters(rank, world):
    _, model, _ = models(1)
    give(model, "zero_out_wgrad")
    model[0].up._custom = {"lr": 2}
    shard(model, fully_shard)
    seen = []
    model[0].register_forward_pre_hook(lambda m, args: seen.append(dict(m.up.__dict__)))
    assert model[0].up.is_expert
    loss_of(model, rank).backward()
    with torch.no_grad():
        loss_of(model, rank)
    model[0].unshard()
    seen.append(dict(model[0].up.__dict__))
    for attributes in seen:
        assert attributes["is_expert"] is True
        assert attributes["_custom"] == {"lr": 2}
        assert not {*WAYS} & {*attributes}
