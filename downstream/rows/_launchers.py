"""Start the training job of tutorials/_job.py with a launcher, and read its results.

The job runs in processes of the launcher, so the script's option ``--fsdp2`` selects the implementation. The ranks
write the classes of their modules to files, from which rows check which implementation sharded the model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from _processes import Launched
from _rows import OURS, TORCH, Run

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
sys.path.append(str(TUTORIALS))

import _job  # noqa: E402
from _gpt import build_gpt, next_byte_loss, random_windows  # noqa: E402

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def script(run: Run, name: str, *arguments: str) -> list[str]:
    """Return the command line of a script of tutorials/ for this run's implementation."""
    return [str(TUTORIALS / name), *arguments, *(["--fsdp2"] if run.side == TORCH else [])]


def launched_by(run: Run, limit_s: float) -> Launched:
    """Return a context manager that starts processes. `limit_s` must be less than the row's timeout.

    If the row reached its timeout, the processes would stay as orphans.
    """
    return Launched(run.folder.parent / "launched.txt", limit_s)


def is_step(number: int, where: Path) -> Callable[[], bool]:
    """Return a function that tests whether a job has finished step `number`."""
    return lambda: any(step["step"] >= number for step in _job.read_steps(where))


def losses(where: Path, tolerance: float = 0.0) -> list[float]:
    """Return the losses of all steps, in order. For a step that was repeated, return the last loss.

    Args:
        tolerance: the largest relative difference between the losses of a repeated step; 0 means bitwise identical.

    Raises:
        AssertionError: the losses of a repeated step differ, or steps are missing or out of order.
    """
    curve: dict[int, float] = {}
    for step in _job.read_steps(where):
        before = curve.get(step["step"], step["loss"])
        if abs(before - step["loss"]) > tolerance * before:
            raise AssertionError(f"step {step['step']} was repeated with loss {step['loss']} instead of {before}")
        curve[step["step"]] = step["loss"]
    if list(curve) != list(range(1, len(curve) + 1)):
        raise AssertionError(f"steps are missing or out of order: {list(curve)}")
    return list(curve.values())


def ranks(run: Run, where: Path, world: int) -> list[dict[str, Any]]:
    """Return the descriptions that the ranks of the last start wrote.

    Raises:
        AssertionError: a rank's model was not sharded by this run's implementation.
    """
    described = [json.loads((where / f"rank-{rank}.json").read_text()) for rank in range(world)]
    for rank, each in enumerate(described):
        ours = any(name.startswith("composable_shard.") for name in each["classes"])
        if not any(name.endswith("FSDPModule") for name in each["classes"]) or ours != (run.side == OURS):
            raise AssertionError(f"rank {rank} was not sharded by {run.side!r}: {each['classes']}")
        if not any("Shard(" in placement for placement in each["placements"].values()):
            raise AssertionError(f"rank {rank} has no sharded parameter: {each['placements']}")
    return described


def unsharded_losses(steps: int) -> list[float]:
    """Run the same training on the unsharded model in this process, and return the losses."""
    model = build_gpt("tiny")
    optimizer, data = _job.make_optimizer(model), torch.Generator().manual_seed(0)
    curve = []
    for _ in range(steps):
        loss = next_byte_loss(model, random_windows(_job.TEXT, _job.Job.windows, model.config.context + 1, data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve
