"""`python -m composable_shard measure-links` starts ranks, or is one of them, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from _launched import descendants, finish
from _measuring_ranks import TINY
from _pool import distributed
from composable_shard.cli import main as command_line
from composable_shard.cli import measure_links
from composable_shard.errors import ShardConfigValueError, WorldTimeoutError
from composable_shard.planner import Machine, measuring, ranks

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "composable_shard", "measure-links", "--quick"]
LIMIT_S = 120


def start(*arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_ranks_measure_a_machine(tmp_path, capsys):
    file = tmp_path / "machine.json"
    file.write_text("an older one")
    arguments = ["--quick", "--ranks", "2", "--device", "cpu", "--timeout", str(LIMIT_S), "--json", str(file)]
    code = command_line.main(["measure-links", *arguments])
    out, err = capsys.readouterr()
    assert (code, re.sub("^warning: .*$", "", err, flags=re.MULTILINE).strip()) == (0, "")
    assert out.endswith(f"{file}: written\n")
    machine = Machine.from_json(file.read_text())
    figures = [*machine.flops.values(), machine.memory, machine.memory_bandwidth, machine.launch]
    assert all(figure > 0 for figure in figures)
    assert machine.intra_node.bandwidth > 0
    assert machine.devices_per_node == 2
    assert os.listdir(tmp_path) == ["machine.json"]
    assert "planner.ranks" not in commands(os.getpid())
    for title in (f"{machine.name}: 2 ranks on cpu", "Links: ", "Collectives: ", "Notes"):
        assert f"\n{title}" in f"\n{out}"


def commands(pid):
    """The command lines of a process's descendants."""
    return "".join(Path(f"/proc/{child}/cmdline").read_text() for child in descendants(pid))


@pytest.mark.matrix
def test_a_killed_rank_ends_the_others_and_its_output_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(measuring, "ON_RANK", "_measuring_ranks:die_or_wait")
    code = command_line.main(["measure-links", "--ranks", "2", "--device", "cpu", "--timeout", str(LIMIT_S)])
    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    assert "measure-links: rank 1 of 2 failed: it was killed by signal 9.\nIts output:\n" in err
    assert "the last words of rank 1" in err
    assert "planner.ranks" not in commands(os.getpid())


def test_a_failure_names_dead_ranks_first_and_equal_errors_once():
    late = ranks._Failure(0, "RuntimeError: connection closed", "Traceback ...\nRuntimeError: connection closed")
    died = ranks._Failure(2, "it was killed by signal 9", "it was killed by signal 9.", died=True)
    assert ranks._described([late, died], 3) == (
        "rank 2 of 3 failed: it was killed by signal 9.\n"
        "rank 0 failed later, perhaps as a consequence: RuntimeError: connection closed"
    )
    alike = [ranks._Failure(rank, "a bad setting", "a bad setting") for rank in (1, 0)]
    assert ranks._described(alike, 2) == "ranks 0, 1 of 2 failed: a bad setting"


def test_ranks_that_take_too_long_are_ended():
    begin = time.monotonic()
    with pytest.raises(
        WorldTimeoutError, match=r"ranks 0, 1 of 2 returned no result within 0.5 s and were ended.*starting"
    ):
        ranks.on_ranks("_measuring_ranks:sleep", 2, timeout=0.5)
    assert time.monotonic() - begin < 60
    assert "planner.ranks" not in commands(os.getpid())


