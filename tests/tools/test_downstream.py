"""Test the runner for other libraries (`downstream/`): comparison, verdicts, page, and process cleanup."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DOWNSTREAM = ROOT / "downstream"
sys.path.append(str(DOWNSTREAM))

import _compare  # noqa: E402
import _rows  # noqa: E402
import run as downstream  # noqa: E402

_spec = importlib.util.spec_from_file_location("downstream_worker", DOWNSTREAM / "_worker.py")
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


def texts(before, after):
    return [str(each) for each in _compare.differences(before, after)]


def test_equal_values_have_no_differences():
    value = {"loss": [1.0, float("nan")], "weight": torch.tensor([1.0, float("inf")]), "name": None}
    assert texts(value, {**value, "weight": value["weight"].clone()}) == []


def test_differences_have_a_position_and_a_size():
    before = {
        "losses": [1.0, 2.0],
        "weight": torch.tensor([1.0, -4.0]),
        "removed": 1,
        "type": 1,
        "shape": torch.ones(2),
    }
    after = {"losses": [1.0, 2.5], "weight": torch.tensor([1.0, -3.0]), "new": 1, "type": "1", "shape": torch.ones(3)}
    assert texts(before, after) == [
        "losses[1]: 2.0 became 2.5",
        "weight: differ by 2.5e-01 of the largest magnitude",
        "removed: is missing",
        "type: 1 became '1'",
        "shape: (2,) torch.float32 became (3,) torch.float32",
        "new: is there in addition",
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, -float("inf")])),
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16)),
        (1.0, float("nan")),
        ([1], [1, 2]),
    ],
)
def test_values_that_cannot_be_compared_differ_by_infinity(one, other):
    (found,) = _compare.differences(one, other)
    assert found.size == float("inf")


def row(**settings):
    return _rows.Row("a row", lambda run: None, world=1, **settings)


def left(folder: Path, noted=None, error=None) -> Path:
    folder.mkdir()
    if noted is not None:
        torch.save(noted, folder / "noted0.pt")
    if error is not None:
        (folder / "error0.txt").write_text(error)
    return folder


@pytest.mark.parametrize(
    ("theirs", "ours", "word", "text"),
    [
        ({"noted": {"x": 1.0}}, {"noted": {"x": 1.0}}, "same", ""),
        ({"noted": {"x": 1.0}}, {"noted": {"x": 1.1}}, "DEFECT", "1 differ: x: 1.0 became 1.1"),
        ({"noted": {"x": 1.0}}, {"error": "ValueError: no\n\nTraceback"}, "DEFECT", "ValueError: no"),
        ({"error": "ValueError: no"}, {"noted": {"x": 1.0}}, "better", "ours runs; torch: ValueError: no"),
        (
            {"error": "ValueError: no"},
            {"noted": {"x": 1.0, _rows.AGREES: ["losses"]}},
            "better",
            "ours agrees with the unsharded model (losses); torch: ValueError: no",
        ),
        ({"error": "A: a"}, {"error": "B: b"}, "torch fails too", "torch: A: a / ours: B: b"),
        ({"noted": {}}, {}, "DEFECT", "no result of rank 0"),
    ],
)
def test_verdicts(tmp_path, theirs, ours, word, text):
    folders = {"torch": left(tmp_path / "torch", **theirs), "ours": left(tmp_path / "ours", **ours)}
    verdict = _compare.judge(row(), folders)
    assert (verdict.word, verdict.text) == (word, text)


def test_a_failure_of_both_sides_is_a_defect_if_both_use_this_library(tmp_path):
    path = str(_compare.ROOT / "composable_shard")
    folders = {side: left(tmp_path / side, error=f"A: in {path}/_api.py") for side in ("torch", "ours")}
    verdict = _compare.judge(row(uses_ours=True), folders)
    assert (verdict.word, verdict.text) == ("DEFECT", "A: in composable_shard/_api.py")


def test_a_tolerance_needs_a_reason_and_the_verdict_contains_it():
    with pytest.raises(ValueError, match="a tolerance needs a reason"):
        row(tolerance=1e-6)


ROWS = """
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from _rows import Rows, Run

rows = Rows("Example", environment="torch")


def train(run, sharding=True):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    if sharding:
        fully_shard(model)
        run.sharded(model)
    model(torch.full((2, 3), 1.0 + run.rank)).square().sum().backward()
    run.gradients(model)
    run.weights(model)


@rows("trains")
def trains(run: Run) -> None:
    train(run)


