"""Figures show the given values. If they cannot be drawn, the error names the missing part."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, replace

import pytest

import composable_shard as cs
from _plans import block_plan, costs_of
from composable_shard._plan.record import Span
from composable_shard._plan.schedule import Kind
from composable_shard.planner import Shape, draw
from composable_shard.report import memory, time


@dataclass(frozen=True)
class FakeRecord:
    """The part of a record that a figure reads."""

    actions: tuple[str, ...]
    live_bytes: tuple[int, ...]


RECORD = FakeRecord(("UNSHARD a", "UNSHARD b", "RESHARD a", "REDUCE b"), (1 << 20, 3 << 20, 2 << 20, 2 << 20))


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_the_figure_of_a_plan_shows_categories_offsets_and_the_budget(tmp_path, texts):
    plan = block_plan()
    budget = 8 * plan.peak_bytes
    plan = plan.with_policies(cs.PrefetchPolicy.auto(), cs.PoolPolicy(budget=budget), costs_of(plan, bandwidth=5e8))
    assert plan.effective_schedule().kept != ("",)
    memory(plan, tmp_path / "plan.png", RECORD)
    assert is_picture(tmp_path / "plan.png")
    shown = {"weights kept after forward", "landing buffers", "reductions", "measured, peak 3.00 MiB"}
    assert shown | {f"budget {budget / 2**20:.2f} MiB", "UNSHARD (root)", "blocks.1"} <= set(texts)
    first = plan.actions()[plan.live_bytes().index(plan.peak_bytes)]
    assert f"Where the memory of a step goes: peak {plan.peak_bytes / 2**20:.2f} MiB, first at {first}" in texts
    assert " backward" in texts
    arena = plan.arena()
    gap = f"{100 * (arena.nbytes / arena.bound - 1):.1f} % above the lower bound of {arena.bound / 2**20:.2f} MiB"
    assert f"Places in the arena: {arena.nbytes / 2**20:.2f} MiB, {gap}" in texts


def test_the_bytes_by_category_add_up_to_those_of_the_plan(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    plan, drawn, stairs = block_plan(), [], Axes.stairs

    def note(axes, values, *args, **kwargs):
        drawn.append(values)
        return stairs(axes, values, *args, **kwargs)

    monkeypatch.setattr(Axes, "stairs", note)
    memory(plan, tmp_path / "plan.png")
    assert [round(mib * 2**20) for mib in drawn[-1]] == list(plan.live_bytes())
    assert len(drawn) == 4, "the root is kept, blocks are not, and there is no record"


def drawn_by(monkeypatch, name):
    """Record the arguments of all later calls of a method of axes, by position and by name."""
    from matplotlib.axes import Axes

    calls, method = [], getattr(Axes, name)

    def note(axes, *args, **kwargs):
        calls.append((args, kwargs))
        return method(axes, *args, **kwargs)

    monkeypatch.setattr(Axes, name, note)
    return calls


def test_the_parts_of_a_step_add_up_to_its_time_and_to_the_waits_of_its_groups(tmp_path, monkeypatch, texts):
    plan = block_plan()
    plan = plan.with_policies(costs=costs_of(plan, bandwidth=5e8))
    predicted, horizontal = plan.predicted(), drawn_by(monkeypatch, "barh")
    vertical = drawn_by(monkeypatch, "bar")
    time(plan, tmp_path / "time.png")
    assert is_picture(tmp_path / "time.png")
    parts = {kwargs["label"]: widths[0] for (_, widths), kwargs in horizontal}
    assert list(parts) == ["forward", "backward", "waiting for gathers", "waiting for reductions"]
    assert parts["forward"] == pytest.approx(4 * 0.2)
    assert parts["backward"] == pytest.approx(4 * 0.4)
    assert sum(parts.values()) == pytest.approx(1e3 * predicted.seconds)
    waits = [sum(kinds) for kinds in zip(*(args[1] for args, _ in vertical if args), strict=True)]
    assert waits == pytest.approx([1e3 * group.exposed for group in predicted.groups])
    assert {"(root)", "blocks.2", f"predicted\n{1e3 * predicted.seconds:,.2f} ms"} <= set(texts)


def test_measured_parts_are_drawn_below_the_predicted_ones(tmp_path, monkeypatch):
    plan = block_plan(rows=(256,))
    plan = plan.with_policies(costs=costs_of(plan))
    spans = (
        Span(Kind.FORWARD, "", 0.0, 0.005),
        Span(Kind.FORWARD, "blocks.0", 0.001, 0.004),
        Span(Kind.WAIT, "blocks.0", 0.001, 0.003),
        Span(Kind.BACKWARD, "blocks.0", 0.007, 0.010),
        Span(Kind.REDUCED, "blocks.0", 0.008, 0.0085),
    )
    horizontal, marks = drawn_by(monkeypatch, "barh"), drawn_by(monkeypatch, "plot")
    time(plan, tmp_path / "time.png", cs.Record((), (), plan.order, spans=spans))
    measured = {kwargs["label"]: widths[1] for (_, widths), kwargs in horizontal}
    assert measured == pytest.approx(
        {
            "forward": 3.0,
            "backward": 2.5,
            "waiting for gathers": 2.0,
            "waiting for reductions": 0.5,
            "outside of groups": 2.0,
        }
    )
    [((_, waited, _), _)] = marks
    assert waited == pytest.approx([0.0, 2.5])


def test_of_many_groups_only_those_with_the_longest_waits_are_drawn(tmp_path, texts):
    plan = block_plan((64,) * 30 + (2048,))
    time(plan.with_policies(costs=costs_of(plan)), tmp_path / "time.png")
    assert "blocks.30" in texts
    assert "Exposed communication by group, in the order of forward; 8 groups with less are not shown" in texts


def test_the_figure_of_strategies_shows_the_memory_and_the_time_of_each(tmp_path, monkeypatch, texts):
    shape = Shape(layers=1, width=64, heads=4, vocabulary=256, sequence=64)
    machine = replace(cs.planner.KNOWN["rtx4090"], memory=40 << 20)
    advice = cs.planner.advise(shape, devices=4, machine=machine, batch=16)
    bars, lines = drawn_by(monkeypatch, "barh"), drawn_by(monkeypatch, "plot")
    draw(advice, tmp_path / "strategies.png", most=8)
    assert is_picture(tmp_path / "strategies.png")
    estimates = [advice.recommended, *(each for each in advice.estimates if each is not advice.recommended)][:8]
    kinds = {kwargs["label"]: sizes for (_, sizes), kwargs in bars}
    for row, estimate in enumerate(estimates):
        most = estimate.memory.most
        assert kinds["activations"][row] == most.activations / 2**30
        assert sum(sizes[row] for sizes in kinds.values()) == pytest.approx(most.total / 2**30)
        fits = "" if estimate.fits else "does not fit; "
        assert f"{fits}{estimate.time.seconds:.3g} s, {estimate.exposed_share:.0%} exposed" in texts
    assert f"{advice.recommended.strategy} (recommended)" in texts
    here = {kwargs["label"]: seconds[4] for (_, seconds), kwargs in lines}
    [ddp] = [seconds for label, seconds in here.items() if "ddp" in label.split(", ")]
    expected = next(each for each in advice.estimates if str(each.strategy) == "ddp")
    assert ddp == pytest.approx(expected.time.seconds, rel=1e-2)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    ordinary = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return ordinary(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match="not installed: pip install matplotlib"):
        memory(block_plan(), tmp_path / "plan.png")
