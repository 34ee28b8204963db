"""Ranges for torch's profiler: those of FSDP2 while it is active, and none otherwise."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, fully_shard, mesh_of, named_mesh
from _pool import distributed
from _stepping import assert_at_rest, engine_of
from composable_shard import FSDPMeshInfo, ShardPlacementResult

MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)


def models_of(**options):
    torch.manual_seed(3)
    plain = Transformer()
    models = {name: copy.deepcopy(plain) for name in ENGINES}
    for name, model in models.items():
        for block in model.blocks:
            ENGINES[name](block, **options)
        ENGINES[name]([model.norm, model.head], **options)
        ENGINES[name](model, **options)
    return models


def ranges_of(model, rank, steps=1, first=0):
    """The names of ranges, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for step in range(first, first + steps):
            next_token_loss(model, *token_batch(rank, step)).backward()
    found = [event for event in profiler.events() if event.name.startswith("FSDP::")]
    return [event.name for event in sorted(found, key=lambda event: event.time_range.start)]


# A wait for a reduction belongs to the reduced group here, and to the waiting group in FSDP2.
# In addition, FSDP2 has a range for each prefetch that finds nothing to gather.
OTHERS = ("FSDP::post_backward_rs_wait", "FSDP::backward_prefetch")


def names_of(ranges):
    return {name for name in ranges if not name.startswith(OTHERS)}


@pytest.mark.parametrize("options", [{}, {"mp_policy": MIXED}, {"reshard_after_forward": False}], ids=str)
@distributed(world=2)
def test_a_profiler_sees_all_ranges_of_fsdp2(rank, world, options):
    models = models_of(**options)
    first = {name: ranges_of(model, rank) for name, model in models.items()}
    assert names_of(first["fsdp2"]) <= names_of(first["ours"])
    assert names_of(first["fsdp2"]) >= {"FSDP::pre_forward", "FSDP::all_gather (blocks.0)", "FSDP::root_pre_forward"}
    for name in ("FSDP::pre_forward (blocks.1)", "FSDP::post_forward (blocks.0)", "FSDP::post_backward_reduce"):
        assert first["ours"].count(name) == first["fsdp2"].count(name) == 1
    for model in models.values():
        next_token_loss(model, *token_batch(rank, 1)).backward()
    later = {name: ranges_of(model, rank, first=2) for name, model in models.items()}
    assert names_of(later["fsdp2"]) <= names_of(later["ours"])
    waits = [name for name in later["ours"] if name.startswith("FSDP::post_backward_rs_wait")]
    assert len(waits) == len([name for name in later["ours"] if name.startswith("FSDP::post_backward_reduce")]) == 4
    if not options:
        assert "FSDP::backward_prefetch for blocks.0" in later["ours"]
        assert "FSDP::backward_prefetch for blocks.0" in later["fsdp2"]
    gathers = [[n for n in later[name] if n.startswith("FSDP::all_gather (")] for name in models]
    assert sorted(gathers[0]) == sorted(gathers[1])
    assert_at_rest(models["ours"])


@distributed(world=2)
def test_ranges_distinguish_groups_of_a_module_on_several_meshes_as_in_fsdp2(rank, world):
    mesh, other = mesh_of(2), named_mesh((2, 1), ("outer", "inner"))["inner"]

    def place(param):
        return ShardPlacementResult(None, own if param.ndim == 1 else theirs)

    found = {}
    for name, engine in ENGINES.items():
        own, theirs = FSDPMeshInfo(mesh, shard_mesh_dim=0), FSDPMeshInfo(other, shard_mesh_dim=0)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            engine(layer, mesh=mesh, shard_placement_fn=place)
        engine(model, mesh=mesh)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            model(torch.ones(2, 4)).sum().backward()
        found[name] = {event.name for event in profiler.events() if "(0)" in event.name}
    assert "FSDP::pre_forward (0) [pg=2]" in found["fsdp2"]
    assert names_of(found["fsdp2"]) <= names_of(found["ours"])


@distributed(world=2)
def test_a_profiler_active_for_a_part_of_a_step_sees_the_ranges_of_that_part(rank, world):
    model = models_of()["ours"]
    loss = next_token_loss(model, *token_batch(rank, 0))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        loss.backward()
    names = {event.name for event in profiler.events() if event.name.startswith("FSDP::")}
    assert {"FSDP::pre_backward (blocks.1)", "FSDP::root_post_backward_callback"} <= names
    assert "FSDP::pre_forward (blocks.1)" not in names
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        loss = next_token_loss(model, *token_batch(rank, 1))
    loss.backward()
    assert not any("backward" in event.name for event in profiler.events() if event.name.startswith("FSDP::"))
    assert_at_rest(model)


@distributed(world=2)
def test_without_a_profiler_no_range_is_made(rank, world):
    model = models_of(mp_policy=MIXED)["ours"]
    made = []
    theirs = torch.profiler.record_function.__init__

    def noted(self, name, *args, **kwargs):
        made.append(name)
        theirs(self, name, *args, **kwargs)

    for watched in (True, False):
        if watched:
            ranges_of(model, rank)
        torch.profiler.record_function.__init__ = noted
        try:
            next_token_loss(model, *token_batch(rank, 1)).backward()
        finally:
            torch.profiler.record_function.__init__ = theirs
    assert [name for name in made if name.startswith("FSDP")] == []
    engine = engine_of(model)
    assert [type(part).__name__ for part in engine.parts()] == [
        "Engine",
        "Actions",
        "Recorder",
        "Reductions",
        "GradientFlow",
    ]


@distributed(world=1)
def test_a_model_of_one_rank_is_profiled_too(rank, world):
    model = fully_shard(nn.Linear(2, 2))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        model(torch.ones(1, 2)).sum().backward()
    assert "FSDP::pre_forward" in {event.name for event in profiler.events()}
