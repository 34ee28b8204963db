"""Plans: whatever the two layouts are, each receiver gets each of its elements once, from a rank that holds it."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_shard._plan.boxes import Box, Sharding, Split, whole_box
from composable_shard.errors import LayoutMismatchError, ShardConfigValueError
from composable_shard.weights import LocalTensor, Piece, TensorInfo, WeightLayout, fill, plan_transfer
from composable_shard.weights._course import Course
from composable_shard.weights._describe import Parts

F32, BF16, INT = torch.float32, torch.bfloat16, torch.int64

steadily = settings(deadline=None, derandomize=True, max_examples=60)


@st.composite
def shardings(draw, first_rank=0):
    """How a mesh of up to 6 ranks shards a tensor of two dims."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (2, 3), (3, 2)]))
    split = st.builds(Split, st.integers(0, 1), st.sampled_from([1, 1, 2]), st.sampled_from([1, 1, 2]))
    splits = tuple(draw(st.none() | split) for _ in sizes)
    return Sharding(sizes, tuple(range(first_rank, first_rank + math.prod(sizes))), splits)


def local(name, regions, dtype):
    pieces = tuple(Piece(name, box, at) for box, at in regions if box.numel)
    ends = zip(*(Box(at, box.shape).ends for box, at in regions), strict=True)
    return LocalTensor(tuple(map(max, ends)), dtype, pieces)


def layout_of(shapes, how, dtype=F32):
    """The layout of tensors, each with its own sharding."""
    ranks = {}
    for (name, shape), sharding in zip(shapes.items(), how, strict=True):
        for rank, regions in zip(sharding.ranks, sharding.regions(shape), strict=True):
            ranks.setdefault(rank, {})[name] = local(name, regions, dtype)
    return WeightLayout({name: TensorInfo(shape, dtype) for name, shape in shapes.items()}, {}, ranks)


def filled(layout, rank, values):
    """The tensors of a rank, filled from full tensors by its layout."""
    tensors = {}
    for name, held in layout.ranks.get(rank, {}).items():
        tensors[name] = torch.full(held.shape, -1.0, dtype=held.dtype)
        for box in held.zeros:
            tensors[name][box.slices(whole_box(held.shape))] = 0
        for piece in held.pieces:
            value = values[layout.ties.get(piece.name, piece.name)]
            part = value[piece.box.slices(whole_box(value.shape))]
            tensors[name][piece.local.slices(whole_box(held.shape))] = part.view(piece.local.shape).to(held.dtype)
    return tensors


def moved(plan, values):
    """The receivers' tensors after the plan's transfers, which read only what their source holds."""
    sources = {rank: Parts(filled(plan.source, rank, values), held) for rank, held in plan.source.ranks.items()}
    tensors = {}
    for rank, held in plan.target.ranks.items():
        tensors[rank] = {name: torch.full(each.shape, -1.0, dtype=each.dtype) for name, each in held.items()}
        for name, each in held.items():
            for box in each.zeros:
                tensors[rank][name][box.slices(whole_box(each.shape))] = 0
    targets = {rank: Parts(tensors[rank], held, plan.source.ties) for rank, held in plan.target.ranks.items()}
    for each in plan.transfers:
        value = next(sources[each.source].of(each.name, each.box))
        for place in targets[each.target].of(each.name, each.box):
            if place.dtype == each.dtype:
                place.copy_(value)
    return tensors


def values_of(layout):
    return {name: torch.randn(info.shape).to(info.dtype) for name, info in layout.tensors.items()}


def check(source, target, **options):
    """Plan, and compare the receivers with what their layout means; returns the plan."""
    plan = plan_transfer(source, target, **options)
    values = values_of(source)
    for rank, tensors in moved(plan, values).items():
        wanted = filled(target, rank, values | {tie: values[first] for tie, first in source.ties.items()})
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[name], each) for name, each in wanted.items())
    return plan


