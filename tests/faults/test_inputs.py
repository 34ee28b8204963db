"""Bad inputs before training raise a subclass of `ShardConfigError` that names the parameter, module or setting.

The message is the same on all ranks, and ranks can continue afterwards.
"""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _decoders import Training
from _measuring_ranks import LOOPBACK, listening
from _pool import distributed
from composable_shard.planner.machine import KNOWN, Machine
from composable_shard.planner.ranks import on_ranks

LIMIT_S = 60.0


def everywhere(world, what):
    each = [None] * world
    dist.all_gather_object(each, what)
    return each


def sharded(model):
    for block in model.blocks:
        cs.fully_shard(block)
    return cs.fully_shard(model)


def shard_a_scalar(model):
    model.blocks[1].attention.scale = nn.Parameter(torch.tensor(2.0))
    sharded(model)


def shard_what_is_not_contiguous(model):
    gate = model.blocks[2].feed_forward.gate
    gate.weight = nn.Parameter(gate.weight.detach().t())
    sharded(model)


def shard_a_block_twice(model):
    sharded(model)
    cs.fully_shard(model.blocks[1])


def shard_the_parent_first(model):
    cs.fully_shard(model)
    cs.fully_shard(model.blocks[0])


def tie_across_groups(model):
    model.blocks[2].attention.q.weight = model.blocks[0].attention.q.weight
    sharded(model)


def shard_the_list_of_blocks(model):
    cs.fully_shard(model.blocks)


def leave_blocks_on_meta(model):
    model.blocks[1].to("meta")
    sharded(model)(*token_batch(0, 0))


def step_an_optimizer_of_before(model):
    optimizer = torch.optim.AdamW(model.parameters())
    sharded(model)
    next_token_loss(model, *token_batch(dist.get_rank(), 0)).backward()
    shards = [param.to_local() for param in model.parameters()]
    before = [shard.clone() for shard in shards]
    try:
        optimizer.step()
    finally:
        assert all(map(torch.equal, shards, before))


def build_an_optimizer_of_unsharded_weights(model):
    sharded(model)(*token_batch(0, 0))  # the root's own group stays unsharded until backward
    torch.optim.AdamW(model.parameters()).step()


def add_a_parameter_later(model):
    next_token_loss(sharded(model), *token_batch(0, 0)).backward()
    model.blocks[1].feed_forward.scale = nn.Parameter(torch.ones(16))
    model(*token_batch(0, 1))


def unshard_after_a_wrong_number_of_ranks(model):
    cs.fully_shard(model.blocks[0], reshard_after_forward=3)


