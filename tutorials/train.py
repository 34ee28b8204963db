"""Train your own sharded language model. Copy this script.

    python tutorials/train.py --data my_texts                           # the built-in GPT, on two processes
    python tutorials/train.py --data my_texts --model path/config.json  # any causal model of Transformers
    torchrun --nproc-per-node 8 tutorials/train.py --data my_texts ...  # with a launcher, on one or several nodes

`--help` lists the options. After an interruption, start the script again to resume from the last checkpoint, on any
number of processes. With more `--steps`, a finished run continues.

Sharding needs five lines, marked 1 to 5 in `prepare` and `one_step`. The rest is needed in any training script:

- `_blueprints.py`: models by name
- `_lora.py`: adapters
- `_text.py`: text and tokenizers
- `_course.py`: the learning rate schedule and the evaluation
- `_resume.py`: checkpoints
- `_figures.py`: metrics
- `_console.py`: the terminal and Ctrl-C
- `_ranks.py`: start of the processes
"""

import argparse
import json
import math
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _console import INTERRUPTED, Display, Interrupt

if __name__ == "__main__":
    interrupt = Interrupt()  # before importing torch, which takes seconds

import torch
import torch.distributed as dist
from torch import Tensor, nn

import composable_shard as cs
from _blueprints import NAMES, Blueprint, build, load_weights, logits_of, materialize, next_token_loss
from _checks import check, check_text, refuse
from _course import adamw, continued, held_out_loss, how_far, learning_rate, settle
from _figures import METRICS, Figures, Sink, json_lines, open_log, tensorboard, weights_and_biases
from _gpt import random_windows
from _lora import trained_parameters
from _ranks import launch, on_rank, start_ranks
from _resume import Checkpoints, Position, set_aside
from _text import SUFFIXES, Text, Tokenizer, read_text, texts_of, tokenizer_in
from composable_shard import checkpoint
from composable_shard.planner import KNOWN, checkpoint_modules, repeated_blocks

STRATEGIES = ("none", "ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "auto")
CHECKPOINTING = ("none", "selective", "full")
PRECISIONS = {  # dtype of parameters and optimizer state, and the mixed precision policy
    "float32": (torch.float32, cs.MixedPrecisionPolicy()),
    "bfloat16-mixed": (
        torch.float32,
        cs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ),
    "bfloat16": (torch.bfloat16, cs.MixedPrecisionPolicy()),
}


# ------------------------------------------------------------------ sharding, and a training step


@dataclass(frozen=True)
class Training:
    """The objects that a training step uses."""

    options: argparse.Namespace
    device: torch.device
    model: nn.Module
    run: nn.Module  # the model, compiled with --compile
    optimizer: torch.optim.Optimizer

    def computing(self) -> AbstractContextManager[Any]:
        """Return autocast for an unsharded model. Sharded models use the mixed precision policy instead."""
        mixed = self.options.strategy == "none" and self.options.precision == "bfloat16-mixed"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=mixed)

    def loss(self, windows: Tensor) -> Tensor:
        with self.computing():
            return next_token_loss(self.model, windows)


def prepare(options: argparse.Namespace, plan: Blueprint, device: torch.device) -> Training:
    """Build, shard and initialize the model, and create its optimizer."""
    dtype, policy = PRECISIONS[options.precision]
    torch.manual_seed(options.seed)  # the same on all ranks
    model = build(plan, dtype, options.lora)  # on the meta device
    blocks = repeated_blocks(model)
    checkpoint_modules(blocks, options.checkpointing)
    cs.shard_auto(model, strategy=options.strategy, replicas=options.replicas, mp_policy=policy)  # 1
    materialize(model, blocks, plan, device)  # 2: allocates and initializes only this rank's shards
    if options.weights is not None:
        load_weights(model, options.weights, options.lora > 0)
    optimizer = adamw(model)  # 3: after `shard_auto`, because it must hold the sharded parameters
    torch.manual_seed(options.seed + 1 + dist.get_rank())  # for dropout, different on each rank
    return Training(options, device, model, cs.compile(model) if options.compile else model, optimizer)


