"""The model and the text of the tutorials, tests and benchmarks.

The model is a small GPT over bytes, so it needs no tokenizer. The text is the source code of Python's standard
library, so there is nothing to download.
"""

import math
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --------------------------------------------------------------------- the model


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. `width` must be a multiple of `2 * heads`. `context` is in tokens."""

    depth: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256


SIZES = {
    "tiny": GPTConfig(depth=2, width=32, heads=2, context=32),  # 41 thousand parameters
    "3m": GPTConfig(depth=6, width=192, heads=6, context=256),  # 2.8 million
    "10m": GPTConfig(depth=8, width=320, heads=5, context=256),  # 10.0 million
    "50m": GPTConfig(depth=16, width=512, heads=8, context=256),  # 50.6 million
    "150m": GPTConfig(depth=12, width=1024, heads=16, context=256),  # 151.5 million
    "1b": GPTConfig(depth=36, width=1536, heads=12, context=256),  # 1.02 billion
}


def rotate(x: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al., 2021, arXiv 2104.09864) to `x` of (batch, heads, time, channels).

    Pairs of channels are rotated by angles proportional to time, so the product of a query and a key depends on their
    distance.
    """
    time, channels = x.shape[-2:]
    rates = 1000.0 ** -torch.linspace(0, 1, channels // 2, device=x.device)
    angles = torch.arange(time, device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, and a hidden width of four times the width."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each with a residual connection. Each block is sharded as one group."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder over bytes: input (batch, time) integers, output next-byte logits (batch, time, vocabulary)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialize every parameter from torch's default generator. Seed it first."""
        for name, module in self.named_modules():
            self.init_module(name, module)

    def init_module(self, name: str, module: nn.Module) -> None:
        """Initialize the parameters of one module, without those of its children."""
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            std = 0.5 / math.sqrt(module.in_features)
            # Outputs to the residual stream start smaller in deeper models.
            shrink = math.sqrt(2 * self.config.depth) if name.endswith((".out", ".out.base")) else 1.0
            nn.init.normal_(module.weight, std=std / shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_gpt(size: str, seed: int = 0, device: torch.device | str = "cpu") -> GPT:
    """Return the model of a size of `SIZES`. Ranks with the same seed get the same weights."""
    torch.manual_seed(seed)
    return GPT(SIZES[size]).to(device)


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean next-byte loss in nats per byte; `windows` has shape (batch, time + 1)."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


# ---------------------------------------------------------------------- the text


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text from different files: one-dimensional uint8 tensors."""

    train: Tensor
    held_out: Tensor


def python_sources() -> Iterator[tuple[str, bytes]]:
    """Yield the relative path and the content of each source file of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted({*subfolders} - {"site-packages", "dist-packages", "__pycache__"})
        for path in sorted(Path(folder, file) for file in files if file.endswith(".py")):
            yield path.relative_to(root).as_posix(), path.read_bytes()


def is_held_out(name: str, share: int = 20) -> bool:
    """Return whether a file is held out. About one in `share` files is.

    It depends only on the name, so all ranks and runs agree.
    """
    return zlib.crc32(name.encode()) % share == 0


def load_corpus() -> Corpus:
    """Return the standard library. Each file is either training or held-out text."""
    train, held_out = bytearray(), bytearray()
    for name, text in python_sources():
        side = held_out if is_held_out(name) else train
        side += text + b"\n"
    return Corpus(*(torch.frombuffer(side, dtype=torch.uint8) for side in (train, held_out)))


def windows_at(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return the pieces of `text` that begin at `starts`, shape (len(starts), length), int64."""
    return text[starts[:, None] + torch.arange(length)].long()


def random_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - length + 1, (count,), generator=generator)
    return windows_at(text, starts, length)


def spaced_windows(text: Tensor, count: int, length: int) -> Tensor:
    """Return `count` pieces, evenly spaced over the text and the same in every run."""
    starts = torch.linspace(0, len(text) - length, count, dtype=torch.float64).long()
    return windows_at(text, starts, length)


def bigram_entropy(*texts: Tensor, chunk: int = 4_194_304) -> float:
    """Return the entropy of a byte given the previous byte, in nats per byte, over all texts together.

    It is the lowest possible loss of a model that sees only one byte. A loss well below it shows that the model uses
    more context.
    """
    pairs = torch.zeros(256 * 256, dtype=torch.int64)
    for text in texts:
        for start in range(0, len(text) - 1, chunk):
            piece = text[start : start + chunk + 1].long()
            ids = piece[:-1] * 256 + piece[1:]
            pairs += torch.bincount(ids, minlength=256 * 256)
    joint = pairs.view(256, 256).double()
    joint /= joint.sum()
    before = joint.sum(dim=1, keepdim=True).expand_as(joint)
    seen = joint > 0
    return -(joint[seen] * (joint[seen] / before[seen]).log()).sum().item()
