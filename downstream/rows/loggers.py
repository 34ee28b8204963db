"""Rows for `log_to` with TensorBoard, Weights & Biases (offline) and JSON lines. The written metrics are read back.

With FSDP2 the training loop calls the loggers directly, as users do without `log_to`.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import wandb
from _transformer import UNEVEN, loss_of, shard, transformer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from wandb.proto.wandb_internal_pb2 import Record

import composable_shard as cs
from _rows import OURS, Rows, Run

rows = Rows("Loggers", environment="loggers", versions=("tensorboard", "wandb"))

Read = dict[int, dict[str, float]]  # metrics by step and name
OWN = ("step", "time")  # fields of a JSON line that are not metrics


class Loggers:
    """The three loggers, on rank 0. Other ranks have no loggers."""

    def __init__(self, run: Run) -> None:
        self._writes = run.rank == 0
        if self._writes:
            self.writer = SummaryWriter("board")
            self.run = wandb.init(project="rows", mode="offline", dir=".", settings=wandb.Settings(console="off"))

    @property
    def all(self) -> list[Any] | None:
        return [self.writer, self.run, "steps.jsonl"] if self._writes else None

    def write(self, figures: dict[str, float], step: int) -> None:
        if not self._writes:
            return
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.run.log(figures, step=step)
        with Path("steps.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": 0.0, **figures}) + "\n")

    def close(self) -> None:
        if self._writes:
            self.writer.close()
            self.run.finish()


def of_tensorboard() -> Read:
    events = EventAccumulator("board", size_guidance={"scalars": 0})
    events.Reload()
    read: Read = {}
    for name in events.Tags()["scalars"]:
        for scalar in events.Scalars(name):
            read.setdefault(scalar.step, {})[name] = scalar.value
    return read


BLOCK, OF_FILE, OF_PART = 1 << 15, 7, struct.Struct("<IHB")  # bytes of a block and a file header; a part's header
WRITTEN_S = 20.0  # seconds until the files of Weights & Biases must be complete
WHOLE, LAST = 1, 4  # types of parts that complete a record; other parts are continued


def records(path: Path) -> Iterator[Record]:
    """Yield the records of a Weights & Biases file, a LevelDB log in which no part crosses the end of a block."""
    content, at, record = path.read_bytes(), OF_FILE, b""
    while at + OF_PART.size <= len(content):
        if BLOCK - at % BLOCK < OF_PART.size:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = OF_PART.unpack_from(content, at)
        at += OF_PART.size + length
        record += content[at - length : at]
        if kind in (WHOLE, LAST):
            yield Record.FromString(record)
            record = b""


def of_wandb() -> Read:
    """Read the metrics from the files of Weights & Biases.

    Its own process may write the end of a run after `finish` has returned, so this function waits for it.
    """
    paths = sorted(Path("wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    until = time.monotonic() + WRITTEN_S
    while True:
        kept = {path: list(records(path)) for path in paths}
        ended = [any(record.WhichOneof("record_type") == "exit" for record in run) for run in kept.values()]
        if all(ended) or time.monotonic() > until:
            break
        time.sleep(0.1)
    read: Read = {}
    for record in chain(*kept.values()):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(each.nested_key) or each.key: each.value_json for each in record.history.item}
            figures = {name: json.loads(value) for name, value in items.items() if not name.startswith("_")}
            read[int(items["_step"])] = figures
    return read


def of_lines() -> Read:
    lines = [json.loads(line) for line in Path("steps.jsonl").read_text().splitlines()]
    return {line["step"]: {name: value for name, value in line.items() if name not in OWN} for line in lines}


def singles(read: Read) -> Read:
    """Round to single precision, in which TensorBoard stores numbers."""
    return {
        step: {name: torch.tensor(value, dtype=torch.float32).item() for name, value in sorted(figures.items())}
        for step, figures in sorted(read.items())
    }


@rows("TensorBoard, Weights & Biases offline and JSON lines contain the given metrics, also of a resumed run")
def three(run: Run) -> None:
    os.environ["WANDB_SILENT"] = "true"
    dist.init_process_group("gloo")
    model = shard(transformer(UNEVEN))
    run.sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: Read = {}
    for steps in (range(3), range(3, 5)):
        loggers = Loggers(run)
        with by_log(model, loggers, steps.start) if run.side == OURS else by_hand(loggers, steps.start) as log:
            for step in steps:
                loss = loss_of(model, step, run.rank)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] *= 0.9
                given[step + 1] = {"train/loss": loss.item(), "train/grad_norm": norm.item(), "lr": 0.1 * 0.9**step}
                log(loss, norm, given[step + 1]["lr"])
        loggers.close()
    run.note("given", list(given.values()))
    if run.rank == 0:
        check(run, given)
    dist.barrier()


Log = Callable[[torch.Tensor, torch.Tensor, float], object]


@contextmanager
def by_log(model: nn.Module, loggers: Loggers, done: int) -> Iterator[Log]:
    with cs.report.log_to(model, loggers.all, done=done) as log:
        yield lambda loss, norm, rate: log.step(loss=loss, grad_norm=norm, tokens=18, lr=rate)
    if log.failures:
        raise AssertionError(f"loggers failed {log.failures} times")


@contextmanager
def by_hand(loggers: Loggers, done: int) -> Iterator[Log]:
    steps = count(done + 1)

    def log(loss: torch.Tensor, norm: torch.Tensor, rate: float) -> None:
        loggers.write({"train/loss": loss.item(), "train/grad_norm": norm.item(), "lr": rate}, next(steps))

    yield log


def check(run: Run, given: Read) -> None:
    """Check that all three loggers stored the given metrics, and that their other metrics are equal."""
    read = {"TensorBoard": of_tensorboard(), "Weights & Biases": of_wandb(), "JSON lines": of_lines()}
    for name, figures in read.items():
        if singles(figures) != singles(read["JSON lines"]):
            raise AssertionError(f"{name} contains {figures}, but the JSON lines contain {read['JSON lines']}")
        kept = {step: {key: value for key, value in at.items() if key in given[1]} for step, at in figures.items()}
        if singles(kept) != singles(given):
            raise AssertionError(f"{name} contains {kept}, but the given metrics are {given}")
    run.note("read", [list(figures) for figures in read.values()])
    names = {name for figures in read["JSON lines"].values() for name in figures}
    if run.side == OURS and not {"pool/peak_bytes", "step/seconds", "step/tokens_per_second"} <= names:
        raise AssertionError(f"metrics of composable_shard are missing from {names}")
