"""Lay out tensors of several dtypes in one buffer of bytes, to communicate them together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

_ALIGNED = 16  # bytes; each tensor begins at a multiple, because views of its dtype need alignment


def aligned(nbytes: int) -> int:
    """The bytes that a tensor takes in a buffer."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def begins_of(sizes: Iterable[int]) -> list[int]:
    """Where tensors of these bytes begin in a buffer, and after them the bytes of the buffer."""
    return [0, *accumulate(map(aligned, sizes))]


def view_of(data: torch.Tensor, begin: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """View a tensor in a buffer of bytes."""
    return data[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def buffer_for(
    tensors: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Memory for tensors of these shapes and dtypes: as bytes, without padding at the end, and a view of each."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in tensors]
    begins = begins_of(sizes)
    data = torch.empty(begins[-2] + sizes[-1] if sizes else 0, dtype=torch.uint8, device=device)
    return data, [view_of(data, begin, *each) for begin, each in zip(begins, tensors, strict=False)]
