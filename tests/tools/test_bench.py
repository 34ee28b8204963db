"""The benchmarks run with tiny settings, print their tables and write valid JSON."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"

NOOP = """
import torch
import torch.distributed as dist
import _noop
from torch.distributed.device_mesh import init_device_mesh

_noop.init(8)
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
assert dist.get_world_size() == 8
assert mesh["shard"].size() == 4
group = mesh["shard"].get_group()
x, y = torch.ones(2), torch.full((8,), 7.0)
with _noop.recording() as calls:
    works = [
        group._allgather_base(y, x),
        group._reduce_scatter_base(x, y, dist.ReduceScatterOptions()),
        group.alltoall_base(y, y, [], []),
        dist.all_reduce(x, async_op=True),
        dist.broadcast(x, 0, async_op=True),
        dist.barrier(async_op=True),
        dist.isend(x, 1),
        dist.irecv(x, 1),
    ]
    with dist._coalescing_manager(async_ops=True) as coalesced:
        dist.all_reduce(x)
        dist.all_reduce(y)
    coalesced.wait()
for work in works:
    work.wait()
    assert work.is_completed()
assert x.tolist() == [1, 1]
assert y.tolist() == [7] * 8
assert len(calls) >= len(works) + 1
_noop.replay(calls)
ops = torch.ops._c10d_functional
with torch.enable_grad():
    z = torch.ones(2, requires_grad=True)
    full = ops.wait_tensor(ops.all_gather_into_tensor(z, 4, group.group_name))
    full.sum().backward()
assert full.shape == (8,)
_noop.shutdown()
_noop.init(512)
assert init_device_mesh("cpu", (512,)).size() == 512
_noop.shutdown()
"""


def python(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{BENCH}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def bench(name: str, *arguments: str, limit_s: float = 120.0) -> str:
    done = python(str(BENCH / name), *arguments, timeout=limit_s)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


BESIDE = f"""
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path[:0] = [{str(BENCH)!r}, {str(ROOT)!r}]
"""


class Beside:
    """Runs code in a second process, in which modules of bench/ can be imported by name."""

    def __init__(self) -> None:
        self._process: ProcessPoolExecutor | None = None

    def __call__(self, code: str) -> None:
        if self._process is None:
            fresh = multiprocessing.get_context("spawn")
            self._process = ProcessPoolExecutor(1, fresh, initializer=exec, initargs=(BESIDE,))
        try:
            self._process.submit(exec, code, {}).result(timeout=60)
        except BaseException:
            self.close()  # the next code gets a new process, without any state of this one
            raise

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for child in multiprocessing.active_children():
                child.kill()
            process.shutdown()


@pytest.fixture(scope="module")
def beside() -> Iterator[Beside]:
    runs = Beside()
    yield runs
    runs.close()


def test_the_noop_backend_completes_every_collective_without_changing_data(beside: Beside) -> None:
    beside(NOOP)


@pytest.mark.matrix
def test_run_all_writes_results_of_the_overhead_and_a_chart(tmp_path: Path) -> None:
    shown = bench("run_all.py", "--smoke", "--only=overhead", f"--results={tmp_path}")
    assert "added / FSDP2's" in shown
    (file,) = tmp_path.glob("overhead-cpu-torch*.json")
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    found = read(file)
    assert found["about"]["device"] == "cpu"
    assert found["settings"]["world"] == [4]
    assert [result["engine"] for result in found["results"]] == ["plain", "ours", "fsdp2"]
    for result in found["results"]:
        assert result["step"]["low"] <= result["step"]["median"] <= result["step"]["high"]
        assert (result["collectives"] > 0) == (result["engine"] != "plain")


CHARTS = """
import _plots
import run_all

drawn = {run.script.removesuffix(".py") for run in run_all.RUNS.values()}
assert drawn <= _plots.PANELS.keys(), drawn - _plots.PANELS.keys()
results = [
    {"operation": "save", "model": "layers", "tensors": 6, "who": who, "seconds": {"median": 2, "low": 1, "high": 3}}
    for who in ("ours", "dcp")
]
[panel] = _plots.checkpoint([*results, {"largest_group": 1, "rank_0": 1, "other_ranks": 1}])
assert (panel.title, list(panel.figures)) == ("Save", [("layers, 6 tensors", "ours"), ("layers, 6 tensors", "dcp")])
"""


def test_every_benchmark_of_run_all_has_a_chart(beside: Beside) -> None:
    beside(CHARTS)


@pytest.mark.matrix
def test_overhead_reports_the_time_per_parameter_and_its_growth_with_modules(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    shown = bench("overhead.py", "--blocks=2,4", "--per-group=1,3", "--rounds=2", "--world=4", f"--json={file}")
    assert "added per parameter" in shown
    assert "added / with 2 blocks" in shown
    results = [result for result in read(file)["results"] if result["engine"] == "ours"]
    assert [(result["per_group"], result["blocks"]) for result in results] == [(1, 2), (1, 4), (3, 2), (3, 4)]
    assert [result["growth"]["median"] == 1 for result in results] == [True, False, True, False]


INSTRUCTIONS = r"""
import shutil
import sys
from unittest import mock

