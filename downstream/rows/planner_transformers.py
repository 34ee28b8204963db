"""Rows for `advise`, `estimate` and `trace` with models and trainers of Transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from _launchers import TORCHRUN, launched_by
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import composable_shard as cs
from _rows import OURS, Rows, Run
from composable_shard.planner import KNOWN
from composable_shard.planner.precision import PRECISIONS
from composable_shard.planner.rehearsal import rehearse_source
from composable_shard.planner.sources import source_of
from composable_shard.planner.strategies import strategy_named

rows = Rows(
    "advise, estimate and trace, with Transformers",
    environment="transformers5",
    versions=("transformers", "accelerate", "peft"),
)

SCRIPTS = Path(__file__).parent
STEPS = "3"
LIMIT_S = 240.0
SETTINGS = {"world": 1, "sharded": False, "timeout": LIMIT_S + 60}  # the started processes shard
CLOSE = 0.05


def llama() -> nn.Module:
    """Return a Llama model with grouped heads, like all larger Llama models."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128}
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "vocab_size": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def adapted() -> nn.Module:
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))


def check_close(what: str, estimated: int, counted: int) -> None:
    if abs(estimated - counted) > CLOSE * counted:
        raise AssertionError(f"{what}: estimated {estimated:,} bytes, counted {counted:,}")


def compare(run: Run, make: Callable[[], nn.Module], checkpointings: tuple[Any, ...]) -> None:
    """Compare the estimates of `advise` with the memory counted in steps that run with fake tensors."""
    machine = replace(KNOWN["h100"], backend="fake")  # its collectives need no memory, like in counted steps
    advice = cs.planner.advise(make, devices=8, machine=machine, batch=4, sequence=128, precision="float32")
    estimated = {each.strategy: each.memory.peak for each in advice.estimates}
    for checkpointing in checkpointings:
        strategy = strategy_named("zero3", 8, checkpointing)
        counted = rehearse_source(source_of(make, 128), strategy, PRECISIONS["float32"], 4).peak
        check_close(str(strategy), estimated[strategy].total, counted.total)
        run.note(f"parameters, {strategy}", [estimated[strategy].parameters, counted.parameters])


@rows("advise of a Llama with grouped heads, with and without checkpoints: within 5 % of steps that run", **SETTINGS)
def advised(run: Run) -> None:
    compare(run, llama, ("none", "full"))


@rows("advise of a Llama with adapters of PEFT: within 5 % of steps that run", **SETTINGS)
def advised_with_adapters(run: Run) -> None:
    compare(run, adapted, ("full",))


def estimate_and_count(run: Run, script: str) -> None:
    """Compare the estimate of a script on two devices with the bytes of its tensors on two ranks with gloo."""
    command = [sys.executable, "-m", "composable_shard", "estimate", "--json", "--devices", "2"]
    command += ["--install"] if run.side == OURS else []
    with launched_by(run, LIMIT_S) as launched:
        launched.finish(launched.start([*command, str(SCRIPTS / script), STEPS]))
        counted = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(SCRIPTS / "_counted.py")]
        launched.finish(launched.start([*counted, run.side, "counted", str(SCRIPTS / script), STEPS]))
    lines = launched.output.read_text().splitlines()
    seen = next(json.loads(line) for line in lines if line.startswith('{"ranks"'))
    check_close(script, seen["total"], int(Path("counted").read_text()))
    if (seen["peak"]["unsharded"] > 0) != (run.side == OURS):
        raise AssertionError(f"the model was not sharded by {run.side!r}: {seen}")
    run.note("seen", [seen["steps"], seen["peak"]["parameters"], seen["peak"]["optimizer"], seen["guessed"]])


@rows("estimate of a script with Trainer and FSDP2: within 5 % of two ranks", **SETTINGS)
def trainer(run: Run) -> None:
    estimate_and_count(run, "_script_trainer.py")


@rows("estimate of a loop with recomputed activations and workers of a DataLoader: within 5 % of two ranks", **SETTINGS)
def loop(run: Run) -> None:
    estimate_and_count(run, "_script_loop.py")


@rows("trace of a script with Trainer: files of a step (with FSDP2 the script only runs)", **SETTINGS)
def traced(run: Run) -> None:
    script = [str(SCRIPTS / "_script_trainer.py"), "6"]
    trace = ["-m", "composable_shard", "trace", "--install", "--step", "4", "--out", "trace"]
    with launched_by(run, LIMIT_S) as launched:
        launcher = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]
        launched.finish(launched.start([*launcher, *(trace if run.side == OURS else []), *script]))
    if run.side != OURS:
        return
    files = sorted(path.name for path in Path("trace").rglob("*"))
    missing = {"explanation.txt", "plan.json", "record.json", "step.json"} - {*files}
    if missing:
        raise AssertionError(f"files {missing} are missing; found {files}")
    events = json.loads(Path("trace/step.json").read_text())["traceEvents"]
    if not any("model.layers.1" in str(event.get("name")) for event in events):
        raise AssertionError("the trace has no event for the group of block 1")
