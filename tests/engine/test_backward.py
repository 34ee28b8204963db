"""The state of a backward pass: turns, nested passes, and what remains at the end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_shard._engine import backward
from composable_shard._engine.backward import BackwardPass, Token
from composable_shard._engine.node import Use, Uses
from composable_shard._policies import Options

steadily = settings(deadline=None, derandomize=True)


class Group:
    """Replaces a ParamGroup."""

    places = ()

    trains = True

    buckets = (SimpleNamespace(saved=0),)

    def __init__(self):
        self.options = Options()

    @property
    def settings(self):
        return SimpleNamespace(current=self.options)


class Node:
    """Replaces an autograd node."""

    def __init__(self, will_run=True):
        self.will_run = will_run


def make_uses(count, made_in=-1, runs=lambda number: True):
    uses, keep = [], []
    for number in range(count):
        use, node = Use(Group(), number, made_in), Node(runs(number))
        use.node = lambda node=node: node
        uses.append(use)
        keep.append(node)
    return uses


@pytest.fixture(autouse=True)
def _engine(monkeypatch):
    """Replace the autograd engine: which nodes run, and the callbacks at the ends of passes."""
    monkeypatch.setattr(backward, "node_will_run", lambda node: node.will_run)
    monkeypatch.setattr(backward, "queue_backward_callback", CALLBACKS.append)
    yield
    CALLBACKS.clear()


CALLBACKS: list = []


def make_pass(uses, number=1):
    token = Token()
    return BackwardPass(number, token, uses), token


# ---- turns


@steadily
@given(st.integers(0, 7).flatmap(lambda n: st.permutations(range(n))))
def test_gradients_are_handed_over_in_reverse_creation_order_for_any_firing_order(firing):
    uses = make_uses(len(firing))
    now, _token = make_pass(uses)
    issued = []
    for place, number in enumerate(firing):
        out = now.in_turn(uses[number], [number])
        assert all(gradients == [use.number] for use, gradients in out)
        issued += [use.number for use, _ in out]
        fired = set(firing[: place + 1])
        ready = [n for n in reversed(range(len(uses))) if all(m in fired for m in range(n, len(uses)))]
        assert issued == ready, "a use is issued exactly when all before it have fired"
    assert issued == list(reversed(range(len(uses))))
    assert now.left_over() == []


def test_a_use_that_fires_early_waits_for_those_before_it():
    uses = make_uses(3)
    now, _token = make_pass(uses)
    assert now.in_turn(uses[0], ["first"]) == []
    assert now.in_turn(uses[1], ["second"]) == []
    assert now.in_turn(uses[2], ["third"]) == [(uses[2], ["third"]), (uses[1], ["second"]), (uses[0], ["first"])]


def test_no_use_waits_for_one_whose_node_does_not_run():
    uses = make_uses(3, runs=lambda number: number != 2)
    now, _token = make_pass(uses)
    assert [use in now.will_fire for use in uses] == [True, True, False]
    assert now.in_turn(uses[1], []) == [(uses[1], [])]


def test_a_use_with_reduce_unused_is_expected_without_its_node_and_blocks_no_other_use():
    uses = make_uses(6, runs=lambda number: number in (0, 2, 3))
    for use in uses[1:]:
        use.group.options = Options(reduce_unused=True)
    uses[0].last = 4  # encloses the next four
    uses[5].forward = 1  # of another root forward
    now, _token = make_pass(uses)
    assert [use in now.will_fire for use in uses] == [True, False, True, True, False, False]
    assert now.next_group() is uses[0].group  # it encloses the others
    now.entered.add(uses[0])
    assert now.next_group() is uses[4].group  # other ranks may gather it
    assert now.in_turn(uses[3], []) == [(uses[3], [])]  # it is reduced at the end of backward, in the same order
    assert now.in_turn(uses[4], ["none"]) == [(uses[4], ["none"])]
    assert now.in_turn(uses[0], []) == []
    assert now.in_turn(uses[2], []) == [(uses[2], []), (uses[0], [])]
    assert now.in_turn(uses[5], []) == [(uses[5], [])]


def names(passed):
    return [(use.number, begins) for use, begins, _ in passed]


def test_a_use_that_gets_no_gradient_is_skipped_where_other_ranks_reach_it():
    uses = make_uses(6, runs=lambda number: number in (0, 2, 5))
    for use in uses[1:5]:
        use.group.options = Options(reduce_unused=use is not uses[3])
    now, _token = make_pass(uses)
    assert names(now.reach(uses[5])) == []
    passed = now.reach(uses[2])
    assert next(passed) == (uses[4], True, None)
    assert now.next_group() is uses[2].group, "the prefetch of ranks that reach that use: none expects the fourth"
    assert next(passed) == (uses[4], False, uses[2].group)
    assert list(passed) == []
    assert names(now.reach(uses[1])) == [], "its outputs get a gradient, but its weights do not"
    assert names(now.reach(None)) == []
    again, _other = make_pass(uses)
    assert names(again.reach(None)) == [(4, True), (4, False), (1, True), (1, False)]


def test_a_skipped_use_ends_after_its_enclosed_uses_and_before_its_enclosing_use():
    uses = make_uses(6, runs=lambda number: number in (0, 3, 4))
    for use in (uses[1], uses[2], uses[5]):
        use.group.options = Options(reduce_unused=True)
    uses[0].last, uses[1].last, uses[4].last = 3, 2, 5
    now, _token = make_pass(uses)
    assert names(now.reach(uses[4])) == []
    assert names(now.leave(uses[4])) == [(5, True), (5, False)], "before the enclosing group ends and is reduced"
    now.entered.add(uses[0])
    assert names(now.reach(uses[0])) == []
    assert names(now.reach(uses[3])) == []
    passed = list(now.leave(uses[0]))
    assert names(passed) == [(1, True), (2, True), (2, False), (1, False)]
    assert [following for *_, following in passed] == [None] * 4


def test_an_enclosing_use_comes_first_even_if_it_is_reached_later():
    uses = make_uses(4)
    uses[0].last = uses[1].last = 2
    now, _token = make_pass(uses)
    now.entered.add(uses[3])
    assert now.next_group() is uses[0].group
    assert names(now.reach(uses[2])) == [(0, True), (1, True)]
    now.entered.add(uses[2])
    assert now.next_group() is None
    again, _other = make_pass(uses, number=2)
    again.entered.update([uses[0], uses[1], uses[3]])
    assert names(again.reach(uses[2])) == []


def test_lost_uses_are_forgotten_with_the_last_graph_of_their_forward():
    known = Uses()
    uses = [known.begin(Group(), -1, forward, False) for forward in (1, 1, 2, 2)]
    for use in uses:
        use.group.options = Options(reduce_unused=True)
    known.graph_gone(uses[0])
    known.graph_gone(uses[2])
    known.graph_gone(uses[3])
    known.forget_lost(waiting=True)
    assert list(known) == [uses[1], uses[0]], "the second forward has no graph any more"
    known.forget_lost(waiting=False)
    assert list(known) == [uses[1]]


def test_a_use_unknown_to_the_pass_is_handed_over_immediately():
    uses, (recomputed,) = make_uses(2), make_uses(1, made_in=1)
    now, _token = make_pass(uses)
    assert now.in_turn(recomputed, ["its"]) == [(recomputed, ["its"])]
    assert recomputed not in now.will_fire


def test_no_use_waits_for_one_whose_graph_was_freed():
    uses = make_uses(2)
    uses[1].node = lambda: None
    now, _token = make_pass(uses)
    assert now.in_turn(uses[0], []) == [(uses[0], [])]


@steadily
@given(st.integers(1, 7).flatmap(lambda n: st.permutations(range(n))), st.integers(0, 7))
def test_uses_that_never_got_their_turn_are_left_over_in_order(firing, count):
    uses = make_uses(len(firing))
    now, _token = make_pass(uses)
    fired = firing[:count]
    issued = [use.number for number in fired for use, _ in now.in_turn(uses[number], [number])]
    left = [use.number for use, _ in now.left_over()]
    assert left == sorted(left, reverse=True)
    assert sorted(issued + left) == sorted(fired)
    assert now.left_over() == []


# ---- what comes next


def test_the_next_group_is_the_last_use_that_backward_has_not_entered():
    uses = make_uses(3)
    now, _token = make_pass(uses)
    assert now.next_group() is uses[2].group
    now.entered.add(uses[2])
    assert now.next_group() is uses[1].group
    now.entered.add(uses[0])
    assert now.next_group() is uses[1].group
    now.entered.add(uses[1])
    assert now.next_group() is None


def test_uses_entered_by_an_earlier_pass_are_expected_again():
    uses = make_uses(1)
    earlier, _token = make_pass(uses, number=1)
    earlier.entered.add(uses[0])
    now, _token = make_pass(uses, number=2)
    assert now.next_group() is uses[0].group


# ---- nested passes


def end_of(depth):
    """End the innermost passes, down to a depth: the engine calls, then drops, their callbacks."""
    while len(CALLBACKS) > depth:
        CALLBACKS.pop()()


def test_nested_passes_are_counted_from_the_outermost():
    now, _token = make_pass([])
    assert now.note(1) == 0
    assert now.note(5) == 1
    assert now.note(5) == 1
    assert now.note(6) == 2
    assert now.note(1) == 0
    assert len(CALLBACKS) == 2, "a pass is noted once"


def test_a_pass_that_has_ended_is_not_counted():
    now, _token = make_pass([])
    now.note(5)
    end_of(0)
    assert now.note(6) == 1


def test_a_pass_that_has_failed_is_not_counted():
    now, _token = make_pass([])
    now.note(5)
    CALLBACKS.pop()  # a failed pass drops its callbacks uncalled
    assert now.note(6) == 1


def test_the_gradients_of_a_use_are_complete_in_a_pass_nested_directly_in_that_of_its_forward():
    (plain,), (recomputed,) = make_uses(1), make_uses(1, made_in=1)
    now, _token = make_pass([plain])
    assert now.completes(plain, 1)
    assert not now.completes(plain, 5), "a checkpoint inside the module: more gradients may follow"
    assert now.completes(recomputed, 5)
    assert not now.completes(recomputed, 6)
    end_of(0)
    assert now.completes(recomputed, 7)
    assert now.completes(plain, 1)


def test_a_pass_is_alive_as_long_as_its_token():
    now, token = make_pass([])
    assert now.alive
    del token
    assert not now.alive


# ---- partial gradients


def test_partial_gradients_of_a_use_are_summed_and_then_released():
    import torch

    (use,) = make_uses(1)
    one = torch.ones(2)
    use.keep([one, None, None])
    use.keep([one, one, None])
    total = use.complete([one, None, None])
    assert [None if g is None else g.tolist() for g in total] == [
        [3.0, 3.0],
        [1.0, 1.0],
        None,
    ]
    assert use.partial is None
