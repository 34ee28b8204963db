"""Layers with packed weights like those of quantization libraries: metadata is stored next to the weight's data.

Like the 4-bit and 8-bit layers of `bitsandbytes`, `Packed4Linear` keeps its unsharded weight on the ``ctx`` of its
autograd function, and `Packed8Linear` keeps a second reference to the weight's data in an object of the module.
"""

from __future__ import annotations

import copy

import torch
import torch.nn as nn

NAN_BYTES = (0x01, 0xFF, 0x81, 0x7F)  # signalling and quiet NaNs in bfloat16, float16 and float32, with payloads


class Scales:
    """Metadata of a packed weight: code book, scale of each row, shape, and an offset."""

    def __init__(self, codes, scales, shape, offset=0.0):
        self.codes, self.scales, self.shape, self.offset = codes, scales, shape, offset
        self.swapped = False


class Packed4(nn.Parameter):
    """A weight with two values per byte, in any storage dtype."""

    def __new__(cls, data, scales):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scales, made.kind = scales, "four bits"
        return made

    def __deepcopy__(self, memo):
        return type(self)(self.data.clone(), copy.copy(self.scales))


def numbers(data, scales):
    """Unpack a weight into a matrix."""
    packed = data.contiguous().view(torch.uint8).flatten()
    halves = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
    if scales.swapped:
        halves = halves.flip(0)
    return scales.codes[halves].view(scales.shape) * scales.scales[:, None] + scales.offset


def packed(matrix, storage):
    """Pack a matrix. Returns the data and the metadata of the weight."""
    codes, scales = torch.linspace(-1, 1, 16), matrix.abs().amax(1)
    halves = ((matrix / scales[:, None] + 1) * 7.5).round().byte().view(-1, 2)
    data = (halves[:, 0] << 4 | halves[:, 1]).view(storage).view(-1, 1)
    return data, Scales(codes, scales, tuple(matrix.shape))


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, scales):
        ctx.weight, ctx.scales = weight.view(-1, 1), scales
        return x @ numbers(weight, scales).to(x.dtype).t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ numbers(ctx.weight, ctx.scales).to(grad.dtype), None, None


class Packed4Linear(nn.Module):
    """A frozen layer with four-bit weights. In evaluation it first repacks them for another layout."""

    def __init__(self, inputs, outputs, storage=torch.uint8):
        super().__init__()
        bits = torch.randint(256, (inputs * outputs // 2,), dtype=torch.uint8)
        bits[: len(NAN_BYTES)] = torch.tensor(NAN_BYTES, dtype=torch.uint8)
        bits[-len(NAN_BYTES) :] = bits[: len(NAN_BYTES)]
        codes, scales = torch.linspace(-1, 1, 16), torch.rand(outputs) / inputs**0.5
        self.weight = Packed4(bits.view(storage).view(-1, 1), Scales(codes, scales, (outputs, inputs)))
        self.seen = []

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scales = self.weight.scales
        destination[f"{prefix}weight.scales"] = scales.scales
        destination[f"{prefix}weight.offset"] = torch.tensor([scales.offset])

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name in ("scales", "offset"):
            state_dict.pop(f"{prefix}weight.{name}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x):
        assert self.weight.kind == "four bits"
        self.seen.append(self.weight.detach().clone().view(torch.uint8))
        weight, scales = self.weight, self.weight.scales
        if not self.training:
            flipped = weight.data.view(torch.uint8).flatten()
            self.weight.data = ((flipped >> 4) | (flipped << 4)).flip(0).view(-1, 1)
            scales.swapped = True
            weight = self.weight
        return _Multiply.apply(x, weight, scales)


class Packed8(nn.Parameter):
    """A weight with eight bits per value. `whole` refers to the same data."""

    def __new__(cls, data, scales):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.whole, made.scales = made.data, scales
        return made

    def __deepcopy__(self, memo):
        made = type(self)(self.data.clone(), copy.copy(self.scales))
        if self.whole is None:
            made.whole = made.scales = None
        return made


class State:
    whole = scales = None


class _Multiply8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, state):
        ctx.state = state
        return x @ (state.whole.to(x.dtype) * state.scales[:, None].to(x.dtype)).t()

    @staticmethod
    def backward(ctx, grad):
        state = ctx.state
        return grad @ (state.whole.to(grad.dtype) * state.scales[:, None].to(grad.dtype)), None


class Packed8Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        data = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        self.weight = Packed8(data, torch.rand(outputs) / 127 / inputs**0.5)
        self.state = State()

    def forward(self, x):
        if self.weight.whole is not None:
            self.state.whole, self.state.scales = self.weight.whole, self.weight.scales
            self.weight.whole = self.weight.scales = None
        out = _Multiply8.apply(x, self.state)
        self.weight.data = self.state.whole
        return out


class Adapted(nn.Module):
    """A frozen base with a trained low-rank adapter."""

    def __init__(self, base, inputs, outputs, rank=3):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, make, width, wide, trains):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        pairs = ((width, wide), (wide, width))
        self.first, self.second = (Adapted(make(*pair), *pair) if trains else make(*pair) for pair in pairs)
        self.after = nn.RMSNorm(width)  # backward reads this first
        self.norm.requires_grad_(trains)
        self.after.requires_grad_(trains)

    def forward(self, x):
        return self.after(x + self.second(torch.tanh(self.first(self.norm(x)))))


class Quantized(nn.Module):
    """Blocks of frozen packed layers with adapters, and one block without adapters."""

    def __init__(self, make=Packed4Linear, width=16, wide=24):
        super().__init__()
        self.blocks = nn.ModuleList(Block(make, width, wide, trains=index != 1) for index in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step, width=16):
    return torch.randn(5, width, generator=torch.Generator().manual_seed(step))


def shard(model, engine, **options):
    for block in model.blocks:
        engine(block, **options)
    engine(model, **options)


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)
