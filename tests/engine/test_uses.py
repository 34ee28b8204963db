"""Nested groups, and groups that run several times in a step: actions are those of the plan."""

from __future__ import annotations

import functools
import random
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline

import composable_shard as cs
from _models import InOrder, Stack, shard_blocks, shard_nested
from _nests import POLICIES as NEST_POLICIES
from _nests import Nests, shard_nests
from _plans import block_plan
from _pool import more, simulated
from _stepping import assert_at_rest, loss_of, train_step, twins
from composable_shard._plan.plan import Phase, Record, ShardPlan, replan
from composable_shard._plan.schedule import Kind

P = cs.PrefetchPolicy


# ---- models


class Lent(nn.Module):
    """A block that runs a module which belongs to another module."""

    def __init__(self, inner):
        super().__init__()
        self.down = nn.Linear(6, 6)
        self.lent = [inner]

    def forward(self, x):
        return x + self.down(F.gelu(self.lent[0](x)))


class Shared(nn.Module):
    """One module that runs alone, inside each block, and once more at the end if requested."""

    def __init__(self, ends=False):
        super().__init__()
        self.inp, self.shared = nn.Linear(4, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Lent(self.shared) for _ in range(2))
        self.ends = ends

    def forward(self, x):
        x = self.shared(self.inp(x))
        for block in self.blocks:
            x = block(x)
        return self.shared(x) if self.ends else x


def shard_shared(model, engine, **options):
    for module in (model.shared, *model.blocks, model):
        engine(module, **options)


def shard_deep(model, engine, **options):
    """Four levels: a Linear in a list that is not a module, its block, all blocks, the model."""
    for block in model.blocks:
        engine([block.norm, block.down], **options)  # modules between these two run inside the list's group
        engine(block.up, **options)
        engine(block, **options)
    engine(model, **options)


MODELS = {
    "inside": (Stack, shard_nested),
    "inside of a list": (Stack, shard_deep),
    "in a row": (functools.partial(InOrder, (0, 0, 1, 1)), shard_blocks),
    "inside and in turns": (functools.partial(InOrder, (0, 1, 1, 0, 1)), shard_nested),
    "in several": (Shared, shard_shared),
}
POLICIES = {"one ahead": None, "none": P.depth(0), "three": P.depth(3), "bytes": P.bytes(700), "auto": P.auto()}
FEW = [("inside", "one ahead"), ("inside of a list", "three"), ("in a row", "none"), ("in several", "auto")]
CASES = [*FEW, *(more(name, policy) for name in MODELS for policy in POLICIES if (name, policy) not in FEW)]


def least_budget(model):
    with pytest.raises(cs.errors.PoolBudgetError) as caught:
        model.set_pool_policy(cs.PoolPolicy(budget=1))
    return caught.value.least


def check_budgets(model, plain):
    """Check that steps without and with budgets are exact and as planned; returns the smallest budget."""
    least = least_budget(model)
    for budget in (None, least, least + 300, least + 2000):
        if budget is not None:
            model.set_pool_policy(cs.PoolPolicy(budget))
        for each in (model, plain):
            each.zero_grad()
            train_step(each)
        plan, record = cs.make_plan(model), cs.last_record(model)
        assert str(record) == "\n".join(map(str, plan.actions())), budget
        assert record.live_bytes == plan.live_bytes()
        assert budget is None or record.peak_bytes <= budget
        for key, param in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(key).grad.full_tensor(), param.grad)
    return least


@pytest.mark.parametrize(("name", "policy"), CASES)
@simulated(world=2)
def test_a_step_is_as_planned_within_any_budget_and_exact(rank, world, name, policy):
    model, plain = twins(*MODELS[name], reshard_after_forward=True)
    if POLICIES[policy] is not None:
        model.set_prefetch_policy(POLICIES[policy])
    for _ in range(4):  # nesting is learned, and `auto` measures
        train_step(model)
    model.zero_grad()
    least = check_budgets(model, plain)
    assert cs.make_plan(model).with_policies(pool=cs.PoolPolicy(least), prefetch=P.depth(0)).peak_bytes == least
    assert_at_rest(model)


