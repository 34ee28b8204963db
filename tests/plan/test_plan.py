"""Plans: their text, how they learn the order of forwards, and that executed steps match them."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import composable_shard
from _engines import fully_shard, mesh_of
from _gpt import GPT, SIZES
from _gpt import Block as GPTBlock
from _models import Block, Stack, shard_blocks, shard_lists, shard_nested, shard_root, vectors
from _pool import POOL, distributed, simulated
from composable_shard import MixedPrecisionPolicy, Record, last_record, make_plan, shard_by_class
from composable_shard._plan.plan import replan
from composable_shard._plan.text import first_names

# Jobs run in worker processes. Their results are compared with goldens here, so that expecttest can update the goldens.


def demo_text(rank, world, **options):
    """The plan of the demo's model. The model is on the meta device, so it needs no memory."""
    with torch.device("meta"):
        model = GPT(SIZES["3m"])
    shard_by_class(model, {GPTBlock}, **options)
    return str(make_plan(model))


def stack_text(rank, world, mesh=None, strategy=None, frozen=(), blocks=1, **options):
    model = Stack(blocks)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if mesh is not None:
        options["mesh"] = mesh_of(*mesh)
    if strategy is None:
        shard_blocks(model, fully_shard, **options)
    else:
        shard_by_class(model, {Block}, strategy=strategy, **options)
    return str(make_plan(model))


def on_all(job, world, **kwargs):
    texts = POOL.run(f"test_plan:{job.__name__}", world, kwargs)
    assert texts == texts[:1] * world, "ranks differ"
    return texts[0]


def test_the_plan_of_the_demo_model_at_world_2():
    assert_expected_inline(
        on_all(demo_text, 2),
        """\
plan: 7 groups, 2,755,008 parameters, shard over 2
group     parameters     shard  unsharded  dtype    reshard         transport
(root)        98,496  0.19 MiB   0.38 MiB  float32  after backward  packed
blocks.0     442,752  0.84 MiB   1.69 MiB  float32  after forward   packed
blocks.1     442,752  0.84 MiB   1.69 MiB  float32  after forward   packed
blocks.2     442,752  0.84 MiB   1.69 MiB  float32  after forward   packed
blocks.3     442,752  0.84 MiB   1.69 MiB  float32  after forward   packed
blocks.4     442,752  0.84 MiB   1.69 MiB  float32  after forward   packed
blocks.5     442,752  0.84 MiB   1.69 MiB  float32  after forward   packed
peak of unsharded parameters and communication in a training step: 7.13 MiB""",
    )


def test_the_plan_of_the_demo_model_under_ddp_has_no_gathers():
    assert_expected_inline(
        on_all(demo_text, 2, strategy="ddp"),
        """\
plan: 7 groups, 2,755,008 parameters, replicate over 2, shard over 1
group     parameters     shard  unsharded  dtype    reshard         transport
(root)        98,496  0.38 MiB   0.38 MiB  float32  after backward  local
blocks.0     442,752  1.69 MiB   1.69 MiB  float32  after backward  local
blocks.1     442,752  1.69 MiB   1.69 MiB  float32  after backward  local
blocks.2     442,752  1.69 MiB   1.69 MiB  float32  after backward  local
blocks.3     442,752  1.69 MiB   1.69 MiB  float32  after backward  local
blocks.4     442,752  1.69 MiB   1.69 MiB  float32  after backward  local
blocks.5     442,752  1.69 MiB   1.69 MiB  float32  after backward  local
peak of unsharded parameters and communication in a training step: 10.51 MiB""",
    )


def test_the_plan_of_zero2_keeps_weights_until_backward_ends():
    assert_expected_inline(
        on_all(stack_text, 2, strategy="zero2"),
        """\
plan: 2 groups, 206 parameters, shard over 2
group     parameters     shard  unsharded  dtype    reshard         transport
(root)            58  0.00 MiB   0.00 MiB  float32  after backward  packed
blocks.0         148  0.00 MiB   0.00 MiB  float32  after backward  packed
peak of unsharded parameters and communication in a training step: 0.00 MiB""",
    )


def test_the_plan_on_a_mesh_with_replicas_names_both_axes():
    assert_expected_inline(
        on_all(stack_text, 4, mesh=(2, 2)),
        """\
plan: 2 groups, 206 parameters, replicate over 2, shard over 2
group     parameters     shard  unsharded  dtype    reshard         transport
(root)            58  0.00 MiB   0.00 MiB  float32  after backward  packed
blocks.0         148  0.00 MiB   0.00 MiB  float32  after forward   packed
peak of unsharded parameters and communication in a training step: 0.00 MiB""",
    )