import instructions

assert instructions.total_of("version: 1\nsummary: 0\n\nfn=(1)\n1 42\n\ntotals: 98000\n") == 98000
counts = {"plain": 600.0, "ours": 900.0, "fsdp2": 1600.0}
assert [result.ratio for result in instructions.results_of(8, counts)] == [None, 0.3, 1.0]
with mock.patch.object(sys, "argv", ["instructions.py"]), mock.patch.object(shutil, "which", lambda name: None):
    try:
        instructions.main()
    except SystemExit as stop:
        assert "needs valgrind" in str(stop.code), stop.code
    else:
        raise AssertionError("no error")
"""


def test_instructions_reads_the_totals_of_callgrind_and_raises_an_error_without_it(beside: Beside) -> None:
    beside(INSTRUCTIONS)


@pytest.mark.matrix
def test_first_steps_of_many_modules_are_compared_with_fsdp2(tmp_path: Path) -> None:
    file = tmp_path / "first_step.json"
    assert "first step, s" in bench("first_step.py", "--modules=20", "--groups=each", f"--json={file}")
    found = {result["engine"]: result for result in read(file)["results"]}
    assert set(found) == {"ours", "fsdp2"}
    assert found["fsdp2"]["ratio"]["median"] == 1.0
    assert found["ours"]["first"]["median"] > found["ours"]["third"]["median"] > 0


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_live_memory_at_the_loss_is_at_most_that_of_fsdp2(tmp_path: Path) -> None:
    file = tmp_path / "loss_memory.json"
    shape = "--shape=layers=3,width=256,heads=8,vocabulary=32000,sequence=512"
    assert "at the loss" in bench("loss_memory.py", shape, f"--json={file}", limit_s=200)
    found = {(each["world"], each["engine"]): each for each in read(file)["results"]}
    for world in (8, 128):
        ours, fsdp2 = found[world, "ours"], found[world, "fsdp2"]
        # Ours adds float32 values that mark used gradients: for each rank at most 16 per group, with padding.
        marks = 4 * world * 16 * 4
        assert all(ours[when] <= fsdp2[when] + marks for when in ("between", "first", "at_loss", "peak"))
        assert found[world, "ours-keeps"]["peak"] > fsdp2["peak"]


@pytest.mark.matrix
def test_a_step_with_state_on_disk_is_compared_with_raw_disk_access(tmp_path: Path) -> None:
    file = tmp_path / "offload.json"
    small = ("--parameters=8000000", "--tensors=8", "--memory=32", "--rounds=1", f"--folder={tmp_path}")
    assert "parameters are bitwise identical" in bench("offload.py", *small, f"--json={file}")
    *sides, memory = read(file)["results"]
    assert [each["side"] for each in sides] == ["raw", "dd", "step"]
    assert all(each["seconds"]["median"] > 0 for each in sides)
    assert memory["state"] < 2 * 8_000_000 * 4 + 1
    assert memory["resident"] < memory["allowed"] + (16 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["offload.json"]


@pytest.mark.matrix
def test_checkpoints_are_compared_with_dcp_and_plain_files(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.json"
    small = ("--parameters=100000", "--tensors=6,30", "--gpt=tiny", "--rounds=1", f"--folder={tmp_path}")
    assert "blocked" in bench("checkpoint.py", *small, f"--json={file}")
    found = {(each["operation"], each["tensors"], each["who"]): each for each in read(file)["results"][:-1]}
    models = {(each["model"], each["tensors"]) for each in found.values()}
    assert models == {("layers", 6), ("layers", 30), ("gpt tiny", 45)}
    for operation in ("save", "load, warm", "load, cold"):
        for tensors in (6, 30, 45):
            assert found[operation, tensors, "ours"]["seconds"]["median"] > 0
            assert found[operation, tensors, "dcp"]["over"]["dcp"]["median"] == 1.0
    assert found["blocked", 6, "ours"]["over"]["ours, synchronous"]["median"] > 0
    assert found["steps beside", 6, "ours"]["over"]["a plain writer"]["median"] > 0
    assert found["dcp reads", 30, "fsdp2"]["over"]["fsdp2"]["median"] == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.json"]


@pytest.mark.matrix
def test_checkpoints_in_a_store_are_compared_with_dcp_and_plain_requests(tmp_path: Path) -> None:
    file = tmp_path / "store.json"
    small = ("--store", "--parameters=2000000", "--tensors=6", "--rounds=1", f"--folder={tmp_path}")
    assert "plain" in bench("checkpoint.py", *small, f"--json={file}")
    seen = {(each["operation"], each["who"]): each for each in read(file)["results"]}
    assert seen.keys() == {(operation, who) for operation in ("save", "load") for who in ("ours", "dcp", "plain")}
    assert all(each["over"]["plain"]["median"] > 0 for each in seen.values())


@pytest.mark.matrix
def test_weights_get_to_receivers_of_another_layout_in_every_way(tmp_path: Path) -> None:
    file = tmp_path / "transfer.json"
    small = ("--size=tiny", "--dtypes=bfloat16", "--rounds=1")
    assert "bytes / minimum" in bench("transfer.py", *small, f"--json={file}")
    found = {each["way"]: each for each in read(file)["results"]}
    assert found["plain"]["over_minimum"] == found["plain"]["over_plain"]["median"] == 1.0
    # The six ranks also exchange objects: 4,860 bytes with this plan, and 7,050 with fingerprints. They do not grow
    # with the size of the weights.
    assert 0 <= found["ours"]["nbytes"] - found["plain"]["nbytes"] < 5000
    assert found["skip-none"]["nbytes"] < 8000
    assert found["skip-tenth"]["over_minimum"] < 0.5
    assert min(found[way]["over_minimum"] for way in ("iter_full_state", "fsdp2")) > 4


@pytest.mark.matrix
def test_fewer_bits_save_more_of_a_step_on_slow_links_than_on_fast_ones(tmp_path: Path) -> None:
    file = tmp_path / "lowbit.json"
    small = ["--gbps=1,100", "--world=4", "--width=64", "--blocks=2"]
    assert "break-even" in bench("lowbit.py", *small, f"--json={file}", limit_s=240.0)
    found = {(each["gbps"], each["side"]): each for each in read(file)["results"]}
    low, bf16 = "gather fp8, reduce int8", "bf16"
    assert found[1, low]["megabytes"] < 0.45 * found[1, bf16]["megabytes"]
    assert found[1, low]["over_bf16"] < 0.45 < found[100, low]["over_bf16"] < 0.7
    assert found[1, low]["break_even_gbps"] > 100 > 0 == found[1, bf16]["rounding_h100_ms"]


@pytest.mark.matrix
def test_the_loss_with_fewer_bits_is_compared_from_the_same_seeds(tmp_path: Path) -> None:
    file = tmp_path / "lowbit_loss.json"
    assert "minus fp32" in bench("lowbit_loss.py", "--steps=25", "--seeds=2", f"--json={file}", limit_s=240.0)
    losses = {each["policy"]: each["losses"] for each in read(file)["results"]}
    assert len(losses) == 5
    assert len({str(each) for each in losses.values()}) == 5  # every policy changes the result
    assert all(abs(a - b) < 0.05 for each in losses.values() for a, b in zip(each, losses["fp32"], strict=True))


@pytest.mark.matrix
def test_owned_optimizers_are_compared_with_gathered_matrices(tmp_path: Path) -> None:
    file = tmp_path / "optimizers.json"
    small = ["--world=2", "--width=64", "--layers=1", "--rounds=2", "--fabric=8", "--fabric-layers=1"]
    assert "A step of Muon" in bench("optimizers.py", *small, f"--json={file}", limit_s=240.0)
    results = {(r["network"], r["side"]): r for r in read(file)["results"]}
    assert results["gloo", "owner"]["apart"] == results["gloo", "gathered"]["apart"] == 0.0
    assert results["fabric", "owner"]["sent_mb"] < results["fabric", "gathered"]["sent_mb"]
    assert results["fabric", "owner"]["over_gathered"]["median"] < 1


@pytest.mark.matrix
def test_live_gradients_are_compared_with_fsdp2(tmp_path: Path) -> None:
    file = tmp_path / "backward.json"
    shape = "--shape=layers=2,width=64,heads=2,vocabulary=128,sequence=16"
    assert "after backward" in bench("backward_memory.py", shape, "--world=2", f"--json={file}", limit_s=240.0)
    results = {r["engine"]: r for r in read(file)["results"]}
    assert results["ours-in-backward"]["gradients"] < results["ours"]["gradients"] == results["fsdp2"]["gradients"]
    assert results["ours-in-backward"]["behind_backward"] == results["ours-in-backward"]["between"]


@pytest.mark.matrix
def test_code_metrics_stay_within_their_limits(tmp_path: Path) -> None:
    file = tmp_path / "house.json"
    assert "step functions" in bench("house.py", f"--json={file}")
    ours, fsdp2 = read(file)["results"]
    assert fsdp2["code"] > 1000  # not an empty measurement
    assert fsdp2["step_functions"] > 10
    most = {
        "names_on_top": 26,
        "writes_to_others": 65,
        "outside_constructors": 12,
        "most_attributes": 20,
        "functions_above_10": 55,
        "most_complexity": 20,
        "step_depth": 15,
        "readme_lines": 150,
    }
    assert {name: ours[name] for name in most if ours[name] > most[name]} == {}


@pytest.mark.matrix
def test_the_profile_shows_functions_of_the_package() -> None:
    shown = bench("overhead.py", "--blocks=2", "--world=8", "--profile=ours", "--lines=200")
    assert "composable_shard/_" in shown


@pytest.mark.matrix
def test_strategies_over_nodes_are_predicted_and_checked_on_a_simulated_network(tmp_path: Path) -> None:
    file = tmp_path / "hfsdp.json"
    shown = bench("hfsdp.py", "--worlds=16", "--sequences=256", "--strategies=hfsdp,zero3,few", f"--json={file}")
    assert "Predicted, not measured" in shown
    rows = {(row["part"], row["strategy"]): row for row in read(file)["results"]}
    assert {strategy for part, strategy in rows if part == "predicted"} == {"hfsdp", "zero3", "few"}
    for strategy in ("zero3", "few"):
        row = rows["network", strategy]
        assert row["predicted_s"] == pytest.approx(row["simulated_s"])


@pytest.mark.matrix
def test_overlap_compares_exposed_communication_with_a_simulation(tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    engines = "--engines=ours,ours-auto,ours-compiled,fsdp2,fsdp2-again"
    shown = bench("overlap.py", "--models=uniform", "--ratios=1", "--rounds=1", "--log=ours", engines, f"--json={file}",
                  limit_s=240.0)  # fmt: skip
    assert "Exposed communication, ms: uniform, streams clock" in " ".join(shown.split())
    assert "reduce_scatter" in shown
    found = {(r["clock"], r["engine"]): r["exposed_ms"]["median"] for r in read(file)["results"]}
    for clock in ("virtual", "streams"):
        assert found[clock, "fsdp2"] == found[clock, "fsdp2-again"]  # control: exact clocks give the same result again
        assert all(found[clock, "no order can"] <= ms + 1e-6 for (where, _), ms in found.items() if where == clock)
    # With streams, FSDP2 prefetches one group, like the simulation. Without streams, it hides nothing.
    assert found["streams", "fsdp2"] == pytest.approx(found["streams", "simulated, one ahead"], rel=1e-3)
    assert found["virtual", "ours"] < 0.2 * found["virtual", "fsdp2"]
    assert found["virtual", "ours-compiled"] == found["streams", "ours-compiled"] < found["streams", "fsdp2"]


@pytest.mark.matrix
def test_exposed_communication_of_a_compiled_step_matches_its_plan(tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    engines = ("ours-auto", "ours-compiled-auto")
    bench("overlap.py", "--models=experts", "--ratios=1", "--clocks=streams", "--rounds=1", f"--json={file}",
          f"--engines={','.join(engines)},fsdp2", limit_s=240.0)  # fmt: skip
    results = {each["engine"]: each for each in read(file)["results"]}
    for engine in engines:
        assert results[engine]["exposed_ms"]["median"] == pytest.approx(results[engine]["predicted_ms"], rel=0.02)


SIMULATE = """
import random
from _simulate import Stage, exposed, least_exposed

