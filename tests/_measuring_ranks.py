"""Functions of the ranks in the tests of `measure-links`: very small measurements, or other actions instead."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from composable_shard.planner.measuring import Settings
from composable_shard.planner.ranks import joined

KIB = 1 << 10
TINY = Settings(
    rounds=3,
    seconds=1e-4,
    longest=1e-3,
    sizes=(8 * KIB, 512 * KIB),
    matrices=((64, 32, 32),) * 2,
    memory=(64 * KIB,) * 2,
)


def die_or_wait(place, kind, *arguments):
    """Kill rank 1 while rank 0 waits for it."""
    with joined(place, kind, 60):
        dist.all_reduce(torch.ones(1))
        if place.rank == 1:
            print("the last words of rank 1", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


def sleep(place, progress):
    time.sleep(300)


LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}  # in the format of Linux's tables


def listening():
    """Address and port of each listening socket of this process, in the hexadecimal format of Linux's tables."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            own.add(os.readlink(descriptor))
    tables = [Path(f"/proc/self/net/{kind}").read_text().splitlines() for kind in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def listen(place, progress):
    """The listening sockets of a rank after it has joined the others."""
    with joined(place, "cpu", 30):
        progress("listening", 0, 1)
        return listening()
