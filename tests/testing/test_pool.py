"""The worker pool itself: failures name the rank and its reason, hangs end at the limit, and the pool goes on."""

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


def test_every_rank_runs_and_returns_its_value_when_worlds_alternate():
    for world in (1, 2, 4, 2):
        assert POOL.run("test_pool:reduce_ones", world) == [world] * world


def test_the_failing_rank_comes_first_with_its_traceback():
    with pytest.raises(pytest.fail.Exception) as caught:
        POOL.run("test_pool:fail_on_last", 2)
    head = str(caught.value).split("\n\n")[0]
    assert "rank 1 of 2 failed first" in head
    assert "this rank fails" in head
    assert POOL.run("test_pool:reduce_ones", 2) == [2, 2]


def test_a_hang_ends_at_the_limit_with_stacks_and_the_pool_goes_on():
    pool = Pool()  # its own workers, because they are killed
    try:
        with pytest.raises(pytest.fail.Exception) as caught:
            pool.run("test_pool:hang_on_first", 1, limit_s=0.5)
        assert "gave no answer within 0.5 s" in str(caught.value)
        assert "hang_on_first" in str(caught.value)
        assert pool.run("test_pool:reduce_ones", 1) == [1]
    finally:
        pool.close()


def test_state_that_a_job_leaves_behind_fails_it():
    with pytest.raises(pytest.fail.Exception, match="left grad mode off"):
        POOL.run("test_pool:leave_grad_off", 1)
    assert POOL.run("test_pool:reduce_ones", 1) == [1]


@pytest.mark.parametrize("number", [1, 2])
@distributed(world=(1, 2))
def test_parameters_reach_the_workers(rank, world, number):
    assert number in (1, 2)
    assert dist.get_world_size() == world
    assert dist.get_rank() == rank
