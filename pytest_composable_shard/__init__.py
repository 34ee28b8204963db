"""A pytest plugin that runs a test as every rank of a world; see `composable_shard.testing`.

It is outside of the package, and imports the package only if a test needs it, because every run of pytest loads its
plugins, and the package imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

MARKER = (
    "world(world_size, mesh=None, processes=False, device='cpu', seed=0, timeout=60.0): run the test as every rank of "
    "a simulated world, or of separate processes on gloo with processes=True. Use the fixtures `world` and `mesh`."
)
_HAS_WORLDS = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_HAS_WORLDS] = any(item.get_closest_marker("world") for item in items)


def _of_a_world(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("world") is None:
        raise pytest.UsageError(
            f"{request.node.nodeid} uses the fixture {request.fixturename!r}, but has no marker 'world'; mark it, for "
            "example with @pytest.mark.world(2)"
        )


@pytest.fixture
def world(request: pytest.FixtureRequest) -> None:
    """The rank's `composable_shard.testing.World` (rank, size, mesh) in a test with the marker `world`."""
    _of_a_world(request)


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> None:
    """The `DeviceMesh` of the world in a test with the marker `world`."""
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
    """If there are tests with the marker `world`, fail a test that leaves a default process group to the next one."""
    watches = item.config.stash.get(_HAS_WORLDS, False) and _distributed() is None
    failed = True
    try:
        result = yield
        failed = False
    finally:
        left = _distributed() if watches else None
        if left is not None:
            left.destroy_process_group()
            text = f"{item.nodeid} did not destroy its default process group, which was destroyed after the test"
            if failed:
                item.add_report_section("call", "process groups", text)
    if left is not None:
        pytest.fail(f"{text}; call torch.distributed.destroy_process_group() at its end", pytrace=False)
    return result
