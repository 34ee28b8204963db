"""The decoder that a `Shape` describes, for traces. A decoder that is made in ``FakeTensorMode`` has no memory.

RMSNorm: https://arxiv.org/abs/1910.07467; rotary embeddings: https://arxiv.org/abs/2104.09864; grouped-query attention:
https://arxiv.org/abs/2305.13245; SwiGLU: https://arxiv.org/abs/2002.05202; LoRA: https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .shape import Shape


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.channels = shape.channels
        self.query = nn.Linear(shape.width, shape.heads * shape.channels, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.channels, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.channels, bias=False)
        self.out = nn.Linear(shape.heads * shape.channels, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, time, _ = x.shape
        query, key, value = (
            layer(x).view(batch, time, -1, self.channels) for layer in (self.query, self.key, self.value)
        )
        query, key = rotated(query, angles), rotated(key, angles)
        repeat = query.shape[2] // key.shape[2]
        key, value = (each.repeat_interleave(repeat, dim=2) if repeat > 1 else each for each in (key, value))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        joined = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(joined.transpose(1, 2).reshape(batch, time, -1))  # type: ignore[no-any-return]


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of channels of `x` (batch, time, heads, channels) by `angles` (time, channels / 2), complex."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[:, None, :]).flatten(-2).type_as(x)


class FeedForward(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer block. Input and output: (batch, time, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A language model. Input: tokens (batch, time), integers. Output: logits (batch, time, vocabulary)."""

    angles: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.register_parameter("weight", self.embedding.get_parameter("weight"))
        angles = torch.empty(shape.sequence, shape.channels // 2, dtype=torch.complex64)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze a decoder, and add trainable low-rank adapters of this rank to its attention layers."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Attention):
            for name in ("query", "key", "value", "out"):
                module.register_module(name, LowRank(module.get_submodule(name), rank))  # type: ignore[arg-type]


def parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism to a decoder over a mesh.

    Linear layers are sharded by columns, then by rows (https://arxiv.org/abs/1909.08053). Activations between them are
    sharded by sequence (https://arxiv.org/abs/2205.05198), embedding and head by vocabulary.
    """
    rows, columns, whole = RowwiseParallel(output_layouts=Shard(1)), ColwiseParallel(), Replicate()
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None),
                desired_input_layouts=(whole, None),
            ),
            "feed_forward_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(whole,)),
        }
        plan |= {f"attention.{name}": columns for name in ("query", "key", "value")}
        plan |= {f"feed_forward.{name}": columns for name in ("gate", "up")}
        plan |= {"attention.out": rows, "feed_forward.down": rows}
        parallelize_module(block, mesh, plan)
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in float32 of tokens (batch, time + 1). Each token predicts the next one."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
