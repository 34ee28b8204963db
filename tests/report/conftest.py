"""Fixtures for tests of figures."""

from __future__ import annotations

import pytest


@pytest.fixture
def texts(monkeypatch):
    """All texts of the figures that the test draws: labels, legends, tick labels."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    found = []
    save = Figure.savefig

    def note(figure, *args, **kwargs):
        save(figure, *args, **kwargs)
        found.extend(text.get_text() for text in figure.findobj(Text))

    monkeypatch.setattr(Figure, "savefig", note)
    return found
