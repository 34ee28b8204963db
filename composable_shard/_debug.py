"""Checks that cost too much for every day: `set_debug`, or the environment variable ``COMPOSABLE_SHARD_DEBUG=1``."""

from __future__ import annotations

import os

import torch

debugging = os.environ.get("COMPOSABLE_SHARD_DEBUG", "0") not in ("", "0")


def set_debug(on: bool) -> bool:
    """Switch the checks of debugging on or off, for the whole process; returns how it was.

    On, memory that held unsharded parameters or communication is filled with NaN when it is given up, so that whoever
    still reads it gets NaN and not old numbers; and unsharded parameters that were written to (in forward, say, where
    such a change is lost) raise `StaleStateError`, with their names, when they are given up. It costs a fill and two
    sums over all gathered bytes, and on an accelerator waits for the device for each parameter.
    """
    global debugging
    before, debugging = debugging, bool(on)
    return before


def poison(memory: torch.Tensor) -> None:
    """Fill bytes so that they are NaN in every floating-point dtype."""
    memory.view(torch.uint8).fill_(0xFF)


def checksum(memory: torch.Tensor) -> int:
    """A sum over bytes that a change is unlikely to keep."""
    numbers = memory.view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, numbers.numel() + 1, device=numbers.device).remainder_(65521)
    return int((numbers * weights).sum().item())
