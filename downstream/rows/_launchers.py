"""The training that launchers start (tutorials/_job.py), as rows see it.

It runs in processes of the launcher, so the two sides are told apart by the script's ``--fsdp2``, and which
engine has sharded is read from what its ranks write down.
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
    """The command line of a script of tutorials/, on this side."""
    return [str(TUTORIALS / name), *arguments, *(["--fsdp2"] if run.side == TORCH else [])]


def launched_by(run: Run, limit_s: float) -> Launched:
    """What this row will start; `limit_s` must be less than the row's own limit, for that would leave orphans."""
    return Launched(run.folder.parent / "launched.txt", limit_s)


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
        loss = next_byte_loss(model, random_windows(_job.TEXT, _job.Job.windows, model.config.context + 1, data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve
