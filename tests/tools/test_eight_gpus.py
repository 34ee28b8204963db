"""bench/eight_gpus.sh runs on two gloo ranks, reports what fails, and compares ours with FSDP2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_float8_script import STAND_IN

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "eight_gpus.sh"
TINY = ("--device=cpu", "--gpus=2", "--size=tiny", "--sequence=32", "--rounds=1")


def environment(**variables):
    """Environment of a process that finds no CUDA device."""
    return {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **variables}


def run_script(folder, *arguments, limit_s, **variables):
    """Run the script in a folder, which gets its files."""
    command = ["bash", str(SCRIPT), *arguments]
    variables = environment(**variables)
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=limit_s, check=False
    )


def read_modes(folder):
    """Return the results by mode."""
    document = json.loads((folder / "eight_gpus.json").read_text())
    return document, {each["mode"]: each for each in document["results"]}


def assert_equal_losses(mode):
    ours, fsdp2 = (next(job for job in mode["jobs"] if job["engine"] == engine) for engine in ("ours", "fsdp2"))
    assert ours["losses"] == fsdp2["losses"]
    assert len(ours["losses"]) == 6 + 10
    assert all(len(ranks) == 2 and ranks[0] != ranks[1] for ranks in ours["losses"])
    assert ours["losses"][-1] < ours["losses"][1]
    assert mode["loss_difference"] == 0


@pytest.mark.matrix
def test_a_mode_that_fails_is_reported_and_the_others_keep_their_figures(tmp_path):
    done = run_script(tmp_path, *TINY, "--modes=eager,float8,one-graph", "--backend=none_such", limit_s=200)
    assert done.returncode == 1, done.stderr
    document, modes = read_modes(tmp_path)
    assert list(modes) == ["eager", "float8", "one-graph"]
    assert_equal_losses(modes["eager"])
    assert modes["eager"]["ratio"]["median"] > 0
    assert modes["eager"]["jobs"][0]["parameters"] == 139_584
    assert modes["float8"]["ours"] is modes["one-graph"]["ours"] is None
    if document["about"]["torchao"] is None:
        assert modes["float8"]["jobs"] == []
        assert "float8: torchao is not installed: pip install torchao" in done.stdout
    [failed] = modes["one-graph"]["jobs"]
    assert failed["error"].startswith("rank ")
    assert "InvalidBackend" in failed["error"]
    assert "one-graph, ours, round 1: rank" in done.stdout
    assert "nothing is captured on a CPU" in done.stdout
    assert "FSDP2, tokens/s" in done.stdout
    about = document["about"]
    assert (about["torch"], about["device"], document["settings"]["modes"]) == (torch.__version__, "cpu", list(modes))
    assert about.keys() >= {"cuda", "nccl", "driver", "gpus", "torchao", "commit", "date"}
    assert "InvalidBackend" in (tmp_path / "eight_gpus.log").read_text()


def test_too_few_gpus_are_an_error_before_anything_starts(tmp_path):
    done = run_script(tmp_path, "--gpus=512", limit_s=60)
    assert done.returncode == 2
    assert "eight_gpus.sh: --gpus is 512, but torch finds 0 CUDA GPUs; " in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("python", "message"),
    [("none-such", "no Python found; activate an environment"), ("no_torch", "has no torch, numpy, rich; run: ")],
)
def test_an_unsuitable_python_is_an_error(tmp_path, python, message):
    if python == "no_torch":
        python = tmp_path / python
        python.write_text(f'#!/bin/sh\nexec "{sys.base_prefix}/bin/python3" -I -S "$@"\n')  # no installed packages
        python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=environment(PYTHON=str(python)), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.matrix
@pytest.mark.timeout(500)
def test_ours_has_the_losses_of_fsdp2_in_every_mode(tmp_path):
    site = tmp_path / "site"  # with a stand-in for torchao
    for file, text in {
        "torchao/__init__.py": "",
        "torchao/float8.py": STAND_IN,
        "torchao-0.18.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchao\nVersion: 0.18.0\n",
    }.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text)
    done = run_script(tmp_path, *TINY, "--backend=aot_eager", limit_s=480, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stdout + done.stderr
    document, modes = read_modes(tmp_path)
    assert document["about"]["torchao"] == "0.18.0"
    assert list(modes) == ["eager", "compiled", "float8", "graphs", "one-graph"]
    for name in ("eager", "compiled", "float8", "graphs"):
        assert_equal_losses(modes[name])
    assert (modes["one-graph"]["reference"], modes["one-graph"]["loss_difference"]) == ("compiled", 0)
    assert modes["float8"]["jobs"][0]["losses"] != modes["compiled"]["jobs"][0]["losses"]


def find_ranks(folder):
    """Return the ids of the processes whose working directory is the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder.resolve():
                found.append(int(process.name))
        except OSError:
            pass  # it has ended, or belongs to another user
    return found


