"""Check the options of `train.py` before training. Errors are one line. Strategy "auto" is resolved here."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

import composable_shard as cs
from _blueprints import Blueprint, blueprint, traced
from _text import Text, files_below, tokenizer_in
from composable_shard.planner import KNOWN, Advice, Strategy

_AT_LEAST_ONE = ("sequence", "replicas", "batch", "accumulate", "evaluation", "processes", "steps", "minutes")
_AT_LEAST_ZERO = ("lora", "evaluate_every", "save_every", "sample")


def refuse(problem: str) -> NoReturn:
    """Exit. Only rank 0 prints the problem."""
    if os.environ.get("RANK", "0") != "0":
        raise SystemExit(1)
    raise SystemExit(f"{Path(sys.argv[0]).name}: {problem}")


def check(options: argparse.Namespace, world: int) -> tuple[argparse.Namespace, Blueprint]:
    """Check the options. Return them with derived values, and the blueprint of the model. Exit if they are wrong."""
    try:
        _check_numbers(options)
        _check_packages(options)
        plan = blueprint(options.model, options.sequence)
        settled = vars(options) | {"weights": _weights(options, plan)}
        if options.steps is None and options.minutes is None:
            settled["steps"] = 1000
        if options.data is not None:
            files_below(options.data, options.suffixes)
        _check_model(options, plan)
        if options.strategy == "auto":
            settled |= _advised(options, plan, world)
        _check_strategy(argparse.Namespace(**settled), world)
    except SystemExit as problem:
        refuse(str(problem))
    return argparse.Namespace(**settled), plan


def check_text(text: Text, sequence: int) -> None:
    """Check that each part of the text is longer than a sequence. Exit if not."""
    for part, tokens in (("training", text.train), ("held-out", text.held_out)):
        if len(tokens) <= sequence:
            refuse(
                f"--data: {len(tokens)} {part} tokens are too few for sequences of {sequence}; use more text, or a "
                "smaller --sequence"
            )


def _check_numbers(options: argparse.Namespace) -> None:
    for least, names in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_ZERO)):
        for name in names:
            value = getattr(options, name)
            if value is not None and (value <= 0 if least else value < 0):
                raise SystemExit(f"--{name.replace('_', '-')} {value}: must be {'above' if least else 'at least'} 0")
    if options.steps is not None and options.minutes is not None:
        raise SystemExit("--steps and --minutes: use only one of them")
    if options.export is not None and options.export.exists():
        raise SystemExit(f"--export {options.export}: already exists")
    if not options.prompt:
        raise SystemExit("--prompt: must not be empty")


def _check_packages(options: argparse.Namespace) -> None:
    for name in ("tensorboard", "wandb"):
        if getattr(options, name) is not None and importlib.util.find_spec(name) is None:
            raise SystemExit(f"--{name}: requires the package {name} (pip install {name})")


def _check_model(options: argparse.Namespace, plan: Blueprint) -> None:
    if plan.context is not None and options.sequence > plan.context:
        raise SystemExit(f"--sequence {options.sequence}: --model {options.model} takes at most {plan.context} tokens")
    tokenizer = tokenizer_in(plan.folder)
    if tokenizer.vocabulary > plan.vocabulary:
        raise SystemExit(
            f"--model {options.model}: a vocabulary of {plan.vocabulary} is too small for text of "
            f"{tokenizer.vocabulary} different {tokenizer.unit}s"
        )


def _weights(options: argparse.Namespace, plan: Blueprint) -> Path | None:
    """Return the folder of the initial weights: `--weights`, or the model's folder if it contains weights."""
    folder: Path | None = plan.folder if options.weights is None else options.weights
    has_some = folder is not None and any(folder.glob("*.safetensors"))
    if options.weights is not None and not has_some:
        raise SystemExit(f"--weights {options.weights}: not a folder with safetensors")
    return folder if has_some else None


def _check_strategy(options: argparse.Namespace, world: int) -> None:
    if options.strategy == "none" and world > 1:
        raise SystemExit(f"--strategy none: works only on one process, not on {world}; use ddp for unsharded replicas")
    if world % options.replicas:
        raise SystemExit(f"--replicas {options.replicas}: must divide the number of processes, {world}")


def _advised(options: argparse.Namespace, plan: Blueprint, world: int) -> dict[str, object]:
    """Return the options that `cs.planner.advise` recommends, and print the reason."""
    advice = cs.planner.advise(
        traced(plan, options.sequence, options.lora),
        devices=world,
        machine=options.machine or _known_machine(),
        batch=options.batch,
        sequence=options.sequence,
        precision=options.precision,
    )
    chosen = on_devices(advice)
    if chosen is None:
        raise SystemExit(f"--strategy auto: {advice.reason}")
    if os.environ.get("RANK", "0") == "0":
        print(f"strategy {chosen}: {advice.reason}", flush=True)
    settled: dict[str, object] = {"strategy": chosen.name, "replicas": chosen.layout.replicas}
    return settled | ({"checkpointing": chosen.checkpointing} if options.checkpointing == "none" else {})


def on_devices(advice: Advice) -> Strategy | None:
    """Return the recommended strategy without offload, or else the best one that fits; None if none fits."""
    fitting = [each for each in advice.estimates if each.fits and not each.strategy.offload]
    if not fitting:
        return None
    return advice.recommended.strategy if advice.recommended in fitting else fitting[0].strategy


def _known_machine() -> str:
    """Return the planner's name for the accelerator of this process. Exit if it has none."""
    device = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else "a CPU"
    for name in KNOWN:
        if name.partition("-")[0] in device.replace(" ", ""):
            return name
    raise SystemExit(
        f"--strategy auto: unknown device {device}; measure it with `python -m composable_shard measure-links "
        "--json machine.json`, and pass --machine machine.json"
    )
