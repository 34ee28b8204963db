"""The history's record of nested forwards, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

from composable_shard._engine.history import History
from composable_shard._plan.schedule import Kind


def begin(history, group):
    group.running = 1
    history.begins(group)


def groups(*fqns):
    return [SimpleNamespace(fqn=fqn, is_root=not fqn, running=0) for fqn in fqns]


def test_a_group_runs_inside_the_last_group_that_began_and_has_not_ended():
    root, outer, inner, other = groups("", "outer", "outer.inner", "other")
    history = History()
    for group in (root, outer, inner):
        begin(history, group)
    inner.running = outer.running = 0
    begin(history, other)
    assert history.order == ["", "outer", "outer.inner", "other"]
    assert history.around == [("outer.inner", "outer")], "the root encloses all groups and is omitted"


def test_forwards_whose_end_was_never_reported_do_not_enclose_later_ones():
    outer, inner, other = groups("outer", "outer.inner", "other")
    history = History()
    for group in (outer, inner):
        begin(history, group)
    outer.running = inner.running = 0  # an interrupt ended both
    for group in (inner, outer, other):
        begin(history, group)
        if group is inner:
            inner.running = 0
    assert history.around == [("outer.inner", "outer"), ("other", "outer")]


def test_the_record_since_a_mark_has_only_later_actions():
    first, second = groups("first", "second")
    history = History()
    begin(history, first)
    history.done += (Kind.UNSHARD, "first", 8)
    mark = history.position()
    first.running = 0
    begin(history, second)
    history.done += (Kind.UNSHARD, "second", 16)
    record = history.since(mark)
    assert (str(record), record.live_bytes, record.order) == ("UNSHARD second", (16,), ("second",))
    assert history.roll(())
    assert history.last.order == ("first", "second")
    assert history.last is history.last
