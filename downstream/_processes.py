"""Start the additional processes of a row, and kill them when the row ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>
OF_A_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class Launched:
    """A context manager that starts processes and, at its end, kills them and all of their descendants.

    This process becomes the parent of orphans. Therefore its descendants are exactly the processes to kill.

    Args:
        output: a file that receives the standard output and standard error of the processes.
        limit_s: seconds until `wait_until` and `finish` fail.
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
        """Start a command without the environment variables that describe this rank (`OF_A_RANK`)."""
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
        """Wait until `happens()` is true.

        Args:
            what: the condition in words, for the error message.
            running: processes that must not end before.

        Raises:
            AssertionError: the time limit has passed, or a process in `running` has ended.
        """
        while not happens():
            ended = [each.returncode for each in running if each.poll() is not None]
            if ended or time.monotonic() > self._ends_at:
                why = f"a launcher exited with status {ended[0]}" if ended else "the time limit has passed"
                raise AssertionError(f"stopped waiting until {what}: {why}: {self.tail()}")
            time.sleep(0.01)

    def finish(self, *processes: subprocess.Popen[bytes]) -> None:
        """Wait until all processes have exited; raise AssertionError if one exits with a status other than 0."""
        self.wait_until(
            lambda: any(each.poll() for each in processes) or all(each.poll() is not None for each in processes),
            "all launchers have ended",
        )
        if failed := [each.returncode for each in processes if each.returncode]:
            raise AssertionError(f"a launcher exited with status {failed[0]}: {self.tail()}")

    def tail(self) -> str:
        return " / ".join(self.output.read_text(errors="replace").splitlines()[-5:])


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of `pid`. Linux lists the children of each thread separately."""
    below: list[int] = []
    for table in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in table.read_text().split()]
        except OSError:  # the thread ended after the directory was listed
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
    """Reap the children that have ended, so that they do not stay as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
