"""bench/card/float8.py compares float8 engines with bfloat16, and the GPU queue brings torchao as a wheel.

torchao is not among the requirements of the tests. A stand-in has the three names that the script uses. Its weights
are gathered in float8 as torchao's are, and it checks the scales, but layers compute in the format of the activations.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

# At the end of the path, and without bench/ itself, because modules there have the names of helpers of the tests.
sys.path.append(str(Path(__file__).parents[2] / "bench" / "card"))

import _queue_run
import gpu_queue
from _queue_entries import Entry, Part, QueueError, find_entry
from _queue_results import Gpu
from _queue_run import Run

ROOT = Path(__file__).parents[2]
H100 = Gpu("NVIDIA H100 80GB HBM3", "580.1")
FLOAT8 = find_entry("float8")
REQUIREMENT = "torchao==0.18.0"

STAND_IN = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

LARGEST = torch.finfo(torch.float8_e4m3fn).max
KEEP_CLASS = {"empty_like", "new_zeros", "slice", "copy_", "view", "as_strided", "_to_copy", "split", "clone", "detach"}


@dataclass
class Float8LinearConfig:
    enable_fsdp_float8_all_gather: bool
    emulate: bool


class Weight(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner
        self.scale = None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out) if func.overloadpacket.__name__ in KEEP_CLASS else out

    def current_scale(self):  # all ranks have the same shard
        return LARGEST / self.inner.abs().max()

    def fsdp_pre_all_gather(self, mesh):
        if self.scale is None:  # before the first optimizer step
            self.scale = self.current_scale()
        if self.scale != self.current_scale():
            raise ValueError("the scale was not computed after the optimizer step")
        return ((self.inner * self.scale).to(torch.float8_e4m3fn),), self.scale

    def fsdp_post_all_gather(self, outputs, scale, param_dtype, *, out=None):
        (gathered,) = outputs
        whole = (gathered.float() / scale).to(param_dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)


def convert_to_float8_training(model, *, config, module_filter_fn):
    assert config == Float8LinearConfig(True, emulate=True), config
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and module_filter_fn(layer, name):
            layer.weight = nn.Parameter(Weight(layer.weight.detach()))


def precompute_float8_dynamic_scale_for_fsdp(model):
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and isinstance(parameter._local_tensor, Weight):
            parameter._local_tensor.scale = parameter._local_tensor.current_scale()
"""


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder of wheels with the stand-in, as pip would download it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "torchao-0.18.0-py3-none-any.whl", "w") as archive:
        archive.writestr("torchao/__init__.py", "")
        archive.writestr("torchao/float8.py", STAND_IN)
        archive.writestr("torchao-0.18.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torchao\nVersion: 0.18.0\n")
    monkeypatch.setattr(_queue_run, "WHEELS", folder)
    return folder


def run_part(engines, out):
    """Dry-run the entry with some engines. Return whether it succeeded, the outcome, and the result of each engine."""
    part = FLOAT8.parts[0]
    part = dataclasses.replace(part, dry=f"{part.dry} --engines {engines}")
    run = Run(dataclasses.replace(FLOAT8, parts=(part,)), out, dry=True, gpu=None)
    succeeded = run.perform([part.name])
    outcome = json.loads(run.file.read_text())["parts"][part.name]
    figures = outcome["figures"] or {"results": []}
    return succeeded, outcome, {each["engine"]: each for each in figures["results"]}


@pytest.mark.matrix  # 20 s
def test_ours_trains_in_float8_as_fsdp2_does_and_gathers_weights_in_one_byte(wheels, tmp_path):
    fsdp2, ours = "fsdp2-blocks-float8", "ours-blocks-float8"
    succeeded, outcome, results = run_part(f"{fsdp2},{ours}", tmp_path)
    assert succeeded, outcome["output"]
    assert outcome["figures"]["settings"]["torchao"] == "0.18.0"
    assert results[ours]["losses"] == results[fsdp2]["losses"]
    assert results[ours]["loss_difference"] == 0
    # The root is gathered once, in bfloat16. Blocks are gathered in forward and in backward, their norms in bfloat16.
    root = 2 * 512 * 64 + 64
    linear, norms = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128, 2 * 64
    expected = 2 * root + 2 * 2 * (linear + 2 * norms)
    assert (results[ours]["gathered_bytes"], results[fsdp2]["gathered_bytes"]) == (expected, expected)


def test_without_the_wheel_the_queue_names_its_download(wheels, tmp_path, monkeypatch):
    (wheels / "torchao-0.18.0-py3-none-any.whl").unlink()
    monkeypatch.setattr(_queue_run.metadata, "version", lambda name: "0.17.0")  # also where torchao is installed
    with pytest.raises(QueueError, match=r"float8 needs torchao==0\.18\.0.*pip download .* --dest wheels torchao==0"):
        Run(FLOAT8, tmp_path, dry=False, gpu=H100).perform(["tokens4096"])
    assert list(tmp_path.iterdir()) == [wheels]  # no result


