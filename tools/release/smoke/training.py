"""Train a small sharded transformer on gloo and compare it with the unsharded model. Save it, load it, and continue.

    torchrun --nproc-per-node 2 training.py

Losses and weights must agree within fp32 rounding. After loading, the losses must be bitwise identical.
"""

import copy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import composable_shard as cs
from composable_shard import checkpoint

WORDS, LENGTH, WIDTH, STEPS = 50, 8, 32, 4


class Transformer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(WORDS, (3, LENGTH + 1), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def sharded(model: Transformer) -> tuple[Transformer, torch.optim.Optimizer]:
    for block in model.blocks:
        cs.fully_shard(block)
    cs.fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Iterator[Tensor]:
    """Train the sharded model on this rank's batches. Yield the mean loss of all ranks after each step."""
    for step in steps:
        loss = loss_of(model, batch(dist.get_rank(), step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        yield mean


def train_whole(model: nn.Module, steps: range) -> Iterator[Tensor]:
    """Train the unsharded model on the batches of all ranks. Yield the mean loss after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        losses = torch.stack([loss_of(model, batch(rank, step)) for rank in range(dist.get_world_size())])
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield losses.mean().detach()


def run() -> str:
    """Run all checks on this rank. The process group must exist. Return a summary line."""
    whole = Transformer(seed=0)
    model, optimizer = sharded(copy.deepcopy(whole))
    expected = list(train_whole(whole, range(STEPS)))
    losses = list(train(model, optimizer, range(STEPS)))
    torch.testing.assert_close(losses, expected)
    assert losses[-1] < losses[0], losses
    for (name, param), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), other.detach(), msg=lambda text, name=name: f"{name}: {text}")

    places = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(places)
    folder = Path(str(places[0])) / "checkpoints"
    checkpoint.save(folder, {"model": model, "optimizer": optimizer}, step=STEPS)
    again, its_optimizer = sharded(Transformer(seed=1))
    checkpoint.load(folder, {"model": again, "optimizer": its_optimizer})
    more = range(STEPS, STEPS + 2)
    went_on, loaded = list(train(model, optimizer, more)), list(train(again, its_optimizer, more))
    assert all(map(torch.equal, went_on, loaded)), (went_on, loaded)
    return f"losses {losses[0]:.4f} to {losses[-1]:.4f} on {dist.get_world_size()} ranks, equal to the unsharded model"


def main() -> int:
    dist.init_process_group("gloo")
    line = run()
    if dist.get_rank() == 0:
        print(line)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
