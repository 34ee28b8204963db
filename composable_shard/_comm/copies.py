"""The copies before and after collectives: shards into a bucket, a gathered bucket into parameters, and gradients.

Views are made once per slot. Every step, eager or compiled, repeats the copies between these views.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import torch

from .._plan.layout import BucketLayout, GatherLayout, ParamLayout, ReduceLayout
from .._torch.core import chunk_cat, plainly
from .collectives import Transport
from .lanes import Steps
from .rounding import Numbers

Gradients = Sequence[torch.Tensor | None]


def by_rank(whole: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """View an unsharded parameter that divides evenly as (world, *local shape)."""
    before, after = layout.shape[: layout.dim], layout.shape[layout.dim + 1 :]
    return whole.reshape(*before, layout.world, layout.chunk, *after).movedim(layout.dim, 0)


def paired(pieces: torch.Tensor, whole: torch.Tensor, layout: ParamLayout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair views of all ranks' pieces, (world, piece), with views of the whole: the full pieces, then a shorter one."""
    if layout.dim > 0:
        return [(pieces.view(layout.world, *layout.local_shape(0)), by_rank(whole, layout))]
    if layout.even:
        return [(pieces, whole.reshape(pieces.shape))]
    flat, full = whole.reshape(-1), layout.full_pieces
    pairs = [(pieces[:full], flat[: full * layout.piece].view(full, layout.piece))]
    if layout.rest:
        pairs.append((pieces[full, : layout.rest], flat[full * layout.piece :]))
    return pairs


def own_rows(whole: torch.Tensor, layout: ParamLayout, rank: int) -> torch.Tensor:
    """Return a rank's piece of an unsharded parameter, as a view."""
    first = min(rank * layout.chunk, layout.shape[layout.dim])
    return whole.narrow(layout.dim, first, layout.rows_of(rank))


def own_piece(row: torch.Tensor, layout: ParamLayout, rank: int) -> torch.Tensor:
    """Return a rank's piece of a parameter, without padding; the flat `row` begins where the piece begins."""
    return row[: layout.rows_of(rank) * layout.row].view(layout.local_shape(rank))


def own_pieces(chunk: torch.Tensor, layout: BucketLayout, rank: int) -> list[torch.Tensor]:
    """Return a rank's pieces of all parameters of a bucket, without padding, as views of the rank's `chunk`."""
    return [own_piece(chunk[at.offset :], at, rank) for at in layout.params]


def regions_in(flat: torch.Tensor, layout: BucketLayout, begins: Sequence[int]) -> list[torch.Tensor]:
    """Return the memory in `flat` for all ranks' pieces of each parameter, starting at its entry of `begins`."""
    return [flat.narrow(0, begin, layout.world * at.piece) for begin, at in zip(begins, layout.params, strict=True)]


class Wholes(NamedTuple):
    """Views of the memory of unsharded parameters, as a gather fills it.

    Attributes:
        regions: memory of each parameter that is gathered alone, (world * piece,).
        sent: for each of `regions`, this rank's part of it if the piece is copied there before it is sent; None if the
            shard itself is sent.
        own: destinations of these copies, without padding.
        packed: memory of each parameter that shares a buffer, by rank: (world, piece), or (world, *local shape) if it
            is sharded along a dim other than 0.
    """

    regions: list[torch.Tensor]
    sent: list[torch.Tensor | None]
    own: list[torch.Tensor]
    packed: list[torch.Tensor]


class Landing(NamedTuple):
    """Views of the buffer that parameters share.

    Attributes:
        flat, chunks: the whole buffer, as (world * n,) and as (world, n).
        chunk, own: this rank's chunk of it, and its pieces.
        pieces: the pieces of all ranks, in the shapes of `Wholes.packed`.
        numbers: used instead of `pieces` if parameters are sent in fewer bits: for each parameter, the quantized
            values of all ranks.
    """

    flat: torch.Tensor
    chunks: torch.Tensor
    chunk: torch.Tensor
    own: list[torch.Tensor]
    pieces: list[torch.Tensor]
    numbers: Sequence[Numbers] = ()


class Split:
    """Copies all ranks' pieces out of a buffer by one operator: on an accelerator, one kernel instead of one per piece.

    Args:
        layout: the layout of the parameters in the buffer, all sharded along dim 0.
        like: a tensor of the buffer's dtype and device.
    """

    __slots__ = ("_gaps", "_sizes")

    def __init__(self, layout: BucketLayout, like: torch.Tensor) -> None:
        self._sizes: list[int] = []
        # The operator copies the gaps between parameters, too. Their memory is allocated here, long before a lane
        # writes to it, so the lane does not have to wait for earlier uses of that memory.
        self._gaps: list[torch.Tensor | None] = []
        end = 0
        for at in layout.params:
            if at.offset > end:
                self._sizes.append(at.offset - end)
                self._gaps.append(like.new_empty(layout.world, at.offset - end))
            self._sizes.append(at.piece)
            self._gaps.append(None)
            end = at.offset + at.piece

    def copy(self, chunks: torch.Tensor, packed: Sequence[torch.Tensor]) -> None:
        """Copy a buffer, (world, n), to the memory of the parameters, (world, piece) each."""
        places = iter(packed)
        outs = [next(places) if gap is None else gap for gap in self._gaps]
        torch.split_with_sizes_copy(chunks, self._sizes, dim=1, out=outs)


