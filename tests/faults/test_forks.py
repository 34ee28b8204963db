"""The first collective of a process forked from a training process is an error, and the parent keeps training."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.utils.data import DataLoader

from _blocks import Transformer, next_token_loss, token_batch
from _decoders import Training
from _pool import distributed, more
from composable_shard import fully_shard
from composable_shard._faults.watch import WATCHER
from composable_shard._torch.distributed import shared_store

LIMIT_S = 60.0
CHILD_S = 10.0


def in_a_fork(body):
    """The error, as text, that `body` raises in a process forked from this one; it has 10 seconds."""
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
def test_the_first_forward_of_a_forked_process_is_an_error_and_its_parent_keeps_training(rank, world, trains):
    torch.set_num_threads(1)
    run = Training(rank, world)
    if trains:
        run.step()
    text = in_a_fork(run.forward)
    assert text.startswith("PeerLostError: process "), text
    assert "was forked from a training process and cannot use its connections: start processes before" in text
    run.goes_on_exactly()


class ByTorch:
    """The decoder of `Training`, sharded by torch's FSDP2."""

    def __init__(self, run):
        self.run = run
        torch.manual_seed(0)
        self.model = Transformer(layers=3)
        self.model.load_state_dict(run.plain.state_dict())
        for block in self.model.blocks:
            torchs_fully_shard(block)
        torchs_fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self):
        """Both models take a step, and their losses are equal."""
        tokens = token_batch(self.run.rank, self.run.at)
        losses = [next_token_loss(model, *tokens) for model in (self.model, self.run.model)]
        torch.testing.assert_close(*losses)
        losses[0].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        losses[1].backward()
        self.run.backward_of_plain()
        self.run.update()


def another_model_on_a_group_of_its_own():
    model = Transformer(layers=1)
    fully_shard(model, mesh=DeviceMesh.from_group(dist.new_group(), "cpu"))
    model(*token_batch(0, 0))
    return model


def fork_by_data_loader(**options):
    loader = DataLoader(list(range(4)), batch_size=2, num_workers=2, multiprocessing_context="fork", **options)
    for _ in range(3):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        yield


def fork_by_multiprocessing():
    child = multiprocessing.get_context("fork").Process(target=sorted, args=([],))
    child.start()
    child.join(CHILD_S)
    assert child.exitcode == 0
    yield


def fork_directly():
    assert in_a_fork(lambda: None) == "nothing was raised"
    yield


@pytest.mark.parametrize("compiled", [False, more(True)])
@distributed(world=2, limit_s=LIMIT_S)
def test_ranks_with_a_file_store_keep_training_while_they_fork(rank, world, compiled):
    torch.set_num_threads(1)
    run = Training(rank, world)
    if compiled:
        for block in run.model.blocks:
            block.compile(backend="aot_eager")
    by_torch = ByTorch(run)
    teacher = another_model_on_a_group_of_its_own()
    by_torch.step()
    assert type(shared_store()) is dist.FileStore
    ways = fork_by_data_loader(), fork_by_data_loader(persistent_workers=True), fork_by_multiprocessing()
    for way in (*ways, *(fork_directly() for _ in range(5))):
        for _ in way:
            by_torch.step()
        run.optimizer.param_groups[0]["lr"] *= 0.9  # new settings are compared with all ranks through the store
        run.sides[1][1].param_groups[0]["lr"] *= 0.9
        by_torch.optimizer.param_groups[0]["lr"] *= 0.9
    assert Path(shared_store().path).exists()
    run.goes_on_exactly()
    teacher(*token_batch(0, 1))


def wait_until_the_watcher_asks(store_call_s=5.0):
    """Wait until the watcher is in a call of the store that does not return."""
    end = time.monotonic() + store_call_s
    at = None
    while time.monotonic() < end:
        frame = sys._current_frames()[WATCHER._thread.ident]
        before, at = at, (frame.f_code.co_name, frame.f_lineno, frame.f_lasti)
        if at == before and frame.f_code.co_name in ("look", "_hear"):
            return
        time.sleep(0.4)
    raise AssertionError(f"the watcher is in {at}")


@distributed(world=2, limit_s=LIMIT_S)
def test_a_fork_during_a_watcher_call_to_a_file_store_ends(rank, world):
    torch.set_num_threads(1)
    run = Training(rank, world)
    run.step()
    dist.barrier()
    if rank == 0:
        with Path(shared_store().path).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # no call of the store returns on any rank
            wait_until_the_watcher_asks()
            text = in_a_fork(lambda: None)
            fcntl.flock(file, fcntl.LOCK_UN)
        assert text == "nothing was raised"
    dist.barrier()
    run.goes_on_exactly()
