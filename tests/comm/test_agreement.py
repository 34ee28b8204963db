"""Ranks that would train differently get an error with the difference before their first reduction."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as fsdp2

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import mesh_of
from _pool import distributed, more


def decoder(shard=cs.fully_shard, **options):
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)
    return model


def set_prefetch(model, rank):
    first, second = model.blocks
    if rank:
        first.set_modules_to_forward_prefetch([second])


def set_backward_prefetch(model, rank):
    first, second = model.blocks
    second.set_modules_to_backward_prefetch([first] if rank else [])


DIFFERENCES = {
    "forward prefetch": (set_prefetch, r"group blocks\.0: forward prefetch not set -> blocks\.1"),
    "backward prefetch": (set_backward_prefetch, r"group blocks\.1: backward prefetch nothing -> blocks\.0"),
    "divide factor": (
        lambda model, rank: model.blocks[1].set_gradient_divide_factor(2.0 + rank),
        r"group blocks\.1: gradient divide factor 2\.0 -> 3\.0",
    ),
    "one has a divide factor": (
        lambda model, rank: model.set_gradient_divide_factor(2.0) if rank else None,
        r"group .*: gradient divide factor not set -> 2\.0",
    ),
    "only sums": (
        lambda model, rank: model.blocks[0].set_force_sum_reduction_for_comms(bool(rank)),
        r"group blocks\.0: only sums not set -> True",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
@distributed(world=2)
def test_settings_that_differ_between_ranks_raise_an_error_with_their_names(rank, world, what):
    change, words = DIFFERENCES[what]
    model = decoder()
    change(model, rank)
    with pytest.raises(cs.errors.RankMismatchError, match=f"ranks 0 and 1 have different plans: {words}"):
        next_token_loss(model, *token_batch(rank, 0))


@distributed(world=2)
def test_equal_settings_raise_no_error_and_train_like_the_unsharded_model(rank, world):
    torch.manual_seed(0)
    plain = Transformer()
    models = {"fsdp2": decoder(fsdp2), "ours": decoder()}
    for model in models.values():
        set_prefetch(model, 1)
        set_backward_prefetch(model, 1)
        next_token_loss(model, *token_batch(rank, 0)).backward()
    models["halved"] = decoder()  # FSDP2 does not support this on gloo
    models["halved"].set_gradient_divide_factor(4.0)
    next_token_loss(models["halved"], *token_batch(rank, 0)).backward()
    (sum(next_token_loss(plain, *token_batch(each, 0)) for each in range(world)) / world).backward()
    assert plain.head.weight.grad.abs().max() > 0
    torch.testing.assert_close(models["halved"].head.weight.grad.full_tensor(), plain.head.weight.grad / 2)
    for name in ("fsdp2", "ours"):
        for mine, its in zip(models[name].parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), its.grad)


@pytest.mark.parametrize("what", ["frozen", "divide factor", "dtype"])
@distributed(world=(2, more(4)))
def test_replicas_with_different_plans_raise_an_error_before_their_first_reduction(rank, world, what):
    last = rank == world - 1
    options = {}
    if what == "dtype" and last:
        options["mp_policy"] = cs.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = decoder(mesh=mesh_of(world, 1), **options)
    if what == "frozen":
        model.blocks[1].feed_forward.requires_grad_(not last)
    if what == "divide factor":
        model.set_gradient_divide_factor(3.0 if last else 2.0)
    words = {"frozen": "blocks.1: dtype", "divide factor": "gradient divide factor 2.0 -> 3.0", "dtype": "dtype"}[what]
    loss = next_token_loss(model, *token_batch(rank, 0))
    for _ in range(2):  # a second backward raises the error again
        with pytest.raises(cs.errors.RankMismatchError, match=f"ranks 0 and {world - 1} have different plans.*{words}"):
            loss.backward(retain_graph=True)


@distributed(world=2)
def test_a_replica_may_evaluate_alone_before_it_trains(rank, world):
    torch.manual_seed(0)
    plain = Transformer()
    for shard in (fsdp2, cs.fully_shard):
        model = decoder(shard, mesh=mesh_of(world, 1))
        if not rank:
            with torch.no_grad():
                torch.testing.assert_close(model(*token_batch(0, 0)), plain(*token_batch(0, 0)))
        next_token_loss(model, *token_batch(rank, 0)).backward()
        reference = copy.deepcopy(plain)
        (sum(next_token_loss(reference, *token_batch(each, 0)) for each in range(world)) / world).backward()
        for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), its.grad)


@distributed(world=2)
def test_plans_of_several_meshes_are_compared_on_each(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cs.fully_shard(model[0], mesh=mesh_of(world, 1), reshard_after_forward=not rank)
    cs.fully_shard(model[1], mesh=mesh_of(world))
    cs.fully_shard(model, mesh=mesh_of(world))
    loss = model(torch.ones(1, 4)).sum()
    with pytest.raises(cs.errors.RankMismatchError, match="group 0: reshard"):
        loss.backward()
