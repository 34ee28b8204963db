"""Finds and loads the files of rows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from _rows import Rows

HERE = Path(__file__).resolve().parent


def files() -> dict[str, Path]:
    """The files of rows by name."""
    return {path.stem: path for path in sorted((HERE / "rows").glob("[a-z]*.py"))}


def load(path: Path) -> Rows:
    """The rows of a file; imports the libraries that it is about."""
    sys.path[:0] = [str(path.parent)]
    spec = importlib.util.spec_from_file_location(f"rows_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # objects of it are pickled by some libraries
    spec.loader.exec_module(module)
    rows = module.rows
    assert isinstance(rows, Rows), f"{path}: `rows` is {rows!r}"
    return rows
