"""The least exposed communication that any schedule within a budget can have: what `ours-auto` is compared with.

The search of the package (`Optimum`) takes a few states and the choices that the engine has. Here nothing is left out,
all sets of kept groups are tried, and more may be chosen than the engine can do.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from composable_shard._plan.optimum import Optimum, _Progress, _State
from composable_shard._plan.schedule import Step, forward_order
from composable_shard._plan.simulation import Sizes, Times


class Anywhere(Optimum):
    """Gathers may also be issued right before a reduction, and reductions be waited for where an event begins.

    Any number of reductions may be in flight.
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
    """The sets of groups whose weights fit into the budget together, those first that save most gather time.

    Args:
        steps, sizes, times: as for `Optimum`.
        budget: bytes; None for no limit.
        always: groups that are in each set.
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
    """The least seconds that any schedule within the budget leaves exposed, for any kept groups (see `Anywhere`).

    Args:
        steps, sizes, times, budget: as for `Optimum`; a dozen groups take seconds.
        known: seconds that some schedule reaches.
        always: groups that must be kept.
    """
    best = known
    for kept in sets_to_keep(steps, sizes, times, budget, always):
        found = Anywhere(steps, sizes, times, budget, kept).best(best - 1e-9)
        best = best if found is None else found.exposed
    return best
