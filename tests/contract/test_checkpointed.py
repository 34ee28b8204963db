"""Activation checkpointing of each type, inside and around sharded modules."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn as nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint as checkpointed

from _blocks import Transformer, TransformerBlock, next_token_loss, token_batch
from contract._ways import contract

_PREFIX = "_checkpoint_wrapped_module."


class Checkpointed(Transformer):
    """A model that calls its blocks inside of `torch.utils.checkpoint`."""

    reentrant = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpointed(block, x, self.cos[: x.shape[1]], self.sin[: x.shape[1]], use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Reentrant(Checkpointed):
    reentrant = True


def composable(model):
    for block in model.blocks:
        checkpoint(block)


def wrapped(model, impl=CheckpointImpl.NO_REENTRANT):
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=impl),
        check_fn=lambda m: isinstance(m, TransformerBlock),
    )


KINDS = {
    "composable": (Transformer, composable),
    "wrapper": (Transformer, wrapped),
    "reentrant wrapper": (Transformer, functools.partial(wrapped, impl=CheckpointImpl.REENTRANT)),
    "function": (Checkpointed, lambda model: None),
    "reentrant function": (Reentrant, lambda model: None),
}


def train(t, plain, model, steps=2):
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    for step in range(steps):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            next_token_loss(each, *token_batch(t.rank, step)).backward()
        t.average_grads(plain)
        found = {name.replace(_PREFIX, ""): param for name, param in model.named_parameters()}
        for name, param in plain.named_parameters():
            t.same(found[name], param)
            t.same(found[name].grad, param.grad)
        for optimizer in optimizers:
            optimizer.step()


@contract()
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_checkpointed_and_then_sharded(t, kind):
    make, apply = KINDS[kind]
    plain, model = t.pair(make)
    apply(model)
    for block in model.blocks:
        t.fully_shard(block, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    train(t, plain, model)


@contract()
@pytest.mark.parametrize("reshard", [True, False])
def test_a_block_with_sharded_submodules(t, reshard):
    plain, model = t.pair(Transformer)
    composable(model)
    for block in model.blocks:
        for part in (block.attention, block.feed_forward, block):
            t.fully_shard(part, mesh=t.mesh(), reshard_after_forward=reshard)
    t.fully_shard(model, mesh=t.mesh(), reshard_after_forward=reshard)
    train(t, plain, model)


@contract()
def test_two_sharded_layers_in_one_checkpoint(t):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return checkpointed(lambda y: self.second(self.first(y).relu()), x, use_reentrant=False)

    plain, model = t.pair(lambda: nn.Sequential(Pair(), Pair()))
    for pair in model:
        t.fully_shard(pair.first, mesh=t.mesh())
        t.fully_shard(pair.second, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_a_checkpointed_model_with_tied_weights_and_prefetching(t):
    plain, model = t.pair(lambda: Transformer(tied=True, layers=3))
    composable(model)
    for block in model.blocks:
        t.fully_shard(block, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    blocks = list(model.blocks)
    for a, b in itertools.pairwise(blocks):
        a.set_modules_to_forward_prefetch([b])
        b.set_modules_to_backward_prefetch([a])
    train(t, plain, model)


@contract()
def test_several_microbatches_through_checkpointed_blocks(t):
    plain, model = t.pair(Transformer)
    composable(model)
    for block in model.blocks:
        t.fully_shard(block, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        for each in (plain, model):
            next_token_loss(each, *token_batch(t.rank, micro)).backward()
    t.average_grads(plain)
    t.same_params(model, plain)
