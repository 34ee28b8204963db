"""What ranks that go apart, fail or are lost lead to: this library beside torch's FSDP2, case by case.

    python bench/faults.py

Two ranks on gloo, whose collectives may take 8 seconds, train a small GPT; then one of them, or both, do what the case
says, and go on training. How it ended, on the worst of the ranks that are left:

    exact     training went on, and the weights are those of one process
    clear     an error that names a rank, a parameter or a module, and says what is wrong
    obscure   another error, at once
    late      another error, when the limit of the process group had passed: until then, a hang
    hang      no end within a minute
    abort     the process was ended by a signal
    silent    training went on with other weights than those of one process
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _report
from _faults_worker import CASES, LIMIT_S

WORKER = Path(__file__).with_name("_faults_worker.py")
ENGINES = ("ours", "fsdp2")
WORST = ("exact", "clear", "obscure", "late", "hang", "abort", "silent")  # from the best on
LONGEST_S = 60.0
NAMES_SOMETHING = re.compile(r"rank \d|blocks?\.\d|parameter|module")


@dataclass(frozen=True)
class Result:
    """How a case ended.

    Attributes:
        case, engine: which.
        ended: one of `WORST`.
        seconds: until the last rank that was left had ended.
        text: of its error.
    """

    case: str
    engine: str
    ended: str
    seconds: float
    text: str


def run(case: str, engine: str) -> Result:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(WORKER), engine, case]
    processes = [
        subprocess.Popen(
            command, env=os.environ | common | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + LONGEST_S
    ended: list[tuple[str, dict[str, Any]]] = []
    for rank, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            ended.append(("hang", {}))
            continue
        said = json.loads(output.splitlines()[-1]) if output.strip() else {}
        if not _is_own_doing(case, rank, process.returncode, said):
            ended.append((_how(case, process.returncode, said), said))
    how, said = max(ended, key=lambda each: WORST.index(each[0]))
    return Result(case, engine, how, said.get("after", LONGEST_S), said.get("text", ""))


def _is_own_doing(case: str, rank: int, code: int, said: dict[str, Any]) -> bool:
    """Whether this is how the case itself ends rank 1."""
    if rank != 1 or not case.startswith("one rank"):
        return False
    return code == -9 or said.get("kind") in ("SystemExit", "ValueError", "IndexError")


def _how(case: str, code: int, said: dict[str, Any]) -> str:
    if code < 0:
        return "abort"
    if not said.get("kind"):
        return "exact" if CASES[case][1] and said["exact"] else "silent"
    if said["ours"] or NAMES_SOMETHING.search(said["text"]):
        return "clear"
    return "late" if said["after"] > 0.9 * LIMIT_S else "obscure"


def print_tables(results: Sequence[Result]) -> None:
    by_case: dict[str, dict[str, Result]] = {}
    for result in results:
        by_case.setdefault(result.case, {})[result.engine] = result
    rows = [
        [case, *[f"{each[e].ended}, {each[e].seconds:.1f} s" if e in each else "" for e in ENGINES]]
        for case, each in by_case.items()
    ]
    _report.table("How it ended, on the worst of the ranks that are left", ("case", *ENGINES), rows)
    counts = {engine: Counter(result.ended for result in results if result.engine == engine) for engine in ENGINES}
    totals = [[engine, *[str(count[how]) for how in WORST]] for engine, count in counts.items()]
    _report.table("In all", ("engine", *WORST), totals)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="words that the names of the cases contain (default: all)")
    parser.add_argument("--engines", type=_report.names(ENGINES), default=list(ENGINES), help="default: all")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(argv)
    results = [run(case, engine) for case in CASES if options.cases in case for engine in options.engines]
    print_tables(results)
    if options.json:
        _report.write_json(options.json, "faults", {"limit_s": LIMIT_S, "world": 2}, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
