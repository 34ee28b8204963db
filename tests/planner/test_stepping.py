"""Optimizers in the planner: predicted memory matches rehearsed steps, and predicted communication is what is sent."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import composable_shard as cs
from _pool import distributed, more, simulated
from composable_shard._policies import AS_IT_IS
from composable_shard.cli.main import main
from composable_shard.errors import ShardConfigValueError
from composable_shard.optim._forecast import Sharded, forecast
from composable_shard.planner import KNOWN, Layout, Link, Shape, Strategy, advise, text
from composable_shard.planner.advise import Planner
from composable_shard.planner.precision import PRECISIONS
from composable_shard.planner.rehearsal import rehearse_source
from composable_shard.planner.sources import source_of
from composable_shard.planner.stepping import forecast_of
from optim._single import Net, backward, matrices, sharded

MIDDLE = Shape(layers=2, width=192, heads=6, vocabulary=512, sequence=64, key_value_heads=2)
PLAYED = replace(KNOWN["h100"], backend="fake")


def net(ragged=False):
    torch.manual_seed(0)
    model = Net(layers=2)
    sharded(model, **({"shard_placement_fn": lambda p: cs.Ragged(5) if p.ndim == 2 else None} if ragged else {}))
    return model


def largest_shards(model, world):
    def rows(param):
        placed = param.placements[0]
        return placed.chunk(param.shape[0], world) if isinstance(placed, cs.Ragged) else -(-param.shape[0] // world)

    return {name: Sharded(tuple(p.shape), p.dtype, rows(p)) for name, p in matrices(model)}


@pytest.mark.parametrize("ragged", [False, more(True)])
@distributed(world=(2, more(4)))
def test_owners_exchange_the_predicted_bytes(rank, world, ragged):
    model = net(ragged)
    blocks = {name: cs.optim.Blocks(8) for name, p in matrices(model) if name.endswith("fused.weight")}
    kind = torch.optim.SGD
    optimizer = cs.optim.owned(kind, matrices(model), lr=0.1, momentum=0.9, blocks=blocks, bucket_bytes=2000)
    ahead = forecast(largest_shards(model, world), world, blocks=blocks, bucket_bytes=2000)
    backward(model, rank, 0)
    optimizer.step()
    assert optimizer.sent_bytes == ahead.sent[rank] > 0
    inner = [bucket.inner for bucket in optimizer._buckets if bucket.inner is not None]
    state = [each["momentum_buffer"] for own in inner for each in own.state.values()]
    assert sum(tensor.nbytes for tensor in state) == ahead.owned_bytes[rank]
    assert sorted(tuple(tensor.shape) for tensor in state) == sorted(ahead.owned[rank])
    assert ahead.buckets == sum(not bucket.stays for bucket in optimizer._buckets) > 1
    assert f"sends {max(ahead.sent):,} bytes in a step" in str(ahead)


@simulated(world=3)
def test_a_plan_predicts_what_owners_exchange(rank, world):
    model = net()
    optimizer = cs.optim.owned(torch.optim.SGD, [(n, p) for n, p in matrices(model) if "blocks" in n], lr=0.1)
    plan = cs.make_plan(model)
    params = {p.fqn: p for group in plan.groups for p in group.params if not group.is_root and len(p.shape) > 1}
    backward(model, rank, 0)
    optimizer.step()
    assert optimizer.sent_bytes == forecast_of(params, world).sent[rank]


def compare(optimizer, strategy, precision="float32", comm=AS_IT_IS, within=0.08):
    source = source_of(MIDDLE)
    planner = Planner(source, PRECISIONS[precision], 1, optimizer, comm)
    estimated = planner.estimate(strategy, PLAYED).memory.peak
    counted = rehearse_source(source, strategy, PRECISIONS[precision], 1, optimizer, comm).peak
    assert estimated.parameters == counted.parameters
    assert abs(estimated.optimizer - counted.optimizer) <= 0.01 * counted.optimizer
    assert abs(estimated.total - counted.total) <= within * counted.total


@pytest.mark.parametrize(("optimizer", "strategy"), [
    ("owned", Strategy("zero3", Layout(1, 4))),
    more("in_backward", Strategy("zero2", Layout(1, 2))),
    more("owned", Strategy("hsdp", Layout(1, 2, 2))),
    ("in_backward", Strategy("zero3", Layout(1, 4))),
])  # fmt: skip
def test_predicted_memory_matches_rehearsed_steps(optimizer, strategy):
    compare(optimizer, strategy)


@pytest.mark.parametrize(("comm", "strategy"), [
    (cs.CommPolicy("fp8", "int8"), Strategy("zero3", Layout(1, 4))),
    more(AS_IT_IS, Strategy("zero3", Layout(1, 4))),
    more(cs.CommPolicy("bf16", "bf16"), Strategy("zero2", Layout(1, 2))),
    more(cs.CommPolicy("fp8", "int8", "int8"), Strategy("hsdp", Layout(1, 2, 2))),
    more(cs.CommPolicy("fp8", "int8"), Strategy("zero2", Layout(1, 2))),
])  # fmt: skip
def test_predicted_memory_of_low_precision_steps_matches_rehearsed_steps(comm, strategy):
    """This includes peaks while gradients are rounded, with memory outside the plan's pool."""
    compare("in_backward", strategy, comm=comm, within=0.01)


