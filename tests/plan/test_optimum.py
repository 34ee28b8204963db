"""The exact search compared with all schedules of small models."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
from pathlib import Path

import pytest

from _plans import all_issues, random_model
from composable_shard import PrefetchPolicy
from composable_shard._plan.costs import Times
from composable_shard._plan.fitting import Bare
from composable_shard._plan.optimum import Optimum
from composable_shard._plan.schedule import MAX_REDUCTIONS, Schedule, Step, kept_by_setting, one_ahead, timed_step
from composable_shard._plan.search import scheduled
from composable_shard._plan.simulation import lifetimes, live_bytes, peak_bytes, simulate

# Imported by path: bench/ and tests/ both have a module `_engines`, so only one of them can be in sys.path.
_spec = importlib.util.spec_from_file_location("exact", Path(__file__).parents[2] / "bench" / "_optimum.py")
exact = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(exact)
least_exposed, sets_to_keep = exact.least_exposed, exact.sets_to_keep

SEEDS = pytest.mark.parametrize("seed", range(8))


def model_of(seed, blocks=2):
    """A small model whose groups do not wait for reductions before they gather."""
    rng = random.Random(seed)
    steps, sizes, times = random_model(rng, blocks)
    steps = [Step(s.fqn, s.is_root, s.reshard_after_forward, s.trains) for s in steps]
    peak = peak_bytes(lifetimes(timed_step(steps, one_ahead(steps)), sizes))
    return steps, sizes, times, int(rng.choice([1.0, 1.2, 1.5]) * peak)


def all_schedules(steps, sizes, kept):
    """All schedules of the engine, except those with reductions before gathers."""
    trains = [step.fqn for step in steps if step.trains and not step.is_root]
    for counts in itertools.product(range(1, MAX_REDUCTIONS + 1), repeat=len(trains)):
        in_flight = tuple(zip(trains, counts, strict=True))
        bare = Bare(steps, sizes, Schedule((), (), kept, in_flight=in_flight))
        for issued in all_issues(bare):
            yield bare.scheduled(issued)


def judged(steps, sizes, times, schedule):
    """Exposed seconds, and peak bytes up to the root's own reduction, which comes last."""
    actions = timed_step(steps, schedule)
    last = max(at for at, action in enumerate(actions) if action.kind == "RESHARD")
    return simulate(actions, times).exposed, max(live_bytes(lifetimes(actions, sizes), len(actions))[:last])


@SEEDS
def test_the_search_finds_the_best_of_all_schedules(seed):
    steps, sizes, times, budget = model_of(seed)
    for kept in sets_to_keep(steps, sizes, times, budget):
        best = math.inf
        for schedule in all_schedules(steps, sizes, kept):
            exposed, peak = judged(steps, sizes, times, schedule)
            best = min(best, exposed) if peak <= budget else best
        found = Optimum(steps, sizes, times, budget, kept).best(math.inf)
        if found is None:
            assert best == math.inf
            continue
        assert found.exposed == pytest.approx(best, abs=1e-12)
        bare = Bare(steps, sizes, Schedule((), (), kept, in_flight=found.in_flight))
        exposed, peak = judged(steps, sizes, times, bare.scheduled(found.gathers))
        assert exposed == pytest.approx(best, abs=1e-12)
        assert peak <= budget


@SEEDS
def test_gathers_that_any_action_may_issue_never_give_a_worse_result(seed):
    steps, sizes, times, budget = model_of(seed, 4)
    for kept in sets_to_keep(steps, sizes, times, budget):
        found = Optimum(steps, sizes, times, budget, kept).best(math.inf)
        free = exact.Anywhere(steps, sizes, times, budget, kept).best(math.inf)
        assert found is None or free.exposed <= found.exposed + 1e-12


@SEEDS
def test_auto_is_within_ten_percent_of_the_optimum(seed):
    steps, sizes, times, budget = model_of(seed, 5)
    schedule = scheduled(steps, sizes, PrefetchPolicy.auto(), budget, times)
    exposed = simulate(timed_step(steps, schedule), times).exposed
    kept_always = kept_by_setting(steps)
    bound = least_exposed(steps, sizes, times, budget, math.inf, kept_always)
    optimum = math.inf
    for kept in sets_to_keep(steps, sizes, times, budget, kept_always):
        found = Optimum(steps, sizes, times, budget, kept).best(optimum)
        optimum = optimum if found is None else found.exposed
    compute = sum(time.forward + time.backward for time in times.values())
    assert bound <= optimum + 1e-12
    assert exposed <= max(1.10 * optimum, optimum + 0.02 * compute)


@SEEDS
def test_a_narrow_search_is_never_better(seed):
    steps, sizes, times, budget = model_of(seed, 6)
    for kept in sets_to_keep(steps, sizes, times, budget)[:8]:
        wide, narrow = (Optimum(steps, sizes, times, budget, kept) for _ in range(2))
        best, found = wide.best(math.inf), narrow.best(math.inf, width=2)
        if found is not None:
            assert found.exposed >= best.exposed - 1e-12


def test_a_search_that_exceeds_its_work_limit_returns_none():
    steps, sizes, times, budget = model_of(3, 6)
    search = Optimum(steps, sizes, times, budget, ("",))
    assert search.best(math.inf) is not None
    enough = search.work
    assert search.best(math.inf, enough) is not None
    assert search.best(math.inf, enough // 2) is None
    assert search.work < enough


def test_kept_sets_fit_and_the_most_useful_come_first():
    steps, sizes, times, _ = model_of(1, 3)
    budget = sum(size.weights for size in sizes.values()) - 1
    sets = sets_to_keep(steps, sizes, times, budget)
    saved = [sum(times[fqn].gather for fqn in kept if fqn) for kept in sets]
    assert saved == sorted(saved, reverse=True)
    assert ("",) in sets
    assert ("", "b0", "b1", "b2") not in sets


def test_a_step_without_compute_has_an_optimum():
    steps, sizes, times, _ = model_of(2, 2)
    still = {fqn: Times(0.0, 0.0, each.gather, each.reduce) for fqn, each in times.items()}
    search = Optimum(steps, sizes, still, None, ("",))
    assert search.best(math.inf).exposed == pytest.approx(search.link_seconds)
