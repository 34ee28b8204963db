"""The race checker of bench/card: accesses that no event orders are found, and the library has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{BENCH}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.matrix
def test_scenarios_have_no_race(tmp_path):
    file = tmp_path / "race.json"
    done = python(str(BENCH / "card" / "scenarios.py"), "default", "mixed-packed", "failing", f"--json={file}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 scenarios, 0 not as expected" in done.stdout
    results = json.loads(file.read_text())["results"]
    assert [result["name"] for result in results] == ["default", "mixed-packed", "failing"]
    for result in results:
        assert result["operators"] > 500
        assert result["races"] == []


STREAMS = """
import contextlib, io, sys
from dataclasses import replace
from unittest import mock

import torch
from card import race, scenarios

torch.set_num_threads(1)


def races(fenced, columns=(slice(0, 2), slice(0, 2))):
    found = race.Watch()
    with race.simulated(2) as machine, found:
        table = torch.zeros(4, 4)
        side = machine.stream("side")
        side.wait_stream(machine.compute)
        with torch.cpu.stream(side):
            table[:, columns[0]].fill_(1)
        if fenced:
            machine.compute.wait_stream(side)
        table[:, columns[1]].sum()
    return [(str(each.first), str(each.then)) for each in found.races]


assert races(fenced=False) == [("side: fill_.Scalar writes", "compute: sum.default reads")]
assert races(fenced=True) == []
assert races(fenced=False, columns=(slice(0, 2), slice(2, 4))) == []  # other bytes of the same rows


def told(*arguments):
    shown = io.StringIO()
    with mock.patch.object(sys, "argv", ["scenarios", *arguments]), contextlib.redirect_stdout(shown):
        status = scenarios.main()
    return status, shown.getvalue()


status, shown = told("--planted", "gathers-ignore-slots")
assert status == 0 and "gathers-ignore-slots: " in shown and " 0 races" not in shown, shown
assert "network: copy_.default writes" in shown, shown
with scenarios.BUGS["gathers-ignore-slots"].plant():
    status, shown = told("default")
assert status == 1 and "NOT EXPECTED" in shown, shown
harmless = replace(scenarios.BUGS["gathers-ignore-slots"], plant=contextlib.nullcontext)
with mock.patch.dict(scenarios.BUGS, {"gathers-ignore-slots": harmless}):
    status, shown = told("--planted", "gathers-ignore-slots")
assert status == 1 and "NOT EXPECTED" in shown, shown
"""


@pytest.mark.matrix
def test_a_missing_wait_is_found_and_so_is_one_that_is_taken_out_of_the_library():
    done = python("-c", STREAMS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("arguments", [["scenarios.py"], ["scenarios.py", "--planted"], ["threads.py"]])
def test_all_of_them_end_as_expected(arguments):
    done = python(str(BENCH / "card" / arguments[0]), *arguments[1:])
    assert done.returncode == 0, done.stdout + done.stderr
