"""Errors of `owned` name the parameter, and no rank waits for a failed rank."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

import composable_shard as cs
from _pool import distributed, simulated
from composable_shard._faults.watch import WATCHER
from composable_shard._torch.distributed import dtensor_at
from composable_shard.errors import (
    PeerLostError,
    RankMismatchError,
    ShardConfigStateError,
    ShardConfigTypeError,
    ShardConfigUnsupportedError,
    ShardConfigValueError,
)
from optim._single import Net, backward, matrices, sharded

MUON = torch.optim.Muon


def net(seed=0):
    torch.manual_seed(seed)
    model = Net()
    sharded(model)
    return model


@simulated(world=2)
def test_an_unsupported_parameter_is_named_with_a_solution(rank, world):
    with pytest.raises(
        ShardConfigValueError, match=r"parameter blocks\.0\.attention_norm\.weight: Muon does not accept"
    ) as e:
        cs.optim.owned(MUON, net())
    assert "a separate optimizer" in str(e.value)
    model = net()
    optimizer = cs.optim.owned(MUON, matrices(model)[:2])
    with pytest.raises(ShardConfigValueError, match=r"parameter norm\.weight"):  # the name from fully_shard
        optimizer.add_param_group({"params": [model.norm.weight]})
    assert len(optimizer.param_groups) == 1


@simulated(world=2)
def test_options_that_the_optimizer_rejects_are_refused(rank, world):
    with pytest.raises(ValueError, match="Learning rate"):
        cs.optim.owned(MUON, matrices(net()), lr=-1.0)


@pytest.mark.parametrize(("kind", "options", "error", "match"), [
    (torch.optim.LBFGS, {}, ShardConfigTypeError, "LBFGS calls the closure several times"),
    (lambda params: params, {}, ShardConfigTypeError, "kind: must be a torch.optim.Optimizer class"),
    (17, {}, ShardConfigTypeError, "kind: must be a torch.optim.Optimizer class"),
    (torch.optim.AdamW, {"differentiable": True}, ShardConfigValueError, "differentiable"),
    (MUON, {"state": "nowhere"}, ShardConfigValueError, "state: must be 'owner' or 'shards'"),
    (MUON, {"bucket_bytes": 0}, ShardConfigValueError, "bucket_bytes"),
    (MUON, {"blocks": {"*.qkv.weight": cs.optim.Blocks(8)}}, ShardConfigValueError, r"no parameter matches '\*\.qkv"),
    (MUON, {"blocks": {"*.fused.weight": 8}}, ShardConfigTypeError, "Blocks"),
    (MUON, {"blocks": {"*.fused.weight": cs.optim.Blocks(7)}}, ShardConfigValueError, r"blocks\.0\.fused\.weight: has"),
])  # fmt: skip
def test_invalid_arguments_are_refused(kind, options, error, match):
    with cs.testing.fake(2), pytest.raises(error, match=match):
        cs.optim.owned(kind, matrices(net()), **options)


def test_copies_and_pickles_are_refused():
    with cs.testing.fake(2):
        for made in (cs.optim.owned(MUON, matrices(net())), cs.optim.in_backward(net(), torch.optim.SGD)):
            with pytest.raises(ShardConfigStateError, match="cannot be copied or pickled"):
                copy.deepcopy(made)


def test_blocks_need_a_positive_number_of_rows():
    for rows in (0, -1, 2.0, True, None):
        with pytest.raises(ShardConfigValueError, match="rows must be a positive int"):
            cs.optim.Blocks(rows)


@simulated(world=2)
def test_a_gradient_with_other_placements_than_its_parameter_is_named(rank, world):
    model = net()
    optimizer = cs.optim.owned(MUON, matrices(model))
    backward(model, rank, 0)
    param = model.blocks[0].attention.q.weight
    param.grad = dtensor_at(torch.ones(16, 16), param.device_mesh, [Partial()], param)
    with pytest.raises(ShardConfigStateError, match=r"blocks\.0\.attention\.q\.weight: its gradient is a DTensor"):
        optimizer.step()


@simulated(world=2)
def test_a_partial_parameter_is_refused(rank, world):
    model = net()
    param = model.head.weight
    summed = nn.Parameter(dtensor_at(torch.ones(16, 16), param.device_mesh, [Partial()], torch.ones(16, 16)))
    with pytest.raises(ShardConfigUnsupportedError, match="parameter pending: is placed as"):
        cs.optim.owned(MUON, [("pending", summed)])


@distributed(world=2)  # a simulated world does not sort the ranks of process groups
def test_a_mesh_with_descending_ranks_is_refused(rank, world):
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    cs.fully_shard(model, mesh=DeviceMesh("cpu", [1, 0]))
    with pytest.raises(ShardConfigUnsupportedError, match=r"its ranks \[1, 0\] do not ascend"):
        cs.optim.owned(MUON, matrices(model))


@pytest.mark.matrix
@simulated(world=2)
def test_a_converted_model_needs_another_optimizer(rank, world):
    model = net()
    optimizer = cs.optim.owned(MUON, matrices(model))
    model.to(torch.bfloat16)
    backward(model, rank, 0)
    with pytest.raises(ShardConfigStateError, match=r"was torch.float32 when its optimizer was made, but is torch.bf"):
        optimizer.step()


class Counting(torch.optim.SGD):
    """Counts its steps in its param groups, which other ranks do not see."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            group.setdefault("count", 0)

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["count"] += 1


class Growing(torch.optim.SGD):
    """Its state gets another tensor in each step."""

    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param][f"more {len(self.state[param])}"] = torch.ones(3)


@pytest.mark.parametrize(("kind", "how", "steps", "match"), [
    (Counting, {}, 1, "count"),
    (Growing, {"state": "shards"}, 2, "cannot be kept as shards"),
])  # fmt: skip
@distributed(world=2)
def test_state_that_other_ranks_do_not_see_is_refused(rank, world, kind, how, steps, match):
    model = net()
    optimizer = cs.optim.owned(kind, matrices(model), lr=0.1, **how)
    for step in range(steps - 1):
        backward(model, rank, step)
        optimizer.step()
    backward(model, rank, steps)
    with pytest.raises((ShardConfigStateError, PeerLostError), match=match):
        optimizer.step()


class Failing(torch.optim.SGD):
    """Fails on rank 1."""

    def step(self, closure=None):
        if torch.distributed.get_rank() == 1:
            raise ArithmeticError("no step here")


@distributed(world=2)
def test_a_failed_step_is_reported_to_the_other_ranks(rank, world):
    model = net()
    optimizer = cs.optim.owned(Failing, matrices(model), lr=0.1)
    backward(model, rank, 0)
    with pytest.raises(ArithmeticError if rank == 1 else PeerLostError, match="no step here"):
        optimizer.step()
    deadline = time.monotonic() + 20  # the other rank has posted the fault; wait until this rank sees it
    while all(ledger.fault is None for ledger in WATCHER.ledgers()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@distributed(world=2)
def test_ranks_with_different_gradients_send_nothing(rank, world):
    model = net()
    optimizer = cs.optim.owned(MUON, matrices(model))
    backward(model, rank, 0)
    if rank == 1:
        model.head.weight.grad = None
    before = [p.to_local().clone() for p in model.parameters()]
    with pytest.raises(RankMismatchError, match="16 of 17 gradients"):
        optimizer.step()
    assert all(torch.equal(p.to_local(), was) for p, was in zip(model.parameters(), before, strict=True))
