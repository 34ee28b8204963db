"""Deviations from the plan are counted, explained and lead to a new plan; all ranks always follow the same plan."""

from __future__ import annotations

import itertools
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _engines import fully_shard
from _models import shard_blocks, vectors
from _plans import block_plan
from _pool import distributed, simulated
from _stepping import engine_of
from composable_shard._comm import agreement
from composable_shard._engine import measuring, review
from composable_shard._engine.order import phase_of
from composable_shard._plan.plan import replan
from composable_shard.testing import Busy, fabric

P = cs.PrefetchPolicy
LIMIT_S = 60.0  # limits a hang if ranks disagree


class Chosen(nn.Module):
    """Blocks of one size, which each forward runs in the given order."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, taken: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        x = self.inp(x)
        for at in taken:
            x = torch.tanh(self.blocks[at](x))
        return x


def made(prefetch=None, **options):
    torch.manual_seed(0)
    model = Chosen()
    shard_blocks(model, fully_shard, **{"reshard_after_forward": True} | options)
    if prefetch is not None:
        model.set_prefetch_policy(prefetch)
    return model


def step(model, rank, *taken, at=0):
    model(*vectors(rank, at), *([taken] if taken else [])).square().mean().backward()
    model.zero_grad()


def order_of(*taken):
    return ("", *(f"blocks.{at}" for at in taken))


def everywhere(world, what):
    found = [None] * world
    dist.all_gather_object(found, what)
    return found


# ---- order


@pytest.mark.parametrize("prefetch", [None, P.depth(2)])
@distributed(world=2, limit_s=LIMIT_S)
def test_an_order_that_all_ranks_have_seen_is_planned_once_all_have_voted(rank, world, prefetch):
    model = made(prefetch)
    step(model, rank)
    plans = []
    for _ in range(3):
        step(model, rank, 3, 1, 0, 2)
        plans.append(cs.make_plan(model))
    orders = [plan.order for plan in plans]
    assert orders == [order_of(0, 1, 2, 3), order_of(3, 1, 0, 2), order_of(3, 1, 0, 2)]
    assert cs.drift(model) == ()
    digests = everywhere(world, [plan.digest for plan in plans])
    assert digests[0] == digests[1]
    stats = cs.stats(model)
    assert (stats["plan/replans"], stats["plan/order_drifts"]) == (1, 1)


# If weights stay unsharded after forward, running one more block again changes the order, but no collective.


@distributed(world=2, limit_s=LIMIT_S)
def test_a_single_rank_that_deviates_gets_a_warning_and_changes_no_plan(rank, world):
    model = made(P.depth(2), reshard_after_forward=False)
    step(model, rank)
    before = cs.make_plan(model).digest
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for more in ((0,), (), ()):
            loss = model(*vectors(rank, 0), (0, 1, 2, 3, *more[:rank])).sum()
            del loss
            model.reshard()
            for block in model.blocks:
                block.reshard()
        step(model, rank)
    said = [str(each.message) for each in caught if "deviated from the plan" in str(each.message)]
    words = "rank 1: a root forward deviated from the plan, and not in the same way on all ranks (order: forward 6 is "
    assert [text.startswith(words) for text in said] == [True] * rank
    assert everywhere(world, cs.make_plan(model).digest) == [before] * world
    assert cs.stats(model)["plan/order_drifts"] == rank


@distributed(world=2, limit_s=LIMIT_S)
def test_first_forwards_that_differ_are_an_error_before_any_gradient(rank, world):
    model = made(reshard_after_forward=False)
    with pytest.raises(cs.errors.RankMismatchError) as caught:
        step(model, rank, 0, 1, 2, 3, rank)
    words = everywhere(world, str(caught.value))
    assert words[0] == words[1]
    assert "ranks 0 and 1 have different plans: order: forward 6 is blocks.0 -> blocks.1" in words[0]
    assert all(param.grad is None for param in model.parameters())


@distributed(world=2, limit_s=LIMIT_S)
def test_ranks_that_deviate_in_different_ways_get_an_error(rank, world):
    model = made(reshard_after_forward=False)
    step(model, rank)
    model(*vectors(rank, 0), (0, 1, 2, 3, rank))
    engine_of(model).reset()  # so that the next forward gathers
    with pytest.raises(cs.errors.RankMismatchError) as caught:
        model(*vectors(rank, 0), (0, 1, 2, 3, rank))
    words = everywhere(world, str(caught.value))
    assert words[0] == words[1]
    assert "order: forward 6 is blocks.0 -> blocks.1" in words[0]


@distributed(world=2, limit_s=LIMIT_S)
def test_ranks_may_use_different_modules_with_reduce_unused(rank, world):
    model = made(reshard_after_forward=False)
    model.set_reduce_scatter_unused_params(True)
    for _ in range(3):
        model(*vectors(rank, 0), (0, 1, 2, 3, rank))
        engine_of(model).reset()
    plans = everywhere(world, cs.make_plan(model).digest)
    assert plans[0] == plans[1]
    assert cs.make_plan(model).order == order_of(0, 1, 2, 3)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("mine", [((0, 1, 2, 3), (0, 1, 2, 2)), ((0, 1, 2, 3), (0, 2, 1, 3)), ((0, 1), (0, 2))])
@distributed(world=2, limit_s=LIMIT_S)
def test_gathering_different_modules_of_equal_size_is_an_error(rank, world, told, mine):
    """Otherwise each rank would read weights of another module. `told` follows the advice of an earlier warning."""
    model = made(P.depth(0))
    model.set_reduce_scatter_unused_params(told)
    for at in range(3):
        step(model, rank, at=at)
    error = None
    for _ in range(2):
        try:
            with torch.no_grad():  # a backward would not end on all ranks
                model(*vectors(rank, 0), mine[rank])
        except cs.errors.RankMismatchError as found:
            error = str(found)
            break
    assert (
        everywhere(world, error and error.partition(": rank 0 is about to gather blocks.")[0])
        == ["ranks 0 and 1 do different things"] * world
    )
    assert "Neither was done" in error
    assert "call unshard() for it on all of them" in error


@distributed(world=2, limit_s=LIMIT_S)
def test_first_forwards_that_gather_differently_are_an_error_with_reduce_unused(rank, world):
    model = made(P.depth(0))
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(
        cs.errors.RankMismatchError, match=r"rank 0 is about to gather blocks.2 .* rank 1 is about to gather blocks.3"
    ):
        model(*vectors(rank, 0), (0, 1, 2 + rank))


@distributed(world=2, limit_s=LIMIT_S)
def test_modules_unsharded_on_all_ranks_may_run_on_only_some_ranks(rank, world):
    model = made(reshard_after_forward=False)
    model.set_reduce_scatter_unused_params(True)
    for at in range(4):
        for block in model.blocks:
            block.unshard()
        step(model, rank, *((0, 1, 2, 3) if at == 0 else (0, 1 + rank, 3)), at=at)
        for block in model.blocks:
            block.reshard()


@distributed(world=2, limit_s=LIMIT_S)
def test_layers_skipped_by_all_ranks_are_no_mismatch(rank, world):
    model = made()
    for at, taken in enumerate([(0, 1, 2, 3), (0, 2), (1, 3), (0, 1, 2, 3), (3,), (2, 1)]):
        step(model, rank, *taken, at=at)


@pytest.mark.parametrize("how", ["emptied", "converted"])
@distributed(world=2, limit_s=LIMIT_S)
def test_actions_that_change_no_plan_may_run_on_one_rank_only(rank, world, how):
    model = made(P.depth(2))
    for at in range(5):
        step(model, rank, at=at)
        if at == 2 and rank == 0:
            cs.empty_pool(model) if how == "emptied" else model.to(torch.float32)
    assert cs.stats(model)["plan/replans"] == 0


@distributed(world=2, limit_s=LIMIT_S)
def test_a_steady_step_contacts_no_rank_and_no_store(rank, world):
    model = made(P.depth(2))
    for at in range(3):
        step(model, rank, at=at)
    with mock.patch.object(agreement, "store_of") as store, mock.patch.object(review, "agree") as agree:
        for at in range(3):
            step(model, rank, at=at)
    assert not store.called
    assert not agree.called


@simulated(world=2)
def test_orders_that_change_in_every_step_are_counted(rank, world):
    model = made()
    for at in range(6):
        step(model, rank, *((0, 1, 2, 3), (3, 2, 1, 0))[at % 2])
    assert cs.stats(model)["plan/order_drifts"] == 5


# ---- changes by users


@distributed(world=2, limit_s=LIMIT_S)
def test_a_policy_set_on_only_one_rank_is_an_error_on_all_ranks_before_forward(rank, world):
    model = made()
    step(model, rank)
    if rank:
        model.set_prefetch_policy(P.depth(3))
    with pytest.raises(cs.errors.RankMismatchError, match="ranks 0 and 1 have different plans: prefetch"):
        model(*vectors(rank, 1))


@distributed(world=2, limit_s=LIMIT_S)
def test_different_policies_are_an_error_on_all_ranks_that_shows_the_difference(rank, world):
    model = made()
    step(model, rank)
    model.set_prefetch_policy(P.depth(2 + rank))
    with pytest.raises(cs.errors.RankMismatchError, match="ranks 0 and 1 have different plans: prefetch"):
        model(*vectors(rank, 1))


@pytest.mark.parametrize("how", ["order", "setting"])
@distributed(world=1)
def test_a_given_plan_that_is_no_longer_followed_is_reported_once_with_the_reason(rank, world, how):
    model = made()
    model.set_plan(cs.make_plan(model).with_policies(P.depth(3)))
    step(model, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if how == "order":
                step(model, rank, 3, 2, 1, 0)
            else:
                model.blocks[0].set_reshard_after_forward(False)
                step(model, rank)
    (said,) = [str(each.message) for each in caught if "set_plan" in str(each.message)]
    why = {
        "order": "blocks.3: ran as forward 2, but blocks.0 is planned",
        "setting": "group blocks.0: reshard after forward -> after backward",
    }
    assert why[how] in said
    assert cs.make_plan(model).prefetch == P.depth(3)


# ---- bytes


@simulated(world=2)
def test_more_bytes_than_planned_are_counted(rank, world):
    model = made()
    for _ in range(3):
        step(model, rank)
    assert cs.stats(model)["plan/bytes_drifts"] == 0
    for _ in range(3):
        for block in model.blocks:
            block.unshard()
        step(model, rank)
    step(model, rank)
    drifts = cs.stats(model)["plan/bytes_drifts"]
    assert drifts >= 1
    step(model, rank)
    assert cs.stats(model)["plan/bytes_drifts"] == drifts, "no more than before"


@simulated(world=2)
def test_a_converted_model_gets_a_plan_with_its_new_bytes(rank, world):
    model = made()
    step(model, rank)
    model.to(torch.bfloat16)
    for _ in range(2):
        model(vectors(rank, 0)[0].to(torch.bfloat16)).sum().backward()
        model.zero_grad()
    plan = cs.make_plan(model)
    assert {param.stored for group in plan.groups for param in group.params} == {torch.bfloat16}
    assert cs.drift(model) == ()


# ---- time


def test_ranks_of_a_simulated_world_use_the_times_of_the_slowest_rank(monkeypatch):
    seconds = measuring._seconds

    def of_this_rank(plan, record):
        return {part: (dist.get_rank() + 1) * 1e-3 for part in seconds(plan, record)}

    monkeypatch.setattr(measuring, "_seconds", of_this_rank)

    @cs.testing.spmd(2)
    def costs(world):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))
        for each in (*model, model):
            cs.fully_shard(each, mesh=world.mesh)
        model.set_prefetch_policy(P.auto())
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
        return dict(cs.make_plan(model).costs.forward)

    assert costs == [{"0": 2e-3, "1": 2e-3, "2": 2e-3}] * 2


def test_times_are_measured_again_and_drifted_times_lead_to_a_new_plan(monkeypatch):
    monkeypatch.setattr(measuring, "CHECK_AFTER", 3)
    with fabric(4, latency_s=12e-6, bandwidth_Bps=64e6, clock="virtual"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), Busy(40e-6)) for _ in range(3)))
        for each in (*model, model):
            cs.fully_shard(each, mesh=init_device_mesh("cpu", (4,)))
        model.set_prefetch_policy(P.auto())

        def run(steps):
            for _ in range(steps):
                model(torch.ones(2, 16)).sum().backward()
                model.zero_grad()
            return cs.make_plan(model)

        plan = run(4)
        assert plan.costs is not None
        assert run(6).costs is plan.costs, "measured again, with the same times"
        assert cs.stats(model)["plan/time_drifts"] == 0
        model[1][1] = Busy(400e-6)
        other = run(14)
        assert dict(other.costs.forward)["1"] > 5 * dict(plan.costs.forward)["1"]
        assert cs.stats(model)["plan/time_drifts"] == 1
        seen = []
        for _ in range(30):
            run(1)
            seen.append(engine_of(model)._actions.recorder.watch is not None)
        assert sum(seen) <= 4, "measured less and less often"


# ---- phases


@simulated(world=2)
def test_each_phase_has_its_own_order(rank, world):
    model = made(P.depth(1))
    for _ in range(2):
        step(model, rank)
    for _ in range(2):
        with torch.no_grad():
            model(*vectors(rank, 0), (3, 2, 1, 0))
    assert_expected_inline(
        str(cs.last_record(model)),
        """\
