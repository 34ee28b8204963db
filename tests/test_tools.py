"""Tools of torch's own that look at communication: fake tensors, CommDebugMode, and patches of torch.distributed."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import mesh_of
from _models import Stack, shard_blocks, vectors
from _pool import distributed, more
from composable_shard import _torch_distributed
from test_transports import forced

ENGINES = {"fsdp2": fsdp2, "ours": cs.fully_shard}


@distributed(world=(2, more(4)))
def test_comm_debug_mode_counts_what_it_counts_under_fsdp2(rank, world):
    shape = (2,) if world == 2 else (2, 2)
    counts = {}
    with forced("torch"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # under any such mode
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # that of the mode
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
def test_who_patches_torch_distributed_sees_every_collective_with_fsdp2s_arguments(rank, world):
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
                    kwargs["async_op"] = False  # as a patch may do
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
        _torch_distributed.forget_meshes()


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_a_whole_training_runs_on_fake_tensors_with_torchs_fake_group(fake_world, shape):
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


def test_a_model_that_was_made_of_fake_tensors_plans_what_it_will_run(fake_world):
    mesh, inputs = init_device_mesh("cpu", (4,)), vectors(0, 0)
    with FakeTensorMode():
        model = Stack()
        shard_blocks(model, cs.fully_shard, mesh=mesh)
        model(*(torch.zeros(x.shape) for x in inputs)).sum().backward()
        record = cs.last_record(model)
        assert record is not None
        assert record.live_bytes == cs.make_plan(model).live_bytes()
