"""Boxes: compared with masks of small arrays, and shardings with chunks that torch cuts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from composable_shard._plan.boxes import (
    Box,
    Sharding,
    Split,
    batches,
    chunks_of,
    fill_once,
    overlaps,
    uncovered,
    whole_box,
)

sizes = st.integers(0, 7)

steadily = settings(deadline=None, derandomize=True, max_examples=60)


def mask(shape, box):
    marked = torch.zeros(shape, dtype=torch.int32)
    marked[box.slices(whole_box(shape))] = 1
    return marked


@st.composite
def boxes_in(draw, shape):
    begins = [draw(st.integers(0, size)) for size in shape]
    return Box(
        tuple(begins), tuple(draw(st.integers(0, size - begin)) for begin, size in zip(begins, shape, strict=True))
    )


@st.composite
def some_boxes(draw, most=4, dims=3):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=dims)))
    return shape, draw(st.lists(boxes_in(shape), min_size=1, max_size=most))


@steadily
@given(some_boxes())
def test_arithmetic_agrees_with_masks(case):
    shape, boxes = case
    one, other = boxes[0], boxes[-1]
    common = one.common(other)
    both = mask(shape, one) * mask(shape, other)
    assert torch.equal(both, torch.zeros_like(both) if common is None else mask(shape, common))
    if common is not None:
        assert one.contains(common)
        assert other.contains(common)
        local = torch.arange(math.prod(shape)).view(shape)[one.slices(whole_box(shape))]
        whole = torch.arange(math.prod(shape)).view(shape)
        assert torch.equal(local[common.slices(one)], whole[common.slices(whole_box(shape))])
        first, end = common.span(one)
        places = torch.arange(one.numel).view(one.shape)[common.slices(one)]
        assert (places.min(), places.max() + 1) == (first, end)


@steadily
@given(some_boxes())
def test_coverage_agrees_with_masks(case):
    shape, boxes = case
    count = sum(mask(shape, box) for box in boxes)
    assert fill_once(shape, boxes) == bool((count == 1).all())
    rest = sum((mask(shape, box) for box in uncovered(whole_box(shape), boxes)), torch.zeros(shape, dtype=torch.int32))
    assert torch.equal(rest, (count == 0).int())
    twice = sum((mask(shape, box) for box in overlaps(boxes)), torch.zeros(shape, dtype=torch.int32))
    assert torch.equal(twice, count * (count - 1) // 2)


def test_many_pieces_are_compared_only_with_their_neighbours():
    rows = chunks_of(whole_box((100_000, 3)), 100_000)
    assert fill_once((100_000, 3), rows)  # with all pairs it would take hours
    assert not fill_once((100_000, 3), [*rows[:-1], rows[0]])


@steadily
@given(some_boxes(most=1), st.integers(1, 20))
def test_blocks_are_consecutive_and_small(case, most):
    shape, [box] = case
    whole = torch.arange(math.prod(shape)).view(shape)
    parts = list(box.blocks(most))
    assert all(part.numel <= most for part in parts)
    together = torch.cat([whole[part.slices(whole_box(shape))].flatten() for part in parts])
    assert torch.equal(together, whole[box.slices(whole_box(shape))].flatten())


@steadily
@given(st.lists(st.integers(0, 9)), st.integers(1, 12))
def test_batches_are_full_but_no_larger(items, most):
    grouped = list(batches(items, lambda item: item, most))
    assert list(itertools.chain(*grouped)) == items
    assert all(sum(batch) <= most or len(batch) == 1 for batch in grouped)
    assert all(sum(one) + other[0] > most for one, other in itertools.pairwise(grouped))


@steadily
@given(sizes, st.integers(1, 5))
def test_chunks_are_those_of_torch(size, count):
    found = [box.shape[1] for box in chunks_of(whole_box((2, size)), count, 1)]
    wanted = [chunk.shape[1] for chunk in torch.empty(2, size).chunk(count, 1)] if size else []
    assert found == wanted + [0] * (count - len(wanted))


def test_chunks_begin_at_multiples_of_rows():
    boxes = chunks_of(whole_box((11, 2)), 3, rows=3)
    assert boxes == (Box((0, 0), (6, 2)), Box((6, 0), (5, 2)), Box((11, 0), (0, 2)))


@st.composite
def orders(draw):
    """A mesh, the dim that each axis splits (None: none), and the order in which the axes split."""
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dims = [draw(st.sampled_from([None, 0, 1])) for _ in mesh]
    return mesh, dims, draw(st.permutations([axis for axis, dim in enumerate(dims) if dim is not None]))


@settings(steadily, max_examples=300)
@given(orders(), sizes, sizes)
def test_axes_split_in_the_order_that_their_factors_mean(case, rows, columns):
    mesh, dims, order = case
    factors = {
        axis: math.prod(mesh[b] for b in order[: order.index(axis)] if b > axis and dims[b] == dims[axis])
        for axis in order
    }
    splits = tuple(None if dim is None else Split(dim, factor=factors[axis]) for axis, dim in enumerate(dims))
    sharding = Sharding(tuple(mesh), tuple(range(math.prod(mesh))), splits)
    whole = torch.arange(rows * columns).view(rows, columns)
    for index, coordinate in enumerate(itertools.product(*map(range, mesh))):
        assert sharding.coordinate_of(index) == coordinate
        local = whole
        for axis in order:
            parts = local.chunk(mesh[axis], dims[axis])
            empty = local.narrow(dims[axis], 0, 0)
            local = parts[coordinate[axis]] if coordinate[axis] < len(parts) else empty
        [(box, at)] = sharding.regions_at(whole.shape, coordinate)
        assert at == (0, 0)
        assert torch.equal(whole[box.slices(whole_box(whole.shape))], local)


@steadily
@given(st.integers(1, 4), st.integers(2, 3), sizes, st.sampled_from([0, 1]))
def test_factors_without_an_order_give_a_part_of_each_chunk(world, factor, size, dim):
    whole = torch.arange(2 * size).view((size, 2) if dim == 0 else (2, size))
    sharding = Sharding((world,), tuple(range(world)), (Split(dim, factor=factor),))
    shards, _ = _StridedShard(dim, split_factor=factor)._split_tensor(whole, world, with_padding=False)
    for local, regions in zip(shards, sharding.regions(whole.shape), strict=True):
        filled = torch.full_like(local, -1)
        for box, at in regions:
            filled[Box(at, box.shape).slices(whole_box(local.shape))] = whole[box.slices(whole_box(whole.shape))]
        assert torch.equal(filled, local)


def test_the_parts_of_several_such_axes_are_all_combinations():
    sharding = Sharding((2, 2), (0, 1, 2, 3), (Split(0, factor=3), Split(1, factor=3)))
    regions = sharding.regions_at((6, 6), (0, 1))
    assert [box.offsets for box, _ in regions] == list(itertools.product((0, 2, 4), (1, 3, 5)))
    assert [at for _, at in regions] == list(itertools.product(range(3), range(3)))


def test_a_dim_that_does_not_exist_is_an_error():
    with pytest.raises(IndexError):
        Sharding((2,), (0, 1), (Split(1),)).regions((4,))
