"""The pytest plugin: tests run on all ranks and must destroy their process groups. Unused, the plugin has no effect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(pytester, monkeypatch, torch_is_loaded):
    """Run a test file in this process, with the plugin, and return the result."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for processes that the test starts

    def run(text, *args):
        pytester.makepyfile(test_it="import pytest, torch, torch.distributed as dist\n" + text)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "pytest_composable_shard", *args)

    return run


def test_a_marked_test_runs_on_every_rank_with_its_parameters(run):
    result = run(
        """
seen = []

@pytest.fixture
def number():
    return 7

@pytest.mark.world(4, mesh={"dp": 2, "tp": 2})
@pytest.mark.parametrize("letter", ["a", "b"])
def test_ranks(world, mesh, number, letter):
    assert mesh is world.mesh and mesh.size() == world.size == dist.get_world_size() == 4
    seen.append((letter, number, world.rank))

def test_all_have_run():
    assert seen == [(letter, 7, rank) for letter in "ab" for rank in range(4)]

class TestMethods:
    @pytest.mark.world(2)
    def test_one(self, world):
        assert world.size == 2

@pytest.mark.world(2)
def test_skipped(world):
    pytest.skip("not here")
""",
        "--strict-markers",
    )
    result.assert_outcomes(passed=4, skipped=1)


def test_the_failure_of_a_rank_shows_its_assert_and_its_name(run):
    result = run(
        """
@pytest.mark.world(3)
def test_fails(world):
    dist.all_reduce(torch.ones(1))
    assert world.rank != 1
    dist.barrier()
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * assert 1 != 1", "E * raised by rank 1 of 3 in a simulated world"])
    assert "_turns.py" not in result.stdout.str()


def test_a_deadlock_and_a_hang_fail_the_test(run):
    result = run(
        """
@pytest.mark.world(2)
def test_deadlock(world):
    if world.rank == 0:
        dist.barrier()

@pytest.mark.world(2, timeout=0.2)
def test_hang(world):
    while True:
        pass

@pytest.mark.world(2)
def test_works_again(world):
    dist.barrier()
"""
    )
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(["E *rank 0 waits in barrier in group 'default_pg' of ranks [[]0, 1]*"])


LEAVES_A_GROUP = """
def test_leaves_a_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    {end}

def test_next():
    assert not dist.is_initialized()

@pytest.fixture(scope="module")
def shared_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

def test_that_uses_a_group_of_a_fixture(shared_group):
    dist.barrier()

def test_that_uses_it_too(shared_group):
    dist.barrier()
"""
USES_WORLDS = """
@pytest.mark.world(2)
def test_world(world):
    pass
"""


def test_a_test_that_does_not_destroy_its_group_fails_and_the_group_is_destroyed(run):
    result = run(USES_WORLDS + LEAVES_A_GROUP.format(end=""))
    result.assert_outcomes(failed=1, passed=4)
    result.stdout.fnmatch_lines(
        ["*test_leaves_a_group did not destroy its default process group, which was destroyed*"]
    )
    result = run(USES_WORLDS + LEAVES_A_GROUP.format(end="assert 0"))
    result.assert_outcomes(failed=1, passed=4)
    result.stdout.fnmatch_lines(["*process groups*", "*did not destroy its default process group*"])


def test_sessions_without_worlds_are_not_checked(run):
    result = run(LEAVES_A_GROUP.format(end="").split("def test_next")[0] + "\ndef test_next():\n    dist.barrier()\n")
    result.assert_outcomes(passed=2)
    dist.destroy_process_group()


def test_using_the_fixture_without_the_marker_raises_an_error_with_the_fix(run):
    result = run("def test_it(world):\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*uses the fixture 'world', but has no marker 'world'*@pytest.mark.world(2)*"])


@pytest.mark.matrix
def test_a_marked_test_can_run_on_real_processes(run):
    result = run(
        """
@pytest.mark.world(1, processes=True)
@pytest.mark.parametrize("number", [0, 1])
def test_ranks(world, mesh, number):
    assert dist.get_backend() == "gloo" and mesh is world.mesh
    assert world.rank != number

@pytest.mark.world(2, processes=True)
class TestMethods:
    def test_one(self, world):
        pass
"""
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*rank 0 of 1 failed first (test_it.py::test_ranks[[]0]):*", "*assert 0 != 0", "*methods cannot run in other*"]
    )


def test_the_plugin_does_not_import_torch():
    code = "import sys, pytest_composable_shard as plugin; assert 'torch' not in sys.modules, plugin.__file__"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


PROCESSES = """
@pytest.mark.world(2, processes=True)
@pytest.mark.parametrize("number", range(4))
def test_processes(world, number):
    dist.barrier()
"""


@pytest.mark.matrix
@pytest.mark.parametrize("more", ["", PROCESSES], ids=["simulated", "gloo"])
def test_worlds_run_in_several_pytest_processes_concurrently(pytester, monkeypatch, more):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        """
import pytest, torch.distributed as dist

@pytest.mark.world(3)
@pytest.mark.parametrize("number", range(10))
def test_ranks(world, number):
    dist.barrier()
"""
        + more
    )
    found = pytester.runpytest_subprocess("-p", "pytest_composable_shard", "-n", "2")
    found.assert_outcomes(passed=14 if more else 10)
