"""Compute the least exposed communication of any schedule within a budget, for comparison with `ours-auto`.

The search of the package (`Optimum`) is limited to the most promising states and to the engine's choices. The search
here is exhaustive: it tries all sets of kept groups, and allows choices that the engine does not have.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from composable_shard._plan.costs import Sizes, Times
from composable_shard._plan.optimum import Optimum, _Progress, _State
from composable_shard._plan.schedule import Step, forward_order


class Anywhere(Optimum):
    """A search that may also issue gathers right before a reduction, and wait for reductions where an event begins.

    It allows any number of reductions in flight.
    """

    def _on_demand(
        self, progress: _Progress, state: _State, at: int, freed: int, reduced: int
    ) -> Iterator[tuple[_Progress, _State]]:
        for choice in self._settled(progress, state, reduced):
            yield from super()._on_demand(*choice, at, freed, reduced)

    def _choices(
        self, progress: _Progress, state: _State, at: int, freed: int, reduced: int
    ) -> Iterator[tuple[_Progress, _State]]:
        for choice in self._settled(progress, state, reduced):
            yield from super()._choices(*choice, at, freed, reduced)

    def _before_reduction(
        self, progress: _Progress, state: _State, at: int, freed: int, turn: int
    ) -> Iterator[tuple[_Progress, _State]]:
        for choice in self._settled(progress, state, turn):
            yield from super()._choices(*choice, at, freed, turn)


def sets_to_keep(
    steps: Sequence[Step],
    sizes: Mapping[str, Sizes],
    times: Mapping[str, Times],
    budget: int | None,
    always: Collection[str] = (),
) -> list[tuple[str, ...]]:
    """Return the sets of groups whose parameters fit into the budget, sorted by saved gather time, largest first.

    Args:
        steps, sizes, times: as for `Optimum`.
        budget: bytes; None: no limit.
        always: groups that are in every set.
    """
    order = [step.fqn for step in forward_order(steps)]
    stays = {step.fqn for step in steps if step.is_root} | set(always)
    free = [fqn for fqn in order if fqn not in stays]
    sets: list[tuple[str, ...]] = []
    for count in range(len(free) + 1):
        for more in itertools.combinations(free, count):
            kept = tuple(fqn for fqn in order if fqn in stays or fqn in more)
            if budget is None or sum(sizes[fqn].weights for fqn in kept) <= budget:
                sets.append(kept)
    return sorted(sets, key=lambda kept: -sum(times[fqn].gather for fqn in kept))


def least_exposed(
    steps: Sequence[Step],
    sizes: Mapping[str, Sizes],
    times: Mapping[str, Times],
    budget: int | None,
    known: float,
    always: Collection[str] = (),
) -> float:
    """Return the least exposed communication of any schedule within the budget, in seconds (see `Anywhere`).

    Args:
        steps, sizes, times, budget: as for `Optimum`. The search takes seconds for a dozen groups.
        known: exposed communication of a known schedule, in seconds: an upper bound.
        always: groups that must stay gathered.
    """
    best = known
    for kept in sets_to_keep(steps, sizes, times, budget, always):
        found = Anywhere(steps, sizes, times, budget, kept).best(best - 1e-9)
        best = best if found is None else found.exposed
    return best
