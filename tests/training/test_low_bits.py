"""Weights and gradients that travel in fewer bits: what is computed is what a model computes that rounds them itself."""

import pytest
import torch
from torch import nn

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _low_bits import Ranks, round_weights
from _pool import distributed, more
from composable_shard import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, make_plan
from composable_shard._policies import Wire

BLOCK = 16


def sharded(policy, seed=0, arch=None, **options):
    torch.manual_seed(seed)
    model = Transformer(**(arch or {}))
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.set_comm_policy(policy)
    return model


def plain(seed=0, arch=None):
    torch.manual_seed(seed)
    return Transformer(**(arch or {}))


def groups_of(model):
    return [[param.fqn for param in group.params] for group in make_plan(model).groups]


def gradients_of(model, rank, step):
    """Of a plain model on a rank's batch."""
    model.zero_grad()
    loss = next_token_loss(model, *token_batch(rank, step))
    loss.backward()
    return loss.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}


@distributed(world=(2, more(3)))
@pytest.mark.parametrize(
    ("gather", "reduce", "feedback"),
    [
        ("fp8", "int8", False),
        more("int8", "fp8", False),
        more("bf16", "bf16", False),
        more(None, "fp8", True),
        more("fp8", None, False),
        ("int8", "bf16", True),
    ],
)
def test_a_step_has_the_bits_of_a_model_that_rounds_by_itself(rank, world, gather, reduce, feedback):
    model = sharded(CommPolicy(gather, reduce, block=BLOCK, error_feedback=feedback))
    masters, reference = plain(), plain()
    names, wire = groups_of(model), reduce and Wire(reduce, BLOCK)
    ranks = Ranks(names, wire or Wire("bf16", 8), world, feedback)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, masters)]
    for step in range(3):
        reference.load_state_dict(masters.state_dict())
        if gather:
            round_weights(reference, Wire(gather, BLOCK))
        gradients = [gradients_of(reference, each, step) for each in range(world)]
        loss = next_token_loss(model, *token_batch(rank, step))
        loss.backward()
        assert torch.equal(loss, gradients[rank][0])
        own = [by_name for _, by_name in gradients]
        if reduce:
            mean = ranks.mean(own)
        else:
            mean = {name: sum([each[name] for each in own]) / world for name in own[0]}
        for name, param in model.named_parameters():
            assert torch.equal(param.grad.full_tensor(), mean[name]), name
        for name, param in masters.named_parameters():
            param.grad = mean[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, expected in zip(model.parameters(), masters.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), expected)
