"""Forwards under no_grad and inference_mode, before and between training steps."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.distributed.tensor import DTensor

from _engines import fully_shard
from _models import Stack, shard_blocks, vectors
from _parity import Case, check_parity, plain_step
from _pool import distributed

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def evaluate_then_step(mode, run):
    """Run two evaluations (also before the very first training step), then a step."""
    with MODES[mode]():
        for micro in (6, 7):
            run.record(f"evaluation {micro}", run.model(*run.batch(micro)))
    return plain_step(run)


def step_then_evaluate(mode, run):
    loss = plain_step(run)
    with MODES[mode]():
        run.record("evaluation", run.model(*run.batch(6)))
    return loss


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("mode", MODES)
@distributed(world=(1, 2))
def test_evaluations_before_and_between_training_steps_are_exact(rank, world, mode, reshard):
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    train = functools.partial(evaluate_then_step, mode)
    fsdp2 = mode == "no_grad" and reshard is True
    why = "FSDP2 crashes in inference_mode, or poisons the training after it"
    check_parity(Case(model=Stack, shard=shard, train=train, fsdp2=fsdp2, why=why), rank, world)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("mode", MODES)
@distributed(world=(1, 2))
def test_an_evaluation_between_backward_and_optimizer_step_leaves_no_stale_weights(rank, world, mode, reshard):
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    train = functools.partial(step_then_evaluate, mode)
    why = "FSDP2 keeps the unsharded weights of an evaluation through the optimizer step"
    check_parity(Case(model=Stack, shard=shard, train=train, fsdp2=False, why=why), rank, world)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("mode", MODES)
@distributed(world=(1, 2))
def test_no_unsharded_copy_outlives_a_root_forward_without_grad(rank, world, mode, reshard):
    model = Stack()
    shard_blocks(model, fully_shard, reshard_after_forward=reshard)
    before = dict(model.named_parameters())
    with MODES[mode]():
        model(*vectors(rank, 0))
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        assert param is before[name], name


@pytest.mark.parametrize("outer", MODES)
@distributed(world=2)
def test_a_model_sharded_and_first_run_without_grad_can_train_later(rank, world, outer):
    model = Stack()
    shard_blocks(model, fully_shard)
    with MODES[outer]():
        model.unshard()
        out = model(*vectors(rank, 0))
    assert not out.requires_grad
    model(*vectors(rank, 0)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@distributed(world=2)
def test_a_no_grad_forward_between_forward_and_backward_is_exact(rank, world):
    def train(run):
        loss = run.loss(0)
        with torch.no_grad():
            run.record("evaluation", run.model(*run.batch(1)))
        run.backward(loss)
        return loss

    check_parity(Case(model=Stack, train=train), rank, world)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_an_inference_forward_between_forward_and_backward_is_exact(rank, world, reshard):
    def train(run):
        loss = run.loss(0)
        with torch.inference_mode():
            run.record("evaluation", run.model(*run.batch(1)))
        run.backward(loss)
        return loss

    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    why = "FSDP2 crashes in inference_mode"
    check_parity(Case(model=Stack, shard=shard, train=train, fsdp2=False, why=why), rank, world)


@distributed(world=2)
def test_eval_mode_and_train_mode_share_the_hooks(rank, world):
    model = Stack()
    plain = Stack()
    plain.load_state_dict(model.state_dict())
    shard_blocks(model, fully_shard)
    for module in (model.eval(), plain.eval()):
        assert not module.blocks[0].training
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(model(*vectors(rank, 0)), plain(*vectors(rank, 0)))
