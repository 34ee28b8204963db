"""The tutorials: strategies agree, the demo writes its files, Ctrl-C keeps them, and compiled graphs are shown."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import re
import signal
import time
import types
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import _launched
import _logbook
from _gpt import Corpus, bigram_entropy, build_gpt, load_corpus, next_byte_loss, spaced_windows
from _launched import descendants, finish, kill
from _pool import POOL, distributed, more
from _replaying import captures_on_cpu
from composable_shard import checkpoint

ROOT = Path(__file__).parents[2]
TUTORIALS, PAGE = ROOT / "tutorials", ROOT / "docs" / "command_line.md"


# ------------------------------------------------------------------------------- strategies agree


def losses(strategy, optimizer, **changes):
    """The mean loss of each of 20 steps of a tiny model in float32."""
    tutorial = importlib.import_module("01_train_gpt")
    options = tutorial.Options(
        strategy=strategy,
        optimizer=optimizer,
        size="tiny",
        steps=20,
        evaluation=16,
        precision="float32",
    )
    options = replace(options, **changes)
    device = torch.device("cpu")
    text = torch.frombuffer(bytearray(Path(importlib.__file__).read_bytes()), dtype=torch.uint8)
    model = build_gpt(options.size, options.seed)
    tutorial.shard(model, options, device)
    optimizer = tutorial.make_optimizer(model, options)
    history = tutorial.train(model, optimizer, Corpus(text, text), options, device)
    return torch.tensor([moment.loss for moment in history])


@functools.cache  # shared by all strategies
def expected_losses(optimizer, **changes):
    return losses("none", optimizer, **changes)


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "fsdp2")
IN_SHORT = {(strategy, "adamw") for strategy in STRATEGIES} | {("zero3", "sgd")}


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [case if case in IN_SHORT else more(*case) for case in itertools.product(STRATEGIES, ("sgd", "adamw"))],
)
@distributed(world=2)
def test_twenty_steps_with_every_strategy_agree(rank, world, strategy, optimizer):
    expected = expected_losses(optimizer)
    assert expected[-1] < expected[0] - 0.3  # the model learns
    torch.testing.assert_close(losses(strategy, optimizer), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "fsdp2"])
@distributed(world=2)
def test_microbatches_agree_with_one_batch_of_the_same_total_size(rank, world, strategy):
    apart = losses(strategy, "sgd", batch=4, accumulate=2)
    torch.testing.assert_close(apart, expected_losses("sgd", batch=8), rtol=1e-4, atol=0)


@pytest.mark.matrix
@distributed(world=4)
def test_hsdp_agrees_with_no_sharding(rank, world):
    expected = losses("none", "adamw")
    torch.testing.assert_close(losses("hsdp", "adamw", replicas=2), expected, rtol=1e-4, atol=0)


# ------------------------------------------------------------------------------ the entropy of the text


def test_bigram_entropy_matches_a_manual_count():
    """The pairs are ab, ba, ab, ba, ac. So b is always followed by a, and a twice by b and once by c."""
    text = torch.frombuffer(bytearray(b"ababac"), dtype=torch.uint8)
    after_a = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert bigram_entropy(text) == pytest.approx(3 / 5 * after_a)


def test_bigram_entropy_does_not_depend_on_the_chunk_size():
    text = torch.randint(0, 256, (1000,), generator=torch.Generator().manual_seed(0))
    text = text.to(torch.uint8)
    assert bigram_entropy(text, chunk=7) == pytest.approx(bigram_entropy(text))


def test_pairs_across_two_texts_are_not_counted():
    first, second = (torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (b"aa", b"bb"))
    assert bigram_entropy(first, second) == pytest.approx(0.0)


def test_both_parts_of_the_corpus_are_large_and_constant():
    corpus = load_corpus()
    assert len(corpus.train) > 5_000_000
    assert 0.02 < len(corpus.held_out) / len(corpus.train) < 0.10
    assert torch.equal(corpus.held_out, load_corpus().held_out)


def test_the_learning_rate_rises_then_falls_to_a_fiftieth():
    rate = importlib.import_module("01_train_gpt").learning_rate
    course = [rate(i / 100, 1.0) for i in range(101)]
    assert course[0] == pytest.approx(0.02)
    assert max(course) == course[5] == pytest.approx(1.0)
    assert course[5:] == sorted(course[5:], reverse=True)
    assert course[-1] == pytest.approx(0.02)


# ------------------------------------------------------------------------------------- the command


def assert_picture(path):
    assert path.read_bytes().startswith(b"\x89PNG")


def start(script, *arguments):
    return _launched.start(TUTORIALS / script, *arguments)


@pytest.mark.timeout(240)
def test_the_demo_shows_its_plan_and_writes_metrics_figures_and_a_checkpoint(tmp_path):
    few = ["--steps", "6", "--sample", "20", "--precision", "float32"]
    process = start("01_train_gpt.py", "--size", "tiny", "--evaluation", "32", "--out", tmp_path, *few)
    output, errors = finish(process)
    assert process.returncode == 0, errors
    assert "Warning" not in errors
    assert output.index("blocks.0") < output.index("step     1")  # the plan comes first
    assert "bigram entropy" in output
    assert "The model writes:\n\ndef " in output

    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows[:-1]] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(row["loss"]) for row in rows[:-1])
    trace = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {"blocks.0", "blocks.1"} < {event["name"] for event in trace if event["ph"] == "X"}
    assert str(tmp_path / "timeline.json") in output
    for name in ("loss.png", "memory.png"):
        assert_picture(tmp_path / name)

    # The checkpoint of sharded parameters can be loaded into an unsharded model, which has the same loss.
    model = build_gpt("tiny", seed=1)
    assert checkpoint.load(tmp_path / "checkpoints", {"model": model}).step == 6
    with torch.no_grad():
        held_out = next_byte_loss(model, spaced_windows(load_corpus().held_out, 32, 33)).item()
    assert held_out == pytest.approx(rows[-1]["final"], rel=1e-4)


def test_the_demo_draws_resident_memory_if_a_finished_run_is_started_again(tmp_path):
    rows = [{"step": i, "loss": 5.0 / i, "seconds": 0.1 * i, "memory_bytes": (100 + i) << 20} for i in range(1, 30)]
    rows += [{"step": 29, "final": 0.8, "held_out": 0.8}]
    log = types.SimpleNamespace(rows=rows, say=print)
    _logbook.draw(log, 2.43, None, _logbook.OneStep(None, active=False), tmp_path)
    for name in ("loss.png", "memory.png"):
        assert_picture(tmp_path / name)


@pytest.mark.matrix
def test_the_tutorial_on_plans_reduces_exposed_communication_as_predicted(tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        assert importlib.import_module("03_plan_memory_and_overlap").main(["--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    output = capsys.readouterr().out
    assert "group blocks.3 does not fit. The least budget that works is 267264 bytes" in output
    lines = output.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("policy  ")) + 1 :]
    rows = {line[:26].rstrip(): line[26:].split()[:4] for line in table[: table.index("")]}
    exposed = {name: float(row[0]) for name, row in rows.items()}
    assert all(row[0] == row[1] for row in rows.values()), "the measured value matches the prediction"
    assert all(row[3] == "-" or float(row[2]) <= float(row[3]) for row in rows.values()), "within the budget"
    order = ["depth(0)", "auto, least budget", "depth(1)", "auto", "depth(2)"]
    order += ["auto, 1.5 x the memory", "auto, 2.5 x the memory"]
    assert [exposed[name] for name in order] == sorted(exposed.values(), reverse=True)[: len(order)]
    assert float(rows["auto"][2]) <= float(rows["depth(1)"][2]), "auto does not use more memory than depth(1)"
    assert exposed["auto, 2.5 x the memory"] < 0.1 * exposed["depth(0)"]
    assert exposed["the same plan, as JSON"] == exposed["auto, 2.5 x the memory"]
    assert "Differences between this plan and its last step: none" in output
    written = {
        f"{run}_{what}"
        for run in ("slow", "hidden", "budget")
        for what in ("memory.png", "plan.json", "record.json", "time.png", "timeline.json")
    }
    assert {path.name for path in tmp_path.iterdir()} == written | {"overlap.png", "step.png"}
    for path in tmp_path.glob("*_timeline.json"):
        names = [
            event["args"]["name"]
            for event in json.loads(path.read_text())["traceEvents"]
            if event["ph"] == "M" and "name" in event["args"]
        ]
        assert names[:1] == ["predicted"]
        assert "measured" in names


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_ctrl_c_ends_every_rank_and_keeps_the_checkpoint(tmp_path):
    process = start(
        "01_train_gpt.py", "--size", "tiny", "--evaluation", "32", "--out", tmp_path, "--minutes", "10", "--sample", "0"
    )
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 150
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        if process.poll() is not None or time.monotonic() > deadline:
            output, errors = finish(process, limit_s=3)
            pytest.fail(f"no third step\n{output}\n{errors}")
        time.sleep(0.1)

    ranks = descendants(process.pid)
    assert len(ranks) == 2
    process.send_signal(signal.SIGINT)
    try:
        output, errors = finish(process, limit_s=60)
        assert process.returncode == 130
        assert "Traceback" not in output + errors
        assert "interrupted" in output
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert checkpoint.verify(tmp_path / "checkpoints").step == len(rows)
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    finally:
        kill(ranks)


def ways_on_a_rank(rank, world, arguments):
    """Run the tutorial on compiling on a rank of the worker pool. Returns graphs and losses of each way to compile."""
    warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")  # if Inductor is imported
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # Dynamo reads it
    tutorial = importlib.import_module("02_compile")
    sides = tutorial.run(tutorial.parse(arguments), torch.device("cpu"))
    return {
        way: ([(graph.direction, graph.sequence) for graph in side.graphs], side.losses) for way, side in sides.items()
    }


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_the_tutorial_on_compiling_shows_every_graph_and_equal_losses(tmp_path):
    arguments = ["--size", "tiny", "--backend", "aot_eager", "--steps", "1", "--out", str(tmp_path)]
    for found in POOL.run(f"{__name__}:ways_on_a_rank", 2, {"arguments": arguments}):
        graphs, losses = ({way: each[i] for way, each in found.items()} for i in (0, 1))
        assert graphs["eager"] == []
        assert graphs["blocks"] == [("forward", "Gwmmmm"), ("backward", "GmwmmmmmmmRw")]  # shared by all blocks
        # One group is prefetched, and a reduction is waited for after the launch of the next one.
        assert graphs["whole"] == [("forward", "GwGwGmmmmwmmmmm"), ("backward", "GmmmwGmmmmmmmRmwmmmmmmmwRwRw")]
        assert losses["blocks"] == losses["whole"] == losses["eager"]
    assert_picture(tmp_path / "graphs.png")


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_the_tutorial_on_checkpoints_kills_ranks_and_resumes_bitwise_identically(tmp_path):
    few = ["--steps", "16", "--save-every", "3", "--worlds", "1"]
    process = start("05_checkpoint_and_resume.py", "--out", tmp_path / "05", *few)
    output, errors = finish(process, limit_s=200)
    assert process.returncode == 0, output + errors
    assert re.search(r"killed both ranks; unfinished save, ignored: \.step-\d{8}\.tmp-\w+", output)
    assert re.search(r"killed rank 1 after step \d+\n  rank 0 ended: ", output)
    assert "rank 0 of 2 resumed after step " in output
    assert "0 unfinished saves" in output
    assert "all 16 losses are bitwise identical" in output
    assert "rank 0 of 1 resumed after step 6" in output
    (apart,) = re.findall(r"^1 ranks?: the largest relative difference of losses is (\S+)$", output, re.MULTILINE)
    assert float(apart) < 1e-5
    assert_picture(tmp_path / "05" / "losses.png")


def adapters_on_a_rank(rank, world, arguments):
    """Run the tutorial on adapters on a rank of the worker pool. Returns its held-out losses and the rank's bytes."""
    tutorial = importlib.import_module("06_lora")
    return tutorial.run(tutorial.parse(arguments), torch.device("cpu"))


