"""The GPU queue: dry runs of all entries, their time, and how results are filed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

# At the end, because some helpers of the tests have the names of modules in bench/.
sys.path.append(str(Path(__file__).parents[2] / "bench"))
sys.path.append(str(Path(__file__).parents[2] / "bench" / "card"))

import _gpu_trace
import _memory_history
import _queue_results
import gpu_queue
from _queue_entries import GRACE_S, LIMIT_S, QUEUE, START_S, Entry, Part, entry_named

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "card" / "gpu_queue.py"
H100 = _queue_results.Gpu("NVIDIA H100 80GB HBM3", "580.1")


def queue(*arguments, limit_s=60):
    environment = {**os.environ, "PATH": os.defpath, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [entry.name for entry in QUEUE])
def test_every_entry_runs_on_a_cpu_with_tiny_settings_and_such_a_run_is_not_filed(name, tmp_path):
    done = queue("run", name, "--dry", "--out", tmp_path, limit_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / f"{name}.json").read_text())
    entry = entry_named(name)
    assert sorted(result["parts"]) == sorted(part.name for part in entry.parts)
    for part in entry.parts:
        outcome = result["parts"][part.name]
        assert (outcome["exit"], outcome["timed_out"], outcome["gpu"]) == (0, False, None)
        if "{json}" in part.script:
            assert outcome["figures"]["results"]
            assert outcome["figures"]["about"]["device"] == "cpu"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.json", f"{name}.tgz"]
    refused = queue("record", tmp_path / f"{name}.json")
    assert refused.returncode == 2
    assert "dry run" in refused.stderr


@pytest.mark.parametrize("entry", QUEUE, ids=lambda entry: entry.name)
def test_the_time_of_an_entry_is_the_sum_of_its_parts_and_at_most_nine_minutes(entry):
    parts = [part.limit_s + GRACE_S for part in entry.parts]
    assert entry.limit_s() == START_S + (max(parts) if entry.together else sum(parts))
    assert entry.limit_s() <= LIMIT_S == 9 * 60
    assert len({part.name for part in entry.parts}) == len(entry.parts)


def test_the_list_shows_each_entry_with_its_time():
    assert len({entry.name for entry in QUEUE}) == len(QUEUE)
    shown = queue("list").stdout
    for entry in QUEUE:
        assert f"{entry.name} ({gpu_queue.minutes(entry.limit_s())}): {entry.question}" in shown
    assert gpu_queue.minutes(505) == "8 min 25 s"


def test_the_first_five_entries_are_those_that_were_asked_for_first():
    first = ["host-overhead", "gpu-bound-steps", "nccl-peaks", "checkpoints", "offload-fp8"]
    assert [entry.name for entry in QUEUE][:5] == first


ARGUMENTS = """
import argparse
from pathlib import Path

import decoder_peaks
import gpu_queue
import llama_steps
from _queue_entries import QUEUE

parsers = {"bench/card/llama_steps.py": llama_steps.parse, "bench/card/decoder_peaks.py": decoder_peaks.parse}
parsed = 0
for entry in QUEUE:
    for part in entry.parts:
        script, *words = gpu_queue.words_of(part, dry=False)
        if script in parsers:
            options = parsers[script]([word.replace("cuda", "cpu") for word in words])
            assert options.json == Path("{json}"), options
            parsed += 1
assert parsed == 6, parsed

assert llama_steps.engine_names("ours-fp8,fsdp2-blocks") == ["ours-fp8", "fsdp2-blocks"]
try:
    llama_steps.engine_names("fsdp2-fp8")
except argparse.ArgumentTypeError as error:
    assert "unknown engine fsdp2-fp8; expected ours, fsdp2, unsharded" in str(error), error
else:
    raise AssertionError("no error")
compared = {engine: llama_steps.reference_of(engine, "fsdp2") for engine in ("ours-fp8", "ours-blocks", "ours-offload")}
assert compared == {"ours-fp8": "fsdp2", "ours-blocks": "fsdp2-blocks", "ours-offload": "fsdp2-offload"}, compared
assert llama_steps.reference_of("ours-offload", "unsharded") == "unsharded"
losses = {"ours": [2.0, 4.0], "fsdp2": [2.0, 5.0], "unsharded": [9.0, 9.0]}
assert llama_steps.loss_difference(losses) == 0.25
"""


def test_scripts_know_the_options_that_an_entry_gives_them_on_a_gpu():
    """Dry runs do not parse these. In a process of its own: modules of bench/ would hide helpers of the tests."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "bench" / "card"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", ARGUMENTS], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ running

SLEEPS = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"


