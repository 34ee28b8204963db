"""Run tests that have the marker `world` of the pytest plugin."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from ._processes import JOB_LIMIT_S, Processes
from ._spmd import Axes, World, spmd


def run_as_world(item: pytest.Function, marker: pytest.Mark) -> None:
    """Run a test on every rank of the world that its marker describes."""
    __tracebackhide__ = True
    given = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    _run(item, given, *marker.args, **marker.kwargs)


def _run(
    item: pytest.Function,
    given: dict[str, Any],
    world_size: int,
    *,
    mesh: Axes | None = None,
    processes: bool = False,
    device: str = "cpu",
    seed: int = 0,
    timeout: float | None = None,
) -> None:
    __tracebackhide__ = True
    if not processes:
        spmd(world_size, mesh=mesh, device=device, seed=seed, timeout=timeout or 60.0)(call_with_world, item.obj, given)
        return
    if item.cls is not None:
        raise pytest.UsageError(
            f"{item.nodeid}: methods cannot run in other processes; change the test into a function"
        )
    run = Processes(world_size, mesh, timeout or JOB_LIMIT_S, around=f"{__name__}:asserts_rewritten")
    module = item.module
    spec = importlib.util.find_spec(module.__name__)
    file = None if spec is not None and spec.origin == module.__file__ else module.__file__
    run.by_name(f"{__name__}:call_test", module.__name__, item.function.__qualname__, file, given, label=item.nodeid)


def call_with_world(world: World, test: Any, given: dict[str, Any]) -> None:
    """Call a test on one rank."""
    __tracebackhide__ = True
    own = {"world": world, "mesh": world.mesh}
    test(**{name: own.get(name, value) for name, value in given.items()})


def call_test(world: World, module: str, name: str, file: str | None, given: dict[str, Any]) -> None:
    """Import a test by its name and call it, in a worker process."""
    from ._worker import resolve

    call_with_world(world, resolve(f"{module}:{name}", file), given)


@functools.cache
def _rewrite_asserts() -> None:
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


@contextlib.contextmanager
def asserts_rewritten() -> Iterator[None]:
    """Rewrite asserts as pytest does, so a failed assert in a worker shows the compared values."""
    _rewrite_asserts()
    yield