def one_step(training: Training, windows: Tensor) -> Tensor:
    """Run forward, backward and the optimizer step. Return the mean loss over the tokens of all ranks."""
    options, model = training.options, training.model
    microbatches = windows.tensor_split(options.accumulate)
    total = cs.total_tokens(windows[:, 1:].numel())
    step_loss = torch.zeros((), device=training.device)
    for index, microbatch in enumerate(microbatches):
        if options.strategy != "none":  # reduce gradients only after the last microbatch
            model.set_requires_gradient_sync(index == len(microbatches) - 1)
        with training.computing():
            loss = next_token_loss(training.run, microbatch)
        loss = cs.average_by_tokens(loss, microbatch[:, 1:].numel(), total=total)  # 4: equal weight for all tokens
        loss.backward()
        step_loss += loss.detach()
    cs.clip_grad_norm_(model.parameters(), options.clip)  # 5: clips by the global gradient norm
    training.optimizer.step()
    training.optimizer.zero_grad()
    return step_loss


# ------------------------------------------------------------------------------- the training loop


def train(
    training: Training, text: Text, position: Position, checkpoints: Checkpoints, sinks: list[Sink], stop: Any
) -> None:
    """Train until the steps or the time are used up, or `stop` returns True on any rank."""
    options, device = training.options, training.device
    rank, world = dist.get_rank(), dist.get_world_size()
    limits = {"most_steps": options.steps, "minutes": options.minutes}
    began = time.monotonic() - position.seconds
    position.progress, done = how_far(position.step, position.seconds, position.seconds, **limits)
    with open_log(training.model, sinks, position.step, every=1) as log:
        while not done:
            step_began = time.monotonic()
            rate = learning_rate(position.progress, options.learning_rate, options.warm_up)
            for group in training.optimizer.param_groups:
                group["lr"] = rate
            # Each rank draws the global batch and takes its part, so the data do not depend on the number of ranks.
            windows = random_windows(text.train, position.windows, options.sequence + 1, position.data)[rank::world]
            loss = one_step(training, windows.to(device))

            position.step += 1
            seconds = time.monotonic() - began
            ahead = seconds + (time.monotonic() - step_began)  # estimated time at the end of the next step
            progress, done = how_far(position.step, seconds, ahead, **limits)
            vote = stop() or (done and rank == 0)
            _, position.progress, done, position.seconds = settle(0.0, progress, vote, seconds)
            figures = {"lr": rate}
            if options.evaluate_every and position.step % options.evaluate_every == 0 and not done:
                figures["held_out/loss"] = evaluate(training, text)
            log.step(loss=loss, tokens=position.windows * options.sequence, **figures)
            checkpoints.after_step()


def evaluate(training: Training, text: Text) -> float:
    """Return the loss in nats per token on held-out windows, the same ones each time."""
    options = training.options
    training.model.eval()
    loss = held_out_loss(training.loss, text.held_out, options.evaluation, options.sequence + 1, training.device)
    training.model.train()
    return loss


def sample(training: Training, tokenizer: Tokenizer) -> str:
    """Generate text after `--prompt`."""
    options = training.options
    training.model.eval()

    def logits(tokens: Tensor) -> Tensor:
        with training.computing():
            return logits_of(training.model, tokens)

    prompt = tokenizer.prompt(options.prompt)
    return tokenizer.decode(continued(logits, prompt, options.sample, options.sequence, options.seed, training.device))


# ------------------------------------------------------------------------------- the run


