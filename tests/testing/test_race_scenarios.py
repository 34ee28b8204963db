"""The library's own streams wait for each other in all ways to train: `testing.races` sees no race."""

from __future__ import annotations

import pytest

from _race_scenarios import SCENARIOS, perform


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_decoder_trains_without_a_race(name):
    checked = perform(SCENARIOS[name])
    assert checked.operators > 300
    assert checked.report() == ""
