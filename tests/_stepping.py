"""Small sharded models with unsharded copies, training steps of both, and checks of the engine's state."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from _engines import fully_shard
from _models import Stack, shard_blocks, vectors
from composable_shard._group.group import ParamGroup
from composable_shard._group.phases import ParamPhase


def engine_of(model):
    return model._shard_state.bound.engine


def twins(model_type=Stack, shard=shard_blocks, **options):
    """A sharded model and an unsharded copy. With the same data on all ranks, their gradients are equal."""
    torch.manual_seed(3)
    plain = model_type()
    model = copy.deepcopy(plain)
    shard(model, fully_shard, **options)
    return model, plain


def assert_same_gradients(model, plain):
    for name, param in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (param.grad is None), name
        if grad is not None:
            assert isinstance(grad, DTensor), name
            assert torch.equal(grad.full_tensor(), param.grad), name


def loss_of(model, step=0):
    return model(*vectors(0, step)).square().mean()


def train_step(model, step=0):
    loss_of(model, step).backward()


def assert_at_rest(model):
    """Check that all weights are sharded and all memory is free."""
    engine = engine_of(model)
    assert {group.fqn: group.phase for group in engine.groups} == dict.fromkeys(
        (group.fqn for group in engine.groups), ParamPhase.SHARDED
    )
    assert engine.pool.live_bytes == 0
    assert all(isinstance(p, DTensor) for p in model.parameters())


def resident(model):
    return [group.name for group in engine_of(model).groups if group.phase is not ParamPhase.SHARDED]


def kinds(record, kind):
    return [action.fqn for action in record.actions if action.kind == kind]


@contextlib.contextmanager
def counted_gathers():
    """Record the FQNs of all groups whose gather is issued."""
    found, real = [], ParamGroup.start_gather

    def counted(group, after):
        found.append(group.fqn)
        real(group, after)

    ParamGroup.start_gather = counted
    try:
        yield found
    finally:
        ParamGroup.start_gather = real


def pool_of(model):
    return model._shard_state.bound.engine.pool


def shard_whole(model, fully_shard, **options):
    fully_shard(model, **options)


class OneLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, x):
        return torch.sigmoid(self.lin(x))
