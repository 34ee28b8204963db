"""The pool leases slots, reuses released slots and arranges them in an arena."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

import composable_shard as cs
from _engines import fully_shard
from _leases import lease
from _models import Stack, shard_blocks, shard_nested, vectors
from _pool import distributed
from composable_shard._comm.lanes import Lane
from composable_shard._fsdp2.listening import TrackedPool
from composable_shard._memory.pool import BufferPool


class Owner:
    """Stand-in for a bucket."""


class MarkingLane(Lane):
    """A lane whose events are numbers."""

    def __init__(self):
        self.marks = 0

    def record_current_stream(self):
        self.marks += 1
        return self.marks


def make_pool(lane=None):
    return BufferPool(torch.device("cpu"), lane or Lane())


def test_views_of_a_refilled_slot_show_new_content_and_hold_no_memory_in_between():
    pool = make_pool()
    requests = pool.requests("packed", 1000, refills=True)
    slot = pool.lease(requests[0])
    view = slot.typed(torch.uint8)[:1000].view(10, 100)
    slot.typed(torch.uint8, written=True)[:1000].fill_(1)
    assert view.sum() == 1000
    pool.release(slot)
    assert view.untyped_storage().nbytes() == pool.held_bytes == pool.live_bytes == 0
    other = lease(pool, 4096, "other")
    pool.backward = True
    again = pool.lease(requests[1])
    assert again is slot
    again.typed(torch.uint8, written=True)[:1000].fill_(2)
    assert view.sum() == 2000
    pool.release(again)
    pool.release(other)
    pool.make_arena()
    assert (pool.arena_bytes, pool.span_of(requests[0])) == (4096, None)
    assert pool.lease(requests[0]) is slot


def test_the_repr_of_a_pool_shows_leased_slots_and_bytes():
    pool = make_pool()
    seen = [repr(pool)]
    slots = [lease(pool, nbytes) for nbytes in (1, 512, 513)]
    seen.append(repr(pool))
    pool.release(slots[0])
    seen.append(repr(pool))
    lease(pool, 100)
    seen.append(repr(pool))
    pool.release(slots[2])
    seen.append(repr(pool))
    pool.free_all()
    seen.append(repr(pool))
    assert_expected_inline(
        "\n".join(seen),
        """\
