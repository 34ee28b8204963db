"""The library's own streams wait for each other in all ways to train: `testing.races` sees no race."""

from __future__ import annotations

import pytest

from _race_scenarios import SCENARIOS
from _race_training import perform


# In parts, which several processes can share.
@pytest.mark.parametrize("part", range(2))
def test_decoders_train_without_a_race(part):
    for name in [*SCENARIOS][part::2]:
        checked = perform(SCENARIOS[name])
        assert checked.operators > 500
        assert (name, checked.report()) == (name, "")
