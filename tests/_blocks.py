"""Realistic blocks: grouped-query attention with rotary embeddings, RMSNorm, SwiGLU, dropout, tied heads."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


def rotary(length: int, dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (length, dim), of rotary position embeddings (Su et al., 2021)."""
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to (batch, heads, length, dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped key and value heads."""

    def __init__(self, dim: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.dropout = heads, kv_heads, dim // heads, dropout
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    """The gated feed-forward layer of Llama."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward with dropout on the residual branches."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads, dropout)
        self.feed_forward_norm = nn.RMSNorm(dim)
        self.feed_forward = SwiGLU(dim, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Transformer(nn.Module):
    """A small decoder: embedding, blocks, norm, and a head that can share the embedding's weight."""

    def __init__(
        self,
        vocabulary: int = 37,
        dim: int = 16,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        hidden: int = 24,
        length: int = 8,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(TransformerBlock(dim, heads, kv_heads, hidden, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        cos, sin = rotary(length, dim // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def token_batch(rank: int, step: int, batch: int = 2, length: int = 8, vocabulary: int = 37) -> tuple[Tensor]:
    """Tokens, (batch, length), that differ by rank and step."""
    generator = torch.Generator().manual_seed(1 + 1009 * step + rank)
    return (torch.randint(0, vocabulary, (batch, length), generator=generator),)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of each next token."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


TENSOR_PARALLEL = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(),
    "feed_forward.gate": ColwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(),
}  # of a `TransformerBlock`
