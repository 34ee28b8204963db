"""Refreshes and other uses of compute copies are ordered on the streams of an accelerator (simulated)."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn as nn

from _engines import fully_shard
from composable_shard import testing
from composable_shard._group.refresh import NodeCopy
from composable_shard._memory.device import DeviceMemory

OUTER = {"outer_sharding": "optimizer"}
MESH = {"replicate": 2, "shard": 2}


class Skipping(nn.Module):
    """Runs some of its layers, each after operators whose memory is reused."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, chosen):
        for index in chosen:
            for _ in range(3):
                x = x * 1.01 + 0.1
            x = self.layers[index](x)
        return x


def train(model, x, chosen):
    model(x, chosen).square().mean().backward()
    model.zero_grad()


def add(model, value):
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), value)


def replaced(model, x):
    """A layer that the plan does not know gets a new copy in the middle of a forward."""
    for _ in range(2):
        train(model, x, (0, 2))
    model.layers[0].weight = nn.Parameter(model.layers[0].weight.detach() * 2)
    train(model, x, (0, 2))
    train(model, x, (0, 1, 2))


def converted(model, x):
    for _ in range(2):
        train(model, x, (0, 2))
    model.to(torch.bfloat16)
    train(model, x.bfloat16(), (0, 2))
    train(model, x.bfloat16(), (0, 1, 2))


def unread(model, x):
    """A copy that was refreshed and not read, before the shards are written."""
    with torch.no_grad():
        model(x, (0,))  # also prefetches layer 1
        add(model, 1.0)
        model(x, (0, 1, 2))


def races_of(body):
    with testing.races(4, mesh=MESH, check=False) as checked:
        torch.manual_seed(0)
        model = Skipping()
        for layer in model.layers:
            fully_shard(layer, mesh=checked.mesh, **OUTER)
        fully_shard(model, mesh=checked.mesh, **OUTER)
        body(model, torch.randn(64, 16))
    return checked.report()


def with_an_early_event(model, x):
    """The forward waits for an event of the user, and new copies get memory that was used after it."""
    train(model, x, (0, 1, 2))
    model.to(torch.bfloat16)
    event = torch.cpu.Event()
    event.record()
    for _ in range(8):
        x = x * 1.01 + 0.1
    x = x.bfloat16()
    model.set_post_optim_event(event)
    train(model, x, (0, 1, 2))


@pytest.mark.filterwarnings("ignore:rank 0. a root forward deviated")
@pytest.mark.parametrize("body", [replaced, converted, unread, with_an_early_event])
def test_there_are_no_races(body):
    assert races_of(body) == ""


@pytest.mark.filterwarnings("ignore:rank 0. a root forward deviated")
def test_new_copies_wait_for_earlier_uses_of_their_memory():
    real = NodeCopy.refresh

    def refresh(*args):
        with mock.patch.object(DeviceMemory, "current_events", return_value=()):
            real(*args)

    with mock.patch.object(NodeCopy, "refresh", refresh):
        assert "aten.empty" in races_of(with_an_early_event)


@pytest.mark.filterwarnings("ignore:rank 0. a root forward deviated")
def test_writes_to_shards_wait_for_refreshes_that_no_gather_has_read():
    with mock.patch.object(NodeCopy, "settle", return_value=None):
        assert "all_gather reads" in races_of(unread)
