"""A vision tower that some ranks do not run. All ranks call its `unshard()`, so none hangs, and clip its gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grad_norm_

import composable_shard as cs
from _blocks import SwiGLU, Transformer, token_batch
from _pool import distributed, more
from _sides import models_of, noise, whole

DIM = 16


class Sees(nn.Module):
    """A decoder with an optional image."""

    def __init__(self):
        super().__init__()
        self.tower, self.decoder = SwiGLU(DIM, 24), Transformer(dim=DIM)

    def forward(self, tokens, image=None):
        decoder = self.decoder
        x = decoder.embed(tokens)
        if image is not None:
            x = x + self.tower(image)
        for block in decoder.blocks:
            x = block(x, decoder.cos, decoder.sin)
        return decoder.head(decoder.norm(x))


def shard(model, engine, compiled):
    engine(model.tower, reshard_after_forward=False)  # otherwise only some ranks would gather in backward
    for block in model.decoder.blocks:
        engine(block)
        if compiled:
            block.compile(backend="aot_eager")
    engine(model)
    model.set_reduce_scatter_unused_params(True)


def loss_of(model, rank, step):
    """The loss of a step. The two ranks alternate in getting an image."""
    (tokens,) = token_batch(rank, step)
    image = 3 * noise(1, 8, DIM, seed=step) if (rank + step) % 2 == 0 else None
    return model(tokens, image).square().mean()


def clip(name, model, clip_all):
    clipper = cs.clip_grad_norm_ if name == "ours" and clip_all == "cs" else clip_grad_norm_
    return whole(clipper(model.parameters(), 0.1))


@pytest.mark.parametrize("clips", ["torch", "cs"])
@pytest.mark.parametrize("compiled", [False, more(True)])
@pytest.mark.parametrize("kept", [False, True])
@distributed(world=2)
def test_a_manually_unsharded_tower_is_clipped_with_the_other_parameters(rank, world, kept, compiled, clips):
    """With `kept`, its weights stay unsharded after backward. FSDP2 then omits it from the norm."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo in FSDP2
    fsdp2 = not kept and hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # not in torch 2.11
    models = models_of(Sees, shard, fsdp2=fsdp2, compiled=compiled)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.5) for name, model in models.items()}
    for step in range(4):
        norms = {}
        for name, model in models.items():
            if name == "plain":
                sum(loss_of(model, each, step) / world for each in range(world)).backward()
            else:
                model.tower.unshard()
                if kept:
                    model.tower.set_reshard_after_backward(False)
                loss_of(model, rank, step).backward()
            norms[name] = clip(name, model, clips)
            optimizers[name].step()
            optimizers[name].zero_grad()
            if name != "plain" and kept:
                model.tower.reshard()
        for name, norm in norms.items():
            torch.testing.assert_close(norm, norms["plain"], msg=lambda m, n=name: f"norm of {n}: {m}")
    for name, model in models.items():
        with torch.no_grad():
            output = model(*token_batch(0, 9), noise(1, 8, DIM))
        if name == "plain":
            expected = output
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
