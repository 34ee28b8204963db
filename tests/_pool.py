"""Run tests on real process groups, in the worker processes of `composable_shard.testing`.

A job is a function named `module:function`. It is called on every rank as `function(rank, world, **kwargs)`. With a
decorator, the body of a test runs in the workers:

    @distributed(world=2)
    def test_ranks_agree(rank, world): ...

`@simulated(world=2)` runs it in a simulated world of this process instead. Use it for tests that do not need gloo,
above all for short ones and those that patch the runtime.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from composable_shard.errors import RankFailedError, WorldTimeoutError
from composable_shard.testing import spmd
from composable_shard.testing._processes import JOB_LIMIT_S
from composable_shard.testing._processes import Pool as Workers


class Pool:
    """The package's worker pool. A failed job fails the test."""

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
        """Run `module:function` on `world` ranks. Returns the result of each rank, or fails the test."""
        try:
            return self.workers.run("_worker:call", world, job, kwargs or {}, limit_s=limit_s, label=job)
        except (RankFailedError, WorldTimeoutError) as error:
            message = str(error)
        pytest.fail(message, pytrace=False)


POOL = Pool()


def more(*values: Any, **options: Any) -> Any:
    """Parameters of a case that only `make matrix` runs."""
    return pytest.param(*values, marks=pytest.mark.matrix, **options)


def distributed(world: int | tuple[Any, ...] | None = 2, *, limit_s: float = JOB_LIMIT_S) -> Callable[..., Any]:
    """Decorate `body(rank, world, ...)` as a test that runs on every rank of each world.

    The other arguments of `body` are parameters of the test. Several world sizes can be given, some of them by `more`.
    None means that `world` is a parameter of the test.
    """

    def run(body: Callable[..., Any], world: int, kwargs: dict[str, Any]) -> None:
        POOL.run(f"{body.__module__}:{body.__qualname__}", world, kwargs, limit_s)

    return _decorator(run, world)


def simulated(world: int | tuple[Any, ...] | None = 2, *, limit_s: float = JOB_LIMIT_S) -> Callable[..., Any]:
    """Like `distributed`, in a simulated world."""

    def run(body: Callable[..., Any], world: int, kwargs: dict[str, Any]) -> None:
        __tracebackhide__ = True
        spmd(world, timeout=limit_s)(lambda here: body(rank=here.rank, world=here.size, **kwargs))

    return _decorator(run, world)


def _decorator(
    run: Callable[[Callable[..., Any], int, dict[str, Any]], None], world: int | tuple[Any, ...] | None
) -> Callable[..., Any]:
    worlds = (world,) if isinstance(world, int) else world or ()

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            run(body, worlds[0] if len(worlds) == 1 else kwargs.pop("world"), kwargs)

        dropped = {"rank", "world"} if len(worlds) == 1 else {"rank"}
        signature = inspect.signature(body)
        kept = [p for name, p in signature.parameters.items() if name not in dropped]
        test.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        if len(worlds) > 1:
            return pytest.mark.parametrize("world", worlds, ids=lambda size: f"world{size}")(test)
        return test

    return decorate
