"""What arrives of weights and gradients that travel in fewer bits, computed without any rank but one."""

from __future__ import annotations

import torch

from composable_shard._comm.rounding import Rounding, dequantise, noise_like, quantise, rounded, to_bf16
from composable_shard._plan.parcel import block_of, parcel
from composable_shard._policies import Wire
from composable_shard._torch.ragged import rows_of_chunk


def round_weights(model, wire, dtype=None):
    """Have a model compute with what a gather gives."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(rounded(param, wire, dtype=dtype))


def by_piece(gradient, world, rows=1):
    """A gradient as (world, rows, elements of a row), with zeros behind the last rows; cut at multiples of `rows`."""
    flat = gradient.reshape(gradient.shape[0], -1)
    chunk = rows_of_chunk(flat.shape[0], world, rows)
    padded = flat.new_zeros(world * chunk, flat.shape[1])
    padded[: flat.shape[0]] = flat
    return padded.view(world, chunk, flat.shape[1])


def arrived(pieces, wire, noise):
    """What pieces, (world, rows, row), stand for when they arrive."""
    world, rows, row = pieces.shape
    sent = parcel([(rows, row)], pieces.element_size(), wire)
    if sent is None:
        return pieces.clone()
    out = torch.empty_like(pieces)
    if wire.form == "bf16":
        made = torch.empty(pieces.shape, dtype=torch.bfloat16)
        to_bf16(made, pieces, None if noise is None else noise.view(pieces.shape))
        return out.copy_(made)
    blocks = pieces.reshape(world, -1, block_of(row, wire.block))
    codes = torch.empty(blocks.shape, dtype=torch.uint8)
    scales = torch.empty(*blocks.shape[:-1], 1)
    quantise(codes, scales, blocks, wire.form, noise)
    dequantise(out.view(blocks.shape), codes, scales, wire.form)
    return out


class Ranks:
    """Ranks that round gradients and add up what arrives, in their order.

    Args:
        names: of the parameters of each group.
        wire: what gradients travel as.
        world: ranks.
        feedback: whether they feed back what rounding leaves.
        rows: of which the cuts are multiples.
    """

    def __init__(self, names: list[list[str]], wire: Wire, world: int, feedback: bool = False, rows: int = 1) -> None:
        self.names, self.wire, self.world, self.rows = names, wire, world, rows
        self.feedback = feedback
        self.number = 0
        self.left = {}

    def mean(self, gradients):
        """The mean of all ranks' gradients, by name; `gradients` are those of each rank, by name."""
        sums = {}
        for group in self.names:
            for rank, own in enumerate(gradients):
                rounding = Rounding()
                rounding.put(self.number, {})
                generator = rounding.seeded(group[0], rank, torch.device("cpu"))
                for name in group:
                    pieces = by_piece(own[name], self.world, self.rows)
                    got = self._arrived(rank, name, pieces, generator)
                    sums[name] = got if rank == 0 else sums[name] + got
        self.number += 1
        return {name: self._whole(total, gradients[0][name]) / self.world for name, total in sums.items()}

    def _arrived(self, rank, name, pieces, generator):
        if self.feedback:
            pieces = pieces + self.left.get((rank, name), 0)
            got = arrived(pieces, self.wire, None)
            self.left[rank, name] = pieces - got
            return got
        if parcel([pieces.shape[1:]], 4, self.wire) is None:
            return pieces
        blocks = pieces
        if self.wire.form != "bf16":
            blocks = pieces.reshape(self.world, -1, block_of(pieces.shape[2], self.wire.block))
        return arrived(pieces, self.wire, noise_like(blocks, generator))

    @staticmethod
    def _whole(pieces, like):
        return pieces.flatten(0, 1)[: like.shape[0]].view(like.shape)
