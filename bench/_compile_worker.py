"""One rank of `compile.py`: time of compilation with cold or warm caches, or memory and copies of a step."""

import math
import os
import random
import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import _device
import _launch
import _noop
import _process
from _step_worker import Side, batch, build, run

WARM_STEPS = 3
COUNTED_STEPS = 8
ELEMENT_SIZES = {"float": 4, "double": 8, "long int": 8, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "bool": 1}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished child processes (compilers), in seconds."""
    return sum(os.times()[:4])


def compile_times(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Return the seconds until the first gradients, by engine and number of layers, with empty caches.

    Wall time is that of the slowest rank. CPU time is that of all ranks. Each rank compiles in its own process, so all
    CPU time is counted.
    """
    torch._inductor.config.compile_threads = 1
    size, engines = settings["size"], settings["engines"]
    mesh = init_device_mesh(settings["device"], (world,))
    ids = batch(size, settings["batch"], rank, step=0).to(settings["device"])
    cases = [(name, depth) for depth in settings["layers"] for name in engines]

    def first(name: str, depth: int) -> tuple[float, float]:
        side = build(name, settings, mesh, depth=depth)
        torch._dynamo.reset()
        with fresh_cache():
            dist.barrier()
            cpu, wall = cpu_seconds(), time.perf_counter()
            side.gradients(ids)
            _device.synchronize(settings["device"])
            took = time.perf_counter() - wall, cpu_seconds() - cpu
            every = _launch.everyone(torch.tensor(took, dtype=torch.float64))
            return every[:, 0].max().item(), every[:, 1].sum().item()

    first(engines[0], 1)  # imports the compiler
    found: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    shuffle = random.Random(0)  # the same order on all ranks
    for _ in range(settings["compile_rounds"]):
        for case in shuffle.sample(cases, len(cases)):
            found[case].append(first(*case))
    return {"seconds": [(name, depth, *zip(*found[name, depth], strict=True)) for name, depth in cases]}


def first_step(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Time the first forward and backward of this process, including the import of the compiler.

    Caches are in the folder `settings["cache"]`. Wall time is that of the slowest rank. CPU time, and hits and misses
    of AOTAutograd's cache, are sums over all ranks.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = settings["cache"]
    ids = batch(settings["size"], settings["batch"], rank, step=0).to(settings["device"])
    mesh = init_device_mesh(settings["device"], (world,))
    side = build(settings["first"], settings, mesh, depth=settings["depth"])
    dist.barrier()
    cpu, wall = cpu_seconds(), time.perf_counter()
    side.gradients(ids)
    _device.synchronize(settings["device"])
    took = time.perf_counter() - wall, cpu_seconds() - cpu
    counted = torch._dynamo.utils.counters["aot_autograd"]
    figures = *took, counted["autograd_cache_hit"], counted["autograd_cache_miss"]
    every = _launch.everyone(torch.tensor(figures, dtype=torch.float64))
    return {
        "wall": every[:, 0].max().item(),
        **dict(zip(("cpu", "hits", "misses"), every.sum(0)[1:].tolist(), strict=True)),
    }


def memory(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Measure the peak memory of a step above the parameters, in bytes. Figures are the maximum over the ranks.

    - `live`: allocated bytes of torch's CPU allocator without the rank's parameters. Measured with collectives that do
      nothing, because the profiler does not see memory that gloo's threads free.
    - `resident`: growth of resident memory during a step, with gloo.
    - `copied`: bytes that torch's operators copy in a step.
    - `faults`: page faults of a step.

    On a GPU, `live` is from torch's CUDA allocator with real collectives. The other figures are None.
    """
    ids = batch(settings["size"], settings["batch"], rank, step=0).to(settings["device"])
    if _launch.on_card():
        model, live = live_on_card(settings, ids, world)
        live = int(_launch.everyone(torch.tensor(live)).max())
        return {"model": model, "live": live, "resident": None, "copied": None, "faults": None}
    model, live = live_bytes(settings, ids)
    torch._dynamo.reset()
    side = build(settings["engine"], settings, init_device_mesh("cpu", (world,)))
    for _ in range(WARM_STEPS):
        side.gradients(ids)
    faults, copied = page_faults(side, ids), copied_bytes(side, ids)
    side.optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    grown = growth(lambda: side.gradients(ids))
    figures = torch.tensor([live, grown or 0, copied, faults])
    live, resident, copied, faults = _launch.everyone(figures).amax(0).tolist()
    resident = resident if grown is not None else None
    return {"model": model, "live": live, "resident": resident, "copied": copied, "faults": faults}


def page_faults(side: Side, ids: torch.Tensor) -> int:
    """Return the median number of minor page faults of a step."""
    found = []
    for _ in range(COUNTED_STEPS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        side.gradients(ids)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return sorted(found)[COUNTED_STEPS // 2]


def copied_bytes(side: Side, ids: torch.Tensor) -> int:
    """Return the bytes that `copy_` and `cat` write in a step. On a CPU, all copying operators call one of them.

    Copies that a compiler fused with other work, and copies of collectives, are not counted.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as watched:
        side.gradients(ids)
    size = next(side.model.parameters()).element_size()  # the profiler reports no dtype for tensors in a list
    found = 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "aten::copy_":
            found += math.prod(event.shapes()[0]) * ELEMENT_SIZES.get(event.dtypes()[0], size)
        elif event.name() == "aten::cat":
            found += sum(map(math.prod, event.structured_input_shapes()[0])) * size
    return found


def live_bytes(settings: dict[str, Any], ids: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of this rank's parameters, and the peak of a step above them."""
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
    model = parameter_bytes(side)
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        if begins <= event.start_ns() <= ends:
            most = max(most, held)
    return model, most - model


def live_on_card(settings: dict[str, Any], ids: torch.Tensor, world: int) -> tuple[int, int]:
    """Return the same as `live_bytes` from torch's CUDA allocator."""
    before = torch.cuda.memory_allocated()
    side = build(settings["engine"], settings, init_device_mesh("cuda", (world,)))
    for _ in range(WARM_STEPS):
        side.gradients(ids)
    side.optimizer.zero_grad(set_to_none=True)
    _device.forget_peak()
    side.gradients(ids)
    model = parameter_bytes(side)
    return model, _device.peak() - before - model


def parameter_bytes(side: Side) -> int:
    """Return the bytes of this rank's parameters or shards."""
    params = [p.to_local() if isinstance(p, DTensor) else p for p in side.model.parameters()]
    return sum(p.untyped_storage().nbytes() for p in params)


def growth(step: Any) -> int | None:
    """Return the growth of resident memory during a step, in bytes; None if the system does not report it."""
    if not _process.forget_peak():
        return None
    before = _process.resident()
    step()
    return _process.resident("VmHWM") - before


def measure(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    if "first" in settings:
        return first_step(settings, rank, world)
    return memory(settings, rank, world) if "engine" in settings else compile_times(settings, rank, world)


if __name__ == "__main__":
    run(measure)
