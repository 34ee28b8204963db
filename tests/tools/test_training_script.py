"""The script to copy, tutorials/train.py: strategies agree, runs go on, adapters alone train, and mistakes are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from _checks import check
from _console import Interrupt
from _launched import finish
from _pool import POOL, more
from composable_shard import checkpoint

SCRIPT = Path(train.__file__)
FEW = ["--model", "tiny", "--sequence", "16", "--steps", "6", "--evaluation", "16", "--sample", "0"]
SAME_BATCH = {1: ["--batch", "4"], 2: ["--batch", "2"]}  # on all ranks together


class NoInterrupt(Interrupt):
    """Of a worker, whose signals are its own."""

    def __init__(self):
        self.asked = self._wait = False


def on_rank(rank, world, arguments):
    """A run of the script on a rank of a pool; gives its exit status."""
    options, plan = check(train.parse(arguments), world)
    return train.run(options, plan, torch.device("cpu"), NoInterrupt())


def run(out, world, *arguments):
    """A run of the script on so many ranks; gives the loss of each step, and the last figures."""
    given = [*FEW, *SAME_BATCH[world], "--out", str(out), "--data", str(texts(out.parent)), *arguments]
    assert POOL.run(f"{__name__}:on_rank", world, {"arguments": given}) == [0] * world
    return curve(out)


def curve(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    *steps, last = rows
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    return torch.tensor([row["train/loss"] for row in steps]), last["final/loss"]


def texts(folder):
    """A folder with text in it."""
    root = folder / "texts"
    if not root.exists():
        root.mkdir()
        (root / "some.py").write_bytes(Path(json.__file__).read_bytes())
        (root / "more.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    return root


def near(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=0)
    assert one[1] == pytest.approx(other[1], rel=1e-5)


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory):
    """What an unsharded run of one process gives."""
    return run(tmp_path_factory.mktemp("unsharded") / "run", 1, "--strategy", "none")


@pytest.mark.parametrize(
    "settings",
    [
        ["zero3"],
        ["ddp"],
        more(["zero1"]),
        more(["zero2"]),
        ["hsdp", "--replicas", "2"],
        ["zero3", "--checkpointing", "full"],
        more(["zero3", "--checkpointing", "selective"]),
    ],
    ids=" ".join,
)
def test_two_ranks_train_as_one_unsharded_process(unsharded, tmp_path, settings):
    near(run(tmp_path / "run", 2, "--strategy", *settings), unsharded)
