"""Prefetch and pool policies: the engine follows the plan, within its budget, with bitwise identical results."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _engines import fully_shard
from _models import Stack, shard_blocks, shard_nested, vectors
from _pool import distributed
from _stepping import engine_of

P = cs.PrefetchPolicy
POLICIES = {
    "none ahead": (P.depth(0), None),
    "one ahead": (P.depth(1), None),
    "three ahead": (P.depth(3), None),
    "some bytes ahead": (P.bytes(4096), None),
    "all ahead": (P.bytes(1 << 30), None),
    "the least budget": (None, "least"),
    "three ahead within what one takes": (P.depth(3), "default"),
    "measured": (P.auto(), None),
    "measured, with memory to keep": (P.auto(), "all"),
}


class Uneven(nn.Module):
    """Blocks of different sizes; two of them are checkpointed."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, n), nn.ReLU(), nn.Linear(n, 6)) for n in (40, 5, 70, 12))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for at, block in enumerate(self.blocks):
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed and at % 2 else block(x))
        return x


def budget_of(name, model):
    plan = cs.make_plan(model)
    if name == "least":
        with pytest.raises(cs.errors.PoolBudgetError) as caught:
            plan.with_policies(pool=cs.PoolPolicy(budget=1))
        return caught.value.least
    return plan.peak_bytes if name == "default" else sum(group.unsharded_bytes for group in plan.groups) * 3


def train(model, rank, steps=6):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(*vectors(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor() for param in model.parameters()]


def made(build, shard, prefetch=None, pool=None, **options):
    torch.manual_seed(3)
    model = build()
    shard(model, fully_shard, **options)
    if prefetch is not None:
        model.set_prefetch_policy(prefetch)
    if pool is not None:
        model.set_pool_policy(pool)
    return model


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("build", [Stack, Uneven])
@distributed(world=2)
def test_a_step_follows_the_plan_within_its_budget_and_is_bitwise_identical(rank, world, build, name):
    prefetch, budget = POLICIES[name]
    plain = made(build, shard_blocks)
    pool = None if budget is None else cs.PoolPolicy(budget=budget_of(budget, plain))
    model = made(build, shard_blocks, prefetch, pool)
    expected, found = train(plain, rank), train(model, rank)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    plan, record = cs.make_plan(model), cs.last_record(model)
    assert list(map(str, record.actions)) == list(map(str, plan.actions()))
    assert record.live_bytes == plan.live_bytes()
    if pool is not None:
        assert engine_of(model).pool.peak_bytes <= pool.budget
    assert (plan.costs is not None) == (prefetch == P.auto())


@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(world=2)
def test_a_budget_holds_with_recomputation_accumulation_and_validation(rank, world, reshard):
    torch.manual_seed(3)
    plain = Uneven(checkpointed=True)
    model = copy.deepcopy(plain)
    shard_blocks(model, fully_shard, reshard_after_forward=reshard)
    budget = budget_of("least", model)
    model.set_pool_policy(cs.PoolPolicy(budget=budget))
    for step in range(4):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            for each in (model, plain):
                each(*vectors(0, 2 * step + micro)).square().mean().backward()
        with torch.no_grad():
            assert torch.equal(model(*vectors(0, step)), plain(*vectors(0, step)))
        for name, param in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)
        model.zero_grad()
        plain.zero_grad()
    assert engine_of(model).pool.peak_bytes <= budget


@distributed(world=2)
def test_a_budget_that_is_too_small_is_an_error_before_any_action(rank, world):
    model = made(Uneven, shard_blocks, pool=cs.PoolPolicy(budget=4096))
    least = budget_of("least", made(Uneven, shard_blocks))
    for _ in range(2):
        with pytest.raises(cs.errors.PoolBudgetError, match=r"group blocks\.2 does not fit") as caught:
            model(*vectors(rank, 0))
        assert caught.value.least == least
    model.set_pool_policy(cs.PoolPolicy(budget=least))
    train(model, rank, 2)
    with pytest.raises(cs.errors.PoolBudgetError):
        model.set_pool_policy(cs.PoolPolicy(budget=least - 1))
    train(model, rank, 2)
    assert cs.make_plan(model).pool.budget == least, "a refused change has no effect"
    assert engine_of(model).pool.peak_bytes <= least


@distributed(world=2)
def test_a_change_of_settings_makes_a_new_plan(rank, world):
    model = made(Stack, shard_blocks, P.depth(2), reshard_after_forward=True)
    train(model, rank, 2)
    model.blocks[0].set_reshard_after_forward(False)
    train(model, rank, 3)
    plan, record = cs.make_plan(model), cs.last_record(model)
    assert plan.effective_schedule().kept == ("blocks.0",)
    assert record.actions == plan.actions()
    assert record.live_bytes == plan.live_bytes()


