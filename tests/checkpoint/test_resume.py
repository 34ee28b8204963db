"""The demo resumes after any end: with bitwise identical losses, or within rounding on other numbers of ranks."""

from __future__ import annotations

import importlib
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import _demo_ranks
from _launched import descendants, free_port, kill
from _pool import distributed, more
from composable_shard import checkpoint

STEPS, EVERY = 24, 4
LONG = 200  # steps of a run that torchrun starts
ROOT = Path(__file__).parents[2]


def wait_for(step, out, ranks, limit_s=90):
    """Wait until a run has reached a step."""
    deadline = time.monotonic() + limit_s
    while len(_demo_ranks.curve(out)) < step:
        if time.monotonic() > deadline or not all(each.is_alive() for each in ranks):
            _demo_ranks.kill(ranks)
            pytest.fail("\n".join(path.read_text() for path in out.glob("said-*.txt")))
        time.sleep(0.005)


def said(out):
    return (out / "said-0.txt").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of an uninterrupted run."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert _demo_ranks.end(_demo_ranks.start(out, 2, STEPS, 0)) == [0, 0], said(out)
    curve = _demo_ranks.curve(out)
    assert [step for step, *_ in curve] == list(range(1, STEPS + 1))
    return curve


def test_a_killed_and_restarted_demo_resumes_bit_for_bit(undisturbed, tmp_path):
    ranks = _demo_ranks.start(tmp_path, 2, STEPS, EVERY)
    wait_for(10, tmp_path, ranks)
    time.sleep(random.uniform(0, 0.1))
    _demo_ranks.kill(ranks)
    assert [each.exitcode for each in ranks] == [-9, -9]
    assert checkpoint.latest(tmp_path / "checkpoints") >= 8
    assert _demo_ranks.end(_demo_ranks.start(tmp_path, 2, STEPS, EVERY)) == [0, 0], said(tmp_path)
    assert "resumed after step " in said(tmp_path)
    assert _demo_ranks.curve(tmp_path) == undisturbed
    assert checkpoint.latest(tmp_path / "checkpoints") == STEPS


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_a_demo_killed_at_many_moments_reaches_the_same_losses(undisturbed, tmp_path):
    """Kill all ranks together, or one rank so that the others end, while they start, step or save."""
    moments = random.Random(4)
    latest = []
    for _ in range(10):
        ranks = _demo_ranks.start(tmp_path, 2, STEPS, 1)
        begun = len(_demo_ranks.curve(tmp_path))
        if moments.random() < 0.7:  # otherwise during the start
            deadline = time.monotonic() + 60
            while len(_demo_ranks.curve(tmp_path)) <= min(begun, STEPS - 2) and time.monotonic() < deadline:
                time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.3))
        if moments.random() < 0.5:
            ranks[moments.randrange(2)].kill()
            ranks[0].join(2)
        _demo_ranks.kill(ranks)
        latest.append(checkpoint.latest(tmp_path / "checkpoints") or 0)
        if latest[-1]:
            checkpoint.verify(tmp_path / "checkpoints")
    assert latest == sorted(latest)
    assert len(set(latest)) > 3
    assert _demo_ranks.end(_demo_ranks.start(tmp_path, 2, STEPS, 1)) == [0, 0], said(tmp_path)
    assert _demo_ranks.curve(tmp_path) == undisturbed


@pytest.mark.matrix
def test_on_other_numbers_of_ranks_the_demo_resumes_within_rounding(undisturbed, tmp_path):
    """Run on 2, 1, 3 and again 2 ranks. With 3 ranks, the ranks have different numbers of windows."""
    for world, until in ((2, 5), (1, 10), (3, 15)):
        ranks = _demo_ranks.start(tmp_path, world, STEPS, EVERY)
        wait_for(until, tmp_path, ranks)
        _demo_ranks.kill(ranks)
    assert _demo_ranks.end(_demo_ranks.start(tmp_path, 2, STEPS, EVERY)) == [0, 0], said(tmp_path)
    assert said(tmp_path).count("resumed after step ") == 3
    curve = torch.tensor(_demo_ranks.curve(tmp_path), dtype=torch.float64)
    torch.testing.assert_close(curve, torch.tensor(undisturbed, dtype=torch.float64), rtol=1e-4, atol=0)


