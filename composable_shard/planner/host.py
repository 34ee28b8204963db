"""The processors and the memory that this process may use on its machine or in its container."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_TABLE, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # cgroup v1 writes a larger number for "no limit"


def processor_name() -> str:
    """The name of the processor, as its vendor writes it."""
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int:
    """Bytes of memory of this machine, or of the container if its limit is lower."""
    return min([_meminfo("MemTotal"), *(limit for limit, _ in _limits())])


def available_memory() -> int:
    """Bytes that processes can still allocate. Page cache counts as available."""
    return max(1, min([_meminfo("MemAvailable"), *(limit - used for limit, used in _limits())]))


def _meminfo(name: str) -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits() -> Iterator[tuple[int, int]]:
    """For each cgroup of this process that limits memory: the limit, and the used bytes that cannot be freed.

    In a container, the directory of a cgroup is often at the root instead of the path in the table. Both are read.
    """
    for line in _lines(_TABLE):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = _ROOT / controllers
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group == base or base in group.parents:
                yield from _limit_of(group)


def _limit_of(group: Path) -> Iterator[tuple[int, int]]:
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # cgroup v1
    ):
        limit, used = _number(group / limit_file), _number(group / used_file)
        if limit is not None and limit < _NO_LIMIT:
            yield limit, max(0, (used or 0) - _file_cache(group))


def _file_cache(group: Path) -> int:
    """Bytes of a cgroup's page cache that the system frees when memory is needed."""
    values = dict(line.split(None, 1) for line in _lines(group / "memory.stat"))
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    """The lines of a file; empty on systems without that file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
