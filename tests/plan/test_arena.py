"""Arena packing: the peak of live bytes, and offsets for buffers in an arena of about that size."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _plans import random_lives
from _pool import more
from composable_shard._plan.arena import Arena, ArenaSlot, Lifetime, Placed, as_placed, pack, peak_bytes, solve

STEPS = 12
steadily = settings(deadline=None, derandomize=True)
LIVES = st.lists(
    st.builds(
        lambda nbytes, opened, steps: Lifetime("buffer", nbytes, opened, opened + steps),
        st.integers(0, 100),
        st.integers(0, STEPS),
        st.integers(0, STEPS),
    ),
    max_size=12,
)
NAMED_LIVES = st.lists(
    st.builds(
        lambda name, nbytes, opened, steps: Lifetime(name, nbytes, opened, opened + steps),
        st.sampled_from("abc"),
        st.integers(0, 5000),
        st.integers(0, STEPS - 1),
        st.integers(0, STEPS),
    ),
    max_size=16,
)


@steadily
@given(LIVES)
def test_peak_is_the_largest_sum_of_live_bytes(lives):
    sums = [sum(x.nbytes for x in lives if x.opened <= step < x.closed) for step in range(2 * STEPS)]
    assert peak_bytes(lives) == max(sums)


def test_a_buffer_can_reuse_memory_of_a_buffer_that_closes_at_the_same_step():
    lives = [Lifetime("a", 10, 0, 2), Lifetime("b", 7, 2, 4)]
    assert peak_bytes(lives) == 10
    assert [slot.offset for slot in solve(lives).slots] == [0, 0]


def test_an_empty_arena_has_no_bytes():
    assert peak_bytes([]) == 0
    assert solve([]).nbytes == 0


# ---- offsets


def check(lives):
    """Check that slots do not overlap, are aligned and fit. Returns arena bytes per byte of the lower bound."""
    arena = solve(lives)
    assert len(arena.slots) == len(lives)
    for life, slot in zip(lives, arena.slots, strict=True):
        assert slot.offset % 512 == slot.nbytes % 512 == 0
        assert slot.nbytes >= life.nbytes or life.opened == life.closed
        assert slot.offset + slot.nbytes <= arena.nbytes
    for (one, at), (two, to) in itertools.combinations(zip(lives, arena.slots, strict=True), 2):
        apart = at.offset + at.nbytes <= to.offset or to.offset + to.nbytes <= at.offset
        assert apart or one.closed <= two.opened or two.closed <= one.opened, (one, two)
    assert arena.nbytes >= arena.bound
    return arena.nbytes / max(1, arena.bound)


@steadily
@given(NAMED_LIVES)
def test_simultaneous_lifetimes_share_no_byte(lives):
    check(lives)


def test_a_mirrored_chain_exceeds_the_bound_by_at_most_five_percent():
    rng = random.Random(1)
    for depth in (1, 2, 3):
        for _ in range(12):
            assert check(random_lives(rng, rng.randint(2, 16), depth, uneven=3.0)) <= 1.05


@pytest.mark.matrix
def test_99_percent_of_random_models_exceed_the_bound_by_at_most_30_percent():
    rng = random.Random(3)
    ratios = []
    for _ in range(1000):
        lives = random_lives(rng, rng.randint(2, 8), rng.randint(1, 3), rng.choice([0.0, 0.3, 1.0]))
        arena = solve(lives)
        ratios.append(arena.nbytes / arena.bound)
    ratios.sort()
    assert ratios[989] <= 1.3
    assert sum(ratios) / 1000 <= 1.02


@pytest.mark.parametrize("kept", [0.0, more(0.5)])
def test_packing_a_thousand_groups_takes_seconds(kept):
    lives = random_lives(random.Random(4), 1000, 3, kept)
    begin = time.process_time()
    arena = solve(lives)
    assert time.process_time() - begin < 10  # typically two seconds
    assert arena.nbytes <= 1.05 * arena.bound


def test_packing_is_deterministic():
    lives = random_lives(random.Random(5), 10, 2, 0.3)
    assert solve(lives) == solve(lives)


def test_lifetimes_of_one_name_share_an_offset_if_that_costs_no_memory():
    lives = [
        Lifetime(f"block {i}", 1024, start, start + 2)
        for i, starts in enumerate([(0, 10), (1, 9), (2, 8), (3, 7)])
        for start in starts
    ]
    arena = solve(lives)
    assert arena.nbytes == arena.bound
    for one, two in zip(arena.slots[::2], arena.slots[1::2], strict=True):
        assert one.offset == two.offset


# ---- buffers with known meetings instead of lifetimes


@steadily
@given(st.integers(1, 14), st.randoms(use_true_random=False), st.floats(0, 1))
def test_buffers_that_meet_share_no_byte(count, rng, often):
    sizes = [512 * rng.randint(1, 9) for _ in range(count)]
    names = [rng.choice("abcdefgh") for _ in range(count)]
    met = [pair for pair in itertools.combinations(range(count), 2) if rng.random() < often]
    meets = [[b for a, b in met if a == i] + [a for a, b in met if b == i] for i in range(count)]
    offsets = pack(sizes, meets, names)
    assert all(offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a] for a, b in met)
    assert offsets == pack(sizes, meets, names)
    assert max(map(sum, zip(offsets, sizes, strict=True))) <= sum(sizes)


def test_buffers_of_one_name_get_separate_offsets_if_one_offset_needs_more_memory():
    """Buffers that meet different buffers in forward and in backward."""
    sizes = [512, 1024, 512, 1024, 512, 1024]
    names = ["a", "b", "c", "a'", "b", "c"]
    meets = [[1], [0], [3], [2], [5], [4]]
    offsets = pack(sizes, meets, names)
    assert max(map(sum, zip(offsets, sizes, strict=True))) == 1536
    alike = [1024] * 6
    offsets = pack(alike, meets, names)
    assert (offsets[1], offsets[2]) == (offsets[4], offsets[5])


def test_packing_a_step_of_a_hundred_groups_takes_less_than_a_second():
    for kept in (0.0, 0.5):
        lives = random_lives(random.Random(6), 100, 2, kept)
        begin = time.process_time()
        arena = solve(lives)
        assert time.process_time() - begin < 1.0  # typically 0.2 seconds
        assert arena.nbytes <= 1.05 * arena.bound


# ---- slots of a pool


def placed(**offsets):
    return [Placed(name, False, (ArenaSlot(at, 512),)) for name, at in offsets.items()]


def test_lifetimes_get_the_slots_of_the_pool_part_by_part():
    lives = [Lifetime("a", 1024, 0, 2), Lifetime("b", 512, 1, 3), Lifetime("a", 1024, 4, 5)]
    forward, backward = (ArenaSlot(0, 512), ArenaSlot(1024, 512)), (ArenaSlot(0, 1024),)
    places = [*placed(b=512), Placed("a", False, forward), Placed("a", True, backward)]
    arena = as_placed(lives, 4, places)
    assert arena is not None
    assert [(x.name, x.nbytes, at.offset) for x, at in zip(arena.lifetimes, arena.slots, strict=True)] == [
        ("a", 512, 0),
        ("a", 512, 1024),
        ("b", 512, 512),
        ("a", 1024, 0),
    ]
    assert (arena.nbytes, arena.bound) == (1536, 1536)


@pytest.mark.parametrize("places", [placed(a=0), placed(a=0, b=0), [*placed(a=0), Placed("b", True, ())]])
def test_unsuitable_pool_slots_are_not_used(places):
    assert as_placed([Lifetime("a", 512, 0, 2), Lifetime("b", 512, 1, 3)], 3, places) is None
    assert isinstance(as_placed([Lifetime("a", 512, 0, 2)], 3, places), Arena)


def test_the_text_of_an_arena_shows_its_bytes_and_the_lower_bound():
    lives = [Lifetime("a", 1000, 0, 2), Lifetime("b", 600, 1, 3)]
    assert str(solve(lives)) == "arena: 2048 bytes for 2 lifetimes, lower bound 2048 (1.000)"
