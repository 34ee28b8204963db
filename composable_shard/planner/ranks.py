"""Ranks that measure: those that a launcher has started, or processes that this one starts, watches and ends.

A rank that is started here talks to its parent by a pipe, and meets the others at the parent's store. It ends when the
pipe does, so none outlives its parent, however that ends; and what it prints goes to a file without a name.
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
from .._errors import ComposableShardError, RankFailedError, ShardConfigValueError, WorldTimeoutError
from .._torch.distributed import launched
from . import host

Progress = Callable[[str, int, int], None]  # what is measured, how many steps of it are done, and how many there are
_HERE = "127.0.0.1"
_GRACE_S = 1.0  # after a rank has failed, others may still say why they have
_END_S = 10.0  # how long a rank may take to end when its work is done
_OUTPUT_CHARACTERS = 3000  # of what a failed rank has printed
_START = (
    "import sys; from multiprocessing.connection import Connection; pipe = Connection(int(sys.argv[1])); "
    "sys.path[:] = pipe.recv(); from composable_shard.planner.ranks import serve; serve(pipe)"
)


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        rank, ranks: its number, and how many there are.
        local_rank, local_ranks: the same among the ranks of its node.
        port: of the store, at the process that has started the ranks; None under a launcher.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    port: int | None = None


def place_of_launcher() -> Place | None:
    """This process's place, if a launcher such as torchrun has started it; None otherwise.

    Raises:
        ShardConfigValueError: a variable of the launcher is no number.
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
    """See that there are ranks enough for a link.

    Raises:
        ShardConfigValueError: there are not.
    """
    if ranks < 2:
        raise ShardConfigValueError(f"ranks={ranks}: a link has two ends; measure with at least 2 ranks")


def default_ranks(asked: str) -> int:
    """How many ranks a node gets: one for each of several accelerators, if these are asked for; else 2."""
    return 2 if asked == "cpu" or accelerator() is None else max(2, torch.accelerator.device_count())


def device_kind(asked: str, local_ranks: int) -> str:
    """The type of device that ranks of this node measure: what was asked for, or for "auto" the accelerator.

    Raises:
        ShardConfigValueError: there is no such device, or less than one for each rank.
    """
    device = accelerator()
    kind = ("cpu" if device is None else device.type) if asked == "auto" else asked
    if kind == "cpu":
        return kind
    if device is None or device.type != kind:
        raise ShardConfigValueError(f"device: this process sees no {kind} device; measure the processors with 'cpu'")
    count = torch.accelerator.device_count()
    if count < local_ranks:
        raise ShardConfigValueError(
            f"device: {local_ranks} ranks on this node need as many {kind} devices, and it has {count}; take as many "
            "ranks as there are devices, if there are 2 or more, or measure the processors with 'cpu'"
        )
    return kind


@contextmanager
def joined(place: Place, kind: str, timeout: float) -> Iterator[torch.device]:
    """Within this context the ranks are the default process group, whose tensors may be on the CPU, too.

    Args:
        place: of this rank.
        kind: type of its device, which it gets.
        timeout: seconds that a collective may take.
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
    dist.destroy_process_group()  # not after an error: it could wait for ranks that are gone


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """End this process with exit code 1 if the context takes longer, whatever it waits for."""

    def end() -> None:
        sys.stderr.write(f"{what} has not ended within {seconds:g} s\n")
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
    """What a rank is asked to do: call `target`, ``module:function``, with its place, arguments, and for progress."""

    target: str
    arguments: tuple[Any, ...]
    place: Place


@dataclass(frozen=True)
class _Process:
    """A rank, its pipe, and what it has printed."""

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
    """Why a rank has given no result: in a line, in full, and whether it has died without a word."""

    rank: int
    line: str
    text: str
    died: bool = False


def on_ranks(target: str, ranks: int, *arguments: Any, timeout: float, progress: Progress | None = None) -> list[Any]:
    """Call a function in as many new processes of this node, a rank each.

    Args:
        target: ``module:function``, called as ``function(place, *arguments, progress)``; see `joined`.
        ranks: number of processes.
        arguments: travel by pickle, and so does what the function returns.
        timeout: seconds for all of it.
        progress: is called here with what the function of rank 0 tells its own.

    Returns:
        what each rank has returned, by rank.

    Raises:
        RankFailedError: a rank has failed; the message says which, and why.
        WorldTimeoutError: not all ranks have ended in time.
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
    """A store that only processes of this machine can reach; by itself, torch's listens on all of its addresses."""
    listening = socket.create_server((_HERE, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        _HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


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
        start_new_session=True,  # Ctrl-C is for the parent, which ends its ranks
    )
    child.close()
    with suppress(ConnectionError):  # it has died already, as `_received` will say
        pipe.send([*sys.path])
        pipe.send(job)
    return _Process(rank, process, pipe, output)


def _collect(processes: Sequence[_Process], deadline: float, timeout: float, progress: Progress) -> dict[int, Any]:
    """The ranks' results, by rank."""
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
            f"{late} of {len(processes)} had no result within {timeout:g} s and were ended; the last sign of "
            f"rank 0 was: {doing}. Allow more time, or measure less"
        )
    return values


def _received(process: _Process) -> tuple[str, Any]:
    """The next message of a rank; its failure, if it has died."""
    try:
        kind, content = process.pipe.recv()
    except (EOFError, ConnectionError):
        code = process.process.wait()
        line = f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
        return "failed", _Failure(process.rank, line, f"{line}.\n{_printed(process)}".strip(), died=True)
    if kind == "failed":
        text = "\n".join(part for part in (content, _printed(process)) if part)
        return kind, _Failure(process.rank, content.strip().splitlines()[-1], text)
    return kind, content


def _printed(process: _Process) -> str:
    process.output.seek(0)
    text = process.output.read().decode(errors="replace").strip()[-_OUTPUT_CHARACTERS:]
    return f"It has printed:\n{text}" if text else ""


def _described(failures: Sequence[_Failure], ranks: int) -> str:
    """Those that have died come first, for the others may have failed because of them; then by time."""
    first, *others = sorted(failures, key=lambda failure: not failure.died)
    same = [failure.rank for failure in others if failure.text == first.text]
    parts = [f"{_named(first.rank, *same)} of {ranks} failed: {first.text}"]
    parts += [
        f"rank {failure.rank} failed later, perhaps only in consequence: {failure.line}"
        for failure in others
        if failure.rank not in same
    ]
    return "\n".join(parts)


def _named(*ranks: int) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


# ------------------------------------------------------------------------------------------------------ in a rank


def serve(pipe: Connection) -> None:
    """Do the one job that comes through the pipe, and answer."""
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
        threading.Event().wait()  # for the end: to close sockets now would have other ranks fail before they are asked


def _reason(error: BaseException) -> str:
    """The message of an error that is meant for users, the traceback of others."""
    return str(error) if isinstance(error, ComposableShardError) else "".join(traceback.format_exception(error))


def _end_with(pipe: Connection) -> None:
    """End this process when its parent is gone, also while a collective blocks the main thread."""
    with suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)
