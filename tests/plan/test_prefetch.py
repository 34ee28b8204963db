"""Schedules under policies and budgets: prefetch edges, kept groups and reductions in flight."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _plans import all_issues, random_model
from composable_shard import PoolPolicy, PrefetchPolicy
from composable_shard._plan.arena import solve
from composable_shard._plan.costs import Costs, Sizes, Times, held
from composable_shard._plan.fitting import bare_step, least_step, levels
from composable_shard._plan.schedule import MARKS, Action, Kind, Schedule, Step, one_ahead, timed_step, training_step
from composable_shard._plan.search import _MOST_WORK, Auto, scheduled
from composable_shard._plan.simulation import lifetimes, live_bytes, peak_bytes, simulate
from composable_shard.errors import PoolBudgetError, ShardConfigValueError

AUTO = PrefetchPolicy.auto()
steadily = settings(deadline=None, derandomize=True, max_examples=25)
MODELS = st.builds(
    lambda seed, blocks: random_model(random.Random(seed), blocks), st.integers(0, 9999), st.integers(0, 7)
)
POLICIES = st.one_of(
    st.integers(0, 4).map(PrefetchPolicy.depth), st.integers(0, 60_000).map(PrefetchPolicy.bytes), st.just(AUTO)
)


def peak(steps, sizes, schedule):
    return peak_bytes(lifetimes(timed_step(steps, schedule), held(sizes, schedule.holds)))


def exposed(steps, times, schedule):
    return simulate(timed_step(steps, schedule), times).exposed


def in_memory(steps, sizes, times, schedule):
    """Exposed seconds, including waits for memory with streams."""
    actions = timed_step(steps, schedule)
    lives = lifetimes([each for each in actions if each.kind not in MARKS], held(sizes, schedule.holds))
    queued = any(size.frees_queued for size in sizes.values())
    return simulate(actions, times, solve(lives) if queued else None).exposed


def uniform(blocks=4, nbytes=1024, landing=0, gather=1.0, forward=2.0):
    steps = [Step(f"b{i}", False, True, True) for i in range(blocks)]
    times = {step.fqn: Times(forward, 2 * forward, gather, gather) for step in steps}
    return steps, {step.fqn: Sizes(nbytes, landing, nbytes) for step in steps}, times


# ---- simulation


def test_the_simulation_matches_the_formula():
    actions = [Action(Kind[kind], fqn) for kind, fqn in map(str.split, [
        "FORWARD a", "UNSHARD a", "WAIT a", "UNSHARD b", "RESHARD a", "FORWARD b", "WAIT b", "RESHARD b",
    ])]  # fmt: skip
    line = simulate(actions, {"a": Times(2.0, 0, 1.0, 0), "b": Times(1.0, 0, 5.0, 0)})
    assert line.begins == (1.0, 6.0)  # b is gathered from 1 to 6, and needed at 3
    assert line.waits == {Action(Kind.FORWARD, "a"): 1.0, Action(Kind.FORWARD, "b"): 3.0}
    assert (line.exposed, line.compute, line.seconds) == (4.0, 3.0, 7.0)


def test_a_gather_waits_for_the_reduction_on_the_link():
    steps, _, times = uniform(3, gather=3.0, forward=1.0)
    waits = simulate(timed_step(steps, one_ahead(steps)), times).waits
    # b1 is gathered from 3 to 6, while b2 computes for 2 seconds. b0's gather is issued after b2's reduction.
    assert waits[Action(Kind.BACKWARD, "b0")] > waits[Action(Kind.BACKWARD, "b1")]


# ---- policies


@steadily
@given(MODELS)
def test_a_depth_of_one_is_the_default_of_the_engine(model):
    steps, sizes, _ = model
    schedule = scheduled(steps, sizes, PrefetchPolicy.depth(1))
    assert schedule == one_ahead(steps)
    assert training_step(steps, schedule) == training_step(steps)


def test_a_depth_of_zero_gathers_each_group_when_it_begins():
    schedule = scheduled(*uniform()[:2], PrefetchPolicy.depth(0))
    assert schedule == Schedule((), (), ())


def test_a_depth_of_two_gathers_two_groups_first_and_then_one_at_a_time():
    schedule = scheduled(*uniform()[:2], PrefetchPolicy.depth(2))
    assert schedule.forward == (("b0", ("b1", "b2")), ("b1", ("b3",)))
    assert schedule.backward == (("b3", ("b2", "b1")), ("b2", ("b0",)))


@steadily
@given(MODELS, st.integers(0, 60_000))
def test_prefetching_by_bytes_never_exceeds_its_limit(model, limit):
    steps, sizes, _ = model
    ahead = {}
    for action in timed_step(steps, scheduled(steps, sizes, PrefetchPolicy.bytes(limit))):
        if action.kind is Kind.UNSHARD:
            ahead[action.fqn] = sizes[action.fqn].weights + sizes[action.fqn].landing
        elif action.kind is Kind.WAIT:
            del ahead[action.fqn]
        elif action.kind in (Kind.FORWARD, Kind.BACKWARD):
            own = action.fqn
        assert sum(nbytes for fqn, nbytes in ahead.items() if fqn != own) <= limit


def test_prefetching_by_bytes_of_two_groups_gathers_two_ahead():
    steps, sizes, _ = uniform()
    assert scheduled(steps, sizes, PrefetchPolicy.bytes(2048)) == scheduled(steps, sizes, PrefetchPolicy.depth(2))


# ---- budgets


@steadily
@given(MODELS, POLICIES, st.floats(0.3, 2.0))
def test_budgets_are_never_exceeded_and_the_least_budget_works(model, policy, share):
    steps, sizes, times = model
    budget = max(1, int(share * peak(steps, sizes, one_ahead(steps))))
    least = least_step(steps, sizes).peak
    if budget < least:
        with pytest.raises(PoolBudgetError, match=f"budget={budget}.*{least} bytes") as caught:
            scheduled(steps, sizes, policy, budget, times)
        assert caught.value.least == least
        with pytest.raises(PoolBudgetError):
            scheduled(steps, sizes, policy, least - 1, times)
        budget = least
    schedule = scheduled(steps, sizes, policy, budget, times)
    assert peak(steps, sizes, schedule) <= budget
    gathered = [fqn for _, groups in schedule.forward for fqn in groups]
    assert len(gathered) == len(set(gathered))


def test_a_budget_drops_prefetching_before_reductions_in_flight_before_kept_weights():
    steps, sizes, _ = uniform(4, 1024, 0)
    steps = [Step(s.fqn, False, s.fqn not in ("b0", "b1"), True) for s in steps]
    seen = []
    for budget in range(6 * 1024, 1023, -512):
        s = scheduled(steps, sizes, PrefetchPolicy.depth(1), budget)
        seen.append((len(s.kept), s.max_reductions - s.reduces_first, sum(len(g) for _, g in s.forward + s.backward)))
    assert seen == sorted(seen, key=lambda each: each[:2], reverse=True)
    assert {kept for kept, _, _ in seen} == {0, 1, 2}
    assert seen[-1] == (0, 0, 0)


def test_the_budget_error_names_the_group_that_needs_the_most():
    steps, sizes, _ = uniform()
    sizes["b2"] = Sizes(4096, 4096, 4096)
    with pytest.raises(PoolBudgetError, match=r"group b2 does not fit.*8192 bytes") as caught:
        scheduled(steps, sizes, PrefetchPolicy.depth(1), 5000)
    assert (caught.value.fqn, caught.value.least) == ("b2", 8192)


# ---- auto


def test_auto_without_times_prefetches_one_module():
    steps, sizes, _ = uniform()
    assert scheduled(steps, sizes, AUTO) == one_ahead(steps)


def test_auto_prefetches_further_if_that_hides_a_large_group():
    steps, sizes, times = uniform(5)
    times["b3"] = Times(2.0, 4.0, 5.0, 1.0)  # the gather takes longer than a forward
    schedule = scheduled(steps, sizes, AUTO, None, times)
    ahead = {fqn: at for at, groups in schedule.forward for fqn in groups}
    assert ahead["b3"] == "b1"
    assert exposed(steps, times, schedule) < exposed(steps, times, one_ahead(steps))


def test_auto_keeps_the_last_group_if_that_takes_no_more_memory():
    steps, sizes, times = uniform()
    schedule = scheduled(steps, sizes, AUTO, None, times)
    assert "b3" in schedule.kept
    assert Action(Kind.BACKWARD, "b3") not in simulate(timed_step(steps, schedule), times).waits


@settings(steadily, max_examples=8)
@given(MODELS)
def test_auto_waits_no_longer_than_one_ahead_with_the_same_bytes(model):
    steps, sizes, times = model
    budget = peak(steps, sizes, one_ahead(steps))
    schedule = scheduled(steps, sizes, AUTO, budget, times)
    assert peak(steps, sizes, schedule) <= budget
    compute = sum(time.forward + time.backward for time in times.values())
    slack = 0.002 * compute if any(size.frees_queued for size in sizes.values()) else 1e-12
    assert in_memory(*model, schedule) <= in_memory(*model, one_ahead(steps)) + slack


def least_exposed(steps, sizes, times, budget):
    """The least exposed seconds of all schedules that fit into the budget."""
    blocks, best = [step.fqn for step in steps if not step.is_root], math.inf
    for kept in itertools.chain.from_iterable(itertools.combinations(blocks, n) for n in range(len(blocks) + 1)):
        for level in range(len(levels(steps))):
            bare = bare_step(steps, sizes, ("", *kept), level)
            for issued in all_issues(bare) if bare.peak <= budget else ():
                actions = timed_step(steps, bare.scheduled(issued))
                if max(live_bytes(lifetimes(actions, sizes), len(actions))) <= budget:
                    best = min(best, simulate(actions, times).exposed)
    return best


@pytest.mark.parametrize("seed", range(16))
def test_auto_is_close_to_the_best_of_all_schedules(seed):
    rng = random.Random(seed)
    steps, sizes, times = random_model(rng, 3 if seed % 8 == 0 else 2)
    budget = int(rng.choice([1.0, 1.2, 1.5]) * peak(steps, sizes, one_ahead(steps)))
    bound = least_exposed(steps, sizes, times, budget)
    compute = sum(time.forward + time.backward for time in times.values())
    schedule = scheduled(steps, sizes, AUTO, budget, times)
    assert exposed(steps, times, schedule) <= max(1.10 * bound, bound + 0.02 * compute) + 1e-12


@settings(steadily, max_examples=8)
@given(MODELS)
def test_auto_without_a_budget_takes_no_more_memory_than_one_ahead(model):
    steps, sizes, times = model
    schedule = scheduled(steps, sizes, AUTO, None, times)
    assert peak(steps, sizes, schedule) <= peak(steps, held(sizes, sizes), one_ahead(steps))
    compute = sum(time.forward + time.backward for time in times.values())
    slack = 0.002 * compute if any(size.frees_queued for size in sizes.values()) else 1e-12
    assert in_memory(*model, schedule) <= in_memory(*model, one_ahead(steps)) + slack


def test_auto_holds_reductions_if_compute_would_wait_for_their_memory():
    large = {f"b{i}": 4.0 if i % 2 == 0 else 1.0 for i in range(8)}
    steps = [Step(fqn, False, True, True) for fqn in large]
    sizes = {fqn: Sizes(int(1024 * size), 0, int(1024 * size)) for fqn, size in large.items()}
    times = {fqn: Times(2.0, 4.0, 0.9 * size, 0.9 * size) for fqn, size in large.items()}
    queued = {fqn: replace(size, frees_queued=True) for fqn, size in sizes.items()}
    schedule = scheduled(steps, queued, AUTO, None, times)
    assert schedule.holds == ("b3", "b2", "b1", "b0")
    assert in_memory(steps, queued, times, schedule) < in_memory(steps, queued, times, replace(schedule, holds=()))
    assert peak(steps, queued, schedule) <= peak(steps, sizes, one_ahead(steps))
    assert scheduled(steps, sizes, AUTO, None, times).holds == ()  # without streams, reductions keep their memory


def test_scheduling_is_deterministic():
    steps, sizes, times = random_model(random.Random(3), 6)
    assert Auto(steps, sizes, times, None).best().schedule == Auto(steps, sizes, times, None).best().schedule


@pytest.mark.parametrize(("seed", "blocks"), [(0, 12), (1, 49), (3, 120)])
def test_the_work_of_auto_is_limited_for_any_number_of_groups(seed, blocks):
    """Seed 1 has groups that wait for reductions first. An evaluation that has begun is finished, beyond the limit."""
    steps, sizes, times = random_model(random.Random(seed), blocks)
    search = Auto(steps, sizes, times, int(1.5 * peak(steps, sizes, one_ahead(steps))))
    found = search.best()
    assert search.work < 1.3 * _MOST_WORK
    assert found.exposed <= exposed(steps, times, one_ahead(steps))


def test_schedules_are_cached_by_groups_times_and_budget(monkeypatch):
    asked = []

    def counted(*args):
        asked.append(args)
        return Auto(*args)

    monkeypatch.setattr("composable_shard._plan.search.Auto", counted)
    steps, sizes, times = random_model(random.Random(77), 4)
    budget = peak(steps, sizes, one_ahead(steps))
    first = scheduled(steps, sizes, AUTO, budget, times)
    assert scheduled(list(steps), dict(sizes), AUTO, budget, dict(times)) == first
    assert len(asked) == 1
    slower = {fqn: Times(2 * t.forward, t.backward, t.gather, t.reduce) for fqn, t in times.items()}
    scheduled(steps, sizes, AUTO, budget, slower)
    scheduled(steps, sizes, AUTO, budget + 1, times)
    scheduled(steps[:1] + steps[:0:-1], sizes, AUTO, budget, times)
    assert len(asked) == 4


def test_the_schedule_without_groups_is_empty():
    assert scheduled([], {}, AUTO, 1, {}) == Schedule((), (), ())


# ---- invalid values


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: PrefetchPolicy.depth(-1), "PrefetchPolicy.depth=-1"),
        (lambda: PrefetchPolicy.depth(True), "PrefetchPolicy.depth=True"),
        (lambda: PrefetchPolicy.depth(math.nan), "PrefetchPolicy.depth=nan"),
        (lambda: PrefetchPolicy.bytes(-5), "PrefetchPolicy.bytes=-5"),
        (lambda: PrefetchPolicy.bytes(math.nan), "PrefetchPolicy.bytes=nan"),
        (lambda: PrefetchPolicy("eager"), "PrefetchPolicy.kind='eager'"),
        (lambda: PrefetchPolicy("auto", 3), "PrefetchPolicy.amount=3"),
        (lambda: PoolPolicy(-1), "PoolPolicy.budget=-1"),
        (lambda: PoolPolicy(0), "PoolPolicy.budget=0"),
        (lambda: PoolPolicy(math.nan), "PoolPolicy.budget=nan"),
        (lambda: PoolPolicy(keep_idle="no"), "PoolPolicy.keep_idle='no'"),
        (lambda: Costs(math.nan, 1.0, (), ()), "Costs.latency=nan"),
        (lambda: Costs(0.0, -1.0, (), ()), "Costs.bandwidth=-1.0"),
        (lambda: Costs(-1.0, 1.0, (), ()), "Costs.latency=-1.0"),
        (lambda: Costs(0.0, math.nan, (), ()), "Costs.bandwidth=nan"),
        (lambda: Costs(0.0, 0.0, (), ()), "Costs.bandwidth=0"),
        (lambda: Costs(0.0, 1.0, (("a", math.inf),), ()), "Costs.forward\\['a'\\]=inf"),
    ],
)
def test_an_invalid_value_raises_with_its_field(make, field):
    with pytest.raises(ShardConfigValueError, match=field):
        make()


def test_both_reductions_of_a_group_that_is_used_twice_are_held_or_neither():
    weights, reductions = {"a": 2, "b": 8, "c": 2}, {"a": 10, "b": 2, "c": 2}
    steps = [Step(fqn, False, True, True) for fqn in "cbaa"]
    sizes = {fqn: Sizes(1024 * weights[fqn], 0, 1024 * reductions[fqn], frees_queued=True) for fqn in "abc"}
    times = {fqn: Times(1.0, 2.0, 1.0, 6.0) for fqn in "abc"}
    for budget in range(18, 45):
        auto = Auto(steps, sizes, times, 1024 * budget)
        for each in auto.placed(auto.best().schedule):
            assert peak(steps, sizes, each.schedule) == each.peak <= 1024 * budget
