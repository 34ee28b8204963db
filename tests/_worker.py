"""Setup of the workers of the test pool (see _pool.py). Only workers import this module."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Iterator
from typing import Any

from composable_shard.testing import World
from composable_shard.testing._worker import resolve

ALLOWED_WARNINGS = [
    "DTensor random operators may not have complete support on cpu",  # torch warns when shards are initialized on a CPU
]


@functools.cache
def prepare() -> None:
    """Let pytest rewrite the asserts of test modules in workers too, so that a failure shows the compared values."""
    gc.set_threshold(50_000, 20, 10)  # each job ends with a collection anyway
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config()).mark_rewrite("_low_bits", "_parity", "_sides", "_stepping")


@contextlib.contextmanager
def around() -> Iterator[None]:
    """Turn warnings into errors."""
    prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in ALLOWED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


def call(world: World, job: str, kwargs: dict[str, Any]) -> Any:
    """Call the body of a test as `body(rank, world, **kwargs)`."""
    function = resolve(job)
    return getattr(function, "__wrapped__", function)(rank=world.rank, world=world.size, **kwargs)
