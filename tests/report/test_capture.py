"""`capture` and the command `trace` write a step of an unchanged program to files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import composable_shard as cs
from _blocks import Transformer, next_token_loss
from composable_shard import testing
from composable_shard.report import explain
from composable_shard.report._capture import capture

FILES = ["explanation.txt", "memory.png", "plan.json", "record.json", "step.json", "time.png"]


def train(models, steps, seen=None):
    """Train models one after the other in each step."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(1, steps + 1):
        if seen is not None:
            seen.append(step)
        for model, optimizer in zip(models, optimizers, strict=True):
            next_token_loss(model, torch.randint(0, 37, (2, 9))).backward()
            optimizer.step()
            optimizer.zero_grad()


def sharded():
    model = Transformer()
    for block in model.blocks:
        cs.fully_shard(block)
    return cs.fully_shard(model)


def test_a_step_is_written_and_the_program_is_ended_after_it(tmp_path):
    seen = []
    with testing.fake(2):
        (captured,) = capture(lambda: train([sharded()], 100, seen), tmp_path / "step", 3)
    assert seen == [1, 2, 3, 4]
    assert sorted(captured.files) == sorted(path.name for path in captured.folder.iterdir()) == FILES
    plan = cs.ShardPlan.from_json((captured.folder / "plan.json").read_text())
    record = cs.Record.from_json((captured.folder / "record.json").read_text())
    assert [group.fqn for group in plan.groups] == ["", "blocks.0", "blocks.1"]
    assert record.actions == tuple(plan.actions())
    assert record.spans
    assert captured.text == str(explain(plan, record))
    assert (captured.folder / "explanation.txt").read_text() == f"{captured.text}\n"
    assert json.loads((captured.folder / "step.json").read_text())["traceEvents"]


def test_each_of_several_models_gets_a_folder_and_a_rank_may_write_nothing(tmp_path):
    with testing.fake(2):
        captured = capture(lambda: train([sharded(), sharded()], 9), tmp_path, 2)
        assert capture(lambda: train([sharded()], 9), tmp_path / "other", 2, writes=False) == []
    assert [each.folder.name for each in captured] == ["model-0", "model-1"]
    assert not (tmp_path / "other").exists()


def step_beside(model):
    """Run a model once, then train another model."""
    next_token_loss(model, torch.randint(0, 37, (2, 9)))
    train([Transformer()], 9)


def test_only_models_that_run_in_the_step_are_written(tmp_path):
    def program():
        model, teacher = sharded(), sharded()
        next_token_loss(teacher, torch.randint(0, 37, (2, 9)))
        train([model], 9)

    def once_in_step_2():
        model, other = sharded(), sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, 9):
            if step == 2:
                next_token_loss(other, torch.randint(0, 37, (2, 9))).backward()
            next_token_loss(model, torch.randint(0, 37, (2, 9))).backward()
            optimizer.step()

    with testing.fake(2):
        (captured,) = capture(once_in_step_2, tmp_path / "once", 4)
        assert captured.folder == tmp_path / "once"
        idle, made_before = sharded(), sharded()
        train([idle], 1)
        (captured,) = capture(program, tmp_path / "teacher", 2)
        assert captured.folder == tmp_path / "teacher"
        (captured,) = capture(lambda: train([made_before], 9), tmp_path / "before", 2)
        assert captured.folder == tmp_path / "before"
        assert not cs.last_record(idle).spans


def test_programs_that_cannot_be_captured_are_errors(tmp_path):
    with testing.fake(2):
        with pytest.raises(cs.errors.ShardConfigStateError, match="ended after 3 of 4 required steps"):
            capture(lambda: train([sharded()], 3), tmp_path)
        with pytest.raises(cs.errors.ShardConfigStateError, match="no model is sharded by this library"):
            capture(lambda: train([Transformer()], 9), tmp_path)
        with pytest.raises(cs.errors.ShardConfigStateError, match=r"FSDPTransformer: sharded, but not run in step 2"):
            capture(lambda: step_beside(sharded()), tmp_path, 2)
        with pytest.raises(
            cs.errors.ShardConfigValueError, match="expected at least 2, the first step that can be captured"
        ):
            capture(lambda: train([sharded()], 9), tmp_path, 1)
        with pytest.raises(ZeroDivisionError):
            capture(lambda: 1 / 0, tmp_path)
    assert list(tmp_path.iterdir()) == []


SCRIPT = """\
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", rank=int(os.environ.get("RANK", 0)), world_size=int(os.environ.get("WORLD_SIZE", 1)),
                        init_method=None if "RANK" in os.environ else f"file://{os.path.abspath('store')}")
model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
"""


def command(*arguments, cwd, launcher=()):
    call = [sys.executable, *launcher, "-m", "composable_shard", "trace", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(cs.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(call, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120, check=False)


def check(done, folder):
    assert done.returncode == 0, done.stderr
    assert "step 2" in done.stderr
    assert "step 3" not in done.stderr
    assert json.loads(done.stdout) == {
        "step": 3,
        "models": [{"model": "FSDPSequential", "folder": str(folder), "files": done_files(folder)}],
    }


def done_files(folder):
    order = ["plan.json", "record.json", "explanation.txt", "step.json", "memory.png", "time.png"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(order)
    return order


@pytest.mark.matrix
def test_the_command_traces_an_unchanged_script_of_fsdp2(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command("--install", "--step", "3", "--json", "--out", "out", "train.py", "50", cwd=tmp_path)
    check(done, tmp_path / "out")


@pytest.mark.matrix
def test_under_a_launcher_the_first_rank_writes(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--install", "--step", "3", "--json", "--out", "out", "train.py", "50"]
    check(command(*arguments, cwd=tmp_path, launcher=launcher), tmp_path / "out")
