"""One rank of `figures.py`: the five figures of one engine."""

import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import _engines
import _process
from _models import GPT, SIZES, GPTBlock
from _step_worker import Side, batch, run

LEARNING_RATE = 1e-4
WARM_STEPS = 4
CHECKPOINTS = 3


def slowest(work: Callable[[], object]) -> float:
    """Seconds that `work` takes on the slowest rank, from a common start."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return most(time.perf_counter() - start)


def most(figure: float) -> float:
    """The largest figure of all ranks."""
    found = torch.tensor(figure, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


@dataclass
class Checkpoint:
    """What is written of a side, and where."""

    side: Side
    folder: Path

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.side.model, self.side.optimizer)
        return {"model": model, "optimizer": optimizer}

    def write(self) -> None:
        dcp.save(self.state(), checkpoint_id=self.folder)

    def read(self) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=self.folder)
        set_state_dict(
            self.side.model,
            self.side.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def measure(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Seconds and bytes of one engine; for the unsharded model the time of a step alone."""
    warnings.filterwarnings("ignore")  # older engines and checkpoints speak of what is to come
    size, name = settings["size"], settings["engine"]
    mesh = init_device_mesh("cpu", (world,))
    _process.forget_peak()
    before = _process.resident()
    torch.manual_seed(0)
    whole = [GPT(SIZES[size])]

    def start() -> Side:
        model = _engines.build(name, whole.pop(), GPTBlock, mesh)
        return Side(name, model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))

    def step(number: int) -> None:
        side.gradients(batch(size, settings["batch"], rank, number))
        side.optimizer.step()

    dist.barrier()
    begins = time.perf_counter()
    side = start()
    built = time.perf_counter()
    measured = _process.forget_peak()  # what the unsharded model held counts no more
    resumes = time.perf_counter()
    step(0)
    found: dict[str, float | None] = {"start_s": most(built - begins + time.perf_counter() - resumes)}
    for number in range(1, WARM_STEPS):
        step(number)
    numbers = iter(range(WARM_STEPS, WARM_STEPS + settings["steps"]))
    found["step_s"] = statistics.median(slowest(lambda: step(next(numbers))) for _ in range(settings["steps"]))
    if side.alone:
        return found
    found["peak"] = most(_process.resident("VmHWM") - before) if measured else None
    checkpoint = Checkpoint(side, Path(os.environ["BENCH_FOLDER"], "checkpoint"))
    found["write_s"] = statistics.median(slowest(checkpoint.write) for _ in range(CHECKPOINTS))
    found["read_s"] = statistics.median(slowest(checkpoint.read) for _ in range(CHECKPOINTS))
    return found


if __name__ == "__main__":
    run(measure)
