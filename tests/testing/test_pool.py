"""The worker pool: a failure names the rank and its cause, a hang ends at the limit, and the pool works afterwards."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from _pool import POOL, Pool, distributed


def reduce_ones(rank, world):
    ones = torch.ones(2)
    dist.all_reduce(ones)
    return int(ones[0])


def fail_on_last(rank, world):
    assert rank != world - 1, "this rank fails"
    dist.barrier()


def hang_on_first(rank, world):
    while rank == 0:
        time.sleep(0.01)


def leave_grad_off(rank, world):
    torch.set_grad_enabled(False)


def test_every_rank_returns_its_value_when_world_sizes_alternate():
    for world in (1, 2, 4, 2):
        assert POOL.run("test_pool:reduce_ones", world) == [world] * world


def test_the_message_begins_with_the_traceback_of_the_failing_rank():
    with pytest.raises(pytest.fail.Exception) as caught:
        POOL.run("test_pool:fail_on_last", 2)
    head = str(caught.value).split("\n\n")[0]
    assert "rank 1 of 2 failed first" in head
    assert "this rank fails" in head
    assert POOL.run("test_pool:reduce_ones", 2) == [2, 2]


def test_a_hang_ends_at_the_limit_with_stacks_and_the_pool_can_be_used_again():
    pool = Pool()  # a separate pool, because its workers are killed
    try:
        with pytest.raises(pytest.fail.Exception) as caught:
            pool.run("test_pool:hang_on_first", 1, limit_s=0.5)
        assert "did not return within 0.5 s" in str(caught.value)
        assert "hang_on_first" in str(caught.value)
        assert pool.run("test_pool:reduce_ones", 1) == [1]
    finally:
        pool.close()


def test_a_job_that_does_not_restore_process_wide_state_fails():
    with pytest.raises(pytest.fail.Exception, match="left grad mode off"):
        POOL.run("test_pool:leave_grad_off", 1)
    assert POOL.run("test_pool:reduce_ones", 1) == [1]


@pytest.mark.parametrize("number", [1, 2])
@distributed(world=(1, 2))
def test_parameters_reach_the_workers(rank, world, number):
    assert number in (1, 2)
    assert dist.get_world_size() == world
    assert dist.get_rank() == rank