@pytest.mark.parametrize("seed", [*range(5), *(more(seed) for seed in range(5, 60))])
@simulated(world=2)
def test_a_step_with_any_nesting_is_as_planned_within_any_budget_and_exact(rank, world, seed):
    rng = random.Random(seed)
    model, plain = twins(functools.partial(Nests, rng), shard_nests)
    if (policy := rng.choice(NEST_POLICIES)) is not None:
        model.set_prefetch_policy(policy)
    for _ in range(4):
        train_step(model)
    check_budgets(model, plain)


@simulated(world=2)
def test_a_use_wrongly_assumed_to_be_nested_costs_no_more_than_planned(rank, world):
    model, plain = twins(functools.partial(Shared, ends=True), shard_shared, reshard_after_forward=True)
    train_step(model)
    for budget in (least_budget(model), 1 << 20):
        model.set_pool_policy(cs.PoolPolicy(budget))
        for each in (model, plain):
            each.zero_grad()
            train_step(each)
        assert cs.last_record(model).peak_bytes <= cs.make_plan(model).peak_bytes <= budget
        for key, param in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(key).grad.full_tensor(), param.grad)


@simulated(world=2)
def test_the_least_budget_includes_and_names_enclosing_groups(rank, world):
    model, _ = twins(Stack, shard_nested, reshard_after_forward=True)
    train_step(model)
    message = r"while the weights of the root and of blocks\.\d are gathered, too"
    with pytest.raises(cs.errors.PoolBudgetError, match=message):
        model.set_pool_policy(cs.PoolPolicy(budget=1))
    plan = cs.make_plan(model)
    inner, outer, root = (plan.group(fqn).sizes for fqn in ("blocks.0.up", "blocks.0", ""))
    assert least_budget(model) == root.weights + outer.weights + max(inner.weights + inner.landing, inner.reduction)


class Early(Stack):
    """Stores the output of its first block."""

    def forward(self, x):
        x = self.inp(x)
        for place, block in enumerate(self.blocks):
            x = block(x)
            self.early = x if place == 0 else self.early
        return self.head(x)


@simulated(world=2)
def test_the_backward_of_early_modules_gathers_none_of_the_later_ones(rank, world):
    model, _ = twins(functools.partial(Early, 6), shard_blocks)
    model.set_prefetch_policy(P.depth(2))
    for _ in range(2):
        train_step(model)
    loss_of(model)
    model.early.sum().backward()
    later = [str(action) for action in cs.last_record(model).actions if action.kind == Kind.UNSHARD][7:]
    assert later == ["UNSHARD blocks.0"]


@simulated(world=2)
def test_kept_groups_that_are_used_again_are_gathered_for_all_but_their_last_use(rank, world):
    model, _ = twins(functools.partial(InOrder, (0, 1, 0, 2), blocks=3), shard_blocks, reshard_after_forward=False)
    for _ in range(2):
        train_step(model)
    assert cs.last_record(model).actions == cs.make_plan(model).actions()
    assert cs.make_plan(model).schedule is None


# ---- nesting


@simulated(world=2)
def test_nesting_is_declared_by_modules_and_learned_from_forwards(rank, world):
    model, _ = twins(Shared, shard_shared)
    assert cs.make_plan(model).around == ()
    train_step(model)
    lent = (("shared", "blocks.0"), ("shared", "blocks.1"))
    assert cs.make_plan(model).around == cs.last_record(model).around == lent
    assert cs.stats(model)["plan/order_drifts"] == 1

    model, _ = twins(Stack, shard_nested)
    declared = cs.make_plan(model)
    assert declared.around == tuple((f"blocks.{i}.up", f"blocks.{i}") for i in range(3))
    train_step(model)
    assert cs.make_plan(model) is not None
    assert cs.make_plan(model).around == declared.around


class Alone(Stack):
    """Runs a part of a block alone in one phase of forward."""

    def forward(self, x):
        return self.blocks[0].up(self.inp(x)) if not torch.is_grad_enabled() else super().forward(x)


