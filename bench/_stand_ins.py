"""Models for overlap.py: small parameters, and compute times that are declared instead of computed.

A matrix takes `rate` seconds per parameter in forward, and twice that in backward. So the ratios of bytes and times of
groups are those of large models, but a step runs fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _simulate import Unit
from composable_shard.testing import Busy

WIDTH, BLOCKS = 128, 8
BLOCK_S = 1e-3  # forward time of a plain block


class Timed(nn.Module):
    """A linear layer with a declared compute time."""

    def __init__(self, rows: int, columns: int, rate: float) -> None:
        super().__init__()
        self.linear = nn.Linear(rows, columns, bias=False)
        self.busy = Busy(rate * rows * columns)

    def forward(self, x: Tensor) -> Tensor:
        return self.busy(self.linear(x))


class Attention(nn.Module):
    """The projections of attention, without the attention itself."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.qkv = Timed(width, 3 * width, rate)
        self.proj = Timed(3 * width, width, rate)  # three times the usual size: reads q, k and v

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(self.qkv(x))


class Dense(nn.Module):
    """A transformer block with a hidden width of `times` the width."""

    def __init__(self, width: int, times: int, rate: float) -> None:
        super().__init__()
        self.attention = Attention(width, rate)
        self.up = Timed(width, times * width, rate)
        self.down = Timed(times * width, width, rate)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.down(F.relu(self.up(x)))


class Mixture(nn.Module):
    """A block with experts. It gathers all experts, but each token uses only `active` of them."""

    def __init__(self, width: int, experts: int, active: int, rate: float) -> None:
        super().__init__()
        self.attention = Attention(width, rate)
        shape = experts, 4 * width, width
        self.up = nn.Parameter(torch.randn(shape) * width**-0.5)
        self.down = nn.Parameter(torch.randn(shape) * width**-0.5 / experts)
        half = rate * active * 4 * width * width
        self.busy_up, self.busy_down = Busy(half), Busy(half)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        hidden = self.busy_up(torch.einsum("btd,ehd->ebth", x, self.up))
        return x + self.busy_down(torch.einsum("ebth,ehd->btd", F.relu(hidden), self.down))


class Model(nn.Module):
    """An embedding (no compute time), blocks, a norm in the root group, and a head."""

    def __init__(self, vocabulary: int, blocks: Sequence[nn.Module], rate: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Timed(WIDTH, vocabulary, rate)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def units(self) -> Iterator[nn.Module]:
        """Yield the sharded modules except the root, in forward order."""
        yield self.embedding
        yield from self.blocks
        yield self.head


RATE = BLOCK_S / (14 * WIDTH**2)  # a plain block has (6 + 8) * WIDTH**2 parameters

MODELS: dict[str, Callable[[], Model]] = {
    "uniform": lambda: Model(256, [Dense(WIDTH, 4, RATE) for _ in range(BLOCKS)], RATE),
    "large embedding": lambda: Model(6_000, [Dense(WIDTH, 4, RATE) for _ in range(BLOCKS)], RATE),
    "wide and narrow": lambda: Model(256, [Dense(WIDTH, (12, 1)[i % 2], RATE) for i in range(BLOCKS)], RATE),
    "experts": lambda: Model(
        256, [Mixture(WIDTH, 8, 2, RATE) if i % 2 else Dense(WIDTH, 4, RATE) for i in range(BLOCKS)], RATE
    ),
}


def units_of(model: Model) -> list[Unit]:
    """Return the root, which stays gathered for the step, and then the other groups in forward order."""
    others = [_unit(module) for module in model.units()]
    everything = _unit(model)
    return [Unit(everything.nbytes - sum(unit.nbytes for unit in others), 0.0, 0.0), *others]


def _unit(module: nn.Module) -> Unit:
    busy = [each for each in module.modules() if isinstance(each, Busy)]
    nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return Unit(nbytes, sum(b.forward_s for b in busy), sum(b.backward_s for b in busy))
