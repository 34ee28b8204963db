"""The GPU queue: dry runs of all entries, their time limits, and how results are stored."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

# At the end of the path, and without bench/ itself, because modules there have the names of helpers of the tests.
sys.path.append(str(Path(__file__).parents[2] / "bench" / "card"))

import _queue_results
import _queue_run
import gpu_queue
from _queue_entries import GRACE_S, LIMIT_S, QUEUE, START_S, Entry, Part, QueueError, find_entry
from _queue_run import NO_FIGURES, Run, excerpt

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "card" / "gpu_queue.py"
H100 = _queue_results.Gpu("NVIDIA H100 80GB HBM3", "580.1")
KIND = "h100-80gb-hbm3"
HOST_OVERHEAD = find_entry("host-overhead")  # an entry with two parts


def without_gpu(**variables):
    """Environment of a process that finds neither `nvidia-smi` nor a CUDA device."""
    return {**os.environ, "PATH": "", "CUDA_VISIBLE_DEVICES": "", **variables}


def queue(*arguments, limit_s=60):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=without_gpu(),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def run_code(code):
    """Run code in a separate process, in which modules of bench/ can be imported by name."""
    folders = (ROOT / "bench", ROOT / "bench" / "card", ROOT)
    environment = without_gpu(PYTHONPATH=os.pathsep.join(map(str, folders)))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def distinct(parts):
    """The parts of an entry, without those whose dry run is that of an earlier part."""
    by_run = {(*part.command(dry=True), *part.variables(dry=True).items()): part for part in reversed(parts)}
    return [part for part in parts if part in by_run.values()]


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [entry.name for entry in QUEUE])
def test_every_entry_has_a_dry_run_on_a_cpu_whose_results_are_not_stored(name, tmp_path):
    parts = distinct(find_entry(name).parts)
    names = ",".join(part.name for part in parts)
    done = queue("run", name, "--parts", names, "--dry", "--out", tmp_path, limit_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert sorted(result["parts"]) == sorted(part.name for part in parts)
    for part in parts:
        dry = result["parts"][part.name]
        assert (dry["exit"], dry["timed_out"], dry["gpu"]) == (0, False, None)
        if part.has_figures:
            assert dry["figures"]["results"]
            assert dry["figures"]["about"]["device"] == "cpu"
    some = "" if len(parts) == len(find_entry(name).parts) else f"-{names.replace(',', '-')}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}-logs{some}.tgz", f"{name}.json"]
    refused = queue("record", tmp_path / f"{name}.json")
    assert refused.returncode == 2
    assert "dry run" in refused.stderr


def test_the_time_limits_of_each_entry_add_up_to_at_most_nine_minutes():
    assert len({entry.name for entry in QUEUE}) == len(QUEUE)
    for entry in QUEUE:
        limits = [part.limit_s + GRACE_S for part in entry.parts]
        whole = START_S + (max(limits) if entry.parallel else sum(limits))
        assert entry.limit_s(entry.part_names) == whole <= LIMIT_S == 9 * 60, entry.name
        assert len(set(entry.part_names)) == len(entry.parts)
        assert entry.fitting(entry.part_names, whole) == entry.part_names
        first = entry.parts[0]
        assert entry.fitting(entry.part_names, START_S + first.limit_s + GRACE_S)[0] == first.name
        assert entry.fitting(entry.part_names, START_S) == ()


def test_list_shows_each_entry_with_its_time_limit_and_question():
    shown = queue("list").stdout
    for entry in QUEUE:
        assert f"{entry.name} ({gpu_queue.format_time(entry.limit_s(entry.part_names))}): {entry.question}" in shown
    assert gpu_queue.format_time(505) == "8 min 25 s"


OPTIONS = """
import argparse
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch

from _queue_entries import QUEUE


class Parsed(Exception):
    pass