assert exposed([Stage(2, 3, 0), Stage(2, 3, 0), Stage(0, 6, 2)], 1) == 2 + 2  # the first gather, the last reduction
assert exposed([Stage(2, 3, 0), Stage(2, 3, 0)], 0) == 4  # without prefetching, nothing is hidden
assert exposed([Stage(1, 1, 0), Stage(1, 4, 0), Stage(5, 1, 0)], 1) == 1 + 1  # a gather of 5 overlaps with compute of 4
assert exposed([Stage(1, 1, 0), Stage(1, 4, 0), Stage(5, 1, 0)], 2) == 1 + 1
draw = random.Random(0)
for _ in range(300):
    stages = [Stage(draw.randint(0, 5), draw.randint(1, 5), draw.randint(0, 5)) for _ in range(draw.randint(1, 8))]
    waits = [exposed(stages, ahead) for ahead in (0, 1, 2, len(stages))]
    assert waits[0] >= waits[1] - 1e-9
    assert min(waits) >= least_exposed(stages) - 1e-9
    assert waits[0] <= sum(stage.gather_s + stage.reduce_s for stage in stages) + 1e-9
"""


def test_the_simulation_of_a_schedule_matches_manual_sums_and_respects_the_bound(beside: Beside) -> None:
    beside(SIMULATE)


@pytest.mark.matrix
def test_step_prints_its_table_and_all_engines_have_the_same_losses(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    shown = bench("step.py", "--sizes=tiny", "--rounds=2", "--timeout=45", f"--json={file}")
    assert "beyond compute" in shown
    assert "agree over all steps" in shown
    results = {result["engine"]: result for result in read(file)["results"]}
    assert [*results] == ["ours", "fsdp2", "fsdp2-again", "fsdp1", "ddp", "compute", "collectives"]
    assert results["collectives"]["wall_beyond"] is None
    assert results["fsdp2"]["wall_ratio"]["median"] == 1
    assert all(result["loss_difference"] < 1e-5 for result in results.values())


DEVICE = """
import argparse
import contextlib
import importlib
import io
import sys
from unittest import mock

