"""The models of the benchmarks."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class TinyBlock(nn.Module):
    """A residual block with six parameters, each of size `width` in dim 0.

    If the world size divides `width`, parameters need no padding.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class ChainBlock(nn.Module):
    """A block that adds `count` parameters of length `width` to its input."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.names = [f"weight{i}" for i in range(count)]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.zeros(width)))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = x + getattr(self, name)
        return x


class TinyStack(nn.Module):
    """Tiny blocks, or blocks of `per_block` parameters, and a norm in the root group."""

    def __init__(self, blocks: int, width: int, per_block: int | None = None) -> None:
        super().__init__()
        made = (TinyBlock(width) if per_block is None else ChainBlock(width, per_block) for _ in range(blocks))
        self.layers = nn.ModuleList(made)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class GPT2Block(nn.Module):
    """A block of GPT-2 (Radford et al., 2019) with twelve parameters: norms and projections with biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT2Stack(nn.Module):
    """Blocks of GPT-2, and a norm in the root group."""

    def __init__(self, blocks: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GPT2Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def tutorial(name: str) -> ModuleType:
    """Import a module of the tutorials, so that benchmarks use the same model and training loop."""
    folder = str(Path(__file__).parents[1] / "tutorials")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


_gpt = tutorial("_gpt")
GPT: type[nn.Module] = _gpt.GPT
GPTBlock: type[nn.Module] = _gpt.Block
GPTConfig = _gpt.GPTConfig


class _CheckpointedBlock(_gpt.Block):  # type: ignore[name-defined, misc]
    """A block with activation checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def checkpoint_blocks(model: nn.Module) -> None:
    """Use activation checkpointing for every block of a GPT. Call this before sharding."""
    for module in model.modules():
        if isinstance(module, GPTBlock):
            module.__class__ = _CheckpointedBlock


SIZES = _gpt.SIZES