def test_an_interrupt_ends_the_ranks(monkeypatch, capsys):
    before, started = {*descendants(os.getpid())}, set()

    def interrupted(*_, **__):
        started.update({*descendants(os.getpid())} - before)
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "wait", interrupted)
    assert command_line.main(["measure-links", "--quick", "--ranks", "2", "--device", "cpu"]) == 130
    assert capsys.readouterr().err.endswith("measure-links: interrupted\n")
    assert len(started) == 2
    assert not started & {*descendants(os.getpid())}


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_killed_by_a_signal_leaves_no_process(number):
    process = start("--ranks", "2", "--device", "cpu")
    deadline = time.monotonic() + LIMIT_S
    while len(children := descendants(process.pid)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = finish(process, LIMIT_S)
    if number == signal.SIGINT:
        assert (process.returncode, errors.strip()[-11:]) == (130, "interrupted")
    else:
        assert process.returncode == -number
    while any(alive(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


LAUNCHED = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@distributed(world=2)
def test_under_a_launcher_the_command_is_one_rank_and_measures_between_nodes(rank, world):
    """The environment describes each rank as a node of its own. The process group is that of the test."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in {**LAUNCHED, "RANK": str(rank), "MASTER_PORT": "1"}.items():
            patch.setenv(name, value)
        patch.setattr(measure_links, "QUICK", TINY)
        patch.setattr(measuring, "joined", lambda *_: nullcontext(torch.device("cpu")))
        file = Path(folder) / "machine.json"
        with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()):
            code = command_line.main(["measure-links", "--quick", "--device", "cpu", "--json", str(file)])
        assert code == 0
        assert file.exists() == ("intra_node was not measured" in output.getvalue()) == (rank == 0)
        if rank == 0:
            machine = Machine.from_json(file.read_text())
            assert machine.devices_per_node == 1
            assert machine.intra_node == machine.inter_node
        else:
            assert output.getvalue() == ""


@pytest.mark.matrix
def test_two_processes_of_a_launcher_measure_together(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = tmp_path / "machine.json"
    common = {**LAUNCHED, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    given = ["--device", "cpu", "--json", file, "--timeout", LIMIT_S]
    first, second = processes = [start(*given, RANK=str(rank), **common) for rank in range(2)]
    (text, first_errors), (silence, second_errors) = [finish(process, LIMIT_S) for process in processes]
    assert (first.returncode, second.returncode) == (0, 0), first_errors + second_errors
    assert "intra_node was not measured" in text
    assert silence == ""
    machine = Machine.from_json(file.read_text())
    assert machine.devices_per_node == 1
    assert machine.intra_node == machine.inter_node


# ---- arguments


def failing(capsys, *arguments):
    code = command_line.main(["measure-links", *map(str, arguments)])
    return code, capsys.readouterr().err


def test_invalid_arguments_are_refused_before_measuring(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ranks, "on_ranks", lambda *_, **__: pytest.fail("measured"))
    code, error = failing(capsys, "--ranks", 1)
    assert (code, error.split("measure-links: ")[1]) == (
        2,
        "ranks=1: a link has two ends; measure with at least 2 ranks\n",
    )
    code, error = failing(capsys, "--device", "abacus")
    assert code == 2
    assert "this process sees no abacus device" in error
    code, error = failing(capsys, "--json", tmp_path / "no" / "machine.json")
    assert code == 1
    assert "give a file in a directory that exists" in error
    code, error = failing(capsys, "--json", tmp_path)
    assert code == 1
    for seconds in (0, "nan", 1e9):
        with pytest.raises(SystemExit, match="2"):
            failing(capsys, "--timeout", seconds)


def test_a_number_of_ranks_that_contradicts_the_launcher_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    code, error = failing(capsys, "--ranks", 2, "--device", "cpu")
    assert code == 2
    assert "--ranks 2: a launcher has started 4 ranks" in error
    monkeypatch.setenv("WORLD_SIZE", "many")
    code, error = failing(capsys)
    assert code == 2
    assert "WORLD_SIZE" in error


def test_accelerators_are_used_if_there_are_enough(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert (ranks.default_ranks("auto"), ranks.default_ranks("cpu")) == (4, 2)
    assert (ranks.device_kind("auto", 4), ranks.device_kind("cuda", 2), ranks.device_kind("cpu", 9)) == (
        "cuda",
        "cuda",
        "cpu",
    )
    with pytest.raises(ShardConfigValueError, match="8 ranks on this node need 8 cuda devices, but it has 4"):
        ranks.device_kind("auto", 8)


def test_the_place_under_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert ranks.place_of_launcher() is None
    given = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    assert ranks.place_of_launcher() == ranks.Place(5, 8, 1, 4)


def test_help_has_examples_and_exit_codes(capsys):
    with pytest.raises(SystemExit, match="0"):
        command_line.main(["measure-links", "--help"])
    text = capsys.readouterr().out
    assert "python -m composable_shard measure-links --ranks 2 --json machine.json" in text
    assert "exit codes: 0" in text
