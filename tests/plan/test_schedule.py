"""Actions as text, and the planned actions of a training step."""

from __future__ import annotations

from collections import Counter

from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_shard._plan.schedule import MAX_REDUCTIONS, Action, Kind, Step, training_step

steadily = settings(deadline=None, derandomize=True)


def text(actions):
    return "\n".join(map(str, actions))


def block_steps(blocks=3, reshard=True):
    return [Step(f"blocks.{i}", False, reshard, True) for i in range(blocks)]


@st.composite
def models(draw):
    """Groups in the order of their forwards. At most one is the root, at any position."""
    count = draw(st.integers(1, 7))
    root = draw(st.integers(0, count))  # `count` means no root
    flags = st.booleans()
    return [Step("" if i == root else f"m{i}", i == root, draw(flags), draw(flags)) for i in range(count)]


# ---- text


def test_the_text_of_an_action_contains_kind_and_group():
    assert str(Action(Kind.UNSHARD, "layers.3")) == "UNSHARD layers.3"
    assert str(Action(Kind.REDUCED, "")) == "REDUCED (root)"


# ---- goldens


def test_a_step_of_three_blocks_and_a_root_prefetches_one_block_and_reduces_each():
    assert_expected_inline(
        text(training_step([Step("", True, False, True), *block_steps()])),
        """\
UNSHARD (root)
WAIT (root)
UNSHARD blocks.0
WAIT blocks.0
UNSHARD blocks.1
RESHARD blocks.0
WAIT blocks.1
UNSHARD blocks.2
RESHARD blocks.1
WAIT blocks.2
RESHARD blocks.2
UNSHARD blocks.2
WAIT blocks.2
UNSHARD blocks.1
RESHARD blocks.2
REDUCE blocks.2
WAIT blocks.1
UNSHARD blocks.0
RESHARD blocks.1
REDUCE blocks.1
WAIT blocks.0
RESHARD blocks.0
REDUCED blocks.2
REDUCE blocks.0
RESHARD (root)
REDUCED blocks.1
REDUCE (root)
REDUCED blocks.0
REDUCED (root)""",
    )


def test_a_step_of_blocks_that_stay_unsharded_gathers_each_once():
    assert_expected_inline(
        text(training_step([Step("", True, False, True), *block_steps(2, reshard=False)])),
        """\
UNSHARD (root)
WAIT (root)
UNSHARD blocks.0
WAIT blocks.0
UNSHARD blocks.1
WAIT blocks.1
RESHARD blocks.1
REDUCE blocks.1
RESHARD blocks.0
REDUCE blocks.0
RESHARD (root)
REDUCED blocks.1
REDUCE (root)
REDUCED blocks.0
REDUCED (root)""",
    )


def test_a_step_of_a_single_group_has_one_gather_and_one_reduction():
    assert_expected_inline(
        text(training_step([Step("", True, False, True)])),
        """\
UNSHARD (root)
WAIT (root)
RESHARD (root)
REDUCE (root)
REDUCED (root)""",
    )


def test_a_root_that_reshards_is_gathered_again_for_backward():
    assert_expected_inline(
        text(training_step([Step("", True, True, True), *block_steps(1)])),
        """\
UNSHARD (root)
WAIT (root)
UNSHARD blocks.0
WAIT blocks.0
RESHARD blocks.0
RESHARD (root)
UNSHARD (root)
WAIT (root)
UNSHARD blocks.0
WAIT blocks.0
RESHARD blocks.0
REDUCE blocks.0
RESHARD (root)
REDUCE (root)
REDUCED blocks.0
REDUCED (root)""",
    )


# ---- properties


@steadily
@given(models())
def test_each_gather_is_waited_for_and_resharded(steps):
    phases = {step.fqn: Kind.RESHARD for step in steps}
    after = {Kind.RESHARD: Kind.UNSHARD, Kind.UNSHARD: Kind.WAIT, Kind.WAIT: Kind.RESHARD}
    for action in training_step(steps):
        if action.kind in after.values():
            assert after[phases[action.fqn]] is action.kind, action
            phases[action.fqn] = action.kind
    assert set(phases.values()) == {Kind.RESHARD}


@steadily
@given(models())
def test_each_trained_group_is_reduced_once_and_frozen_groups_are_not(steps):
    for kind in (Kind.REDUCE, Kind.REDUCED):
        counts = Counter(a.fqn for a in training_step(steps) if a.kind is kind)
        assert counts == {step.fqn: 1 for step in steps if step.trains}


@steadily
@given(models())
def test_reductions_end_in_order_and_at_most_two_are_in_flight(steps):
    flying = []
    for action in training_step(steps):
        if action.kind is Kind.REDUCE:
            flying.append(action.fqn)
        elif action.kind is Kind.REDUCED:
            assert flying.pop(0) == action.fqn
        assert len(flying) <= MAX_REDUCTIONS
    assert not flying


@steadily
@given(models())
def test_at_most_one_gather_is_ahead_of_the_running_group(steps):
    gathering = set()
    for action in training_step(steps):
        if action.kind is Kind.UNSHARD:
            gathering.add(action.fqn)
        elif action.kind is Kind.WAIT:
            gathering.discard(action.fqn)
        assert len(gathering) <= 1


@steadily
@given(models())
def test_weights_are_resharded_before_the_reduction_is_issued(steps):
    actions = training_step(steps)
    for place, action in enumerate(actions):
        if action.kind is Kind.REDUCE:
            last = max(i for i, a in enumerate(actions) if a == Action(Kind.RESHARD, action.fqn))
            assert last < place


@steadily
@given(models())
def test_a_group_is_gathered_twice_if_and_only_if_it_reshards_after_forward(steps):
    counts = Counter(a.fqn for a in training_step(steps) if a.kind is Kind.UNSHARD)
    assert counts == {step.fqn: 2 if step.reshard_after_forward else 1 for step in steps}


def test_a_step_without_groups_has_no_actions():
    assert training_step([]) == ()
