"""A process that was forked from one that trains: its first collective is an error, and its parent trains on."""

from __future__ import annotations

import os
import select
import signal

import pytest
import torch

from _decoders import Training
from _pool import distributed

LIMIT_S = 60.0
CHILD_S = 10.0


def in_a_fork(body):
    """What `body` has raised in a process that was forked from this one, as text; it has 10 seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            body()
            text = "nothing was raised"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], CHILD_S)
    text = os.read(reading, 1 << 16).decode() if ready else "it hangs"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    return text


@pytest.mark.parametrize("trains", [False, True])
@distributed(world=2, limit_s=LIMIT_S)
def test_the_first_forward_of_a_forked_process_is_an_error_and_its_parent_trains_on(rank, world, trains):
    torch.set_num_threads(1)
    run = Training(rank, world)
    if trains:
        run.step()
    text = in_a_fork(run.forward)
    assert text.startswith("PeerLostError: process "), text
    assert "was forked from one that trains, and cannot communicate for it: start processes before" in text
    run.goes_on_exactly()