@rows("reports its implementation")
def tells(run: Run) -> None:
    train(run)
    run.note("side", run.side)


@rows("shards nothing")
def plain(run: Run) -> None:
    train(run, sharding=False)


@rows("hangs on one rank", timeout=1)
def hangs(run: Run) -> None:
    train(run)
    while run.rank:
        time.sleep(1)
"""


@pytest.mark.matrix
def test_rows_run_with_two_implementations_and_are_compared(tmp_path, monkeypatch, capsys):
    path = tmp_path / "example.py"
    path.write_text(ROWS)
    part = downstream.Part.of("example", path)
    assert (part.library, part.environment) == ("Example", "torch")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    monkeypatch.setattr(sys, "path", [*sys.path])  # restores `sys.path`, to which the worker adds a folder

    def answered(task: str, *rest: str):
        """Run a task that does not import composable_shard in this process, and return its JSON output."""
        monkeypatch.setattr(sys, "argv", ["_worker.py", task, str(path), *rest])
        worker.main()
        return json.loads(capsys.readouterr().out)

    titles = [title for title, _ in answered("list")["rows"]]
    assert titles == ["trains", "reports its implementation", "shards nothing", "hangs on one rank"]
    order = [str(tmp_path), "0", "1", "2", "3"]
    for side in ("torch", "ours"):
        command = [sys.executable, str(DOWNSTREAM / "_worker.py"), side, str(path), *order]
        subprocess.run(command, env=env, timeout=50, check=True)
    verdicts = answered("judge", *order)
    assert [verdict["word"] for verdict in verdicts.values()] == [
        "same",
        "DEFECT",
        "torch fails too",
        "torch fails too",
    ]
    assert verdicts["0"]["difference"] == 0
    assert "side: 'torch' became 'ours'" in verdicts["1"]["text"]
    assert "did not check that a model is sharded" in verdicts["2"]["text"]
    assert "hangs: not finished after 1 seconds" in verdicts["3"]["text"]


def test_the_page_lists_each_row_with_its_result_and_the_versions():
    def row(word, difference, text=""):
        return {"word": word, "difference": difference, "text": text}

    rows = {
        "trains": row("same", 0),
        "clips": row("same", 3e-7, "sums in another | order"),
        "copies": row("better", None, "ours agrees with the unsharded model (weights); torch: ValueError: no"),
        "offloads": row("better", None, "ours runs; torch: ValueError: no"),
        "prunes": row("torch fails too", None, "torch: A: a / ours: B: b"),
        "breaks": row("DEFECT", 1.0, "1 differ"),
    }
    part = {"library": "Example", "date": "2026-11-28", "versions": {"torch": "2.13.0"}, "rows": rows}
    assert downstream.page({"example": part}) == (
        "# Results with other libraries\n\n6 programs, generated by `make downstream`, last run 2026-11-28.\n\n"
        "## Example\n\ntorch 2.13.0; run 2026-11-28.\n\n| program | result | details |\n|---|---|---|\n"
        "| trains | bitwise identical |  |\n"
        "| clips | within 3e-07 | sums in another \\| order |\n"
        "| copies | matches the unsharded model | FSDP2 fails: ValueError: no |\n"
        "| offloads | works | FSDP2 fails: ValueError: no |\n"
        "| prunes | fails with both | A: a |\n"
        "| breaks | DEFECT | 1 differ |\n"
    )


LAUNCHES = """
import os, sys
from pathlib import Path
from _processes import Launched

orphan = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('left', flush=True); sys.exit(3)"
output = Path(sys.argv[1])
try:
    with Launched(output, limit_s=20) as launched:
        stays = launched.start(["sleep", "600"])
        first = launched.start([sys.executable, "-c", orphan])
        first.wait()
        os.environ["RANK"] = "5"
        launched.finish(launched.start(["sh", "-c", "echo rank ${RANK-none}, $MINE"], MINE="mine"))
        launched.finish(first)
except AssertionError as error:
    print(error)
print("children", Path(f"/proc/self/task/{os.getpid()}/children").read_text())
"""


def test_all_processes_of_a_row_are_killed_including_orphans(tmp_path):
    command = [sys.executable, "-c", LAUNCHES, tmp_path / "output.txt"]
    env = os.environ | {"PYTHONPATH": str(DOWNSTREAM)}
    done = subprocess.run(command, env=env, timeout=60, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "a launcher exited with status 3: left / rank none, mine\nchildren \n"
