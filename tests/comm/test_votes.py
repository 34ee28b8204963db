"""How ranks vote for a plan that only some of them may want."""

from __future__ import annotations

import pytest
import torch

import composable_shard as cs
from _plans import block_plan
from composable_shard._comm import agreement
from composable_shard._comm.agreement import Ballot, Outcome

P = cs.PrefetchPolicy
LIMIT_S = 60.0  # limit for a hang when ranks disagree


class Store:
    """The key-value store of one process group."""

    def __init__(self, size: int) -> None:
        self.counts: dict[str, int] = {}
        self._size = size
        self.group_name = "g"

    def add(self, key: str, more: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + more
        return self.counts[key]

    def size(self) -> int:
        return self._size


CPU = torch.device("cpu")
ALL_FQNS = frozenset(("", "blocks.0", "blocks.1", "blocks.2"))


def ballot(plan, *groups, forward=1):
    return Ballot(plan, [(group, CPU, ALL_FQNS) for group in groups], ["1"] * len(groups), forward)


@pytest.fixture
def stores(monkeypatch):
    monkeypatch.setattr(agreement, "store_of", lambda group: group)
    return lambda size: Store(size)


def test_a_vote_stays_open_until_a_gather_and_needs_all_ranks(stores):
    group, plan = stores(2), block_plan()
    one, two = ballot(plan, group), ballot(plan, group)
    assert one.count(ALL_FQNS) is Outcome.OPEN, "not cast"
    one.cast()
    one.cast()
    assert one.count(frozenset()) is Outcome.OPEN, "without a gather, other ranks may not have voted yet"
    two.cast()
    assert [each.count(ALL_FQNS) for each in (one, two)] == [Outcome.ALL] * 2


def test_votes_for_different_plans_differ_from_votes_of_only_some_ranks(stores):
    plan, other = block_plan(), block_plan().with_policies(P.depth(2))
    group = stores(2)
    both = [ballot(plan, group), ballot(other, group)]
    for each in both:
        each.cast()
    assert [each.count(ALL_FQNS) for each in both] == [Outcome.APART] * 2
    group = stores(2)
    alone = ballot(plan, group)
    alone.cast()
    assert alone.count(ALL_FQNS) is Outcome.SOME
    late = ballot(plan, group, forward=2)
    late.cast()
    assert late.count(ALL_FQNS) is Outcome.SOME, "a vote of another forward does not count"


def test_a_refusal_reaches_ranks_that_share_no_process_group_with_it(stores):
    """Four ranks in rows and columns. The rank at (1, 1) does not vote."""
    rows, columns, plan = [stores(2), stores(2)], [stores(2), stores(2)], block_plan()
    ranks = [ballot(plan, rows[row], columns[column]) for row, column in ((0, 0), (0, 1), (1, 0))]
    outcomes = []
    for _ in range(2):
        for each in ranks:
            each.cast()
        outcomes.append([each.count(ALL_FQNS) for each in ranks])
        ranks = [each for each, found in zip(ranks, outcomes[-1], strict=True) if found is Outcome.OPEN]
    assert outcomes == [[Outcome.OPEN, Outcome.SOME, Outcome.SOME], [Outcome.SOME]]