def run(options: argparse.Namespace, plan: Blueprint, device: torch.device, interrupt: Interrupt) -> int:
    """Train on one rank. Return the exit status."""
    first, world = dist.get_rank() == 0, dist.get_world_size()
    display = Display(active=first)
    tokenizer = tokenizer_in(plan.folder)
    text = read_text(texts_of(options.data, options.suffixes), tokenizer)
    check_text(text, options.sequence)
    training = prepare(options, plan, device)
    model = training.model

    windows = options.batch * options.accumulate * world
    position = Position(torch.Generator().manual_seed(options.seed), windows, options.precision)
    directory = options.out / "checkpoints"
    aside = set_aside(directory, options.out / METRICS, options.fresh) if first and options.fresh else None
    saved = trained_parameters(model) if options.lora else model
    checkpoints = Checkpoints(directory, saved, training.optimizer, position, options.save_every)
    try:
        resumed = checkpoints.resume()
    except cs.errors.CheckpointMismatchError:
        refuse(f"--out {options.out}: has checkpoints of another model; use another folder, or --fresh")
    if resumed:
        display.say(f"resumed after step {position.step}, from {directory}; --fresh starts over")
    elif aside is not None:
        display.say(f"checkpoints of the previous run were moved to {aside}")
    if position.windows < world * options.accumulate:
        parts = f"{world} ranks with {options.accumulate} microbatches each"
        refuse(f"{position.windows} sequences per step are too few for {parts}")
    describe(training, position, text, tokenizer, display)

    sinks = make_sinks(options, position, display) if first else []
    around = nullcontext() if options.strategy == "none" else cs.explain_out_of_memory(model, training.optimizer)
    with interrupt.deferred(), around:
        train(training, text, position, checkpoints, sinks, stop=lambda: interrupt.asked)
        path = checkpoints.save()
    display.close()
    display.say(f"{position.step} steps in {position.seconds:.0f} s; {path}")
    if position.progress < 1.0:
        display.say("interrupted: the checkpoint is saved; start the script again to resume")
        return INTERRUPTED
    last = finish(training, plan, text, tokenizer, display)
    for write in sinks:
        write(last, position.step)
    dist.barrier()
    return 0


def export(model: nn.Module, plan: Blueprint, folder: Path) -> Path:
    """Export the model for Transformers, or only its adapters for PEFT if it has adapters of PEFT."""
    if hasattr(model, "peft_config"):
        settings = json.dumps(model.peft_config["default"].to_dict(), default=list)
        texts = {"adapter_config.json": settings}
        return checkpoint.export_safetensors(folder, model, adapter="default", extra_files=texts)
    return checkpoint.export_safetensors(folder, model, extra_files=plan.files)


def describe(training: Training, position: Position, text: Text, tokenizer: Tokenizer, display: Display) -> None:
    """Print the model, its sharding and the text."""
    options = training.options
    sizes = [(p.numel(), p.numel() * p.requires_grad) for p in training.model.parameters()]
    every, trained = (sum(column) / 1e6 for column in zip(*sizes, strict=True))
    adapters = f", {trained:.2f} million of them trained (adapters)" if options.lora else ""
    display.say(
        f"{options.model}: {every:.2f} million parameters{adapters}; {options.strategy} on {dist.get_world_size()} "
        f"processes, {options.precision}, activation checkpointing: {options.checkpointing}"
    )
    if options.strategy != "none":
        display.say(
            f"peak of unsharded parameters and communication buffers: "
            f"{cs.make_plan(training.model).peak_bytes / 2**20:,.1f} MiB per rank"
        )
    if options.lora and options.weights is None:
        display.say("the frozen weights are random; load weights with --weights FOLDER")
    display.say(
        f"text: {len(text.train):,} {tokenizer.unit}s for training, {len(text.held_out):,} held out; "
        f"{position.windows * options.sequence:,} per step"
    )


def make_sinks(options: argparse.Namespace, position: Position, display: Display) -> list[Sink]:
    """Return the sinks to which rank 0 writes the figures of each step."""

    def show(figures: Figures, step: int) -> None:
        if "held_out/loss" in figures:
            display.say(f"held-out loss {figures['held_out/loss']:.3f} after step {step}")
        if "train/loss" in figures:
            left = position.seconds * (1 - position.progress) / max(position.progress, 1e-9)
            mean = step * position.windows * options.sequence / position.seconds
            speed = figures.get("step/tokens_per_second", mean)  # not logged for the first step
            display.progress(position.progress, step=step, loss=figures["train/loss"], speed=speed, left=left)

    sinks = [json_lines(options.out / METRICS, position.step), show]
    if options.tensorboard is not None:
        sinks.append(tensorboard(options.tensorboard, position.step))
    if options.wandb is not None:
        sinks.append(weights_and_biases(options.wandb, options.out, vars(options)))
    return sinks