import torch
import _device

def cards(count):
    known = {"is_available": lambda: count > 0, "device_count": lambda: count}
    return mock.patch.multiple(torch.cuda, **known)

def refused(text):
    try:
        _device.chosen(text)
    except argparse.ArgumentTypeError as error:
        return str(error)

assert _device.chosen("cpu") == "cpu"
assert "must be auto, cpu or cuda" in refused("gpu")
assert not _device.too_few("cpu", 512)
with cards(1):
    assert _device.chosen("auto") == _device.chosen("cuda") == "cuda"
    assert _device.too_few("cuda", 2) and not _device.too_few("cuda", 1)
with cards(0):
    assert _device.chosen("auto") == "cpu"
    assert "finds no CUDA device" in refused("cuda")
    for name in ("overhead", "memory", "step", "compile", "figures", "run_all"):
        module, errors = importlib.import_module(name), io.StringIO()
        with mock.patch.object(sys, "argv", [name, "--device=cuda"]), contextlib.redirect_stderr(errors):
            try:
                module.main()
            except SystemExit as stop:
                assert stop.code == 2, name
            else:
                raise AssertionError(name)
        assert "finds no CUDA device on this machine" in errors.getvalue(), name
"""


def test_the_default_device_is_a_gpu_if_available_and_requesting_a_missing_one_is_an_error(beside: Beside) -> None:
    beside(DEVICE)


ECHO = """
import torch
import torch.distributed as dist
import _echo
from torch.distributed.device_mesh import init_device_mesh

