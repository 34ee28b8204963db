"""One rank of `weights/test_transfer_faults.py`: ranks 0 and 1 train, the others receive their weights.

Each job is on its own: trainers have a default process group, receivers have none. Arguments: a fault, the rank that
has it, and the port at which all ranks meet.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from _blocks import Transformer
from _decoders import Training
from _reports import reported
from composable_shard import weights
from composable_shard._faults.watch import WATCHER
from composable_shard.weights import _moves

LIMIT_S = 30.0
TRAINERS, MOST = 2, 1 << 12


def kill(run):
    os.kill(os.getpid(), signal.SIGKILL)


def at_message(number, what):
    """Run `what` instead of the message with this number."""
    started, count = _moves.Mover._started, [0]

    def counting(mover, message):
        count[0] += 1
        if count[0] == number:
            what(None)
        yield from started(mover, message)

    _moves.Mover._started = counting


def fail(run):
    raise MemoryError("no memory left")


def kill_in_between(run):
    at_message(4, kill)


def fail_in_between(run):
    at_message(4, fail)


def stop_in_between(run):
    at_message(4, lambda run: os.kill(os.getpid(), signal.SIGSTOP))


def change_the_model(run):
    run.model = Transformer(layers=3, vocabulary=9)


def pass_another_limit(run):
    run.most = 2 * MOST


def undo_the_change(run):
    run.model = run.training.model if isinstance(run, Trainer) else run.model


def undo_the_limit(run):
    run.most = MOST


RECOVERS = {"change_the_model": undo_the_change, "pass_another_limit": undo_the_limit}


def nothing(run):
    pass


class Trainer:
    """A rank that trains, and sends its weights after each step."""

    def __init__(self, rank, port):
        dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
        self.training, self.most = Training(rank, TRAINERS), MOST
        self.model = self.training.model

    def update(self):
        self.training.step()
        weights.send(self.model, self.plan, self.group, max_bytes_in_flight=self.most)

    def after(self):
        """Training continues exactly, without a fault."""
        assert all(ledger.fault is None for ledger in WATCHER.ledgers())
        for _ in range(3):
            self.training.step()
        self.training.goes_on_exactly()


class Receiver:
    """A rank that holds a full copy of the weights."""

    def __init__(self, rank, port):
        torch.manual_seed(rank)
        self.model, self.most = Transformer(layers=3), MOST

    def update(self):
        self.before = {name: value.clone() for name, value in self.model.state_dict().items()}
        weights.receive(self.plan, self.model, self.group, max_bytes_in_flight=self.most)
        changed = [not torch.equal(value, self.before[name]) for name, value in self.model.state_dict().items()]
        assert all(changed)

    def after(self):
        """All weights are those of the last complete version."""
        assert all(torch.equal(value, self.before[name]) for name, value in self.model.state_dict().items())


def main() -> None:
    what, who, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["WORLD_SIZE"] = str(TRAINERS)
    sends = rank < TRAINERS
    run = (Trainer if sends else Receiver)(rank, port)
    if sends:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = (
            "True"  # as in a job of torchrun, which hosts the store of its ranks
        )
    run.group = weights.connect(f"tcp://127.0.0.1:{port}", rank, world, timeout=timedelta(seconds=LIMIT_S))
    run.plan = weights.plan_together(run.group, **{"sends" if sends else "receives": run.model})
    run.update()
    error = None
    with reported(rank):
        (globals()[what] if rank == who else nothing)(run)
        begin = time.monotonic()
        try:
            run.update()
        except Exception as raised:
            error = raised
        print(f"{time.monotonic() - begin:.1f} s until {error!r}", file=sys.stderr)
        if who >= TRAINERS or not sends:
            run.after()
        if what in RECOVERS:
            RECOVERS[what](run)
            run.update()
        if error is not None:
            raise error


main()