def parse_and_stop(parser, *args, real=argparse.ArgumentParser.parse_args, **kwargs):
    raise Parsed(real(parser, *args, **kwargs))


commands = [part.command(dry=False) for entry in QUEUE for part in entry.parts]
# Scripts of bench/card/ import helpers of the tests, some of which have the same names as modules of bench/.
for script, *options in sorted(commands, key=lambda command: command[0].count("/")):
    if script == "-m":  # pytest
        continue
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        mock.patch.object(sys, "argv", [script, *options]),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except Parsed:
            continue
    raise AssertionError(f"{script} did not parse its options")
"""


def test_scripts_accept_the_options_of_the_entries_on_a_gpu():
    run_code(OPTIONS)


# ------------------------------------------------------------------ running

IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(0, flush=True); time.sleep(60)"
STARTS = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {IGNORES!r}])"


def is_running(number):
    stat = Path(f"/proc/{number}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def python(code):
    return f"-c {shlex.quote(code)}"


def test_a_part_ends_at_its_limit_with_its_children_and_other_parts_keep_their_results(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(_queue_run, "GRACE_S", 1)
    late = python(f"{STARTS}; time.sleep(1); print(p.pid, flush=True); time.sleep(60)")
    good = python("import sys; open(sys.argv[1], 'w').write('[1]'); print('kept')") + " {json}"
    bad = python(f"print({str(ROOT)!r} + '/bench'); 1 / 0")
    none = python("print('no figures')") + " {json}"
    commands = {"late": late, "bad": bad, "none": none, "good": good}
    parts = tuple(Part(name, command, "", "", 3) for name, command in commands.items())
    run = Run(Entry("planted", "?", parts), tmp_path, dry=False, gpu=H100)
    begin = time.monotonic()
    assert not run.perform(commands)
    assert time.monotonic() - begin < 40
    outcomes = json.loads(run.file.read_text())["parts"]
    assert outcomes["late"]["timed_out"]
    assert outcomes["late"]["exit"] == -15
    assert outcomes["late"]["output"][0] == "0"  # its child process was running, and ignored the signal
    assert not is_running(int(outcomes["late"]["output"][1]))
    assert outcomes["bad"]["output"][0] == "bench"  # the path of this machine is removed
    assert "ZeroDivisionError" in outcomes["bad"]["output"][-1]
    assert (outcomes["bad"]["exit"], outcomes["bad"]["figures"]) == (1, None)
    assert (outcomes["none"]["exit"], outcomes["none"]["output"]) == (NO_FIGURES, ["no figures"])
    assert (outcomes["good"]["exit"], outcomes["good"]["figures"], outcomes["good"]["output"]) == (0, [1], [])
    assert (outcomes["good"]["gpu"], outcomes["good"]["driver"]) == ("NVIDIA H100 80GB HBM3", "580.1")
    assert outcomes["good"]["torch"]
    assert "planted late: limit of 3 s reached" in capfd.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["planted-logs.tgz", "planted.json"]


def test_a_second_run_in_a_folder_keeps_the_parts_of_the_first(tmp_path):
    parts = tuple(Part(name, python("pass"), "", "", 30) for name in "ab")
    entry = Entry("planted", "?", parts)
    for name in "ab":
        assert Run(entry, tmp_path, dry=False, gpu=H100).perform([name])
    document = json.loads((tmp_path / "planted.json").read_text())
    assert list(document["parts"]) == ["a", "b"]
    assert sorted(path.name for path in tmp_path.glob("*.tgz")) == ["planted-logs-a.tgz", "planted-logs-b.tgz"]
    document["sources"]["bench/_device.py"] = "another"
    (tmp_path / "planted.json").write_text(json.dumps(document))
    run = Run(entry, tmp_path, dry=False, gpu=H100)
    assert run.perform(["a"])
    assert list(json.loads(run.file.read_text())["parts"]) == ["a"]


def test_parts_run_without_variables_that_would_change_the_measurement(tmp_path, monkeypatch):
    for name in ("COMPOSABLE_SHARD_TRANSPORT", "RANK", "WIDTH"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    absent = "assert not {'RANK', 'COMPOSABLE_SHARD_TRANSPORT'} & set(os.environ)"
    code = f"import os; {absent}; assert os.environ['WIDTH'] == '8'"
    part = Part("a", python(code), "", "", 30, env={"WIDTH": "8"})
    run = Run(Entry("planted", "?", (part,)), tmp_path, dry=False, gpu=H100)
    assert run.perform(["a"])
    outcome = json.loads(run.file.read_text())["parts"]["a"]
    assert outcome["env"] == {"WIDTH": "8"}
    assert outcome["inherited"]["NCCL_DEBUG"] == "WARN"


def test_parallel_parts_take_as_long_as_the_longest(tmp_path):
    parts = tuple(Part(name, python("import time; time.sleep(2)"), "", "", 30) for name in "abcd")
    run = Run(Entry("planted", "?", parts, parallel=True), tmp_path, dry=False, gpu=H100)
    begin = time.monotonic()
    assert run.perform("abcd")
    assert time.monotonic() - begin < 7


def test_a_queue_that_is_terminated_ends_its_parts_and_keeps_their_logs(tmp_path):
    marker = f"GPU_QUEUE_TEST={tmp_path}"

    def marked():
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if marker in file.read_text(errors="replace").split("\0"):
                    found.append(file.parent.name)
        return found

    command = [sys.executable, str(SCRIPT), "run", "host-overhead", "--dry", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, env=without_gpu(GPU_QUEUE_TEST=str(tmp_path)), stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 30
        while len(marked()) < 3 and time.monotonic() < deadline:  # the queue, the part and an engine
            time.sleep(0.1)
        process.terminate()
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "terminated; the result file has the finished parts" in error
    assert marked() == []
    assert (tmp_path / "host-overhead-logs.tgz").exists()


def test_the_excerpt_of_a_log_has_lines_with_results_and_the_last_lines():
    log = "\n".join(["real plain: unsharded 0.0", *(f"line {number}" for number in range(100)), "the end"])
    assert excerpt(log)[:2] == ["real plain: unsharded 0.0", "line 61"]
    assert excerpt(log)[-1] == "the end"


def test_invalid_arguments_of_the_queue_raise_errors_that_explain_the_fix(tmp_path):
    broken = {name: tmp_path / f"{name}.json" for name in ("none", "list", "empty")}
    broken["list"].write_text("[]")
    broken["empty"].write_text(json.dumps({"entry": "memory", "kind": "h100", "parts": {}}))
    into = ("--out", tmp_path)
    for arguments, message in (
        (("run", "host-overhead", *into), "finds no GPU on this machine; --dry runs an entry on the CPU"),
        (("run", "nothing", *into), "unknown entry nothing; known: graphs"),
        (("run", "memory", "--dry", "--parts", "fast", *into), "memory has no part fast; known: 1b"),
        (("run", "memory", "--dry", "--seconds", "60", *into), "no part of memory fits into 1 min 0 s"),
        (("record", broken["none"]), "cannot read"),
        (("record", broken["list"]), "is not a result of the queue"),
        (("record", broken["empty"]), "has no finished part"),
    ):
        done = queue(*arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        assert message in done.stderr


# ------------------------------------------------------------------ storing


def git(folder, *arguments):
    names = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    command = ["git", *names, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with two commits that change sources, and a third one that changes only a text."""
    root = tmp_path / "repository"
    for name in ("bench", "composable_shard", "tests", "tutorials"):
        (root / name).mkdir(parents=True)
        (root / name / f"{name}.py").write_text(f"# {name}\n")
    git(root.parent, "init", "-q", str(root))
    for name, text in (("bench/bench.py", "a = 1\n"), ("bench/bench.py", "a = 2\n"), ("README.md", "text\n")):
        (root / name).write_text(text)
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", name)
    return root


