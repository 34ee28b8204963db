"""Random programs are exact: training, evaluations, failures, freezing, hooks, checkpoints, budgets in any order."""

from __future__ import annotations

import pytest

from _pool import more, simulated
from _programs import Program

EVENTS = 14
WORLDS = (2, 3, 4)


@pytest.mark.filterwarnings("ignore")  # some of what programs do has a warning, which other tests expect
@pytest.mark.parametrize("seed", [*range(3), *map(more, range(3, 12))])
@simulated(world=WORLDS)
def test_any_program_does_to_a_sharded_decoder_what_it_does_to_one_that_is_not_sharded(rank, world, seed):
    Program(seed, rank, world).run(EVENTS)
