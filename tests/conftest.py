"""Ends the worker pool with the session; see _pool.py."""

from __future__ import annotations

import sys
from pathlib import Path

pytest_plugins = ["pytest_composable_shard"]  # also where the package is not installed

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # the helpers (_pool, _parity) import each other by name, in pytest and in the workers
    sys.path.insert(0, HERE)


def pytest_unconfigure() -> None:
    from _pool import POOL

    POOL.close()