UNSHARD (root)
WAIT (root)
UNSHARD blocks.3
WAIT blocks.3
UNSHARD blocks.2
RESHARD blocks.3
WAIT blocks.2
UNSHARD blocks.1
RESHARD blocks.2
WAIT blocks.1
UNSHARD blocks.0
RESHARD blocks.1
WAIT blocks.0
RESHARD blocks.0
RESHARD (root)""",
    )
    step(model, rank)
    assert cs.drift(model) == ()
    model.set_requires_gradient_sync(False)
    step(model, rank)
    model.set_requires_gradient_sync(True)
    losses = [model(*vectors(rank, at)).sum() for at in range(2)]
    sum(losses).backward()
    plan = cs.make_plan(model)
    assert [phase.name for phase in plan.phases] == ["no_grad", "train", "train, again", "train, no sync"]
    assert plan.order == plan.order_in("train") == order_of(0, 1, 2, 3)
    assert plan.own_orders == {"no_grad": order_of(3, 2, 1, 0)}
    assert "order in no_grad: (root), blocks.3, blocks.2, blocks.1, blocks.0" in str(plan)
    assert cs.ShardPlan.from_json(plan.to_json()) == plan


def test_a_phase_name_contains_everything_that_may_change_its_order():
    assert_expected_inline(
        "\n".join(phase_of(*each) for each in itertools.product((True, False), repeat=3)),
        """\
train, again
train
train, no sync, again
train, no sync
no_grad, again
no_grad
no_grad, again
no_grad""",
    )


def test_orders_of_phases_are_part_of_the_plan_that_ranks_agree_on_and_of_its_diff():
    plan = block_plan()
    same, other = plan.noting("no_grad", plan.order), plan.noting("no_grad", plan.order[::-1])
    assert same.digest == plan.digest != other.digest
    assert plan.diff(same) == ""
    assert plan.diff(other) == "no_grad: order: forward 1 is (root) -> blocks.2"
    assert other.in_phase("no_grad").order == plan.order[::-1]
    assert other.in_phase("train") is other
    learned = replan(other, cs.Record((), (), plan.order[::-1]))
    assert learned.own_orders == {}, "it is the order of all phases now"
