"""How a training is saved on its way, and how it goes on after whatever ended it."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_shard import CheckpointIncompleteError, checkpoint


@dataclass
class Position:
    """Where a training is: what it needs beside weights and optimizer to go on as if nothing had ended it.

    An object with `state_dict` and `load_state_dict` can be an entry of a checkpoint's state.
    """

    data: torch.Generator  # which windows come next
    windows: int  # a step, on all ranks together; it stays when the number of ranks changes
    precision: str
    step: int = 0  # how many are done
    progress: float = 0.0  # 0 to 1
    seconds: float = 0.0  # of training
    next_evaluation: float = 0.2  # at which progress

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "data": self.data.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.data.set_state(saved["data"])
        vars(self).update({name: value for name, value in saved.items() if name != "data"})


class Checkpoints:
    """A directory of checkpoints, of which the newest two stay."""

    def __init__(
        self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position, every: int
    ) -> None:
        self._directory, self._position, self._every = directory, position, every
        self._saved = -1  # the step that was saved or loaded last
        random = checkpoint.RandomState()
        self._state = {"model": model, "optimizer": optimizer, "random": random, "position": position}

    def resume(self) -> bool:
        """Load the latest checkpoint; gives whether there was one."""
        try:
            self._saved = checkpoint.load(self._directory, self._state).step
        except CheckpointIncompleteError:  # on all ranks, like every error of a load
            return False
        return True

    def save(self) -> Path:
        """Save this step, unless that is done: all ranks write, and it counts when all of it is on disk."""
        step = self._position.step
        if step != self._saved:
            checkpoint.save(self._directory, self._state, step=step, keep=2)
            self._saved = step
        return self._directory / f"step-{step:08d}"

    def after_step(self) -> None:
        """Save if it is time."""
        if self._every and self._position.step % self._every == 0:
            self.save()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of metrics; of a line that the end of its writer cut off, nothing."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put a file of metrics in the place of another, at once."""
    beside = path.with_suffix(".new")
    beside.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(beside, path)


def set_aside(directory: Path, metrics: Path, always: bool) -> Path | None:
    """Move the checkpoints of a run that has come to its end out of the way of a new one; gives where to."""
    if not directory.exists() or not (always or any("final" in row for row in read_rows(metrics))):
        return None
    number = 1
    while (aside := directory.with_name(f"{directory.name}-{number}")).exists():
        number += 1
    directory.rename(aside)
    return aside