def finish(training: Training, plan: Blueprint, text: Text, tokenizer: Tokenizer, display: Display) -> Figures:
    """Evaluate, export the model, and generate text. Return the final figures."""
    options = training.options
    loss = evaluate(training, text)
    bits = loss / math.log(2) / text.bytes_per_token
    display.say(f"held-out loss {loss:.3f} nats per {tokenizer.unit}, {bits:.3f} bits per byte")
    if options.export is not None:
        display.say(f"exported for Hugging Face libraries: {export(training.model, plan, options.export)}")
    if options.sample > 0:
        display.say(f"\nThe model writes:\n\n{sample(training, tokenizer)}")
    return {"final/loss": loss, "final/bits_per_byte": bits}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train your own sharded language model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="3m", help=f"{', '.join(NAMES)}, or a Hugging Face config.json or its folder")
    add("--weights", type=Path, help="folder with initial safetensors; by default that of --model, if it has some")
    add("--lora", type=int, default=0, help="train only adapters of this rank")
    add("--data", type=Path, help="folder with text; by default Python's standard library")
    add("--suffixes", default=SUFFIXES, help="suffixes of the text files")
    add("--sequence", type=int, default=256, help="tokens per sequence")
    add("--strategy", choices=STRATEGIES, default="zero3", help="sharding strategy; auto: ask cs.planner.advise")
    add("--replicas", type=int, default=1, help="hsdp, hfsdp: ranks of the outer mesh axis")
    add("--machine", help=f"for auto: {', '.join(KNOWN)}, or a file of `composable-shard measure-links --json`")
    add("--precision", choices=PRECISIONS, default="float32")
    add("--checkpointing", choices=CHECKPOINTING, default="none", help="activation checkpointing")
    add("--compile", action="store_true", help="compile the model with cs.compile")
    add("--batch", type=int, default=4, help="sequences per rank and microbatch")
    add("--accumulate", type=int, default=1, help="microbatches per step")
    add("--steps", type=int, help="number of steps; by default 1000")
    add("--minutes", type=float, help="duration of the training, instead of --steps")
    add("--learning-rate", type=float, default=1e-3, help="peak learning rate; use less for large models and LoRA")
    add("--warm-up", type=float, default=0.05, help="part of the training in which the learning rate rises")
    add("--clip", type=float, default=1.0, help="maximum gradient norm")
    add("--seed", type=int, default=0)
    add("--evaluate-every", type=int, default=200, help="steps between evaluations; 0: only at the end")
    add("--evaluation", type=int, default=128, help="held-out sequences")
    add("--save-every", type=int, default=200, help="steps between checkpoints; 0: only at the end")
    add("--prompt", default="The ", help="prompt for the text that is generated at the end")
    add("--sample", type=int, default=200, help="tokens to generate at the end")
    add("--out", type=Path, default=Path("runs/train"), help="directory of metrics and checkpoints")
    add("--export", type=Path, help="folder for the trained model as safetensors; must not exist")
    add("--tensorboard", type=Path, help="folder of TensorBoard logs")
    add("--wandb", metavar="PROJECT", help="project of Weights & Biases")
    add("--fresh", action="store_true", help="start over, even if there are checkpoints")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--processes", type=int, default=torch.cuda.device_count() or 2, help="processes to start without a launcher")
    return parser.parse_args(arguments)


def main(interrupt: Interrupt) -> int:
    by_launcher = "LOCAL_RANK" in os.environ
    options = parse()
    options, plan = check(options, int(os.environ["WORLD_SIZE"]) if by_launcher else options.processes)
    if not by_launcher:
        settled = {name: getattr(options, name) for name in ("strategy", "replicas", "checkpointing")}
        return launch(__file__, options.processes, *(f"--{name}={value}" for name, value in settled.items()))
    return on_rank(lambda: run(options, plan, start_ranks(options.device), interrupt), interrupt)


if __name__ == "__main__":
    sys.exit(main(interrupt))
