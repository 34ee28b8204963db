"""One rank of `step.py`: build every engine, check that losses agree, and time the engines in turn."""

import gc
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import _communication
import _device
import _engines
import _launch
from _models import GPT, SIZES, GPTBlock, checkpoint_blocks

LEARNING_RATE = 0.1
CHECK_STEPS = 3


@dataclass
class Side:
    """One engine with its own model."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        """Whether the model is unsharded, so that each rank trains independently."""
        return self.name.startswith("compute")

    def gradients(self, ids: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        return self.backward(ids)

    def backward(self, ids: Tensor) -> Tensor:
        """Run forward, loss and backward. Return the loss."""
        logits = self.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def check_step(self, ids: Tensor) -> None:
        """Run a step in which the unsharded model uses the mean gradient of all ranks, so that losses must agree."""
        self.losses.append(self.gradients(ids).item())
        if self.alone and not _launch.echoes():
            for param in self.model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        self.optimizer.step()

    def timed_step(self, ids: Tensor, optimize: bool) -> None:
        dist.barrier()
        _device.synchronize(ids.device.type)
        cpu, wall = time.process_time(), time.perf_counter()
        loss = self.gradients(ids)
        if optimize:
            self.optimizer.step()
        _device.synchronize(ids.device.type)
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)
        self.losses.append(loss.item())


class Communication(Side):
    """The collectives of a step alone: no model, no loss."""

    def __init__(self, model: nn.Module, world: int) -> None:
        super().__init__(_communication.NAME, nn.Module(), torch.optim.SGD([torch.zeros(1)]))
        self._groups = _communication.groups_of(model, GPTBlock, world)

    def backward(self, ids: Tensor) -> Tensor:
        _communication.communicate(self._groups)
        return torch.tensor(torch.nan)


def build(name: str, settings: dict[str, Any], mesh: DeviceMesh, **changes: Any) -> Side:
    """Build an engine with a model of the size in `settings`. `changes` replace fields of the configuration."""
    torch.manual_seed(0)  # all engines and ranks start with the same weights
    with torch.device(settings["device"]):
        model = GPT(replace(SIZES[settings["size"]], **changes)).to(_device.DTYPES[settings["dtype"]])
    if settings.get("checkpoint"):
        checkpoint_blocks(model)
    if name == _communication.NAME:
        return Communication(model, mesh.size())
    model = _engines.build(name, model, GPTBlock, mesh, settings["backend"])
    return Side(name, model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))


def batch(size: str, rows: int, rank: int, step: int) -> Tensor:
    """Return random bytes, shape (rows, context + 1), different for each rank and step."""
    config = SIZES[size]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(config.vocabulary, (rows, config.context + 1), generator=generator)


def spread_of_losses(sides: list[Side]) -> float:
    """Return the largest relative difference between the engines' losses, over all ranks and steps.

    After the check steps, `compute` trains independently on each rank and is excluded. If one process plays all ranks,
    only engines that shard parameters in the same way are compared.
    """
    sides = [side for side in sides if side.name != _communication.NAME]
    if _launch.echoes():
        sides = [side for side in sides if side.name.startswith(("ours", "fsdp2"))]
    if not sides:
        return 0.0
    together = [side.losses[:CHECK_STEPS] for side in sides]
    later = [side.losses[CHECK_STEPS:] for side in sides if not side.alone]
    steps = [*zip(*together, strict=True), *zip(*later, strict=True)]
    worst = max((max(step) - min(step)) / min(step) for step in steps)
    return _launch.everyone(torch.tensor(worst, dtype=torch.float64)).max().item()


def measure(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Return the times of every step in seconds: wall time of the slowest rank, and CPU time of all ranks."""
    size, rows = settings["size"], settings["batch"]
    mesh = init_device_mesh(settings["device"], (world,))
    sides = [build(name, settings, mesh) for name in settings["engines"]]
    for _ in range(CHECK_STEPS):
        for side in sides:
            side.check_step(batch(size, rows, rank, step=0).to(settings["device"]))
    gc.collect()
    gc.freeze()
    shuffle = random.Random(0)  # the same order on all ranks
    for i in range(settings["rounds"]):
        ids = batch(size, rows, rank, step=1 + i).to(settings["device"])
        for side in shuffle.sample(sides, len(sides)):
            side.timed_step(ids, settings["optimizer"] == "sgd")
    times = torch.tensor([[side.wall_s, side.cpu_s] for side in sides], dtype=torch.float64)
    every = _launch.everyone(times)
    return {
        "parameters": sum(p.numel() for p in GPT(SIZES[size]).parameters()),
        "loss_difference": spread_of_losses(sides),
        "wall_s": dict(zip(settings["engines"], every[:, :, 0].amax(0).tolist(), strict=True)),
        "cpu_s": dict(zip(settings["engines"], every[:, :, 1].sum(0).tolist(), strict=True)),
    }


def run(measure: Callable[[dict[str, Any], int, int], dict[str, Any]]) -> None:
    """Join the process group, call `measure` with the settings of the command line, and return rank 0's result."""
    torch.set_num_threads(1)
    rank, world = _launch.join()
    found = measure(json.loads(sys.argv[1]), rank, world)
    if rank == 0:
        _launch.answer(json.dumps(found))
    _launch.leave()


if __name__ == "__main__":
    run(measure)
