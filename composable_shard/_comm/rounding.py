"""Rounds numbers to fewer bits, by block, to nearest or stochastically, and converts them back.

A block is a piece of a row with its own scale: the block's largest magnitude divided by the form's largest number.
The rounding error of a number is at most half a step of its block. If a block contains a NaN or an infinity, all of
it is received as NaN, which a loss scaler detects. Zeros stay zeros. Numbers far below the smallest normal float32
become zero.

All functions use plain torch operators, the same ones in eager steps and in graphs, so the results of both are bitwise
identical.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._plan.parcel import SCALE_BYTES, Part

_MOST = {"fp8": 448.0, "int8": 127.0}  # the largest number of a form
_LEAST = torch.finfo(torch.float32).tiny  # the smallest scale, so that blocks of zeros need no special case
_EXPONENT = 0x7F80_0000  # exponent bits of a float32
_NOISE = 2.0**-16  # a step of the random numbers, which have 16 bits: sums with them are exact
CACHED = 1 << 16  # numbers that a CPU rounds at a time
_FP8_LEAST, _FP8_STEPS = 2.0**-6, 2.0**-3  # e4m3: the smallest normal number, and a step relative to the power of two


def scales_of(blocks: Tensor, form: str) -> Tensor:
    """Return the scales of blocks, (..., block), as (..., 1) in float32; NaN if a number of the block is not finite."""
    scales = blocks.abs().amax(-1, keepdim=True).float().div_(_MOST[form]).clamp_min_(_LEAST)
    return scales.masked_fill_(torch.isinf(scales), math.nan)


def quantise(codes: Tensor, scales: Tensor, blocks: Tensor, form: str, noise: Tensor | None = None) -> None:
    """Round numbers to a form.

    Args:
        codes: filled with the result; has the shape of `blocks`, one byte per number.
        scales: filled with the scales, (..., 1) in float32.
        blocks: the numbers, (..., block), in any floating dtype.
        form: ``fp8`` or ``int8``.
        noise: random int16 of the shape of `blocks` for stochastic rounding; None to round to nearest.
    """
    scales.copy_(scales_of(blocks, form))
    ratios = blocks.float() / scales
    if noise is not None:
        ratios = _dithered(ratios, form, noise)
    elif form == "int8":
        ratios.round_()
    ratios.clamp_(-_MOST[form], _MOST[form])
    codes.view(torch.int8 if form == "int8" else torch.float8_e4m3fn).copy_(ratios)


def _dithered(ratios: Tensor, form: str, noise: Tensor) -> Tensor:
    """Round ratios up or down at random, so that the expected result is the ratio itself."""
    chance = (noise * _NOISE).add_(0.5)
    if form == "int8":
        return ratios.add_(chance).floor_()
    power = (ratios.view(torch.int32) & _EXPONENT).view(torch.float32)
    steps = power.clamp_min_(_FP8_LEAST).mul_(_FP8_STEPS)
    return ratios.div_(steps).add_(chance).floor_().mul_(steps)


def _decoded(codes: Tensor, form: str) -> Tensor:
    """Decode codes to numbers that torch can multiply; those of fp8 are 1/256 of their values.

    e4m3 has the fields of a float16 with fewer bits each. On a CPU, shifting the bits takes a tenth of the time of a
    conversion.
    """
    whole = codes.view(torch.int8)
    if form == "int8":
        return whole
    return whole.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)


def dequantise(out: Tensor, codes: Tensor, scales: Tensor, form: str) -> None:
    """Fill `out`, (..., block), of any floating dtype, with code times scale, rounded once."""
    decoded, scales = _decoded(codes, form), scales if form == "int8" else scales * 256
    if out.dtype == torch.float64 or out.device.type == "cpu":  # one operator for both steps is slower there
        out.copy_(decoded).mul_(scales)  # the copy is exact: decoded numbers have few bits
    else:
        torch.mul(decoded, scales, out=out)


def to_bf16(out: Tensor, numbers: Tensor, noise: Tensor | None) -> None:
    """Round numbers to bfloat16: to nearest, or stochastically with random int16 `noise`."""
    if noise is None:
        out.copy_(numbers)
        return
    single = numbers.float()
    moved = ((single.view(torch.int32) + (noise.to(torch.int32) + 0x8000)) & -0x1_0000).view(torch.float32)
    out.copy_(torch.where(torch.isfinite(single), moved, single))


class Numbers(NamedTuple):
    """Views of a part of parcels: of one rank's parcel, or of all ranks' (the first dim is then the rank).

    Attributes:
        part: the format in which it is sent.
        values: (..., blocks, block); (..., elements) if there are no scales.
        scales: (..., blocks, 1) in float32; None if there are none.
    """

    part: Part
    values: Tensor
    scales: Tensor | None

    def put(self, numbers: Tensor, noise: Tensor | None = None) -> None:
        """Round numbers, of the shape of `values`, into this part."""
        if not self.part.form:
            self.values.copy_(numbers)
            return
        for at in self._pieces():
            some = None if noise is None else noise[at]
            if self.scales is None:
                to_bf16(self.values[at], numbers[at], some)
            else:
                quantise(self.values[at], self.scales[at], numbers[at], self.part.form, some)

    def fill(self, out: Tensor) -> None:
        """Fill `out`, of the shape of `values`, with the decoded numbers."""
        if self.scales is None:
            out.copy_(self.values)
            return
        for at in self._pieces():
            dequantise(out[at], self.values[at], self.scales[at], self.part.form)

    def _pieces(self) -> Iterator[tuple[Any, ...]]:
        """Yield indices of the pieces to round. On a CPU a piece fits into the cache, which saves 1/3 of the time."""
        dim = -1 if self.scales is None else -2
        size = self.values.shape[dim]
        some = size if self.values.device.type != "cpu" else max(1, CACHED * size // max(1, self.values.numel()))
        rest = (slice(None),) * (-1 - dim)
        for begin in range(0, size, max(1, some)):
            yield ..., slice(begin, begin + some), *rest

    def flat(self) -> Tensor:
        """Return the values without blocks, (..., elements)."""
        return self.values if self.scales is None else self.values.flatten(-2)


def numbers_in(parcels: Tensor, parts: Sequence[Part], dtype: torch.dtype) -> list[Numbers]:
    """View parcels, (..., bytes), as numbers; `dtype` is that of parts that are sent unrounded."""
    return [_view(parcels, part, dtype) for part in parts]


def _view(parcels: Tensor, part: Part, dtype: torch.dtype) -> Numbers:
    values = parcels.narrow(-1, part.begin, part.nbytes)
    if not part.block:
        return Numbers(part, values.view(torch.bfloat16 if part.form else dtype), None)
    blocks = part.nbytes // part.block
    scales = parcels.narrow(-1, part.scales, SCALE_BYTES * blocks).view(torch.float32)
    return Numbers(part, values.view(*values.shape[:-1], blocks, part.block), scales.unsqueeze(-1))


class Rounding:
    """The state of a group's gradient rounding. It outlives the buckets and is saved in checkpoints.

    Attributes:
        number: number of roundings so far.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._generators: dict[torch.device, torch.Generator] = {}

    def resume(self, number: int) -> None:
        """Continue after the rounding of this number, which a checkpoint has saved."""
        self.number = number

    def seeded(self, name: str, rank: int, device: torch.device) -> torch.Generator:
        """Return the generator of the next rounding, seeded by the number of the rounding, a name and the rank."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        seed = zlib.crc32(f"{self.number} {rank} {name}".encode())
        self.number += 1
        return generator.manual_seed(seed)


def _noise(count: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return `count` uniform random int16."""
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=generator)  # a word holds four numbers
    return words.view(torch.int16)[:count]