def _split_for(layout: BucketLayout | None, like: torch.Tensor | None, streams: bool) -> Split | None:
    if layout is None or like is None or not streams or not all(at.dim == 0 and at.piece for at in layout.params):
        return None
    return Split(layout, like)


class GatherCopies:
    """The gather of a bucket: some parameters straight into their memory, the others through a landing buffer.

    Args:
        layout: tells which parameters are gathered alone.
        rank: this rank's index among those that gather.
        transport: runs the collective; None if there is only one rank.
        converted: indices of shards that cannot be sent as they are: offloaded, of another dtype, or not contiguous.
        non_blocking: whether copies of shards from the CPU do not block the host.
        like: a tensor of the buffer's dtype and device.
        streams: whether that device is an accelerator.

    Attributes:
        layout, transport: as given.
        is_straight: whether all shards are sent as they are, straight into their memory, without any copy.
    """

    def __init__(
        self,
        layout: GatherLayout,
        rank: int,
        transport: Transport | None,
        converted: Container[int] = (),
        non_blocking: bool = False,
        like: torch.Tensor | None = None,
        streams: bool = False,
    ) -> None:
        self.layout, self.transport = layout, transport
        self._split = _split_for(layout.landing, like, streams)
        self._rank, self._non_blocking = rank, non_blocking
        params = layout.places.params
        short = [i for i, at in enumerate(params) if i in converted or at.rows_of(rank) < at.chunk]
        self._copied = list(range(len(params))) if transport is None else [i for i in layout.alone if i in short]
        self.is_straight = bool(layout.alone) and not self._copied and not layout.packed

    def into(self, regions: Sequence[torch.Tensor]) -> Wholes:
        """Make the views for a gather into the memory of the parameters, at least (world * piece,) each."""
        params, world = self.layout.places.params, self.layout.places.world
        with plainly():
            rows = {i: regions[i].view(world, params[i].piece)[self._rank] for i in self._copied}
            packed = [
                by_rank(regions[i][: params[i].numel].view(params[i].shape), params[i])
                if params[i].dim
                else regions[i].view(world, params[i].piece)
                for i in self.layout.packed
            ]
            alone = self.layout.alone
            own = [own_piece(row, params[i], self._rank) for i, row in rows.items()]
            return Wholes([regions[i] for i in alone], [rows.get(i) for i in alone], own, packed)

    def landing(self, buffer: torch.Tensor) -> Landing:
        """Make the views of a landing buffer."""
        layout = self.layout.landing
        assert layout is not None
        with plainly():
            flat = buffer[: layout.total]
            chunks = flat.view(layout.world, layout.numel)
            rows = [(at, chunks[:, at.offset : at.offset + at.piece]) for at in layout.params]
            pieces = [row.view(layout.world, *at.local_shape(self._rank)) if at.dim else row for at, row in rows]
            own = own_pieces(chunks[self._rank], layout, self._rank)
            return Landing(flat, chunks, chunks[self._rank], own, pieces)

    def steps(self, wholes: Wholes, landing: Landing | None, shards: Sequence[torch.Tensor]) -> Steps[None]:
        """Gather; `landing` is None if no parameters share a buffer, or if there is only one rank."""
        if wholes.own:
            torch._foreach_copy_(wholes.own, [shards[i] for i in self._copied], non_blocking=self._non_blocking)
        if self.transport is None or not shards:
            return
        sent = [shards[i] if own is None else own for i, own in zip(self.layout.alone, wholes.sent, strict=True)]
        if landing is None:
            yield self.transport.all_gather(wholes.regions, sent)
            return
        torch._foreach_copy_(landing.own, [shards[i] for i in self.layout.packed], non_blocking=self._non_blocking)
        yield self.transport.all_gather([*wholes.regions, landing.flat], [*sent, landing.chunk])
        if self._split is not None:
            self._split.copy(landing.chunks, wholes.packed)
        else:
            torch._foreach_copy_(wholes.packed, landing.pieces)


def copy_gradients(chunks: torch.Tensor, gradients: Gradients, layout: BucketLayout) -> None:
    """Fill a bucket, (world, chunk), with each gradient's pieces and its mark: 1 if this rank has it, else 0."""
    marks = chunks[:, layout.numel :].fill_(1)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index, (gradient, at) in enumerate(zip(gradients, layout.params, strict=True)):
        pieces = chunks[:, at.offset : at.offset + at.piece]
        if gradient is None:
            marks[:, index].zero_()
            pieces.zero_()
        else:
            pairs += paired(pieces, gradient, at)
    if pairs:
        torch._foreach_copy_([piece for piece, _ in pairs], [gradient for _, gradient in pairs])


