"""A pytest plugin to run tests as all ranks of a world; see `composable_shard.testing`.

It lies outside of the package, and imports that only when a test asks for it: every run of pytest loads its plugins,
and the package loads torch.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

MARKER = (
    "world(world_size, mesh=None, processes=False, device='cpu', seed=0, timeout=60.0): run the test as every rank of "
    "a simulated world, or with processes=True of a real one on gloo. The fixtures `world` and `mesh` are its own."
)
_HAS_WORLDS = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_HAS_WORLDS] = any(item.get_closest_marker("world") for item in items)


def _of_a_world(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("world") is None:
        raise pytest.UsageError(
            f"{request.node.nodeid} asks for the fixture {request.fixturename!r} and is no test of a world; mark it, "
            "for example with @pytest.mark.world(2)"
        )


@pytest.fixture
def world(request: pytest.FixtureRequest) -> None:
    """The `composable_shard.testing.World` of each rank of a test with the marker `world`: rank, size, mesh."""
    _of_a_world(request)


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> None:
    """The `DeviceMesh` of the world of a test with the marker `world`."""
    _of_a_world(request)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("world")
    if marker is None:
        return None
    __tracebackhide__ = True
    from composable_shard.testing._pytest import run_as_world

    run_as_world(pyfuncitem, marker)
    return True


def _distributed() -> Any:
    """torch.distributed if there is a default process group."""
    found: Any = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Where there are tests of worlds, no test may leave its process group to the next one."""
    watches = item.config.stash.get(_HAS_WORLDS, False) and _distributed() is None
    failed = True
    try:
        result = yield
        failed = False
    finally:
        left = _distributed() if watches else None
        if left is not None:
            left.destroy_process_group()
            text = f"{item.nodeid} left a default process group behind, which was destroyed"
            if failed:
                item.add_report_section("call", "process groups", text)
    if left is not None:
        pytest.fail(f"{text}; call torch.distributed.destroy_process_group() at its end", pytrace=False)
    return result
