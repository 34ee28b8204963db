"""Schedules of groups that run inside other groups, or several times."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

import composable_shard as cs
from composable_shard._plan.costs import Sizes, Times
from composable_shard._plan.fitting import fitting, least_step
from composable_shard._plan.schedule import Kind, Step, backward_order, one_ahead, timed_step, training_step
from composable_shard._plan.search import scheduled
from composable_shard._plan.simulation import lifetimes, live_bytes, predict, simulate

P = cs.PrefetchPolicy
steadily = settings(deadline=None, derandomize=True)


def text(actions):
    return "\n".join(map(str, actions))


def test_an_enclosing_group_stays_unsharded_and_begins_first_in_backward():
    block = Step("block", False, True, True)
    inner = [Step(fqn, False, True, True, around=("block",)) for fqn in ("block.a", "block.b")]
    steps = [Step("", True, False, True), block, *inner, Step("next", False, True, True)]
    assert [step.fqn for step in backward_order(steps)] == ["", "next", "block", "block.b", "block.a"]
    assert_expected_inline(
        text(timed_step(steps, fitting(steps, sizes_of(steps), None).schedule)),
        """\
FORWARD (root)
UNSHARD (root)
WAIT (root)
FORWARD block
UNSHARD block
WAIT block
FORWARD block.a
UNSHARD block.a
WAIT block.a
RESHARD block.a
FORWARD block.b
UNSHARD block.b
WAIT block.b
RESHARD block.b
RESHARD block
FORWARD next
UNSHARD next
WAIT next
RESHARD next
BACKWARD (root)
BACKWARD next
UNSHARD next
WAIT next
RESHARD next
REDUCE next
BACKWARD block
UNSHARD block
WAIT block
BACKWARD block.b
UNSHARD block.b
WAIT block.b
RESHARD block.b
REDUCE block.b
BACKWARD block.a
UNSHARD block.a
WAIT block.a
RESHARD block.a
REDUCED next
REDUCE block.a
RESHARD block
REDUCED block.b
REDUCE block
RESHARD (root)
REDUCED block.a
REDUCE (root)
REDUCED block
REDUCED (root)""",
    )


def test_consecutive_uses_of_a_group_share_a_gather_in_backward_and_reduce_separately():
    steps = [Step("a", False, True, True), Step("a", False, True, True)]
    assert_expected_inline(
        text(training_step(steps)),
        """\
UNSHARD a
WAIT a
RESHARD a
UNSHARD a
WAIT a
RESHARD a
UNSHARD a
WAIT a
REDUCE a
RESHARD a
REDUCE a
REDUCED a
REDUCED a""",
    )


def on_two_meshes(*modules):
    pairs = [(Step(fqn, False, True, True), Step(f"{fqn} on ep", False, True, True, around=(fqn,))) for fqn in modules]
    return [step for pair in pairs for step in pair]


def test_groups_of_one_module_are_prefetched_together():
    steps = on_two_meshes("a", "b", "c", "d")
    edges = [scheduled(steps, sizes_of(steps), P.depth(depth)) for depth in (0, 1, 2)]
    assert edges[1] == one_ahead(steps)
    shown = [f"{fqn}: {', '.join(ahead)}" for schedule in edges for fqn, ahead in schedule.forward if ahead]
    assert_expected_inline(
        "\n".join(shown),
        """\
a: a on ep
b: b on ep
c: c on ep
d: d on ep
a: a on ep, b, b on ep
b: c, c on ep
c: d, d on ep
a: a on ep, b, b on ep, c, c on ep
b: d, d on ep""",
    )


def test_gradients_that_some_ranks_lack_are_reduced_after_backward_in_a_fixed_order():
    steps = [Step("a", False, True, True, turn=1), Step("b", False, True, True), Step("c", False, True, True, turn=0)]
    assert_expected_inline(
        text(action for action in training_step(steps) if action.kind in (Kind.REDUCE, Kind.REDUCED)),
        """\
REDUCE b
REDUCE c
REDUCED b
REDUCE a
REDUCED c
REDUCED a""",
    )


def sizes_of(steps):
    return {step.fqn: Sizes(1024, 512, 2048) for step in steps}


@st.composite
def nests(draw):
    """Uses of a few groups, some inside others, with or without a root."""
    names = [f"m{i}" for i in range(draw(st.integers(1, 4)))]
    outer = {name: draw(st.sampled_from([None, *names[:at]])) for at, name in enumerate(names)}
    flags = {name: (draw(st.booleans()), draw(st.booleans())) for name in names}
    uses = draw(st.lists(st.sampled_from(names), min_size=1, max_size=8))
    steps = [
        Step(name, False, *flags[name], reduces_first=draw(st.booleans()), around=(outer[name],) if outer[name] else ())
        for name in uses
    ]
    return [Step("", True, draw(st.booleans()), True), *steps] if draw(st.booleans()) else steps


@steadily
@given(nests(), st.integers(0, 3))
def test_weights_are_unsharded_while_a_use_or_a_group_inside_it_runs(steps, depth):
    sizes = sizes_of(steps)
    schedule = scheduled(steps, sizes, P.depth(depth))
    resident, reducing = set(), []
    for action in timed_step(steps, schedule):
        if action.kind is Kind.WAIT:
            resident.add(action.fqn)
        elif action.kind is Kind.RESHARD:
            resident.remove(action.fqn)
        elif action.kind is Kind.REDUCE:
            reducing.append(action.fqn)
        elif action.kind is Kind.REDUCED:
            assert reducing.pop(0) == action.fqn
    assert not resident
    assert not reducing
    reduced = [action.fqn for action in training_step(steps, schedule) if action.kind is Kind.REDUCE]
    assert sorted(reduced) == sorted(step.fqn for step in steps if step.trains)


@steadily
@given(nests(), st.integers(0, 3), st.integers(0, 3))
def test_every_policy_stays_within_an_accepted_budget(steps, depth, more):
    sizes = sizes_of(steps)
    budget = least_step(steps, sizes).peak + 512 * more
    schedule = scheduled(steps, sizes, P.depth(depth), budget)
    actions = timed_step(steps, schedule)
    assert max(live_bytes(lifetimes(actions, sizes), len(actions))) <= budget
    with pytest.raises(cs.errors.PoolBudgetError) as caught:
        scheduled(steps, sizes, P.depth(depth), least_step(steps, sizes).peak - 1)
    assert caught.value.least == least_step(steps, sizes).peak


@settings(steadily, max_examples=25)
@given(nests(), st.sampled_from([0.2, 1.0, 3.0]))
def test_auto_waits_no_longer_than_one_ahead_and_times_add_up(steps, link):
    sizes = sizes_of(steps)
    times = {fqn: Times(1.0, 2.0, link, link) for fqn in sizes}
    default, auto = (scheduled(steps, sizes, policy, None, times) for policy in (P.depth(1), P.auto()))
    found = [simulate(timed_step(steps, schedule), times) for schedule in (default, auto)]
    assert found[1].exposed <= found[0].exposed + 1e-9
    for timeline in found:
        assert timeline.compute == pytest.approx(3.0 * len(steps))
        assert timeline.seconds == pytest.approx(timeline.compute + timeline.exposed)
    predicted = predict(timed_step(steps, auto), sizes, times)
    assert sum(group.compute for group in predicted.groups) == pytest.approx(3.0 * len(steps))
