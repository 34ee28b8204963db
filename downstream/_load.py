"""Find and load the files in `rows/`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from _rows import Rows

HERE = Path(__file__).resolve().parent


def files() -> dict[str, Path]:
    """Return the path of each file in `rows/` by its name without the suffix."""
    return {path.stem: path for path in sorted((HERE / "rows").glob("[a-z]*.py"))}


def load(path: Path) -> Rows:
    """Import a file of `rows/`, with the libraries that it needs, and return its rows."""
    sys.path[:0] = [str(path.parent)]
    spec = importlib.util.spec_from_file_location(f"rows_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # some libraries pickle objects that this module defines
    spec.loader.exec_module(module)
    rows = module.rows
    assert isinstance(rows, Rows), f"{path}: `rows` is {rows!r}"
    return rows
