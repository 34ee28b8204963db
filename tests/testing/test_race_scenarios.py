"""The library's own streams wait for each other in all ways to train: `testing.races` sees no race."""

from __future__ import annotations

import pytest

from _race_scenarios import SCENARIOS
from _race_training import perform

IN_SHORT = (  # by `make test`; the others by `make matrix`
    *("default", "packed", "mixed", "accumulate", "checkpoint", "checkpoint-reentrant", "few-ranks", "failing"),
    *("dropped-in-backward", "branches", "replicas", "replicas-mixed", "uneven", "tensor-parallel", "offload"),
    *("steps-on-host", "extensions-and-optimizer", "failing-communication", "two-streams"),
)


def check(names):
    for name in names:
        checked = perform(SCENARIOS[name])
        assert checked.operators > 500
        assert (name, checked.report()) == (name, "")


def test_decoders_train_without_a_race_in_the_most_common_ways():
    check(IN_SHORT)


# In parts, which several processes can share.
@pytest.mark.matrix
@pytest.mark.parametrize("part", range(2))
def test_decoders_train_without_a_race(part):
    check([name for name in SCENARIOS if name not in IN_SHORT][part::2])