def test_a_result_belongs_to_the_commit_that_has_its_sources(repository):
    sources = _queue_results.read_sources(repository)
    assert _queue_results.find_commit(sources, repository) == git(repository, "rev-parse", "HEAD")
    assert _queue_results.changed_files(sources, repository) == []
    git(repository, "checkout", "-q", "HEAD~2")
    older = _queue_results.read_sources(repository)
    git(repository, "checkout", "-q", "-")
    assert older != sources
    assert _queue_results.find_commit(older, repository) == git(repository, "rev-parse", "HEAD~2")
    (repository / "composable_shard" / "more.py").write_text("b = 1\n")
    with pytest.raises(QueueError, match=r"differ from HEAD: composable_shard/more\.py\. Commit the measured files"):
        _queue_results.find_commit(_queue_results.read_sources(repository), repository)


def outcome(part, status=0, figures=1, **others):
    about = _queue_results.describe_machine(H100) | {"torch": "2.11.0", "release": "0.1", "date": "2026-11-28"}
    document = {"about": {"device": "cuda"}, "results": [figures]} if figures else None
    command = {"command": part.command(dry=False), "env": part.variables(dry=False)}
    return {**about, **command, "exit": status, "figures": document, **others}


def run_of(entry, repository, kind=KIND, **parts):
    sources = _queue_results.read_sources(repository)
    return {"entry": entry.name, "dry": False, "kind": kind, "sources": sources, "parts": parts}


