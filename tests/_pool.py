"""Warm worker processes for tests on real process groups: `composable_shard.testing`'s, for pytest.

A job is a function named `module:function`, called on every rank as `function(rank, world, **kwargs)`. A test says so
with a decorator, and its body then runs in the workers:

    @distributed(world=2)
    def test_ranks_agree(rank, world): ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from composable_shard.testing import RankFailedError, WorldTimeoutError
from composable_shard.testing._processes import JOB_LIMIT_S
from composable_shard.testing._processes import Pool as Workers


class Pool:
    """The package's pool, whose failures are failures of the test."""

    def __init__(self) -> None:
        self.workers = Workers(around="_worker:around")
        self.close = self.workers.close

    def run(
        self,
        job: str,
        world: int,
        kwargs: dict[str, Any] | None = None,
        limit_s: float = JOB_LIMIT_S,
    ) -> list[Any]:
        """Run `module:function` on `world` ranks; returns what each rank returned, or fails the test."""
        try:
            return self.workers.run("_worker:call", world, job, kwargs or {}, limit_s=limit_s, label=job)
        except (RankFailedError, WorldTimeoutError) as error:
            message = str(error)
        pytest.fail(message, pytrace=False)


POOL = Pool()


def distributed(world: int | tuple[int, ...] = 2, *, limit_s: float = JOB_LIMIT_S) -> Callable[..., Any]:
    """Make a test of `body(rank, world, ...)` that runs on every rank of each world; other arguments are parameters."""
    worlds = (world,) if isinstance(world, int) else world

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        job = f"{body.__module__}:{body.__qualname__}"

        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            POOL.run(job, kwargs.pop("world", worlds[0]), kwargs, limit_s)

        dropped = {"rank"} if len(worlds) > 1 else {"rank", "world"}
        signature = inspect.signature(body)
        kept = [p for name, p in signature.parameters.items() if name not in dropped]
        test.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        if len(worlds) > 1:
            return pytest.mark.parametrize("world", worlds, ids=[f"world{w}" for w in worlds])(test)
        return test

    return decorate
