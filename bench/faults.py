"""Compare the outcome if ranks disagree, fail or are lost, with this library and with torch's FSDP2.

    python bench/faults.py

Two gloo ranks train a small GPT with a timeout of 8 seconds per collective. Then one or both perform the action of a
case, and continue. The outcome is that of the worst remaining rank:

    exact     training continued, and the weights equal those of one process
    clear     an error of this library, or one that names a rank, a parameter or a module
    obscure   another error, before the timeout
    late      another error, after the timeout
    hang      no end within a minute
    abort     the process was ended by a signal
    silent    training continued, but weights are wrong or an error was expected
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
WORST = ("exact", "clear", "obscure", "late", "hang", "abort", "silent")  # best to worst
LONGEST_S = 60.0
NAMES_SOMETHING = re.compile(r"rank \d|blocks?\.\d|parameter|module")


@dataclass(frozen=True)
class Result:
    """The outcome of a case.

    Attributes:
        case, engine: names of the case and the engine.
        ended: outcome, one of `WORST`.
        seconds: time until the worst remaining rank ended.
        text: its error message.
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
    """Return whether the case itself ended this rank (rank 1) as intended."""
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
    _report.table("Outcome on the worst remaining rank", ("case", *ENGINES), rows)
    counts = {engine: Counter(result.ended for result in results if result.engine == engine) for engine in ENGINES}
    totals = [[engine, *[str(count[how]) for how in WORST]] for engine, count in counts.items()]
    _report.table("Number of cases by outcome", ("engine", *WORST), totals)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="run cases whose names contain this text (default: all)")
    parser.add_argument("--engines", type=_report.names(ENGINES), default=list(ENGINES), help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(argv)
    results = [run(case, engine) for case in CASES if options.cases in case for engine in options.engines]
    print_tables(results)
    if options.json:
        _report.write_json(options.json, "faults", {"limit_s": LIMIT_S, "world": 2}, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