BufferPool(0 slots leased, 0 of 0 bytes)
BufferPool(3 slots leased, 2048 of 2048 bytes)
BufferPool(2 slots leased, 1536 of 2048 bytes)
BufferPool(3 slots leased, 2048 of 2048 bytes)
BufferPool(2 slots leased, 1024 of 2048 bytes)
BufferPool(2 slots leased, 1024 of 1024 bytes)""",
    )


def test_sizes_are_rounded_up_to_slots_and_zero_bytes_take_one_slot():
    pool = make_pool()
    assert [lease(pool, n).nbytes for n in (0, 1, 512, 513, 4096)] == [512, 512, 512, 1024, 4096]
    assert pool.live_bytes == pool.peak_bytes == pool.held_bytes == 512 * 5 + 4096


def test_a_released_slot_is_reused_only_for_its_size():
    pool = make_pool()
    small, large = lease(pool, 512), lease(pool, 1024)
    pool.release(small)
    assert lease(pool, 1024) is not large
    assert lease(pool, 400) is small
    assert pool.allocations == 3


def test_the_last_released_slot_is_leased_first():
    pool = make_pool()
    slots = [lease(pool, 512) for _ in range(3)]
    for slot in slots:
        pool.release(slot)
    assert [lease(pool, 512) for _ in range(3)] == slots[::-1]


def test_peak_bytes_are_the_maximum_of_live_bytes():
    pool = make_pool()
    first = lease(pool, 1024)
    pool.release(first)
    lease(pool, 512)
    assert (pool.live_bytes, pool.peak_bytes, pool.held_bytes) == (512, 1024, 1536)


def test_views_of_a_slot_in_different_dtypes_share_its_memory():
    slot = lease(make_pool(), 512)
    as_float, as_half = slot.typed(torch.float32), slot.typed(torch.float16)
    assert as_float is slot.typed(torch.float32)
    assert as_float.data_ptr() == as_half.data_ptr() == slot.begin
    assert (as_float.numel(), as_half.numel(), slot.end - slot.begin) == (128, 256, 512)


def test_slots_created_in_inference_mode_can_be_used_for_training():
    pool = make_pool()
    with torch.inference_mode():
        slot = lease(pool, 512)
        view = slot.typed(torch.float32)
    assert not slot.typed(torch.uint8).is_inference()
    assert not view.is_inference()


def test_the_next_writer_of_a_slot_gets_the_event_after_its_last_use():
    lane = MarkingLane()
    pool = make_pool(lane)
    slot = lease(pool, 512)
    assert slot.free_after == (1,), "earlier work on the stream may still read new memory"
    event = object()
    pool.release(slot, event)
    assert lease(pool, 512).free_after == (event,)


class Waited:
    """An event that records whether it has been waited for."""

    waited = False

    def wait(self):
        self.waited = True


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("owns", [False, True])
def test_memory_of_queued_work_is_kept_until_the_wait_or_the_next_lease(owns, again):
    """Freeing the memory earlier would have to wait for that work."""
    pool, event = make_pool(), Waited()
    pool.keep_idle(False)
    if owns:  # a memory tracker counts the pool's memory
        pool.__class__, pool.owns = TrackedPool, True
    request = pool.request("reduction", 4096)
    slot = pool.lease(request)
    pool.release_queued(slot, event)
    assert (pool.live_bytes, pool.held_bytes, slot.free_after, event.waited) == (0, 4096, (event,), False)
    if again:
        assert pool.lease(request) is slot
        assert slot.free_after == (event,)
    pool.finish_queued([slot])
    assert (pool.held_bytes, event.waited) == ((4096, False) if again else (0, True))
    pool.finish_queued([slot])  # a second call has no effect
    if not again:
        assert pool.lease(request) is slot
    assert (pool.live_bytes, pool.held_bytes, slot.has_memory) == (4096, 4096, True)
    pool.release(slot)
    assert (pool.live_bytes, pool.held_bytes) == (0, 0)


def test_a_failed_release_waits_for_earlier_work_on_the_slot():
    pool, event = make_pool(), Waited()
    pool.release(lease(pool, 512), event)
    slot = lease(pool, 512)
    assert not event.waited
    pool.release_failed([slot])
    assert (event.waited, pool.live_bytes) == (True, 0)


def test_no_arena_is_made_while_queued_work_uses_a_slot():
    pool = make_pool()
    slot = lease(pool, 512)
    pool.release_queued(slot, None)
    assert (pool.live_bytes, pool.wants_arena) == (0, False)
    pool.finish_queued([slot])
    assert pool.wants_arena


# ---- find


def test_find_returns_a_slot_for_its_first_and_last_byte():
    pool, owner = make_pool(), Owner()
    slot = lease(pool, 1024, "weights", owner)
    assert pool.addresses.find(slot.begin) is slot
    assert pool.addresses.find(slot.end - 1) is slot
    assert pool.addresses.find(slot.begin - 1) is None
    assert pool.addresses.find(slot.end) is None
    assert slot.owner() is owner


def test_find_ignores_free_slots_and_communication_buffers():
    pool, owner = make_pool(), Owner()
    assert pool.addresses.find(12345) is None
    slot, landing = lease(pool, 512, "weights", owner), lease(pool, 512)
    assert pool.addresses.find(landing.begin) is None
    pool.release(slot)
    assert pool.addresses.find(slot.begin) is None


def test_a_pool_does_not_keep_owners_alive():
    pool = make_pool()
    owner = Owner()
    slot = lease(pool, 512, "weights", owner)
    del owner
    assert slot.owner() is None


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 2048), st.booleans()), max_size=12))
def test_find_returns_the_slot_that_contains_an_address(sizes):
    pool, owner = make_pool(), Owner()
    slots = [lease(pool, nbytes, "weights", owner if owned else None) for nbytes, owned in sizes]
    for slot, (_, owned) in zip(slots, sizes, strict=True):
        for address in (slot.begin, slot.begin + slot.nbytes // 2, slot.end - 1):
            assert pool.addresses.find(address) is (slot if owned else None)


# ---- empty


def test_empty_frees_free_slots_and_keeps_leased_slots():
    pool, owner = make_pool(), Owner()
    kept, freed = lease(pool, 512, "kept", owner), lease(pool, 1024, "freed", owner)
    pool.release(freed)
    pool.free_all()
    assert (pool.live_bytes, pool.held_bytes) == (512, 512)
    assert pool.addresses.find(kept.begin) is kept
    assert pool.addresses.find(freed.begin) is None
    assert lease(pool, 1024) is not freed
    pool.release(kept)
    assert lease(pool, 512) is kept


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
        made.append(cs.stats(model)["pool/allocations"])
    assert made[0] > 0
    assert made[1:] == made[1:2] * 4
    stats = cs.stats(model)
    assert stats["pool/live_bytes"] == 0
    assert stats["pool/held_bytes"] < 2 * stats["pool/peak_bytes"]


# ---- the arena


def leased(pool, *leases):
    """Lease these (name, bytes), and release them in the same order."""
    slots = [lease(pool, nbytes, name) for name, nbytes in leases]
    for slot in slots:
        pool.release(slot)
    return slots


def test_an_arena_overlaps_requests_that_are_never_live_together():
    pool = make_pool()
    leased(pool, ("a", 4096), ("b", 512))
    leased(pool, ("b", 512), ("c", 4096))
    assert (pool.wants_arena, pool.held_bytes) == (True, 4096 + 512)
    pool.make_arena()
    assert (pool.wants_arena, pool.arena_bytes, pool.held_bytes) == (False, 4096 + 512, 4096 + 512)
    (a, b), (b_again, c) = leased(pool, ("a", 4096), ("b", 512)), leased(pool, ("b", 512), ("c", 4096))
    assert b is b_again
    assert a is c
    assert not pool.fallbacks
    assert repr(pool) == "BufferPool(0 slots leased, 0 of 4608 bytes, arena 4608 bytes, 1.00 of the bound)"


def test_find_returns_the_leased_one_of_overlapping_slots_of_different_sizes():
    pool, owner = make_pool(), Owner()
    leased(pool, ("large", 4096))
    leased(pool, ("one", 512), ("two", 1024))
    pool.make_arena()
    assert pool.arena_bytes == 4096
    large = lease(pool, 4096, "large", owner)
    for address in range(large.begin, large.end, 256):
        assert pool.addresses.find(address) is large
    pool.release(large)
    one, two = lease(pool, 512, "one", owner), lease(pool, 1024, "two")
    assert [pool.addresses.find(at) for at in (one.begin, one.end - 1, two.begin, large.end - 1)] == [
        one,
        one,
        None,
        None,
    ]
    ones, twos = one.typed(torch.float32, written=True).fill_(1), two.typed(torch.float32, written=True).fill_(2)
    assert bool((ones == 1).all())
    assert bool((twos == 2).all())


def test_views_of_slots_in_an_arena_start_at_the_slot():
    pool = make_pool()
    leased(pool, ("a", 1024), ("b", 2048))
    pool.make_arena()
    for name, nbytes in (("a", 1024), ("b", 2048)):
        slot = lease(pool, nbytes, name)
        view = slot.views[pool.places[torch.float32, 12, torch.Size([2, 5]), (5, 1)]]
        assert view.data_ptr() == slot.begin + 12


def test_fallbacks_are_counted_and_get_a_slot_in_the_next_arena():
    pool = make_pool()
    leased(pool, ("a", 1024))
    leased(pool, ("b", 2048))
    pool.make_arena()
    assert pool.arena_bytes == 2048
    first, second = leased(pool, ("a", 1024), ("b", 2048))
    assert first.end <= second.begin or second.end <= first.begin
    leased(pool, ("new", 512))
    assert pool.fallbacks == {"b": 1, "new": 1}
    assert pool.wants_arena
    pool.make_arena()
    assert pool.arena_bytes == 1024 + 2048
    leased(pool, ("a", 1024), ("b", 2048))
    leased(pool, ("new", 512))
    assert pool.fallbacks == {"b": 1, "new": 1}


def test_a_forgotten_request_has_no_slot_in_the_old_arena():
    pool = make_pool()
    leased(pool, ("a", 1024), ("b", 2048))
    pool.make_arena()
    asked = pool.request("a", 1024)  # like a bucket that is still alive
    held = lease(pool, 2048, "b")
    pool.start_over()
    pool.release(held)
    pool.start_over()
    assert pool.held_bytes == 0
    owner = Owner()
    slot = pool.lease(asked, owner)
    assert pool.held_bytes == 1024
    assert pool.addresses.find(slot.begin) is slot
    pool.release(slot)
    assert (pool.live_bytes, lease(pool, 1024) is slot) == (0, True)


def test_simultaneous_leases_of_one_name_have_separate_slots():
    pool = make_pool()
    leased(pool, ("a", 512), ("a", 512))
    pool.make_arena()
    one, two = leased(pool, ("a", 512), ("a", 512))
    assert (pool.arena_bytes, pool.fallbacks, one is two) == (1024, {}, False)


def test_the_next_writer_of_a_slot_waits_for_all_overlapping_slots():
    pool = make_pool(MarkingLane())
    leased(pool, ("large", 4096))
    leased(pool, ("one", 512), ("two", 1024))
    pool.make_arena()
    for name, nbytes in (("one", 512), ("two", 1024)):
        pool.release(lease(pool, nbytes, name), f"after {name}")
    assert {"after one", "after two"} <= {*lease(pool, 4096, "large").free_after}


def test_an_emptied_pool_has_no_arena_until_the_next_make_arena():
    pool = make_pool()
    leased(pool, ("a", 512), ("b", 512))
    pool.make_arena()
    kept = lease(pool, 512, "a")
    pool.start_over()
    assert pool.held_bytes == 1024, "some of it is leased"
    pool.release(kept)
    pool.start_over()
    assert (pool.held_bytes, pool.arena_bytes) == (0, 0)
    leased(pool, ("a", 512))
    pool.make_arena()
    assert pool.arena_bytes == 512


LEASES = st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.integers(1, 8), min_size=8, max_size=8), LEASES, LEASES)
def test_slots_that_are_leased_together_never_overlap(sizes, learned, then):
    pool, live = make_pool(), {}
    for round_of in (learned, then):
        for name, opens in round_of:
            if opens and name not in live:
                live[name] = lease(pool, 512 * sizes[name], str(name))
            elif not opens and name in live:
                pool.release(live.pop(name))
            spans = sorted((slot.begin, slot.end) for slot in live.values())
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        for slot in live.values():
            pool.release(slot)
        live.clear()
        if pool.wants_arena:
            pool.make_arena()
            assert pool.arena_bytes >= pool.peak_bytes or round_of is then


def test_the_old_arena_is_freed_before_a_new_one_is_made():
    """Slots and views form reference cycles. Their memory must not wait for the cyclic garbage collector."""
    pool = make_pool()
    requests = [pool.request(f"request {number}", 512 << number) for number in range(3)]
    held = [pool.lease(request) for request in requests]
    pool.release_all(held, None)
    del held
    pool.make_arena()
    pool.lease(requests[0])
    (slot,) = [slot for slot in pool.arena.slots if slot.request is not None]
    gone = weakref.ref(slot.region.storage)
    pool.release(slot)
    del slot
    gc.collect()
    gc.disable()
    try:
        assert gone() is not None
        pool.make_arena()
        assert gone() is None
    finally:
        gc.enable()
