"""One rank of `checkpoint.py`: time saves and loads of a training state, in turns with DCP and plain files."""

import ctypes
import functools
import gc
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import _device
import _launch
import _models
import composable_shard as cs
from _engines import shard_units
from composable_shard import checkpoint
from composable_shard.checkpoint._io.digests import best

COLUMNS = 1024
AT_ONCE = 1 << 26  # bytes of one plain write or read
GROUPS = 16
PART = 16 << 20  # bytes of one request to a store
MOST_STEPS_S = 4.0  # of compute next to a save, on a slow disk
WRITER = """
import os, sys
path, total, at_once = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = bytes(at_once)
descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
while total > 0:
    total -= os.write(descriptor, data[: min(total, at_once)])
os.fsync(descriptor)
"""


def model_device() -> torch.device:
    """Return the device of this rank's model."""
    return torch.device(os.environ["BENCH_DEVICE"])


def layers_of(parameters: int, tensors: int) -> tuple[nn.Module, list[nn.Module]]:
    """Build equal layers in groups, with `parameters` elements, and `tensors` tensors including AdamW's moments."""
    count = max(tensors // 3, 1)  # a parameter and two tensors of the optimizer
    rows = max(parameters // count // COLUMNS, 2)
    layers = [nn.Linear(COLUMNS, rows, bias=False, device=model_device()) for _ in range(count)]
    each = -(-count // GROUPS)
    model = nn.Sequential(*(nn.Sequential(*layers[at : at + each]) for at in range(0, count, each)))
    return model, list(model)


def gpt_of(size: str) -> tuple[nn.Module, list[nn.Module]]:
    with model_device():
        model = _models.GPT(_models.SIZES[size])
    return model, list(model.blocks)  # type: ignore[arg-type]


class Job:
    """A model, sharded by the modules in `units`, and its AdamW."""

    def __init__(self, model: nn.Module, units: list[nn.Module], engine: str, folder: Path) -> None:
        self.model = model
        shard_units(engine, model, units, init_device_mesh(model_device().type, (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.folder = folder
        self.buffer = memoryview(mmap.mmap(-1, AT_ONCE))  # page-aligned, for the fastest plain reads
        self.buffer[:] = b"x" * AT_ONCE
        self.nbytes = 3 * sum(p.to_local().nbytes for p in self.model.parameters())  # type: ignore[attr-defined]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def of_torch(self) -> dict[str, Any]:
        """Return the state for torch's distributed checkpoints."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int) -> None:
        checkpoint.save(self.folder / "ours", self.state, step=step, overwrite=True)

    def save_dcp(self, step: int) -> None:
        dcp.save(self.of_torch(), checkpoint_id=self.folder / f"dcp-{step}")

    def save_plain(self, step: int) -> None:
        """Write as many bytes as this rank's state has, and fsync."""
        data, left = self.buffer, self.nbytes
        descriptor = os.open(self.plain(step), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        while left > 0:
            left -= os.write(descriptor, data[: min(left, AT_ONCE)])
        os.fsync(descriptor)
        os.close(descriptor)

    def load(self, step: int) -> None:
        checkpoint.load(self.folder / "ours", self.state, step=step)

    def load_dcp(self, step: int) -> None:
        state = self.of_torch()
        dcp.load(state, checkpoint_id=self.folder / f"dcp-{step}")
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def load_plain(self, step: int) -> None:
        with self.plain(step).open("rb", buffering=0) as file:
            while file.readinto(self.buffer):
                pass

    def plain(self, step: int) -> Path:
        return self.folder / f"plain-{step}-{dist.get_rank()}"

    def forget(self) -> None:
        """Drop all files from the page cache."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    def remove(self, step: int) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / f"dcp-{step}", ignore_errors=True)
            checkpoint.prune(self.folder / "ours", keep=1)
        self.plain(step).unlink(missing_ok=True)
        dist.barrier()


class StoreJob(Job):
    """A model and its AdamW that are saved to an object store. Plain bytes are put and got in parallel requests."""

    def __init__(self, model: nn.Module, units: list[nn.Module], engine: str, url: str) -> None:
        super().__init__(model, units, engine, Path())
        self.url = url
        self.store, _ = url_to_fs(url)
        self.data = bytes(self.nbytes)

    def save(self, step: int) -> None:
        checkpoint.save(f"{self.url}/ours", self.state, step=step, overwrite=True)

    def save_dcp(self, step: int) -> None:
        dcp.save(self.of_torch(), storage_writer=FsspecWriter(f"{self.url}/dcp-{step}"))

    def save_plain(self, step: int) -> None:
        self.store.pipe_file(self.object(step), self.data, chunksize=PART)

    def load(self, step: int) -> None:
        checkpoint.load(f"{self.url}/ours", self.state, step=step)

    def load_dcp(self, step: int) -> None:
        state = self.of_torch()
        dcp.load(state, storage_reader=FsspecReader(f"{self.url}/dcp-{step}"))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def load_plain(self, step: int) -> None:
        starts = [*range(0, self.nbytes, PART)]
        ends = [min(at + PART, self.nbytes) for at in starts]
        parts = self.store.cat_ranges([self.object(step)] * len(starts), starts, ends, on_error="raise")
        assert sum(map(len, parts)) == self.nbytes

    def object(self, step: int) -> str:
        return f"{self.url}/plain-{step}-{dist.get_rank()}"

    def remove(self, step: int) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            self.store.invalidate_cache()
            self.store.rm(self.url, recursive=True)
        dist.barrier()


def slowest(work: Callable[[], object]) -> float:
    """Return the time of `work` on the slowest rank in seconds, including queued GPU work."""
    dist.barrier()
    _device.synchronize(model_device().type)
    begin = time.perf_counter()
    work()
    _device.synchronize(model_device().type)
    took = time.perf_counter() - begin
    return float(_launch.everyone(torch.tensor(took, dtype=torch.float64)).max())


def iterate_rounds(settings: dict[str, Any]) -> Iterator[int]:
    """Yield round numbers from 0 (warm-up). After `seconds`, no new round begins, but round 1 always runs."""
    begin = time.monotonic()
    for number in range(settings["rounds"] + 1):
        elapsed = torch.tensor(time.monotonic() - begin, dtype=torch.float64)
        if number > 1 and float(_launch.everyone(elapsed).max()) > settings["seconds"]:  # same decision on all ranks
            return
        yield number


def saves_and_loads(
    job: Job, settings: dict[str, Any], kinds_of_loads: tuple[str, ...] = ("load, warm", "load, cold")
) -> dict[str, dict[str, list[float]]]:
    """Return the times in seconds by operation and implementation."""
    saves = {"ours": job.save, "dcp": job.save_dcp, "plain": job.save_plain}
    loads = {"ours": job.load, "dcp": job.load_dcp, "plain": job.load_plain}
    seconds: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in saves} for kind in ("save", *kinds_of_loads)
    }
    for turn in iterate_rounds(settings):
        names = list(saves)[turn % 3 :] + list(saves)[: turn % 3]
        figures = [("save", name, slowest(functools.partial(saves[name], turn))) for name in names]
        for kind in kinds_of_loads:
            for name in names:
                if kind == "load, cold":
                    job.forget()
                figures.append((kind, name, slowest(functools.partial(loads[name], turn))))
        job.remove(turn)
        if turn:  # the first one warms up
            for kind, name, took in figures:
                seconds[kind][name].append(took)
    return seconds


class Steps:
    """Compute during a save: the time of a fixed number of matrix products."""

    def __init__(self, seconds: float) -> None:
        self.left, self.right = (
            torch.randn(512, 512, device=model_device()),
            torch.randn(512, 512, device=model_device()),
        )
        self.count = 1
        self.run()  # the first product on a GPU loads libraries
        while self.run() < seconds / 8:
            self.count *= 2
        self.count = 8 * int(_launch.everyone(torch.tensor(float(self.count))).max())  # the same on all ranks

    def run(self) -> float:
        begin = time.perf_counter()
        for _ in range(self.count):
            self.left @ self.right
        _device.synchronize(model_device().type)
        return time.perf_counter() - begin


def asynchronous(job: Job, settings: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return the times for which saves block training, and the times of steps during saves, in seconds."""
    job.save(0)  # the first save loads libraries and creates communicators
    synchronous = slowest(lambda: job.save(1))
    apart = dist.new_group(backend="gloo")  # otherwise DCP's collectives could mix with those of the steps
    steps = Steps(min(3 * synchronous, MOST_STEPS_S))
    blocks: dict[str, list[float]] = {"ours": [], "ours, synchronous": [], "dcp": [], "a copy": []}
    tensors = [p.to_local().detach() for p in job.model.parameters()]  # type: ignore[attr-defined]
    pinned = model_device().type == _device.CUDA
    copies = [torch.empty_like(tensor, device="cpu", pin_memory=pinned) for tensor in tensors]

    def copy() -> None:
        for _ in range(3):  # the bytes of parameters and two moments
            torch._foreach_copy_(copies, tensors)

    beside: dict[str, list[float]] = {"nothing": [], "ours": [], "a plain writer": [], "dcp": []}
    for turn in iterate_rounds(settings):
        figures: list[tuple[dict[str, list[float]], str, float]] = []
        figures.append((blocks, "ours, synchronous", slowest(functools.partial(job.save, 10 * turn))))
        figures.append((blocks, "a copy", slowest(copy)))
        figures.append((beside, "nothing", slowest(steps.run)))
        handles: list[Any] = []

        def ours(step: int = 10 * turn + 1, handles: list[Any] = handles) -> None:
            handles.append(checkpoint.async_save(job.folder / "ours", job.state, step=step, overwrite=True))

        def torchs(step: int = turn, handles: list[Any] = handles) -> None:
            handles.append(
                dcp.async_save(job.of_torch(), checkpoint_id=job.folder / f"dcp-{step}", process_group=apart)
            )

        def plain(step: int = turn, handles: list[Any] = handles) -> None:
            argv = [sys.executable, "-c", WRITER, str(job.plain(step)), str(job.nbytes), str(AT_ONCE)]
            handles.append(subprocess.Popen(argv))

        for name, begin in (("ours", ours), ("a plain writer", plain), ("dcp", torchs)):
            took = slowest(begin)
            if name in blocks:
                figures.append((blocks, name, took))
            figures.append((beside, name, slowest(steps.run)))
            handle = handles.pop()
            handle.wait() if isinstance(handle, subprocess.Popen) else handle.result()
            dist.barrier()
        job.remove(turn)
        if turn:
            for where, name, took in figures:
                where[name].append(took)
    return {"blocked": blocks, "steps beside": beside}


def exchanged(settings: dict[str, Any], folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the times in seconds of DCP's load into models of ours and of FSDP2."""
    jobs = {
        engine: Job(*layers_of(settings["parameters"], settings["tensors"][-1]), engine, folder)
        for engine in ("ours", "fsdp2")
    }
    jobs["ours"].save_dcp(0)
    seconds: dict[str, list[float]] = {engine: [] for engine in jobs}
    for turn in range(settings["rounds"] + 1):
        for engine in sorted(jobs, reverse=bool(turn % 2)):
            took = slowest(functools.partial(jobs[engine].load_dcp, 0))
            if turn:
                seconds[engine].append(took)
    return {"dcp reads": seconds}


def full(job: Job) -> dict[str, int]:
    """Return the peak memory of `full_state_dict` in bytes: on rank 0 without the returned copy, and on other ranks."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise reused free memory would not be counted
    before = resident()
    with_peak = peak_of(lambda: cs.checkpoint.full_state_dict(job.model, rank0_only=True, cpu_offload=True))
    copy = sum(p.numel() * p.element_size() for p in job.model.parameters()) if dist.get_rank() == 0 else 0
    largest = max(sum(p.numel() * p.element_size() for p in unit.parameters()) for unit in job.model)
    beyond = _launch.everyone(torch.tensor(with_peak - before - copy))
    return {"largest group": largest, "rank 0": int(beyond[0]), "other ranks": int(beyond[1:].max())}


def file_system(folder: Path) -> str:
    """Return the file system type of a folder. On tmpfs, which is in memory, loads are never cold."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(mount, kind) for mount, kind in mounts if folder.resolve().is_relative_to(mount)]
    return max(holding, key=lambda each: len(each[0]))[1]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_of(work: Callable[[], object]) -> int:
    """Return the peak resident memory during `work`, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    keep = work()
    lines = Path("/proc/self/status").read_text().splitlines()
    del keep
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def main() -> None:
    settings = json.loads(sys.argv[1])
    rank, _ = _launch.join()
    torch.set_num_threads(1)
    place = [tempfile.mkdtemp(prefix="composable_shard_bench_", dir=settings["folder"]) if rank == 0 else ""]
    dist.broadcast_object_list(place)
    folder = Path(place[0])
    try:
        answers: dict[str, Any] = {
            "seconds": [],
            "full": None,
            "bytes": {},
            "file_system": file_system(folder),
            "digest": best(),
        }
        if "exchange" in settings["parts"]:
            answers["seconds"].append(("layers", settings["tensors"][-1], exchanged(settings, folder)))
        if "gpt" in settings["parts"]:
            job = Job(*gpt_of(settings["gpt"]), "ours", folder)
            tensors = 3 * len(list(job.model.parameters()))
            answers["seconds"].append((f"gpt {settings['gpt']}", tensors, saves_and_loads(job, settings)))
            answers["bytes"][f"gpt {settings['gpt']}"] = job.nbytes
            del job
        if settings["store"]:
            url = f"{settings['store']}/{folder.name}"
            store_job = StoreJob(*layers_of(settings["parameters"], settings["tensors"][0]), "ours", url)
            answers["seconds"].append(
                ("layers", settings["tensors"][0], saves_and_loads(store_job, settings, ("load",)))
            )
            answers["bytes"]["layers"] = store_job.nbytes
            del store_job
        of_layers = {"files", "async", "full"} & set(settings["parts"])
        for tensors in settings["tensors"] if of_layers else ():
            job = Job(*layers_of(settings["parameters"], tensors), "ours", folder)
            if "files" in settings["parts"]:
                answers["seconds"].append(("layers", tensors, saves_and_loads(job, settings)))
            if "async" in settings["parts"] and tensors == settings["tensors"][0]:
                answers["seconds"].append(("layers", tensors, asynchronous(job, settings)))
            if "full" in settings["parts"] and tensors == settings["tensors"][-1]:
                answers["full"] = full(job)
            answers["bytes"]["layers"] = job.nbytes
            del job
        if rank == 0:
            _launch.answer(json.dumps(answers))
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    _launch.leave()


if __name__ == "__main__":
    main()
