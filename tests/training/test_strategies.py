"""All named strategies train the same, and each keeps the parameters in memory that its name implies."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import composable_shard
from _models import Block, Stack, vectors
from _parity import Case, check_parity, plain_step
from _pool import distributed, more

SHARDED = ["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"]
KEEP = ("ddp", "zero1")  # parameters stay unsharded after backward, until the optimizer steps


def shard_as(strategy, model, engine=None, **options):
    return composable_shard.shard_by_class(model, {Block}, strategy=strategy, **options)


def strategy_case(strategy, options=None, **case):
    shard = functools.partial(shard_as, strategy, **(options or {}))
    return Case(model=Stack, shard=shard, fsdp2=False, ends_sharded=strategy not in KEEP, **case)


def accumulate(run):
    run.set_sync(False)
    run.backward(run.loss(0))
    run.set_sync(True)
    loss = run.loss(1)
    run.backward(loss)
    return loss


@pytest.mark.parametrize(
    ("train", "optimizer"),
    [(plain_step, "adamw"), (accumulate, "sgd"), more(plain_step, "sgd"), more(accumulate, "adamw")],
    ids=["plain-adamw", "accumulated-sgd", "plain-sgd", "accumulated-adamw"],
)
@pytest.mark.parametrize("strategy", SHARDED)
@distributed(world=2)
def test_every_strategy_trains_like_the_unsharded_model(rank, world, strategy, optimizer, train):
    case = strategy_case(strategy, train=train, optimizer=optimizer)
    check_parity(case, rank, world)


@pytest.mark.parametrize("strategy", SHARDED)
@distributed(world=1)
def test_every_strategy_works_on_one_rank(rank, world, strategy):
    check_parity(strategy_case(strategy), rank, world)


ORDERS = {"zero1": None, "zero2": None, "zero3": None, "hsdp": (2, 2), "hfsdp": (2, 2)}


@pytest.mark.parametrize("strategy", ORDERS)
@distributed(world=4)
def test_strategies_match_the_reference_on_four_ranks(rank, world, strategy):
    replicas = {"replicas": 2} if strategy in ("hsdp", "hfsdp") else {}
    check_parity(strategy_case(strategy, replicas, mesh=ORDERS[strategy]), rank, world)


@distributed(world=4)
def test_replication_over_four_ranks_matches_the_reference(rank, world):
    why = "in an all-reduce of four ranks, gloo decides the order of the sum"
    check_parity(strategy_case("ddp", mesh=(4, 1), atol_reference=2e-6, why=why), rank, world)


@distributed(world=2)
def test_the_strategy_none_does_not_change_the_model(rank, world):
    model = Stack()
    before = dict(model.named_parameters())
    assert shard_as("none", model) == []
    assert type(model) is Stack
    assert all(p is before[n] for n, p in model.named_parameters())


@distributed(world=2)
def test_ddp_replicates_full_parameters(rank, world):
    model = Stack()
    shard_as("ddp", model)
    for name, param in model.named_parameters():
        assert param.placements == (Replicate(), Shard(0)), name
        assert param.to_local().shape == param.shape, name


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@distributed(world=2)
def test_the_zero_stages_shard_over_all_ranks(rank, world, strategy):
    model = Stack()
    shard_as(strategy, model)
    for name, param in model.named_parameters():
        assert param.placements == (Shard(0),), name
        assert param.to_local().shape[0] * 2 == param.shape[0], name


@pytest.mark.parametrize(("strategy", "resident"), [("zero1", True), ("zero2", True), ("zero3", False)])
@distributed(world=2)
def test_only_zero3_reshards_the_blocks_after_forward(rank, world, strategy, resident):
    model = Stack()
    shard_as(strategy, model)
    model(*vectors(rank, 0))
    whole = [not isinstance(p, DTensor) for block in model.blocks for p in block.parameters()]
    assert whole == [resident] * len(whole)


@distributed(world=2)
def test_zero1_gathers_once_for_all_microbatches_and_again_after_a_step(rank, world):
    """The weights stay gathered from backward to the step. Clipping and the optimizer use the sharded parameters."""
    model = Stack()
    shard_as("zero1", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def gathers():
        model(*vectors(rank, 0)).square().mean().backward()
        record = composable_shard.last_record(model)
        return sum(str(action).startswith("UNSHARD") for action in record.actions)

    groups = len(composable_shard.make_plan(model).groups)
    assert gathers() == groups
    assert gathers() == 0
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizer.step()
    assert gathers() == groups


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@distributed(world=2)
def test_clipping_works_with_every_strategy(rank, world, strategy):
    model = Stack()
    shard_as(strategy, model)
    model(*vectors(rank, 0)).square().mean().backward()
    before = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3).full_tensor()
    after = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3).full_tensor()
    assert before > 1e-2
    torch.testing.assert_close(after, torch.tensor(1e-3), rtol=1e-3, atol=0)


@distributed(world=4)
def test_hsdp_has_the_given_number_of_replicas(rank, world):
    model = Stack()
    shard_as("hsdp", model, replicas=2)
    for name, param in model.named_parameters():
        assert param.placements == (Replicate(), Shard(0)), name
        assert tuple(param.device_mesh.shape) == (2, 2), name


@pytest.mark.parametrize("strategy", SHARDED)
@distributed(world=2)
def test_every_sharding_strategy_returns_the_sharded_modules(rank, world, strategy):
    model = Stack()
    sharded = shard_as(strategy, model)
    assert sharded == [*model.blocks, model]
    assert all(isinstance(m, composable_shard.FSDPModule) for m in sharded)
