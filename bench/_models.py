"""The models that the benchmarks run."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch.nn.functional as F
from torch import Tensor, nn


class TinyBlock(nn.Module):
    """Residual block of six parameters, each `width` long in dim 0.

    A world whose size divides `width` needs no padding.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class TinyStack(nn.Module):
    """`blocks` tiny blocks and a norm that belongs to the root."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TinyBlock(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def _tutorial_gpt() -> ModuleType:
    """The tutorials' GPT: one model for what is shown and what is measured."""
    path = Path(__file__).parents[1] / "tutorials" / "_gpt.py"
    spec = importlib.util.spec_from_file_location("_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_gpt"] = module
    spec.loader.exec_module(module)
    return module


_gpt = _tutorial_gpt()
GPT: type[nn.Module] = _gpt.GPT
GPTBlock: type[nn.Module] = _gpt.Block
SIZES = _gpt.SIZES