def test_optimizers_and_low_precision_are_planned_together():
    shape = Shape(layers=2, width=32, heads=2, vocabulary=64, sequence=16)
    policy = cs.CommPolicy("fp8", "int8")
    advised, exact = (advise(shape, devices=2, optimizer="owned", comm_policy=comm) for comm in (policy, AS_IT_IS))
    low, high = of(advised, "zero3"), of(exact, "zero3")
    assert low.exchanged == high.exchanged > 0  # owners send unrounded values
    assert low.moved - low.exchanged < 0.5 * (high.moved - high.exchanged)
    lines = text.script(advised, low)
    assert "cs.optim.owned(torch.optim.Muon" in lines
    assert "comm_policy=cs.CommPolicy(gather='fp8'" in lines


def of(advised, name):
    return next(each for each in advised.estimates if str(each.strategy) == name)


@pytest.mark.matrix
def test_with_in_backward_only_one_groups_gradients_are_live():
    ordinary, advised = (advise(MIDDLE, devices=4, optimizer=name) for name in ("adamw", "in_backward"))
    one, two = (of(each, "zero3").memory.most for each in (ordinary, advised))
    assert two.gradients < one.gradients / 2
    assert replace(two, gradients=0) == replace(one, gradients=0)
    assert of(advised, "zero3").moved == of(ordinary, "zero3").moved
    assert "cs.optim.in_backward(model, lambda params: torch.optim.AdamW(params" in text.script(
        advised, advised.recommended
    )


@pytest.mark.matrix
def test_owners_keep_one_moment_of_matrices_and_exchange_matrices():
    slow = replace(KNOWN["h100"], intra_node=Link(1e6, 0.0))
    ordinary, advised, linked = (
        advise(MIDDLE, devices=4, optimizer=name, machine=machine)
        for name, machine in (("adamw", "h100"), ("owned", "h100"), ("owned", slow))
    )
    one, two = of(ordinary, "zero3"), of(advised, "zero3")
    assert two.memory.most.optimizer < one.memory.most.optimizer
    assert two.exchanged == two.moved - one.moved > 0
    assert of(advised, "ddp").exchanged == 0
    assert of(linked, "zero3").time.optimizer >= two.exchanged / 1e6 > two.time.optimizer
    assert not any(each.strategy.offload for each in advised.estimates)
    small = replace(KNOWN["h100"], memory=of(advised, "zero3").needed)
    wide = advise(MIDDLE, devices=4, optimizer="owned", machine=small)
    assert "go to owners of matrices and back" in wide.reason
    assert "cs.optim.owned(torch.optim.Muon, matrices" in text.script(wide, wide.recommended)


def test_optimizers_that_cannot_be_planned_are_refused(capsys):
    with pytest.raises(ShardConfigValueError, match="optimizer: 'sgd' is not one of adamw, in_backward, owned"):
        advise(MIDDLE, devices=2, optimizer="sgd")
    with pytest.raises(ShardConfigValueError, match="optimizer: 'owned' cannot be planned with tensor parallelism"):
        advise(MIDDLE, devices=4, optimizer="owned", tensor=(2,))
    shape = "layers=2,width=64,heads=4,vocabulary=64,sequence=16"
    assert main(["advise", shape, "--devices", "2", "--optimizer", "owned", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"]["exchanged"] >= 0
