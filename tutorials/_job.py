"""A training run that any launcher can start, kill and restart, on any number of ranks.

07_launch.py and 08_ray_train.py use it. It needs a process group and a directory that all ranks share.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from _gpt import GPT, build_gpt, next_byte_loss, random_windows
from composable_shard import checkpoint

TEXT = torch.frombuffer(bytearray(Path(json.__file__).read_bytes()), dtype=torch.uint8)
STEPS = "steps.jsonl"


@dataclass(frozen=True)
class Job:
    """The settings of a run. The number of ranks and nodes may change between restarts.

    Attributes:
        out: directory of checkpoints and of `STEPS`, shared by all nodes.
        steps: number of steps.
        save_every: steps between checkpoints.
        windows: windows of text per step on all ranks together, so that the data do not depend on the number of ranks.
            Must be a multiple of the number of ranks.
        replicas: copies of the sharded model (HSDP). With one replica per node, parameters are gathered within a node,
            and only reduced gradients are sent between nodes.
        pause: seconds to sleep after each step, to imitate the step time of a large model.
        fsdp2: shard with torch's FSDP2, for comparison.
    """

    out: Path
    steps: int = 40
    save_every: int = 10
    windows: int = 12
    replicas: int = 1
    pause: float = 0.0
    fsdp2: bool = False


@dataclass(frozen=True)
class Step:
    """A finished step: its number from 1, its mean loss, and its checkpoint if there is one. The same on all ranks."""

    number: int
    loss: float
    checkpoint: Path | None


def train(job: Job, device: torch.device) -> Iterator[Step]:
    """Train to the last step, from the latest checkpoint of the run if there is one. Yield each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_gpt("tiny", device=device)
    shard(model, make_mesh(job, device), engine(job.fsdp2))
    optimizer = make_optimizer(model)
    data = torch.Generator().manual_seed(0)  # draws the windows of text
    state = {"model": model, "optimizer": optimizer, "data": data, "step": 0}
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / f"rank-{rank}.json").write_text(json.dumps(describe_rank(model)))
    if checkpoint.latest(job.out) is not None:
        checkpoint.load(job.out, state)  # works on any number of ranks and replicas

    while state["step"] < job.steps:
        windows = random_windows(TEXT, job.windows, model.config.context + 1, data)[rank::world].to(device)
        loss = next_byte_loss(model, windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        mean = mean_of_ranks(loss.detach())
        if rank == 0:
            with (job.out / STEPS).open("a") as file:
                file.write(json.dumps({"step": state["step"], "loss": mean, "ranks": world}) + "\n")
        saved = state["step"] % job.save_every == 0
        if saved:
            checkpoint.save(job.out, state, step=state["step"], keep=2)
        time.sleep(job.pause)
        yield Step(state["step"], mean, job.out / f"step-{state['step']:08d}" if saved else None)


def make_mesh(job: Job, device: torch.device) -> DeviceMesh:
    """Create the mesh. Each row is a replica, over which parameters are sharded. Ranks are ordered by node."""
    world, replicas = dist.get_world_size(), job.replicas
    if world % replicas or job.windows % world:
        raise SystemExit(
            f"the number of ranks, {world}, must be a multiple of --replicas {replicas}, "
            f"and --windows {job.windows} a multiple of it"
        )
    if replicas == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def engine(fsdp2: bool) -> Callable[..., Any]:
    """Return `fully_shard` of torch or of this library."""
    if fsdp2:
        from torch.distributed.fsdp import fully_shard
    else:
        from composable_shard import fully_shard
    return fully_shard


def shard(model: GPT, mesh: DeviceMesh, fully_shard: Callable[..., Any]) -> None:
    """Shard each block, then the root with the remaining parameters."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def make_optimizer(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def mean_of_ranks(loss: torch.Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def describe_rank(model: GPT) -> dict[str, Any]:
    """Return the node and process id of this rank, the classes of its model, placements and process groups."""
    mesh = model.head.weight.device_mesh
    return {
        "node": int(os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK", "0")),  # torchrun's name, and Ray's
        "pid": os.getpid(),
        "classes": [f"{base.__module__}.{base.__qualname__}" for base in type(model).__mro__],
        "placements": {name: str(parameter.placements) for name, parameter in model.named_parameters()},
        "groups": {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names},
    }


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the steps of all starts in order. Steps that were repeated after a restart occur twice."""
    path = run / STEPS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
