"""Write metrics to a file of JSON lines, TensorBoard, or Weights & Biases."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import composable_shard as cs
from _resume import read_rows, write_rows

METRICS = "metrics.jsonl"
Figures = Mapping[str, float]
Sink = Callable[[Figures, int], None]


def json_lines(path: Path, done: int) -> Sink:
    """Return a sink that appends a line per call. Delete earlier lines after step `done`, where the run resumes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, [row for row in read_rows(path) if row["step"] <= done])

    def write(figures: Figures, step: int) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")

    return write


def tensorboard(folder: Path, done: int) -> Sink:
    """Return a sink for TensorBoard in a folder. Earlier figures after step `done` are purged."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder, purge_step=done + 1)

    def write(figures: Figures, step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return write


def weights_and_biases(project: str, folder: Path, settings: Mapping[str, Any]) -> Sink:
    """Return a sink for a new Weights & Biases run of the project, with its files in a folder."""
    import wandb

    run = wandb.init(project=project, dir=folder, config={name: str(value) for name, value in settings.items()})
    return lambda figures, step: run.log(dict(figures), step=step)


def open_log(model: nn.Module, sinks: list[Sink], done: int, every: int) -> AbstractContextManager[Any]:
    """Return `cs.report.log_to` for a run that resumes after step `done`, or a simpler log for an unsharded model."""

    def write(figures: Figures, step: int) -> None:
        for sink in sinks:
            sink(figures, step)

    if isinstance(model, cs.FSDPModule):
        return cs.report.log_to(model, write, every=every, done=done)
    return _PlainLog(write, every, done)


class _PlainLog(AbstractContextManager[Any]):
    """A log of loss, learning rate and speed for an unsharded model."""

    def __init__(self, write: Sink, every: int, done: int) -> None:
        self._write, self._every = write, every
        self._steps, self._tokens, self._began = done, 0, time.monotonic()

    def step(self, *, loss: torch.Tensor, tokens: int, **others: Any) -> None:
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        if self._steps % self._every == 0:
            figures = {"train/loss": loss, **others, "step/tokens_per_second": self._tokens / self._seconds()}
            self._write({name: float(value) for name, value in figures.items()}, self._steps)
            self._tokens, self._began = 0, time.monotonic()

    def _seconds(self) -> float:
        return max(time.monotonic() - self._began, 1e-9)

    def __exit__(self, *_: object) -> None: ...
