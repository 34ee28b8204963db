"""Ends the worker pool with the session; see _pool.py."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytest_composable_shard"]  # also where the package is not installed

# One thread a process, before torch is loaded: with more, the threads of small operators wait for those of the other
# processes, which makes a test on two cores take up to ten times as long. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts this in the background has it ignore Ctrl-C, and with it all processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # the helpers (_pool, _parity) import each other by name, in pytest and in the workers
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session")
def torch_is_loaded() -> None:
    """All that worlds load late is there: pytester forgets what its runs import, and torch can be loaded only once."""
    import torch
    import torch._dynamo
    import torch._inductor.test_operators

    from composable_shard import testing
    from composable_shard.testing import _pytest  # noqa: F401

    testing.assert_matches_unsharded(lambda: torch.nn.Linear(2, 2), lambda batch, step: torch.ones(1, 2), steps=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with many sets of parameters `make test` runs two, the first and the last one."""
    sets: dict[tuple[object, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("matrix") is None:
            sets.setdefault((item.parent, item.originalname), []).append(item)
    for those in sets.values():
        for item in those[1:-1]:
            item.add_marker(pytest.mark.matrix)


def pytest_collection_finish() -> None:
    """What was imported stays: a collection that looks through all of torch takes half a second, again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


def pytest_unconfigure() -> None:
    from _pool import POOL

    POOL.close()