@simulated(world=2)
def test_a_part_that_runs_alone_in_validation_changes_no_training_step(rank, world):
    model, plain = twins(Alone, shard_nested)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            train_step(each)
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model), loss_of(plain))
    plan = cs.make_plan(model)
    assert plan.own_orders == {"no_grad": ("", "blocks.0.up")}
    train_step(model)
    assert cs.last_record(model).actions == plan.actions()


class Otherwise(Shared):
    """Runs the shared module inside its blocks only in validation."""

    def forward(self, x):
        x = self.shared(self.inp(x))
        for block in self.blocks:
            block.lent[0] = torch.tanh if torch.is_grad_enabled() else self.shared
            x = block(x)
        return x


@simulated(world=2)
def test_nesting_that_occurs_only_in_validation_does_not_change_the_training_plan(rank, world):
    model, plain = twins(Otherwise, shard_shared)
    train_step(model)
    trained = cs.make_plan(model)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model), loss_of(plain))
        train_step(model)
    plan = cs.make_plan(model)
    assert plan.around == trained.around
    assert plan.around_in("no_grad") == (("shared", "blocks.0"), ("shared", "blocks.1"))
    assert plan.in_phase("no_grad").around == plan.around_in("no_grad")
    assert plan.actions() == trained.actions() == cs.last_record(model).actions
    assert ShardPlan.from_json(plan.to_json()) == plan


@simulated(world=2)
def test_a_given_plan_includes_the_nesting(rank, world):
    model, other = (twins(Shared, shard_shared)[0] for _ in range(2))
    model.set_prefetch_policy(P.depth(2))
    for _ in range(2):
        train_step(model)
    plan = ShardPlan.from_json(cs.make_plan(model).to_json())
    other.set_plan(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            train_step(other)
    assert cs.make_plan(other).diff(plan) == ""
    assert cs.stats(other)["plan/order_drifts"] == 0


def nested_plan():
    plan = block_plan(rows=(256, 512, 768))
    around = (("blocks.1", "blocks.0"), ("blocks.2", "blocks.1"))
    return replan(plan, Record((), (), ("", "blocks.0", "blocks.1", "blocks.2", "blocks.0"), around=around))


def test_a_plan_with_nested_uses_can_be_serialized():
    plan = nested_plan()
    again = ShardPlan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest != replan(plan, Record((), (), plan.order)).digest
    assert plan.diff(again) == ""
    flat = replan(plan, Record((), (), plan.order))
    assert "order: no longer blocks.1 inside blocks.0" in plan.diff(flat)
    assert "order: now blocks.2 inside blocks.1" in flat.diff(plan)
    with pytest.raises(cs.errors.ShardConfigValueError, match=r"around: names 'blocks\.9'"):
        ShardPlan.from_json(plan.to_json().replace('"blocks.1",\n    "blocks.0"', '"blocks.9",\n    "blocks.0"'))


def test_a_plan_lists_the_gathers_of_each_use():
    plan = nested_plan().with_policies(P.depth(2))
    lines = [line.strip() for line in str(plan).splitlines() if "gathers" in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
FORWARD (root) gathers blocks.0, blocks.1
FORWARD blocks.0 (1) gathers blocks.2
FORWARD blocks.1 gathers blocks.0
BACKWARD (root) gathers blocks.0
BACKWARD blocks.0 (1) gathers blocks.1
BACKWARD blocks.0 (2) gathers blocks.2""",
    )


def test_costs_are_per_step_for_any_number_of_uses():
    plan = nested_plan()
    costs = cs.Costs.of(
        latency=0.0,
        bandwidth=1e9,
        forward=dict.fromkeys(dict.fromkeys(plan.order), 1.0),
        backward=dict.fromkeys(dict.fromkeys(plan.order), 2.0),
    )
    predicted = plan.with_policies(costs=costs).predicted()
    assert {group.fqn: group.compute for group in predicted.groups} == dict.fromkeys(dict.fromkeys(plan.order), 3.0)
    assert predicted.seconds - predicted.exposed == pytest.approx(3.0 * len(plan.groups))
    once = replace(plan.with_policies(costs=costs), phases=(Phase("no_grad", ("", "blocks.0")),)).in_phase("no_grad")
    assert plan.with_policies(costs=costs).times()["blocks.0"] == once.times()["blocks.0"], "per use, in any order"
