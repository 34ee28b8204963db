"""A model with every type of tensor that state dicts have, and functions to shard it."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES


class Net(Transformer):
    """A decoder with tied embeddings of uneven size, a one-element parameter, a frozen norm, buffers and more."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.apart = nn.Parameter(torch.randn(3))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("count", torch.tensor(7))
        self.norm.requires_grad_(False)
        self.note = "as made"

    def forward(self, tokens):
        return super().forward(tokens) * self.scale + self.apart.sum()

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def shard(model: Net, engine: str = "ours", **options) -> Net:
    """Each block is a group, the root's group has the rest, and `apart` is in no group."""
    for block in model.blocks:
        ENGINES[engine](block, **options)
    return ENGINES[engine](model, ignored_params={model.apart}, **options)


def batch(rank: int, step: int):
    return token_batch(rank, step)[0]


def step(model, optimizer, rank, at=0):
    next_token_loss(model, batch(rank, at)).backward()
    apart = getattr(model, "apart", None)
    if apart is not None and apart.grad is not None:
        torch.distributed.all_reduce(apart.grad)
    optimizer.step()
    optimizer.zero_grad()


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_equal(state, expected):
    """Check for the same names in the same order with bitwise identical values."""
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert_same(state[name], value, name)


def assert_same(value, expected, name):
    if not isinstance(expected, torch.Tensor):
        assert value == expected, name
        return
    assert type(value) is torch.Tensor, name
    assert value.dtype == expected.dtype, name
    assert torch.equal(value, expected.detach().to(value.device)), name
