"""Decoders that are trained with offloaded optimizer state, for bitwise comparison with others."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def decoder(policy=None, shard=True, **options):
    torch.manual_seed(0)
    model = Transformer(layers=3, dim=32, hidden=48, **options)
    if shard:
        for module in (*model.blocks, model):
            cs.fully_shard(module, offload_policy=policy or cs.OffloadPolicy())
    return model


def train(model, optimizer, steps, rank=0):
    for step in steps:
        next_token_loss(model, *token_batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one, other):
    """Check that models and their optimizers are bitwise identical."""
    (model, optimizer), (model2, optimizer2) = one, other
    for (name, param), param2 in zip(model.named_parameters(), model2.parameters(), strict=True):
        assert torch.equal(local(param), local(param2)), name
        state, state2 = optimizer.state[param], optimizer2.state[param2]
        assert state.keys() == state2.keys(), name
        for key, value in state.items():
            assert type(value) is type(state2[key])
            equal = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert equal(local(value), local(state2[key])), (name, key)
