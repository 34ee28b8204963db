"""tutorials/train.py: strategies agree, runs resume, only adapters train, and mistakes give a message of one line."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import _launched
import train
from _blueprints import blueprint, build
from _checks import check
from _console import Interrupt
from _figures import json_lines, open_log, tensorboard, weights_and_biases
from _launched import descendants, finish, kill
from _pool import POOL, distributed, more
from _text import BYTES, read_text, texts_of
from composable_shard import checkpoint
from composable_shard.planner import KNOWN, NAMED

SCRIPT = Path(train.__file__)
FEW = ["--model", "tiny", "--sequence", "16", "--steps", "6", "--evaluation", "16", "--sample", "0"]
SAME_BATCH = {1: ["--batch", "4"], 2: ["--batch", "2"]}  # the same total batch size


class After(Interrupt):
    """Simulates Ctrl-C after some steps, without a signal."""

    def __init__(self, steps):
        self._steps, self._wait = steps, False

    @property
    def asked(self):
        self._steps -= 1
        return self._steps == 0


def on_rank(rank, world, arguments, stop_after=0):
    """Run the script on a rank of the worker pool. Returns its exit status."""
    warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")  # if Inductor is imported
    options, plan = check(train.parse(arguments), world)
    return train.run(options, plan, torch.device("cpu"), After(stop_after))


def run(out, world, *arguments, stop_after=0):
    """Run the script on `world` ranks. Returns the loss of each step, and the last held-out loss."""
    given = [*FEW, *SAME_BATCH[world], "--out", str(out), "--data", str(texts(out.parent)), *map(str, arguments)]
    statuses = POOL.run(f"{__name__}:on_rank", world, {"arguments": given, "stop_after": stop_after})
    assert statuses == [130 if stop_after else 0] * world
    return curve(out)


def rows_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out):
    steps = [row for row in rows_of(out) if "train/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    return [row["train/loss"] for row in steps], rows_of(out)[-1].get("final/loss")


def texts(folder):
    """A folder with text files."""
    root = folder / "texts"
    if not root.exists():
        root.mkdir()
        (root / "some.py").write_bytes(Path(json.__file__).read_bytes())
        (root / "more.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    return root


def check_near(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1] == pytest.approx(other[1], rel=1e-5)


# ------------------------------------------------------------------------------ strategies agree


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory):
    """Losses of an unsharded run in one process."""
    losses = run(tmp_path_factory.mktemp("unsharded") / "run", 1, "--strategy", "none")
    assert losses[0][-1] < losses[0][0] - 0.1  # the model learns
    return losses


@pytest.mark.parametrize(
    "settings",
    [
        ["zero3"],
        more(["ddp"]),
        more(["zero1"]),
        more(["zero2", "--accumulate", "2", "--batch", "1"]),
        ["hsdp", "--replicas", "2"],
        ["zero3", "--checkpointing", "full"],
        more(["zero3", "--checkpointing", "selective"]),
    ],
    ids=" ".join,
)
def test_two_ranks_train_like_one_unsharded_process(unsharded, tmp_path, settings):
    check_near(run(tmp_path / "run", 2, "--strategy", *settings), unsharded)


@pytest.mark.parametrize("precision", ["bfloat16-mixed", "bfloat16"])
def test_lower_precision_trains_nearly_like_float32(unsharded, tmp_path, precision):
    losses = run(tmp_path / "run", 2, "--precision", precision)
    assert losses[0] == pytest.approx(unsharded[0], rel=0.02)
    assert losses[0] != unsharded[0]


@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-1b"])
def test_a_shape_of_the_planner_creates_a_model_on_the_meta_device(name):
    shape = NAMED[name]
    model = build(blueprint(name, 8), torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(model.angles.abs(), torch.ones(8, shape.channels // 2))
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


@pytest.mark.matrix
def test_a_shape_of_the_planner_trains_like_unsharded_and_generates_text(tmp_path):
    """The smallest shape has 124 million parameters, so this takes seconds."""
    given = ["--model", "gpt2-124m", "--steps", "2", "--sample", "4"]
    whole = run(tmp_path / "whole", 1, "--strategy", "none", *given)
    check_near(run(tmp_path / "run", 2, *given), whole)


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_a_compiled_model_trains_like_an_eager_one(unsharded, tmp_path):
    check_near(run(tmp_path / "run", 2, "--compile"), unsharded)


# ---------------------------------------------------------------------------------- resuming runs


@pytest.mark.parametrize("settings", [[], more(["--lora", "2"]), more(["--strategy", "zero1"])], ids=" ".join)
def test_a_stopped_run_resumes_bitwise_identically(tmp_path, settings):
    whole = run(tmp_path / "whole", 2, *settings)
    assert len(run(tmp_path / "cut", 2, *settings, stop_after=3)[0]) == 3
    assert run(tmp_path / "cut", 2, *settings) == whole


def test_a_run_resumes_with_another_number_of_ranks_and_strategy(unsharded, tmp_path):
    run(tmp_path / "cut", 2, stop_after=3)
    check_near(run(tmp_path / "cut", 1, "--strategy", "none"), unsharded)


def test_a_finished_run_continues_with_more_steps_or_starts_again(tmp_path):
    out = tmp_path / "run"
    first = run(out, 1, "--strategy", "none", "--steps", 2, "--evaluate-every", 1)
    assert [row.get("held_out/loss") is not None for row in rows_of(out)] == [True, False, False]
    longer = run(out, 1, "--strategy", "none", "--steps", 4)
    assert longer[0][:2] == first[0]
    assert len(longer[0]) == 4
    assert run(out, 1, "--strategy", "none", "--steps", 2, "--fresh") == first
    assert [checkpoint.latest(out / name) for name in ("checkpoints", "checkpoints-1")] == [2, 4]


def test_another_seed_gives_other_losses(unsharded, tmp_path):
    assert run(tmp_path / "run", 1, "--strategy", "none", "--seed", "1")[0][0] != unsharded[0][0]


# -------------------------------------------------------------------------------------- adapters


def test_only_adapters_are_trained_and_saved(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    trained = run(tmp_path / "first", 2, "--export", base)
    settings = ["--weights", base, "--lora", "2", "--learning-rate", "0.02", "--export", tuned]
    adapted = run(tmp_path / "second", 2, *settings)
    assert adapted[0][0] < trained[0][0] - 0.1  # it started from the weights of the first run
    assert adapted[1] < trained[1]

    before, after = (safetensors.load_file(folder / "model.safetensors") for folder in (base, tuned))
    plain = {name.replace(".base.", "."): name for name in after}
    adapters = after.keys() - {plain[name] for name in before}
    assert len(adapters) == 2 * 2 * 4  # two for each of four layers in two blocks
    assert all(torch.equal(after[plain[name]], before[name]) for name in before)
    assert all(after[name].any() for name in adapters)
    manifest = json.loads((tmp_path / "second" / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    saved = {key.removeprefix("model.") for key in manifest["manifest"]["tensors"] if key.startswith("model.")}
    assert saved == {name.replace(".", "/") for name in adapters}


# ------------------------------------------------------------------------------------------ text


def test_the_ends_of_few_files_or_some_of_many_files_are_held_out(tmp_path):
    (tmp_path / ".hidden").mkdir()
    for name in (".hidden/a.txt", "b.txt", "sub.txt", "c.bin"):
        (tmp_path / name).write_bytes(name.encode() * 20)
    few = read_text(texts_of(tmp_path, "txt"), BYTES)
    sizes = [20 * len("b.txt") + 1, 20 * len("sub.txt") + 1]
    assert len(few.held_out) == sum(size // 20 for size in sizes)
    assert len(few.train) + len(few.held_out) == sum(sizes)
    assert bytes(few.train.tolist()).startswith(b"b.txtb.txt")
    for number in range(100):
        (tmp_path / f"{number}.txt").write_bytes(b"%03d\n" % number * 3)
    many = read_text(texts_of(tmp_path, "txt"), BYTES)
    parts = [set(bytes(part.tolist()).split()) for part in (many.train, many.held_out)]
    assert not parts[0] & parts[1]
    assert 0 < len(parts[1]) < 12
    # no file is chosen by its name
    unlucky = read_text([(f"{number}.txt", b"words " * 20) for number in range(1, 46)], BYTES)
    assert len(unlucky.held_out) == 45 * (121 // 20)


# --------------------------------------------------------------------------------------- metrics


def test_metrics_of_a_resumed_run_are_appended_to_earlier_ones(tmp_path, monkeypatch):
    """Uses replacements for TensorBoard's writer and a run of Weights & Biases."""
    written, made = [], []

    class Writer:
        def __init__(self, folder, purge_step):
            made.append((folder, purge_step))

        def add_scalar(self, *scalar):
            written.append(scalar)

        def log(self, figures, step):
            written.append((figures, step))

    def init(project, dir, config):  # noqa: A002 - the name in wandb.init
        made.append((project, dir, config))
        return Writer(dir, None)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "a": 1}\n{"step": 4, "a": 2}\n{"st')
    sinks = [tensorboard(tmp_path, 3), weights_and_biases("mine", tmp_path, {"out": tmp_path})]
    sinks.append(json_lines(tmp_path / "metrics.jsonl", 3))
    with open_log(torch.nn.Linear(1, 1), sinks, 3, every=1) as log:
        log.step(loss=torch.tensor(0.5), tokens=10, lr=0.25)
    assert made == [(tmp_path, 4), ("mine", tmp_path, {"out": str(tmp_path)}), (tmp_path, None)]
    figures, step = written.pop()
    speed = figures["step/tokens_per_second"]
    assert (figures, step) == ({"train/loss": 0.5, "lr": 0.25, "step/tokens_per_second": speed}, 4)
    assert written == [(name, value, 4) for name, value in figures.items()]
    assert rows_of(tmp_path) == [{"step": 3, "a": 1}, {"step": 4, **figures}]


# -------------------------------------------------------------------------------------- mistakes


MISTAKES = [
    ("--data nowhere", "--data nowhere: no such folder"),
    ("--data empty", "--data empty: no text in files with suffixes txt,md,"),
    ("--data . --suffixes .xyz", "--data .: no text in files with suffixes .xyz; choose others with --suffixes"),
    ("--model 3mm", "--model 3mm: expected a Hugging Face config.json, a folder with one, or one of tiny, 3m, "),
    ("--model empty", "--model empty: expected a Hugging Face config.json, a folder with one, or one of tiny, "),
    ("--model broken.json", "--model broken.json: broken.json does not contain a JSON object"),
    ("--model config.json", "--model config.json: requires Transformers (pip install transformers)"),
    ("--model gpt2-124m --sequence 2048", "--sequence 2048: --model gpt2-124m takes at most 1024 tokens"),
    ("--weights empty", "--weights empty: not a folder with safetensors"),
    ("--batch 0", "--batch 0: must be above 0"),
    ("--lora -1", "--lora -1: must be at least 0"),
    ("--steps 1 --minutes 1", "--steps and --minutes: use only one of them"),
    ("--wandb mine", "--wandb: requires the package wandb (pip install wandb)"),
    ("--export empty", "--export empty: already exists"),
    ("--strategy none", "--strategy none: works only on one process, not on 2; use ddp for unsharded replicas"),
    ("--strategy hsdp --replicas 3", "--replicas 3: must divide the number of processes, 2"),
    ("--strategy auto", "--strategy auto: unknown device "),
]


def test_invalid_settings_give_a_message_of_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("[]")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for arguments, message in MISTAKES:
        with pytest.raises(SystemExit) as refusal:
            check(train.parse(arguments.split()), 2)
        name, line = str(refusal.value).split(": ", 1)
        assert name == Path(sys.argv[0]).name
        assert line.startswith(message)
        assert "\n" not in line


def test_a_vocabulary_that_is_too_small_is_rejected(monkeypatch):
    monkeypatch.setattr("_checks.blueprint", lambda *given: replace(blueprint(*given), vocabulary=255))
    with pytest.raises(SystemExit, match="a vocabulary of 255 is too small for text of 256 different bytes"):
        check(train.parse([]), 2)


def test_only_the_first_rank_prints_the_message(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as refusal:
        check(train.parse(["--batch", "0"]), 2)
    assert refusal.value.code == 1


@distributed(world=2)
def test_too_short_text_and_checkpoints_of_another_model_are_rejected(rank, world, tmp_path):
    short = tmp_path / f"short-{rank}"
    short.mkdir()
    (short / "short.txt").write_text("a few words")
    where = ["--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="--data: 12 training tokens are too few for sequences of 16"):
        on_rank(rank, world, [*FEW, *where, "--data", str(short)])
    where += ["--data", str(Path(json.__file__).parent)]
    assert on_rank(rank, world, [*FEW, *where]) == 0
    with pytest.raises(SystemExit, match="has checkpoints of another model; use another folder, or --fresh"):
        on_rank(rank, world, [*FEW, *where, "--lora", "2"])


@pytest.mark.matrix
def test_auto_uses_the_recommendation_of_advise_and_prints_the_reason(tmp_path, capsys):
    machine = tmp_path / "machine.json"
    chosen = {}
    for memory in (1 << 30, 740_000):
        machine.write_text(replace(KNOWN["l40s"], memory=memory).to_json())
        options, _ = check(train.parse([*FEW, "--strategy", "auto", "--machine", str(machine)]), 2)
        chosen[options.strategy, options.checkpointing] = capsys.readouterr().out
    (roomy, checkpoints), (tight, _) = chosen
    assert (roomy, checkpoints) == ("ddp", "none")
    assert tight in ("zero2", "zero3")
    for (name, _), output in chosen.items():
        assert re.match(rf"strategy {name}.*: .* tokens/s; .* exposed communication", output)
    options, _ = check(train.parse([*FEW, "--strategy", "auto", "--machine", "h100", "--lora", "2"]), 2)
    assert options.strategy in train.STRATEGIES[:-1]
    machine.write_text(replace(KNOWN["l40s"], memory=1000).to_json())
    with pytest.raises(SystemExit, match="--strategy auto: Nothing fits"):
        check(train.parse([*FEW, "--strategy", "auto", "--machine", str(machine)]), 2)


# ----------------------------------------------------------------------------------- the command


def start(folder, *arguments):
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    return _launched.start(SCRIPT, *arguments, cwd=folder, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_the_command_trains_on_a_folder_and_generates_text(tmp_path):
    process = start(tmp_path, *FEW, "--data", texts(tmp_path), "--sample", "8", "--prompt", "It was")
    output, errors = finish(process)
    assert process.returncode == 0, errors
    assert errors == ""
    assert "tiny: 0.04 million parameters; zero3 on 2 processes, float32, activation checkpointing: none" in output
    assert "nats per byte" in output
    assert "The model writes:\n\nIt was" in output
    assert checkpoint.verify(tmp_path / "runs" / "train" / "checkpoints").step == 6


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_command_resumes_from_its_last_checkpoint(tmp_path, how):
    arguments = [*FEW, "--save-every", "20", "--out", tmp_path, "--steps"]
    process = start(tmp_path, *arguments, "100000")
    deadline = time.monotonic() + 150
    while not (tmp_path / "checkpoints" / "LATEST").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = descendants(process.pid)
    try:
        if how == signal.SIGINT:
            process.send_signal(how)
        else:
            kill([*ranks, process.pid])
        output, errors = finish(process, limit_s=60)
    finally:
        kill(ranks)
    saved = checkpoint.latest(tmp_path / "checkpoints")
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted" in output
        assert "Traceback" not in output + errors
        assert rows_of(tmp_path)[-1]["step"] == saved
    process = start(tmp_path, *arguments, str(saved + 1))
    output, errors = finish(process)
    assert process.returncode == 0, errors
    assert f"resumed after step {saved}, from" in output
    assert [row["step"] for row in rows_of(tmp_path)] == [*range(1, saved + 2), saved + 1]
