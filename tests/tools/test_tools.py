"""torch's tools: fake tensors, CommDebugMode, patches of torch.distributed, memory trackers and the flight recorder."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable import checkpoint as checkpoint_module
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import forced, mesh_of
from _models import Stack, shard_blocks, vectors
from _pool import distributed, more, simulated
from composable_shard._torch import distributed as _torch_distributed
from composable_shard.testing import _torch as testing_torch

ENGINES = {"fsdp2": fsdp2, "ours": cs.fully_shard}


@distributed(world=(2, more(4)))
def test_comm_debug_mode_counts_the_same_collectives_as_with_fsdp2(rank, world):
    shape = (2,) if world == 2 else (2, 2)
    counts = {}
    with forced("torch"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # with any dispatch mode
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # the mode's own hook
        for name, shard in ENGINES.items():
            torch.manual_seed(0)
            model = Stack()
            shard_blocks(model, shard, mesh=mesh_of(*shape))
            for _ in range(2):
                with CommDebugMode() as mode:
                    model(*vectors(rank, 0)).square().mean().backward()
            counts[name] = {str(op): count for op, count in mode.get_comm_counts().items() if count}
    assert counts["ours"] == counts["fsdp2"]
    assert sum(counts["ours"].values()) > 2


@distributed(world=2)
def test_patches_of_torch_distributed_get_the_same_collectives_as_with_fsdp2(rank, world):
    names = [_torch_distributed._ALL_GATHER, _torch_distributed._REDUCE_SCATTER, "all_reduce"]
    seen: dict[str, Counter] = {}
    for name, shard in ENGINES.items():
        torch.manual_seed(0)
        model = Transformer()
        found = seen[name] = Counter()
        with forced("torch"), pytest.MonkeyPatch.context() as patch:
            for block in model.blocks:
                shard(block, mesh=mesh_of(world))
            shard(model, mesh=mesh_of(world))
            next_token_loss(model, *token_batch(rank, 0)).backward()
            for each, theirs in [(each, getattr(dist, each)) for each in names]:

                def counted(*args, each=each, kept=theirs, found=found, **kwargs):
                    found[each, str(kwargs.get("op"))] += 1
                    kwargs["async_op"] = False  # patches may do this
                    return kept(*args, **kwargs)

                patch.setattr(dist, each, counted)
            next_token_loss(model, *token_batch(rank, 1)).backward()
    assert seen["ours"] == seen["fsdp2"]
    assert len(seen["ours"]) == 2


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()
        testing_torch.forget_meshes()


@pytest.mark.parametrize("shape", [(4,), more((2, 2))], ids=str)
def test_training_runs_with_fake_tensors_and_torchs_fake_group(fake_world, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    shapes = {}
    for name, shard in ENGINES.items():
        with FakeTensorMode():
            model = Transformer(tied=True)
            for block in model.blocks:
                shard(block, mesh=mesh)
            shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            found = []
            for step in range(3):
                model.set_requires_gradient_sync(step != 1)
                loss = next_token_loss(model, torch.zeros(2, 8, dtype=torch.int64))
                loss.backward()
                if step != 1:
                    found += [tuple(p.grad.to_local().shape) for p in model.parameters()]
                    optimizer.step()
                    optimizer.zero_grad()
            shapes[name] = [*found, tuple(loss.shape)]
    assert shapes["ours"] == shapes["fsdp2"]


def test_the_plan_of_a_model_of_fake_tensors_matches_its_record(fake_world):
    mesh, inputs = init_device_mesh("cpu", (4,)), vectors(0, 0)
    with FakeTensorMode():
        model = Stack()
        shard_blocks(model, cs.fully_shard, mesh=mesh)
        model(*(torch.zeros(x.shape) for x in inputs)).sum().backward()
        record = cs.last_record(model)
        assert record is not None
        assert record.live_bytes == cs.make_plan(model).live_bytes()


# ---- memory


def shard_transformer(shard, mesh, listed=False, **model):
    torch.manual_seed(0)
    made = Transformer(**model)
    for block in made.blocks:
        shard(block, mesh=mesh)
    if listed:
        shard([made.norm, made.head], mesh=mesh)
    return shard(made, mesh=mesh)


def tracked_step(model, tokens):
    """Run a tracked step. Returns the tracker, and its results after forward, backward and step and at the peak."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tracker, seen = FSDPMemTracker(model, optimizer), {}
    tracker.track_inputs((tokens,))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # with any dispatch mode
        with tracker:
            loss = next_token_loss(model, tokens)
            seen["forward"] = memory_of(tracker)
            loss.backward()
            seen["backward"] = memory_of(tracker)
            optimizer.step()
            seen["step"] = memory_of(tracker)
    seen["peak"] = memory_of(tracker, "peak")
    return tracker, seen


