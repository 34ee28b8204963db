"""Repeated failures on all ranks, and a long training after them, do not increase memory."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch

from _decoders import Training
from _pool import distributed
from composable_shard._faults.watch import WATCHER

LIMIT_S = 900.0
FAILURES, STEPS = 600, 400  # test_growth runs a thousand steps


class Taken:
    """Counts of the memory and objects that this process holds."""

    def __init__(self):
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.mib = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
        self.tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
        ledgers = WATCHER.ledgers()
        self.asked = sum(len(ledger._asked) for ledger in ledgers)
        self.keys = ledgers[-1].store.num_keys()

    def __repr__(self):
        return f"{self.mib:.1f} MiB, {self.tensors} tensors, {self.asked} places asked for, {self.keys} keys"


def fail(run):
    with pytest.raises(IndexError):
        run.model(torch.full((2, 8), 99))


def fail_often(run, times):
    for at in range(times):
        fail(run)
        if at % 10 == 9:
            run.step()


@pytest.mark.matrix
@pytest.mark.timeout(LIMIT_S + 60)
@distributed(world=2, limit_s=LIMIT_S)
def test_failures_on_all_ranks_and_a_long_training_after_them_do_not_increase_memory(rank, world):
    run = Training(rank, world)
    for _ in range(50):
        run.step()
    fail_often(run, 50)
    for _ in range(50):
        run.step()
    taken = [Taken()]
    fail_often(run, FAILURES)
    taken.append(Taken())
    for _ in range(STEPS):
        run.step()
    taken.append(Taken())
    before, failed, after = taken
    assert after.tensors == failed.tensors == before.tensors, taken
    assert after.asked - before.asked < FAILURES / 20, taken
    assert after.keys - before.keys < 10, taken
    assert after.mib - before.mib < 5, taken
    assert after.mib - failed.mib < 1, taken
    run.goes_on_exactly()
