"""Fingerprints of tensors: numbers that differ, practically always, if a single bit differs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

_AT_ONCE = 1 << 21  # how many 8-byte words are mixed together
_STEP = 0x9E37_79B9_7F4A_7C15 - (1 << 64)  # odd, so that each place adds another number to its word
# The finalizer of MurmurHash3 for 64 bits (Austin Appleby, public domain). Each bit of a word changes about half of the
# bits of the result. Without it, a sum would not notice that two words have changed their highest bits: the signs of
# two numbers.
_FACTORS = (0xFF51_AFD7_ED55_8CCD - (1 << 64), 0xC4CE_B9FE_1A85_EC53 - (1 << 64))
_SHIFT, _LOW = 33, (1 << 31) - 1
_BYTES = 16  # of a fingerprint


@torch.no_grad()
def fingerprints(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The fingerprint of each tensor's bytes in row-major order, 16 bytes.

    On the CPU it is a part of SHA-256, which takes a fraction of the time of torch's integer operators. On other
    devices it is a sum of mixed words. Compare only fingerprints of tensors on the same type of device. Two different
    tensors have the same fingerprint with a probability of about 2^-128 if they were not made to have it.

    Args:
        tensors: plain tensors.
    """
    prints = [hashlib.sha256(_data(each).numpy()).digest()[:_BYTES] if each.is_cpu else b"" for each in tensors]  # type: ignore[arg-type]
    elsewhere = [index for index, each in enumerate(tensors) if not each.is_cpu]
    sums = [torch.stack([_mixed(_data(tensors[index]), seed) for seed in (0, 1)]) for index in elsewhere]
    for index, each in zip(elsewhere, sums, strict=True):  # queue all of them before the first wait
        prints[index] = each.cpu().numpy().tobytes()
    return prints


def _data(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; a copy of them if it is not contiguous, so one tensor at a time is copied."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _mixed(data: torch.Tensor, seed: int) -> torch.Tensor:
    tail = -data.numel() % 8
    words = torch.nn.functional.pad(data, (0, tail)) if tail or data.storage_offset() % 8 else data
    words = words.view(torch.int64)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for begin in range(0, words.numel(), _AT_ONCE):
        part = words[begin : begin + _AT_ONCE]
        mixed = torch.arange(begin + 1, begin + 1 + part.numel(), device=part.device).mul_(_STEP)
        mixed.bitwise_xor_(seed).add_(part)
        for factor in _FACTORS:
            mixed.bitwise_xor_((mixed >> _SHIFT).bitwise_and_(_LOW)).mul_(factor)
        total += mixed.bitwise_xor_((mixed >> _SHIFT).bitwise_and_(_LOW)).sum()
    return total
