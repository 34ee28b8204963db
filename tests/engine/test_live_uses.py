"""The uses whose graphs live may end, in a thread of autograd, while another thread goes through them."""

from __future__ import annotations

from types import SimpleNamespace

from composable_shard._engine.node import Uses


class Group(SimpleNamespace):
    __hash__ = object.__hash__


def group():
    settings = SimpleNamespace(current=SimpleNamespace(reduce_unused=False))
    return Group(settings=settings, trains=True, places=(), buckets=[SimpleNamespace(saved=0)])


def test_a_use_that_ends_while_all_are_gone_through_does_not_disturb():
    uses = Uses()
    made = [uses.begin(group(), -1, 1, under_hooks=False) for _ in range(3)]
    seen = []
    for use in uses:
        seen.append(use)
        uses.graph_gone(made[2])
    assert seen == made
    assert [*uses] == made[:2]
