"""Processes that a row starts beside its ranks, and their end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
OF_A_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class Launched:
    """Processes that a row has started; at the end of the block they are killed, with all that they have started.

    Orphans become children of this process, so that none is missed and no other process is met.

    Args:
        output: a file for what they print.
        limit_s: seconds until waiting is given up.
    """

    def __init__(self, output: Path, limit_s: float) -> None:
        self.output = output
        self._ends_at = time.monotonic() + limit_s

    def __enter__(self) -> Launched:
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "this process cannot adopt orphans")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends_at = time.monotonic() + 10
        while (pids := descendants(os.getpid())) and time.monotonic() < ends_at:
            for pid in pids:
                kill(pid)
            reap()
            time.sleep(0.02)
        if pids:
            raise AssertionError(f"processes {pids} cannot be killed")

    def start(self, command: list[str] | tuple[str, ...], **variables: str) -> subprocess.Popen[bytes]:
        """Start a command, without the variables by which this rank's own launcher has told it who it is."""
        environment = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
        with self.output.open("ab") as output:
            return subprocess.Popen(
                command,
                env={**environment, "GLOO_SOCKET_IFNAME": "lo", **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def wait_until(self, happens: Callable[[], object], what: str, *running: subprocess.Popen[bytes]) -> None:
        """Wait for something; raises AssertionError at the end of the time, or if one of `running` ends before."""
        while not happens():
            ended = [each.returncode for each in running if each.poll() is not None]
            if ended or time.monotonic() > self._ends_at:
                why = f"a launcher has left with status {ended[0]}" if ended else "it takes too long"
                raise AssertionError(f"waited in vain until {what}, {why}: {self.tail()}")
            time.sleep(0.01)

    def finish(self, *processes: subprocess.Popen[bytes]) -> None:
        """Wait for processes that are to end by themselves, and well."""
        self.wait_until(
            lambda: any(each.poll() for each in processes) or all(each.poll() is not None for each in processes),
            "all launchers have ended",
        )
        if failed := [each.returncode for each in processes if each.returncode]:
            raise AssertionError(f"a launcher has left with status {failed[0]}: {self.tail()}")

    def tail(self) -> str:
        return " / ".join(self.output.read_text(errors="replace").splitlines()[-5:])


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, from Linux's process table; each thread has children of its own."""
    below: list[int] = []
    for table in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in table.read_text().split()]
        except OSError:  # it has just ended
            continue
        for child in children:
            below += [child, *descendants(child)]
    return below


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def reap() -> None:
    """Take note of children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
