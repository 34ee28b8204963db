"""Starts the ranks of a benchmark as processes of this machine, and ends them, whatever happens.

Ranks are processes on loopback. With CUDA each has a GPU of its own, or all share one (`share`), or one process plays
all ranks with its echo (`_echo.py`).
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

import _device
import _echo

# With these, glibc keeps large blocks instead of giving their pages back after every use.
MALLOC_TUNED = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}

SHARED_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


class WorkerError(RuntimeError):
    """A rank failed, or the ranks did not end in time."""


def launch(
    script: Path,
    argument: str,
    *,
    world: int,
    timeout: float,
    tuned: bool,
    device: str = _device.CPU,
    echo: bool = False,
    share: bool = False,
) -> str:
    """Runs `script argument` as `world` ranks, or as one and its echo, and returns what rank 0 wrote as result.

    With `share` all ranks use the first GPU. NCCL refuses two ranks on one GPU of one host, so each rank names another
    host, and NCCL sends through sockets: every collective is real, and slow.

    Raises WorkerError when a rank fails, or `timeout` seconds have passed, before rank 0 has written its result. No
    process outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="composable_shard_bench_") as folder:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # a rank that crashes says where it was
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(world),
            "BENCH_DEVICE": device,
            "BENCH_ECHO": "1" if echo else "",
            "BENCH_SHARE": "1" if share else "",
        }
        env |= {"BENCH_FOLDER": folder, "BENCH_TIMEOUT": str(timeout)}
        env |= MALLOC_TUNED if tuned else {}
        command = [sys.executable, str(script), argument]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1 if echo else world):
                of_rank = {"RANK": str(rank)} | ({**SHARED_GPU, "NCCL_HOSTID": f"rank{rank}"} if share else {})
                ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=env | of_rank))
            try:
                _wait(ranks, time.monotonic() + timeout, timeout)
            except WorkerError as error:  # closing communicators of NCCL can hang or fail
                if not Path(folder, "result").exists():
                    raise
                print(f"{script.name}: {error}; rank 0 had written its result", file=sys.stderr)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.communicate()
        return Path(folder, "result").read_text()


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float, timeout: float) -> None:
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                raise WorkerError(f"rank {rank} ended with exit status {code}; its error is above")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise WorkerError(f"ranks {running} were still running after {timeout:g} s and were ended (--timeout)")
        time.sleep(0.1)


def join() -> tuple[int, int]:
    """Called in a rank: joins the group of all ranks, gloo's or on cards NCCL's, and returns (rank, world)."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    card = 0 if os.environ["BENCH_SHARE"] else rank
    device = torch.device(os.environ["BENCH_DEVICE"], card if on_card() else None)
    _device.select(device.type, card)
    if echoes():
        _echo.init(world, device)
        return rank, world
    store = dist.FileStore(os.path.join(os.environ["BENCH_FOLDER"], "store"), world)
    limit = timedelta(seconds=float(os.environ["BENCH_TIMEOUT"]))
    dist.init_process_group(
        "nccl" if on_card() else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=limit,
        device_id=device if on_card() else None,
    )
    return rank, world


def on_card() -> bool:
    """Called in a rank: whether it computes on a CUDA device."""
    return os.environ["BENCH_DEVICE"] == _device.CUDA


def echoes() -> bool:
    """Called in a rank: whether the other ranks are its echo."""
    return bool(os.environ["BENCH_ECHO"])


def everyone(mine: torch.Tensor) -> torch.Tensor:
    """Called in every rank: the ranks' tensors, on the CPU, along a new first dim."""
    if echoes():
        return mine[None]
    mine = mine.to(os.environ["BENCH_DEVICE"])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).cpu()


def answer(text: str) -> None:
    """Called in rank 0: the result that `launch` returns."""
    unfinished = Path(os.environ["BENCH_FOLDER"], "result.part")
    unfinished.write_text(text)
    unfinished.rename(unfinished.with_suffix(""))


def leave() -> NoReturn:
    """Called in every rank when all is done: ends the process without closing process groups.

    Closing them can hang with NCCL, and with gloo the interpreter's exit can end in "terminate called without an
    active exception" (pytorch#190489). Either would lose the result.
    """
    dist.barrier()
    if not echoes():  # else there is one process
        _wait_for_others(int(os.environ["WORLD_SIZE"]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _wait_for_others(world: int) -> None:
    # A rank that ends right after a barrier of NCCL can close its sockets before others have passed the barrier, which
    # aborts them. So all of them confirm it first; in a file, because the process group may be a simulated one.
    store = dist.FileStore(os.path.join(os.environ["BENCH_FOLDER"], "leaving"), world)
    if store.add("passed", 1) == world:
        store.set("all", "")
    store.wait(["all"])


def _end_with_parent() -> None:
    # The other end of stdin closes when the parent ends, also when it was killed.
    os.read(0, 1)
    os._exit(3)
