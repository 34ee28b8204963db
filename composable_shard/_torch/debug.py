"""Expensive checks for debugging: `set_debug`, or the environment variable ``COMPOSABLE_SHARD_DEBUG=1``."""

from __future__ import annotations

import os

import torch

debugging = os.environ.get("COMPOSABLE_SHARD_DEBUG", "0") not in ("", "0")


def set_debug(on: bool) -> bool:
    """Switch the debugging checks on or off, for the whole process.

    There are two checks:

    - Freed memory of unsharded parameters and communication buffers is filled with NaN, so that a later read returns
      NaN instead of old values.
    - Freeing an unsharded parameter that was modified raises `StaleStateError` with its name, because the modification
      would be lost.

    They cost a fill and two sums over all gathered bytes. On an accelerator, the host also waits for the device once
    for each parameter.

    Returns:
        whether the checks were on before.
    """
    global debugging
    before, debugging = debugging, bool(on)
    return before


def poison(memory: torch.Tensor) -> None:
    """Fill memory with bytes that are NaN in every floating-point dtype."""
    memory.view(torch.uint8).fill_(0xFF)


def checksum(memory: torch.Tensor) -> int:
    """A weighted sum of the bytes, which is unlikely to stay equal if they change."""
    numbers = memory.view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, numbers.numel() + 1, device=numbers.device).remainder_(65521)
    return int((numbers * weights).sum().item())
