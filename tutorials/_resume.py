"""Save checkpoints during training, and resume from them."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_shard import checkpoint
from composable_shard.errors import CheckpointIncompleteError


@dataclass
class Position:
    """The state that a run needs to resume, except model and optimizer.

    It has `state_dict` and `load_state_dict`, so it can be an entry of a checkpoint's state.
    """

    data: torch.Generator  # draws the windows
    windows: int  # per step on all ranks together; unchanged if the number of ranks changes
    precision: str
    step: int = 0  # finished steps
    progress: float = 0.0  # 0 to 1
    seconds: float = 0.0  # training time
    next_evaluation: float = 0.2  # progress of the next evaluation

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "data": self.data.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.data.set_state(saved["data"])
        vars(self).update({name: value for name, value in saved.items() if name != "data"})


class Checkpoints:
    """A directory with the two newest checkpoints."""

    def __init__(
        self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position, every: int
    ) -> None:
        self._directory, self._position, self._every = directory, position, every
        self._saved = -1  # last step that was saved or loaded
        random = checkpoint.RandomState()
        self._state = {"model": model, "optimizer": optimizer, "random": random, "position": position}

    def resume(self) -> bool:
        """Load the latest checkpoint. Return whether there was one."""
        try:
            self._saved = checkpoint.load(self._directory, self._state).step
        except CheckpointIncompleteError:  # no complete checkpoint; raised on all ranks
            return False
        return True

    def save(self) -> Path:
        """Save this step if it was not saved yet. All ranks write. Return the checkpoint's directory."""
        step = self._position.step
        if step != self._saved:
            checkpoint.save(self._directory, self._state, step=step, keep=2)
            self._saved = step
        return self._directory / f"step-{step:08d}"

    def after_step(self) -> None:
        """Save if this step is a multiple of `every`."""
        if self._every and self._position.step % self._every == 0:
            self.save()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, without a last line that was cut off."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace a metrics file atomically."""
    beside = path.with_suffix(".new")
    beside.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(beside, path)


def set_aside(directory: Path, metrics: Path, always: bool) -> Path | None:
    """Rename the checkpoint directory if its run is finished (or `always`). Return the new path, or None."""
    if not directory.exists() or not (always or any("final" in row for row in read_rows(metrics))):
        return None
    number = 1
    while (aside := directory.with_name(f"{directory.name}-{number}")).exists():
        number += 1
    directory.rename(aside)
    return aside
