"""Slots are leased, given back, and used again by whoever needs that many bytes next."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from _engines import fully_shard
from _models import Stack, shard_blocks, shard_nested, vectors
from _pool import distributed
from composable_shard._pool import BufferPool
from composable_shard._streams import Lane


class Owner:
    """Stands for a bucket."""


class MarkingLane(Lane):
    """A lane whose events are numbers."""

    def __init__(self):
        self.marks = 0

    def mark(self):
        self.marks += 1
        return self.marks


def make_pool(lane=None):
    return BufferPool(torch.device("cpu"), lane or Lane())


def test_a_pool_tells_in_words_what_is_leased():
    pool = make_pool()
    seen = [repr(pool)]
    slots = [pool.lease(nbytes) for nbytes in (1, 512, 513)]
    seen.append(repr(pool))
    pool.release(slots[0])
    seen.append(repr(pool))
    pool.lease(100)
    seen.append(repr(pool))
    pool.release(slots[2])
    seen.append(repr(pool))
    pool.empty()
    seen.append(repr(pool))
    assert_expected_inline(
        "\n".join(seen),
        """\
BufferPool(0 of 0 slots leased, 0 of 0 bytes)
BufferPool(3 of 3 slots leased, 2048 of 2048 bytes)
BufferPool(2 of 3 slots leased, 1536 of 2048 bytes)
BufferPool(3 of 3 slots leased, 2048 of 2048 bytes)
BufferPool(2 of 3 slots leased, 1024 of 2048 bytes)
BufferPool(2 of 2 slots leased, 1024 of 1024 bytes)""",
    )


def test_sizes_are_rounded_up_to_slots_and_nothing_still_takes_one():
    pool = make_pool()
    assert [pool.lease(n).nbytes for n in (0, 1, 512, 513, 4096)] == [512, 512, 512, 1024, 4096]
    assert pool.live_bytes == pool.peak_bytes == pool.held_bytes == 512 * 5 + 4096


def test_a_released_slot_is_the_next_one_of_its_size_and_of_no_other():
    pool = make_pool()
    small, large = pool.lease(512), pool.lease(1024)
    pool.release(small)
    assert pool.lease(1024) is not large
    assert pool.lease(400) is small
    assert pool.allocations == 3


def test_the_last_slot_released_is_the_first_one_leased():
    pool = make_pool()
    slots = [pool.lease(512) for _ in range(3)]
    for slot in slots:
        pool.release(slot)
    assert [pool.lease(512) for _ in range(3)] == slots[::-1]


def test_peak_bytes_are_the_most_that_were_leased_at_once():
    pool = make_pool()
    first = pool.lease(1024)
    pool.release(first)
    pool.lease(512)
    assert (pool.live_bytes, pool.peak_bytes, pool.held_bytes) == (512, 1024, 1536)


def test_a_slot_is_one_piece_of_memory_seen_in_any_dtype():
    slot = make_pool().lease(512)
    as_float, as_half = slot.typed(torch.float32), slot.typed(torch.float16)
    assert as_float is slot.typed(torch.float32)
    assert as_float.data_ptr() == as_half.data_ptr() == slot.begin
    assert (as_float.numel(), as_half.numel(), slot.end - slot.begin) == (128, 256, 512)


def test_slots_made_under_inference_mode_can_be_trained_with():
    pool = make_pool()
    with torch.inference_mode():
        slot = pool.lease(512)
        view = slot.typed(torch.float32)
    assert not slot.typed(torch.uint8).is_inference()
    assert not view.is_inference()


def test_the_next_writer_of_a_slot_gets_the_event_behind_its_last_use():
    lane = MarkingLane()
    pool = make_pool(lane)
    slot = pool.lease(512)
    assert slot.free_after == 1, "fresh memory may still be read by what the stream was given before"
    event = object()
    pool.release(slot, event)
    assert pool.lease(512).free_after is event


# ---- find


def test_find_knows_the_first_and_the_last_byte_of_a_slot_that_holds_weights():
    pool, owner = make_pool(), Owner()
    slot = pool.lease(1024, owner)
    assert pool.find(slot.begin) is slot
    assert pool.find(slot.end - 1) is slot
    assert pool.find(slot.begin - 1) is None
    assert pool.find(slot.end) is None
    assert slot.owner() is owner


def test_find_sees_neither_free_slots_nor_those_of_communication():
    pool, owner = make_pool(), Owner()
    assert pool.find(12345) is None
    slot, landing = pool.lease(512, owner), pool.lease(512)
    assert pool.find(landing.begin) is None
    pool.release(slot)
    assert pool.find(slot.begin) is None


def test_a_pool_keeps_no_owner_alive():
    pool = make_pool()
    owner = Owner()
    slot = pool.lease(512, owner)
    del owner
    assert slot.owner() is None


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 2048), st.booleans()), max_size=12))
def test_find_gives_for_every_address_the_slot_that_holds_it(sizes):
    pool, owner = make_pool(), Owner()
    slots = [pool.lease(nbytes, owner if owned else None) for nbytes, owned in sizes]
    for slot, (_, owned) in zip(slots, sizes, strict=True):
        for address in (slot.begin, slot.begin + slot.nbytes // 2, slot.end - 1):
            assert pool.find(address) is (slot if owned else None)


# ---- empty


def test_empty_gives_free_slots_back_and_keeps_the_leased_ones():
    pool, owner = make_pool(), Owner()
    kept, freed = pool.lease(512, owner), pool.lease(1024, owner)
    pool.release(freed)
    pool.empty()
    assert (pool.live_bytes, pool.held_bytes) == (512, 512)
    assert pool.find(kept.begin) is kept
    assert pool.find(freed.begin) is None
    assert pool.lease(1024) is not freed
    pool.release(kept)
    assert pool.lease(512) is kept


# ---- a real model


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("shard", [shard_blocks, shard_nested])
@distributed(world=(1, 2))
def test_no_slot_is_allocated_after_the_second_step(rank, world, shard, reshard):
    model = Stack()
    shard(model, fully_shard, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = []
    for step in range(5):
        model(*vectors(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        made.append(model._shard_state.bound.engine.pool.allocations)
    assert made[0] > 0
    assert made[1:] == made[1:2] * 4
    pool = model._shard_state.bound.engine.pool
    assert pool.live_bytes == 0
    assert pool.held_bytes < 2 * pool.peak_bytes
