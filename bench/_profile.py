"""Print a cProfile of a step after warm-up, per module and step."""

import cProfile
import pstats
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _report

STEPS = 10
_LIBRARIES = Path(sysconfig.get_path("purelib"))

_Key = tuple[str, int, str]  # file ("~" for a built-in), line, function


def print_profile(step: Callable[[], None], clear: Callable[[], None], *, modules: int, sort: str, lines: int) -> None:
    """Print the functions and files in which `step` spends its time.

    cProfile adds about a microsecond per call. So compare lines with each other only, not their sum with the figure of
    `overhead.py`.
    """
    profile = cProfile.Profile(time.thread_time)  # wall time would include other processes
    for _ in range(STEPS):
        profile.enable()
        step()
        profile.disable()
        clear()
    stats: dict[_Key, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    per = 1e6 / (STEPS * modules)
    entries = [
        (own * per, total * per, calls / (STEPS * modules), _where(key))
        for key, (_, calls, own, total, _) in stats.items()
    ]
    entries.sort(key=lambda e: e[0 if sort == "own" else 1], reverse=True)
    whole = sum(e[0] for e in entries)
    _report.table(
        f"Profile per module and step ({whole:.0f} us with the profiler)",
        ("function", "own, us", "total, us", "calls"),
        [(where, f"{own:.1f}", f"{total:.1f}", f"{n:.2f}") for own, total, n, where in entries[:lines]],
    )
    _report.table(
        "Own time by file; built-in functions count for the file of their caller",
        ("file", "own, us"),
        [(file, f"{own * per:.1f}") for file, own in _by_file(stats).most_common(15)],
    )


def _by_file(stats: dict[_Key, Any]) -> Counter[str]:
    files: Counter[str] = Counter()
    for (file, _, _), (_, _, own, _, callers) in stats.items():
        if file != "~":
            files[_short(file)] += own
            continue
        for (caller, _, name), (_, _, part, _) in callers.items():
            files[name if caller == "~" else _short(caller)] += part
    return files


def _where(key: _Key) -> str:
    file, line, name = key
    return name if file == "~" else f"{_short(file)}:{line} {name}"


def _short(file: str) -> str:
    path = Path(file)
    if path.is_relative_to(_LIBRARIES):
        return str(path.relative_to(_LIBRARIES))
    if "composable_shard" in path.parts[-4:-1]:
        return "/".join(path.parts[path.parts.index("composable_shard", -4) :])
    return f"{path.parent.name}/{path.name}"
