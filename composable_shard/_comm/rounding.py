"""Numbers in fewer bits: rounded by block, to nearest or stochastically, and what they stand for.

A block is a piece of a row with a scale of its own, its largest magnitude over the largest number of the form. So a
number is off by at most half a step of its block. A block that holds a NaN or an infinity arrives as NaN, all of it,
and a loss scaler sees that; zeros stay zeros, and what is far below the least normal number of float32 becomes zero.

All are plain operators of torch, the same in eager steps and while a graph runs, so that both have the same bits.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._plan.parcel import SCALE_BYTES, Part, parcel
from .._policies import Wire

_MOST = {"fp8": 448.0, "int8": 127.0}  # the largest number of a form
_LEAST = torch.finfo(torch.float32).tiny  # scale: blocks of zeros need no case of their own
_EXPONENT = 0x7F80_0000  # bits of a float32
_NOISE = 2.0**-16  # a step of the random numbers, which have 16 bits: sums with them are exact
CACHED = 1 << 16  # numbers that a CPU rounds at a time
_FP8_LEAST, _FP8_STEPS = 2.0**-6, 2.0**-3  # e4m3: the least normal number, and the steps of a power of two


def scales_of(blocks: Tensor, form: str) -> Tensor:
    """The scale of each block, (..., 1) in float32, of numbers (..., block); NaN if one of them is not finite."""
    scales = blocks.abs().amax(-1, keepdim=True).float().div_(_MOST[form]).clamp_min_(_LEAST)
    return scales.masked_fill_(torch.isinf(scales), math.nan)


def quantise(codes: Tensor, scales: Tensor, blocks: Tensor, form: str, noise: Tensor | None = None) -> None:
    """Round numbers to a form.

    Args:
        codes: of the same shape as `blocks`, in one byte each; filled.
        scales: (..., 1) in float32; filled.
        blocks: (..., block), of any floating dtype.
        form: ``fp8`` or ``int8``.
        noise: random int16 of the shape of `blocks`, to round stochastically; None to round to nearest.
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
    """Ratios rounded up or down, so that their expectation is what they are."""
    chance = (noise * _NOISE).add_(0.5)
    if form == "int8":
        return ratios.add_(chance).floor_()
    power = (ratios.view(torch.int32) & _EXPONENT).view(torch.float32)
    steps = power.clamp_min_(_FP8_LEAST).mul_(_FP8_STEPS)
    return ratios.div_(steps).add_(chance).floor_().mul_(steps)


def _decoded(codes: Tensor, form: str) -> Tensor:
    """Codes as numbers that torch multiplies; those of fp8 are 1/256 of what they stand for.

    The bits of e4m3 are those of a float16 with fewer of each kind: on a CPU, moving them takes a tenth of the time of
    a conversion.
    """
    whole = codes.view(torch.int8)
    if form == "int8":
        return whole
    return whole.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)


def dequantise(out: Tensor, codes: Tensor, scales: Tensor, form: str) -> None:
    """Fill `out`, (..., block), of any floating dtype: code times scale, rounded once."""
    decoded, scales = _decoded(codes, form), scales if form == "int8" else scales * 256
    if out.dtype == torch.float64 or out.device.type == "cpu":  # there one operator for both takes longer
        out.copy_(decoded).mul_(scales)  # exact: such numbers have few bits
    else:
        torch.mul(decoded, scales, out=out)


def to_bf16(out: Tensor, numbers: Tensor, noise: Tensor | None) -> None:
    """Round numbers to bfloat16, to nearest or, with random int16, stochastically."""
    if noise is None:
        out.copy_(numbers)
        return
    single = numbers.float()
    moved = ((single.view(torch.int32) + (noise.to(torch.int32) + 0x8000)) & -0x1_0000).view(torch.float32)
    out.copy_(torch.where(torch.isfinite(single), moved, single))