class Rounder:
    """Rounds the gradients of a bucket into parcels, stochastically.

    Args:
        rounding: the rounding state of the group.
        name: the name of the bucket, which seeds the random numbers.
        sizes: elements of a rank's piece of each parameter.
        rank: the rank of this process among all that reduce.
    """

    def __init__(self, rounding: Rounding, name: str, sizes: Sequence[int], rank: int) -> None:
        self._rounding, self._name, self._sizes, self._rank = rounding, name, sizes, rank

    def put(self, to: Sequence[Numbers], gradients: Sequence[Tensor]) -> None:
        """Round gradients.

        Args:
            to: the parts of parcels.
            gradients: the gradients of each part, in the shape of its values.
        """
        generator = self._rounding.seeded(self._name, self._rank, gradients[0].device)
        pairs = zip(to, gradients, strict=True)
        for _, turn in itertools.groupby(pairs, key=lambda pair: pair[0].part.turn):
            self._put_at_random(list(turn), generator)

    def _put_at_random(self, pairs: Sequence[tuple[Numbers, Tensor]], generator: torch.Generator) -> None:
        """Round the parts of one turn."""
        members = sorted(index for numbers, _ in pairs if numbers.part.form for index in numbers.part.members)
        noise = self._noise_of(members, pairs[0][0].flat().shape[:-1], pairs[0][1].device, generator)
        for numbers, gradient in pairs:
            wanted = numbers.part.members if numbers.part.form else ()
            # Popped, so that the noise of single parameters is freed before the joined noise is used.
            joined = _joined([noise.pop(index) for index in wanted]).reshape(gradient.shape) if wanted else None
            numbers.put(gradient, joined)

    def _noise_of(
        self, members: Sequence[int], lead: torch.Size, device: torch.device, generator: torch.Generator
    ) -> dict[int, Tensor]:
        """Draw random numbers for some parameters in their order, (*lead, elements of a piece), in one call."""
        if not members:
            return {}
        counts = [lead.numel() * self._sizes[index] for index in members]
        begins = itertools.accumulate((-(-count // 4) * 4 for count in counts), initial=0)
        places = list(zip(members, begins, counts, strict=False))  # `begins` has one more entry, the end
        _, begin, count = places[-1]
        drawn = _noise(begin + count, device, generator)
        return {index: drawn[begin : begin + count].view(*lead, -1) for index, begin, count in places}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), -1)
