"""Start the ranks of a benchmark as processes on this machine, and end them in all cases.

Ranks communicate over loopback. With CUDA, each rank has its own GPU, or all share one (`share`), or one process plays
all ranks (`_echo.py`).
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, NoReturn

import torch
import torch.distributed as dist

import _device
import _echo

# With these settings, glibc keeps large blocks instead of returning their pages to the system after each use.
MALLOC_TUNED = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}

SHARED_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


class WorkerError(RuntimeError):
    """A rank failed, or the ranks did not end in time. If a rank reported its error, the message contains it."""


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
    log: BinaryIO | None = None,
) -> str:
    """Run `script argument` on `world` ranks and return the result of rank 0. All processes have ended then.

    Args:
        script: script of a rank.
        argument: command line argument of the script.
        world: number of ranks.
        timeout: time limit in seconds.
        tuned: set `MALLOC_TUNED` for all ranks.
        device: `cpu` or `cuda`.
        echo: run one process that plays all ranks.
        share: let all ranks use the first GPU. NCCL rejects two ranks on one GPU of a host, so each rank sets another
            host ID, and NCCL uses sockets. All collectives are real, but slow.
        log: file for all output of the ranks.

    Raises:
        WorkerError: a rank failed, or the time limit was reached, before rank 0 wrote its result.
    """
    with tempfile.TemporaryDirectory(prefix="composable_shard_bench_") as folder:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # print the stack of a rank that crashes
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
                # torch chooses the GPU of a device mesh by LOCAL_RANK, which can be left over from another launcher.
                of_rank = {"RANK": str(rank), "LOCAL_RANK": "0" if share else str(rank)}
                of_rank |= {**SHARED_GPU, "NCCL_HOSTID": f"rank{rank}"} if share else {}
                ranks.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env | of_rank)
                )
            try:
                _wait(ranks, time.monotonic() + timeout, timeout, f"in {log.name}" if log else "above")
            except WorkerError as error:  # closing NCCL communicators can hang or fail
                if not Path(folder, "result").exists():
                    raise WorkerError(_first_error(Path(folder)) or str(error)) from None
                print(f"{script.name}: {error}; rank 0 had written its result", file=sys.stderr)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.communicate()
        return Path(folder, "result").read_text()


def _first_error(folder: Path) -> str | None:
    """Return the error that a rank reported first; None if there is none."""
    files = sorted(folder.glob("error.*"), key=lambda file: file.stat().st_mtime_ns)
    return f"rank {files[0].suffix[1:]}: {files[0].read_text()}" if files else None


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float, timeout: float, output: str) -> None:
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                raise WorkerError(f"rank {rank} ended with exit status {code}; see its error {output}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise WorkerError(f"ranks {running} were still running after {timeout:g} s (--timeout) and were killed")
        time.sleep(0.1)


def join() -> tuple[int, int]:
    """Initialize the process group (NCCL on GPUs, otherwise gloo) and return (rank, world). Called on each rank."""
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
    """Return whether this rank computes on a CUDA device."""
    return os.environ["BENCH_DEVICE"] == _device.CUDA


def echoes() -> bool:
    """Return whether this process plays all ranks."""
    return bool(os.environ["BENCH_ECHO"])


def everyone(mine: torch.Tensor) -> torch.Tensor:
    """Gather a tensor from all ranks. Return a CPU tensor with a new first dimension. Called on each rank."""
    if echoes():
        return mine[None]
    mine = mine.to(os.environ["BENCH_DEVICE"])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).cpu()


@contextmanager
def report_errors() -> Iterator[None]:
    """Report an exception to `launch`, and end the process without closing process groups, which can hang."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        unfinished = Path(os.environ["BENCH_FOLDER"], f"part.{os.environ['RANK']}")
        unfinished.write_text(f"{type(error).__name__}: {error}")
        unfinished.rename(unfinished.with_stem("error"))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def answer(text: str) -> None:
    """Write the result that `launch` returns. Called on rank 0."""
    unfinished = Path(os.environ["BENCH_FOLDER"], "result.part")
    unfinished.write_text(text)
    unfinished.rename(unfinished.with_suffix(""))


def leave() -> NoReturn:
    """End the process without closing process groups. Called on each rank at the end.

    Closing them can hang with NCCL. With gloo, the interpreter's exit can end with "terminate called without an active
    exception" (pytorch#190489). Both would lose the result.
    """
    dist.barrier()
    if not echoes():  # otherwise there is only one process
        _wait_for_others(int(os.environ["WORLD_SIZE"]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _wait_for_others(world: int) -> None:
    # A rank that ends right after an NCCL barrier can close its sockets before its peers have passed the barrier, which
    # aborts them. So all ranks confirm it first. They use a file, because the process group may be simulated.
    store = dist.FileStore(os.path.join(os.environ["BENCH_FOLDER"], "leaving"), world)
    if store.add("passed", 1) == world:
        store.set("all", "")
    store.wait(["all"])


def _end_with_parent() -> None:
    # stdin is closed when the parent ends, even if it was killed.
    os.read(0, 1)
    os._exit(3)
