"""Output and exit codes of `python -m composable_shard checkpoint`."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from _blocks import Transformer
from _pool import POOL
from checkpoint.test_save_and_load import content, run, train
from composable_shard import checkpoint
from composable_shard.checkpoint import _convert
from composable_shard.checkpoint._format.manifest import read_manifest
from composable_shard.checkpoint._io import files
from composable_shard.cli import main as command_line

ROOT = Path(__file__).parents[2]
JOB = "checkpoint.test_command_line"


def command(capsys, *arguments):
    """Run a command. Returns its exit code and its output, parsed if it is JSON."""
    code = command_line.main(["checkpoint", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, json.loads(out) if "--json" in arguments else out + err


def save_job(rank, world, tmp_path):
    state = run(0)
    torch.manual_seed(rank)
    train(state, rank, 2)
    checkpoint.save(tmp_path, state, step=2)
    torch.save(content(state), tmp_path / f"full-{rank}.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint directory of a run with two ranks."""
    path = tmp_path_factory.mktemp("saved")
    POOL.run(f"{JOB}:save_job", 2, {"tmp_path": path})
    return path


@pytest.fixture
def damaged(saved, tmp_path):
    """A copy of it with one flipped bit."""
    source, copy = saved / "step-00000002", tmp_path / "damaged" / "step-00000002"
    copy.mkdir(parents=True)
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    file = copy / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return copy.parent


def test_an_export_holds_only_a_part_in_memory(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_convert, "_AT_ONCE", 1 << 12)
    made = []
    monkeypatch.setattr(_convert, "bytes_of", lambda tensor: made.append(tensor) or _bytes_of(tensor))
    shapes = [(1, 5, 3000), (2, 2, 2, 300), (7,)]
    net = nn.ParameterList([torch.randn(shape) for shape in shapes])
    checkpoint.save(tmp_path / "run", {"net": net}, step=1)
    assert command(capsys, "export", tmp_path / "run", tmp_path / "out")[0] == 0
    assert max(each.numel() * 4 for each in made) <= 1 << 12
    assert len(made) > 15
    weights = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(weights[str(number)], tensor) for number, tensor in enumerate(net))


_bytes_of = _convert.bytes_of


def test_an_interrupted_export_leaves_no_files(saved, damaged, tmp_path, capsys, monkeypatch):
    code, text = command(capsys, "export", damaged, tmp_path / "out")
    assert code == 1
    assert "rank-00001.safetensors is damaged" in text
    assert {p.name for p in tmp_path.iterdir()} == {"damaged"}

    def fail(operation, path):
        if operation == "fsync" and path.suffix == ".safetensors":
            raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "observe", fail)
    code, text = command(capsys, "export", saved, tmp_path / "out")
    assert code == 1
    assert "No space left on device" in text
    assert {p.name for p in tmp_path.iterdir()} == {"damaged"}


def test_the_exit_code_of_verify_tells_intact_damaged_and_wrong_usage_apart(saved, damaged, tmp_path, capsys):
    code, text = command(capsys, "verify", saved)
    assert code == 0
    assert "step-00000002 is intact: step 2, 2 files of " in text
    code, answer = command(capsys, "verify", saved / "step-00000002", "--json")
    assert (code, answer["step"], answer["files"]) == (0, 2, 2)
    code, text = command(capsys, "verify", damaged)
    assert code == 1
    assert "rank-00001.safetensors is damaged in bytes" in text
    code, answer = command(capsys, "verify", damaged, "--json")
    assert (code, answer["error"]) == (1, "CheckpointCorruptError")
    assert command(capsys, "verify", saved, "--step", 7) == (
        1,
        f"python -m composable_shard checkpoint verify: {saved} has no checkpoint of step 7; committed steps: 2\n",
    )
    assert command(capsys, "verify", tmp_path / "none")[0] == 2
    with pytest.raises(SystemExit, match="2"):
        command(capsys, "verify")


