"""Small models whose parameters do not divide evenly, and ways to shard them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from _engines import FullyShard


class Block(nn.Module):
    """A residual MLP. `dim` and `hidden` determine whether shards are even."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Input projection, blocks, head; the two projections are the root's own parameters."""

    def __init__(self, blocks: int = 3, dim: int = 6, hidden: int = 10, out: int = 4) -> None:
        super().__init__()
        self.inp = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(blocks))
        self.head = nn.Linear(dim, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InOrder(Stack):
    """Blocks in a given order. A block that runs twice in a row needs the same weights again, also in backward."""

    def __init__(self, order: tuple[int, ...], blocks: int = 2) -> None:
        super().__init__(blocks)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.order:
            x = self.blocks[block](x)
        return self.head(x)


class TiedText(nn.Module):
    """A model whose embedding and head share a weight."""

    def __init__(self, vocabulary: int = 11, dim: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, 2 * dim) for _ in range(2))
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + 1009 * step + rank)


def vectors(rank: int, step: int) -> tuple[Tensor]:
    """A batch for `Stack`, different on each rank and step."""
    return (torch.randn(5, 4, generator=generator(rank, step)),)


def tokens(rank: int, step: int) -> tuple[Tensor]:
    """A batch for `TiedText`."""
    return (torch.randint(0, 11, (3, 4), generator=generator(rank, step)),)


def shard_blocks(model: Any, fully_shard: FullyShard, **options: Any) -> None:
    """Shard each block as a group, and the rest as the root's group."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def shard_root(model: Any, fully_shard: FullyShard, **options: Any) -> None:
    """Shard the whole model as one group."""
    fully_shard(model, **options)


def shard_nested(model: Any, fully_shard: FullyShard, **options: Any) -> None:
    """Shard nested groups: a Linear, its block, the model."""
    for block in model.blocks:
        fully_shard(block.up, **options)
        fully_shard(block, **options)
    fully_shard(model, **options)


def shard_lists(model: Any, fully_shard: FullyShard, **options: Any) -> None:
    """Shard lists of modules: the first two blocks as one group, and the last block's two Linears as another."""
    fully_shard([model.blocks[0], model.blocks[1]], **options)
    fully_shard([model.blocks[-1].up, model.blocks[-1].down], **options)
    fully_shard(model, **options)


class Coder(nn.Module):
    """A model with several forward methods. `generate` calls the others and forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(torch.tanh(self.enc(x)))

    def encode(self, x: Tensor, *, scale: float = 1.0, fail: bool = False) -> Tensor:
        """Half of the way."""
        if fail:
            raise KeyError("as told")
        return torch.tanh(self.enc(x)) * scale

    def generate(self, x: Tensor, steps: int = 2) -> Tensor:
        for _ in range(steps):
            x = self(x) + self.encode(x).mean()
        return x

    @staticmethod
    def double(x: Tensor) -> Tensor:
        return 2 * x
