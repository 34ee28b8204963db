"""The arena with real models: no allocations after the first steps, even if different types of steps alternate."""

from __future__ import annotations

import gc
import resource
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _engines import fully_shard
from _models import shard_blocks
from _pool import distributed
from _stepping import engine_of
from composable_shard._plan.arena import pack


class Mixed(nn.Module):
    """Blocks of several widths and two dtypes. Each forward runs the blocks in `taken`."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, n), nn.ReLU(), nn.Linear(n, 6)) for n in (80, 8, 48, 16, 80)
        )
        self.blocks[1].double()
        self.checkpointed = False

    def forward(self, x: torch.Tensor, taken: tuple[int, ...] = (0, 1, 2, 3, 4)) -> torch.Tensor:
        x = self.inp(x)
        for at in taken:
            block = self.blocks[at]
            given = x.to(block[0].weight.dtype)
            out = checkpoint(block, given, use_reentrant=False) if self.checkpointed else block(given)
            x = x + out.float()
        return x


def scatter(sizes, meets, names):
    """`pack` in reverse order and without names, so that backward gets other slots than forward."""
    turned = [[len(sizes) - 1 - other for other in each] for each in meets[::-1]]
    return pack(sizes[::-1], turned, list(range(len(sizes))))[::-1]


def batch(step, rows=3):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))


def train(model, step, **how):
    model(batch(step), **how).square().mean().backward()
    model.zero_grad()


def validate(model, step):
    with torch.no_grad():
        model(batch(step))


def accumulate(model, step):
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        model(batch(step)).square().mean().backward()
    model.zero_grad()


def twice(model, step):
    (model(batch(step)) + model(batch(step + 1))).square().mean().backward()
    model.zero_grad()


def recomputed(model, step):
    model.checkpointed = True
    train(model, step)
    model.checkpointed = False


def other_batch(model, step):
    model(batch(step, rows=1 + step % 5)).square().mean().backward()
    model.zero_grad()


def routed(model, step):
    """Run different blocks each time, like experts. All ranks run the same blocks."""
    train(model, step, taken=tuple(at for at in range(5) if (step >> at) % 2 == 0))


def failing(model, step):
    with pytest.raises(RuntimeError, match="mat1"):
        model(torch.ones(3, 5))
    with pytest.raises(RuntimeError, match="shape"):
        model(batch(step)).backward(torch.ones(7))
    train(model, step)


KINDS = [train, validate, accumulate, twice, recomputed, other_batch, routed, failing]


@pytest.mark.matrix
@pytest.mark.parametrize("reshard", [None, False])
@distributed(world=2)
def test_steps_do_not_allocate_after_each_type_of_step_has_run(rank, world, reshard):
    torch.manual_seed(0)
    model = Mixed()
    shard_blocks(model, fully_shard, reshard_after_forward=reshard)
    for step in range(16):
        for kind in KINDS:
            kind(model, step)
    before = cs.stats(model)
    for step in range(8, 14):
        for kind in KINDS:
            kind(model, step)
    stats = cs.stats(model)
    for name in ("pool/allocations", "pool/fallbacks"):
        assert stats[name] == before[name], name
    assert stats["pool/live_bytes"] == 0
    assert stats["pool/arena_bytes"] == stats["pool/held_bytes"]
    assert stats["pool/arena_bytes"] <= 1.3 * stats["pool/peak_bytes"]


@distributed(world=2)
def test_blocks_of_different_sizes_and_dtypes_share_memory(rank, world):
    torch.manual_seed(0)
    model = Mixed()
    shard_blocks(model, fully_shard, reshard_after_forward=True)
    for step in range(4):
        train(model, step)
    stats = cs.stats(model)
    assert stats["pool/fallbacks"] == 0
    assert stats["pool/held_bytes"] == stats["pool/arena_bytes"] <= 1.05 * stats["pool/peak_bytes"]
    addresses = {}
    for group in engine_of(model).groups:
        for _ in range(2):
            engine_of(model).unshard(group, wait=True)
            addresses.setdefault(group.fqn, set()).add(group.weights()[0].data_ptr())
            engine_of(model).reshard(group)
    assert all(len(found) == 1 for found in addresses.values()), "a name has one address"


@distributed(world=2)
def test_gradients_are_identical_if_backward_gathers_into_other_slots(rank, world):
    models = []
    for scattered in (False, True):
        torch.manual_seed(0)
        models.append(Mixed())
        shard_blocks(models[-1], fully_shard, reshard_after_forward=True)
        with patch("composable_shard._memory.regions.pack", scatter if scattered else pack):
            for step in range(3):
                train(models[-1], step)
    groups = engine_of(models[1]).groups
    weights = [bucket.for_weights for group in groups for bucket in group.buckets]
    assert any(one.slot is not two.slot for one, two in weights if one.slot and two.slot)
    for step in range(4):
        for model in models:
            model.checkpointed = step % 2 == 1
            model(batch(step)).square().mean().backward()
        for one, two in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one.grad.to_local(), two.grad.to_local())


@distributed(world=2)
def test_empty_pool_frees_the_arena_and_later_steps_allocate_it_again(rank, world):
    torch.manual_seed(0)
    model = Mixed()
    shard_blocks(model, fully_shard)
    for step in range(3):
        train(model, step)
    held = cs.stats(model)["pool/held_bytes"]
    assert cs.empty_pool(model) == held > 0
    assert cs.stats(model)["pool/held_bytes"] == 0
    for step in range(3):
        train(model, step)
    assert cs.stats(model)["pool/held_bytes"] == held


@pytest.mark.parametrize("how", ["emptied", "converted"])
@distributed(world=2)
def test_training_stays_exact_after_memory_is_freed_while_a_group_is_unsharded(rank, world, how):
    plain, model = (nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)]) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        each[1:5].requires_grad_(False)  # only handles gather their weights again
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model[5].set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(8):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        for each in (plain, model):
            each(x).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert q.grad is None or torch.equal(p.grad.full_tensor(), q.grad)
        if step == 3:
            cs.empty_pool(model) if how == "emptied" else model.to(torch.float32)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    stats = cs.stats(model)
    assert stats["pool/held_bytes"] == stats["pool/arena_bytes"]


@pytest.mark.matrix
@distributed(world=2, limit_s=240)
def test_a_thousand_steps_do_not_leak_memory(rank, world):
    torch.manual_seed(0)
    model = Mixed()
    shard_blocks(model, fully_shard)

    def steps(count):
        for step in range(count):
            train(model, step)
            if step % 10 == 0:
                KINDS[step // 10 % len(KINDS)](model, step)
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = steps(200)
    allocations, objects = cs.stats(model)["pool/allocations"], len(gc.get_objects())
    assert steps(800) - before < 5 * 1024, "KiB"
    assert cs.stats(model)["pool/allocations"] == allocations
    assert len(gc.get_objects()) < objects + 100
