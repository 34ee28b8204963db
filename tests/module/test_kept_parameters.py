"""Tensors that a model keeps from before it was sharded: training them is an error, instead of silently lost."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import composable_shard as cs
from _blocks import Attention, SwiGLU, rotary
from _engines import fully_shard
from _pool import distributed, simulated
from _sides import whole
from composable_shard.errors import ShardConfigStateError


@dataclass
class Held:
    gate: nn.Parameter
    rest: tuple[nn.Parameter, ...]


class Block(nn.Module):
    """Attention, and a feed-forward layer that may compute with weights that it keeps elsewhere."""

    def __init__(self, keep):
        super().__init__()
        self.attention, self.feed_forward = Attention(16, 4, 2, 0.0), SwiGLU(16, 24)
        self.register_buffer("cos", rotary(6, 4)[0], persistent=False)
        self.register_buffer("sin", rotary(6, 4)[1], persistent=False)
        mlp = self.feed_forward
        self.weights = KEEPS[keep](mlp.gate.weight, mlp.up.weight, mlp.down.weight)
        self.keep = keep

    def forward(self, x):
        x = x + self.attention(x, self.cos, self.sin)
        if self.keep == "closure":
            return x + self.weights(x)
        gate, up, down = READS[self.keep](self)
        return x + F.silu(x @ gate.T) * (x @ up.T) @ down.T


def feed_forward(gate, up, down, x):
    return F.silu(x @ gate.T) * (x @ up.T) @ down.T


KEEPS = {
    "nothing": lambda *weights: None,
    "list": lambda *weights: list(weights),
    "dict": lambda *weights: dict(enumerate(weights)),
    "dataclass": lambda gate, *rest: Held(gate, rest),
    "closure": lambda *weights: functools.partial(feed_forward, *weights),
}


def from_modules(block):
    mlp = block.feed_forward
    return mlp.gate.weight, mlp.up.weight, mlp.down.weight


READS = {
    "nothing": from_modules,
    "list": lambda block: block.weights,
    "dict": lambda block: block.weights.values(),
    "dataclass": lambda block: (block.weights.gate, *block.weights.rest),
}


def model_of(keep, blocks=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(keep if i else "nothing") for i in range(blocks)))


def shard(model, each=True):
    for block in model if each else ():
        fully_shard(block)
    return fully_shard(model)


def batch(rank, step=0):
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(7 * step + rank))


def loss_of(model, rank, step=0):
    return model(batch(rank, step)).square().mean()


REFUSED = r"rank {rank}: parameter 1\.feed_forward\.(gate|up|down)\.weight: .* before fully_shard.*ignored_params"


def refused(rank):
    return pytest.raises(ShardConfigStateError, match=REFUSED.format(rank=rank))


@distributed(world=2)
def test_training_a_tensor_from_before_sharding_is_an_error(rank, world):
    for keep in ("list", "dict", "dataclass", "closure"):
        for each in (True, False):
            model = shard(model_of(keep), each)
            for _ in range(2):
                with refused(rank):
                    loss_of(model, rank).backward()
            with torch.no_grad():
                loss_of(model, rank)
            if keep != "closure":  # once the block reads the weights from its modules, it trains exactly
                model[1].keep = "nothing"
                plain = model_of("nothing")
                loss_of(model, rank, 1).backward()
                (sum(loss_of(plain, r, 1) for r in range(world)) / world).backward()
                for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(whole(mine.grad), other.grad)


@distributed(world=2)
def test_training_an_old_tensor_is_an_error_in_compiled_code_checkpoints_and_copies(rank, world):
    for compiles in (lambda m: m[1].compile(backend="aot_eager"), lambda m: cs.compile(m, backend="aot_eager")):
        torch._dynamo.reset()
        model = shard(model_of("list"))
        run = compiles(model) or model
        with refused(rank):
            loss_of(run, rank).backward()
    model = shard(model_of("list"))
    for reentrant in (False, True):
        x = batch(rank).requires_grad_()
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        with refused(rank):
            y.square().mean().backward()
    made = copy.deepcopy(model)
    assert made[1].weights[0] is not model[1].weights[0]
    with refused(rank):
        loss_of(made, rank).backward()


@distributed(world=2)
def test_old_tensors_may_train_in_another_module(rank, world):
    plain = model_of("nothing")
    other = model_of("nothing")
    for mine, theirs in zip(other.modules(), plain.modules(), strict=True):
        mine._parameters = dict(theirs._parameters)
    model = shard(plain)
    loss_of(model, rank).backward()
    for step in range(2):
        loss_of(other, rank, step).backward()
        loss_of(model, rank, step).backward()
    assert all(param.grad is not None for param in (*other.parameters(), *model.parameters()))
    with torch.no_grad():
        teacher = other(batch(rank))
    F.mse_loss(model(batch(rank)), teacher).backward()


@simulated(world=2)
def test_hooks_and_frozen_or_meta_parameters_are_not_mistaken_for_training(rank, world):
    model = model_of("list")
    calls = []
    for weight in model[1].weights:
        weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad))
    model[1].attention.requires_grad_(False)
    shard(model)
    model[1].keep = "nothing"
    loss_of(model, rank).backward()
    assert len(calls) == 3, "the sharded parameters have the hooks, and there is no error"
    model[1].keep = "list"
    with refused(rank):
        loss_of(model, rank).backward()
    with torch.device("meta"):
        model = model_of("list")
    shard(model)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.1)
    model[1].keep = "nothing"
    for block in model:
        block.cos, block.sin = rotary(6, 4)
    loss_of(model, rank).backward()
    assert all(param.grad is not None for param in model.parameters())