def test_the_dtype_column_shows_stored_gathered_and_reduced_dtypes():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert_expected_inline(
        on_all(stack_text, 2, mp_policy=policy),
        """\
plan: 2 groups, 206 parameters, shard over 2
group     parameters     shard  unsharded  dtype                                    reshard         transport
(root)            58  0.00 MiB   0.00 MiB  float32 as bfloat16, reduced as float32  after backward  packed
blocks.0         148  0.00 MiB   0.00 MiB  float32 as bfloat16, reduced as float32  after forward   packed
peak of unsharded parameters and communication in a training step: 0.00 MiB""",
    )


def bf16_text(rank, world, reduce_dtype):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return stack_text(rank, world, mp_policy=policy)


def test_the_dtype_column_shows_the_reduce_dtype():
    assert on_all(bf16_text, 1, reduce_dtype=torch.float32) != on_all(bf16_text, 1, reduce_dtype=torch.bfloat16)


def test_the_dtype_column_marks_frozen_parameters():
    assert_expected_inline(
        on_all(stack_text, 1, frozen=["head.weight", "head.bias"]),
        """\
plan: 2 groups, 206 parameters, shard over 1
group     parameters     shard  unsharded  dtype                    reshard         transport
(root)            58  0.00 MiB   0.00 MiB  float32, float32 frozen  after backward  local
blocks.0         148  0.00 MiB   0.00 MiB  float32                  after forward   local
peak of unsharded parameters and communication in a training step: 0.00 MiB""",
    )


# ---- before and after running


