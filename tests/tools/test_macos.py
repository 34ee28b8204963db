"""The CPU path needs no Linux-only functions: two ranks train, save and load in processes without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import composable_shard as cs
from composable_shard.checkpoint._io import files

TESTS = Path(__file__).parents[1]


@pytest.mark.matrix
def test_ranks_train_save_and_load_without_linux_only_names(tmp_path):
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "error::SyntaxWarning", str(TESTS / "_as_on_a_mac.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [each.communicate(timeout=150)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert "modules, as on a Mac" in output


def test_state_on_disk_raises_an_error_before_it_creates_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        cs.errors.ShardConfigError, match="this system is darwin, and state on disk needs Linux"
    ) as refusal:
        cs.DiskOffloadPolicy(tmp_path / "offload", memory=1 << 20)
    assert isinstance(refusal.value, NotImplementedError)
    assert not (tmp_path / "offload").exists()


@pytest.mark.parametrize("read", [files._direct, files._copied])
def test_both_ways_to_read_fill_a_view_and_return_the_number_of_bytes(tmp_path, read):
    (tmp_path / "file").write_bytes(bytes(range(10)))
    memory = bytearray(6)
    with files.opened(tmp_path / "file") as descriptor:
        assert read(descriptor, memoryview(memory), 2) == 6
        assert memory == bytes(range(2, 8))
        assert read(descriptor, memoryview(memory)[:3], 9) == 1
        assert memory == bytes([9, *range(3, 8)])
        assert read(descriptor, memoryview(memory), 10) == 0
