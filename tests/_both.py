"""The same model under ours and under torch's FSDP2."""

from __future__ import annotations

import copy

import torch

import composable_shard
from _engines import ENGINES
from _models import Stack, shard_blocks, vectors


def both(make=Stack, shard=shard_blocks, **options):
    """The same model under each engine."""
    torch.manual_seed(3)
    plain = make()
    models = {name: copy.deepcopy(plain) for name in ENGINES}
    for name, model in models.items():
        shard(model, ENGINES[name], **options)
    return models


def run_both(models, train, steps=2):
    """`train(model, step)` and an optimizer's step, on each side; the gradients and parameters must agree."""
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    for step in range(steps):
        for model in models.values():
            train(model, step)
        assert_same(models["ours"], models["fsdp2"])
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_same(models["ours"], models["fsdp2"])


def assert_same(ours, theirs):
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(mine.to_local(), other.to_local(), msg=lambda m, n=name: f"{n}: {m}")
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(
                mine.grad.to_local(), other.grad.to_local(), msg=lambda m, n=name: f"grad {n}: {m}"
            )


def backward(model, rank, step):
    model(*vectors(rank, step)).square().mean().backward()


def call(model, name, *args):
    """A method that the installed torch may not have yet; ours always has."""
    if isinstance(model, composable_shard.FSDPModule) or hasattr(model, name):
        getattr(model, name)(*args)
        return True
    return False
