"""`processes`: run a function on every rank of a real gloo group, in worker processes that are kept for later calls.

Workers are started once. A job on N ranks uses the first N of them.

- If a job exceeds its time limit, the stacks of its workers are dumped. Then all workers are killed, and the next job
  starts new ones.
- After a job that fails, the next job gets a new process group.
- Workers end when this process ends, even if it is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

from ..errors import RankFailedError, ShardConfigStateError, ShardConfigValueError, WorldTimeoutError
from ._exchange import HERE
from ._spmd import Axes, check_world

T = TypeVar("T")
START_LIMIT_S = 180.0
JOB_LIMIT_S = 90.0
PEER_LIMIT_S = 5.0  # seconds for which the other ranks may continue after one has failed
MAX_GROUPS = 24  # number of process groups in a worker above which it gets a new default group
_START = (
    "import sys; from multiprocessing.connection import Connection; pipe = Connection(int(sys.argv[1])); "
    "sys.path[:] = pipe.recv(); from composable_shard.testing._worker import main; main(pipe, int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Job:
    """A function call that is sent to a worker.

    Attributes:
        target: ``module:function``.
        file: path of the module if it is a script, otherwise None.
        arguments: pickled arguments after the world. They are unpickled in `around`, so their modules are imported
            there.
        axes: names and sizes of the axes of the mesh.
        around: ``module:context manager`` in which the function runs.
        number: number of the job.
        rank, world: rank of the worker, and world size.
        epoch, store: number and store file of the default process group.
    """

    target: str
    file: str | None
    arguments: bytes
    axes: dict[str, int]
    around: str | None
    number: int = 0
    rank: int = 0
    world: int = 1
    epoch: int = 0
    store: str = ""


@dataclass
class Outcome:
    """Result or failure of a job on one rank. `at` is the time of a failure by CLOCK_MONOTONIC, which processes share.

    `groups` is the number of process groups in the worker.
    """

    rank: int
    ok: bool
    value: Any = None
    trace: str = ""
    at: float = 0.0
    groups: int = 1


class Worker:
    """One process, its pipe and its log (standard output, standard error and dumped stacks)."""

    def __init__(self, index: int, folder: Path) -> None:
        self.index = index
        self.log = folder / f"worker{index}-{time.monotonic_ns()}.log"
        self.pipe, child = Pipe()
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, str(child.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=[child.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the parent, which then stops its workers
            )
        child.close()
        self.pipe.send([*sys.path])
        self.mark = 0

    def wait_ready(self) -> None:
        with contextlib.suppress(EOFError):
            if self.pipe.poll(START_LIMIT_S) and self.pipe.recv() == "ready":
                return
        raise RankFailedError(f"worker {self.index} did not start:\n{self.output()}")

    def output(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self.mark)
            return log.read().decode(errors="replace")[-6000:]

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class Pool:
    """Running workers; their number is the largest world size so far.

    Args:
        around: ``module:context manager`` in which workers run each job.
    """

    def __init__(self, around: str | None = None) -> None:
        self.around = around
        self._workers: list[Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._jobs = itertools.count(1)
        self._epochs = itertools.count(1)
        self._epoch: tuple[int, int] | None = None  # (number, world) of the default group in use

    def run(
        self,
        target: str,
        world: int,
        *args: Any,
        axes: dict[str, int] | None = None,
        file: str | None = None,
        limit_s: float = JOB_LIMIT_S,
        label: str = "",
        **kwargs: Any,
    ) -> list[Any]:
        """Run `module:function` on `world` ranks. Returns the result of each rank.

        Raises:
            RankFailedError: a rank has failed; the message begins with its traceback.
            WorldTimeoutError: a rank did not return within `limit_s` seconds.
        """
        self._start(world)
        if self._epoch is None or self._epoch[1] != world:
            self._epoch = (next(self._epochs), world)
        assert self._folder is not None
        store = str(Path(self._folder.name) / f"store{self._epoch[0]}")
        number = next(self._jobs)
        workers = self._workers[:world]
        arguments = pickle.dumps((args, kwargs))  # not the pipe's pickler, which would share the memory of tensors
        asked = Job(target, file, arguments, axes or {"shard": world}, self.around)
        shared: dict[str, Any] = {"number": number, "world": world, "epoch": self._epoch[0], "store": store}
        jobs = [pickle.dumps(replace(asked, rank=rank, **shared)) for rank in range(world)]
        for rank, worker in enumerate(workers):
            worker.mark = worker.log.stat().st_size
            worker.pipe.send_bytes(jobs[rank])
        outcomes, late = self._collect(workers, limit_s)
        if late or not all(o.ok for o in outcomes):
            message = _describe(label or target, world, workers, outcomes, late, limit_s)
            failed = any(not o.ok for o in outcomes)
            self._recover(late)
            raise (RankFailedError if failed else WorldTimeoutError)(message)
        if max(o.groups for o in outcomes) > MAX_GROUPS:
            self._epoch = None
        return [o.value for o in outcomes]

    def close(self) -> None:
        """Ask the workers to end, and kill those that are still running after 5 seconds."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(b"")
        deadline = time.monotonic() + 5
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            worker.kill()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, world: int) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="shard-tests-")
        fresh = [Worker(i, Path(self._folder.name)) for i in range(len(self._workers), world)]
        try:
            for worker in fresh:
                worker.wait_ready()
        except BaseException:
            for worker in fresh:
                worker.kill()
            raise
        self._workers += fresh

    def _collect(self, workers: Sequence[Worker], limit_s: float) -> tuple[list[Outcome], list[Worker]]:
        """Outcomes by rank, and the workers without an outcome in time. Their stacks are dumped."""
        pending: dict[Any, int] = {w.pipe: rank for rank, w in enumerate(workers)}
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + limit_s
        while pending and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pending), timeout=left):
                rank = pending.pop(pipe)
                outcomes.append(_receive(rank, workers[rank]))
                if not outcomes[-1].ok:
                    deadline = min(deadline, time.monotonic() + PEER_LIMIT_S)
        late = [workers[rank] for rank in pending.values()]
        for worker in late:
            worker.dump_stacks()
        if late:
            time.sleep(0.5)  # faulthandler writes to the log from the signal handler
        return sorted(outcomes, key=lambda o: o.rank), late

    def _recover(self, late: Sequence[Worker]) -> None:
        """After a failure, have the next job create a new process group, and new workers if one hangs or is dead."""
        self._epoch = None
        if late or any(w.process.poll() is not None for w in self._workers):
            for worker in self._workers:
                worker.kill()
            self._workers = []


