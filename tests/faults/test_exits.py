"""A process that ends without `destroy_process_group`, and with unreduced gradients, exits cleanly."""

from __future__ import annotations

from pathlib import Path

from _launched import finish, start_ranks

RANKS = Path(__file__).parents[1] / "_exit_ranks.py"
LIMIT_S = 60.0


def test_a_process_exits_cleanly_while_a_gloo_thread_still_holds_a_tensor(tmp_path):
    """Without the library, torch aborts here (pytorch#190489)."""
    ended = [(*finish(process, LIMIT_S), process.returncode) for process in start_ranks(RANKS, 2, tmp_path)]
    assert [(output, code) for output, _, code in ended] == 2 * [("trained\n", 0)], ended
