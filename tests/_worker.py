"""What the workers of the test pool do around and instead of a job (see _pool.py); imported in workers alone."""

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
    "DTensor random operators may not have complete support on cpu",  # torch, when shards are initialised on CPU
]


@functools.cache
def prepare() -> None:
    """Have pytest rewrite the asserts of test modules here too, so that a failure shows both sides."""
    gc.set_threshold(50_000, 20, 10)  # jobs end with a collection
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config()).mark_rewrite("_low_bits", "_parity", "_sides", "_stepping")


@contextlib.contextmanager
def around() -> Iterator[None]:
    """Warnings are errors."""
    prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in ALLOWED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


def call(world: World, job: str, kwargs: dict[str, Any]) -> Any:
    """Run a test's body as `body(rank, world, **kwargs)`."""
    function = resolve(job)
    return getattr(function, "__wrapped__", function)(rank=world.rank, world=world.size, **kwargs)
