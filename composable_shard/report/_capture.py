"""Capture one step of a running program in files: plan, record, explanation, trace and figures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composable_shard._api import last_record
from composable_shard._module.status import living_roots, make_plan, watch
from composable_shard._plan.record import Record
from composable_shard.errors import ShardConfigStateError, ShardConfigValueError
from composable_shard.report._explain import explain
from composable_shard.report._plan_memory import memory
from composable_shard.report._step_time import time
from composable_shard.report._timeline import timeline


@dataclass(frozen=True)
class Captured:
    """The captured files of a model.

    Attributes:
        model: name of its class.
        folder: folder of its files.
        files: names of the files.
        text: the explanation of its step.
    """

    model: str
    folder: Path
    files: tuple[str, ...]
    text: str


def capture(program: Callable[[], object], folder: Path, step: int = 3, writes: bool = True) -> list[Captured]:
    """Run a training program until one of its steps has ended, and write what its sharded models did in that step.

    Args:
        program: makes models, shards them with this library, and trains them.
        folder: folder for the files. If there are several models, each gets a folder in it.
        step: the step of the first optimizer that steps, at least 2, because the models are unknown before its first
            step. The program is ended in the next step.
        writes: whether this rank writes files.

    Returns:
        what was written; empty if this rank does not write.

    Raises:
        ShardConfigStateError: the program ended too early, shards nothing, or runs no sharded model in the step.
        ShardConfigValueError: `step` is less than 2.
        Exception: any error of the program.
    """
    if step < 2:
        raise ShardConfigValueError(f"step: expected at least 2, the first step that can be captured, got {step}")
    steps = _Steps(step)
    handle = register_optimizer_step_pre_hook(steps.before)
    try:
        program()
    except _Over:
        return steps.write(folder) if writes else []
    except SystemExit as left:
        if left.code:
            raise
    finally:
        handle.remove()
    raise ShardConfigStateError(f"the program has ended after {steps.count} of {step + 1} required steps")


class _Over(BaseException):
    """Ends a program. It is not an `Exception`, so that programs do not catch it."""


class _Steps:
    """Counts the steps of the first optimizer, and watches the models of the program from its first step.

    The models of the program are those that it has made or run. Other models of this process are ignored.
    """

    def __init__(self, wanted: int) -> None:
        self.count = 0
        self._wanted = wanted
        self._older = [(model, last_record(model)) for model in living_roots()]
        self._first: Optimizer | None = None
        self._models: list[nn.Module] = []
        self._before: list[Record | None] = []  # last record of each model when the step began

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hook that runs before the step of any optimizer."""
        if self._first is None:
            idle = {id(model) for model, record in self._older if last_record(model) is record}
            self._first, self._models = optimizer, [model for model in living_roots() if id(model) not in idle]
            self._older.clear()
            for model in self._models:
                watch(model)
        if self._first is not optimizer:
            return
        if not self._models:
            raise ShardConfigStateError(
                "no model is sharded by this library when the optimizer steps; use --install to replace FSDP2"
            )
        if self.count == self._wanted:
            raise _Over
        self.count += 1
        self._before = [last_record(model) for model in self._models]

    def write(self, folder: Path) -> list[Captured]:
        """Write the files of all models that ran in the step."""
        now = map(last_record, self._models)
        new = [None if record is before else record for record, before in zip(now, self._before, strict=True)]
        ran = [(model, record) for model, record in zip(self._models, new, strict=True) if record and record.spans]
        if not ran:
            names = ", ".join(type(model).__name__ for model in self._models)
            raise ShardConfigStateError(f"{names}: sharded, but not run in step {self._wanted}")
        places = [folder / f"model-{number}" if len(ran) > 1 else folder for number in range(len(ran))]
        return [_written(model, record, place) for (model, record), place in zip(ran, places, strict=True)]


def _written(model: nn.Module, record: Record, folder: Path) -> Captured:
    plan = make_plan(model)
    folder.mkdir(parents=True, exist_ok=True)
    text = str(explain(plan, record))
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "record.json").write_text(record.to_json())
    (folder / "explanation.txt").write_text(f"{text}\n")
    timeline(plan, record, folder / "step.json")
    files = ["plan.json", "record.json", "explanation.txt", "step.json"]
    if importlib.util.find_spec("matplotlib") is not None:
        memory(plan, folder / "memory.png", record)
        time(plan, folder / "time.png", record)
        files += ["memory.png", "time.png"]
    return Captured(type(model).__name__, folder, tuple(files), text)
