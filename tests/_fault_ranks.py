"""One rank of `faults/test_lost.py`: it trains, runs the fault that its arguments name, and prints how it ended."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from _decoders import Training
from _reports import reported
from composable_shard._faults.watch import WATCHER

LIMIT_S = 8.0  # timeout of collectives


def fail(run):
    raise ValueError("bad data")


def fail_in_forward(run):
    run.model(torch.full((2, 8), 99))


def fail_in_backward(run):
    def fail_later(module, args, out):
        out.register_hook(lambda grad: fail(run))

    run.model.blocks[1].register_forward_hook(fail_later)
    run.backward()


def caught_in_forward(run):
    try:
        run.model(torch.full((2, 8), 99))
    except IndexError:
        time.sleep(LIMIT_S)


def kill(run):
    time.sleep(1.5)  # until a heartbeat has told the last action
    kill_where_others_ask(run)


def kill_where_others_ask(run):
    os.kill(os.getpid(), signal.SIGKILL)


def caught_where_others_ask(run):
    caught_in_forward(run)


def step_at_another_rate(run):
    """Change the learning rate. Before the next collective, ranks exchange this change through the store."""
    run.optimizer.param_groups[0]["lr"] *= 0.5
    run.optimizer.step()


def leave(run):
    sys.exit(0)


def leave_in_order(run):
    dist.destroy_process_group()
    sys.exit(0)


def destroy_the_group_and_evaluate(run):
    dist.destroy_process_group()
    time.sleep(LIMIT_S)
    sys.exit(0)


def stop(run):
    time.sleep(1.5)  # heartbeats are sent once per second, with the last action
    os.kill(os.getpid(), signal.SIGSTOP)


def be_late(run):
    time.sleep(1.5 * LIMIT_S)


def be_interrupted(run):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()


def draw_a_number(run):
    for group in WATCHER.ledgers():
        group.store.add("news", 1)  # like a rank that is killed before it writes its news
    fail(run)


def gather_alone(run):
    next(run.model.parameters()).full_tensor()


def save_by_torch_alone(run):
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=tempfile.mkdtemp())


def nothing(run):
    pass


MEANWHILE = {  # actions of the other ranks
    "be_interrupted": lambda run: time.sleep(0.7 * LIMIT_S),
    "kill_where_others_ask": step_at_another_rate,
    "caught_where_others_ask": step_at_another_rate,
}


def start_no_threads_in_the_end() -> None:
    """Let `Thread.start` fail while the interpreter shuts down, like in Python 3.12 and later."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    atexit.register(setattr, threading.Thread, "start", refuse)


def main() -> None:
    start_no_threads_in_the_end()
    what, who = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank = dist.get_rank()
    run = Training(rank, dist.get_world_size())
    for _ in range(2):
        run.step()
    dist.barrier()
    with reported(rank):
        (globals()[what] if rank == who else MEANWHILE.get(what, nothing))(run)
        run.step()
        run.check()


main()
