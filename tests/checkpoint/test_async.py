"""Background saves have the state of the call, commit atomically, need bounded memory, and report every failure."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import composable_shard as cs
from _launched import finish, free_port, start
from _pool import distributed, simulated
from checkpoint.test_save_and_load import assert_equal, content, run, train
from composable_shard import checkpoint
from composable_shard._torch.distributed import shared_store
from composable_shard.checkpoint import _async, _store
from composable_shard.checkpoint._pending import background


def test_a_pending_save_shows_its_progress_and_result():
    shown = {name for name in dir(checkpoint.PendingSave) if not name.startswith("_")}
    assert shown == {"done", "progress", "result", "step"}


def names(directory):
    return sorted(each.name for each in Path(directory).iterdir())


@pytest.mark.matrix
@distributed(world=2)
def test_it_saves_the_state_at_the_call_while_training_continues(rank, world, tmp_path):
    state = run(0)
    torch.manual_seed(100 + rank)
    train(state, rank, 2)
    writer = background().writer
    writer.start()
    os.kill(writer.pid, signal.SIGSTOP)  # nothing is written before training has continued
    state["data"]["epoch"] = 5
    pending = checkpoint.async_save(tmp_path, state, step=2)
    expected = content(state)
    state["data"]["epoch"] = 6
    losses = train(state, rank, 3)
    assert not pending.done()
    with pytest.raises(TimeoutError, match=r"the save of step 2 is still running: 0 of [\d,]+ bytes are written"):
        pending.result(timeout=0)
    assert checkpoint.latest(tmp_path) is None
    os.kill(writer.pid, signal.SIGCONT)
    path = pending.result(timeout=60)
    assert pending.done()
    assert path.name == "step-00000002"
    size = (path / f"rank-{rank:05d}.safetensors").stat().st_size
    assert pending.progress == (size, size)
    assert checkpoint.verify(tmp_path).files == world

    other = run(1)
    assert checkpoint.load(tmp_path, other).step == 2
    assert other["data"]["epoch"] == 5
    assert_equal(other, expected)
    assert train(other, rank, 3) == losses
    assert_equal(other, content(state))

    # The next saves use the same process and memory, and delete old checkpoints.
    capacity = writer.capacity
    assert capacity == size
    for step in (5, 6, 7):
        checkpoint.async_save(tmp_path, state, step=step, keep=2)
    assert background().writer is writer
    assert writer.capacity == capacity
    checkpoint.save(tmp_path, {"epoch": 1}, step=8, keep=2)  # waits for the background save
    assert names(tmp_path) == ["LATEST", "step-00000007", "step-00000008"]
    checkpoint.load(tmp_path, other, step=7)
    assert_equal(other, content(state))
    checkpoint.wait()


@distributed(world=2)
def test_it_leaves_no_keys_in_the_store(rank, world, tmp_path):
    store = shared_store()
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_store, "_CHUNK", 100)
        for step in (1, 2):
            checkpoint.async_save(tmp_path, {"t": torch.ones(3), "text": "long" * 100}, step=step).result(60)
            for thread in threading.enumerate():
                if thread.name.startswith("checkpoint-"):
                    thread.join(30)
            dist.barrier()  # rank 0 deletes the keys when all ranks have read them
            kept.append(store.num_keys())
            dist.barrier()
    assert kept[0] == kept[1]
    state = {"text": ""}
    checkpoint.load(tmp_path, state)
    assert state["text"] == "long" * 100


@distributed(world=2)
def test_a_failed_writer_fails_the_save_once_on_all_ranks(rank, world, tmp_path):
    state = {"t": torch.arange(1 << 16, dtype=torch.float32)}
    first = checkpoint.async_save(tmp_path, state, step=1).result(60)
    state["u"] = state["t"].clone()  # each rank writes one of the tensors
    writer = background().writer

    def attempt(step, break_it):
        writer.start()
        os.kill(writer.pid, signal.SIGSTOP)
        pending = checkpoint.async_save(tmp_path, state, step=step)
        if rank == 1:
            break_it()
        os.kill(writer.pid, signal.SIGCONT)
        return pending

    def fill():  # like a full disk: only a part of the file is written
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))

    def kill():
        os.kill(writer.pid, signal.SIGKILL)

    full = r"rank 1: OSError: \[Errno 27\] File too large: .*/\.step-00000002.*/rank-00001\.safetensors"
    killed = r"rank 1: the writer process of .*/rank-00001\.safetensors has been killed by SIGKILL"

    pending = attempt(2, fill)
    for _ in range(2):
        with pytest.raises(cs.errors.CheckpointError, match=full):
            pending.result(60)
    dist.barrier()  # rank 0 deletes the files before its result is available
    assert names(tmp_path) == ["LATEST", first.name], "nothing remains of it"
    checkpoint.wait()  # the error was already raised
    if rank == 1:
        writer.close()  # the file size limit belongs to this process

    attempt(3, kill)
    with pytest.raises(cs.errors.CheckpointError, match=rf"background save of step 3 failed, .*{killed}"):
        checkpoint.save(tmp_path, state, step=4)
    assert names(tmp_path) == ["LATEST", first.name]

    pending = attempt(5, kill)
    if rank == 0:  # raised on one rank only: the next save then fails on all ranks
        with pytest.raises(cs.errors.CheckpointError, match=killed):
            checkpoint.wait()
    with pytest.raises(cs.errors.CheckpointError, match=rf"rank 1: the background save of step 5.*{killed}"):
        checkpoint.async_save(tmp_path, state, step=6)
    assert checkpoint.async_save(tmp_path, state, step=7).result(60).name == "step-00000007"
    checkpoint.verify(tmp_path)
    checkpoint.verify(tmp_path, step=1)


@distributed(world=2)
def test_invalid_calls_raise_immediately_and_leave_no_files(rank, world, tmp_path):
    checkpoint.async_save(tmp_path, {"t": torch.ones(3)}, step=1).result(60)
    for state, options, error, said in (
        (
            {"t": torch.ones(3)},
            {"step": 1},
            cs.errors.ShardConfigValueError,
            "rank 0: step: .* has a checkpoint of step 1",
        ),
        ({"t": torch.tensor(rank)}, {"step": 2}, cs.errors.CheckpointMismatchError, "t is a tensor .* on rank 1"),
        ({"t": object()}, {"step": 2}, cs.errors.ShardConfigTypeError, "all ranks: t is a builtins.object"),
        ({"t": torch.ones(3)}, {"step": 2, "keep": 0}, cs.errors.ShardConfigValueError, "keep: 0"),
    ):
        with pytest.raises(error, match=said):
            checkpoint.async_save(tmp_path, state, **options)
    assert names(tmp_path) == ["LATEST", "step-00000001"]
    checkpoint.wait()


@simulated(world=2)
def test_in_a_simulated_world_the_save_is_done_when_the_call_returns(rank, world, tmp_path):
    pending = checkpoint.async_save(tmp_path, {"here": checkpoint.PerRank(rank)}, step=1)
    assert pending.done()
    given = checkpoint.PerRank(None)
    checkpoint.load(tmp_path, {"here": given})
    assert given.value == rank


@distributed(world=2)
def test_a_rank_without_heartbeat_is_named_and_nothing_is_committed(rank, world, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_store, "LOST_AFTER_S", 2.0)
        patch.setattr(_store, "_READ_S", 0.1)
        if rank == 1:  # its process exists, but sends no heartbeat, like a stopped process
            patch.setattr(_store.StoreRanks, "start", lambda self: None)
            patch.setattr(_async, "_run", lambda *_: None)
        pending = checkpoint.async_save(tmp_path, {"t": torch.ones(3)}, step=1)
        if rank == 0:
            with pytest.raises(cs.errors.CheckpointError, match="rank 1 sent no heartbeat for 2 s"):
                pending.result(60)
            assert names(tmp_path) == []
        background().pending = None


DIES = """
import os, signal, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from composable_shard import checkpoint
from composable_shard.errors import CheckpointError
from composable_shard.checkpoint import _store
from composable_shard.checkpoint._pending import background
directory, rank, port, dead = sys.argv[1], *map(int, sys.argv[2:])
_store.LOST_AFTER_S = 3.0
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
state = {"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}
checkpoint.save(directory, state, step=1)
writer = background().writer
writer.start()
if rank == dead:
    os.kill(writer.pid, signal.SIGSTOP)
try:
    pending = checkpoint.async_save(directory, state, step=2)
    if rank == dead:
        os.kill(writer.pid, signal.SIGCONT)
        os.kill(os.getpid(), signal.SIGKILL)
    pending.result(60)
except CheckpointError as error:
    print(error)
    os._exit(0)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("dead", [0, 1])
def test_when_a_rank_is_killed_the_others_raise_and_the_old_checkpoint_is_intact(tmp_path, dead):
    script, port = tmp_path / "dies.py", free_port()
    script.write_text(DIES)
    ranks = [start(script, tmp_path, rank, port, dead) for rank in (0, 1)]
    said = [finish(rank, 120)[0] for rank in ranks]
    assert ranks[dead].returncode == -signal.SIGKILL
    assert ranks[1 - dead].returncode == 0
    reason = r"cannot be reached from rank 1" if dead == 0 else r"rank 1 sent no heartbeat for 3 s"
    assert re.search(reason, said[1 - dead]), said
    assert checkpoint.verify(tmp_path).step == 1


FORKS = """
import os, sys, torch
from composable_shard import checkpoint
checkpoint.async_save(sys.argv[1] + "/parent", {"t": torch.zeros(1 << 20)}, step=0).result(60)
child = os.fork()
name, value = ("parent", 1.0) if child else ("child", 2.0)
for step in (1, 2, 3):
    checkpoint.async_save(f"{sys.argv[1]}/{name}", {"t": torch.full((1 << 20,), value * step)}, step=step)
checkpoint.wait()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_has_its_own_background_saves(tmp_path):
    subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], timeout=120, check=True)
    for name, value in (("parent", 1.0), ("child", 2.0)):
        for step in (1, 2, 3):
            state = {"t": torch.zeros(1 << 20)}
            checkpoint.load(tmp_path / name, state, step=step)
            assert state["t"].eq(value * step).all()


ENDS = """
import os, signal, sys, threading, torch
from composable_shard import checkpoint
from composable_shard.checkpoint._pending import background
weights = torch.full((1 << 20,), 3.0)
writer = background().writer
writer.start()
os.kill(writer.pid, signal.SIGSTOP)
checkpoint.async_save(sys.argv[1], {"weights": weights}, step=4)
weights.zero_()
threading.Timer(0.5, os.kill, (writer.pid, int(sys.argv[2]))).start()
print(writer.pid)
"""


@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_an_exiting_process_waits_for_its_save_and_prints_its_failure(tmp_path, kill):
    number = signal.SIGKILL if kill else signal.SIGCONT
    command = [sys.executable, "-c", ENDS, str(tmp_path), str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    with pytest.raises(ProcessLookupError):  # the writer process ends, too
        os.kill(int(done.stdout), 0)
    if kill:
        assert "the background save of step 4 failed" in done.stderr
        assert "killed by SIGKILL" in done.stderr
        assert names(tmp_path) == []
        return
    assert done.stderr == ""
    state = {"weights": torch.zeros(1 << 20)}
    assert checkpoint.load(tmp_path, state).step == 4
    assert (state["weights"] == 3).all()
