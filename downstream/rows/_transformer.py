"""A small decoder for the rows about torch itself, with functions to train it with and without sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # optimizers import it in their first step; import it once, before the ranks are forked
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder. The defaults are odd where possible, so that shards are uneven."""

    vocabulary: int = 29
    dim: int = 15
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    hidden: int = 21
    dropout: float = 0.1
    tied: bool = False


UNEVEN = Config()
EVEN = Config(vocabulary=32, dim=16, hidden=24, head_dim=4)  # for features that require evenly divisible sizes


def rotated(x: Tensor) -> Tensor:
    """Apply rotary position embeddings to a tensor of shape (batch, length, heads, head_dim)."""
    length, dim = x.shape[1], x.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=x.device) / dim)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    cos, sin = (each.to(x.dtype)[:, None, :] for each in (angles.cos(), angles.sin()))
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Attention(nn.Module):
    """Causal attention with grouped key and value heads. The projections determine the number of heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.q = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.o = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (self.q(x), self.k(x), self.v(x)))
        q, k, v = (each.transpose(1, 2) for each in (rotated(q), rotated(k), v))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward with pre-normalization, residual connections, and dropout before each addition."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(config.dim), Attention(config)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(config.dim), SwiGLU(config)
        self.attention_dropout, self.feed_forward_dropout = nn.Dropout(config.dropout), nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x)))


class Transformer(nn.Module):
    """A decoder: embedding, blocks, norm, head."""

    def __init__(self, config: Config = UNEVEN) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def transformer(config: Config = UNEVEN) -> Transformer:
    """Return a decoder with the same weights on every rank."""
    torch.manual_seed(0)
    return Transformer(config)


def shard(model: Any, **settings: Any) -> Any:
    """Shard every block, then the model, as the tutorials do."""
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def tokens_of(step: int, rank: int, config: Config = UNEVEN, length: int = 9, batch: int = 2) -> Tensor:
    """Return tokens of shape (batch, length) that depend on step and rank."""
    generator = torch.Generator().manual_seed(101 * step + rank)
    return torch.randint(0, config.vocabulary, (batch, length), generator=generator)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of the next tokens."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    """Return the loss of a step. The dropout depends only on step and rank."""
    torch.manual_seed(1000 + 101 * step + rank)
    tokens = tokens_of(step, rank, getattr(model, "config", UNEVEN))
    return next_token_loss(model(tokens), tokens)


def average_gradients(parameters: Iterable[Tensor], group: Any = None) -> None:
    """Average the gradients over ranks, as data parallelism without sharding does after backward."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: Iterable[int] = range(3),
    sharded: bool = True,
    before_step: Callable[[], Any] | None = None,
) -> list[float]:
    """Train `steps` and return their losses. If `sharded` is false, average the gradients explicitly."""
    losses = []
    for step in steps:
        loss = loss_of(model, step, rank)
        loss.backward()
        if not sharded:
            average_gradients(model.parameters())
        if before_step is not None:
            before_step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def evaluate(model: Any, rank: int, step: int = 99) -> Tensor:
    """Return the output in evaluation mode, then switch back to training mode."""
    model.eval()
    with torch.no_grad():
        out = model(tokens_of(step, rank, getattr(model, "config", UNEVEN)))
    model.train()
    return out


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all unsharded parameters by name."""
    return {name: getattr(p, "full_tensor", p.detach)().detach().clone() for name, p in model.named_parameters()}
