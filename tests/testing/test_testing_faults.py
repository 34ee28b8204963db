"""`assert_matches_unsharded` finds faults that are planted in the runtime, and passes without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn as nn

import composable_shard as cs
from _models import Block
from composable_shard import _api, testing
from composable_shard._comm import mesh as _mesh
from composable_shard._comm.collectives import Direct
from composable_shard._comm.lanes import Launched
from composable_shard._engine.engine import Engine
from composable_shard._group.gradients import GroupGradients
from composable_shard._group.group import ParamGroup

FLAT = {"world_size": 2}
COPIES = {"world_size": 4, "mesh": {"replicate": 2, "shard": 2}}


def make_layer():
    return nn.Sequential(Block(6, 10), nn.Linear(6, 3))


def make_inputs(batch, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + batch))


def shard_children(layer, mesh):
    for child in layer:
        cs.fully_shard(child, mesh=mesh)
    cs.fully_shard(layer, mesh=mesh)


def keep_unsharded(layer, mesh):
    cs.fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    layer.set_reshard_after_backward(False)


def check(**settings):
    testing.assert_matches_unsharded(make_layer, make_inputs, **{"shard": shard_children, **settings})


@pytest.mark.parametrize("world", [FLAT, {"world_size": 3}, COPIES], ids=["2 ranks", "3 ranks", "2 copies"])
def test_a_sharded_layer_matches_bitwise(world):
    check(**world)


def test_inputs_can_come_from_the_default_generator():
    drawn = []

    def draw(batch, step):
        drawn.append(torch.randn(4, 6))
        return drawn[-1]

    testing.assert_matches_unsharded(lambda: nn.Linear(6, 5), draw, world_size=2, steps=2)
    assert len({each.sum().item() for each in drawn}) == 4, "each rank and step has its own inputs"


def test_a_compiled_layer_matches_bitwise():
    testing.assert_matches_unsharded(lambda: nn.Linear(6, 5), make_inputs, compile="aot_eager", steps=2)


def test_a_layer_with_dropout_buffers_and_keyword_arguments_matches():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear, self.drop = nn.BatchNorm1d(6), nn.Linear(6, 3), nn.Dropout(0.5)

        def forward(self, *, x, scale):
            return {"out": self.drop(self.linear(self.norm(x))) * scale}

    testing.assert_matches_unsharded(
        Layer,
        lambda batch, step: {"x": make_inputs(batch, step), "scale": 2.0},
        loss=lambda output: output["out"].sum(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    )


def test_a_layer_that_is_used_twice_matches_within_a_tolerance():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return self.linear(self.linear(x).tanh())

    def shard(layer, mesh):
        cs.fully_shard(layer.linear, mesh=mesh)
        cs.fully_shard(layer, mesh=mesh)

    testing.assert_matches_unsharded(Twice, make_inputs, shard=shard, world_size=3, rtol=1e-5, atol=1e-7)


def test_a_layer_with_tensor_parallelism_and_sharding_matches_within_a_tolerance():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def make():
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def shard(layer, mesh):
        parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        cs.fully_shard(layer, mesh=mesh["dp"])

    testing.assert_matches_unsharded(
        make, make_inputs, world_size=4, mesh={"dp": 2, "tp": 2}, batch_axes=["dp"], shard=shard, rtol=1e-5, atol=1e-7
    )


# ---- the faults


def a_sum_for_a_mean(patch):
    patch.setattr("composable_shard._group.reduction.division", lambda factor, sums, dtype, axes: (False, 1.0, 1.0))


def no_wait(patch):
    def advance(job):
        job._handle = None

    patch.setattr(Launched, "_advance", advance)


def gathered_in_another_order(patch):
    def all_gather(self, wholes, pieces):
        handle = original(self, wholes, pieces)

        class Swapped:
            def wait(self):
                handle.wait()
                for whole in wholes:
                    whole.data.copy_(whole.view(2, -1).flip(0).reshape(-1))

        return Swapped()

    original = Direct.all_gather
    patch.setattr(Direct, "all_gather", all_gather)


def gradients_for_another_rank(patch):
    def reduce_scatter(self, out, bucket, scratch, mean=False):
        return original(self, out, bucket.view(2, -1).flip(0).reshape(-1), scratch, mean)

    original = Direct.reduce_scatter
    patch.setattr(Direct, "reduce_scatter", reduce_scatter)


def stale_weights(patch):
    patch.setattr(Engine, "before_optimizer_step", lambda self, *stepped: None)
    patch.setattr(ParamGroup, "is_stale", lambda self: False)


def the_other_axis(patch):
    def mesh_info(*args):
        info = original(*args)
        return replace(info, shard_group=info.replicate_group, replicate_group=info.shard_group)

    original = _mesh.mesh_info
    patch.setattr(_api, "mesh_info", mesh_info)


def gradients_of_the_last_step(patch):
    kept = {}

    def start(self, gradients, *args, **kwargs):
        old, kept[self] = kept.get(self, gradients), gradients
        return original(self, old, *args, **kwargs)

    original = GroupGradients.start_reduce
    patch.setattr(GroupGradients, "start_reduce", start)


FAULTS = {
    a_sum_for_a_mean: (FLAT, r"step 0, rank 0: gradient of 0\.norm\.weight .*all elements are 2 times"),
    no_wait: (FLAT, r"step 0, rank 0: output 0 .*NaN: was it read before its collective"),
    gathered_in_another_order: (FLAT, r"step 0, rank 0: output 0 differs"),
    gradients_for_another_rank: (FLAT, r"step 0, rank 0: gradient of 0\.norm\.weight differs"),
    stale_weights: ({**FLAT, "shard": keep_unsharded}, r"step 1, rank 0: output 0 differs"),
    the_other_axis: (COPIES, r"step 0, rank 0: output 0 differs"),
    gradients_of_the_last_step: (FLAT, r"step 1, rank 0: gradient of 0\.norm\.weight differs"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_and_nothing_without_it(fault, monkeypatch):
    settings, words = FAULTS[fault]
    check(**settings)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        check(**settings)


def test_the_message_has_the_parameter_rank_step_and_size_of_a_difference():
    def shard(layer, mesh):
        cs.fully_shard(layer, mesh=mesh)
        if mesh.get_local_rank() == 1:
            with torch.no_grad():
                layer.bias.to_local()[1:].add_(0.5)

    with pytest.raises(AssertionError) as caught:
        testing.assert_matches_unsharded(
            lambda: nn.Linear(6, 4), make_inputs, shard=shard, loss=lambda out: out.sum(), steps=1
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "the sharded layer does not match the unsharded one:"
    assert "step 0, rank 0: output 0 differs in 4 of 16 elements, max abs 0.5," in lines[1]
    assert "first at [0, 3]" in lines[1]
    assert "step 0, rank 1: updated bias differs in 1 of 2 elements, max abs 0.5" in lines[-1]
    assert "first at [3]" in lines[-1]
