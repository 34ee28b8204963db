"""Check training scenarios for races with `testing.races`, and check that removing a wait is detected.

    python bench/card/scenarios.py                    # all scenarios; a race is an error
    python bench/card/scenarios.py default packed     # some of them
    python bench/card/scenarios.py --planted          # removes each wait in turn; it is an error if no race is found
    python bench/card/scenarios.py --list

Each scenario takes about a second on a CPU. Scenarios and waits are those of the tests
(`tests/testing/_race_scenarios.py`, `_race_mutants.py`). This script prints the reports, and can write them as JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(2, str(Path(__file__).resolve().parents[2] / "tests" / "testing"))

import _report
from _race_mutants import MUTANTS
from _race_scenarios import SCENARIOS
from _race_training import perform


@dataclass(frozen=True)
class Outcome:
    """The races of a scenario, and whether the result was expected."""

    name: str
    planted: bool
    operators: int
    races: list[str]
    expected: bool
    seconds: float


def run(name: str, planted: bool) -> Outcome:
    """Run a scenario, or the scenario of a wait without this wait, and print the races."""
    begin = time.perf_counter()
    if planted:
        with MUTANTS[name].plant():
            checked = perform(SCENARIOS[MUTANTS[name].scenario])
    else:
        checked = perform(SCENARIOS[name])
    expected = bool(checked.races) == planted
    print(f"{name}: {checked.operators} operators, {len(checked.races)} races{'' if expected else ', UNEXPECTED'}")
    if checked.races:
        print(checked.report(), flush=True)
    seconds = round(time.perf_counter() - begin, 2)
    return Outcome(name, planted, checked.operators, [str(race) for race in checked.races], expected, seconds)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scenarios, or waits with --planted (default: all)")
    parser.add_argument("--planted", action="store_true", help="remove waits, which must be detected as races")
    parser.add_argument("--list", action="store_true", help="list all names and exit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to FILE")
    options = parser.parse_args(argv)
    known = MUTANTS if options.planted else SCENARIOS
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    options.names = options.names or [*known]
    return options


def main() -> int:
    options = parse()
    if options.list:
        print("\n".join(["scenarios:", *(f"    {name}" for name in SCENARIOS), "waits:"]))
        print("\n".join(f"    {name}: {mutant.wait} ({mutant.site})" for name, mutant in MUTANTS.items()))
        return 0
    torch.set_num_threads(1)
    outcomes = [run(name, options.planted) for name in options.names]
    wrong = [outcome.name for outcome in outcomes if not outcome.expected]
    print(
        f"{len(outcomes)} {'waits' if options.planted else 'scenarios'}, {len(wrong)} with unexpected results", *wrong
    )
    if options.json:
        _report.write_json(options.json, "race", {"names": options.names, "planted": options.planted}, outcomes)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