class Parts(NamedTuple):
    """The result of a reduction, cut into pieces.

    Attributes:
        pieces: this rank's piece of each gradient, in the dtype of `.grad`.
        used: the reduced marks on the device, one per gradient: positive if any rank had that gradient.
    """

    pieces: list[torch.Tensor]
    used: torch.Tensor


class GradientCopies:
    """A bucket of gradients of one dtype: copies gradients in, and splits the result into this rank's pieces.

    Args:
        chunk: the layout of the gradients in a chunk and of the marks behind them.
        dtype: the dtype of the bucket.
        kept: for each parameter, the dtype of `.grad`.
        rank, device: this rank's.
        streams: whether the device is an accelerator, on which the same operator can also convert gradients from
            bfloat16 to float32.

    Attributes:
        ones: the marks of a rank that has all gradients.
        numel: elements of a result before its marks.
    """

    def __init__(
        self,
        chunk: ReduceLayout,
        dtype: torch.dtype,
        kept: Sequence[torch.dtype],
        rank: int,
        device: torch.device,
        streams: bool = False,
    ) -> None:
        self._layout = layout = chunk.result
        self._kept = kept
        self.numel = layout.numel
        self.ones = torch.ones(layout.world * chunk.marks, dtype=dtype, device=device)
        even = all(at.even and at.piece and at.dim == 0 for at in layout.params)
        fused = [dtype] if even else []
        if even and streams and dtype == torch.float32:
            fused.append(torch.bfloat16)
        # Dtypes of gradients that one operator can copy together, with the marks in the same dtype.
        self._fused = [([each] * len(kept), self.ones.to(each)) for each in fused]
        # The result is split into this rank's piece of each parameter and the padding behind it, if any.
        self._sizes: list[int] = []
        self._own: list[int] = []  # indices of the pieces in `_sizes`
        for at in layout.params:
            own = at.rows_of(rank) * at.row
            self._own.append(len(self._sizes))
            self._sizes += [own, at.piece - own] if own < at.piece else [own]
        self._used = len(self._sizes)  # index of the marks in `_sizes`
        self._sizes += [size for size in (len(kept), chunk.marks - len(kept)) if size]
        # Meta tensors of the shapes that are not flat: `view_as` takes a third of the host time of `view`.
        shapes = {index: at.local_shape(rank) for index, at in enumerate(layout.params) if len(at.shape) != 1}
        with plainly():
            of_shape = {shape: torch.empty(shape, device="meta") for shape in {*shapes.values()}}
        self._shaped = {index: of_shape[shape] for index, shape in shapes.items()}

    def fill(self, chunks: torch.Tensor, gradients: Gradients) -> None:
        """Fill a bucket as `copy_gradients` does, by one operator where possible."""
        dtypes = list(map(getattr, gradients, repeat("dtype"), repeat(None)))
        for fused, ones in self._fused:
            if dtypes == fused:
                chunk_cat([*gradients, ones], 0, self._layout.world, out=chunks)
                return
        copy_gradients(chunks, gradients, self._layout)

    def fill_again(self, chunks: torch.Tensor, pieces: Sequence[torch.Tensor], used: torch.Tensor) -> None:
        """Fill a bucket with the pieces of an earlier reduction, and with their reduced marks."""
        copy_gradients(chunks, pieces, self._layout)
        chunks.narrow(1, self._layout.numel, len(used)).copy_(used.expand(self._layout.world, -1))

    def marks_on_host(self, out: torch.Tensor) -> torch.Tensor:
        """Copy the marks of a result to the host on the current stream; the host does not wait."""
        marks = out.narrow(0, self._layout.numel, len(self._kept))
        at_home = torch.empty(marks.shape, dtype=marks.dtype, pin_memory=out.device.type == "cuda")
        return at_home.copy_(marks, non_blocking=True)

    def cut(self, out: torch.Tensor, others: Mapping[torch.dtype, torch.Tensor]) -> Parts:
        """Split a result; `others` has it converted to other dtypes of `.grad`."""
        parts = list(torch.unsafe_split_with_sizes(out, self._sizes))  # the cheapest form of `split`
        used = parts[self._used]
        pieces = parts[: self._used] if len(self._own) == self._used else [parts[place] for place in self._own]
        for dtype, converted in others.items():
            parts = list(torch.unsafe_split_with_sizes(converted, self._sizes))
            choices = zip(pieces, self._own, self._kept, strict=True)
            pieces = [parts[place] if kept is dtype else piece for piece, place, kept in choices]
        for index, shaped in self._shaped.items():
            pieces[index] = pieces[index].view_as(shaped)
        return Parts(pieces, used)