@pytest.mark.matrix
def test_the_tutorial_on_adapters_trains_only_them_as_the_planner_advises(tmp_path, capsys):
    tutorial = importlib.import_module("06_lora")
    arguments = ["--shape", "layers=2,width=128,heads=4,vocabulary=512,sequence=2048", "--devices", "2"]
    arguments += ["--size", "tiny", "--sequence", "64", "--rank", "2", "--memory", "0.8", "--out", str(tmp_path / "06")]
    arguments += ["--base-steps", "12", "--steps", "12", "--evaluation", "16"]
    advised = tutorial.settled(tutorial.parse(arguments))
    output = capsys.readouterr().out
    assert re.search(r"^  adapters: zero\d.*, in 0\.\d MiB$", output, re.MULTILINE), output
    assert re.fullmatch(r"--strategy=zero\d", advised[0])
    assert_picture(tmp_path / "06" / "strategies.png")
    for losses in POOL.run(f"{__name__}:adapters_on_a_rank", 2, {"arguments": [*arguments, *advised]}):
        assert losses["after"] < losses["before"]
    assert_picture(tmp_path / "06" / "lora.png")
    manifest = json.loads((tmp_path / "06" / "checkpoints" / "step-00000012" / "manifest.json").read_text())
    saved = [key for key in manifest["manifest"]["tensors"] if key.startswith("adapters.")]
    assert len(saved) == 2 * 2 * 4  # two for each of four layers in two blocks
    assert all(key.endswith(("/up/weight", "/down/weight")) for key in saved)