def test_results_are_stored_by_part_and_the_queue_continues_with_missing_parts(repository, tmp_path, monkeypatch):
    results = tmp_path / "results"
    entries = QUEUE[QUEUE.index(HOST_OVERHEAD) :]
    monkeypatch.setattr(_queue_results, "QUEUE", entries)
    first, second = entries[:2]
    direct, packed = first.parts
    eager, blocks = second.parts

    def store(entry, kind=KIND, **parts):
        file = _queue_results.store(run_of(entry, repository, kind, **parts), results, repository)
        return json.loads(file.read_text())["parts"]

    def following(kind, seconds=LIMIT_S):
        found = _queue_results.find_next(kind, "0.1", seconds, (results,))
        return found and (found[0].name, found[1])

    assert following("h100") == following(None) == ("host-overhead", ("direct", "packed"))
    assert following("h100", 300) == ("host-overhead", ("direct",))
    assert following("h100", 30) is None
    stored = store(first, direct=outcome(direct))
    assert stored["direct"]["commit"] == git(repository, "rev-parse", "HEAD")
    assert following("h100") == following(KIND) == following(None) == ("host-overhead", ("packed",))
    assert following("h1") == following("h200") == ("host-overhead", ("direct", "packed"))
    [outcomes] = _queue_results.read_outcomes(first, "0.1", (results,))
    run = f"NVIDIA H100 80GB HBM3, torch 2.11.0, driver 580.1, 2026-11-28, commit {stored['direct']['commit'][:9]}"
    assert outcomes.describe() == f"{run}; missing: packed"

    # The newest outcome counts. Failed parts come after all parts that were never run.
    stored = store(first, direct=outcome(direct, status=1, figures=None), packed=outcome(packed, date="2026-11-29"))
    assert stored["direct"]["exit"] == 1
    assert following("h100") == ("gpu-bound-steps", ("eager", "blocks"))
    [outcomes] = _queue_results.read_outcomes(first, "0.1", (results,))
    assert outcomes.describe() == f"direct: {run}; packed: {run.replace('28,', '29,')}; failed: direct"
    table = _queue_results.measured_table("0.1", results)
    assert f"| `host-overhead` | {outcomes.describe()} |" in table
    assert "| `gpu-bound-steps` | not yet |" in table

    # Other releases, other commands and other GPUs do not count.
    store(second, eager=outcome(eager, release="0.0"), blocks=outcome(blocks, command=["python", "other.py"]))
    assert following("h100") == ("gpu-bound-steps", ("eager", "blocks"))
    store(second, "h200", eager=outcome(eager), blocks=outcome(blocks))
    assert following("h100")[0] == "gpu-bound-steps"
    assert following(None)[0] == "nccl-peaks"

    for entry in entries[1:]:
        store(entry, **{part.name: outcome(part) for part in entry.parts})
    assert following("h100") == ("host-overhead", ("direct",))
    store(first, direct=outcome(direct))
    assert following("h100") is None


