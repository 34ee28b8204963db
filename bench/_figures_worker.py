"""One rank of `figures.py`: measure one engine in a training run."""

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
CHECKPOINTS = 5  # after two for warm-up, which create the files and buffers


def slowest(work: Callable[[], object]) -> float:
    """Return the time of `work` on the slowest rank in seconds, from a common start."""
    dist.barrier()
    start = now()
    work()
    return most(now() - start)


def now() -> float:
    """Wait for the device and return the time in seconds."""
    _device.synchronize(os.environ["BENCH_DEVICE"])
    return time.perf_counter()


def memory(most: bool = False) -> int:
    """Return this rank's memory in bytes, or its peak since `forget_peak`: allocated GPU memory, or resident memory."""
    if _launch.on_card():
        return _device.peak() if most else torch.cuda.memory_allocated()
    return _process.resident("VmHWM" if most else "VmRSS")


def forget_peak() -> bool:
    """Reset the peak. Return False if the system cannot."""
    if _launch.on_card():
        _device.forget_peak()
        return True
    return _process.forget_peak()


def most(figure: float) -> float:
    """Return the maximum of a figure over all ranks."""
    return _launch.everyone(torch.tensor(figure, dtype=torch.float64)).max().item()


@dataclass
class Checkpoint:
    """A checkpoint of an engine's model and optimizer in a folder."""

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
    """Measure one engine. For the unsharded model, measure only start-up and step time."""
    warnings.filterwarnings("ignore")  # deprecation warnings of older engines and checkpoints
    size, name, device = settings["size"], settings["engine"], settings["device"]
    mesh = init_device_mesh(device, (world,))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ["BENCH_FOLDER"], "compiled"))  # empty
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
    measured = forget_peak()  # exclude the memory of the unsharded model
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
