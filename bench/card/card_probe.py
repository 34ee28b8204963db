"""Count kernels per group on a GPU, and check that slow streams do not change losses.

    PYTHONPATH=$PWD:$PWD/bench python bench/card/card_probe.py counts
    PYTHONPATH=$PWD:$PWD/bench python bench/card/card_probe.py stress

One process is rank 0 of two and plays the other rank itself (`_echo.py`).

- *counts*: kernels and CUDA runtime calls that one more block adds to a step, ours and FSDP2's, by torch's profiler.
- *stress*: our lanes or the compute stream sleep before or after each job, or every other forward runs on a side
  stream. If a wait is missing, losses differ. The exit status is 1 then.

Without a GPU both run on the CPU, which only checks the script. The environment variable WIDTH sets the size of the
model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _echo
import composable_shard
from composable_shard._comm.lanes import StreamLane

CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CARD else torch.device("cpu")
WIDTH = int(os.environ.get("WIDTH", "1024"))
BATCH = 64
STEPS = 8
FEW, MANY = 4, 8  # blocks
SLEEP = 3_000_000  # cycles, more than a millisecond

SHARD: dict[str, Callable[..., object]] = {"ours": composable_shard.fully_shard, "fsdp2": fsdp2}


def build(engine: str, mesh: DeviceMesh, blocks: int = MANY, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )
    ).to(DEVICE)
    for module in (*model, model):
        SHARD[engine](module, mesh=mesh, **options)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def launched(model: nn.Module) -> Counter[str]:
    """Count kernels and CUDA runtime calls of a step after warm-up, by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    x = torch.randn(BATCH, WIDTH, device=DEVICE)
    for _ in range(5):
        step(model, optimizer, x)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CARD else [])]) as profiler:
        step(model, optimizer, x)
        if CARD:
            torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            found[f"device {event.name[:40]}"] += 1
        elif event.name.startswith("cuda"):
            found[event.name] += 1
    return found


def counts(mesh: DeviceMesh) -> bool:
    """Print the kernels and calls that one more block adds to a step."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for label, options in (("float32", {}), ("bfloat16, reduced in float32", {"mp_policy": mixed})):
        for engine, transport in (("ours", "direct"), ("ours", "packed"), ("fsdp2", "")):
            with mock.patch.dict(os.environ, COMPOSABLE_SHARD_TRANSPORT=transport or "direct"):
                few, many = (launched(build(engine, mesh, blocks, **options)) for blocks in (FEW, MANY))
            added = {name: (many[name] - few[name]) / (MANY - FEW) for name in many | few if many[name] != few[name]}
            shown = dict(sorted(added.items(), key=lambda item: -item[1]))
            print(f"{engine} {transport}, {label}, per group: {shown}", flush=True)
    return True


def sleep() -> None:
    if CARD:
        torch.cuda._sleep(SLEEP)


@contextmanager
def slow_lanes(behind: bool) -> Iterator[None]:
    """Let lanes sleep before each job, or after it if `behind`."""

    def sleeping(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(lane: StreamLane, *args: Any, **kwargs: Any) -> Any:
            if not behind:
                with lane._stream:
                    sleep()
            job = real(lane, *args, **kwargs)
            if behind:
                with lane._stream:
                    sleep()
            return job

        return call

    with ExitStack() as stack:
        for name, real in (("start", StreamLane.start), ("launch", StreamLane.launch)):
            stack.enter_context(mock.patch.object(StreamLane, name, sleeping(real)))
        yield


def losses(mesh: DeviceMesh, slow_compute: bool = False, side: bool = False) -> list[float]:
    """Return the losses of some steps. With `side`, every other forward runs on a side stream with correct waits."""
    model = build("ours", mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if slow_compute:
        for block in model:
            block[1].register_forward_hook(lambda *_: sleep())
            block[2].register_full_backward_hook(lambda *_: sleep())
    stream = torch.cuda.Stream() if CARD and side else None
    found = []
    for number in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        if stream is None or number % 2 == 0:
            found.append(step(model, optimizer, x))
            continue
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = model(x).float().square().mean()
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [loss.item() for loss in found]


def stress(mesh: DeviceMesh) -> bool:
    """Check that losses are bitwise identical, whichever stream is slow."""
    wanted = losses(mesh)
    same = True
    for slow in ("nothing", "lanes, before", "lanes, behind", "compute", "side stream"):
        with slow_lanes("behind" in slow) if "lanes" in slow else nullcontext():
            found = losses(mesh, slow == "compute", slow == "side stream")
        same = same and found == wanted
        outcome = "bitwise identical" if found == wanted else f"DIFFERENT: {found} instead of {wanted}"
        print(f"stress (slow: {slow}): {outcome}", flush=True)
    return same


def main() -> int:
    probes = {"counts": counts, "stress": stress}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", choices=probes)
    options = parser.parse_args()
    if CARD:
        torch.cuda.set_device(DEVICE)
    _echo.init(2, DEVICE)
    try:
        return int(not probes[options.probe](init_device_mesh(DEVICE.type, (2,))))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