@settings(steadily, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=3),
    st.data(),
    st.sampled_from([0, 2, 9]),
    st.sampled_from([F32, BF16]),
)
def test_receivers_get_each_element_once(shapes, data, offset, dtype):
    shapes = {f"weight{index}": shape for index, shape in enumerate(shapes)}
    source = layout_of(shapes, [data.draw(shardings()) for _ in shapes])
    target = layout_of(shapes, [data.draw(shardings(offset)) for _ in shapes], dtype)
    plan = check(source, target)
    needed = 0
    for rank, tensors in target.ranks.items():
        own = [piece for held in source.ranks.get(rank, {}).values() for piece in held.pieces]
        for held in tensors.values():
            for piece in held.pieces:
                marked = torch.zeros(shapes[piece.name], dtype=torch.bool)
                marked[piece.box.slices(whole_box(marked.shape))] = True
                for mine in own:
                    if mine.name == piece.name:
                        marked[mine.box.slices(whole_box(marked.shape))] = False
                needed += int(marked.sum()) * dtype.itemsize
    assert plan.total_bytes == needed  # parts that a rank has already do not move
    assert plan == plan_transfer(source, target)


@settings(steadily, max_examples=50)
@given(st.data(), st.sampled_from([64, 100, 1000]))
def test_messages_carry_each_part_once_and_rounds_stay_small(data, most):
    shapes = {"a": (9, 7), "b": (40, 3), "c": (1, 1)}
    source = layout_of(shapes, [data.draw(shardings()) for _ in shapes])
    target = layout_of(shapes, [data.draw(shardings(6)) for _ in shapes])
    plan = plan_transfer(source, target)
    courses = {rank: Course(plan, rank, most) for rank in plan.ranks}
    carried = []
    for rank, course in courses.items():
        for number, messages in enumerate(course.rounds):
            for sends in (True, False):
                own = [each for each in messages if (each.source if sends else each.target) == rank]
                assert sum(part.nbytes for each in own for _, part in each.parts) <= max(most // 2, 16 * len(own))
            for each in messages:
                other = courses[each.target if each.source == rank else each.source]
                assert each in other.rounds[number]
                carried += [part for _, part in each.parts] if each.source == rank else []
    copied = [each for each in plan.transfers if each.source == each.target]
    assert sum(each.nbytes for each in carried) == plan.total_bytes
    split = replace(plan, transfers=tuple(carried + copied))
    values = values_of(source)
    assert all(
        torch.equal(one, other)
        for rank, tensors in moved(split, values).items()
        for one, other in zip(tensors.values(), moved(plan, values)[rank].values(), strict=True)
    )


def test_replicas_share_the_sending():
    shapes = {f"weight{index}": (4, 4) for index in range(12)}
    replicated = Sharding((4,), tuple(range(4)), (None,))
    sharded = Sharding((2, 2), tuple(range(4)), (None, Split(0)))
    for how in (replicated, sharded):
        plan = check(layout_of(shapes, [how] * 12), layout_of(shapes, [Sharding((2,), (4, 5), (None,))] * 12))
        sent = [sum(each for (rank, _), each in plan.links.items() if rank == source) for source in range(4)]
        assert sent == [2 * 12 * 64 // 4] * 4


def fused():
    """A trainer with q, k, v, an embedding and an output that is tied to it; an engine that fuses and pads."""
    names = {"q": (4, 6), "k": (2, 6), "v": (2, 6), "embed": (5, 6)}
    source = layout_of(names, [Sharding((3,), (0, 1, 2), (Split(0),))] * 4)
    source = replace(source, ties={"head": "embed"})
    ranks = {}
    for rank in (0, 1):
        qkv = LocalTensor(
            (4, 6),
            BF16,
            (
                Piece("q", Box((2 * rank, 0), (2, 6)), (0, 0)),
                Piece("k", Box((rank, 0), (1, 6)), (2, 0)),
                Piece("v", Box((rank, 0), (1, 6)), (3, 0)),
            ),
        )
        rows = 4 if rank == 0 else 1
        table = LocalTensor(
            (4, 6), BF16, (Piece("embed", Box((4 * rank, 0), (rows, 6)), (0, 0)),), (Box((rows, 0), (4 - rows, 6)),)
        )
        head = replace(table, pieces=(table.pieces[0]._replace(name="head"),), dtype=F32)
        ranks[rank] = {"qkv": qkv, "table": table, "head": head}
    tensors = {name: TensorInfo(shape, BF16) for name, shape in names.items()}
    return source, WeightLayout(tensors, {}, ranks).on([3, 4])


def test_fused_padded_and_untied_tensors_of_an_engine():
    source, target = fused()
    plan = check(source, target)
    assert {each.dtype for each in plan.transfers if each.name == "embed"} == {BF16, F32}
    assert plan.total_bytes == 2 * (4 + 2 + 2 + 5) * 6 + 4 * 5 * 6


def test_parts_of_several_ranks_fill_fused_and_padded_tensors():
    source, target = fused()
    values = values_of(source)
    parts = [
        (key, piece.box, values[name][piece.box.slices(whole_box(values[name].shape))])
        for tensors in source.ranks.values()
        for name, local in tensors.items()
        for piece in local.pieces
        for key in ((name, "head") if name == "embed" else (name,))
    ]
    for rank, held in target.ranks.items():
        wanted = filled(target, rank, values | {"head": values["embed"]})
        tensors = {name: torch.full(each.shape, 7.0, dtype=each.dtype) for name, each in held.items()}
        fill(tensors, held, reversed(parts))
        assert all(torch.equal(tensors[name], each) for name, each in wanted.items())
        with pytest.raises(LayoutMismatchError) as caught:
            fill(tensors, held, [part for part in parts if part[0] != "k"])
        assert caught.value.problems == ("qkv: no part fills [2:3, 0:6]",)


def test_experts_in_a_stack_and_one_by_one():
    names = {f"experts.{expert}.{kind}": (2, 3) for expert in range(4) for kind in ("gate", "up")}
    each = layout_of(names, [Sharding((2,), (0, 1), (Split(1),))] * 8)
    stacks = {}
    for rank in range(2):
        pieces = tuple(
            Piece(f"experts.{2 * rank + expert}.{kind}", whole_box((2, 3)), (expert, 2 * part, 0))
            for expert, (part, kind) in itertools.product(range(2), enumerate(("gate", "up")))
        )
        stacks[rank] = {"w13": LocalTensor((2, 4, 3), F32, pieces)}
    stacked = WeightLayout(each.tensors, {}, stacks)
    check(each, stacked)
    check(stacked, each)
    check(stacked, stacked.on([1, 0]))


def test_layouts_survive_json():
    for layout in fused():
        again = WeightLayout.from_json(layout.to_json())
        assert again == layout
        assert again.digest == layout.digest
    data = json.loads(fused()[1].to_json())
    data["layout"]["ranks"]["3"]["qkv"]["pieces"][0][1][0] = 7
    with pytest.raises(ShardConfigValueError, match=r"layout.ranks.3.qkv.pieces\[0\]\[1\]\[0\]: expected a list"):
        WeightLayout.from_json(json.dumps(data))


def problems_of(source, target, **options):
    with pytest.raises(LayoutMismatchError) as caught:
        plan_transfer(source, target, **options)
    return caught.value.problems


def test_all_mismatches_are_listed():
    source, target = fused()
    tensors = dict(target.ranks[4])
    tensors["extra"] = LocalTensor((1,), BF16, (Piece("bias", Box((0,), (1,)), (0,)),))
    tensors["qkv"] = replace(tensors["qkv"], pieces=tensors["qkv"].pieces[:2], shape=(5, 6))
    tensors["table"] = replace(tensors["table"], zeros=(Box((0, 0), (4, 6)),))
    count = LocalTensor((4, 6), INT, (Piece("q", Box((0, 0), (4, 6)), (0, 0)),))
    ranks = {3: target.ranks[3] | {"count": count}, 4: tensors}
    wrong = replace(target, tensors=target.tensors | {"k": TensorInfo((3, 6), BF16)}, ranks=ranks)
    held = {rank: {**tensors} for rank, tensors in source.ranks.items()}
    del held[2]["embed"]
    more = replace(source, tensors=source.tensors | {"norm": TensorInfo((4,), F32)}, ranks=held)
    assert problems_of(more, wrong) == (
        "k: has shape (2, 6) at the sender and (3, 6) at the receivers",
        "q: cannot be cast from torch.float32 to torch.int64",
        "qkv on rank 4: no piece fills [3:5, 0:6]",
        "table on rank 4: several pieces fill [0:1, 0:6]",
        "bias: receivers need it, but the sender has no tensor of this name",
        "k: no receiver takes it (to leave it out, pass unused=['k'])",
        "norm: no receiver takes it (to leave it out, pass unused=['norm'])",
        "embed: no sender holds [4:5, 0:6], which rank 4 needs",
    )


def test_senders_that_cannot_hold_what_they_describe_are_listed():
    source, target = fused()
    held = dict(source.ranks[1])
    held["q"] = LocalTensor((1, 6), F32, (Piece("q", Box((2, 0), (1, 6)), (1, 0)),))
    held["k"] = LocalTensor((1, 6), F32, (Piece("k", Box((2, 0), (1, 6)), (0, 0)),))
    held["more"] = LocalTensor((2,), F32, (Piece("bias", Box((0,), (2,)), (0,)),))
    assert problems_of(replace(source, ranks=source.ranks | {1: held}), target) == (
        "q on rank 1: [1:2, 0:6] is outside of its shape (1, 6)",
        "k: rank 1 holds [2:3, 0:6], but it has shape (2, 6)",
        "bias: senders hold parts of it, but `tensors` of their layout does not have it",
        "q: no sender holds [3:4, 0:6], which rank 4 needs",
        "k: no sender holds [1:2, 0:6], which rank 4 needs",
    )


def test_floats_of_8_bits_are_not_cast():
    """Their scales would be missing."""
    source, target = fused()
    tensors = {name: replace(each, dtype=torch.float8_e4m3fn) for name, each in target.ranks[3].items()}
    problems = problems_of(source, replace(target, ranks=target.ranks | {3: tensors}))
    assert "q: cannot be cast from torch.float32 to torch.float8_e4m3fn" in problems


def test_tensors_that_no_receiver_takes_can_be_left_out_by_name():
    source, target = fused()
    more = replace(
        source, tensors=source.tensors | {"vision.a": TensorInfo((4,), F32), "vision.b": TensorInfo((4,), F32)}
    )
    assert len(problems_of(more, target)) == 2
    check(source, target, unused=["vision.*"])


def test_an_untied_output_that_receivers_tie_is_an_error():
    source, target = fused()
    source = layout_of({"embed": (5, 6), "head": (5, 6)}, [Sharding((1,), (0,), (None,))] * 2)
    only = {rank: {"table": tensors["table"]} for rank, tensors in target.ranks.items()}
    [problem] = problems_of(source, replace(target, tensors={}, ranks=only))
    assert problem.startswith("head: no receiver takes it")


def test_layouts_of_several_ranks_are_merged():
    source, _ = fused()
    assert WeightLayout.merged([source.only(rank) for rank in (2, 0, 1)]) == replace(
        source, tensors=dict(sorted(source.tensors.items()))
    )
    other = replace(source, tensors=source.tensors | {"q": TensorInfo((4, 7), F32)}, ties={"head": "q"})
    with pytest.raises(
        ShardConfigValueError, match=r"q is both float32 \(4, 6\) and float32 \(4, 7\); head is tied both"
    ):
        WeightLayout.merged([source, other])
    moved = replace(source, ranks={0: source.ranks[1]})
    with pytest.raises(ShardConfigValueError, match="q on rank 0 is split in two ways"):
        WeightLayout.merged([source, moved])


def test_ranks_can_be_renumbered():
    _, target = fused()
    assert [*target.on({3: 8, 4: 0}).ranks] == [0, 8]
    with pytest.raises(ShardConfigValueError, match=r"\[4\] of the layout's ranks \[3, 4\] have no new number"):
        target.on({3: 1})
    with pytest.raises(ShardConfigValueError, match="have the same new number"):
        target.on({3: 1, 4: 1})