@pytest.mark.matrix
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs Linux")
def test_ctrl_c_ends_all_processes_and_keeps_the_figures(tmp_path):
    with subprocess.Popen(
        ["bash", str(SCRIPT), *TINY, "--modes=eager", "--rounds=20"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as script:
        try:
            lines = iter(script.stdout.readline, "")
            assert any(line.startswith("round 1 of 20, eager, fsdp2: ") for line in lines)
            end = time.monotonic() + 30
            while len(find_ranks(tmp_path)) < 3 and time.monotonic() < end:  # the script and two ranks of the next job
                time.sleep(0.05)
            assert len(find_ranks(tmp_path)) >= 3
            os.killpg(script.pid, signal.SIGINT)
            rest = script.communicate(timeout=60)[0]
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
    assert script.returncode == 130
    assert "FSDP2, tokens/s" in rest
    assert find_ranks(tmp_path) == []
    _, modes = read_modes(tmp_path)
    assert modes["eager"]["jobs"][0]["engine"] == "fsdp2"


def run_code(code, limit_s=100):
    """Run code in a separate process, in which modules of bench/ can be imported by name."""
    variables = environment(PYTHONPATH=os.pathsep.join(map(str, (ROOT / "bench", ROOT))))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr


EVALUATION = """
import dataclasses
import json
import tempfile
from pathlib import Path
from unittest import mock

import eight_gpus
from eight_gpus import FSDP2, OURS, Job, Machine

GIB = 1 << 30
folder = Path(tempfile.mkdtemp())


def options(*arguments):
    return eight_gpus.parse([f"--json={folder / 'rounds.json'}", *arguments])


def job(mode, engine, number, seconds, loss=3.0, gib=70, error=None):
    if error:
        return Job(mode, engine, number, 9.0, error=error)
    losses = [[loss, 2 * loss], [loss, loss]]
    return Job(mode, engine, number, 9.0, [seconds, seconds, 9 * seconds], losses, gib * GIB, gib * GIB)


jobs = [
    job("eager", FSDP2, 1, 2.0, gib=80),
    job("eager", OURS, 1, 1.0),
    job("eager", OURS, 2, 2.0, loss=3.003),
    job("eager", FSDP2, 2, 2.0, loss=3.0, gib=80),
    job("eager", OURS, 3, 2.0, error="rank 1: RuntimeError: why\\nwhere"),
    job("eager", FSDP2, 3, 2.0, loss=3.006, gib=80),
    job("compiled", FSDP2, 1, 1.0),
    job("graphs", FSDP2, 1, 1.0, error="rank 0: AcceleratorError: not permitted"),
    job("graphs", OURS, 1, 0.5),
    job("one-graph", OURS, 1, 1.0),
]
unsupported = {"float8": "torchao is not installed"}
results = {each.mode: each for each in eight_gpus.evaluate(jobs, options(), unsupported)}
assert list(results) == ["eager", "compiled", "float8", "graphs", "one-graph"]

# The median step counts. A round without figures of ours has no ratio.
eager = results["eager"]
assert (eager.ours.median, eager.ours.high, eager.fsdp2.median) == (0.75 * 16384, 16384, 8192), eager
assert (eager.ratio.median, eager.ratio.low, eager.ratio.high) == (1.5, 1.0, 2.0), eager.ratio
assert (eager.ours_reserved.median, eager.reserved_ratio.median) == (70 * GIB, 0.875)
assert abs(eager.loss_difference - 0.001) < 1e-9 and abs(eager.repeated_difference - 0.006 / 3.006) < 1e-9, eager
assert eager.problems == ["eager, ours, round 3: rank 1: RuntimeError: why\\nwhere"], eager.problems
assert (eager.published, results["graphs"].published) == ((5762, 82.4), None)
assert results["float8"].published == (8532, 76.8) and results["compiled"].published == (6667, 77.0)
assert results["float8"].unsupported == "torchao is not installed"

# If FSDP2 cannot be captured, captured steps of ours are compared with its compiled blocks.
graphs = results["graphs"]
assert (graphs.reference, graphs.ratio.median, graphs.loss_difference) == ("compiled", 2.0, 0.0), graphs
assert graphs.problems == [] and graphs.notes == ["graphs, FSDP2, round 1: rank 0: AcceleratorError: not permitted"]
assert (results["one-graph"].reference, results["one-graph"].ratio.median) == ("compiled", 1.0)
rows = {row[0]: row for row in map(eight_gpus.describe, results.values())}
assert rows["eager"][1:4] == ("12,288", "8,192", "1.500 [1.000, 2.000]"), rows
assert rows["eager"][4:7] == ("70.0", "80.0", "0.875 [0.875, 0.875]") and rows["eager"][7] == "1.0e-03 (2.0e-03)", rows
assert rows["graphs"][2] == "16,384 (compiled)" and rows["float8"][1] == "not run", rows

# Exit status
status = lambda jobs, *arguments: eight_gpus.find_status(
    eight_gpus.evaluate(jobs, options(*arguments), unsupported), options(*arguments)
)
successful = [each for each in jobs if not (each.error and each.engine == OURS)]
assert status(jobs, "--skip-unsupported") == 1
assert status(successful, "--skip-unsupported") == 0
assert status(successful) == 1
assert status(successful, "--modes=eager,graphs") == 0
assert status(successful, "--skip-unsupported", "--tolerance=0.0009") == 1
strict = options("--tolerance=0.0009")
[wrong] = eight_gpus.evaluate(successful, strict)[0].problems
assert wrong == "eager: losses of ours differ from those of FSDP2 by 1.0e-03; --tolerance 0.0009", wrong
# The published figures are those of one configuration.
assert eight_gpus.evaluate(jobs, options("--batch=1"))[0].published is None

# The order alternates, failed engines get no further jobs, and figures are written after each job.
machine = Machine({"torch": "2.13"}, 8, True, 79.2, [], unsupported)
written = []


def run_job(mode, engine, number, options, log):
    if options.json.exists():
        document = json.loads(options.json.read_text())
        written.append(sum(len(each["jobs"]) for each in document["results"]))
        assert document["about"] == {"torch": "2.13"}
    return job(mode, engine, number, 1.0, error="broken" if (mode, engine) == ("graphs", FSDP2) else None)


finished = []
with mock.patch.object(eight_gpus, "run_job", run_job):
    eight_gpus.run(options("--rounds=2", "--modes=eager,float8,graphs,one-graph"), machine, finished)
order = [(each.round, each.mode, each.engine) for each in finished]
assert order == [
    (1, "eager", FSDP2), (1, "eager", OURS), (1, "graphs", FSDP2), (1, "graphs", OURS), (1, "one-graph", OURS),
    (2, "eager", OURS), (2, "eager", FSDP2), (2, "graphs", OURS), (2, "one-graph", OURS),
], order
assert written == [*range(1, len(order))], written

# The machine
find_obstacle = eight_gpus.find_obstacle
with mock.patch.object(eight_gpus.torch.version, "cuda", "13.0"):
    assert find_obstacle(options(), machine) is None
    few = find_obstacle(options(), dataclasses.replace(machine, gpus=4))
    assert few.startswith("--gpus is 8, but torch finds 4 CUDA GPUs; see nvidia-smi and CUDA_VISIBLE_DEVICES"), few
    assert "has no NCCL" in find_obstacle(options(), dataclasses.replace(machine, has_nccl=False))
assert "too large for a CPU" in find_obstacle(options("--device=cpu"), machine)
assert eight_gpus.count_parameters("8b") == 8_030_261_248
"""


def test_engines_are_compared_within_rounds_and_problems_of_ours_are_errors():
    run_code(EVALUATION)


FAKE_RANKS = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import _eight_gpus_worker
import _live_bytes
import composable_shard as cs
from _llama_model import SIZES

WORLD, SEQUENCE = 8, 8192
settings = {{"device": "cpu", "mode": "eager", "engine": {engine!r}, "sequence": SEQUENCE}}
dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
mesh = init_device_mesh("cpu", (WORLD,))
live = _live_bytes.LiveBytes()
with FakeTensorMode(allow_non_fake_inputs=True), live.counting():
    model = _eight_gpus_worker.build(settings, SIZES["8b"], mesh, 0)
    if settings["engine"] == "ours":
        model.set_pool_policy(cs.PoolPolicy(keep_idle=False))  # as on a GPU
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, SEQUENCE + 1, dtype=torch.long)
    for _ in range(2):
        live.peak = live.now
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
count = sum(parameter.numel() for parameter in model.parameters())
assert count == 8_030_261_248, count
# Between steps: parameters and two states of AdamW in float32, and 0.2 GiB of buffers, tokens and step counters at most
states = 3 * 4 * count / WORLD
assert states <= live.now <= states + 0.2 * 2**30, live.now
assert 65 * 2**30 < live.peak < 70 * 2**30, live.peak / 2**30
"""


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["ours", "fsdp2"])
def test_a_rank_of_the_8b_model_needs_less_than_80_gib_with_an_ideal_allocator(engine):
    run_code(FAKE_RANKS.format(engine=engine), limit_s=200)