_echo.init(4, torch.device("cpu"))
group = init_device_mesh("cpu", (4,)).get_group()
whole, piece, out = torch.zeros(12), torch.arange(3.0), torch.zeros(2)
group._allgather_base(whole, piece).wait()
assert whole.tolist() == [0, 1, 2] * 4
means = dist.ReduceScatterOptions()
means.reduceOp = dist.ReduceOp.AVG
group._reduce_scatter_base(out, torch.arange(8.0), means).wait()
assert out.tolist() == [0, 1]
work = dist.all_reduce(out, op=dist.ReduceOp.AVG, async_op=True)
assert [t.tolist() for t in work.get_future().wait()] == [[0, 1]]
ops = torch.ops._c10d_functional
assert ops.wait_tensor(ops.all_gather_into_tensor(out, 4, group.group_name)).tolist() == [0, 1] * 4
assert ops.wait_tensor(ops.reduce_scatter_tensor(whole, "avg", 4, group.group_name)).tolist() == [0, 1, 2]
dist.destroy_process_group()
"""


def test_an_echo_gives_every_rank_the_piece_of_this_one(beside: Beside) -> None:
    beside(ECHO)


@pytest.mark.matrix  # the echo and the table of a step are tested above
@pytest.mark.parametrize("transport", ["", "direct", "packed"])
def test_step_simulates_all_ranks_in_one_process_if_there_are_too_few_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setenv("COMPOSABLE_SHARD_TRANSPORT", transport)
    file = tmp_path / "step.json"
    few = ["--sizes=tiny", "--rounds=1", "--timeout=45", "--engines=ours,fsdp2,compute", "--dtype=bfloat16"]
    shown = bench("step.py", "--echo", "--world=4", *few, f"--json={file}")
    assert "world 4, played by one process" in " ".join(shown.split())
    assert "losses of ours, fsdp2 agree" in shown
    assert {result["engine"]: result["loss_difference"] for result in read(file)["results"]}["ours"] == 0


RUNS = """
import _report, step

