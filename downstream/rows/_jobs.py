"""For rows of `composable_shard.weights`: trainers and receivers are separate jobs, which `weights.connect` joins."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from _rows import Run
from composable_shard import weights

VOCABULARY = 97


@dataclass
class Jobs:
    """The job of this rank, and the process group of both jobs.

    Attributes:
        trains: whether this rank trains.
        receivers: the receivers' ranks in `group`.
        group: process group of the trainers, followed by the receivers.
    """

    trains: bool
    receivers: list[int]
    group: dist.ProcessGroup

    @classmethod
    def start(cls, run: Run, trainers: int = 2) -> Jobs:
        """Make a default process group for each job, as if they had been launched separately, and connect them."""
        trains = run.rank < trainers
        rank, world = (run.rank, trainers) if trains else (run.rank - trainers, run.world - trainers)
        for name, number in (("RANK", rank), ("WORLD_SIZE", world)):
            os.environ[name] = os.environ[f"LOCAL_{name}"] = str(number)
        where = run.folder.parent / ("trainers" if trains else "receivers")
        dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=world)
        address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
        group = weights.connect(address, run.rank, run.world, backend="gloo")
        return cls(trains, [*range(trainers, run.world)], group)

    def plan(self, own: weights.WeightLayout) -> weights.Plan:
        """Plan how to send weights, from this rank's layout. Its ranks are those of `group`."""
        return weights.plan_together(self.group, **{"sends" if self.trains else "receives": own})

    def from_first(self, value: Any = None) -> Any:
        """Return the value that rank 0 passes. All ranks must call this."""
        values: list[Any] = [None] * self.group.size()
        dist.all_gather_object(values, value, group=self.group)
        return values[0]


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the full state dict."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def tokens(rank: int) -> torch.Tensor:
    """Return a batch of tokens, different for each rank."""
    return torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(rank))


@torch.no_grad()
def outputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return logits and greedily generated tokens."""
    model.eval()
    prompt = tokens(99)
    mask = torch.ones_like(prompt)
    generated = model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return {"logits": model(input_ids=prompt).logits, "generated": generated}


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], what: str) -> None:
    """Check that two sets of tensors are bitwise identical.

    Raises:
        AssertionError: they are not.
    """
    if one.keys() != other.keys():
        raise AssertionError(f"{what}: only one side has {sorted(one.keys() ^ other.keys())}")
    bits = {name: (each.view(torch.uint8), other[name].view(torch.uint8)) for name, each in one.items() if each.ndim}
    wrong = [name for name, each in one.items() if each.dtype != other[name].dtype or each.shape != other[name].shape]
    wrong += [name for name, (a, b) in bits.items() if name not in wrong and not torch.equal(a, b)]
    wrong += [name for name, each in one.items() if not each.ndim and each.item() != other[name].item()]
    if wrong:
        raise AssertionError(f"{what}: {len(wrong)} of {len(one)} tensors differ, such as {wrong[0]}")


def folder_of(run: Run, name: str) -> str:
    """Return the path of a folder that all ranks share."""
    return str(Path(run.folder, name))
