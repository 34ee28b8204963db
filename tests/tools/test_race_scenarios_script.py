"""bench/card/scenarios.py prints and writes the results of `testing.races`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "card" / "scenarios.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.matrix
def test_scenarios_with_and_without_their_waits_have_the_expected_results(tmp_path):
    file = tmp_path / "race.json"
    done = run("default", "mixed-packed", f"--json={file}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 scenarios, 0 with unexpected results" in done.stdout
    results = json.loads(file.read_text())["results"]
    assert [(result["name"], result["races"]) for result in results] == [("default", []), ("mixed-packed", [])]
    done = run("--planted", "gathers-ignore-optimizer")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missing: stream 'network' has to wait for an event" in done.stdout
    assert "gathers-ignore-optimizer: gathers wait for the optimizer" in run("--list").stdout
    assert "unknown nothing; known: default" in run("nothing").stderr
