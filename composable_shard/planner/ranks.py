"""Ranks that measure: ranks of a launcher, or processes that this process starts, watches and ends.

A rank that is started here communicates with its parent through a pipe, and finds the other ranks through the parent's
store. It ends when the pipe is closed, so it never outlives its parent. Its output goes to an unnamed file.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any

import torch
import torch.distributed as dist

from .._comm.mesh import accelerator
from .._torch.distributed import launched
from ..errors import ComposableShardError, RankFailedError, ShardConfigValueError, WorldTimeoutError
from . import host

Progress = Callable[[str, int, int], None]  # the current measurement, steps done, and total steps
_HERE = "127.0.0.1"
_GRACE_S = 1.0  # after a rank has failed, other ranks may still report their failures
_END_S = 10.0  # time limit for a rank to exit after its work is done
_OUTPUT_CHARACTERS = 3000  # limit of the shown output of a failed rank
_START = (
    "import sys; from multiprocessing.connection import Connection; pipe = Connection(int(sys.argv[1])); "
    "sys.path[:] = pipe.recv(); from composable_shard.planner.ranks import serve; serve(pipe)"
)


@dataclass(frozen=True)
class Place:
    """The position of a rank.

    Attributes:
        rank, ranks: its rank, and the world size.
        local_rank, local_ranks: the same within its node.
        port: port of the store of the process that started the ranks; None under a launcher.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    port: int | None = None


