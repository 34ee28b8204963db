"""If a rank fails in a transfer, all others get an error, receivers keep a whole version, and training continues."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from _launched import finish, free_port, start_ranks
from _pool import more

RANKS = Path(__file__).parents[1] / "_weights_ranks.py"
LIMIT_S = 150.0
SOON_S = 20.0  # less than the timeout of the process group

LOST = (
    r"rank {who} (has closed its connections|has sent no heartbeat for \d s)"
    r"|the store .* cannot be reached: its host \(rank {who}, "  # rank 0 is the host
)
CASES = {
    "kill": ("PeerLostError", LOST),
    "kill_in_between": ("PeerLostError", LOST),
    "fail_in_between": ("PeerLostError", r"rank {who} has failed while weights were sent: MemoryError: no memory left"),
    "stop_in_between": ("PeerLostError", r"rank {who} has sent no heartbeat for \d s"),
    "change_the_model": (
        "RankMismatchError",
        (
            r"rank {who} cannot send or receive weights: StaleStateError: the tensors do not match .* in the "
            r"plan: blocks.0.attention.k.weight is torch.float32 \(8, 16\) on this rank"
        ),
    ),
    "pass_another_limit": ("RankMismatchError", "has plan .*, 4096 bytes in flight, and rank {who} has plan .*, 8192"),
}
FAILS_WITH = {"fail_in_between": "MemoryError", "change_the_model": "StaleStateError"}


@pytest.mark.parametrize(
    ("what", "who"),
    [
        ("kill_in_between", 3),
        *(more(*case) for case in [("kill", 3), ("fail_in_between", 2), ("stop_in_between", 2)]),
        *(
            more(*case)
            for case in [("kill_in_between", 0), ("kill", 1), ("fail_in_between", 0), ("stop_in_between", 1)]
        ),
        more("change_the_model", 1),
        more("pass_another_limit", 2),
        more("kill_in_between", 1),
    ],
)
def test_other_ranks_get_an_error_and_keep_whole_versions(what, who):
    processes = start_ranks(RANKS, 4, what, who, free_port())
    ended = {}
    for rank in sorted(range(4), key=lambda rank: rank == who):  # a stopped rank last
        if rank == who and what == "stop_in_between":
            processes[rank].send_signal(signal.SIGKILL)
        ended[rank] = finish(processes[rank], LIMIT_S)
    of_who, errors_of_who = ended.pop(who)
    if "kill" in what or "stop" in what:
        assert processes[who].returncode == -signal.SIGKILL
    else:
        assert json.loads(of_who.splitlines()[-1])["error"] == FAILS_WITH.get(what, CASES[what][0]), errors_of_who
    for output, errors in ended.values():
        said = json.loads(output.splitlines()[-1])
        kind, words = CASES[what]
        assert said["error"] == kind, errors
        assert re.search(words.format(who=who), said["text"]), said["text"]
        took = float(re.search(r"([\d.]+) s until", errors)[1])
        assert took < (SOON_S if what != "stop_in_between" else 60.0), said
