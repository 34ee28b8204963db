"""A process ends without `destroy_process_group`, with gradients that were never reduced: it ends in order."""

from __future__ import annotations

from pathlib import Path

from _launched import finish, start_ranks

RANKS = Path(__file__).parents[1] / "_exit_ranks.py"
LIMIT_S = 60.0


def test_a_process_ends_in_order_while_a_thread_of_gloo_still_holds_a_tensor(tmp_path):
    """Without the library, torch aborts here (pytorch#190489)."""
    ended = [(*finish(process, LIMIT_S), process.returncode) for process in start_ranks(RANKS, 2, tmp_path)]
    assert [(output, code) for output, _, code in ended] == 2 * [("trained\n", 0)], ended
