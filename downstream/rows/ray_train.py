"""Rows for Ray Train: TorchTrainer starts two workers, and restarts them after one is killed."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from _launchers import is_step, launched_by, losses, ranks, script

import _job
from _processes import kill
from _rows import Rows, Run
from composable_shard import checkpoint

rows = Rows("Ray Train", environment="ray", versions=("torch", "ray"))

LIMIT_S = 500.0
STEPS = 40
PATIENT = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "150"}  # seconds; workers import torch slowly on few cores


@rows(
    "TorchTrainer, two workers, one is killed: resumes from composable_shard's checkpoint with the same losses",
    world=1,
    sharded=False,
    timeout=LIMIT_S + 60,
)
def killed_worker(run: Run) -> None:
    long_steps = ["--steps", str(STEPS), "--save-every", "20", "--pause", "0.2"]  # the kill is after step 22
    short = tempfile.mkdtemp(prefix="ray-")  # socket names have at most 107 bytes
    try:
        with launched_by(run, LIMIT_S) as launched:
            for name, kills in (("whole", False), ("cut", True)):
                job = script(run, "08_ray_train.py", "--out", name, *long_steps)
                process = launched.start(
                    [sys.executable, *job], RAY_TMPDIR=short, RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="150"
                )
                if kills:
                    launched.wait_until(is_step(22, Path(name)), "step 22 is finished", process)
                    kill(ranks(run, Path(name), 2)[1]["pid"])
                launched.finish(process)
                check_result(Path(name), launched.output.read_text(errors="replace"))
    finally:
        shutil.rmtree(short, ignore_errors=True)
    if len(_job.read_steps(Path("cut"))) <= STEPS:
        raise AssertionError("no step was repeated: the worker was killed too late, or not at all")
    run.note("placements", ranks(run, Path("cut"), 2)[0]["placements"])
    run.note("losses", losses(Path("cut")))
    run.agrees("losses", run.noted["losses"], losses(Path("whole")), tolerance=0)


def check_result(where: Path, output: str) -> None:
    """Check that the last report to Ray is the last step, and that its checkpoint is complete.

    Raises:
        AssertionError: the step, the loss or the checkpoint is not the last one.
    """
    number, loss, path = re.findall(r"^step (\d+): loss (\S+); (\S+)$", output, re.MULTILINE)[-1]
    if (int(number), float(loss)) != (STEPS, losses(where)[-1]):
        raise AssertionError(f"the last report to Ray is step {number} with loss {loss}, not step {STEPS}")
    if checkpoint.verify(path).step != STEPS:
        raise AssertionError(f"the checkpoint reported to Ray, {path}, is not the last one")