def graphs_on_a_rank(rank, world, arguments):
    """Run the tutorial on CUDA graphs on a rank of the worker pool. Returns losses and counts, eager and replayed."""
    tutorial = importlib.import_module("09_cuda_graphs")
    options = tutorial.parse(arguments)
    outcomes = []
    for captures in (nullcontext(), captures_on_cpu()):
        with captures:
            sides = tutorial.run(options, torch.device("cpu"))
        call = sides["graphed"].call
        losses = [side.losses for side in sides.values()]
        outcomes.append((losses, call.captures, call.replays, call.eager_calls, repr(call)))
    return outcomes


def test_the_tutorial_on_cuda_graphs_has_equal_losses_eagerly_and_in_replays():
    arguments = ["--size", "tiny", "--steps", "6", "--microbatches", "4"]
    for found in POOL.run(f"{__name__}:graphs_on_a_rank", 2, {"arguments": arguments}):
        for (eager, graphed), *_ in found:
            assert eager == graphed
            assert eager[-1] < eager[0]
        assert found[0][1:4] == (0, 0, 24)
        assert "no CUDA graphs on cpu" in found[0][4]
        assert found[1][1:4] == (3, 20, 4), found[1][4]


def updates_on_a_rank(rank, world, arguments):
    """Run the tutorial on weights for inference on a rank of the worker pool."""
    tutorial = importlib.import_module("10_weights_to_inference")
    return tutorial.run(tutorial.parse(arguments), torch.device("cpu"))