def of(wall):
    found = {"parameters": 1, "loss_difference": wall / 10, "wall_s": {"ours": [wall] * 3, "fsdp2": [2.0] * 3}}
    return step.evaluate("tiny", found | {"cpu_s": found["wall_s"]})

ours, fsdp2 = step.over_runs([of(1.0), of(1.6), of(1.2)])
assert ours.wall_ratio == _report.Spread(0.6, 0.5, 0.8), ours.wall_ratio
assert ours.wall_beyond is None
assert ours.loss_difference == 0.16
assert [run.wall_ratio.median for run in ours.runs] == [0.5, 0.8, 0.6]
assert fsdp2.wall_ms == _report.Spread(2000, 2000, 2000)
"""


def test_repeated_runs_of_a_step_give_the_median_and_range_of_their_medians(beside: Beside) -> None:
    beside(RUNS)


@pytest.mark.matrix
def test_memory_accounts_for_every_byte_and_prints_both_parts(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    few = ["--sizes=3m", "--resident-sizes=tiny", "--world=4", "--context=16", "--repeats=1", "--steps=1"]
    shown = bench("memory.py", *few, "--engines=ours,fsdp2", "--resident-engines=ours", f"--json={file}", limit_s=200.0)
    assert "The runtime's bytes at their peak" in shown
    assert "Growth of a rank" in shown
    live = {result["engine"]: result for result in read(file)["results"] if "apart" in result}
    assert [*live] == ["ours", "fsdp2"]
    for result in live.values():
        assert result["apart"] < 0.01
        assert result["total"]["nbytes"] == sum(result["total"]["by_kind"].values())
        for kind in ("unsharded parameters", "unsharded gradients", "own parameters"):
            assert result["runtime"]["by_kind"][kind] > 0, kind
    assert live["fsdp2"]["runtime"]["by_kind"]["reduce buffers"] > 0


@pytest.mark.timeout(460)
@pytest.mark.matrix
def test_figures_are_compared_with_fsdp2(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    tiny = ["--size=tiny", "--repeats=1", "--steps=1", "--timeout=120", "--backend=aot_eager"]
    engines = ["single", "fsdp2", "fsdp2-blocks", "ours", "ours-blocks", "ours-placed-whole"]
    shown = bench(
        "figures.py", *tiny, "--parts=run,kinds", f"--engines={','.join(engines)}", f"--json={file}", limit_s=440.0
    )
    assert "share of communication" in shown
    assert "All bytes at their peak" in shown
    document = read(file)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", document["about"]["date"])
    results = {result["engine"]: result for result in document["results"] if "figures" in result}
    assert [*results] == engines
    figures = {"step_ms", "peak_mb", "start_s", "tokens_s", "communication", "write_s", "read_s"}
    assert all({*result["figures"]} == figures for name, result in results.items() if name != "single")
    assert {*results["single"]["figures"]} == figures - {"communication"}
    assert "communication" not in results["ours"]["ratios"]
    assert all(ratio["median"] == 1 for ratio in results["fsdp2"]["ratios"].values())
    kinds = {result["engine"]: result["total"]["by_kind"] for result in document["results"] if "total" in result}
    assert [*kinds] == ["plain", "ddp", "fsdp2", "ours"]
    assert kinds["ours"]["unsharded parameters"] > 0 == kinds["plain"]["unsharded parameters"]


@pytest.mark.timeout(460)
@pytest.mark.matrix
def test_losses_of_the_demo_match_fsdp2_and_one_process(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    few = ["--parts=losses", "--loss-steps=12", "--backend=aot_eager"]
    shown = bench("figures.py", *few, f"--json={file}", limit_s=440.0)
    assert "Losses of the demo" in shown
    results = {result["engine"]: result for result in read(file)["results"]}
    assert len(results) == 6
    for name, result in results.items():
        assert len(result["losses"]) == 12
        assert result["losses"][-1] < result["losses"][0]
        assert result["world"] == (1 if name == "single" else 2)
        assert all(apart < 1e-5 for apart, _ in result["apart"].values()), name
    done = python(str(BENCH / "figures.py"), *few, "--loss-engines=single,fsdp2", "--tolerance=1e-30", timeout=240.0)
    assert done.returncode == 1
    assert "losses differ by" in done.stderr


REGIMES = r"""
import argparse

