"""The debugging checks, and weights that change between forward and backward."""

from __future__ import annotations

import contextlib
import runpy

import pytest
import torch
import torch.nn as nn

import composable_shard
from _engines import fully_shard
from _models import vectors
from _pool import distributed
from _stepping import assert_at_rest, assert_same_gradients, engine_of, loss_of, train_step, twins
from composable_shard._torch import debug
from composable_shard._torch.debug import checksum, poison
from composable_shard.errors import StaleStateError


@contextlib.contextmanager
def debugging():
    before = composable_shard.set_debug(True)
    try:
        yield
    finally:
        composable_shard.set_debug(before)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=(1, 2))
def test_a_correct_model_trains_exactly_under_the_checks(rank, world, reshard):
    model, plain = twins(reshard_after_forward=reshard)
    with debugging():
        for step in range(2):
            train_step(model, step)
    for step in range(2):
        train_step(plain, step)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), p.grad)
    assert_at_rest(model)


@distributed(world=2)
def test_freed_memory_reads_as_nan(rank, world):
    model, _ = twins(reshard_after_forward=True)
    block, memory = model.blocks[0], []

    def read(*_):
        memory.append(block._shard_state.bound.group.buckets[0].slot.typed(torch.float32))

    block.up.register_forward_pre_hook(read)
    with debugging(), torch.no_grad():
        loss_of(model)
    assert memory[0].isnan().all()
    with torch.no_grad():
        loss_of(model)
    assert not memory[1].isnan().all(), "off again"  # gaps between weights may contain NaN


@distributed(world=2)
def test_the_error_for_a_modified_unsharded_weight_names_it(rank, world):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            self.lin.weight.data.mul_(0.5)  # not counted by the version counter
            return self.lin(x)

    model = fully_shard(Writes(), reshard_after_forward=True)
    model(*vectors(rank, 0))  # without the checks, the write is silently lost
    with debugging(), pytest.raises(StaleStateError, match=r"^lin\.weight: edited in place"):
        model(*vectors(rank, 0))


def test_an_environment_variable_switches_the_checks_on(monkeypatch):
    for value, want in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("COMPOSABLE_SHARD_DEBUG", value)
        assert runpy.run_path(debug.__file__)["debugging"] is want


def test_poison_is_nan_in_every_dtype_and_a_checksum_detects_a_swap():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        memory = torch.zeros(8, dtype=dtype)
        poison(memory)
        assert memory.isnan().all()
    values = torch.tensor([1.0, 2.0, 3.0])
    assert checksum(values) == checksum(values.clone())
    assert checksum(values) != checksum(values.flip(0))


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_a_load_between_forward_and_backward_is_an_error_like_without_sharding(rank, world, reshard):
    model, plain = twins(reshard_after_forward=reshard)
    losses = [loss_of(model), loss_of(plain)]
    for each in (model, plain):
        each.load_state_dict(each.state_dict())
    with pytest.raises(StaleStateError, match=r"a load or .* has changed them between forward and backward"):
        losses[0].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()
    for each in (model, plain):
        each.zero_grad()
        train_step(each)
    assert_same_gradients(model, plain)
    assert engine_of(model).pool.live_bytes == 0