def costs(plan, **seconds):
    each = {group.fqn: 1.0 for group in plan.groups}
    return cs.Costs.of(
        latency=0.0,
        bandwidth=1e9,
        **{part: each | seconds.get(part, {}) for part in ("forward", "backward", "gather", "reduce")},
    )


@distributed(world=2)
def test_a_plan_made_in_another_process_can_be_followed(rank, world):
    model = made(Uneven, shard_blocks)
    plan = cs.make_plan(model)
    budget = sum(group.unsharded_bytes for group in plan.groups)
    wanted = plan.with_policies(P.auto(), cs.PoolPolicy(budget=budget), costs(plan, gather={"blocks.2": 9.0}))
    assert wanted.effective_schedule().kept != plan.effective_schedule().kept
    model.set_plan(cs.ShardPlan.from_json(wanted.to_json()))
    train(model, rank, 3)
    assert cs.make_plan(model).diff(wanted) == ""
    assert cs.last_record(model).actions == wanted.actions()
    other = made(Stack, shard_blocks)
    other.set_plan(wanted)
    with pytest.raises(cs.errors.ShardConfigValueError, match="another model"):
        other(*vectors(rank, 0))


@distributed(world=2)
def test_measured_times_are_the_same_on_all_ranks(rank, world):
    model = made(Stack, shard_nested, P.auto())
    train(model, rank, 5)
    plan = cs.make_plan(model)
    found = [None] * world
    torch.distributed.all_gather_object(found, (plan.digest, plan.costs, plan.schedule))
    assert found[0] == found[1]
    assert all(seconds >= 0 for _, seconds in plan.costs.forward)
    assert sum(seconds for _, seconds in plan.costs.gather) > 0


class Either(nn.Module):
    """A model that ranks build differently."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6)) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Sequential(*self.blocks)(self.inp(x))


DIFFERENT = {
    "a size": (lambda rank: Either(4 + rank, 2), {}),
    "a number of blocks": (lambda rank: Either(4, 2 + rank), {}),
    "a setting": (lambda rank: Either(4, 2), lambda rank: {"reshard_after_forward": bool(rank)}),
    "a dtype": (
        lambda rank: Either(4, 2),
        lambda rank: {"mp_policy": cs.MixedPrecisionPolicy(*((torch.bfloat16,) * 2 if rank else ()))},
    ),
}


@distributed(world=2)
def test_different_plans_are_an_error_on_all_ranks_before_any_communication(rank, world):
    words = []
    for build, options in DIFFERENT.values():
        model = build(rank)
        shard_blocks(model, fully_shard, **(options(rank) if callable(options) else options))
        with pytest.raises(cs.errors.RankMismatchError) as caught:
            model(*vectors(rank, 0))
        words.append(re.sub(r" Build and shard.*", "", str(caught.value)))
        assert cs.last_record(model) is None
    found = [None] * world
    torch.distributed.all_gather_object(found, words)
    assert found[0] == found[1], "the message is the same on all ranks"
    if rank == 0:
        assert_expected_inline(
            "\n".join(words).replace("; ", ";\n    "),
            """\
ranks 0 and 1 have different plans: group blocks.0: shape of blocks.0.0.weight (4, 6) -> (5, 6);
    shape of blocks.0.0.bias (4,) -> (5,);
    shape of blocks.0.1.weight (6, 4) -> (6, 5).
ranks 0 and 1 have different plans: group blocks.2: added.
ranks 0 and 1 have different plans: group (root): reshard after backward -> after forward.
ranks 0 and 1 have different plans: group (root): dtype float32 -> float32 as bfloat16.""",
        )


@distributed(world=1)
def test_policies_are_checked_for_type_and_accepted_by_the_root_only(rank, world):
    model = made(Stack, shard_blocks)
    with pytest.raises(cs.errors.ShardConfigTypeError, match="policy: expected a PrefetchPolicy, got int"):
        model.set_prefetch_policy(2)
    with pytest.raises(cs.errors.ShardConfigTypeError, match="policy: expected a PoolPolicy, got int"):
        model.set_pool_policy(1024)
    with pytest.raises(cs.errors.ShardConfigTypeError, match="plan: expected a ShardPlan, got str"):
        model.set_plan("plan.json")
    model.blocks[1].set_prefetch_policy(P.depth(2))
    with pytest.raises(cs.errors.ShardConfigStateError, match=r"blocks\.1: a policy or a plan was set on this module"):
        model(*vectors(0, 0))
    other = made(Stack, shard_blocks)
    other(*vectors(0, 0))
    with pytest.raises(cs.errors.ShardConfigStateError, match="are for the root"):
        other.blocks[0].set_pool_policy(cs.PoolPolicy(budget=1 << 20))