def test_results_in_the_folder_of_a_run_are_not_measured_again(tmp_path):
    entry = QUEUE[0]
    document = {
        "entry": entry.name,
        "dry": False,
        "kind": KIND,
        "parts": {part.name: outcome(part) for part in entry.parts},
    }
    (tmp_path / f"{entry.name}.json").write_text(json.dumps(document))
    assert _queue_results.find_next(KIND, "0.1", LIMIT_S, (tmp_path / "none", tmp_path))[0] == QUEUE[1]
    assert "not recorded yet" in _queue_results.read_outcomes(entry, "0.1", (tmp_path,))[0].describe()
    document["dry"] = True
    (tmp_path / f"{entry.name}.json").write_text(json.dumps(document))
    assert _queue_results.find_next(KIND, "0.1", LIMIT_S, (tmp_path,))[0] == entry


def test_results_of_a_cpu_and_unknown_entries_are_not_stored(repository, tmp_path):
    entry = HOST_OVERHEAD
    on_cpu = outcome(entry.parts[0], figures=None) | {"figures": {"about": {"device": "cpu"}, "results": []}}
    for run, message in (
        (run_of(entry, repository, direct=on_cpu), "host-overhead direct has figures of cpu: not measured on the GPU"),
        (run_of(entry, repository, kind="cpu", direct=on_cpu), "dry run"),
        (run_of(entry, repository, fast=on_cpu), "has no part fast"),
        (run_of(entry, repository) | {"entry": "old"}, "unknown entry old"),
    ):
        with pytest.raises(QueueError, match=message):
            _queue_results.store(run, tmp_path, repository)
    assert list(tmp_path.glob("*.json")) == []


def test_record_stores_the_run_and_updates_the_table(repository, tmp_path, monkeypatch, capsys):
    results, page, run = tmp_path / "results", tmp_path / "README.md", tmp_path / "run.json"
    page.write_text(f"before\n{''.join(_queue_results.TABLE_MARKERS)}after\n")
    entry = HOST_OVERHEAD
    outcomes = {"direct": outcome(entry.parts[0]), "packed": outcome(entry.parts[1], status=1, figures=None)}
    run.write_text(json.dumps(run_of(entry, repository, **outcomes)))
    monkeypatch.setattr(gpu_queue, "store", lambda document: _queue_results.store(document, results, repository))
    monkeypatch.setattr(_queue_results, "PAGE", page)
    assert gpu_queue.main(["record", str(run)]) == 0
    assert (results / f"host-overhead-{KIND}.json").exists()
    assert "failed: packed. `next` shows failed parts after all others" in capsys.readouterr().out
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    assert "| `host-overhead` |" in page.read_text()


def test_next_shows_the_command_its_time_limit_and_the_result_file():
    shown = queue("next", "--gpu", "B200").stdout
    assert "the first not measured on B200 with release line" in shown
    assert "command:   python bench/card/gpu_queue.py run graphs --out OUT\n" in shown
    assert "at most 8 min 25 s: correctness 480 s" in shown
    assert "bench/results/gpu/graphs-b200.json" in shown
    shown = queue("next", "--gpu", "B200", "--seconds", "300").stdout
    assert "run graphed-steps --parts steps-1b --out OUT\n" in shown