def test_info_lists_the_content(saved, capsys):
    code, text = command(capsys, "info", saved)
    assert code == 0
    assert f"{saved}/step-00000002: step 2, saved by 2 ranks, 2 files of " in text
    (row,) = [line for line in text.splitlines() if " model.blocks.*.attention.q.weight " in line]
    assert "2 x  float32" in row
    assert row.endswith("2 pieces")
    (row,) = [line for line in text.splitlines() if " model.embed.weight " in line]
    assert row.endswith("also model.head.weight")
    assert "optimizer: optimizer, " in text
    assert '"weight_decay": 0.1' in text
    code, answer = command(capsys, "info", saved, "--tensors", "--json")
    entries = {each["name"]: each for each in answer["entries"]}
    assert {name: each["kind"] for name, each in entries.items()} == {
        "model": "module",
        "optimizer": "optimizer",
        "schedule": "stateful",
        "data.epoch": "value",
        "data.order": "value",
        "random": "per rank",
    }
    assert (answer["step"], answer["ranks"], answer["committed"], answer["latest"]) == (2, 2, [2], 2)
    sizes = {each["name"]: each["bytes"] for each in answer["tensors"]}
    manifest = read_manifest((saved / "step-00000002/manifest.json").read_bytes(), "")
    assert sizes.keys() == manifest.tensors.keys()
    assert sum(each["bytes"] for each in entries.values()) == sum(sizes.values()) == manifest.bytes
    assert sorted(key for each in entries.values() for key in each["tensors"]) == sorted(sizes)


def test_names_in_a_checkpoint_cannot_control_the_terminal(tmp_path, capsys):
    checkpoint.save(tmp_path, {"a\x1b[2J": torch.zeros(1), "b": "\x1b]0;x\x07"}, step=0)
    code, text = command(capsys, "info", tmp_path)
    assert code == 0
    assert "\x1b" not in text
    assert r"a\x1b[2J" in text


def test_prune_keeps_the_newest(tmp_path, capsys):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, {"x": step}, step=step)
    code, answer = command(capsys, "prune", tmp_path, "--keep", 1, "--json")
    assert (code, sorted(answer["removed"])) == (0, [f"{tmp_path}/step-0000000{step}" for step in (1, 2)])
    assert command(capsys, "prune", tmp_path, "--keep", 1) == (0, "nothing to remove\n")
    assert command(capsys, "prune", tmp_path, "--keep", 0)[0] == 2
    assert checkpoint.latest(tmp_path) == 3


def test_safetensors_reads_exported_weights(saved, tmp_path, capsys):
    expected = {
        name.removeprefix("model."): tensor
        for name, tensor in torch.load(saved / "full-0.pt").items()
        if name.startswith("model.") and name != "model.head.weight"
    }
    assert command(capsys, "export", saved, tmp_path / "plain")[0] == 0
    weights = load_file(tmp_path / "plain/model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    other = Transformer(tied=True)
    other.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    load_model(other, tmp_path / "plain/model.safetensors")  # strict: it reads the tied names from the metadata
    assert torch.equal(other.head.weight, expected["embed.weight"])

    options = ("--dtype", "bfloat16", "--max-shard-size", "4KB", "--json")
    code, answer = command(capsys, "export", saved, tmp_path / "cast", *options)
    index = json.loads((tmp_path / "cast/model.safetensors.index.json").read_text())
    assert code == 0
    assert len(answer["files"]) > 2
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == answer["bytes"]
    for name, tensor in expected.items():
        cast = load_file(tmp_path / "cast" / index["weight_map"][name])[name]
        assert torch.equal(cast, tensor.bfloat16() if tensor.is_floating_point() else tensor)
    code, text = command(capsys, "export", saved, tmp_path / "cast")
    assert code == 2
    assert "exists" in text
    code, text = command(capsys, "export", saved, tmp_path / "other", "--name", "ema")
    assert code == 2
    assert "the checkpoint has no module called 'ema'; its modules: model" in text


def test_exports_reject_unsupported_dtypes_and_arguments(tmp_path, capsys):
    net = nn.Linear(2, 2)
    net.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    checkpoint.save(tmp_path / "run", {"net": net}, step=0)
    code, text = command(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert code == 2
    assert "net.phase has dtype complex128, which safetensors does not support" in text
    with pytest.raises(SystemExit, match="2"):
        command(capsys, "export", tmp_path, tmp_path, "--max-shard-size", "many")


@pytest.mark.matrix
def test_a_terminal_shows_a_progress_bar(saved):
    """Runs the command in a separate process."""
    own, other = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    arguments = [sys.executable, "-m", "composable_shard", "checkpoint", "verify", str(saved), "--json"]
    ended = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, stderr=other, timeout=120)
    os.close(other)
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["files"] == 2
    shown = os.read(own, 1 << 16).decode()
    os.close(own)
    assert "verify" in shown
    assert "━" in shown


def test_the_program_in_the_docs_reads_a_checkpoint_with_numpy(saved):
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    (program,) = [each for each in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "def read(" in each]
    names = {}
    exec(program, names)
    full = torch.load(saved / "full-0.pt")
    for key, there in [
        ("model.embed.weight", "model.embed.weight"),
        ("optimizer.state.model.embed.weight.exp_avg", "optimizer.embed.weight.exp_avg"),
    ]:
        assert torch.equal(torch.from_numpy(names["read"](saved / "step-00000002", key)), full[there])
