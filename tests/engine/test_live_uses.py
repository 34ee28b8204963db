"""Uses with a live graph may end in an autograd thread while another thread iterates over them."""

from __future__ import annotations

from types import SimpleNamespace

from composable_shard._engine.node import Uses


class Group(SimpleNamespace):
    __hash__ = object.__hash__


def group():
    settings = SimpleNamespace(current=SimpleNamespace(reduce_unused=False))
    return Group(settings=settings, trains=True, places=(), buckets=[SimpleNamespace(saved=0)])


def test_a_use_may_end_while_another_thread_iterates_over_all_uses():
    uses = Uses()
    made = [uses.begin(group(), -1, 1, under_hooks=False) for _ in range(3)]
    seen = []
    for use in uses:
        seen.append(use)
        uses.graph_gone(made[2])
    assert seen == made
    assert [*uses] == made[:2]
