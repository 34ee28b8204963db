"""Sharding together with other kinds of parallelism: training, clipping, optimizers, state dicts and checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _compiling import graphs_of, three_steps
from _compositions import COMPOSITIONS, Text, whole
from _engines import fully_shard
from _pool import distributed
from _stepping import assert_at_rest

MAX_NORM = 0.3


def make_optimizer(model):
    """One that steps every other parameter by a fused kernel, and the others by foreach functions."""
    params = list(model.parameters())
    groups = [{"params": params[::2], "fused": True, "foreach": False}, {"params": params[1::2], "foreach": True}]
    return torch.optim.AdamW(groups, lr=0.05, eps=1e-3)  # a larger eps, as some gradients are zero but for rounding


def assert_close(model, want, of, when):
    for name, value in want.items():
        got = whole(of(model.get_parameter(name)))
        torch.testing.assert_close(got, value, msg=lambda m, n=name: f"{n} {when}: {m}")


def same_bits(model, other):
    for name, p in model.named_parameters():
        assert torch.equal(p.to_local(), other.get_parameter(name).to_local()), name


@pytest.mark.parametrize("name", COMPOSITIONS)
@distributed(world=4)
def test_training_is_exact_and_goes_on_from_a_checkpoint(rank, world, name, tmp_path):
    composition = COMPOSITIONS[name]
    plain, model = composition.pair(fully_shard)
    optimizers = [make_optimizer(each) for each in (plain, model)]

    def train(model, optimizer, step):
        composition.loss(model, composition.part, step)
        cs.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        want = composition.mean_gradients(plain, step)
        composition.loss(model, composition.part, step)
        assert_close(model, want, lambda p: p.grad, f"gradient of step {step}")
        for key, p in plain.named_parameters():
            p.grad = want[key]
        norm = cs.clip_grad_norm_(model.parameters(), MAX_NORM)
        torch.testing.assert_close(whole(norm), nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_close(model, dict(plain.named_parameters()), lambda p: p, f"after step {step}")
    assert_at_rest(model)

    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers[1]), strict=True))
    assert all(isinstance(value, DTensor) for key, value in state["model"].items() if "preference" not in key)
    dcp.save(state, checkpoint_id=tmp_path)
    _, other = composition.pair(fully_shard, seed=4)
    optimizer = make_optimizer(other)
    empty = dict(zip(("model", "optimizer"), get_state_dict(other, optimizer), strict=True))
    dcp.load(empty, checkpoint_id=tmp_path)
    set_state_dict(other, optimizer, model_state_dict=empty["model"], optim_state_dict=empty["optimizer"])
    same_bits(other, model)
    for each, its in ((model, optimizers[1]), (other, optimizer)):
        train(each, its, 3)
    same_bits(other, model)
    other.load_state_dict(plain.state_dict())  # of full tensors
    assert_close(other, dict(plain.named_parameters()), lambda p: p, "after a load")


# ---- in compiled graphs


def compiled(rank, world, name):
    composition = COMPOSITIONS[name]

    def shard(model, engine):
        composition.shard(model, engine, composition.mesh)

    def inputs(rank, step):
        generator = torch.Generator().manual_seed(10 * step + composition.part)
        return (torch.randint(0, 12, (3, 6), generator=generator),)

    def loss_of(model, step):
        return whole(model(*inputs(rank, step))).square().mean()

    return three_steps(rank, Text(layers=1), shard, inputs, loss_of=loss_of)


@pytest.mark.matrix
def test_tensor_and_sequence_parallel_in_one_graph():
    assert_expected_inline(
        graphs_of(compiled, world=4, name="tensor parallel"),
        """\
inference GwGRwwGwmmmmRwGwmmRwGwm
backward GmmRwGwwmmmmRwGwmmmmmmmmRwAwAwAwAwRGwAwAwRww
""",
    )


@pytest.mark.matrix
def test_replicas_of_tensor_parallel_in_one_graph():
    assert_expected_inline(
        graphs_of(compiled, world=4, name="replicas of tensor parallel"),
        """\
inference RwGwmmmmRwGwmmRwGwm
backward mmRwGwmmmmRwGwmmmmmmmmRwAwAwAwAwAGwAwAwAww
""",
    )
