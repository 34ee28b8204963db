"""What is known of a backward pass: turns, passes within passes, and what is left at the end."""

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
    """Stands for a ParamGroup."""

    places = ()

    trains = True

    buckets = (SimpleNamespace(saved=0),)

    def __init__(self):
        self.options = Options()

    @property
    def settings(self):
        return SimpleNamespace(current=self.options)


class Node:
    """Stands for an autograd node."""

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
    """A stand-in for the autograd engine: which nodes run, and the callbacks at the ends of passes."""
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
def test_gradients_are_handed_over_in_reverse_creation_whatever_the_order_of_firing(firing):
    uses = make_uses(len(firing))
    now, _token = make_pass(uses)
    issued = []
    for place, number in enumerate(firing):
        out = now.in_turn(uses[number], [number])
        assert all(gradients == [use.number] for use, gradients in out)
        issued += [use.number for use, _ in out]
        fired = set(firing[: place + 1])
        ready = [n for n in reversed(range(len(uses))) if all(m in fired for m in range(n, len(uses)))]
        assert issued == ready, "it is issued exactly when all before it have fired"
    assert issued == list(reversed(range(len(uses))))
    assert now.left_over() == []


def test_an_early_use_waits_for_those_before_it():
    uses = make_uses(3)
    now, _token = make_pass(uses)
    assert now.in_turn(uses[0], ["first"]) == []
    assert now.in_turn(uses[1], ["second"]) == []
    assert now.in_turn(uses[2], ["third"]) == [(uses[2], ["third"]), (uses[1], ["second"]), (uses[0], ["first"])]


def test_uses_whose_nodes_do_not_run_are_not_waited_for():
    uses = make_uses(3, runs=lambda number: number != 2)
    now, _token = make_pass(uses)
    assert [now.will_fire(use) for use in uses] == [True, True, False]
    assert now.in_turn(uses[1], []) == [(uses[1], [])]


def test_a_use_whose_node_does_not_run_is_expected_if_its_group_is_reduced_nevertheless_and_holds_nobody_up():
    uses = make_uses(6, runs=lambda number: number in (0, 2, 3))
    for use in uses[1:]:
        use.group.options = Options(reduce_unused=True)
    uses[0].last = 4  # the forward around the next four
    uses[5].forward = 1  # of another forward of the root
    now, _token = make_pass(uses)
    assert [now.will_fire(use) for use in uses] == [True, False, True, True, False, False]
    assert now.next_group() is uses[0].group  # it is around the others
    now.entered.add(uses[0])
    assert now.next_group() is uses[4].group  # other ranks may gather it
    assert now.in_turn(uses[3], []) == [(uses[3], [])]  # its reduction comes at the end of backward, in one order
    assert now.in_turn(uses[4], ["none"]) == [(uses[4], ["none"])]
    assert now.in_turn(uses[0], []) == []
    assert now.in_turn(uses[2], []) == [(uses[2], []), (uses[0], [])]
    assert now.in_turn(uses[5], []) == [(uses[5], [])]


def names(passed):
    return [(use.number, begins) for use, begins, _ in passed]


def test_what_no_gradient_reaches_is_passed_where_other_ranks_reach_it():
    uses = make_uses(6, runs=lambda number: number in (0, 2, 5))
    for use in uses[1:5]:
        use.group.options = Options(reduce_unused=use is not uses[3])
    now, _token = make_pass(uses)
    assert names(now.reach(uses[5])) == []
    passed = now.reach(uses[2])
    assert next(passed) == (uses[4], True, None)
    assert now.next_group() is uses[2].group, "what others gather ahead with that use: no rank asks for the fourth"
    assert next(passed) == (uses[4], False, uses[2].group)
    assert list(passed) == []
    assert names(now.reach(uses[1])) == [], "a gradient reaches its outputs, though not its weights"
    assert names(now.reach(None)) == []
    again, _other = make_pass(uses)
    assert names(again.reach(None)) == [(4, True), (4, False), (1, True), (1, False)]


