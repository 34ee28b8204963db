"""If a rank fails, ends or hangs before its first forward, the others get an error in time that names it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from _launched import finish, start_ranks
from _pool import more

RANKS = Path(__file__).parents[1] / "_late_ranks.py"
SOON_S = 6.0
LIMIT_S = 120.0
LIMIT_OF_COLLECTIVES_S = 8.0  # in _late_ranks
WAITS = r"; rank \d waits for it in its first forward\. Training cannot continue without that rank"


def ranks(what, who, world, axes=(), **variables):
    """Run `what` on all ranks; returns the output and exit code of the ranks that were not meant to fail."""
    processes = start_ranks(RANKS, world, what, json.dumps(who), json.dumps(axes), **variables)
    ended = []
    for rank in sorted(range(world), key=lambda rank: rank in who):  # stopped ranks last
        if rank in who and what == "be_stopped":
            processes[rank].send_signal(signal.SIGKILL)
        output, errors = finish(processes[rank], LIMIT_S)
        if rank not in who or what == "sleep":
            assert output.strip(), errors
            ended.append((json.loads(output.splitlines()[-1]), processes[rank].returncode))
    return ended


CASES = {
    "fail": r"rank 1 failed before its first forward \(ValueError: bad data\)",
    "end": "rank 1 has ended before its first forward",
    "end_at_once": "rank 1 has closed its connections",
    "be_killed": "rank 1 has closed its connections",
}


@pytest.mark.parametrize(
    ("what", "compiled"),
    [("fail", False), more("end", False), more("end_at_once", False), more("fail", True), more("be_killed", False)],
)
def test_a_rank_that_ends_before_its_first_forward_is_named_immediately(what, compiled):
    [(said, code)] = ranks(what, [1], 2, **({"COMPILED": 1} if compiled else {}))
    assert (said["error"], code) == ("PeerLostError", 1), said
    assert re.search(CASES[what] + WAITS, said["text"])
    assert said["after"] < SOON_S


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["fail", "be_killed"])
def test_all_ranks_of_a_mesh_with_replicas_name_the_lost_rank(what):
    ended = ranks(what, [1], 4, (2, 2))
    assert [(said["error"], code) for said, code in ended] == [("PeerLostError", 1)] * 3, ended
    assert all(re.search(CASES[what] + WAITS, said["text"]) for said, _ in ended)
    assert max(said["after"] for said, _ in ended) < 1.5 * SOON_S


@pytest.mark.matrix
def test_all_ranks_that_do_not_begin_within_the_limit_are_named_on_all_ranks():
    ended = ranks("sleep", [1, 2], 3)
    assert [(said["error"], code) for said, code in ended] == [("PeerLostError", 1)] * 3, ended
    words = f"ranks 1, 2 have not begun a first forward within {LIMIT_OF_COLLECTIVES_S:.0f} s, while rank 0 waits in"
    assert all(words in said["text"] for said, _ in ended)
    assert LIMIT_OF_COLLECTIVES_S - 1.0 < ended[0][0]["after"] < LIMIT_OF_COLLECTIVES_S + SOON_S


@pytest.mark.matrix
def test_a_rank_stopped_before_its_first_forward_is_lost_after_the_configured_time():
    [(said, code)] = ranks("be_stopped", [1], 2, COMPOSABLE_SHARD_PEER_TIMEOUT=3)
    assert (said["error"], code) == ("PeerLostError", 1), said
    assert re.search(r"rank 1 has sent no heartbeat for \d s" + WAITS, said["text"])
    assert 2.0 < said["after"] < LIMIT_OF_COLLECTIVES_S