def place_of_launcher() -> Place | None:
    """The place of this process if a launcher such as torchrun started it, else None.

    Raises:
        ShardConfigValueError: a variable of the launcher is not a number.
    """
    if not launched():
        return None
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    local = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", ranks)
    try:
        return Place(int(rank), int(ranks), *map(int, local))
    except ValueError as error:
        raise ShardConfigValueError(f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE: {error}") from None


def check_ranks(ranks: int) -> None:
    """Check that there are enough ranks for a link.

    Raises:
        ShardConfigValueError: there are fewer than two.
    """
    if ranks < 2:
        raise ShardConfigValueError(f"ranks={ranks}: a link has two ends; measure with at least 2 ranks")


def default_ranks(asked: str) -> int:
    """The number of ranks of a node: one per accelerator if several are available and requested, else 2."""
    return 2 if asked == "cpu" or accelerator() is None else max(2, torch.accelerator.device_count())


def device_kind(asked: str, local_ranks: int) -> str:
    """The device type that the ranks of this node measure: the requested one, or for "auto" the accelerator, if any.

    Raises:
        ShardConfigValueError: there is no such device, or there are fewer devices than ranks.
    """
    device = accelerator()
    kind = ("cpu" if device is None else device.type) if asked == "auto" else asked
    if kind == "cpu":
        return kind
    if device is None or device.type != kind:
        raise ShardConfigValueError(f"device: this process sees no {kind} device; use 'cpu' to measure the processors")
    count = torch.accelerator.device_count()
    if count < local_ranks:
        raise ShardConfigValueError(
            f"device: {local_ranks} ranks on this node need {local_ranks} {kind} devices, but it has {count}; use one "
            "rank per device, if there are at least 2, or use 'cpu' to measure the processors"
        )
    return kind


@contextmanager
def joined(place: Place, kind: str, timeout: float) -> Iterator[torch.device]:
    """Context in which the ranks form the default process group, which also accepts CPU tensors.

    Args:
        place: place of this rank.
        kind: type of its device. The context returns the device.
        timeout: time limit of a collective, in seconds.
    """
    backend, device = "gloo", torch.device("cpu")
    if kind != "cpu":
        device = torch.device(kind, place.local_rank)
        torch.accelerator.set_device_index(device)
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    limit: dict[str, Any] = {"timeout": timedelta(seconds=timeout)}
    if place.port is not None:
        store = dist.TCPStore(_HERE, place.port, is_master=False, **limit)  # type: ignore[attr-defined]
        limit |= {"store": store, "rank": place.rank, "world_size": place.ranks}
    dist.init_process_group(backend, **limit)
    yield device
    dist.destroy_process_group()  # not after an error: it could wait for ranks that have ended


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Context that ends this process with exit code 1 if it takes longer, even while the process waits."""

    def end() -> None:
        sys.stderr.write(f"{what} did not finish within {seconds:g} s\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# ------------------------------------------------------------------------------------------------- in the parent


@dataclass(frozen=True)
class _Job:
    """The job of a rank: `target`, ``module:function``, is called with place, arguments and a progress callback."""

    target: str
    arguments: tuple[Any, ...]
    place: Place


@dataclass(frozen=True)
class _Process:
    """The process of a rank, its pipe, and its output."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: Connection
    output: IO[bytes]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.output.close()


@dataclass(frozen=True)
class _Failure:
    """Why a rank has no result: as one line, in full, and whether its process died without a message."""

    rank: int
    line: str
    text: str
    died: bool = False


def on_ranks(target: str, ranks: int, *arguments: Any, timeout: float, progress: Progress | None = None) -> list[Any]:
    """Call a function in new processes of this node, one per rank.

    Args:
        target: ``module:function``, called as ``function(place, *arguments, progress)``; see `joined`.
        ranks: number of processes.
        arguments: arguments of the function. They and its results are pickled.
        timeout: time limit of the whole call, in seconds.
        progress: called in this process with the progress of rank 0.

    Returns:
        the results, by rank.

    Raises:
        RankFailedError: a rank failed. The message names the rank and the reason.
        WorldTimeoutError: a rank did not finish in time.
    """
    deadline = time.monotonic() + timeout
    store = _store()
    processes: list[_Process] = []
    try:
        for rank in range(ranks):
            processes.append(_start(rank, _Job(target, arguments, Place(rank, ranks, rank, ranks, store.port))))
        values = _collect(processes, deadline, timeout, progress or silent)
        for each in processes:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(_END_S)
    finally:
        for each in processes:
            each.end()
    return [values[rank] for rank in range(ranks)]


def _store() -> Any:
    """Make a store that only processes of this machine can reach. By default, torch listens on all addresses."""
    listening = socket.create_server((_HERE, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        _HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def silent(what: str, done: int, total: int) -> None:
    """Ignore progress."""


def _start(rank: int, job: _Job) -> _Process:
    pipe, child = Pipe()
    output = tempfile.TemporaryFile()  # noqa: SIM115 - `_Process.end` closes it
    share = max(1, host.cores() // job.place.ranks)
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", _START, str(child.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={"OMP_NUM_THREADS": str(share), "GLOO_SOCKET_IFNAME": "lo", **os.environ},
        pass_fds=[child.fileno()],
        start_new_session=True,  # Ctrl-C goes to the parent, which ends its ranks
    )
    child.close()
    with suppress(ConnectionError):  # the rank has died already; `_received` reports it
        pipe.send([*sys.path])
        pipe.send(job)
    return _Process(rank, process, pipe, output)


def _collect(processes: Sequence[_Process], deadline: float, timeout: float, progress: Progress) -> dict[int, Any]:
    """Collect the results of the ranks, by rank."""
    pending: dict[Any, _Process] = {each.pipe: each for each in processes}
    values: dict[int, Any] = {}
    failures: list[_Failure] = []
    doing = "starting"
    while pending and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pending), timeout=left):
            kind, content = _received(pending[pipe])
            if kind == "progress":
                doing = content[0]
                progress(*content)
                continue
            process = pending.pop(pipe)
            if kind == "value":
                values[process.rank] = content
            else:
                failures.append(content)
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if failures:
        raise RankFailedError(_described(failures, len(processes)))
    if pending:
        late = _named(*(each.rank for each in pending.values()))
        raise WorldTimeoutError(
            f"{late} of {len(processes)} returned no result within {timeout:g} s and were ended. The last progress "
            f"of rank 0 was: {doing}. Increase the timeout, or measure less"
        )
    return values


def _received(process: _Process) -> tuple[str, Any]:
    """The next message of a rank, or its failure if the process has died."""
    try:
        kind, content = process.pipe.recv()
    except (EOFError, ConnectionError):
        code = process.process.wait()
        line = f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"
        return "failed", _Failure(process.rank, line, f"{line}.\n{_printed(process)}".strip(), died=True)
    if kind == "failed":
        text = "\n".join(part for part in (content, _printed(process)) if part)
        return kind, _Failure(process.rank, content.strip().splitlines()[-1], text)
    return kind, content


def _printed(process: _Process) -> str:
    process.output.seek(0)
    text = process.output.read().decode(errors="replace").strip()[-_OUTPUT_CHARACTERS:]
    return f"Its output:\n{text}" if text else ""


def _described(failures: Sequence[_Failure], ranks: int) -> str:
    """Describe failures: first ranks that died, because others may have failed as a consequence, then by time."""
    first, *others = sorted(failures, key=lambda failure: not failure.died)
    same = [failure.rank for failure in others if failure.text == first.text]
    parts = [f"{_named(first.rank, *same)} of {ranks} failed: {first.text}"]
    parts += [
        f"rank {failure.rank} failed later, perhaps as a consequence: {failure.line}"
        for failure in others
        if failure.rank not in same
    ]
    return "\n".join(parts)


def _named(*ranks: int) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


# ------------------------------------------------------------------------------------------------------ in a rank


def serve(pipe: Connection) -> None:
    """Run the job that is received through the pipe, and send the result."""
    job: _Job = pipe.recv()
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()

    def progress(what: str, done: int, total: int) -> None:
        if job.place.rank == 0:
            pipe.send(("progress", (what, done, total)))

    try:
        module, _, name = job.target.partition(":")
        value = getattr(importlib.import_module(module), name)(job.place, *job.arguments, progress)
        pipe.send(("value", value))
    except BaseException as error:
        pipe.send(("failed", _reason(error)))
        threading.Event().wait()  # wait until the parent ends this process: closed sockets would make peers fail


def _reason(error: BaseException) -> str:
    """The message of an error that is meant for users, or the traceback of any other error."""
    return str(error) if isinstance(error, ComposableShardError) else "".join(traceback.format_exception(error))


def _end_with(pipe: Connection) -> None:
    """End this process when its parent has ended, even while a collective blocks the main thread."""
    with suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)
