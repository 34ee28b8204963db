"""Configuration of the tests. See _pool.py for the worker pool."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytest_composable_shard"]  # needed if the package is not installed

# Set one thread per process before torch is imported. With more, the threads of small operators wait for those of other
# processes, and a test on two cores takes up to ten times as long. Processes that tests start inherit the setting.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In a background job of a shell, this process ignores Ctrl-C, and so would all processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # the helpers (_pool, _parity) import each other by name, in pytest and in the workers
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session")
def torch_is_loaded() -> None:
    """Import all modules that worlds import late. pytester unloads the modules that its runs import.

    torch cannot be imported a second time.
    """
    import torch
    import torch._dynamo
    import torch._inductor.test_operators

    from composable_shard import testing
    from composable_shard.testing import _pytest  # noqa: F401

    testing.assert_matches_unsharded(lambda: torch.nn.Linear(2, 2), lambda batch, step: torch.ones(1, 2), steps=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all except the first and the last parameter set of a test, so that `make test` runs only these two."""
    sets: dict[tuple[object, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("matrix") is None:
            sets.setdefault((item.parent, item.originalname), []).append(item)
    for those in sets.values():
        for item in those[1:-1]:
            item.add_marker(pytest.mark.matrix)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection. Each full collection of torch's objects takes half a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


def pytest_unconfigure() -> None:
    from _pool import POOL

    POOL.close()