class Numbers(NamedTuple):
    """Views of a part of parcels: of one rank's, or of all ranks' (then the first dim is theirs).

    Attributes:
        part: what it travels as.
        values: (..., blocks, block); (..., elements) if there are no scales.
        scales: (..., blocks, 1) in float32; None if there are none.
    """

    part: Part
    values: Tensor
    scales: Tensor | None

    def put(self, numbers: Tensor, noise: Tensor | None = None) -> None:
        """Round numbers, of the shape of `values`, into it."""
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
        """Fill `out`, of the shape of `values`."""
        if self.scales is None:
            out.copy_(self.values)
            return
        for at in self._pieces():
            dequantise(out[at], self.values[at], self.scales[at], self.part.form)

    def _pieces(self) -> Iterator[tuple[Any, ...]]:
        """Where to round at a time: on a CPU so much that its cache holds it, which saves a third of the time."""
        dim = -1 if self.scales is None else -2
        size = self.values.shape[dim]
        some = size if self.values.device.type != "cpu" else max(1, CACHED * size // max(1, self.values.numel()))
        rest = (slice(None),) * (-1 - dim)
        for begin in range(0, size, max(1, some)):
            yield ..., slice(begin, begin + some), *rest

    def flat(self) -> Tensor:
        """The values without blocks, (..., elements)."""
        return self.values if self.scales is None else self.values.flatten(-2)


def numbers_in(parcels: Tensor, parts: Sequence[Part], dtype: torch.dtype) -> list[Numbers]:
    """Views of parcels, (..., bytes); `dtype` is that of what travels as it is."""
    return [_view(parcels, part, dtype) for part in parts]


def _view(parcels: Tensor, part: Part, dtype: torch.dtype) -> Numbers:
    values = parcels.narrow(-1, part.begin, part.nbytes)
    if not part.block:
        return Numbers(part, values.view(torch.bfloat16 if part.form else dtype), None)
    blocks = part.nbytes // part.block
    scales = parcels.narrow(-1, part.scales, SCALE_BYTES * blocks).view(torch.float32)
    return Numbers(part, values.view(*values.shape[:-1], blocks, part.block), scales.unsqueeze(-1))


def rounded(tensor: Tensor, wire: Wire, dim: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """What comes out of a gather for a parameter, or of a rounding to nearest for a gradient.

    Args:
        tensor: the whole parameter.
        wire: what it travels as.
        dim: along which it is cut.
        dtype: of compute; None for its own.
    """
    dtype = dtype or tensor.dtype
    size, row = tensor.shape[dim], tensor.numel() // max(tensor.shape[dim], 1)
    sent = parcel([(size, row)], dtype.itemsize, wire)
    if sent is None:
        return tensor.to(dtype)
    numbers = _view(torch.zeros(sent.nbytes, dtype=torch.uint8, device=tensor.device), sent.parts[0], dtype)
    by_row = tensor.movedim(dim, 0)
    numbers.put(by_row.reshape(numbers.values.shape))
    out = torch.empty(numbers.values.shape, dtype=dtype, device=tensor.device)
    numbers.fill(out)
    return out.view(by_row.shape).movedim(0, dim).contiguous()


class Rounding:
    """How a group rounds its gradients; it outlives the buckets, and goes into checkpoints.

    Attributes:
        number: how many roundings there were.
        left: by parameter, what rounding has left of its gradients, if that is fed back: rows of all ranks in their
            order, with those that pad them behind; between replicas, those of this rank.
    """

    def __init__(self) -> None:
        self.number = 0
        self.left: dict[str, Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    def copied(self) -> Rounding:
        """Another one in the same state."""
        other = Rounding()
        other.put(self.number, {name: tensor.clone() for name, tensor in self.left.items()})
        return other

    def put(self, number: int, left: Mapping[str, Tensor]) -> None:
        """Be in this state from now on."""
        self.number, self.left = number, dict(left)

    def seeded(self, name: str, rank: int, device: torch.device) -> torch.Generator:
        """The random numbers of the next rounding, which follow from its number, a name and the rank."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        seed = zlib.crc32(f"{self.number} {rank} {name}".encode())
        self.number += 1
        return generator.manual_seed(seed)


def _noise(count: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Random int16, all values alike, of that number."""
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=generator)  # a word is four numbers
    return words.view(torch.int16)[:count]


def noise_like(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Random int16, all values alike, of the shape of a tensor."""
    return _noise(numbers.numel(), numbers.device, generator).view(numbers.shape)


class Rounder:
    """Rounds the gradients of a bucket into parcels, by random numbers or with what earlier ones have left.

    Args:
        rounding: of the group.
        names: of the parameters.
        sizes: elements of a rank's piece of each.
        rank: of this process among all that reduce.
        feedback: whether what is left is fed back.
    """

    def __init__(
        self, rounding: Rounding, names: Sequence[str], sizes: Sequence[int], rank: int, feedback: bool
    ) -> None:
        self._rounding, self._names, self._sizes = rounding, names, sizes
        self._rank, self._feedback = rank, feedback

    def put(self, to: Sequence[Numbers], gradients: Sequence[Tensor], marks: Tensor) -> None:
        """Round gradients.

        Args:
            to: the parts of parcels.
            gradients: of each part, in the shape of its values.
            marks: 1 for each parameter of which this rank has a gradient, else 0.
        """
        if self._feedback:
            for numbers, gradient in zip(to, gradients, strict=True):
                self._feed_back(numbers, gradient, marks)
            return
        generator = self._rounding.seeded(self._names[0], self._rank, gradients[0].device)
        pairs = zip(to, gradients, strict=True)
        for _, turn in itertools.groupby(pairs, key=lambda pair: pair[0].part.turn):
            self._put_at_random(list(turn), generator)

    def _put_at_random(self, pairs: Sequence[tuple[Numbers, Tensor]], generator: torch.Generator) -> None:
        """Round the parts of a turn."""
        members = sorted(index for numbers, _ in pairs if numbers.part.form for index in numbers.part.members)
        noise = self._noise_of(members, pairs[0][0].flat().shape[:-1], pairs[0][1].device, generator)
        for numbers, gradient in pairs:
            wanted = numbers.part.members if numbers.part.form else ()
            # Taken out, so that what was drawn is freed before it is used.
            joined = _joined([noise.pop(index) for index in wanted]).reshape(gradient.shape) if wanted else None
            numbers.put(gradient, joined)

    def _noise_of(
        self, members: Sequence[int], lead: torch.Size, device: torch.device, generator: torch.Generator
    ) -> dict[int, Tensor]:
        """Random numbers for some parameters, (*lead, elements of a piece), that are drawn at once in their order."""
        if not members:
            return {}
        counts = [lead.numel() * self._sizes[index] for index in members]
        begins = itertools.accumulate((-(-count // 4) * 4 for count in counts), initial=0)
        places = list(zip(members, begins, counts, strict=False))  # behind the last one is the end
        _, begin, count = places[-1]
        drawn = _noise(begin + count, device, generator)
        return {index: drawn[begin : begin + count].view(*lead, -1) for index, begin, count in places}

    def _feed_back(self, numbers: Numbers, gradient: Tensor, marks: Tensor) -> None:
        part = numbers.part
        if not part.form:
            numbers.put(gradient)
            return
        shapes = self._shapes(part, gradient)
        lefts = [
            self._left_of(self._names[index], shape, gradient.device)
            for index, shape in zip(part.members, shapes, strict=True)
        ]
        dim = -2 if part.block else -1
        left, has = _joined(lefts, dim), self._has(marks, part, shapes, dim)
        total = gradient.float() + left * has
        numbers.put(total)
        arrived = torch.empty_like(total)
        numbers.fill(arrived)
        total.sub_(arrived).nan_to_num_(0.0, 0.0, 0.0)  # nothing is left of what was not finite
        left.mul_(1.0 - has).add_(total)  # what is left of a gradient that this rank has not waits for the next
        if len(lefts) > 1:
            torch._foreach_copy_(lefts, torch.split(left, [each.shape[dim] for each in lefts], dim))

    def _shapes(self, part: Part, gradient: Tensor) -> list[tuple[int, ...]]:
        """The shapes of the members of a part, of which the gradient is given."""
        sizes = [self._sizes[index] for index in part.members]
        if not part.block:
            return [(*gradient.shape[:-1], size) for size in sizes]
        return [(*gradient.shape[:-2], size // part.block, part.block) for size in sizes]

    @staticmethod
    def _has(marks: Tensor, part: Part, shapes: Sequence[tuple[int, ...]], dim: int) -> Tensor:
        """The marks of the members, each as often as there are blocks, or elements, of it."""
        own = marks.float()
        if len(shapes) == 1:
            return own[part.members[0]]
        each = [own[index].expand(shape[dim]) for index, shape in zip(part.members, shapes, strict=True)]
        return torch.cat(each).unsqueeze(-1) if part.block else torch.cat(each)

    def _left_of(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """What is left of a parameter, in the shape of its gradient now; more ranks have more rows that pad."""
        before = self._rounding.left.get(name)
        if before is None or before.shape != shape or before.device != device:
            now = torch.zeros(shape, dtype=torch.float32, device=device)
            if before is not None and (before.dim() == 3 or before.shape == shape):
                common = min(before.numel(), now.numel())
                now.view(-1)[:common].copy_(before.reshape(-1)[:common])
            before = self._rounding.left[name] = now
        return before


def _joined(tensors: Sequence[Tensor], dim: int = -1) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