CASES = {
    shard_a_scalar: (ValueError, r"attention\.scale"),
    shard_what_is_not_contiguous: (NotImplementedError, r"feed_forward\.gate\.weight"),
    shard_a_block_twice: (ValueError, "already"),
    shard_the_parent_first: (ValueError, r"\(as blocks\.0\.attention_norm\.weight\); call fully_shard on inner"),
    tie_across_groups: (ValueError, r"attention\.q\.weight.* group.*The other parameter is attention\.q\.weight"),
    shard_the_list_of_blocks: (ValueError, "ModuleList"),
    leave_blocks_on_meta: (RuntimeError, r"blocks\.1\.attention\.q\.weight"),
    step_an_optimizer_of_before: (RuntimeError, r"the optimizer holds .*weight.* from before fully_shard"),
    build_an_optimizer_of_unsharded_weights: (RuntimeError, r"head\.weight"),
    add_a_parameter_later: (RuntimeError, r"feed_forward\.scale: were added after fully_shard"),
    unshard_after_a_wrong_number_of_ranks: (ValueError, "reshard_after_forward"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@distributed(world=2, limit_s=LIMIT_S)
def test_errors_for_bad_inputs_are_the_same_on_all_ranks(rank, world, case):
    kind, words = CASES[case]
    torch.manual_seed(0)
    with pytest.raises(kind, match=words) as caught:
        case(Transformer(layers=3))
    assert isinstance(caught.value, cs.errors.ShardConfigError)
    assert len({*everywhere(world, str(caught.value))}) == 1
    Training(rank, world).goes_on_exactly()


def with_field(text, **fields):
    return json.dumps({**json.loads(text), **fields})


SETTINGS = {
    "PoolPolicy.budget=nan": lambda model: cs.PoolPolicy(budget=math.nan),
    "PoolPolicy.budget=-1": lambda model: cs.PoolPolicy(budget=-1),
    "PrefetchPolicy.depth=-1": lambda model: cs.PrefetchPolicy.depth(-1),
    "PrefetchPolicy.bytes=nan": lambda model: cs.PrefetchPolicy.bytes(math.nan),
    "PrefetchPolicy.kind='automatic'": lambda model: cs.PrefetchPolicy("automatic"),
    "policy: expected a PrefetchPolicy": lambda model: model.set_prefetch_policy("auto"),
    "factor: .* got nan": lambda model: model.set_gradient_divide_factor(math.nan),
    "factor: .* got inf": lambda model: model.set_gradient_divide_factor(math.inf),
    "factor: .* got -2.0": lambda model: model.set_gradient_divide_factor(-2.0),
    "min_bytes: .* got nan": lambda model: cs.shard_by_size(nn.Linear(2, 2), min_bytes=math.nan),
    "max_norm: .* got nan": lambda model: cs.clip_grad_norm_(model.parameters(), math.nan),
    "max_norm: .* got -1.0": lambda model: cs.clip_grad_norm_(model.parameters(), -1.0),
    "reshard_after_forward .*'yes'": lambda model: cs.fully_shard(nn.Linear(2, 2), reshard_after_forward="yes"),
    "plan: unknown fields: colour": lambda model: cs.ShardPlan.from_json(
        with_field(cs.make_plan(model).to_json(), colour=1)
    ),
    "argument 'colour'": lambda model: Machine.from_json(with_field(KNOWN["l40s"].to_json(), colour=1)),
    "Machine.memory=nan": lambda model: Machine.from_json(with_field(KNOWN["l40s"].to_json(), memory=math.nan)),
}


@distributed(world=2, limit_s=LIMIT_S)
def test_invalid_settings_are_named_and_change_nothing(rank, world):
    run = Training(rank, world, layers=1)
    run.backward()
    plan, gradients = cs.make_plan(run.model).to_json(), [param.grad.to_local() for param in run.model.parameters()]
    before = [gradient.clone() for gradient in gradients]
    for words, setting in SETTINGS.items():
        with pytest.raises(cs.errors.ShardConfigError, match=words):
            setting(run.model)
    assert all(map(torch.equal, gradients, before))
    assert cs.make_plan(run.model).to_json() == plan
    run.optimizer.zero_grad()
    run.goes_on_exactly()


@pytest.mark.parametrize(
    "call",
    [
        lambda: cs.fully_shard(nn.Linear(2, 2), reshard_after=True),
        lambda: cs.shard_auto(nn.Linear(2, 2), reshard_after=True),
        lambda: cs.PoolPolicy(reshard_after=True),
    ],
)
def test_an_unknown_option_raises_pythons_error_with_its_name(call):
    with pytest.raises(TypeError, match="unexpected keyword argument 'reshard_after'"):
        call()


@pytest.mark.matrix
def test_sockets_opened_by_this_library_listen_on_this_machine_only():
    before, meanwhile = listening(), []
    of_ranks = on_ranks("_measuring_ranks:listen", 2, timeout=60, progress=lambda *_: meanwhile.append(listening()))
    addresses = {address for rank in of_ranks for address in rank} | {*meanwhile[0]} - {*before}
    assert len(addresses) >= 3, "a store, and one connection per rank"
    assert {address.split(":")[0] for address in addresses} <= LOOPBACK


def with_a_wider_block(rank):
    return sharded(Transformer(layers=2, hidden=24 + 8 * rank))


def shard_something_else(rank):
    """Ranks number their models by calls of `fully_shard`, so all of them make the same number of calls."""
    if rank:
        cs.fully_shard(nn.Linear(2, 2))


def with_a_block_less(rank):
    shard_something_else(rank)
    return sharded(Transformer(layers=3 - rank))


def with_a_block_in_the_group_of_the_root(rank):
    shard_something_else(rank)
    model = Transformer(layers=2)
    for block in model.blocks[rank:]:
        cs.fully_shard(block)
    return cs.fully_shard(model)


def with_a_block_of_another_dtype(rank):
    model = Transformer(layers=2)
    if rank:
        model.blocks[1].to(torch.bfloat16)
    return sharded(model)


DIFFERENCES = {
    with_a_wider_block: r"group blocks\.0",
    with_a_block_less: r"blocks\.2",
    with_a_block_in_the_group_of_the_root: r"blocks\.0",
    with_a_block_of_another_dtype: r"group blocks\.1.*bfloat16",
}


@pytest.mark.parametrize("make", DIFFERENCES, ids=lambda make: make.__name__)
@distributed(world=2, limit_s=LIMIT_S)
def test_models_that_differ_between_ranks_are_an_error_before_any_communication(rank, world, make):
    model = make(rank)
    with pytest.raises(cs.errors.RankMismatchError, match="ranks 0 and 1 have different plans: ") as caught:
        model(*token_batch(rank, 0))
    assert re.search(DIFFERENCES[make], str(caught.value)), caught.value
    assert len({*everywhere(world, str(caught.value))}) == 1
    assert all(param.grad is None for param in model.parameters())
    Training(rank, world).goes_on_exactly()
