"""Traces, counts of collectives, and peak memory of a layer in a simulated world."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode

import composable_shard as cs
from _models import Block
from composable_shard import testing


def block(world, **options):
    torch.manual_seed(0)
    model = nn.Sequential(Block(6, 10), Block(6, 10))
    for child in model:
        cs.fully_shard(child, mesh=world.mesh, **options)
    return cs.fully_shard(model, mesh=world.mesh, **options)


def test_a_trace_shows_communication_and_compute_in_order():
    def body(world):
        model, x = block(world), torch.randn(2, 6)
        first = testing.trace(model, lambda: model(x).sum().backward())
        assert testing.trace(model, lambda: model(x).sum().backward()) == first
        return first

    texts = testing.spmd(2)(body)
    assert texts[0] == texts[1]
    assert_expected_inline(
        texts[0],
        """\
UNSHARD 0
WAIT 0
UNSHARD 1
COMPUTE 0
RESHARD 0
WAIT 1
COMPUTE 1
RESHARD 1
UNSHARD 1
WAIT 1
UNSHARD 0
COMPUTE 1 backward
RESHARD 1
REDUCE 1
WAIT 0
COMPUTE 0 backward
RESHARD 0
REDUCE 0
REDUCED 1
REDUCED 0""",
    )


def test_collectives_are_counted_by_type_with_any_backend():
    def body(world):
        model, x = block(world), torch.randn(2, 6)
        testing.assert_collectives(lambda: model(x).sum().backward(), all_gather=4, reduce_scatter=2)
        kept = block(world, reshard_after_forward=False)
        testing.assert_collectives(lambda: kept(x).sum().backward(), all_gather=2, reduce_scatter=2, all_reduce=0)
        with pytest.raises(AssertionError, match="2 all_gather, 2 reduce_scatter; expected 2 all_gather, 1 all_reduce"):
            testing.assert_collectives(lambda: kept(x).sum().backward(), all_gather=2, all_reduce=1)

    testing.spmd(2)(body)
    with testing.fake(8) as world:
        body(world)


@pytest.mark.parametrize("kept", [False, True])
def test_fake_tensors_give_the_same_trace_and_peak_as_real_tensors(kept):
    found = []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with testing.fake(4) as world, mode:
            model, x = block(world, reshard_after_forward=not kept), torch.randn(2, 6)
            for _ in range(3):
                text = testing.trace(model, lambda: model(x).sum().backward())  # noqa: B023 - called immediately
                found.append((text, testing.assert_peak_bytes(model), str(cs.make_plan(model)), cs.stats(model)))
    assert found[:3] == found[3:]


def test_peak_memory_is_compared_with_the_plan_or_a_limit():
    def body(world):
        model = block(world)
        model(torch.randn(2, 6)).sum().backward()
        peak = testing.assert_peak_bytes(model)
        assert peak == cs.last_record(model).peak_bytes
        with pytest.raises(AssertionError, match=rf"peak of {peak:,} bytes, at_most allows 100: after action \d+, "):
            testing.assert_peak_bytes(cs.last_record(model), at_most=100)

    testing.spmd(2)(body)


def test_the_collectives_of_a_compiled_layer_are_counted():
    with testing.fake(2), FakeTensorMode():
        beside = cs.fully_shard(nn.Linear(6, 5))  # fake tensors have no memory by which graphs could find this layer

    def body(world):
        model, x = cs.fully_shard(nn.Linear(6, 5), reshard_after_forward=True), torch.randn(2, 6)
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        run(x).sum().backward()
        testing.assert_collectives(lambda: run(x).sum().backward(), all_gather=2, reduce_scatter=1)

    testing.spmd(2)(body)
    assert beside.weight.shape == (5, 6)
