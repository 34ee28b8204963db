"""Checkpoints of optimizer state on disk never hold all of it in memory, not even background saves."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

import composable_shard as cs
from _offloading import assert_same, decoder, train
from _pool import distributed, more
from checkpoint.test_async import names
from checkpoint.test_save_and_load import content
from composable_shard import checkpoint
from composable_shard._memory.disk import BLOCK
from composable_shard.checkpoint._io import files
from composable_shard.checkpoint._pending import background

LEAST = 5 * BLOCK  # enough for the state of any parameter of these decoders


def made(folder, rank, steps=2):
    model = decoder(cs.DiskOffloadPolicy(folder / "disk", LEAST))
    optimizer = cs.optim.offload_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    train(model, optimizer, range(steps), rank)
    return {"model": model, "optimizer": optimizer}


@distributed(world=2)
def test_a_background_save_has_the_state_of_the_call_although_its_files_change_immediately(rank, world, tmp_path):
    state = made(tmp_path, rank)
    writer = background().writer.pid  # an earlier save of this process may have started one
    pending = checkpoint.async_save(tmp_path / "saved", state, step=2)
    written, total = pending.progress
    assert written == total > 0, "the file is written before the call returns"
    assert background().writer.pid == writer, "no other process writes it"
    expected = content(state)
    train(state["model"], state["optimizer"], range(2, 4), rank)
    path = pending.result(60)
    assert checkpoint.verify(tmp_path / "saved").files == world
    other = made(tmp_path, rank, 0)
    assert checkpoint.load(tmp_path / "saved", other).path == path
    assert content(other).keys() == expected.keys()
    train(other["model"], other["optimizer"], range(2, 4), rank)
    assert_same((state["model"], state["optimizer"]), (other["model"], other["optimizer"]))


@pytest.mark.parametrize("interrupted", [0, more(1)])
@distributed(world=2)
def test_ctrl_c_during_the_call_leaves_no_folder_and_does_not_change_latest(
    rank, world, tmp_path, monkeypatch, interrupted
):
    state = made(tmp_path, rank)
    first = checkpoint.async_save(tmp_path / "saved", state, step=2).result(60)

    def interrupt(operation, path):
        if operation != "write" or path.name != f"rank-{rank:05d}.safetensors":
            return
        [partial] = (tmp_path / "saved").glob(".step-*")
        while len(names(partial)) < world:  # wait until the other rank writes, too
            time.sleep(0.01)
        raise KeyboardInterrupt

    if rank == interrupted:
        monkeypatch.setattr(files, "observe", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.async_save(tmp_path / "saved", state, step=3)
        monkeypatch.setattr(files, "observe", None)
    else:
        with pytest.raises(cs.errors.CheckpointError, match=f"rank {interrupted}: KeyboardInterrupt"):
            checkpoint.async_save(tmp_path / "saved", state, step=3).result(60)
    dist.barrier()  # rank 0 has deleted the files
    assert names(tmp_path / "saved") == ["LATEST", first.name]
    assert checkpoint.latest(tmp_path / "saved") == 2
    assert checkpoint.async_save(tmp_path / "saved", state, step=4).result(60).name == "step-00000004"


@distributed(world=2)
def test_a_full_disk_during_the_call_fails_the_save_on_all_ranks(rank, world, tmp_path, monkeypatch):
    state = made(tmp_path, rank)
    first = checkpoint.async_save(tmp_path / "saved", state, step=2).result(60)

    def observe(operation, path):
        if operation == "write" and path.name == "rank-00001.safetensors":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "observe", observe)
    pending = checkpoint.async_save(tmp_path / "saved", state, step=3)
    with pytest.raises(cs.errors.CheckpointError, match=r"rank 1: OSError: \[Errno 28\] No space left .*rank-00001"):
        pending.result(60)
    monkeypatch.setattr(files, "observe", None)
    dist.barrier()  # rank 0 deletes the files before its result is available
    assert names(tmp_path / "saved") == ["LATEST", first.name]
    assert checkpoint.async_save(tmp_path / "saved", state, step=4).result(60).name == "step-00000004"


# Saves a state that is larger than the memory for it, and prints the additional resident memory.
MEASURED = """
    import re, sys, threading, torch, composable_shard as cs
    from composable_shard import checkpoint
    from composable_shard.checkpoint._io import files

    torch.set_num_threads(1)
    folder, memory = sys.argv[1], int(sys.argv[2])

    def resident():
        status = open("/proc/self/status").read()
        return sum(int(kib) << 10 for kib in re.findall(r"Rss(?:Anon|Shmem):\\s+(\\d+)", status))

    def made(count):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.full((1 << 20,), 0.5)) for _ in range(count)])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if memory:
            cs.optim.offload_optimizer(optimizer, cs.DiskOffloadPolicy(folder, memory))
        for param in model:
            param.grad = torch.ones_like(param)
        for _ in range(2):
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def growth(save, state, step):
        before, most, ended = resident(), [], threading.Event()

        def measure(*operation):
            most.append(resident() - before)

        def watch():
            while not ended.wait(0.002):
                measure()

        # A busy machine may stop the watching thread for longer than a save takes; a write waits for its measurement.
        files.observe = measure
        watching = threading.Thread(target=watch)
        watching.start()
        save(folder + "/saved", state, step=step)
        checkpoint.wait()
        ended.set()
        watching.join()
        files.observe = None
        return max(most)

    small, large = made(1), made(8)  # both stay alive: memory freed during a measurement would reduce its result
    growth(checkpoint.async_save, small, 1)  # what the first save loads is no state
    print(growth(checkpoint.async_save, large, 2), growth(checkpoint.save, large, 3))
"""


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_background_save_needs_no_memory_for_state_on_disk(tmp_path, on_disk):
    command = [sys.executable, "-c", textwrap.dedent(MEASURED), str(tmp_path), str((16 << 20) * on_disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    background_save, ordinary = map(int, done.stdout.split())
    size = 3 * 8 * (4 << 20)
    assert ordinary < 12 << 20
    assert background_save < 12 << 20 if on_disk else background_save > size - (20 << 20)
