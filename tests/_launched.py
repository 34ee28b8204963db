"""Start commands like a user does. They are killed at a time limit, with all processes that they have started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def start(script, *arguments, **settings):
    """Start a script like a user does, in a new session. `settings` are passed to `Popen`."""
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **settings,
    )


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def start_ranks(script, world, *arguments, **variables):
    """Start a script on all ranks of a world, like torchrun. `variables` are added to the environment."""
    common = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    common |= {"GLOO_SOCKET_IFNAME": "lo"} | variables
    environments = [os.environ | {k: str(v) for k, v in {**common, "RANK": rank}.items()} for rank in range(world)]
    return [start(script, *arguments, env=environment, cwd=script.parent) for environment in environments]


def descendants(pid):
    """Descendants of the process `pid`, from Linux's process table."""
    found: list[int] = []
    table = Path(f"/proc/{pid}/task/{pid}/children")
    for child in table.read_text().split() if table.exists() else ():
        found += [int(child), *descendants(int(child))]
    return found


def kill(processes):
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def finish(process, limit_s=200):
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        kill([*descendants(process.pid), process.pid])
        output, errors = process.communicate()
        pytest.fail(f"still running after {limit_s} s\n{output}\n{errors}")
    return output, errors