def test_the_table_matches_the_stored_results():
    page = _queue_results.PAGE.read_text()
    table = _queue_results.measured_table(_queue_results.read_release_line())
    assert page == _queue_results.replace_table(page, table), "run `python bench/card/gpu_queue.py table`"
    with pytest.raises(QueueError, match="has no lines"):
        _queue_results.replace_table("a page", table)


def test_the_file_name_of_a_result_contains_the_gpu_model():
    kinds = {
        "NVIDIA H100 80GB HBM3": "h100-80gb-hbm3",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100-sxm4-80gb",
        "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada-generation",
        "Tesla T4": "tesla-t4",
    }
    assert {name: _queue_results.Gpu(name, "").kind for name in kinds} == kinds
    assert _queue_results.matches("h100-pcie", "h100")
    assert _queue_results.matches("h100-pcie", None)
    assert not _queue_results.matches("h100-pcie", "h1")


# ------------------------------------------------------------------ GPU traces

TRACES = """
import contextlib
import json
from pathlib import Path
from unittest import mock

import torch

import _gpu_trace

trace = {
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "matmul", "ts": 0, "dur": 100, "args": {"stream": 7}},
        {"ph": "X", "cat": "kernel", "name": "add", "ts": 150, "dur": 50.5, "args": {"stream": 7}},
        {"ph": "X", "cat": "gpu_memset", "name": "fill", "ts": 210, "dur": 10, "args": {"stream": 7}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "gather", "ts": 90, "dur": 30, "args": {"stream": 20}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "gather", "ts": 110, "dur": 20, "args": {"stream": 21}},
        {"ph": "X", "cat": "kernel", "name": "reduce", "ts": 230, "dur": 20, "args": {"stream": 22}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5, "args": {}},
        {"ph": "M", "name": "process_name"},
    ]
}


class Profiler(contextlib.nullcontext):
    def __enter__(self):
        return self

    def export_chrome_trace(self, path):
        Path(path).write_text(json.dumps(trace))


ran = []
with (
    mock.patch.object(torch.cuda, "synchronize", lambda: ran.append("wait")),
    mock.patch.object(_gpu_trace, "profile", lambda activities: Profiler()),
):
    step = _gpu_trace.record_step(lambda: ran.append("step"))
assert ran == ["wait", "step", "wait"], ran
assert (step.kernels, step.copies, step.other_kernels, step.other_copies) == (2, 1, 1, 2), step
exposed = 0.030 + 0.020  # 100 to 130, and 230 to 250 us
expected = (0.250, 0.1605, 0.040 + 0.020, exposed, 0.250 - 0.1605 - exposed)
found = (step.span_ms, step.compute_ms, step.communication_ms, step.exposed_ms, step.idle_ms)
assert all(abs(a - b) < 1e-9 for a, b in zip(found, expected)), step
try:
    _gpu_trace.summarize([])
except ValueError as error:
    assert "no kernel" in str(error)
else:
    raise AssertionError("no error")
"""


@pytest.mark.matrix
def test_exposed_communication_is_the_time_when_only_other_streams_are_busy():
    run_code(TRACES)


