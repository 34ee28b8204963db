"""A training that any launcher can start, kill and start again, also on another number of ranks.

07_launch.py and 08_ray_train.py start it. What it needs of a launcher is a process group, and a directory that all of
its ranks see.
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
    """What a run depends on; its ranks and nodes may change.

    Attributes:
        out: the directory of checkpoints and of `STEPS`, the same on all nodes.
        steps: after how many it ends.
        save_every: steps between checkpoints.
        windows: of text in a step, on all ranks together, so that another number of ranks trains on the same; a
            multiple of that number.
        replicas: copies of the sharded model (HSDP). With as many as there are nodes, parameters are gathered within
            nodes, and only reduced gradients cross them.
        pause: seconds of rest after each step, which make the steps of this small model last as long as a large one's.
        fsdp2: shard with torch's own engine, to compare.
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
    """A step that is over, the same on every rank: its number from 1, its loss, and the checkpoint that followed."""

    number: int
    loss: float
    checkpoint: Path | None


def train(job: Job, device: torch.device) -> Iterator[Step]:
    """Train from the latest checkpoint of the run, or the begin, to the last step; gives each step that it takes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_gpt("tiny", device=device)
    shard(model, make_mesh(job, device), engine(job.fsdp2))
    optimizer = make_optimizer(model)
    data = torch.Generator().manual_seed(0)  # draws the windows of text
    state = {"model": model, "optimizer": optimizer, "data": data, "step": 0}
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / f"rank-{rank}.json").write_text(json.dumps(describe_rank(model)))
    if checkpoint.latest(job.out) is not None:
        checkpoint.load(job.out, state)  # at any number of ranks and replicas

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
    """All ranks, in the order of nodes: rows are replicas, and parameters are sharded along a row."""
    world, replicas = dist.get_world_size(), job.replicas
    if world % replicas or job.windows % world:
        raise SystemExit(f"{world} ranks cannot hold {replicas} replicas, or share {job.windows} windows out")
    if replicas == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def engine(fsdp2: bool) -> Callable[..., Any]:
    """`fully_shard` of this library, or torch's."""
    if fsdp2:
        from torch.distributed.fsdp import fully_shard
    else:
        from composable_shard import fully_shard
    return fully_shard


def shard(model: GPT, mesh: DeviceMesh, fully_shard: Callable[..., Any]) -> None:
    """Each block, then the root with what is left."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def make_optimizer(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def mean_of_ranks(loss: torch.Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def describe_rank(model: GPT) -> dict[str, Any]:
    """Where this rank runs, which classes shard its model, and with which ranks it shares parameters."""
    mesh = model.head.weight.device_mesh
    return {
        "node": int(os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK", "0")),  # torchrun's name, and Ray's
        "pid": os.getpid(),
        "classes": [f"{base.__module__}.{base.__qualname__}" for base in type(model).__mro__],
        "placements": {name: str(parameter.placements) for name, parameter in model.named_parameters()},
        "groups": {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names},
    }


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The steps of all starts so far, in the order in which they were taken; some come twice, after a checkpoint."""
    path = run / STEPS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