def memory_of(tracker, when="current"):
    (found,) = tracker.get_tracker_snapshot(when).values()
    return Counter({getattr(kind, "name", kind): nbytes for kind, nbytes in found.items()})


def marks_of(model):
    """Bytes of the values that our reductions add to gradients: one per parameter, whether any rank has used it.

    These values are at the end of each rank's chunk of a group. The chunk is padded to a multiple of four elements.
    """
    total = 0
    for group in cs.make_plan(model).groups:
        pieces = sum(math.prod(param.shape) // group.shard_size for param in group.params)
        total += -(-(pieces + len(group.params)) // 4) * 4 - pieces
    return 4 * total


ALIKE = ["SHARDED_PARAM", "BUFFER", "ACT", "OPT", "INP", "UNSHARDED_GRAD"]  # same bytes as with FSDP2


@pytest.mark.parametrize("kind", ["real", "fake", "deferred"])
def test_torchs_memory_tracker_matches_fsdp2_and_the_peak_of_the_plan(fake_world, kind):
    mesh, seen = init_device_mesh("cpu", (4,)), {}
    with nullcontext() if kind == "real" else FakeTensorMode():
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        for name, shard in ENGINES.items():
            with torch.device("meta") if kind == "deferred" else nullcontext():
                model = shard_transformer(shard, mesh)
            if kind == "deferred":
                model.to_empty(device="cpu")
            tracker, seen[name] = tracked_step(model, tokens)
            assert len(tracker.memory_tracking) == 1 + len(model.blocks)
    ours, theirs = seen["ours"], seen["fsdp2"]
    for when in ("forward", "backward", "step", "peak"):
        assert [ours[when][each] for each in ALIKE] == [theirs[when][each] for each in ALIKE], when
    assert ours["step"]["SHARDED_GRAD"] - marks_of(model) == theirs["step"]["SHARDED_GRAD"] > 0
    assert ours["step"]["UNSHARDED_PARAM"] == 0  # all parameters are resharded
    gathered = ours["peak"]["UNSHARDED_PARAM"] + ours["peak"]["ALL_GATHER"]
    assert gathered == cs.make_plan(model).peak_bytes


@distributed(world=2)
def test_a_tracked_step_has_the_same_results_even_if_only_one_rank_is_tracked(rank, world):
    inputs, losses = token_batch(rank, 0), {}
    for tracked in ("none", "one", "all"):
        model = shard_transformer(cs.fully_shard, mesh_of(world), listed=True)
        for block in model.blocks:
            checkpoint_module(block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = losses[tracked] = []
        for step in range(7):
            if 3 <= step < 5 and (tracked == "all" or (tracked == "one" and rank == 0)):
                tracker = FSDPMemTracker(model, optimizer)
            else:
                tracker = nullcontext()
            with tracker:
                loss = next_token_loss(model, *inputs)
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        engine_pool = cs.stats(model)
        assert engine_pool["pool/arena_bytes"] > 0  # leases share the memory of the arena again
        assert engine_pool["pool/fallbacks"] == 0
    assert losses["none"] == losses["one"] == losses["all"]
    assert losses["none"][-1] < losses["none"][0]


class Reads(nn.Module):
    """Reads the weight of a submodule, which users unshard first."""

    def __init__(self):
        super().__init__()
        self.positions, self.layer = nn.Embedding(4, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x + self.positions.weight + self.positions(torch.arange(4)))


@pytest.mark.parametrize("engine", [cs.fully_shard, fsdp2], ids=["ours", "fsdp2"])
@distributed(world=1)
def test_modules_may_be_unsharded_while_a_tracker_is_active(rank, world, engine):
    model = Reads()
    for module in (model.positions, model.layer, model):
        engine(module, mesh=mesh_of(world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tracked in (False, True, False):
        with FSDPMemTracker(model, optimizer) if tracked else nullcontext():
            model.positions.unshard()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@simulated(world=1)
def test_after_a_tracker_hooks_and_classes_are_restored(rank, world):
    model = shard_transformer(cs.fully_shard, mesh_of(world), listed=True)
    hooks = [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()]
    tokens = token_batch(rank, 0)
    next_token_loss(model, *tokens).backward()
    engine = model._get_fsdp_state()._engine
    before = [type(part) for part in engine.parts()]
    tracker, _ = tracked_step(model, *tokens)
    snapshots = copy.deepcopy([each.snapshots for each in tracker.memory_tracking.values()])
    next_token_loss(model, *tokens).backward()
    assert [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()] == hooks
    assert [type(part) for part in engine.parts()] == before
    assert [each.snapshots for each in tracker.memory_tracking.values()] == snapshots
    copy.deepcopy(model)


@simulated(world=1)
def test_a_tool_that_drops_post_backward_or_sets_a_wrong_handle_gets_an_error(rank, world):
    model = shard_transformer(cs.fully_shard, mesh_of(world))
    state = model._get_fsdp_state()
    group = state._fsdp_param_group
    ours, heard = group.post_backward, []

    def wrapped(*args):
        heard.append(group.fsdp_params[0]._unsharded_param.grad is not None)
        ours(*args)

    group.post_backward = wrapped
    next_token_loss(model, *token_batch(rank, 0)).backward()
    assert heard == [True, False]  # at the second call, the gradient is that of the sharded parameter
    group.post_backward = lambda *args: None
    with pytest.raises(RuntimeError, match="does not call the original one"):
        next_token_loss(model, *token_batch(rank, 0)).backward()
    group.post_backward = ours
    next_token_loss(model, *token_batch(rank, 0)).backward()
    assert heard == [True, False]
    with pytest.raises(AttributeError, match="expected the handle of a forward hook"):
        state._pre_forward_hook_handle = nn.Linear(1, 1).register_forward_pre_hook(print)


# ---- the flight recorder

RECORDED = """
import json, os, sys
from collections import Counter
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
mesh, found = init_device_mesh("cpu", (2,)), {}

def entries():
    return json.loads(_dump_fr_trace_json()).get("entries", [])

for transport in ("fsdp2", "torch", "packed", "p2p"):
    os.environ["COMPOSABLE_SHARD_TRANSPORT"] = transport
    shard, model = fsdp2 if transport == "fsdp2" else cs.fully_shard, Transformer()
    for block in model.blocks:
        shard(block, mesh=mesh)
    shard(model, mesh=mesh)
    for step in range(2):
        before = len(entries())
        next_token_loss(model, *token_batch(rank, step)).backward()
    found[transport] = Counter(each["profiling_name"] for each in entries()[before:])
done = Counter(each.kind.name for each in cs.last_record(model).actions)
found["record"] = {kind: done[kind] for kind in ("UNSHARD", "REDUCE")}
print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.matrix
def test_torchs_flight_recorder_shows_each_gather_and_reduction_with_any_transport(tmp_path):
    places = [str(Path(__file__).parents[1]), str(Path(cs.__file__).parents[1])]
    env = os.environ | {"TORCH_FR_BUFFER_SIZE": "1000", "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-c", RECORDED]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=env, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [each.communicate(timeout=120)[0] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    for output in outputs:
        found = json.loads(output)
        record, theirs = found.pop("record"), found.pop("fsdp2")
        assert found["torch"] == theirs
        for transport, seen in found.items():
            assert seen.pop("gloo:all_gather") == record["UNSHARD"], transport
            assert sum(seen.values()) == record["REDUCE"], transport
