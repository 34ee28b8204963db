"""The library's own streams wait for each other in all ways to train: `testing.races` sees no race."""

from __future__ import annotations

import pytest

from _race_scenarios import FAILING_COMMUNICATION, SCENARIOS
from _race_training import perform


# In parts, which several processes can share.
@pytest.mark.parametrize("part", range(2))
def test_decoders_train_without_a_race(part):
    for name in [*SCENARIOS][part::2]:
        checked = perform(SCENARIOS[name])
        assert checked.operators > 500
        assert (name, checked.report()) == (name, "")


@pytest.mark.xfail(strict=True, reason="memory is given up behind the current stream, not behind the lane's copies")
def test_a_gather_that_fails_before_its_collective_gives_its_memory_up_behind_its_copies():
    assert perform(FAILING_COMMUNICATION).report() == ""
