"""If one rank fails, ends, is killed or does not come, all remaining ranks get an error in time that describes it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from _launched import finish, start_ranks
from _pool import more
from composable_shard._faults import watch
from composable_shard.errors import ShardConfigValueError

RANKS = Path(__file__).parents[1] / "_fault_ranks.py"
SOON_S = 6.0
LIMIT_S = 60.0
LIMIT_OF_COLLECTIVES_S = 8.0  # in _fault_ranks


def ranks(what, who, world=2, **variables):
    """Run `what` on all ranks; returns the output and exit code of each rank.

    Args:
        what, who: a function of `_fault_ranks`, and the rank that calls it.
        world: number of ranks.
        variables: environment variables of the ranks.
    """
    processes = start_ranks(RANKS, world, what, who, **variables)
    ended = []
    for rank in sorted(range(world), key=lambda rank: rank == who):  # a stopped rank last
        if rank == who and what == "stop":
            processes[rank].send_signal(signal.SIGKILL)
        output, errors = finish(processes[rank], LIMIT_S)
        said = json.loads(output.splitlines()[-1]) if output.strip() else {"rank": rank}
        ended.append((said, processes[rank].returncode, errors))
    return sorted(ended, key=lambda each: each[0]["rank"])


CASES = {
    "fail": ("PeerLostError", r"rank 1 failed after action \d+ \(ValueError: bad data\); rank 0 waits for it in"),
    "fail_in_forward": ("PeerLostError", r"rank 1 failed after action \d+ \(IndexError"),
    "caught_in_forward": ("PeerLostError", r"rank 1 failed after action \d+ \(IndexError"),
    "fail_in_backward": ("PeerLostError", "rank 1 failed after action"),
    "kill": (
        "PeerLostError",
        r"rank 1 has sent no heartbeat for 3 s; its last known action is \d+ \(",
    ),
    "kill_where_others_ask": ("PeerLostError", "rank 1 has closed its connections"),
    "caught_where_others_ask": ("PeerLostError", r"rank 1 failed after action \d+ \(IndexError"),
    "leave": ("PeerLostError", r"rank 1 has ended after action \d+; .*: if it had fewer batches"),
    "leave_in_order": ("PeerLostError", r"rank 1 has (ended|destroyed its process groups) after .*: if it had fewer"),
    "destroy_the_group_and_evaluate": ("PeerLostError", r"rank 1 has destroyed its process groups after action \d+; "),
    "be_late": ("RankMismatchError", "not all ranks reached action .*rank 1 only reached action"),
}


@pytest.mark.parametrize(
    "what",
    [
        "fail",
        *map(more, ["leave_in_order", "fail_in_forward", "fail_in_backward", "leave", "be_late", "caught_in_forward"]),
        "destroy_the_group_and_evaluate",
        "kill",
        "kill_where_others_ask",
    ],
)
def test_remaining_ranks_name_the_lost_rank(what):
    kind, words = CASES[what]
    (said, code, errors), (of_lost, _, errors_of_lost) = ranks(what, 1)
    assert said.get("error") == kind, errors
    assert re.search(words, said["text"])
    assert "rank 0 waits for it in action" in said["text"] or kind == "RankMismatchError"
    assert said["after"] < (SOON_S if kind == "PeerLostError" else 10.0)
    assert code == 1  # a normal exit with an error
    assert "interpreter shutdown" not in errors + errors_of_lost
    if what == "be_late":
        assert of_lost["text"] == said["text"]


@pytest.mark.matrix
def test_the_rank_that_hosts_the_store_is_killed():
    _, (said, code, errors) = ranks("kill", 0)
    assert (said.get("error"), code) == ("PeerLostError", 1), errors
    assert "rank 0" in said["text"]


@pytest.mark.matrix
def test_the_two_remaining_ranks_of_three_raise_the_same_error():
    first, second, _ = ranks("kill", 2, world=3)
    assert first[0]["text"] == second[0]["text"]
    assert "rank 2 has sent no heartbeat" in first[0]["text"]
    assert first[1] == second[1] == 1


@pytest.mark.matrix
def test_messages_after_one_that_a_killed_rank_did_not_finish_are_read():
    (said, _, errors), _ = ranks("draw_a_number", 1)
    assert said.get("error") == "PeerLostError", errors
    assert re.search(CASES["fail"][1], said["text"])


@pytest.mark.matrix
def test_ctrl_c_while_a_rank_waits_ends_all_ranks():
    (of_interrupted, code, errors), (said, _, other_errors) = ranks("be_interrupted", 0)
    assert of_interrupted.get("error") in ("KeyboardInterrupt", "PeerLostError"), errors
    assert code != 0
    assert of_interrupted["after"] < 0.6 * LIMIT_OF_COLLECTIVES_S
    assert said.get("error") == "PeerLostError", other_errors
    assert "rank 0 was interrupted (Ctrl-C) while it waited in action" in said["text"]


@pytest.mark.matrix
def test_a_stopped_rank_is_lost_after_the_configured_time():
    (said, code, errors), _ = ranks("stop", 1, COMPOSABLE_SHARD_PEER_TIMEOUT=3)
    assert (said.get("error"), code) == ("PeerLostError", 1), errors
    assert "rank 1 has sent no heartbeat for" in said["text"]
    assert re.search(r"its last known action is \d+ \((gather|reduce|step) ", said["text"])
    assert 2.0 < said["after"] < LIMIT_OF_COLLECTIVES_S


def test_an_invalid_time_is_refused(monkeypatch):
    monkeypatch.setenv(watch.SILENCE, "soon")
    with pytest.raises(ShardConfigValueError, match="COMPOSABLE_SHARD_PEER_TIMEOUT=soon: expected the number of"):
        watch._silence_s()


ALONE = {  # actions of one rank while the other one trains, and the error that it gets at the limit of its collectives
    "gather_alone": "Timed out waiting",
    "save_by_torch_alone": "Timed out waiting",
}


@pytest.mark.matrix
@pytest.mark.parametrize("what", ALONE)
def test_a_wait_of_only_one_rank_ends_on_all_ranks_at_the_limit(what):
    (said, code, errors), (of_alone, code_of_alone, _) = ranks(what, 1)
    assert said.get("error") in ("PeerLostError", "RankMismatchError"), errors  # both limits end at the same time
    left = rf"rank 1 failed after action \d+ \(\w+: .*{ALONE[what]}.*rank 0 waits for it in action"
    assert re.search(rf"{left}|not all ranks reached action \d+, gather the root.*: rank 1 only reached", said["text"])
    assert re.search(ALONE[what], of_alone["text"])
    assert max(said["after"], of_alone["after"]) < 10.0
    assert code == code_of_alone == 1


@pytest.mark.matrix
def test_ranks_wait_for_a_stopped_one_until_the_limit_and_name_its_last_action():
    (said, code, errors), _ = ranks("stop", 1)
    assert said.get("error") in ("PeerLostError", "RankMismatchError"), errors
    assert re.search(r"rank 1 .*(last known action is|only reached action) \d+ \((gather|reduce|step) ", said["text"])
    assert said["after"] < 15.0
    assert code == 1


@pytest.mark.matrix
def test_the_rank_that_hosts_the_store_is_stopped():
    _, (said, code, errors) = ranks("stop", 0)
    assert (said.get("error"), code) == ("PeerLostError", 1), errors
    assert "rank 1 lost a connection in action" in said["text"]
    assert said["after"] < 25.0
