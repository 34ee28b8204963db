"""The processors and the memory that a process may use, also in a container with a lower limit."""

from __future__ import annotations

import os

import pytest

from composable_shard.planner import host

GB = 10**9


def write(path, **texts):
    path.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (path / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 64 GB, of which 40 are free, and files for its cgroups."""
    table, root = tmp_path / "cgroup", tmp_path / "root"
    monkeypatch.setattr(host, "_meminfo", {"MemTotal": 64 * GB, "MemAvailable": 40 * GB}.get)
    monkeypatch.setattr(host, "_TABLE", table)
    monkeypatch.setattr(host, "_ROOT", root)
    return table, root


def test_without_cgroups_the_machine_sets_the_limit(machine):
    assert (host.total_memory(), host.available_memory()) == (64 * GB, 40 * GB)


def test_a_cgroup_v2_and_its_parents_limit_memory(machine):
    table, root = machine
    table.write_text("0::/outer/inner\n")
    write(root / "outer", memory__max=16 * GB, memory__current=6 * GB, memory__stat=f"anon 5\ninactive_file {GB}")
    write(root / "outer/inner", memory__max="max", memory__current=6 * GB)
    assert (host.total_memory(), host.available_memory()) == (16 * GB, 11 * GB)


def test_a_cgroup_v1_limits_memory_unless_its_number_means_no_limit(machine):
    table, root = machine
    table.write_text("4:memory:/job\n3:cpuset:/\n")
    write(root / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=50 * GB)
    write(root / "memory/job", memory__limit_in_bytes=8 * GB, memory__usage_in_bytes=3 * GB)
    write(root / "cpuset", memory__max=1)
    assert (host.total_memory(), host.available_memory()) == (8 * GB, 5 * GB)


def test_in_a_container_the_limit_is_read_at_the_root(machine):
    table, root = machine
    table.write_text("0::/a/path/of/the/host\n")
    write(root, memory__max=4 * GB, memory__current=GB)
    assert host.available_memory() == 3 * GB


def test_this_machine_has_a_processor_cores_and_memory():
    assert host.processor_name()
    assert 1 <= host.cores() <= (os.cpu_count() or 1)
    assert 0 < host.available_memory() <= host.total_memory()