import _regimes
import figures

assert figures.furthest([1.0, 2.0, 3.0], [1.0, 4.0, 3.0]) == (0.5, 2)
assert figures.furthest([1.0], [1.0]) == (0.0, 1)
assert figures.compute_of("ours") == "compute"
assert figures.compute_of("ours-placed-whole") == figures.compute_of("fsdp2-blocks") == "compute-whole"

shape = {"width": 1024, "teraflops": 100.0, "regime_world": 4, "regime_engines": ["fsdp2"]}
alone, fsdp2 = _regimes.results_of(512, 10.0, argparse.Namespace(**shape))
parameters = (8 * 14 + 2) * 1024**2  # of blocks and head, in squares of the width
assert abs(alone.step_ms - 1e3 * 6 * 512 * parameters / 100e12) < 1e-3 * alone.step_ms, alone.step_ms
assert alone.share == 0.0 < 0.8 < fsdp2.share < 1.0
assert fsdp2.over_fsdp2 == 1.0
assert abs(fsdp2.tokens_s - 512e3 / fsdp2.step_ms) < 1e-6
"""


def test_a_regime_has_the_compute_of_its_tokens_and_waits_on_a_slow_link(beside: Beside) -> None:
    beside(REGIMES)


@pytest.mark.matrix
def test_step_stops_ranks_that_take_too_long_with_a_message() -> None:
    done = python(str(BENCH / "step.py"), "--sizes=tiny", "--engines=fsdp2", "--timeout=0.2")
    assert done.returncode == 1
    assert "still running after 0.2 s" in done.stderr


HANGS = """
import os
import sys
import time
from pathlib import Path

if "WORLD_SIZE" in os.environ:  # a rank
    if sys.argv[1] == "answers":
        Path(os.environ["BENCH_FOLDER"], "result").write_text("figures")
    time.sleep(60)

import _launch

for argument, outcome in (("answers", "figures"), ("hangs", "ranks [0, 1] were still running after 3 s")):
    try:
        found = _launch.launch(Path(sys.argv[0]), argument, world=2, timeout=3, tuned=False)
    except _launch.WorkerError as error:
        found = str(error)
    assert outcome in found, found
"""


@pytest.mark.matrix
def test_a_result_is_kept_if_ranks_hang_after_writing_it(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={name: value for name, value in os.environ.items() if name != "WORLD_SIZE"} | {"PYTHONPATH": str(BENCH)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "hangs.py: ranks [0, 1] were still running after 3 s" in done.stderr
    assert "rank 0 had written its result" in done.stderr


@pytest.mark.timeout(460)
@pytest.mark.matrix
def test_compile_prints_its_four_tables_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "compile.json"
    engines = "ours-whole,ours,fsdp2-blocks,compute-whole"
    few = ["--sizes=tiny", f"--engines={engines}", "--rounds=2", "--layers=1", "--compile-rounds=1", "--timeout=100"]
    shown = bench("compile.py", *few, "--backend=aot_eager", f"--json={file}", limit_s=440.0)
    assert "agree over all steps" in shown
    assert "Time to compile" in shown
    assert "First step of a process" in shown
    assert "Peak memory of a step" in shown
    results = read(file)["results"]
    steps = {result["engine"]: result for result in results if "wall_ms" in result}
    assert ",".join(steps) == engines
    assert steps["fsdp2-blocks"]["wall_ratio"]["median"] == 1
    for part in ("wall_ratio", "warm_s"):
        compiled = [result for result in results if "layers" in result and part in result]
        assert [(result["layers"], result["engine"]) for result in compiled] == [
            (1, engine) for engine in ("compute-whole", "ours-whole", "ours-placed-whole")
        ]
    memory = {result["engine"]: result for result in results if "live" in result}
    assert ",".join(memory) == engines
    assert memory["compute-whole"]["model"] >= 2 * memory["ours-whole"]["model"] > 0
    assert all(result["live"] > 0 for result in memory.values())


@pytest.mark.timeout(360)
@pytest.mark.matrix
def test_adapters_on_a_four_bit_base_are_compared_with_fsdp2(tmp_path: Path) -> None:
    file = tmp_path / "qlora.json"
    few = ["--size=tiny", "--bases=nf4", "--engines=ours,fsdp2", "--repeats=1", "--steps=1"]
    shown = bench("qlora.py", *few, f"--json={file}", limit_s=340.0)
    assert "Adapters over a frozen base" in shown
    ours, fsdp2 = read(file)["results"]
    assert ours["loss"] == fsdp2["loss"]
    assert ours["ratios"]["received_mb"]["median"] == pytest.approx(1, rel=0.02)
    assert fsdp2["ratios"]["peak_mb"]["median"] == 1
    python(str(BENCH / "_plots.py"), str(file)).check_returncode()
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


ADAPTERS = """
import json
from pathlib import Path
import _plots

