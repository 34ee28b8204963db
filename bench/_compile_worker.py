"""One rank of `compile.py`: the time until a model is compiled, or the most memory that a step holds."""

import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import _noop
import _process
from _step_worker import batch, build, run

WARM_STEPS = 3


def cpu_seconds() -> float:
    """CPU time of this process, and of the compilers that it has started and that have ended."""
    return sum(os.times()[:4])


def agreed(seconds: float, op: dist.ReduceOp.RedOpType) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=op)
    return found.item()


def compile_times(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Seconds until the first gradients, by engine and number of layers, with no cache of any kind.

    Wall time of the slowest rank, and CPU time of all ranks: each compiles in its own process, so that all is counted.
    """
    torch._inductor.config.compile_threads = 1
    size, engines = settings["size"], settings["engines"]
    mesh = init_device_mesh("cpu", (world,))
    ids = batch(size, settings["batch"], rank, step=0)
    cases = [(name, depth) for depth in settings["layers"] for name in engines]

    def first(name: str, depth: int) -> tuple[float, float]:
        side = build(name, settings, mesh, depth=depth)
        torch._dynamo.reset()
        with fresh_cache():
            dist.barrier()
            cpu, wall = cpu_seconds(), time.perf_counter()
            side.gradients(ids)
            wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
            return agreed(wall, dist.ReduceOp.MAX), agreed(cpu, dist.ReduceOp.SUM)

    first(engines[0], 1)  # loads the compiler
    found: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    shuffle = random.Random(0)  # the same order on all ranks
    for _ in range(settings["compile_rounds"]):
        for case in shuffle.sample(cases, len(cases)):
            found[case].append(first(*case))
    return {"seconds": [(name, depth, *zip(*found[name, depth], strict=True)) for name, depth in cases]}


def memory(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Bytes beyond the model that one rank holds at most in a step; the larger figure of the ranks.

    `live` adds up what torch's allocator gave out and took back since before the model was made, less the rank's
    parameters. It is taken with collectives that do nothing: memory that is freed by a thread of gloo goes unseen.
    `resident` is how far the process grows, with gloo, beyond what it holds between steps.
    """
    ids = batch(settings["size"], settings["batch"], rank, step=0)
    model, live = live_bytes(settings, ids)
    torch._dynamo.reset()
    side = build(settings["engine"], settings, init_device_mesh("cpu", (world,)))
    for _ in range(WARM_STEPS):
        side.gradients(ids)
    side.optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    grown = growth(lambda: side.gradients(ids))
    found = torch.tensor([live, grown or 0])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    live, resident = found.tolist()
    return {"model": model, "live": live, "resident": resident if grown is not None else None}


def live_bytes(settings: dict[str, Any], ids: torch.Tensor) -> tuple[int, int]:
    """Bytes of this rank's parameters, and the most that a step holds beyond them."""
    _noop.register()
    mesh = DeviceMesh.from_group(dist.new_group(backend=_noop.NAME), "cpu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        side = build(settings["engine"], settings, mesh)
        for _ in range(WARM_STEPS):
            side.gradients(ids)
        side.optimizer.zero_grad(set_to_none=True)
        begins = time.time_ns()
        side.gradients(ids)
        ends = time.time_ns()
    params = [p.to_local() if isinstance(p, DTensor) else p for p in side.model.parameters()]
    model = sum(p.untyped_storage().nbytes() for p in params)
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        if begins <= event.start_ns() <= ends:
            most = max(most, held)
    return model, most - model


def growth(step: Any) -> int | None:
    """Bytes by which the process grows at most during a step; None where the system does not tell."""
    if not _process.forget_peak():
        return None
    before = _process.resident()
    step()
    return _process.resident("VmHWM") - before


def measure(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    return memory(settings, rank, world) if "engine" in settings else compile_times(settings, rank, world)


if __name__ == "__main__":
    run(measure)
