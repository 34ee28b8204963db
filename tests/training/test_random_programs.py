"""Random programs are exact: training, evaluation, failures, freezing, hooks, checkpoints and budgets in any order."""

from __future__ import annotations

import pytest

from _pool import more, simulated
from _programs import Program

EVENTS = 14
WORLDS = (2, 3, 4)


@pytest.mark.filterwarnings("ignore")  # some actions of programs warn; other tests check these warnings
@pytest.mark.parametrize("seed", [*range(3), *map(more, range(3, 12))])
@simulated(world=WORLDS)
def test_a_random_program_gives_the_same_results_on_a_sharded_decoder(rank, world, seed):
    Program(seed, rank, world).run(EVENTS)
