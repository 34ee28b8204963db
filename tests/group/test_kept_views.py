"""Selective checkpoints and other code that keeps views of parameters outside the saved-tensor hooks."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from _leases import lease
from _pool import distributed
from _sides import assert_alike, models_of, noise, optimizers_of
from _stepping import pool_of


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def body(self, x):
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        return checkpointed(self.body, x)


def checkpointed(function, x):
    """Checkpoint with a policy that saves all tensors, including views of parameters."""
    contexts = partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


class KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.transposed = weight.t()
        ctx.save_for_backward(x)
        return x @ ctx.transposed

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.transposed.t(), grad.t() @ ctx.saved_tensors[0]


class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return torch.tanh(KeepsOnContext.apply(x, self.weight))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(checkpointed(block, x))
        return x


KEEPERS = {
    "selective checkpoint within": lambda: nn.Sequential(*[Checkpointed() for _ in range(3)]),
    "selective checkpoint around": Around,
    "autograd function": lambda: nn.Sequential(*[Keeper() for _ in range(3)]),
}


@pytest.mark.parametrize("kind", KEEPERS)
@distributed(world=2)
def test_views_kept_outside_the_saved_tensor_hooks_stay_valid(rank, world, kind):
    def shard_all(model, engine):
        for block in getattr(model, "blocks", model):
            engine(block, reshard_after_forward=True)
        engine(model)

    models = models_of(KEEPERS[kind], shard_all)
    optimizers = optimizers_of(models)
    for step in range(3):
        for name, model in models.items():
            loss = model(noise(3, 6, seed=step)).square().mean()
            if name == "ours":  # overwrite all memory that the pool would lease to others
                others = [lease(pool_of(model), size) for size, free in pool_of(model)._free.items() for _ in free]
                for slot in others:
                    slot.typed(torch.uint8, written=True).fill_(255)
            loss.backward()
            if name == "ours":
                for slot in others:
                    pool_of(model).release(slot)
        assert_alike(models)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    del loss, model
    for _ in range(100):  # a gloo thread keeps a copy of this thread's state, with the checkpoint, for a millisecond
        with torch.no_grad():
            models["ours"](noise(3, 6))
        live = torch.tensor([pool_of(models["ours"]).live_bytes])
        dist.all_reduce(live)
        if live.item() == 0:
            break
        time.sleep(0.02)
    assert live.item() == 0, "memory is still reserved after the graph was freed"