def _receive(rank: int, worker: Worker) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(worker.pipe.recv_bytes())
    except EOFError:
        code = worker.process.wait()
        return Outcome(rank, False, trace=f"the worker died with exit code {code}", at=0.0)
    return outcome


def _describe(
    job: str,
    world: int,
    workers: Sequence[Worker],
    outcomes: Sequence[Outcome],
    late: Sequence[Worker],
    limit_s: float,
) -> str:
    """The first failure in full, then the failures and outputs of the other ranks."""
    failed = sorted((o for o in outcomes if not o.ok), key=lambda o: o.at)
    parts = []
    for index, outcome in enumerate(failed):
        head = "failed first" if index == 0 else "failed later, perhaps as a consequence"
        trace = outcome.trace if index == 0 else "\n".join(outcome.trace.strip().splitlines()[-12:])
        parts.append(f"rank {outcome.rank} of {world} {head} ({job}):\n{trace}")
        if output := workers[outcome.rank].output().strip():
            parts.append(f"output of rank {outcome.rank}:\n{output}")
    for worker in late:
        why = f"did not return within {limit_s:g} s" if not failed else "was stopped after another rank had failed"
        parts.append(f"rank {worker.index} of {world} {why} ({job}); its stacks and output:\n{worker.output()}")
    return "\n\n".join(parts)


@functools.cache
def _pool(around: str | None) -> Pool:
    pool = Pool(around)
    atexit.register(pool.close)
    return pool


class Processes:
    """See `processes`."""

    def __init__(self, world_size: int, mesh: Axes | None, timeout: float, around: str | None = None) -> None:
        self.world_size = world_size
        self._axes = check_world(world_size, mesh)
        self._timeout = timeout
        self._around = around

    def __call__(self, body: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Run `body(world, *args, **kwargs)` on every rank. Returns a list with the result of each rank."""
        if HERE.exchange is not None:
            raise ShardConfigStateError("processes: was called by a rank of a simulated world; worlds cannot be nested")
        module, name = getattr(body, "__module__", None), getattr(body, "__qualname__", "")
        if not module or not name or "<" in name:
            raise ShardConfigValueError(
                f"body: other processes cannot import {body!r}; define it at the top level of a module, not as a lambda"
            )
        file = getattr(sys.modules[module], "__file__", None) if module == "__main__" else None
        target = f"{module}:{name}"
        return self.by_name(target, *args, file=file, **kwargs)

    def by_name(self, target: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``module:function`` on every rank; see `Pool.run` for `file` and `label`."""
        pool = _pool(self._around)
        return pool.run(target, self.world_size, *args, axes=self._axes, limit_s=self._timeout, **kwargs)


def processes(world_size: int, *, mesh: Axes | None = None, timeout: float = JOB_LIMIT_S) -> Processes:
    """Run functions on `world_size` ranks, each of which is a process. They communicate over gloo.

    Use it like `spmd`:

        losses = testing.processes(2)(body)  # by rank

    The first use starts the processes, which takes a few seconds. They are kept until this process ends. Ranks connect
    through a file store, without a network port. Define the function at the top level of a module. Arguments and
    results are pickled. Each rank starts from the same seed. A function fails if it changes process-wide state (for
    example the grad mode) and does not restore it.

    Args:
        world_size: number of ranks, at least 1.
        mesh: names and sizes of the axes of `world.mesh`; one axis ``shard`` if None.
        timeout: seconds after which a run is stopped and its processes are killed.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: the arguments do not describe a world, or a function cannot be
            imported.

    A run raises:
        RankFailedError: a rank has failed; the message begins with its traceback.
        WorldTimeoutError: a rank did not return in time; the message contains its stacks.
    """
    return Processes(world_size, mesh, timeout)