HISTORY = """
import pickle
import tempfile
from pathlib import Path
from unittest import mock

import torch

import _device
import _memory_history


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


pool = [
    frame("c10/alloc.cpp", 1, "malloc"),
    frame(f"{_memory_history.TORCH}/utils/_device.py", 103, "__torch_function__"),
    frame("/x/composable_shard/_memory/pool.py", 40, "lease"),
    frame("/x/composable_shard/_memory/pool.py", 30, "lease"),
    frame("/x/composable_shard/_group/exchange.py", 77, "gather"),
]
place = "_memory/pool.py:40 lease < _group/exchange.py:77 gather"
trace = [
    {"action": "segment_alloc", "addr": 0, "size": 1 << 20, "stream": 0},
    {"action": "alloc", "addr": 100, "size": 30, "stream": 0, "frames": pool},
    {"action": "free_requested", "addr": 900, "size": 5, "stream": 0},  # allocated before the step
    {"action": "alloc", "addr": 200, "size": 10, "stream": 3, "frames": pool},
    {"action": "free_requested", "addr": 100, "size": 30, "stream": 0},
    {"action": "alloc", "addr": 100, "size": 40, "stream": 0},
    {"action": "free_completed", "addr": 100, "size": 30, "stream": 0},
    {"action": "alloc", "addr": 300, "size": 2, "stream": 0, "frames": pool},
    {"action": "free_requested", "addr": 100, "size": 40, "stream": 0},
    {"action": "alloc", "addr": 400, "size": 20, "stream": 0, "frames": pool},
]
calls = []
with (
    tempfile.TemporaryDirectory() as folder,
    mock.patch.object(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options)),
    mock.patch.object(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [trace]}),
    mock.patch.object(torch.cuda, "current_device", lambda: 0),
    mock.patch.object(_device, "forget_peak", lambda: 1000),
    mock.patch.object(_device, "peak", lambda: 1512),
):
    file = Path(folder, "history.pickle")
    peak = _memory_history.record_peak(lambda: calls.append("step"), file)
    assert pickle.loads(file.read_bytes()) == {"device_traces": [trace]}
assert calls == [{"stacks": "python", "clear_history": True}, "step", {"enabled": None}], calls
assert (peak.allocated, peak.nbytes, peak.reached_at) == (512, 47, place), peak
assert [(site.where, site.stream, site.nbytes, site.count) for site in peak.sites] == [
    (_memory_history.NO_FRAME, 0, 40, 1),
    (place, 3, 10, 1),
    (_memory_history.FREED, 0, -5, 1),
    (place, 0, 2, 1),
], peak
assert sum(site.nbytes for site in peak.sites) == peak.nbytes
assert _memory_history.find_peak([]).sites == []
"""


def test_a_memory_peak_is_broken_down_by_the_source_of_live_allocations():
    run_code(HISTORY)


STEPS = """
import argparse
import math

import llama_steps

assert llama_steps.parse_engines("ours-fp8,fsdp2-blocks") == ["ours-fp8", "fsdp2-blocks"]
for text, message in (
    ("fsdp2-fp8", "unknown engine fsdp2-fp8; expected ours, fsdp2, unsharded"),
    ("ours,ours", "named twice; the control is fsdp2-again"),
):
    try:
        llama_steps.parse_engines(text)
    except argparse.ArgumentTypeError as error:
        assert message in str(error), error
    else:
        raise AssertionError("no error")
references = {"ours-fp8": "fsdp2", "ours-blocks": "fsdp2-blocks", "ours-offload": "fsdp2-offload"}
references |= {"ours-whole": "fsdp2-blocks", "fsdp2-again-blocks-float8": "fsdp2-blocks-float8"}
for engine, reference in references.items():
    assert llama_steps.name_reference(engine, "fsdp2") == reference, engine
assert llama_steps.name_reference("ours-offload", "unsharded") == "unsharded"
losses = {"ours": [2.0, 4.0], "fsdp2": [2.0, 5.0], "unsharded": [9.0, 9.0]}
assert llama_steps.loss_difference(losses) == 0.25
assert llama_steps.loss_difference(losses | {"unsharded": [math.nan, 9.0]}) is None


class Played:
    # Steps of ours take 1 s, of FSDP2 2 s.
    def __init__(self, engine):
        self.seconds = 1.0 if engine == "ours" else 2.0

    def call(self, method, tokens, steps):
        assert method == "measure"
        return llama_steps.Turn([self.seconds] * steps, [1.0] * steps, [3.0] * steps)


options = argparse.Namespace(rounds=2, steps=3)
ours, fsdp2 = llama_steps.time_steps({"ours": Played("ours"), "fsdp2": Played("fsdp2")}, 100, options)
assert (ours.step_ms.median, ours.over_fsdp2.median, fsdp2.over_fsdp2.median) == (1000, 0.5, 1.0), ours
assert (ours.over_unsharded, ours.tokens_per_s, ours.loss_difference) == (None, 50, 0), ours
"""


