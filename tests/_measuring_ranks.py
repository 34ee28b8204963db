"""What ranks do in the tests of `composable_shard.planner.ranks`, in the place of measuring."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from composable_shard.planner.ranks import joined


def die_or_wait(place, kind, *arguments):
    """Rank 1 is killed while rank 0 waits for it."""
    with joined(place, kind, 60):
        dist.all_reduce(torch.ones(1))
        if place.rank == 1:
            print("the last words of rank 1", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


def sleep(place, progress):
    progress("sleeping", 1, 2)
    time.sleep(300)
