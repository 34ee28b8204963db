"""What only a CUDA device shows. Each test runs in a process of its own, a world of one rank on NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SETUP = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
import composable_shard

torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
mesh = init_device_mesh("cuda", (1,))


def build(**kwargs):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(4)]
    model = nn.Sequential(*blocks).cuda()
    for block in blocks:
        composable_shard.fully_shard(block, mesh=mesh, **kwargs)
    return composable_shard.fully_shard(model, mesh=mesh, **kwargs)


def step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", SETUP + code + "\ndist.destroy_process_group()\n"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_cuda
@pytest.mark.timeout(310)
@pytest.mark.parametrize("policy", ["", "mp_policy=composable_shard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)"])
def test_a_steady_step_never_waits_for_the_device(policy):
    run(f"""
model = build({policy})
optimizer = torch.optim.AdamW(model.parameters(), foreach=True, capturable=True)
x = torch.randn(8, 256, device="cuda")
for _ in range(3):
    step(model, optimizer, x)
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("error")
for _ in range(3):
    step(model, optimizer, x)
torch.cuda.set_sync_debug_mode("default")
""")


@needs_cuda
@pytest.mark.timeout(310)
def test_after_warm_up_the_pool_allocates_nothing_and_training_is_that_of_the_plain_model():
    run("""
import copy
model = build()
torch.manual_seed(0)
plain = nn.Sequential(*[
    nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(4)
]).cuda()
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
made = []
for number in range(6):
    x = torch.randn(8, 256, device="cuda")
    for m, optimizer in zip((model, plain), optimizers):
        step(m, optimizer, x)
    made.append(model.__dict__["_shard_state"].bound.engine.pool.allocations)
for p, q in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(p.full_tensor(), q)
assert made[2] == made[-1], made
""")


@needs_cuda
@pytest.mark.timeout(310)
def test_the_arena_can_lie_in_a_mem_pool_and_training_is_the_same():
    run("""
made = []
for wanted in (False, True):
    model = build()
    model.set_pool_policy(composable_shard.PoolPolicy(mem_pool=wanted))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(5):
        step(model, optimizer, torch.randn(8, 256, device="cuda"))
    made.append([p.full_tensor() for p in model.parameters()])
    pool = model.__dict__["_shard_state"].bound.engine.pool
    assert pool.arena_bytes
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    inside = [s for s in segments if s["address"] <= pool._slots[0].begin < s["address"] + s["total_size"]]
    assert bool(inside) == wanted, segments
assert all(torch.equal(a, b) for a, b in zip(*made))
""")
