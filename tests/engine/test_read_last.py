"""The host reads from an accelerator which gradients exist only after backward is over."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from composable_shard import testing
from composable_shard.testing import _clocks

EVENTS = []  # in order: blocks whose backward has ended, and host waits for a device event
WAIT = "host waits"


@pytest.fixture
def waits(monkeypatch):
    monkeypatch.setattr(_clocks.Event, "synchronize", lambda event: EVENTS.append(WAIT))


def with_idle_experts():
    """A decoder in which each block has an expert that gets no tokens."""
    torch.manual_seed(0)
    model = Transformer(layers=3)
    for block in model.blocks:
        block.idle = nn.Linear(5, 5)
    return model


def backward(model, step):
    next_token_loss(model, *token_batch(0, step)).backward()


def trained(clock, kept=False, hooked=False, fails=False):
    """Train some steps on a fabric; returns gradients by name and the log of each step. One step may fail."""
    seen, gradients, logs = [], [], []
    with testing.fabric(2, latency_s=1e-5, bandwidth_Bps=1e9, clock=clock):
        model = with_idle_experts()
        for each in (*model.blocks, model):
            cs.fully_shard(each)

        def ended(at):
            EVENTS.append(at)
            if at == 0 and fails and not gradients:
                raise RuntimeError("planned")

        for at, block in enumerate(model.blocks):
            block.register_full_backward_hook(lambda *_, at=at: ended(at))
        if hooked:
            model.blocks[2].attention_norm.weight.register_post_accumulate_grad_hook(
                lambda p: seen.append(p.grad.to_local().clone())
            )
        for step in range(3):
            EVENTS.clear()
            with pytest.raises(RuntimeError, match="planned") if fails and not step else contextlib.nullcontext():
                backward(model, step)
            gradients.append({n: p.grad.to_local().clone() for n, p in model.named_parameters() if p.grad is not None})
            logs.append([*EVENTS])
            if not kept:
                model.zero_grad()
    return gradients, logs, seen


def check_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.usefixtures("waits")
def test_the_host_waits_for_marks_of_missing_gradients_only_after_the_last_block(kept, hooked):
    """A hook on the gradient of a parameter sees it immediately and therefore makes the host wait."""
    gradients, logs, seen = trained("streams", kept, hooked)
    expected, _, seen_there = trained("virtual", kept, hooked)
    check_same(gradients, expected)
    assert len(seen) == 3 * hooked
    assert all(map(torch.equal, seen, seen_there))
    assert not any("idle" in name for each in gradients for name in each)
    assert all("blocks.1.attention.q.weight" in each for each in gradients)
    for log in logs:
        assert log.count(WAIT) == 3
        assert hooked or log.index(WAIT) == 3


@pytest.mark.usefixtures("waits")
def test_marks_that_a_failed_backward_has_not_read_are_discarded():
    gradients, logs, _ = trained("streams", fails=True)
    expected, _, _ = trained("virtual", fails=True)
    check_same(gradients, expected)
    assert WAIT not in logs[0]
    assert [log.index(WAIT) for log in logs[1:]] == [3, 3]
