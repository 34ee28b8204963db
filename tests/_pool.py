"""Warm worker processes for tests on real process groups.

Workers are started once per pytest session and kept; a job is a function named `module:function`, called on every rank
as `function(rank, world, **kwargs)`. A test says so with a decorator, and its body then runs in the workers:

    @distributed(world=2)
    def test_ranks_agree(rank, world): ...

A job that passes its time limit has the stacks of its workers dumped; then they, and only they, are killed and started
afresh. A job that fails leaves a clean process group behind, because the next job gets a new one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

START_LIMIT_S = 180.0
JOB_LIMIT_S = 90.0
PEER_LIMIT_S = 5.0  # how long the other ranks may go on after one has failed
MAX_GROUPS = 24  # process groups that may gather in a worker before it gets a fresh default group
_WORKER = Path(__file__).with_name("_worker.py")


@dataclass
class Outcome:
    """What one rank reports of a job. `at` is CLOCK_MONOTONIC, which processes share."""

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
        self.conn, child = Pipe()
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(_WORKER), str(child.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=[child.fileno()],
                start_new_session=True,  # Ctrl-C reaches pytest alone, which then stops its workers
            )
        child.close()
        self.conn.send([*sys.path])
        self.mark = 0

    def wait_ready(self) -> None:
        if not self.conn.poll(START_LIMIT_S) or self.conn.recv() != "ready":
            raise RuntimeError(f"worker {self.index} did not start:\n{self.output()}")

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
        self.conn.close()


class Pool:
    """Up to four warm workers; a job of world `n` runs on the first `n`."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._jobs = itertools.count(1)
        self._epochs = itertools.count(1)
        self._epoch: tuple[int, int] | None = None  # (number, world) of the default group in use

    def run(
        self,
        job: str,
        world: int,
        kwargs: dict[str, Any] | None = None,
        limit_s: float = JOB_LIMIT_S,
    ) -> list[Any]:
        """Run `module:function` on `world` ranks; returns what each rank returned, or fails the test."""
        self._start(world)
        if self._epoch is None or self._epoch[1] != world:
            self._epoch = (next(self._epochs), world)
        assert self._folder is not None
        store = str(Path(self._folder.name) / f"store{self._epoch[0]}")
        number = next(self._jobs)
        workers = self._workers[:world]
        for rank, worker in enumerate(workers):
            worker.mark = worker.log.stat().st_size
            worker.conn.send((job, number, rank, world, self._epoch[0], store, kwargs or {}))
        outcomes, late = self._collect(workers, limit_s)
        if late or not all(o.ok for o in outcomes):
            message = _describe(job, world, workers, outcomes, late, limit_s)
            self._recover(late)
            pytest.fail(message, pytrace=False)
        if max(o.groups for o in outcomes) > MAX_GROUPS:
            self._epoch = None
        return [o.value for o in outcomes]

    def close(self) -> None:
        """Ask the workers to end, and kill those that do not."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.conn.send(None)
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
        for worker in fresh:
            worker.wait_ready()
        self._workers += fresh

    def _collect(self, workers: Sequence[Worker], limit_s: float) -> tuple[list[Outcome], list[Worker]]:
        """Outcomes by rank, and the workers that gave none in time (dumped, not yet killed)."""
        pending: dict[Connection, int] = {w.conn: rank for rank, w in enumerate(workers)}
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + limit_s
        while pending and (left := deadline - time.monotonic()) > 0:
            for conn in wait(list(pending), timeout=left):
                rank = pending.pop(conn)  # type: ignore[index]
                try:
                    outcomes.append(conn.recv())  # type: ignore[union-attr]
                except EOFError:
                    code = workers[rank].process.wait()
                    outcomes.append(Outcome(rank, False, trace=f"the worker died with exit code {code}", at=0.0))
                if not outcomes[-1].ok:
                    deadline = min(deadline, time.monotonic() + PEER_LIMIT_S)
        late = [workers[rank] for rank in pending.values()]
        for worker in late:
            worker.dump_stacks()
        if late:
            time.sleep(0.5)  # faulthandler writes from the signal handler; the log is complete soon
        return sorted(outcomes, key=lambda o: o.rank), late

    def _recover(self, late: Sequence[Worker]) -> None:
        """After a failure: a new process group; if a worker hangs or is dead, new workers."""
        self._epoch = None
        if late or any(w.process.poll() is not None for w in self._workers):
            for worker in self._workers:
                worker.kill()
            self._workers = []


def _describe(
    job: str,
    world: int,
    workers: Sequence[Worker],
    outcomes: Sequence[Outcome],
    late: Sequence[Worker],
    limit_s: float,
) -> str:
    """The first failure in full, then what is known of the other ranks."""
    failed = sorted((o for o in outcomes if not o.ok), key=lambda o: o.at)
    parts = []
    for place, outcome in enumerate(failed):
        head = "failed first" if place == 0 else "failed later, perhaps only in consequence"
        trace = outcome.trace if place == 0 else "\n".join(outcome.trace.strip().splitlines()[-12:])
        parts.append(f"rank {outcome.rank} of {world} {head} ({job}):\n{trace}")
        if output := workers[outcome.rank].output().strip():
            parts.append(f"output of rank {outcome.rank}:\n{output}")
    for worker in late:
        why = f"gave no answer within {limit_s:g} s" if not failed else "was stopped after another rank had failed"
        parts.append(f"rank {worker.index} of {world} {why} ({job}); its stacks and output:\n{worker.output()}")
    return "\n\n".join(parts)


POOL = Pool()


def distributed(world: int | tuple[int, ...] = 2, *, limit_s: float = JOB_LIMIT_S) -> Callable[..., Any]:
    """Make a test of `body(rank, world, ...)` that runs on every rank of each world; other arguments are parameters."""
    worlds = (world,) if isinstance(world, int) else world

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        job = f"{body.__module__}:{body.__qualname__}"

        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            POOL.run(job, kwargs.pop("world", worlds[0]), kwargs, limit_s)

        dropped = {"rank"} if len(worlds) > 1 else {"rank", "world"}
        signature = inspect.signature(body)
        kept = [p for name, p in signature.parameters.items() if name not in dropped]
        test.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        if len(worlds) > 1:
            return pytest.mark.parametrize("world", worlds, ids=[f"world{w}" for w in worlds])(test)
        return test

    return decorate
