"""Bucket layouts: pieces cover each parameter like `torch.chunk`, and are aligned and disjoint."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_shard._plan.layout import SHARD_ALIGNMENT_BYTES, Route, bucket_layout, gather_layout, reduce_layout

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
WORLDS = st.integers(1, 9)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])
LAYOUTS = st.builds(bucket_layout, st.lists(SHAPES, min_size=1, max_size=5), WORLDS, ITEMSIZES)

steadily = settings(deadline=None, derandomize=True)


def chunks(tensor: torch.Tensor, world: int) -> list[torch.Tensor]:
    """`torch.chunk`, with empty pieces for the last ranks if there are not enough rows."""
    found = list(torch.chunk(tensor, world, dim=0))
    return found + [tensor[:0]] * (world - len(found))


@steadily
@given(LAYOUTS)
def test_pieces_of_all_ranks_cover_each_parameter_exactly_once(layout):
    for param in layout.params:
        assert sum(param.rows_of(rank) for rank in range(layout.world)) == param.shape[0]
        assert param.numel == math.prod(param.shape)
        assert param.piece * layout.world >= param.numel


@steadily
@given(SHAPES, WORLDS)
def test_local_shapes_match_torch_chunk(shape, world):
    param = bucket_layout([shape], world, 4).params[0]
    want = [tuple(piece.shape) for piece in chunks(torch.empty(shape), world)]
    assert [param.local_shape(rank) for rank in range(world)] == want


@steadily
@given(LAYOUTS)
def test_a_gathered_bucket_contains_every_parameter_in_row_order(layout):
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
def test_a_single_parameter_has_no_padding_between_ranks_and_is_not_copied(shape, world, itemsize):
    layout = bucket_layout([shape], world, itemsize)
    (param,) = layout.params
    assert param.offset == 0
    assert layout.numel == param.piece  # pieces of all ranks are contiguous, and padding is at the end
    for route in (None, Route("packed")):
        assert gather_layout([shape], world, itemsize, [0], route).landing is None


@steadily
@given(LAYOUTS)
def test_a_packed_gather_needs_a_copy_only_if_ranks_interleave_parameters(layout):
    shapes, dims = [param.shape for param in layout.params], [0] * len(layout.params)
    found = gather_layout(shapes, layout.world, 4, dims, Route("packed"))
    assert (found.landing is not None) == (len(shapes) > 1)


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


def test_a_parameter_with_zero_rows_takes_no_space():
    layout = bucket_layout([(0, 3), (4,), (0,)], 2, 4)
    assert [p.piece for p in layout.params] == [0, 2, 0]
    assert [p.offset for p in layout.params] == [0, 0, 4]
    assert layout.params[0].local_shape(1) == (0, 3)
    assert layout.params[0].even
    assert layout.params[0].rest == 0


def test_the_last_ranks_have_empty_pieces_if_there_are_fewer_rows_than_ranks():
    (param,) = bucket_layout([(2, 5)], 4, 4).params
    assert [param.local_shape(rank) for rank in range(4)] == [(1, 5), (1, 5), (0, 5), (0, 5)]
    assert not param.even
    assert param.full_pieces == 2
    assert param.rest == 0


LEAST = st.one_of(st.none(), st.integers(0, 40))
ROUTES = st.builds(Route, st.just("any"), gather_from=LEAST, sums=st.booleans())


@st.composite
def cut_shapes(draw):
    """Shapes, the number of ranks, and the sharded dim of each shape: 0, or another dim that divides evenly."""
    world, shapes, dims = draw(WORLDS), draw(st.lists(SHAPES.filter(len), min_size=1, max_size=5)), []
    for shape in shapes:
        even = [dim for dim in range(1, len(shape)) if shape[dim] % world == 0]
        dims.append(draw(st.sampled_from([0, *even])))
    return shapes, world, dims


@steadily
@given(cut_shapes(), ITEMSIZES, st.one_of(st.none(), ROUTES))
def test_each_parameter_is_gathered_once_and_alone_only_if_its_pieces_are_contiguous(case, itemsize, route):
    shapes, world, dims = case
    layout = gather_layout(shapes, world, itemsize, dims, route)
    assert sorted([*layout.alone, *layout.packed]) == list(range(len(shapes)))
    for index in layout.alone:
        param = layout.places.params[index]
        assert param.dim == 0
        if len(shapes) > 1 and route is not None and layout.packed:
            assert param.piece * itemsize >= route.gather_from
    assert (layout.landing is None) == (route is None or not layout.packed)
    if layout.landing is not None:
        assert layout.landing_bytes == layout.landing.total * itemsize
        assert [p.shape for p in layout.landing.params] == [tuple(shapes[i]) for i in layout.packed]


@steadily
@given(cut_shapes(), ITEMSIZES, ROUTES)
def test_a_reduction_bucket_fits_into_the_slot_of_its_gather(case, itemsize, route):
    shapes, world, dims = case
    gather = gather_layout(shapes, world, itemsize, dims, route)
    bare = reduce_layout(shapes, world, itemsize, dims, route)
    assert bare.nbytes <= gather.nbytes
    shared = reduce_layout(shapes, world, itemsize, dims, route, [gather.nbytes])
    assert shared.nbytes == (gather.nbytes if gather.nbytes <= bare.nbytes * 9 // 8 else bare.nbytes)


@steadily
@given(cut_shapes(), ITEMSIZES, ROUTES)
def test_reduction_layout_contains_all_pieces_and_marks_in_the_same_order_on_all_routes(case, itemsize, route):
    shapes, world, dims = case
    layout = reduce_layout(shapes, world, itemsize, dims, route)
    ends = 0
    for shape, param in zip(shapes, layout.result.params, strict=True):
        assert param.shape == tuple(shape)
        assert param.offset == ends
        ends += param.piece
    assert 0 <= layout.marks - len(shapes) < max(1, SHARD_ALIGNMENT_BYTES // itemsize)
    assert layout.numel == ends + layout.marks
    assert layout.numel * itemsize % min(SHARD_ALIGNMENT_BYTES, itemsize * 16) == 0
    assert layout.nbytes == world * layout.numel * itemsize
    assert layout.scratch == (world * layout.numel if route.sums else 0)
