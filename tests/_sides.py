"""Train the same model unsharded, with ours and with torch's FSDP2, and compare.

If the unsharded model is compared, all ranks get the same data. The mean of their gradients is then bitwise identical
to its gradient.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import composable_shard
from _engines import ENGINES
from _models import Stack, shard_blocks, vectors
from _stepping import assert_at_rest

# ---- both engines and the unsharded model


def shard_children(model, engine, **options):
    """Shard each child as a group, and the root."""
    for child in model.children():
        if any(True for _ in child.parameters()):
            engine(child, **options)
    engine(model, **options)


def models_of(make, shard=shard_children, fsdp2=True, **options):
    """Create the same model unsharded, with ours and, if `fsdp2` is true, with FSDP2."""
    # FSDP2 warns about modules whose output is a view, and torch about its fast path
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
    warnings.filterwarnings("ignore", message="`torch.jit.script")
    found = {}
    for name in ("plain", *ENGINES) if fsdp2 else ("plain", "ours"):
        torch.manual_seed(3)
        found[name] = make()
        if name != "plain":
            shard(found[name], ENGINES[name], **options)
    return found


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_alike(models, exact=True):
    """Compare parameters, gradients and buffers with the unsharded model; those of ours bitwise if `exact`."""
    plain = models["plain"]
    for engine, model in models.items():
        tolerance = {"rtol": 0, "atol": 0} if exact and engine == "ours" else {}
        check = partial(torch.testing.assert_close, **tolerance)
        for name, param in plain.named_parameters():
            other = model.get_parameter(name)
            where = f"{engine}: {name}"
            check(whole(other.detach()), param.detach(), msg=lambda m, w=where: f"{w}: {m}")
            assert (other.grad is None) == (param.grad is None), where
            if param.grad is not None:
                check(whole(other.grad), param.grad, msg=lambda m, w=where: f"gradient of {w}: {m}")
        for name, buffer in plain.named_buffers():
            check(model.get_buffer(name), buffer)


def optimizers_of(models):
    found = {name: [p for p in model.parameters() if p.requires_grad] for name, model in models.items()}
    return {name: torch.optim.SGD(params, lr=0.1) for name, params in found.items()}


def train_alike(models, loss_of, steps=3, optimizers=None, exact=True, at_rest=True):
    """Train all models for some steps, and compare after each one."""
    optimizers = optimizers or optimizers_of(models)
    for step in range(steps):
        losses = {}
        for name, model in models.items():
            torch.manual_seed(step)
            losses[name] = loss_of(model, step)
            losses[name].backward()
            losses[name] = losses[name].detach()
        for name, loss in losses.items():
            torch.testing.assert_close(loss, losses["plain"], msg=lambda m, n=name: f"loss of {n}: {m}")
        assert_alike(models, exact)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(models, exact)
    if at_rest:
        assert_at_rest(models["ours"])


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stack(first, last):
    return nn.Sequential(nn.Linear(first, 6), nn.Tanh(), nn.Linear(6, last))


# ---- the two engines


def both(make=Stack, shard=shard_blocks, **options):
    """Create the same model with each engine."""
    torch.manual_seed(3)
    plain = make()
    models = {name: copy.deepcopy(plain) for name in ENGINES}
    for name, model in models.items():
        shard(model, ENGINES[name], **options)
    return models


def run_both(models, train, steps=2):
    """Run `train(model, step)` and an optimizer step with each engine, and compare gradients and parameters."""
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
    """Call a method that FSDP2 of the installed torch may not have. Returns whether the model has it."""
    if isinstance(model, composable_shard.FSDPModule) or hasattr(model, name):
        getattr(model, name)(*args)
        return True
    return False