def is_running(number):
    stat = Path(f"/proc/{number}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_part_ends_at_its_limit_with_all_that_it_started_and_the_others_keep_their_figures(tmp_path, capfd):
    """One part after the other."""
    late = f'-c "{SLEEPS}; print(p.pid, flush=True); time.sleep(60)"'
    good = "-c \"import sys; open(sys.argv[1], 'w').write('[1]'); print('kept')\" {json}"
    bad = f"-c \"print({str(ROOT)!r} + '/bench'); 1 / 0\""
    parts = (Part("late", late, "", "", 2), Part("bad", bad, "", "", 30), Part("good", good, "", "", 30))
    run = gpu_queue.Run(Entry("planted", "?", parts), tmp_path, dry=False, gpu=H100)
    begin = time.monotonic()
    assert not run.perform(("late", "bad", "good"))
    assert time.monotonic() - begin < 40
    result = json.loads(run.file.read_text())
    outcomes = result["parts"]
    assert (outcomes["late"]["timed_out"], outcomes["late"]["exit"]) == (True, -15)
    assert not is_running(int(outcomes["late"]["output"][0]))
    assert outcomes["bad"]["output"][0] == "bench"  # no path of this machine
    assert "ZeroDivisionError" in outcomes["bad"]["output"][-1]
    assert (outcomes["bad"]["exit"], outcomes["bad"]["figures"]) == (1, None)
    assert (outcomes["good"]["exit"], outcomes["good"]["figures"], outcomes["good"]["output"]) == (0, [1], [])
    assert {key: outcomes["good"][key] for key in ("gpu", "driver", "kind")} == {
        "gpu": "NVIDIA H100 80GB HBM3",
        "driver": "580.1",
        "kind": "h100",
    }
    assert outcomes["good"]["torch"]
    assert "planted late: ended after its limit of 2 s" in capfd.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["planted.json", "planted.tgz"]


def test_parts_that_run_together_take_as_long_as_the_longest(tmp_path):
    sleeps = '-c "import time; time.sleep(2)"'
    parts = tuple(Part(name, sleeps, "", "", 30) for name in "abcd")
    run = gpu_queue.Run(Entry("together", "?", parts, together=True), tmp_path, dry=False, gpu=H100)
    begin = time.monotonic()
    assert run.perform(("a", "b", "c", "d"))
    assert time.monotonic() - begin < 7


def test_without_a_gpu_and_with_unknown_names_there_are_errors(tmp_path):
    for arguments, message in (
        (("run", "host-overhead"), "finds no GPU on this machine; use --dry"),
        (("run", "nothing", "--dry"), "unknown entry nothing; known: host-overhead"),
        (("run", "host-overhead", "--dry", "--parts", "fast"), "no part fast; known: direct, packed"),
        (("record", tmp_path / "none.json"), "cannot read"),
    ):
        done = queue(*arguments, *(("--out", tmp_path) if arguments[0] == "run" else ()))
        assert done.returncode == 2, done.stdout + done.stderr
        assert message in done.stderr


# ------------------------------------------------------------------ filing


def git(folder, *arguments):
    names = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    done = subprocess.run(
        ["git", *names, *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """Two commits that differ in their sources, and one after them that differs in a text."""
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
    sources = _queue_results.digest_here(repository)
    assert _queue_results.commit_of(sources, repository) == git(repository, "rev-parse", "HEAD")
    git(repository, "checkout", "-q", "HEAD~2")
    older = _queue_results.digest_here(repository)
    git(repository, "checkout", "-q", "-")
    assert older != sources
    assert _queue_results.commit_of(older, repository) == git(repository, "rev-parse", "HEAD~2")
    (repository / "composable_shard" / "more.py").write_text("b = 1\n")
    with pytest.raises(_queue_results.QueueError, match="no commit has the sources that were measured: commit them"):
        _queue_results.commit_of(_queue_results.digest_here(repository), repository)


def outcome(repository, gpu=H100, status=0, release="0.1", date="2026-11-28", figures=1):
    about = _queue_results.describe_machine(gpu) | {"torch": "2.11.0"}
    return {
        **about,
        "date": date,
        "exit": status,
        "release": release,
        "sources": _queue_results.digest_here(repository),
        "figures": figures,
    }


def test_results_are_filed_by_part_and_the_queue_goes_on_with_what_is_missing(repository, tmp_path, monkeypatch):
    results = tmp_path / "results"
    first, second = QUEUE[:2]
    monkeypatch.setattr(_queue_results, "RESULTS", results)

    def file(entry, gpu=H100, **parts):
        run = {"entry": entry.name, "dry": False, "kind": gpu.kind, "parts": parts}
        return json.loads(_queue_results.file_result(run, results, repository).read_text())["parts"]

    def following(kind):
        entry, missing = gpu_queue.next_entry(kind, "0.1", results)
        return entry.name, missing

    assert following("h100") == following(None) == ("host-overhead", ("direct", "packed"))
    filed = file(first, direct=outcome(repository), packed=outcome(repository, status=1, figures=None))
    assert filed["direct"]["commit"] == git(repository, "rev-parse", "HEAD")
    assert "sources" not in filed["direct"]
    assert following("h100") == following(None) == ("host-overhead", ("packed",))
    assert following("h200") == ("host-overhead", ("direct", "packed"))
    table = _queue_results.status_table("0.1", results)
    expected = (
        "NVIDIA H100 80GB HBM3, torch 2.11.0, driver 580.1, 2026-11-28, "
        f"commit {filed['direct']['commit'][:9]}; without packed"
    )
    assert f"| `host-overhead` | {expected} |" in table
    assert "| `gpu-bound-steps` | not yet |" in table

    filed = file(first, direct=outcome(repository, status=1, figures=None), packed=outcome(repository, figures=2))
    assert (filed["direct"]["figures"], filed["packed"]["figures"]) == (1, 2)
    assert following("h100") == ("gpu-bound-steps", ("eager", "blocks"))
    file(second, eager=outcome(repository, release="0.0"), blocks=outcome(repository, release="0.0"))
    assert following("h100") == ("gpu-bound-steps", ("eager", "blocks"))
    file(second, _queue_results.Gpu("NVIDIA H200", "1"), eager=outcome(repository), blocks=outcome(repository))
    assert following("h100")[0] == "gpu-bound-steps"
    assert following(None)[0] == "nccl-peaks"

    for entry in QUEUE:
        file(entry, **{part.name: outcome(repository) for part in entry.parts})
    assert gpu_queue.next_entry("h100", "0.1", results) is None
    with pytest.raises(_queue_results.QueueError, match="no entry of the queue"):
        _queue_results.file_result({"entry": "old", "dry": False, "kind": "h100", "parts": {}}, results, repository)


def test_next_names_the_command_its_time_and_the_file_of_the_result():
    shown = queue("next", "--gpu", "B200").stdout
    assert "first without figures for B200 and release line" in shown
    assert "command:   python bench/card/gpu_queue.py run host-overhead --out OUT" in shown
    assert "at most 8 min 40 s: direct 250 s, packed 250 s" in shown
    assert "bench/results/gpu/host-overhead-b200.json" in shown


def test_the_page_on_status_says_which_entries_were_measured_on_what():
    page = _queue_results.STATUS.read_text()
    table = _queue_results.status_table(_queue_results.release_line())
    assert page == _queue_results.with_table(page, table), "run `python bench/card/gpu_queue.py table`"
    with pytest.raises(_queue_results.QueueError, match="has no lines"):
        _queue_results.with_table("a page", table)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Tesla T4", "tesla-t4"),
    ],
)
def test_figures_are_filed_under_the_kind_of_gpu(name, kind):
    assert _queue_results.kind_of(name) == kind


# ------------------------------------------------------------------ what only a GPU records


def test_exposed_communication_is_the_time_in_which_other_streams_are_busy_and_compute_is_not():
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
    found = _gpu_trace.summarize(_gpu_trace.activities_of(trace))
    assert (found.kernels, found.copies, found.other_kernels, found.other_copies) == (2, 1, 1, 2)
    assert found.span_ms == pytest.approx(0.250)
    assert found.compute_ms == pytest.approx(0.1605)
    assert found.communication_ms == pytest.approx(0.060)  # 90 to 130, and 230 to 250
    assert found.exposed_ms == pytest.approx(0.050)  # 100 to 130, and 230 to 250
    assert found.idle_ms == pytest.approx(0.250 - 0.1605 - 0.050)
    with pytest.raises(ValueError, match="no kernel"):
        _gpu_trace.summarize([])


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


def test_a_peak_is_explained_by_the_places_whose_allocations_are_live_then():
    pool = [
        frame("c10/alloc.cpp", 1, "malloc"),
        frame("/x/torch/utils/_device.py", 103, "__torch_function__"),
        frame("/x/composable_shard/_memory/pool.py", 40, "lease"),
        frame("/x/composable_shard/_memory/pool.py", 30, "lease"),
        frame("/x/composable_shard/_group/exchange.py", 77, "gather"),
    ]
    trace = [
        {"action": "segment_alloc", "addr": 0, "size": 1 << 20, "stream": 0},
        {"action": "alloc", "addr": 100, "size": 30, "stream": 0, "frames": pool},
        {"action": "free_requested", "addr": 900, "size": 5, "stream": 0},  # of before the step
        {"action": "alloc", "addr": 200, "size": 10, "stream": 3, "frames": pool},
        {"action": "free_requested", "addr": 100, "size": 30, "stream": 0},
        {"action": "alloc", "addr": 100, "size": 40, "stream": 0},
        {"action": "free_completed", "addr": 100, "size": 30, "stream": 0},
        {"action": "alloc", "addr": 300, "size": 2, "stream": 0, "frames": pool},
        {"action": "free_requested", "addr": 100, "size": 40, "stream": 0},
        {"action": "alloc", "addr": 400, "size": 20, "stream": 0, "frames": pool},
    ]
    peak = _memory_history.peak_of(trace)
    place = "_memory/pool.py:40 lease < _group/exchange.py:77 gather"
    assert (peak.nbytes, peak.reached_at) == (47, place)
    assert [(site.where, site.stream, site.nbytes, site.count) for site in peak.sites] == [
        (_memory_history.NO_FRAME, 0, 40, 1),
        (place, 3, 10, 1),
        (_memory_history.FREED, 0, -5, 1),
        (place, 0, 2, 1),
    ]
    assert sum(site.nbytes for site in peak.sites) == peak.nbytes
    assert _memory_history.peak_of([]).sites == []
