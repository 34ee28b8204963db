"""One rank of `figures.py`: the figures of one engine in a training run."""

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

import _device
import _engines
import _launch
import _process
from _models import GPT, SIZES, GPTBlock
from _step_worker import Side, batch, run

LEARNING_RATE = 1e-4
WARM_STEPS = 4
CHECKPOINTS = 5  # after two that warm up: files are new, and so is memory for what is written


def slowest(work: Callable[[], object]) -> float:
    """Seconds that `work` takes on the slowest rank, from a common start."""
    dist.barrier()
    start = now()
    work()
    return most(now() - start)


def now() -> float:
    """Seconds, when the device has done what it was given."""
    _device.synchronize(os.environ["BENCH_DEVICE"])
    return time.perf_counter()


def memory(most: bool = False) -> int:
    """Bytes that this rank holds, or the most since `forget_peak`: of the card, or of the process on a CPU."""
    if _launch.on_card():
        return _device.peak() if most else torch.cuda.memory_allocated()
    return _process.resident("VmHWM" if most else "VmRSS")


def forget_peak() -> bool:
    """Lets the highest figure start anew; False where the system cannot."""
    if _launch.on_card():
        _device.forget_peak()
        return True
    return _process.forget_peak()


def most(figure: float) -> float:
    """The largest figure of all ranks."""
    return _launch.everyone(torch.tensor(figure, dtype=torch.float64)).max().item()


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
    size, name, device = settings["size"], settings["engine"], settings["device"]
    mesh = init_device_mesh(device, (world,))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ["BENCH_FOLDER"], "compiled"))  # nothing is in it
    forget_peak()
    before = memory()
    _engines.load(name)
    torch.manual_seed(0)
    with torch.device(device):
        whole = [GPT(SIZES[size])]

    def start() -> Side:
        model = _engines.build(name, whole.pop(), GPTBlock, mesh, settings["backend"])
        return Side(name, model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))

    def step(number: int) -> None:
        side.gradients(batch(size, settings["batch"], rank, number).to(device))
        side.optimizer.step()

    dist.barrier()
    begins = now()
    side = start()
    built = now()
    measured = forget_peak()  # what the unsharded model held counts no more
    resumes = now()
    step(0)
    found: dict[str, float | None] = {"start_s": most(built - begins + now() - resumes)}
    for number in range(1, WARM_STEPS):
        step(number)
    numbers = iter(range(WARM_STEPS, WARM_STEPS + settings["steps"]))
    found["step_s"] = statistics.median(slowest(lambda: step(next(numbers))) for _ in range(settings["steps"]))
    if side.alone:
        return found
    found["peak"] = most(memory(most=True) - before) if measured else None
    checkpoint = Checkpoint(side, Path(os.environ["BENCH_FOLDER"], "checkpoint"))
    for _ in range(2):
        checkpoint.write()
    found["write_s"] = statistics.median(slowest(checkpoint.write) for _ in range(CHECKPOINTS))
    found["read_s"] = statistics.median(slowest(checkpoint.read) for _ in range(CHECKPOINTS))
    return found


if __name__ == "__main__":
    run(measure)