document = json.loads(Path({file!r}).read_text())
panels = {{panel.title: panel.figures for panel in _plots.qlora(document["results"])}}
assert len(panels) == 8
for title, figures in panels.items():
    measured = [(r["base"], r["engine"]) for r in document["results"] if not r["error"]]
    assert [*figures] == measured, title
    assert ("int8", "fsdp2") not in figures
[nf4] = [r for r in document["results"] if (r["base"], r["engine"]) == ("nf4", "ours")]
assert panels["Peak memory"]["nf4", "ours"] == nf4["figures"]["peak_mb"]
assert panels["Speed"]["nf4", "ours"] == nf4["figures"]["tokens_s"]
assert _plots.plot(Path({file!r})).read_bytes().startswith(b"\\x89PNG")
"""


def test_adapters_on_each_base_are_drawn_next_to_each_other(tmp_path: Path, beside: Beside) -> None:
    file = tmp_path / "qlora.json"
    file.write_text((BENCH / "results" / "qlora-10m-cpu-torch2.13.json").read_text())
    beside(ADAPTERS.format(file=str(file)))


@pytest.mark.timeout(360)
@pytest.mark.matrix
def test_peak_memory_of_adapters_on_a_base_is_at_most_that_of_fsdp2(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    shape = "--shape=layers=3,width=512,heads=8,vocabulary=64,sequence=32"  # the peak is in the backward of the blocks
    bench("qlora_memory.py", shape, "--world=2", "--bases=bf16", f"--json={file}", limit_s=340.0)
    fsdp2, ours = read(file)["results"]
    assert (fsdp2["engine"], ours["engine"]) == ("fsdp2", "ours")
    assert 0 < ours["peak"] <= 1.01 * fsdp2["peak"]


@pytest.mark.timeout(400)
@pytest.mark.matrix
def test_steps_wait_more_on_slow_links_and_less_with_many_tokens(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    few = [
        "--parts=regimes",
        "--tokens=512,8192",
        "--gbps=25,400",
        "--regime-engines=fsdp2,ours,ours-auto,ours-compiled",
    ]
    assert "A step by regime" in bench("figures.py", *few, f"--json={file}", limit_s=380.0)
    found = {(each["tokens"], each["gbps"], each["engine"]): each for each in read(file)["results"]}
    assert len(found) == 2 * 2 * 5
    for engine in ("fsdp2", "ours", "ours-auto", "ours-compiled"):
        shares = {key[:2]: each["share"] for key, each in found.items() if key[2] == engine}
        assert shares[512, 25] > max(shares[512, 400], shares[8192, 25]) >= shares[8192, 400] > 0, engine
        assert all(each["step_ms"] >= found[*key[:2], "no communication"]["step_ms"] for key, each in found.items())


@pytest.mark.matrix
def test_the_cost_of_writes_to_unsharded_weights_is_measured() -> None:
    options = ("--width=16", "--experts=2", "--tokens", "8", "--rounds=2", "--steps=1")
    out = bench("written_weights.py", *options, limit_s=120)
    assert all(f"  {engine}" in out for engine in ("plain", "accepted", "judged"))