def torchrun(out, *arguments, **variables):
    """Start the demo with torchrun."""
    folders = [str(each) for each in (ROOT, ROOT / "tests", ROOT / "tutorials")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "GLOO_SOCKET_IFNAME": "lo", **variables}
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *arguments]
    command += [str(ROOT / "tests" / "_demo_ranks.py"), *_demo_ranks.options(out, LONG, 5)]
    with (out / "said-0.txt").open("a") as file:
        return subprocess.Popen(command, env={**environment, "OMP_NUM_THREADS": "1"}, stdout=file, stderr=file)


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_torchrun_restarts_the_demo_on_fewer_ranks_and_then_on_more(tmp_path):
    """Of two agents with one rank each, one is killed, and the other continues alone. Then two ranks finish the run."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    whole.mkdir()
    out.mkdir()
    assert _demo_ranks.end(_demo_ranks.start(whole, 2, LONG, 0)) == [0, 0], said(whole)
    elastic = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.2"]
    elastic += ["--rdzv-backend=c10d", "--rdzv-id=demo", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    conf = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
    agents = [torchrun(out, *elastic, conf + str(int(first))) for first in (True, False)]
    try:
        wait(lambda: len(_demo_ranks.curve(out)) >= 12, out)
        kill([*descendants(agents[1].pid), agents[1].pid])
        wait(lambda: "on 1 processes" in said(out), out)
        wait(lambda: len(_demo_ranks.curve(out)) >= 40, out)
    finally:
        for agent in agents:
            kill([*descendants(agent.pid), agent.pid])
            agent.wait()
    last = torchrun(out, "--standalone", "--nproc-per-node=2")
    try:
        assert last.wait(200) == 0, said(out)
    finally:
        kill([*descendants(last.pid), last.pid])
    assert said(out).count("resumed after step ") == 2
    assert re.findall(r"on (\d) processes", said(out)) == ["2", "1", "2"]
    curve, expected = (torch.tensor(_demo_ranks.curve(each), dtype=torch.float64) for each in (out, whole))
    torch.testing.assert_close(curve, expected, rtol=1e-4, atol=0)


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_torchrun_restarts_all_ranks_when_one_is_killed_and_they_resume_bit_for_bit(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    whole.mkdir()
    out.mkdir()
    assert _demo_ranks.end(_demo_ranks.start(whole, 2, LONG, 0)) == [0, 0], said(whole)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=4", "--monitor-interval=0.2"]
    agent = torchrun(out, *options, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # else they find dead ranks' addresses
    try:
        for restarts, rank in enumerate((0, 1, 1)):
            wait(lambda restarts=restarts: said(out).count("resumed after step ") == restarts, out)
            wait(lambda restarts=restarts: len(_demo_ranks.curve(out)) >= 30 * (restarts + 1), out)
            kill([pid_of(rank, agent)])
        assert agent.wait(200) == 0, said(out)
    finally:
        kill([*descendants(agent.pid), agent.pid])
    assert said(out).count("resumed after step ") == 3
    assert _demo_ranks.curve(out) == _demo_ranks.curve(whole)


def pid_of(rank, agent):
    """The process id of a rank that an agent has started."""
    for pid in descendants(agent.pid):
        if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text():
            return pid
    pytest.fail(f"rank {rank} does not run")


def wait(happens, out, limit_s=120):
    deadline = time.monotonic() + limit_s
    while not happens():
        assert time.monotonic() < deadline, said(out)
        time.sleep(0.02)


@pytest.mark.matrix
def test_checkpoints_of_a_finished_run_are_moved_aside(undisturbed, tmp_path):
    for _ in range(2):
        assert _demo_ranks.end(_demo_ranks.start(tmp_path, 1, 3, 2)) == [0], said(tmp_path)
    assert f"checkpoints of the previous run were moved to {tmp_path / 'checkpoints-1'}" in said(tmp_path)
    assert "resumed" not in said(tmp_path)
    for directory in ("checkpoints", "checkpoints-1"):
        assert checkpoint.latest(tmp_path / directory) == 3
    assert [step for step, *_ in _demo_ranks.curve(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("strategy", [more(each) for each in ("none", "ddp", "zero1", "zero2", "fsdp2")])
@distributed(world=2)
def test_every_strategy_resumes_bit_for_bit(rank, world, strategy, tmp_path):
    demo, checkpoints = _demo_ranks.DEMO, importlib.import_module("_resume").Checkpoints
    options = demo.Options(strategy=strategy, size="tiny", steps=6, evaluation=16, precision="float32")
    device, corpus = torch.device("cpu"), demo.load_corpus()

    def losses(directory, until):
        model, position = demo.build_gpt(options.size, options.seed), demo.begin(options)
        demo.shard(model, options, device)
        optimizer = demo.make_optimizer(model, options)
        kept = checkpoints(directory, model, optimizer, position, every=until)
        resumed, stop = kept.resume(), lambda: position.step >= until
        arguments = (model, optimizer, corpus, options, device, position)
        return resumed, [each.loss for each in demo.train(*arguments, stop=stop, after_step=kept.after_step)]

    whole, first, second = losses(tmp_path / "whole", 6), losses(tmp_path / "cut", 3), losses(tmp_path / "cut", 6)
    assert (whole[0], first[0], second[0]) == (False, False, True)
    assert len(first[1]) == 3
    assert first[1] + second[1] == whole[1]