def test_the_tutorial_on_weights_for_inference_generates_with_each_version():
    arguments = ["--steps", "6", "--every", "2", "--batch", "2", "--sample", "4"]
    by_rank = POOL.run(f"{__name__}:updates_on_a_rank", 4, {"arguments": arguments})
    for updates in by_rank:
        assert [update.version for update in updates] == [2, 4, 6]
    for of_a_version in zip(*by_rank, strict=True):
        sent, received = (
            sum(update.sent + update.received for update in half) for half in (of_a_version[:2], of_a_version[2:])
        )
        assert sent == received > 0


# ---------------------------------------------------------------------------------------- the page


def test_every_command_on_the_page_is_valid_and_every_picture_is_created_by_a_script():
    page = PAGE.read_text()
    commands = re.findall(r"^\.venv/bin/python tutorials/(\w+)\.py(.*)$", page, re.MULTILINE)
    assert [name[:2] for name, _ in commands] == ["02", "03", "04", "05", "06", "09", "10"]
    for name, arguments in commands:
        assert (TUTORIALS / f"{name}.py").exists()
        parse = getattr(importlib.import_module(name), "parse", None)
        assert parse is None or parse(arguments.split()) is not None
    pictures = set(re.findall(r"`runs/(\d\d)/(\w+\.png)`", page))
    assert {number for number, _ in pictures} == {"02", "04", "05", "06"}
    for number, picture in pictures:
        (script,) = TUTORIALS.glob(f"{number}_*.py")
        assert re.search(rf"\b{picture}\"", script.read_text()), f"{script.name}: {picture}"
