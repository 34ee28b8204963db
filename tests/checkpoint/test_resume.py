"""The demo goes on after whatever has ended it: to the same losses bit by bit, or on other ranks within rounding."""

from __future__ import annotations

import importlib
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import _demo_ranks
from _pool import distributed, more
from composable_shard import checkpoint

STEPS, EVERY = 40, 4


def wait_for(step, out, ranks, limit_s=90):
    """Until a run has come so far."""
    deadline = time.monotonic() + limit_s
    while len(_demo_ranks.curve(out)) < step:
        if time.monotonic() > deadline or not all(each.is_alive() for each in ranks):
            _demo_ranks.kill(ranks)
            pytest.fail("\n".join(path.read_text() for path in out.glob("said-*.txt")))
        time.sleep(0.005)


def said(out):
    return (out / "said-0.txt").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert _demo_ranks.end(_demo_ranks.start(out, 2, STEPS, 0)) == [0, 0], said(out)
    curve = _demo_ranks.curve(out)
    assert [step for step, *_ in curve] == list(range(1, STEPS + 1))
    return curve


def test_killed_and_started_again_the_demo_goes_on_to_the_bit(undisturbed, tmp_path):
    ranks = _demo_ranks.start(tmp_path, 2, STEPS, EVERY)
    wait_for(10, tmp_path, ranks)
    time.sleep(random.uniform(0, 0.1))
    _demo_ranks.kill(ranks)
    assert [each.exitcode for each in ranks] == [-9, -9]
    assert checkpoint.latest(tmp_path / "checkpoints") >= 8
    assert _demo_ranks.end(_demo_ranks.start(tmp_path, 2, STEPS, EVERY)) == [0, 0], said(tmp_path)
    assert "goes on after step " in said(tmp_path)
    assert _demo_ranks.curve(tmp_path) == undisturbed
    assert checkpoint.latest(tmp_path / "checkpoints") == STEPS