class Backwards(Stack):
    """Runs its blocks in reverse order."""

    def forward(self, x):
        x = self.inp(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


def train_step(model, rank, step=0):
    model(*vectors(rank, step)).square().mean().backward()
    model.zero_grad()


@pytest.mark.parametrize("shard", [shard_blocks, shard_root])
@distributed(world=2)
def test_declared_and_learned_plan_are_equal_if_the_model_runs_in_order(rank, world, shard):
    model = Stack()
    shard(model, fully_shard)
    declared = make_plan(model)
    train_step(model, rank)
    learned = make_plan(model)
    assert [(phase.name, phase.order) for phase in learned.phases] == [("train", declared.order)]
    assert (learned.digest, learned.diff(declared)) == (declared.digest, "")


@distributed(world=2)
def test_the_first_forward_changes_only_the_order_of_the_plan(rank, world):
    model = Backwards()
    shard_blocks(model, fully_shard)
    declared = make_plan(model)
    assert declared.order == ("", "blocks.0", "blocks.1", "blocks.2")
    train_step(model, rank)
    learned = make_plan(model)
    assert learned.order == ("", "blocks.2", "blocks.1", "blocks.0")
    assert learned.groups == declared.groups


@distributed(world=2)
def test_a_changed_order_replaces_the_plan(rank, world):
    model = Stack()
    shard_blocks(model, fully_shard)
    train_step(model, rank)
    model.blocks = nn.ModuleList([model.blocks[2], model.blocks[1], model.blocks[0]])
    for step in range(2):  # ranks see the new order in the first step and agree on it at the end of the second step
        train_step(model, rank + step)
    assert make_plan(model).order == ("", "blocks.2", "blocks.1", "blocks.0")


@distributed(world=2)
def test_a_no_grad_forward_does_not_change_the_plan_of_training_steps(rank, world):
    model = Backwards()
    shard_blocks(model, fully_shard)
    declared = make_plan(model)
    with torch.no_grad():
        for step in range(3):
            model(*vectors(rank, step))
    assert make_plan(model) is make_plan(model)
    assert make_plan(model).order == declared.order
    assert make_plan(model).own_orders == {"no_grad": ("", "blocks.2", "blocks.1", "blocks.0")}


@distributed(world=1)
def test_replan_uses_the_recorded_order_and_keeps_a_matching_plan(rank, world):
    model = Stack(2)
    shard_blocks(model, fully_shard)
    plan = make_plan(model)
    assert replan(plan, Record((), (), plan.order)) is plan
    seen = ("", "blocks.1", "blocks.0", "blocks.1")
    other = replan(plan, Record((), (), seen))
    assert other.order == seen
    assert other.groups == plan.groups
    gathers = [action.fqn for action in other.actions() if action.kind == "UNSHARD"]
    assert gathers == ["", "blocks.1", "blocks.0", "blocks.1", "blocks.1", "blocks.0", "blocks.1"]  # one gather per use


@distributed(world=1)
def test_a_plan_shows_unused_groups(rank, world):
    model = Stack(2)
    shard_blocks(model, fully_shard)
    plan = replan(make_plan(model), Record((), (), ("", "blocks.0")))
    assert "blocks.1" in str(plan)
    assert all(action.fqn != "blocks.1" for action in plan.actions())
    assert plan.group("blocks.1").shard_bytes > 0


def test_a_plan_without_groups_has_a_text():
    assert str(composable_shard.ShardPlan((), ())).startswith("plan: 0 groups")


# ---- executed steps match the plan


def executed(model, rank, steps=2):
    """The record of the last step. An iteration is only complete after its autograd graph has been freed."""
    for step in range(steps):
        train_step(model, rank, step)
    return last_record(model)


def check_executed(model, rank, steps=2):
    record = executed(model, rank, steps)
    plan = make_plan(model)
    assert list(map(str, record.actions)) == list(map(str, plan.actions()))
    assert record.actions == plan.actions()
    assert record.live_bytes == plan.live_bytes()
    assert record.peak_bytes == plan.peak_bytes == max(plan.live_bytes())
    assert record.order == plan.order
    return record


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("shard", [shard_blocks, shard_root])
@distributed(world=(1, 2))
def test_an_executed_step_matches_the_plan(rank, world, shard, reshard):
    model = Stack()
    shard(model, fully_shard, reshard_after_forward=reshard)
    check_executed(model, rank, steps=1)  # the first step matches the declared plan
    check_executed(model, rank)


@distributed(world=(1, 2))
def test_an_executed_step_in_a_learned_order_matches_the_plan(rank, world):
    model = Backwards()
    shard_blocks(model, fully_shard)
    check_executed(model, rank)


@distributed(world=2)
def test_an_executed_step_in_mixed_precision_matches_the_plan(rank, world):
    model = Stack()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_blocks(model, fully_shard, mp_policy=policy)
    check_executed(model, rank)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@distributed(world=2)
def test_an_executed_step_of_a_strategy_matches_the_plan(rank, world, strategy):
    model = Stack()
    shard_by_class(model, {Block}, strategy=strategy)
    if strategy == "ddp":
        model.set_reshard_after_backward(True)  # plans do not include weights that are kept for the next step
    check_executed(model, rank)


@distributed(world=4)
def test_an_executed_step_on_a_mesh_with_replicas_matches_the_plan(rank, world):
    model = Stack()
    shard_blocks(model, fully_shard, mesh=mesh_of(2, 2))
    check_executed(model, rank)


@distributed(world=2)
def test_an_executed_step_with_two_dtypes_in_a_group_matches_the_plan(rank, world):
    model = Stack()
    for block in model.blocks:
        block.down.double()
        block.forward = functools.partial(two_dtypes, block)
    shard_blocks(model, fully_shard)
    check_executed(model, rank)


def two_dtypes(block, x):
    return x + block.down(torch.tanh(block.up(block.norm(x))).double()).float()


@pytest.mark.parametrize("shard", [shard_nested, shard_lists])
@distributed(world=2)
def test_a_record_has_the_live_bytes_after_each_action(rank, world, shard):
    model = Stack()
    shard(model, fully_shard)
    record = executed(model, rank)
    assert len(record.live_bytes) == len(record.actions)
    assert record.live_bytes[-1] == 0


def record_text(rank, world):
    model = Stack(2)
    shard_blocks(model, fully_shard)
    record = executed(model, rank)
    return "\n".join(f"{a!s:20}{n:6}" for a, n in zip(record.actions, record.live_bytes, strict=True))


def test_a_record_contains_actions_and_leased_bytes():
    assert_expected_inline(
        on_all(record_text, 2),
        """\
UNSHARD (root)        1024
WAIT (root)            512
UNSHARD blocks.0      2560
WAIT blocks.0         1536
UNSHARD blocks.1      3584
RESHARD blocks.0      2560
WAIT blocks.1         1536
RESHARD blocks.1       512
UNSHARD blocks.1      2560
WAIT blocks.1         1536
UNSHARD blocks.0      3584
RESHARD blocks.1      2560
REDUCE blocks.1       4608
WAIT blocks.0         3584
RESHARD blocks.0      2560
REDUCE blocks.0       4608
RESHARD (root)        4096
REDUCED blocks.1      2048
REDUCE (root)         3072
REDUCED blocks.0      1024
REDUCED (root)           0""",
    )


@distributed(world=2)
def test_plans_need_a_sharded_module_and_records_a_completed_iteration(rank, world):
    model = Stack()
    assert last_record(model) is None
    with pytest.raises(ValueError, match="no sharded module"):
        make_plan(model)
    shard_blocks(model, fully_shard)
    assert last_record(model) is None
    loss = model(*vectors(rank, 0)).sum()
    assert last_record(model) is None, "its graph is alive, so backward may still run"
    loss.backward()
    del loss
    first = last_record(model)
    assert first is last_record(model)
    train_step(model, rank)
    assert last_record(model) is not first


@simulated(world=2)
def test_parameters_are_named_relative_to_the_root(rank, world):
    model = fully_shard(checkpoint_wrapper(nn.Linear(4, 4)))
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]
    assert [param.fqn for group in make_plan(model).groups for param in group.params] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "a"), (3, "a, b, c"), (4, "a, b, c, d"), (5, "a, b, c and 2 more"), (7, "a, b, c and 4 more")],
)
def test_long_lists_of_names_are_shortened_if_that_omits_at_least_two(count, text):
    assert first_names("abcdefg"[:count], 3) == text
