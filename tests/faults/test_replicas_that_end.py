"""When one replica ends, and with it the store of the process group, the other one can still evaluate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from _launched import finish, start_ranks
from _pool import more

RANKS = Path(__file__).parents[1] / "_replica_ranks.py"
SOON_S = 6.0
LIMIT_S = 60.0


@pytest.mark.parametrize(("engine", "error"), [more("fsdp2", "RuntimeError"), ("ours", "PeerLostError")])
def test_a_replica_evaluates_without_the_other_one_and_cannot_keep_training(engine, error):
    ended = [(*finish(process, LIMIT_S), process.returncode) for process in start_ranks(RANKS, 4, engine)]
    assert [code for _, _, code in ended] == [0, 0, 1, 1], ended
    for output, errors, _ in ended[2:]:
        assert output, errors  # otherwise it failed before the end of training
        report = json.loads(output)
        assert (report["error"], report["after"] < SOON_S) == (error, True), report
