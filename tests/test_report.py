"""The figures show what they were given, and say what is missing when they cannot."""

from __future__ import annotations

import builtins
import json
from dataclasses import dataclass

import pytest

from composable_shard.report import plot_loss, plot_memory, plot_resident_memory, read_metrics

ROWS = [{"step": i, "loss": 5.0 / i, "seconds": 0.1 * i, "memory_bytes": (100 + i) << 20} for i in range(1, 30)]
ROWS[9]["held_out"] = 1.2
ROWS[19]["held_out"] = 0.8


@dataclass(frozen=True)
class FakeRecord:
    """As much of a record as a figure reads."""

    actions: tuple[str, ...]
    live_bytes: tuple[int, ...]


RECORD = FakeRecord(("UNSHARD a", "UNSHARD b", "RESHARD a", "REDUCE b"), (1 << 20, 3 << 20, 2 << 20, 2 << 20))


@pytest.fixture
def texts(monkeypatch):
    """Every text of the figures drawn in this test: labels, legends, tick labels."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    found = []
    save = Figure.savefig

    def note(figure, *args, **kwargs):
        save(figure, *args, **kwargs)
        found.extend(text.get_text() for text in figure.findobj(Text))

    monkeypatch.setattr(Figure, "savefig", note)
    return found


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_the_loss_figure_shows_training_held_out_and_references(tmp_path, texts):
    plot_loss(ROWS, tmp_path / "loss.png", references={"bigram entropy": 2.43})
    assert is_picture(tmp_path / "loss.png")
    assert {"training", "held out", "bigram entropy 2.43"} <= set(texts)


def test_the_loss_figure_reads_a_metrics_file_whose_last_line_was_cut(tmp_path, texts):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"step": 30, "lo')
    assert read_metrics(metrics) == ROWS
    plot_loss(metrics, tmp_path / "loss.png")
    assert is_picture(tmp_path / "loss.png")
    assert "training" in texts


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0}\nnonsense\n{"step": 2, "loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"line 2: not a JSON object"):
        read_metrics(metrics)


def test_the_memory_figure_shows_each_action_and_both_peaks(tmp_path, texts):
    plot_memory(RECORD, tmp_path / "memory.png", predicted_peak=4 << 20)
    assert is_picture(tmp_path / "memory.png")
    assert {"UNSHARD a", "REDUCE b"} <= set(texts)
    assert {"peak 3.00 MiB", "predicted peak 4.00 MiB"} <= set(texts)


def test_the_resident_memory_figure_stands_in_where_there_is_no_record(tmp_path, texts):
    plot_resident_memory(ROWS, tmp_path / "memory.png")
    assert is_picture(tmp_path / "memory.png")
    assert "memory of one process (MiB)" in texts


def test_nothing_to_draw_is_an_error_that_says_what_to_do(tmp_path):
    path = tmp_path / "none.png"
    with pytest.raises(ValueError, match="train at least one step"):
        plot_loss([{"step": 1}], path)
    with pytest.raises(ValueError, match="run one whole iteration"):
        plot_memory(FakeRecord((), ()), path)
    with pytest.raises(ValueError, match="`seconds` and `memory_bytes`"):
        plot_resident_memory([{"step": 1}], path)
    assert not path.exists()


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    ordinary = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return ordinary(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"composable-shard\[plot\]"):
        plot_loss(ROWS, tmp_path / "loss.png")
