"""Launchers that a row starts, and the training that they start: tutorials/_job.py.

The training runs in processes of the launcher, so the two sides are told apart by the script's ``--fsdp2``, and which
engine has sharded is read from what its ranks write down.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from _rows import OURS, TORCH, Run

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
sys.path.append(str(TUTORIALS))

import _job  # noqa: E402
from _gpt import build_gpt, next_byte_loss, random_windows  # noqa: E402

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>


def script(run: Run, name: str, *arguments: str) -> list[str]:
    """The command line of a script of tutorials/, on this side."""
    return [str(TUTORIALS / name), *arguments, *(["--fsdp2"] if run.side == TORCH else [])]


class Launched:
    """Processes that a row has started; at the end of the block they are killed, with all that they have started.

    Orphans become children of this process, so that none is missed and no other process is met.

    Args:
        run: of the row; output goes into a file beside its folder.
        limit_s: seconds until waiting is given up; less than the row's own limit, for that would leave orphans.
    """

    def __init__(self, run: Run, limit_s: float) -> None:
        self.output = run.folder.parent / "launched.txt"
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
        own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        environment = {name: value for name, value in os.environ.items() if name not in own}
        with self.output.open("ab") as output:
            return subprocess.Popen(
                command,
                env={**environment, "GLOO_SOCKET_IFNAME": "lo", **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def wait_until(self, happens: Callable[[], object], what: str) -> None:
        """Wait for something; raises AssertionError at the end of the time."""
        while not happens():
            if time.monotonic() > self._ends_at:
                raise AssertionError(f"waited in vain until {what}: {self.tail()}")
            time.sleep(0.01)

    def finish(self, *processes: subprocess.Popen[bytes]) -> None:
        """Wait for processes that are to end by themselves, and well."""
        for process in processes:
            self.wait_until(lambda process=process: process.poll() is not None, "a launcher ends")
            if process.returncode:
                raise AssertionError(f"a launcher has left with status {process.returncode}: {self.tail()}")

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


def is_step(number: int, where: Path) -> Callable[[], bool]:
    """Whether a run has come so far."""
    return lambda: any(step["step"] >= number for step in _job.read_steps(where))


def losses(where: Path, tolerance: float = 0.0) -> list[float]:
    """The loss of each step from the first on; of one that was done again the last, which must be like that before.

    Args:
        tolerance: relative, between the results of one step; 0: equal bits.
    """
    curve: dict[int, float] = {}
    for step in _job.read_steps(where):
        before = curve.get(step["step"], step["loss"])
        if abs(before - step["loss"]) > tolerance * before:
            raise AssertionError(f"step {step['step']} was done again, with {step['loss']} after {before}")
        curve[step["step"]] = step["loss"]
    if list(curve) != list(range(1, len(curve) + 1)):
        raise AssertionError(f"steps are missing, or out of order: {list(curve)}")
    return list(curve.values())


def ranks(run: Run, where: Path, world: int) -> list[dict[str, Any]]:
    """What the ranks of the last start have written about themselves; this side's engine must have sharded."""
    described = [json.loads((where / f"rank-{rank}.json").read_text()) for rank in range(world)]
    for rank, each in enumerate(described):
        ours = any(name.startswith("composable_shard.") for name in each["classes"])
        if not any(name.endswith("FSDPModule") for name in each["classes"]) or ours != (run.side == OURS):
            raise AssertionError(f"rank {rank} was not sharded by this side's engine: {each['classes']}")
        if not any("Shard(" in placement for placement in each["placements"].values()):
            raise AssertionError(f"rank {rank} has no sharded parameter: {each['placements']}")
    return described


def unsharded_losses(steps: int) -> list[float]:
    """The same training in this process, of the whole model."""
    model = build_gpt("tiny")
    optimizer, data = _job.make_optimizer(model), torch.Generator().manual_seed(0)
    curve = []
    for _ in range(steps):
        loss = next_byte_loss(model, random_windows(_job.TEXT, _job.WINDOWS, model.config.context + 1, data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve
