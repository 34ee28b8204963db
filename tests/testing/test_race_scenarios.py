"""`testing.races` finds no race between the library's streams in any scenario."""

from __future__ import annotations

import pytest

from _race_scenarios import SCENARIOS
from _race_training import perform

IN_SHORT = (  # run by `make test`; `make matrix` runs the others
    *("default", "packed", "mixed", "accumulate", "checkpoint", "checkpoint-reentrant", "few-ranks", "failing"),
    *("dropped-in-backward", "branches", "replicas", "replicas-mixed", "uneven", "tensor-parallel", "offload"),
    *("outer-sharding", "outer-sharding-mixed", "outer-sharding-evaluate"),
    *("steps-on-host", "extensions-and-optimizer", "failing-communication", "two-streams"),
)


def check(names):
    for name in names:
        checked = perform(SCENARIOS[name])
        assert checked.operators > 500
        assert (name, checked.report()) == (name, "")


def test_decoders_train_without_a_race_in_the_most_common_scenarios():
    check(IN_SHORT)


# Two parts, so that pytest processes can share the work.
@pytest.mark.matrix
@pytest.mark.parametrize("part", range(2))
def test_decoders_train_without_a_race(part):
    check([name for name in SCENARIOS if name not in IN_SHORT][part::2])
