"""The copies around a graph's collectives: shards into a bucket, a gathered bucket into parameters, gradients likewise.

Each is one operator of a graph, however many parameters it moves: opaque to a compiler, which would else trace and
compile a copy for each parameter, and might fuse those of several groups so that all lie in memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._plan.layout import BucketLayout, ParamLayout


def by_rank(whole: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """An unsharded parameter that divides evenly, as (world, *local shape)."""
    before, after = layout.shape[: layout.dim], layout.shape[layout.dim + 1 :]
    return whole.reshape(*before, layout.world, layout.chunk, *after).movedim(layout.dim, 0)


def paired(pieces: torch.Tensor, whole: torch.Tensor, layout: ParamLayout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views that cover the pieces of all ranks, (world, piece), and the whole: full ones, then a shorter."""
    if layout.dim > 0:
        return [(pieces.view(layout.world, *layout.local_shape(0)), by_rank(whole, layout))]
    if layout.even:
        return [(pieces, whole.reshape(pieces.shape))]
    flat, full = whole.reshape(-1), layout.full_pieces
    pairs = [(pieces[:full], flat[: full * layout.piece].view(full, layout.piece))]
    if layout.rest:
        pairs.append((pieces[full, : layout.rest], flat[full * layout.piece :]))
    return pairs


Gradients = Sequence[torch.Tensor | None]


def pack(shards: Sequence[torch.Tensor], layout: BucketLayout, dtype: torch.dtype) -> torch.Tensor:
    """This rank's pieces, padded and cast, as its chunk of a bucket: (numel,)."""
    even = all(param.even for param in layout.params)
    chunk = (shards[0].new_empty if even else shards[0].new_zeros)(layout.numel, dtype=dtype)
    places = [
        chunk[at.offset : at.offset + shard.numel()].view(shard.shape)
        for shard, at in zip(shards, layout.params, strict=True)
    ]
    torch._foreach_copy_(places, list(shards))
    return chunk


def unpack(bucket: torch.Tensor, layout: BucketLayout) -> list[torch.Tensor]:
    """The parameters of a gathered bucket, (world * numel,), each in memory of its own."""
    wholes = room_for_wholes(bucket, layout)
    chunks = bucket.view(layout.world, layout.numel)
    pairs = [
        pair
        for whole, at in zip(wholes, layout.params, strict=True)
        for pair in paired(chunks[:, at.offset : at.offset + at.piece], whole, at)
    ]
    torch._foreach_copy_([whole for _, whole in pairs], [piece for piece, _ in pairs])
    return wholes


def room_for_wholes(like: torch.Tensor, layout: BucketLayout) -> list[torch.Tensor]:
    """Tensors for the parameters."""
    return [like.new_empty(at.shape) for at in layout.params]


def pack_gradients(
    gradients: Gradients, used: Gradients, like: torch.Tensor, layout: BucketLayout, dtype: torch.dtype
) -> torch.Tensor:
    """Gradients as a bucket with one more element a parameter, which says whether this rank had one; zeros for None.

    Args:
        gradients: the unsharded ones.
        used: 1 or 0, where only the running graph knows whether there is a gradient.
        like: a tensor on their device.
        layout: of the gradients; a chunk has ``numel + len(params)`` elements.
        dtype: of the bucket.

    Returns:
        (world, numel + len(params)).
    """
    whole = all(at.even for at in layout.params) and all(g is not None for g in gradients)
    bucket = room_for_bucket(like, layout, dtype)
    if not whole:
        bucket.zero_()
    pairs = []
    for place, (gradient, mark, at) in enumerate(zip(gradients, used, layout.params, strict=True)):
        if gradient is not None:
            pairs += paired(bucket[:, at.offset : at.offset + at.piece], gradient, at)
        column = bucket[:, layout.numel + place]
        _ = column.copy_(mark.expand(layout.world)) if mark is not None else column.fill_(gradient is not None)
    for piece, gradient in pairs:
        piece.copy_(gradient)
    return bucket


def room_for_bucket(like: torch.Tensor, layout: BucketLayout, dtype: torch.dtype) -> torch.Tensor:
    """A tensor for gradients and their marks."""
    return like.new_empty((layout.world, layout.numel + len(layout.params)), dtype=dtype)


def unpack_pieces(
    chunk: torch.Tensor, layout: BucketLayout, rank: int, dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """This rank's pieces of reduced gradients in `dtypes`, without their padding; last the marks, (len(params),)."""
    out = room_for_pieces(chunk, layout, rank, dtypes)
    for piece, at in zip(out, layout.params, strict=False):
        full = (*at.shape[: at.dim], at.chunk, *at.shape[at.dim + 1 :])
        padded = chunk[at.offset : at.offset + at.piece].view(full)
        piece.copy_(padded.narrow(at.dim, 0, piece.shape[at.dim]))
    out[-1].copy_(chunk[layout.numel :])
    return out


def room_for_pieces(
    like: torch.Tensor, layout: BucketLayout, rank: int, dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """Tensors for the pieces and the marks."""
    shapes = [at.local_shape(rank) for at in layout.params]
    pieces = [like.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return [*pieces, like.new_empty(len(shapes))]