@pytest.mark.matrix
def test_engines_of_a_gpu_bound_step_are_compared_with_equally_configured_ones():
    run_code(STEPS)


GRAPHS = """
import argparse

import torch

import graphs

eager = [{"loss": torch.ones(1), "weight": torch.ones(2)}, {"loss": torch.ones(1)}, {"loss": torch.ones(1)}]
other = [{"loss": torch.ones(1), "weight": torch.tensor([1, 1.5])}, {"loss": torch.ones(1)}, {}]
assert graphs.describe_differences(eager, eager) == []
assert graphs.describe_differences(other, eager) == [
    "step 0: 1 tensors differ, weight by up to 5.0e-01",
    "step 2: only one has loss",
]


class Played:
    # Captured steps take 1 s (ours), 0.75 s (unsharded) and 0.25 s (collectives), eager ones 2 s.
    def __init__(self, engine):
        self.seconds = {"ours-graph": 1.0, "compute-graph": 0.75, "collectives-graph": 0.25}.get(engine, 2.0)
        self.turns = 0
        self.fails = engine == "fsdp2-graph"

    def call(self, method, rows, steps):
        assert method == "measure"
        self.turns += 1
        if self.fails and self.turns == 2:
            raise SystemExit("ended")
        return graphs.Turn([self.seconds] * steps, [3.0] * steps, 10 + self.turns, 20)


engines = "ours,ours-graph,fsdp2-graph,compute,compute-graph,collectives-graph"
assert graphs.parse_engines(engines) == engines.split(",")
players = {engine: Played(engine) for engine in engines.split(",")}
turns = graphs.take_turns(players, 8, argparse.Namespace(rounds=3, steps=2))
assert players["fsdp2-graph"].turns == 2
steps = {each.engine: each for each in graphs.evaluate(8, turns)}
ours = steps["ours-graph"]
assert (ours.step_ms.median, ours.over_eager.median, ours.over_parts.median) == (1000, 0.5, 1.0), ours
assert ours.over_unsharded.median == 1 / 0.75
assert (ours.allocated, ours.loss_difference, ours.error) == (13, 0, None)
assert (steps["ours"].over_unsharded.median, steps["ours"].over_parts) == (1, None)
assert (steps["fsdp2-graph"].step_ms, steps["fsdp2-graph"].error) == (None, "ended")
"""


@pytest.mark.matrix
def test_captured_steps_are_compared_with_eager_ones_and_a_failed_capture_is_a_result():
    run_code(GRAPHS)


PLAYERS = """
import os

from _players import Player


class Counter:
    def __init__(self, first):
        self.value = first

    def add(self, number):
        self.value += number
        return self.value

    def fail(self):
        raise ValueError("too large")

    def die(self):
        os._exit(7)


if __name__ == "__main__":
    with Player("counter", Counter, 1) as player:
        player.ready()
        assert player.call("add", 2) == 3
        try:
            player.call("die")
        except SystemExit as error:
            assert "the process of counter ended with status 7" in str(error), error
        else:
            raise AssertionError("no error")
    with Player("counter", Counter, 1) as player:
        player.ready()
        try:
            player.call("fail")
        except SystemExit as error:
            assert str(error) == "the process of counter ended: ValueError: too large", error
        else:
            raise AssertionError("no error")
"""


def test_the_error_of_a_process_has_its_name_and_its_status_or_its_exception(tmp_path):
    script = tmp_path / "players.py"
    script.write_text(PLAYERS)
    environment = without_gpu(PYTHONPATH=str(ROOT / "bench"))
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
