"""Iterations follow from calls: state that only one rank keeps, or queries, changes no collective."""

from __future__ import annotations

import pytest
import torch

import composable_shard as cs
from _models import vectors
from _pool import distributed
from _stepping import assert_same_gradients, counted_gathers, engine_of, train_step, twins
from composable_shard._engine.iterations import Iterations

LIMIT_S = 60.0  # limits a hang if ranks disagree


def freeze_blocks(model):
    for block in model.blocks:
        block.requires_grad_(False)


def agreed(world, what):
    found = [None] * world
    torch.distributed.all_gather_object(found, what)
    assert all(each == found[0] for each in found), found
    return found[0]


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("frozen", [False, True])
@distributed(world=2, limit_s=LIMIT_S)
def test_an_output_kept_by_only_one_rank_changes_no_gather(rank, world, reshard, frozen):
    model, plain = twins(reshard_after_forward=reshard)
    for each in (model, plain):
        if frozen:
            freeze_blocks(each)
    kept = []
    with counted_gathers() as gathers:
        for step in range(4):
            for _ in range(2):  # forwards in grad mode without a backward, for example to log a metric
                output = model(*vectors(rank, step))
                if rank == 0:
                    kept.append(output)
            del output
            train_step(model, step)
            train_step(plain, step)
    assert_same_gradients(model, plain)
    agreed(world, gathers)
    assert kept or rank


@distributed(world=2, limit_s=LIMIT_S)
def test_auto_measures_the_same_steps_even_if_one_rank_keeps_outputs_or_asks_for_records(rank, world):
    model, _ = twins(reshard_after_forward=True)
    model.set_prefetch_policy(cs.PrefetchPolicy.auto())
    kept = []
    measured = []
    for step in range(6):
        if rank == 0:
            kept.append(model(*vectors(rank, step)))
        else:
            model(*vectors(rank, step))
        for micro in range(2):
            model.set_is_last_backward(micro == 1)
            train_step(model, 2 * step + micro)
            if rank == 0:
                assert cs.last_record(model).order
                cs.stats(model)
        measured.append(cs.make_plan(model).costs)
    assert agreed(world, measured)[-1] is not None


@distributed(world=2, limit_s=LIMIT_S)
def test_weights_stay_between_the_forwards_of_a_pipeline(rank, world):
    model, _ = twins(reshard_after_forward=False)
    for _ in range(2):
        with counted_gathers() as gathers:
            losses = [model(*vectors(rank, micro)).sum() for micro in range(3)]
            for loss in losses:
                loss.backward()
    assert gathers.count("") == 3, "once for the forwards, and once for each backward after the first"


def test_a_backward_ends_the_wait_of_its_forward_and_of_all_earlier_ones():
    found = Iterations()
    waits = []
    for backward in (0, 0, 2, 0, 4):
        waits.append(found.begin())
        found.await_backward(found.forward)
        found.reach(backward)
    assert waits == [False, True, True, True, True]
    found.reach(found.forward)
    assert not found.begin(), "no forward waits, and no parameter requires gradients"
    assert not found.begin()
    found.await_backward(found.forward)
    found.end()
    assert not found.begin(), "after an optimizer step, or a failure"


def test_forwards_without_backward_do_not_form_an_endless_iteration():
    found = Iterations()
    waits = []
    for _ in range(600):
        waits.append(found.begin())
        found.await_backward(found.forward)
    assert waits.count(False) == 3


@distributed(world=1)
def test_reading_the_record_does_not_end_the_iteration(rank, world):
    model, _ = twins(reshard_after_forward=True)
    model.set_manual_backward_finalization(True)  # so that reductions are in flight when the record is read
    train_step(model)
    first = cs.last_record(model)
    engine_of(model).before_optimizer_step({id(param) for param in model.parameters()})
    second = cs.last_record(model)
    assert second.actions[: len(first.actions)] == first.actions
    assert len(second.actions) > len(first.actions)
    assert second.order == first.order
