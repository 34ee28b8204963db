"""What a capture of `make_graphed_step` keeps out: the garbage collector, and casts that autocast has cached."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _pool import distributed
from _replaying import captures_on_cpu


def decoder():
    torch.manual_seed(0)
    model = Transformer(layers=1)
    return cs.fully_shard(model)


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
@distributed(world=2)
def test_the_garbage_collector_is_off_in_a_capture_and_as_before_after_it(rank, world, is_on):
    model, seen, errors = decoder(), [], []

    def step(tokens):
        seen.append((captures.number() > 0, gc.isenabled()))
        loss = next_token_loss(model, tokens)
        loss.backward()
        if captures.number() and errors:
            raise errors.pop()
        return loss.detach()

    call = cs.make_graphed_step(step)
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        with captures_on_cpu() as captures:
            for number in range(2):
                call(*token_batch(rank, number))
                model.zero_grad()
            errors.append(ValueError("stop"))
            with pytest.raises(ValueError, match="stop"):
                call(*token_batch(rank, 2))
            assert gc.isenabled() is is_on
            call(*token_batch(rank, 3))
            assert gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()
    assert seen == [(False, is_on), (False, is_on), (True, False), (True, False)]
    assert call.replays == 1


@distributed(world=2)
def test_a_replay_uses_current_weights_if_autocast_had_cached_a_cast_before_the_capture(rank, world):
    models = [decoder(), decoder()]
    critics = [nn.Linear(37, 1), nn.Linear(37, 1)]
    critics[1].load_state_dict(critics[0].state_dict())
    optimizers = [torch.optim.SGD(critic.parameters(), lr=0.5) for critic in critics]

    def make(model, critic):
        def step(tokens):
            loss = next_token_loss(model, tokens) + critic(model(tokens)).float().mean()
            loss.backward()
            # A cast in a real capture has no values before a replay, so later eager code must not find it.
            assert torch.is_autocast_cache_enabled() == (captures.number() == 0)
            return loss.detach()

        return step

    graphed = cs.make_graphed_step(make(models[0], critics[0]), modules=critics[:1])
    eager = make(models[1], critics[1])
    with captures_on_cpu() as captures:
        for number in range(5):
            tokens, losses = token_batch(rank, number)[0], []
            for call, critic in zip((graphed, eager), critics, strict=True):
                with torch.autocast("cpu"):
                    critic(torch.ones(37))  # caches a cast of the weight
                    losses.append(call(tokens))
                    assert torch.is_autocast_cache_enabled()
            assert torch.equal(*losses), number
            assert torch.equal(critics[0].weight.grad, critics[1].weight.grad), number
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for model in models:
                model.zero_grad()
        assert (graphed.captures, graphed.replays) == (1, 3)
