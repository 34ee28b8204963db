"""A state with one value of each type, its exact content, and tools to damage its checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import composable_shard as cs
from composable_shard import checkpoint
from composable_shard.checkpoint._io import digests


class Counter:
    """A user's object with a state dict, whose load can be made to fail."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.trace = torch.arange(3) + count
        self.fails_on: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "trace": self.trace}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        if self.fails_on == rank_here():
            raise ValueError("the counter is stuck")
        self.trace = state["trace"]


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def make_state(seed: int, width: int = 8, bias: bool = True) -> dict[str, Any]:
    """A sharded model, an optimizer that has stepped, a schedule, and other values of a run."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.Linear(8, 3, bias=bias))
    if dist.is_initialized():
        for layer in model:
            cs.fully_shard(layer)
        cs.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model(torch.randn(4, width)).square().sum().backward()
    optimizer.step()
    for _ in range(seed):
        schedule.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "counter": Counter(seed),
        "mine": checkpoint.PerRank({"rank": rank_here(), "seed": seed}),
        "order": torch.Generator().manual_seed(seed),
        "mean": torch.full((5,), float(seed)),
        "epoch": seed,
        "notes": {"text": f"run {seed}", "losses": [0.1 * seed]},
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def content(state: dict[str, Any]) -> dict[str, Any]:
    """Everything in a state on this rank, as plain lists, so that equality is bitwise."""
    held: dict[str, Any] = {}
    for name, tensor in state["model"].state_dict().items():
        held[f"model.{name}"] = tensor
    for index, values in enumerate(state["optimizer"].state.values()):
        held |= {f"optimizer.{index}.{name}": tensor for name, tensor in values.items()}
    held |= {"order": state["order"].get_state(), "mean": state["mean"], "trace": state["counter"].trace}
    numbers: dict[str, Any] = {
        name: _local(tensor).reshape(-1).view(torch.uint8).tolist() for name, tensor in held.items()
    }
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state["optimizer"].param_groups]
    plain = {name: state[name] for name in ("epoch", "notes")} | {
        "mine": state["mine"].value,
        "count": state["counter"].count,
    }
    return numbers | {"plain": repr(plain), "groups": repr(groups), "schedule": repr(state["schedule"].state_dict())}


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and give it a valid checksum, like an attacker."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_bytes())["manifest"]
    change(manifest)
    seal(path, json.dumps(manifest, separators=(",", ":")).encode())


def seal(path: Path, body: bytes) -> None:
    """Write these bytes as the manifest, with their checksum."""
    checksum = digests.file_checksum("crc32", body).encode()
    (path / "manifest.json").write_bytes(b'{"manifest":' + body + b',\n"checksum":"' + checksum + b'"}\n')


def body_of(path: Path) -> bytes:
    data = (path / "manifest.json").read_bytes()
    return data[len(b'{"manifest":') : data.rindex(b',\n"checksum":')]


def copy_of(directory: Path, where: Path, name: str) -> Path:
    """A copy of a directory of checkpoints, to damage it."""
    return Path(shutil.copytree(directory, where / name, symlinks=True))
