"""Ray Train: TorchTrainer starts two workers, and starts them again when one was killed."""

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
PATIENT = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "150"}  # of workers that load torch on few cores


@rows(
    "TorchTrainer, two workers, one is killed: resumes from composable_shard's checkpoint with the same losses",
    world=1,
    sharded=False,
    timeout=LIMIT_S + 60,
)
def killed_worker(run: Run) -> None:
    long_steps = ["--steps", str(STEPS), "--save-every", "20", "--pause", "0.2"]  # killed between the 22nd and the last
    short = tempfile.mkdtemp(prefix="ray-")  # names of sockets are at most 107 bytes long
    try:
        with launched_by(run, LIMIT_S) as launched:
            for name, kills in (("whole", False), ("cut", True)):
                job = script(run, "08_ray_train.py", "--out", name, *long_steps)
                process = launched.start(
                    [sys.executable, *job], RAY_TMPDIR=short, RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="150"
                )
                if kills:
                    launched.wait_until(is_step(22, Path(name)), "step 22 is over", process)
                    kill(ranks(run, Path(name), 2)[1]["pid"])
                launched.finish(process)
                check_result(Path(name), launched.output.read_text(errors="replace"))
    finally:
        shutil.rmtree(short, ignore_errors=True)
    if len(_job.read_steps(Path("cut"))) <= STEPS:
        raise AssertionError("no step was done again: the worker was killed too late, or not at all")
    run.note("placements", ranks(run, Path("cut"), 2)[0]["placements"])
    run.note("losses", losses(Path("cut")))
    run.agrees("losses", run.noted["losses"], losses(Path("whole")), tolerance=0)


def check_result(where: Path, output: str) -> None:
    """What Ray was told last is the last step of the run, and the checkpoint that it names is whole."""
    number, loss, path = re.findall(r"^step (\d+): loss (\S+); (\S+)$", output, re.MULTILINE)[-1]
    if (int(number), float(loss)) != (STEPS, losses(where)[-1]):
        raise AssertionError(f"Ray's last report is step {number} with {loss}")
    if checkpoint.verify(path).step != STEPS:
        raise AssertionError(f"Ray names {path}, which is not the last checkpoint")
