"""Random models with nested groups, which can run several times, in any order, and with or without resharding.

Some branches do not contribute to the loss.
"""

from __future__ import annotations

import random
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import composable_shard as cs

DIM = 6
POLICIES = [
    None,
    *(cs.PrefetchPolicy.depth(depth) for depth in (0, 1, 2, 3)),
    cs.PrefetchPolicy.bytes(600),
    cs.PrefetchPolicy.auto(),
]


class Nest(nn.Module):
    """A module with or without own parameters that calls inner modules in some order.

    Attributes:
        left_out: for each call, whether its output is detached.
        checkpointed: the checkpoint around its calls: "plain", "closure" (without tensor arguments), or None.
    """

    checkpointed: str | None = None

    def __init__(self, rng: random.Random, depth: int, *, whole: bool = False) -> None:
        super().__init__()
        hidden = rng.choice([2, 6, 20])
        own = nn.Sequential(nn.Linear(DIM, hidden), nn.Linear(hidden, DIM))
        inner = rng.randint(0, 2) if depth else 0
        self.own = own if whole or not inner or rng.random() < 0.8 else None
        self.inner = nn.ModuleList(Nest(rng, depth - 1, whole=whole) for _ in range(inner))
        self.calls = [at for at in range(inner) for _ in range(rng.choice([1, 1, 1, 2]))]
        if rng.random() < 0.3:
            rng.shuffle(self.calls)
        self.last = rng.random() < 0.3  # its own layers run after the inner modules
        self.returns_inner = rng.random() < 0.3  # return the output of the last inner module
        self.is_sharded = whole or rng.random() < 0.85
        self.resharded = rng.random() < 0.75
        self.left_out = [False] * len(self.calls)

    def forward(self, x: Tensor) -> Tensor:
        if self.own is not None and not self.last:
            x = self.own(x)
        for at, left_out in zip(self.calls, self.left_out, strict=True):
            y = _called(self.inner[at], x)
            x = x + y.detach() if left_out else y if self.returns_inner else x + y
        if self.own is not None and self.last:
            x = self.own(x.tanh())
        return x if self.returns_inner else x.tanh()

    @property
    def nests(self) -> list[Nest]:
        """This module and all modules in it."""
        return [module for module in self.modules() if isinstance(module, Nest)]


def _called(nest: Nest, x: Tensor) -> Tensor:
    if nest.checkpointed == "closure":
        return checkpoint(lambda: nest(x), use_reentrant=False)
    return checkpoint(nest, x, use_reentrant=False) if nest.checkpointed else nest(x)


class Nests(nn.Module):
    """The root module with two or three `Nest` modules."""

    def __init__(self, rng: random.Random, *, whole: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(4, DIM)
        self.nests = nn.ModuleList(Nest(rng, 2, whole=whole) for _ in range(rng.randint(2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for nest in self.nests:
            x = _called(nest, x)
        return x

    @property
    def all_nests(self) -> list[Nest]:
        return [module for module in self.modules() if isinstance(module, Nest)]


def with_checkpoints(rng: random.Random) -> Nests:
    """A model with checkpoints around half of its modules."""
    model = Nests(rng)
    for nest in model.all_nests:
        nest.checkpointed = rng.choice([None, None, None, "plain", "plain", "closure"])
    return model


def shard_nests(model: Nests, engine: Any, **options: Any) -> None:
    for nest in reversed(model.all_nests):
        if nest.is_sharded:
            engine(nest, **{"reshard_after_forward": nest.resharded, **options})
    engine(model, **{"reshard_after_forward": False, **options})