def test_a_part_finds_its_wheel_and_other_versions_of_the_package_do_not_count(wheels, tmp_path):
    code = "import importlib.metadata, torchao.float8; print(importlib.metadata.version('torchao'))"
    part = Part("a", f'-c "{code}"', "", "", 60, wheels=(REQUIREMENT,))
    run = Run(Entry("planted", "?", (part,)), tmp_path, dry=False, gpu=H100)
    assert run.perform(["a"])
    assert json.loads(run.file.read_text())["parts"]["a"]["output"] == ["0.18.0"]
    other = dataclasses.replace(part, wheels=("torchao==0.1.0", "pytest==0.1.0", f"pytest=={pytest.__version__}"))
    assert _queue_run.find_missing([part, other]) == ["torchao==0.1.0", "pytest==0.1.0"]


def test_next_shows_the_download_of_missing_wheels(wheels, monkeypatch, capsys):
    monkeypatch.setattr(gpu_queue, "find_next", lambda *_: (FLOAT8, FLOAT8.part_names))
    assert gpu_queue.show_next("h100", 540) == 0
    assert "wheels:" not in capsys.readouterr().out
    monkeypatch.setattr(_queue_run, "WHEELS", wheels / "none")
    if _queue_run.find_missing(FLOAT8.parts):
        assert gpu_queue.show_next("h100", 540) == 0
        assert f"wheels:    {_queue_run.download_command([REQUIREMENT])}\n" in capsys.readouterr().out


COMPARISON = """
import argparse
from unittest import mock

import float8
import torch
from llama_steps import Turn

# Steps take 2 s with FSDP2, 1 s with ours, and half as long in float8. The optimizer takes 0.25 s of them.
class Played:
    def __init__(self, engine):
        self.engine = engine
        self.seconds = (2 if engine.startswith("fsdp2") else 1) / (2 if "float8" in engine else 1)
        self.turns = 0

    def call(self, method, tokens, steps):
        self.turns += 1
        if "whole" in self.engine and self.turns == 2:
            raise SystemExit("the process ended: Unsupported: why\\n\\nfrom user code:\\n a stack")
        loss = 3.0 + 0.3 * ("float8" in self.engine) + 0.003 * (self.engine == "ours-blocks-float8")
        return Turn([self.seconds - 0.25] * steps, [0.25] * steps, [loss] * steps)


names = "fsdp2-blocks,ours-blocks,fsdp2-blocks-float8,ours-blocks-float8,ours-whole-float8".split(",")
players = {engine: Played(engine) for engine in names}
engines = float8.Engines(players)
rounds = [engines.call("measure", 100, 2) for _ in range(3)]
assert players["ours-whole-float8"].turns == 2
assert engines.errors == {"ours-whole-float8": "the process ended: Unsupported: why"}
results = float8.evaluate(100, names, rounds, engines.errors)
by_name = {each.engine: each for each in results}
ours = by_name["ours-blocks-float8"]
assert (ours.step_ms.median, ours.optimizer_ms.median, ours.tokens_per_s.median) == (500, 250, 200), ours
assert (ours.over_fsdp2.median, ours.over_bf16.median) == (0.5, 0.5), ours
assert abs(ours.loss_difference - 0.003 / 3.3) < 1e-9 and abs(ours.bf16_loss_difference - 0.101) < 1e-9, ours
assert by_name["ours-blocks"].over_bf16 is None and by_name["ours-blocks"].loss_difference == 0
failed = by_name["ours-whole-float8"]
assert (failed.step_ms, failed.error) == (None, "the process ended: Unsupported: why")
assert float8.find_problems(results, 1e-3) == ["100 tokens, ours-whole-float8 failed"]
wrong, _ = float8.find_problems(results, 1e-4)
assert wrong == "100 tokens, ours-blocks-float8: losses differ from FSDP2 by 9.1e-04; --tolerance 0.0001"
rounds[0]["ours-blocks"].losses[0] = float("nan")
[finite, _] = float8.find_problems(float8.evaluate(100, names, rounds, engines.errors), 1e-3)
assert finite == "100 tokens, ours-blocks: a loss is not finite, or FSDP2 has none"

options = argparse.Namespace(device="cuda")
with (
    mock.patch.object(float8, "find_spec", lambda name: name),
    mock.patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA A100"),
    mock.patch.object(torch.cuda, "get_device_capability", lambda: (8, 0)),
):
    assert float8.check_machine(options) == "NVIDIA A100 cannot multiply float8, which needs compute capability 8.9"
with mock.patch.object(float8, "find_spec", lambda name: None), mock.patch.object(float8, "run") as run:
    assert float8.main(["--device", "cpu"]) == 2
    assert not run.called
    run.return_value = []
    assert float8.main(["--device", "cpu", "--skip-unsupported"]) == 0
    [[options]] = [call.args for call in run.mock_calls[:1]]
    assert options.engines == ["fsdp2-blocks", "ours-blocks", "ours-whole"], options
"""


@pytest.mark.matrix
def test_engines_are_compared_by_format_and_a_failed_engine_is_a_result():
    folders = (ROOT / "bench", ROOT / "bench" / "card", ROOT)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", COMPARISON]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "engines with -float8 need torchao, which is not installed" in done.stderr
