"""The pool frees unused memory, so that it holds the least while the loss is computed."""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import fully_shard
from _pool import distributed, more, simulated
from _sides import assert_alike, optimizers_of
from _stepping import assert_at_rest, pool_of
from composable_shard._memory.device import DeviceMemory
from composable_shard._memory.pool import BufferPool

GIVES_BACK, KEEPS = cs.PoolPolicy(keep_idle=False), cs.PoolPolicy(keep_idle=True)


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args):
        return checkpoint(self.block, *args, use_reentrant=False)


def decoder(checkpointed=False):
    torch.manual_seed(0)
    model = Transformer(layers=4, dropout=0.1)
    if checkpointed:
        model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    return model


def sharded(plain, policy=GIVES_BACK, **options):
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model)
    model.set_pool_policy(policy)
    return model


def loss_of(model, step, rows=2):
    torch.manual_seed(step)
    return next_token_loss(model, *token_batch(0, step, batch=rows))


def held(model):
    return cs.stats(model)["pool/held_bytes"]


@simulated(world=2)
def test_during_the_loss_the_pool_holds_only_leased_memory(rank, world):
    model = sharded(decoder())
    inside = []
    model.norm.register_forward_pre_hook(lambda *_: inside.append(held(model)))
    for step in range(4):
        loss = loss_of(model, step)
        pool = pool_of(model)
        at_loss = pool.held_bytes
        assert at_loss == pool.live_bytes > 0, "the root's weights stay unsharded for backward"
        assert inside.pop() == at_loss, "also if the root's forward computes the loss"
        loss.backward()
        assert pool.held_bytes == 0
        model.zero_grad()
    keeping = sharded(decoder(), KEEPS)
    for step in range(4):
        loss = loss_of(keeping, step)
        if step:
            assert held(keeping) == cs.stats(keeping)["pool/arena_bytes"] > at_loss
        loss.backward()


@simulated(world=2)
def test_held_bytes_stay_close_to_live_bytes_from_the_first_step_on(rank, world):
    model = sharded(decoder())
    most, lease = [], BufferPool.lease

    def leased(pool, *args):
        slot = lease(pool, *args)
        most.append(pool.held_bytes)
        return slot

    peaks = []
    with patch.object(BufferPool, "lease", leased):
        for step in range(4):
            loss_of(model, step).backward()
            peaks.append(max(most))
            most.clear()
    peak = pool_of(model).peak_bytes
    assert peaks[0] == peak, "in the first step each request has its own memory"
    assert max(peaks[1:]) <= 1.5 * peak
    assert peaks[2] == peaks[3]


@simulated(world=2)
def test_a_steady_step_makes_no_new_allocations(rank, world):
    model = sharded(decoder())
    allocations = []
    for step in range(6):
        loss_of(model, step).backward()
        allocations.append(cs.stats(model)["pool/allocations"])
    assert len({*allocations[2:]}) == 1
    assert cs.stats(model)["pool/fallbacks"] == 0


@pytest.fixture
def moving():
    """Memory that is allocated again has another address, because something else occupies the old one."""
    fill, taken = DeviceMemory.allocate_in, []

    def elsewhere(self, storage, nbytes):
        taken.append(torch.empty(nbytes, dtype=torch.uint8))
        fill(self, storage, nbytes)

    with patch.object(DeviceMemory, "allocate_in", elsewhere):
        yield taken


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshard", [True, more(False)])
@simulated(world=2)
def test_steps_are_exact_while_memory_is_freed_and_allocated_again(rank, world, moving, checkpointed, reshard):
    plain = decoder(checkpointed)
    models = {"plain": plain, "ours": sharded(plain, reshard_after_forward=reshard)}
    optimizers = optimizers_of(models)
    for step in range(6):
        for name, model in models.items():
            if step == 2 and name == "ours":
                model.set_requires_gradient_sync(False)
            if step in (2, 4):  # one microbatch without and one with a reduction
                loss_of(model, 10 + step).backward()
            if name == "ours":
                model.set_requires_gradient_sync(True)
            loss_of(model, step).backward()
            if step == 3:
                with torch.no_grad():
                    loss_of(model, 20)
        assert_alike(models)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        for model in models.values():
            model.eval()
            with torch.no_grad():
                model.last = loss_of(model, step)
            model.train()
        assert torch.equal(models["plain"].last, models["ours"].last)
    assert len(moving) > 12
    assert_at_rest(models["ours"])


@simulated(world=2)
def test_a_view_of_a_weight_keeps_its_memory(rank, world, moving):
    plain = decoder()
    model = sharded(plain)
    kept = []
    inner = model.blocks[1].attention
    hook = inner.register_forward_pre_hook(lambda *_: kept.append(next(inner.parameters()).detach()))
    for step in range(4):
        loss_of(model, step).backward()
        model.zero_grad()
        if step == 1:
            hook.remove()
    want = next(plain.blocks[1].attention.parameters())
    assert all(torch.equal(view, want) for view in kept)
    kept.clear()
    loss_of(model, 0)
    loss_of(model, 0).backward()
    loss_of(model, 0).backward()
    assert held(model) == 0


@pytest.mark.matrix
@simulated(world=2)
def test_compiled_blocks_in_an_eager_root_are_exact(rank, world, moving):
    plain = decoder()
    models = {"plain": plain, "ours": sharded(plain)}
    for block in models["ours"].blocks:
        block.compile(backend="aot_eager")
    for model in models.values():
        model.eval()  # dropout draws different random numbers in a graph
    optimizers = optimizers_of(models)
    for step in range(4):
        for model in models.values():
            loss_of(model, step).backward()
        assert_alike(models)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


@distributed(world=2)
def test_training_stays_exact_after_a_failure_and_a_policy_change(rank, world):
    plain = decoder()
    models = {"plain": plain, "ours": sharded(plain)}
    ours = models["ours"]

    def fail(*_):
        raise ValueError("planned")

    for step in range(6):
        if step == 2:
            hook = ours.blocks[2].register_forward_pre_hook(fail)
            with pytest.raises(ValueError, match="planned"):
                loss_of(ours, step)
            hook.remove()
        if step == 4:
            ours.set_pool_policy(KEEPS)
        for model in models.values():
            model.zero_grad()
            loss_of(model, step).backward()
        assert_alike(models)
        assert (held(ours) == 0) is (step < 4)
