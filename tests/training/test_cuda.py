"""Tests that need a CUDA device. Each one runs in a separate process, on one GPU.

If a test needs collectives, the process is rank 0 of two, and `bench/_echo.py` simulates the other rank. A world of one
rank has no collectives.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(310),
]

SETUP = """
import os
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
import composable_shard
import _echo

DEVICE = torch.device(os.environ["DEVICE"], 0) if os.environ["DEVICE"] == "cuda" else torch.device("cpu")
CARD = DEVICE.type == "cuda"
if CARD:
    torch.cuda.set_device(DEVICE)
if WORLD > 1:
    _echo.init(WORLD, DEVICE)
else:
    dist.init_process_group(
        "nccl" if CARD else "gloo", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE if CARD else None
    )
mesh = init_device_mesh(DEVICE.type, (WORLD,))


def plain():
    torch.manual_seed(0)
    layers = lambda: [nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)]
    return nn.Sequential(*[nn.Sequential(*layers()) for _ in range(4)]).to(DEVICE)


def build(**kwargs):
    model = plain()
    for block in model:
        composable_shard.fully_shard(block, mesh=mesh, **kwargs)
    return composable_shard.fully_shard(model, mesh=mesh, **kwargs)


def batch():
    return torch.randn(8, 256, device=DEVICE)


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def warmed(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x = batch()
    for _ in range(4):
        step(model, optimizer, x)
    if CARD:
        torch.cuda.synchronize()
    return optimizer, x


def refuse_waits(on):
    if CARD:
        torch.cuda.set_sync_debug_mode("error" if on else "default")
"""


def run(code: str, world: int = 2, device: str = "cuda", **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'bench'}", "DEVICE": device, **variables}
    done = subprocess.run(
        [sys.executable, "-c", f"WORLD = {world}\n{SETUP}{code}\ndist.destroy_process_group()\n"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


HALF = "mp_policy=composable_shard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("policy", ["", HALF, "reshard_after_forward=False"])
def test_a_steady_step_has_no_host_sync_and_no_record_stream(policy, world):
    run(
        f"""
model = build({policy})
optimizer, x = warmed(model)

def refused(*args):
    raise AssertionError("record_stream")

torch.Tensor.record_stream = refused
refuse_waits(True)
for _ in range(3):
    step(model, optimizer, x)
refuse_waits(False)
""",
        world,
    )


def test_gathers_and_reductions_run_on_two_streams_of_high_priority():
    run("""
seen = {"gather": set(), "reduce": set()}

def noting(name, kind):
    real = getattr(_echo.EchoGroup, name)

    def call(group, *args):
        if CARD:
            seen[kind].add(torch.cuda.current_stream())
        return real(group, *args)

    setattr(_echo.EchoGroup, name, call)

model = build()
optimizer, x = warmed(model)
for name in ("_allgather_base", "allgather_into_tensor_coalesced"):
    noting(name, "gather")
noting("_reduce_scatter_base", "reduce")
for _ in range(2):
    step(model, optimizer, x)
if CARD:
    (gathers,), (reductions,) = seen["gather"], seen["reduce"]
    assert len({gathers, reductions, torch.cuda.current_stream()}) == 3, seen
    assert gathers.priority < 0 and reductions.priority < 0, seen
""")


def test_after_warm_up_the_pool_allocates_nothing():
    run("""
model = build()
optimizer, x = warmed(model)
before = composable_shard.stats(model)["pool/allocations"]
for _ in range(3):
    step(model, optimizer, x)
assert composable_shard.stats(model)["pool/allocations"] == before > 0
""")


def test_after_warm_up_peak_gpu_memory_is_constant():
    run("""
model = build()
optimizer, x = warmed(model)
peaks = []
for _ in range(4):
    if CARD:
        torch.cuda.reset_peak_memory_stats()
    step(model, optimizer, x)
    peaks.append(torch.cuda.max_memory_allocated() if CARD else 0)
assert len(set(peaks)) == 1, peaks
""")


def test_a_world_of_one_trains_like_the_unsharded_model():
    run(
        """
models = build(), plain()
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
for _ in range(6):
    x = batch()
    ours, theirs = (step(model, optimizer, x) for model, optimizer in zip(models, optimizers))
    torch.testing.assert_close(ours, theirs)
for p, q in zip(*(model.parameters() for model in models)):
    torch.testing.assert_close(p.full_tensor(), q)
""",
        world=1,
    )


def test_offloaded_shards_stay_on_the_host_and_train_like_the_unsharded_model():
    run(
        """
torch.manual_seed(0)
models = build(offload_policy=composable_shard.CPUOffloadPolicy()), plain()
assert all(p.to_local().device.type == "cpu" for p in models[0].parameters())
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
for _ in range(3):
    x = batch()
    ours, theirs = (step(model, optimizer, x) for model, optimizer in zip(models, optimizers))
    torch.testing.assert_close(ours, theirs)
assert all(p.to_local().device.type == "cpu" for p in models[0].parameters())
""",
        world=1,
    )


LOSSES = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = build()
SETTER
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1)
print([step(model, optimizer, batch()).item() for _ in range(5)])
"""


def test_transports_and_a_separate_reduction_group_are_bitwise_identical_to_fsdp2():
    losses = {
        "direct": run(LOSSES.replace("SETTER", ""), COMPOSABLE_SHARD_TRANSPORT="direct"),
        "packed": run(LOSSES.replace("SETTER", ""), COMPOSABLE_SHARD_TRANSPORT="packed"),
        "apart": run(LOSSES.replace("SETTER", "model.set_separate_reduce_scatter_group()")),
        "fsdp2": run(
            LOSSES.replace("build()", "plain()").replace("SETTER", "[fully_shard(m) for m in (*model, model)]")
        ),
    }
    assert len(set(losses.values())) == 1, losses


def test_setters_for_communication_memory_work():
    run(
        """
model = build()
model.set_allocate_memory_from_process_group_for_comm(True)
optimizer, x = warmed(model)
model = build()
try:
    model.set_symm_mem_for_comm()
except RuntimeError as error:
    assert "use 2.12 or later" in str(error) or "does not find allocation backend" in str(error), error
optimizer, x = warmed(model)
""",
        world=1,
    )
