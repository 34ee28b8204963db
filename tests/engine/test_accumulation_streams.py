"""Gradients discarded between microbatches, on an accelerator: detected by versions of `.grad`, never by values."""

from __future__ import annotations

import pytest
import torch

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from composable_shard import testing


def trained(clock, give_up, steps=2):
    """Gradients added up over steps of three microbatches each; `give_up` discards some of the gradients."""
    with testing.fabric(2, latency_s=1e-5, bandwidth_Bps=1e9, clock=clock):
        torch.manual_seed(0)
        model = Transformer(layers=2)
        for each in (*model.blocks, model):
            cs.fully_shard(each)
        for step in range(steps):
            for at in range(3):
                model.set_requires_gradient_sync(at == 2)
                next_token_loss(model, *token_batch(step, at)).backward()
                if at == 0:
                    give_up(model)
        return {name: param.grad.to_local().clone() for name, param in model.named_parameters()}


def nothing(model):
    pass


def to_none(model):
    model.zero_grad()


def to_zero(model):
    model.zero_grad(set_to_none=False)


def some_to_zero(model):
    torch.optim.SGD(model.blocks[0].attention.parameters()).zero_grad(set_to_none=False)


def twice_as_much(model):
    """Double `.grad`; gradients accumulated elsewhere are not scaled."""
    for param in model.parameters():
        param.grad.mul_(2)


@pytest.mark.parametrize("give_up", [nothing, to_none, to_zero, some_to_zero, twice_as_much])
def test_discarded_gradients_between_microbatches_are_the_same_with_streams(give_up):
    found, expected = trained("streams", give_up), trained("virtual", give_up)
    kept = trained("virtual", nothing)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    same = [torch.equal(expected[name], kept[name]) for name in expected]
    assert all(same) == (give_up is nothing)
    assert any(same) == (give_up in (nothing, some_to_zero))


def by_foreach(model):
    torch.optim.AdamW(model.parameters(), foreach=True).zero_grad(set_to_none=False)


def test_an_undetectable_change_of_reduced_gradients_is_an_error():
    with pytest.raises(RuntimeError, match=r"leaves no trace on an accelerator.*set_to_none=True"):
        trained("streams", by_foreach)
    found, expected = trained("virtual", by_foreach), trained("virtual", to_zero)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
