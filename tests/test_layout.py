"""Where parameters lie in a bucket: pieces tile them, as `torch.chunk` cuts them, aligned and apart."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_shard._layout import SHARD_ALIGNMENT_BYTES, bucket_layout

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
WORLDS = st.integers(1, 9)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])
LAYOUTS = st.builds(bucket_layout, st.lists(SHAPES, min_size=1, max_size=5), WORLDS, ITEMSIZES)

steadily = settings(deadline=None, derandomize=True)


def chunks(tensor: torch.Tensor, world: int) -> list[torch.Tensor]:
    """`torch.chunk` gives fewer pieces than asked where rows run out; the ranks behind hold empty ones."""
    found = list(torch.chunk(tensor, world, dim=0))
    return found + [tensor[:0]] * (world - len(found))


@steadily
@given(LAYOUTS)
def test_the_pieces_of_all_ranks_tile_each_parameter_exactly(layout):
    for param in layout.params:
        assert sum(param.rows_of(rank) for rank in range(layout.world)) == param.shape[0]
        assert param.numel == math.prod(param.shape)
        assert param.piece * layout.world >= param.numel


@steadily
@given(SHAPES, WORLDS)
def test_local_shapes_are_those_of_torch_chunk(shape, world):
    param = bucket_layout([shape], world, 4).params[0]
    want = [tuple(piece.shape) for piece in chunks(torch.empty(shape), world)]
    assert [param.local_shape(rank) for rank in range(world)] == want


@steadily
@given(LAYOUTS)
def test_a_full_gathered_bucket_holds_every_parameter_in_row_order(layout):
    bucket = torch.full((layout.world, layout.numel), -1)
    whole = [torch.arange(p.numel).view(p.shape) for p in layout.params]
    for param, tensor in zip(layout.params, whole, strict=True):
        for rank, piece in enumerate(chunks(tensor, layout.world)):
            end = param.offset + piece.numel()
            assert bool((bucket[rank, param.offset : end] == -1).all()), "two pieces overlap"
            bucket[rank, param.offset : end] = piece.reshape(-1)
    for param, tensor in zip(layout.params, whole, strict=True):
        found = bucket[:, param.offset : param.offset + param.piece].reshape(-1)[: param.numel]
        assert torch.equal(found.view(param.shape), tensor)


@steadily
@given(st.lists(SHAPES, min_size=1, max_size=5), WORLDS, ITEMSIZES)
def test_offsets_are_aligned_to_16_bytes_and_padded_pieces_are_disjoint(shapes, world, itemsize):
    layout = bucket_layout(shapes, world, itemsize)
    end = 0
    for param in layout.params:
        assert param.offset * itemsize % SHARD_ALIGNMENT_BYTES == 0
        assert 0 <= (param.offset - end) * itemsize < SHARD_ALIGNMENT_BYTES
        end = param.offset + param.piece
    assert layout.numel == end
    assert layout.total == world * end


@steadily
@given(SHAPES, WORLDS, ITEMSIZES)
def test_a_single_parameter_lies_without_padding_between_ranks_and_is_not_copied_apart(shape, world, itemsize):
    layout = bucket_layout([shape], world, itemsize)
    (param,) = layout.params
    assert param.offset == 0
    assert layout.numel == param.piece  # so the ranks' pieces follow each other, and padding falls at the end
    assert not layout.packs


@steadily
@given(LAYOUTS)
def test_a_bucket_is_copied_apart_only_if_ranks_interleave_parameters(layout):
    assert layout.packs == (layout.world > 1 and len(layout.params) > 1)


@steadily
@given(SHAPES, WORLDS)
def test_full_pieces_and_the_rest_add_up_to_the_parameter(shape, world):
    param = bucket_layout([shape], world, 4).params[0]
    sizes = [param.rows_of(rank) * param.row for rank in range(world)]
    assert param.even == (shape[0] % world == 0)
    if param.chunk:
        assert param.full_pieces == sum(param.rows_of(rank) == param.chunk for rank in range(world))
        assert param.rest == sum(sizes[param.full_pieces :])
        assert all(size == 0 for size in sizes[param.full_pieces + 1 :])
    else:
        assert param.rest == 0


def test_a_parameter_of_zero_rows_takes_no_room():
    layout = bucket_layout([(0, 3), (4,), (0,)], 2, 4)
    assert [p.piece for p in layout.params] == [0, 2, 0]
    assert [p.offset for p in layout.params] == [0, 0, 4]
    assert layout.params[0].local_shape(1) == (0, 3)
    assert layout.params[0].even
    assert layout.params[0].rest == 0


def test_a_parameter_with_fewer_rows_than_ranks_leaves_the_last_ones_empty():
    (param,) = bucket_layout([(2, 5)], 4, 4).params
    assert [param.local_shape(rank) for rank in range(4)] == [(1, 5), (1, 5), (0, 5), (0, 5)]
    assert not param.even
    assert param.full_pieces == 2
    assert param.rest == 0