def test_what_is_passed_ends_where_what_is_inside_of_it_has_ended_and_before_what_is_around_it_ends():
    uses = make_uses(6, runs=lambda number: number in (0, 3, 4))
    for use in (uses[1], uses[2], uses[5]):
        use.group.options = Options(reduce_unused=True)
    uses[0].last, uses[1].last, uses[4].last = 3, 2, 5
    now, _token = make_pass(uses)
    assert names(now.reach(uses[4])) == []
    assert names(now.leave(uses[4])) == [(5, True), (5, False)], "before the group around it ends and is reduced"
    now.entered.add(uses[0])
    assert names(now.reach(uses[0])) == []
    assert names(now.reach(uses[3])) == []
    passed = list(now.leave(uses[0]))
    assert names(passed) == [(1, True), (2, True), (2, False), (1, False)]
    assert [following for *_, following in passed] == [None] * 4


def test_what_is_around_a_use_comes_before_it_though_it_is_reached_later():
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
    known.begin_iteration(waiting=True)
    assert list(known) == [uses[1], uses[0]], "the second forward has no graph any more"
    known.begin_iteration(waiting=False)
    assert list(known) == [uses[1]]


def test_a_use_that_the_pass_does_not_know_is_handed_over_at_once():
    uses, (recomputed,) = make_uses(2), make_uses(1, made_in=1)
    now, _token = make_pass(uses)
    assert now.in_turn(recomputed, ["its"]) == [(recomputed, ["its"])]
    assert not now.will_fire(recomputed)


def test_a_use_whose_graph_is_gone_is_not_waited_for():
    uses = make_uses(2)
    uses[1].node = lambda: None
    now, _token = make_pass(uses)
    assert now.in_turn(uses[0], []) == [(uses[0], [])]


@steadily
@given(st.integers(1, 7).flatmap(lambda n: st.permutations(range(n))), st.integers(0, 7))
def test_what_waited_in_vain_is_left_over_in_order(firing, count):
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


def test_what_an_earlier_pass_has_entered_is_expected_again():
    uses = make_uses(1)
    earlier, _token = make_pass(uses, number=1)
    earlier.entered.add(uses[0])
    now, _token = make_pass(uses, number=2)
    assert now.next_group() is uses[0].group


# ---- passes within passes


def end_of(depth):
    """The innermost passes end, down to a depth: the engine calls, then drops, their callbacks."""
    while len(CALLBACKS) > depth:
        CALLBACKS.pop()()


def test_passes_within_passes_are_counted_from_the_outermost():
    now, _token = make_pass([])
    assert now.note(1) == 0
    assert now.note(5) == 1
    assert now.note(5) == 1
    assert now.note(6) == 2
    assert now.note(1) == 0
    assert len(CALLBACKS) == 2, "a pass is noted once"


def test_a_pass_that_has_ended_counts_no_more():
    now, _token = make_pass([])
    now.note(5)
    end_of(0)
    assert now.note(6) == 1


def test_a_pass_that_has_failed_counts_no_more():
    now, _token = make_pass([])
    now.note(5)
    CALLBACKS.pop()  # a failed pass drops its callbacks uncalled
    assert now.note(6) == 1


def test_the_gradients_of_a_use_are_complete_in_the_pass_right_inside_the_one_of_its_forward():
    (plain,), (recomputed,) = make_uses(1), make_uses(1, made_in=1)
    now, _token = make_pass([plain])
    assert now.completes(plain, 1)
    assert not now.completes(plain, 5), "a checkpoint inside of the module: more may follow"
    assert now.completes(recomputed, 5)
    assert not now.completes(recomputed, 6)
    end_of(0)
    assert now.completes(recomputed, 7)
    assert now.completes(plain, 1)


def test_a_pass_lives_as_long_as_its_token():
    now, token = make_pass([])
    assert now.alive
    del token
    assert not now.alive


# ---- partial gradients


def test_partial_gradients_of_a_use_add_up_and_leave_nothing_behind():
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
