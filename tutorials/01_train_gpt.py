"""Train a small GPT with sharded parameters, on two processes of this machine.

    make demo                                                 # about one minute
    make demo DEMO=--long                                     # about five minutes, a lower loss
    python tutorials/01_train_gpt.py --strategy zero2         # another strategy
    python tutorials/01_train_gpt.py --size 10m --minutes 30  # a larger model, a longer run

The script saves a checkpoint every hundred steps. After an interruption, even `kill -9`, it resumes from the last
checkpoint, on any number of processes. `--fresh` starts over.

The script starts itself under `torchrun`. For several machines, run `torchrun ... tutorials/01_train_gpt.py` yourself.
Two functions matter for sharding: `shard` applies a strategy, and `one_step` shows that the training step does not
change. The rest is needed in any training script:

- `_gpt.py`: the model and the text
- `_course.py`: the learning rate schedule and the evaluation
- `_resume.py`: checkpoints
- `_logbook.py`: metrics
- `_console.py`: the progress bar and Ctrl-C
- `_ranks.py`: start of the processes

To train your own model, copy `train.py` instead.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from _console import INTERRUPTED, Interrupt

if __name__ == "__main__":
    interrupt = Interrupt()  # before importing torch, which takes seconds

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from _course import adamw, continued, held_out_loss, how_far, learning_rate, settle
from _gpt import (
    GPT,
    SIZES,
    Block,
    Corpus,
    bigram_entropy,
    build_gpt,
    load_corpus,
    next_byte_loss,
    random_windows,
)
from _logbook import METRICS, Logbook, Moment, OneStep, draw
from _ranks import launch, on_rank, start_ranks
from _resume import Checkpoints, Position, set_aside

OURS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")
STRATEGIES = ("none", *OURS, "fsdp2")
PEAK_RATE = {"adamw": 2.5e-3, "sgd": 0.2}  # at width 192
LONG = {"minutes": 4.5, "evaluation": 512, "sample": 400}  # options that --long sets


@dataclass(frozen=True)
class Options:
    """The settings of a run."""

    strategy: str = "zero3"
    size: str = "3m"
    optimizer: str = "adamw"
    minutes: float = 0.75
    steps: int | None = None  # a fixed number of steps instead of a time
    batch: int = 2  # windows per rank and microbatch
    accumulate: int = 1  # microbatches per step
    replicas: int = 1  # for hsdp and hfsdp: ranks of the outer mesh axis
    evaluation: int = 96  # held-out windows at the end; a quarter of them during training
    sample: int = 200  # bytes to generate at the end
    precision: str = "auto"  # dtype of matrix products: auto, float32 or bfloat16
    seed: int = 0
    device: str = "auto"
    processes: int = 2
    out: Path = Path("runs/demo")
    checkpoints: Path | None = None  # None: out/checkpoints
    save_every: int = 100  # steps; 0: only at the end
    fresh: bool = False  # start over, even if there are checkpoints


# ------------------------------------------------------------------ sharding, and a training step


def shard(model: GPT, options: Options, device: torch.device) -> None:
    """Shard each block, and the root with the remaining parameters, by the chosen strategy."""
    if options.strategy in OURS:
        import composable_shard as cs

        cs.shard_by_class(model, {Block}, strategy=options.strategy, replicas=options.replicas)
    elif options.strategy == "fsdp2":  # torch's implementation, for comparison
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


def average_gradients(model: GPT) -> None:
    """Average the gradients of all ranks, which strategy "none" must do manually."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def one_step(
    model: GPT, optimizer: torch.optim.Optimizer, microbatches: list[Tensor], count: int, options: Options
) -> tuple[Tensor, Tensor]:
    """Run forward, backward and the optimizer step. Return this rank's loss and the global gradient norm.

    All `count` windows of all ranks have the same weight, even if ranks have different numbers of them.
    """
    total = torch.zeros((), device=microbatches[0].device)
    for i, windows in enumerate(microbatches):
        if options.strategy != "none":  # reduce gradients only after the last microbatch
            model.set_requires_gradient_sync(i == len(microbatches) - 1)
        with autocast(options, windows.device):
            loss = next_byte_loss(model, windows) * (len(windows) * dist.get_world_size() / count)
        loss.backward()
        total += loss.detach()
    if options.strategy == "none":
        average_gradients(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm.full_tensor() if isinstance(norm, DTensor) else norm


def make_optimizer(model: GPT, options: Options) -> torch.optim.Optimizer:
    """Create the optimizer. Call this after `shard`, because the optimizer must hold the sharded parameters."""
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, foreach=True)
    return adamw(model)


# ------------------------------------------------------------------------------- the training loop


def train(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    options: Options,
    device: torch.device,
    position: Position | None = None,
    *,
    report: Callable[[Moment], None] = lambda moment: None,
    stop: Callable[[], bool] = lambda: False,
    after_step: Callable[[], None] = lambda: None,
) -> list[Moment]:
    """Train until the time or the steps are used up, or `stop` returns True on any rank.

    Args:
        position: where to start; None: at the first step.
        report: called with the figures of each step.
        stop: called after each step; True requests that all ranks stop.
        after_step: called after each step, to save checkpoints.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    position = begin(options) if position is None else position
    if world * options.accumulate > position.windows:
        parts = f"{world} ranks with {options.accumulate} microbatches each"
        raise SystemExit(f"{position.windows} windows per step are too few for {parts}")
    peak = PEAK_RATE[options.optimizer] * min(1.0, 192 / model.config.width)  # wider models need a lower rate
    history: list[Moment] = []
    began, done = time.monotonic() - position.seconds, position.progress >= 1.0
    while not done:
        step_began = time.monotonic()
        rate = learning_rate(position.progress, peak)
        for group in optimizer.param_groups:
            group["lr"] = rate
        # Each rank draws the global batch and takes its part, so the data do not depend on the number of ranks.
        length = model.config.context + 1
        windows = random_windows(corpus.train, position.windows, length, position.data)[rank::world]
        microbatches = list(windows.to(device).tensor_split(options.accumulate))
        loss, norm = one_step(model, optimizer, microbatches, position.windows, options)

        position.step += 1
        seconds = time.monotonic() - began
        ahead = seconds + (time.monotonic() - step_began)  # estimated time at the end of the next step
        progress, done = how_far(position.step, seconds, ahead, most_steps=options.steps, minutes=options.minutes)
        vote = stop() or (done and rank == 0)
        loss, position.progress, done, position.seconds = settle(loss, progress, vote, seconds, device)
        held_out = None
        if position.progress >= position.next_evaluation and not done:
            held_out = evaluate(model, corpus, options, device, options.evaluation // 4)
            position.next_evaluation += 0.2
        moment = Moment(position.step, position.progress, loss, rate, float(norm), position.seconds, held_out)
        history.append(moment)
        report(moment)
        after_step()
    return history


def begin(options: Options) -> Position:
    """Return the position before the first step."""
    windows = options.batch * options.accumulate * dist.get_world_size()
    return Position(torch.Generator().manual_seed(options.seed), windows, options.precision)


def evaluate(model: GPT, corpus: Corpus, options: Options, device: torch.device, count: int) -> float:
    """Return the loss in nats per byte on `count` held-out windows, rounded to full batches."""

    def loss_of(windows: Tensor) -> Tensor:
        with autocast(options, device):
            return next_byte_loss(model, windows)

    return held_out_loss(loss_of, corpus.held_out, count, model.config.context + 1, device)


def sample(model: GPT, options: Options, device: torch.device, prompt: str = "def ") -> str:
    """Generate text after `prompt`. All ranks must call this, because parameters are sharded."""

    def logits_of(tokens: Tensor) -> Tensor:
        with autocast(options, device):
            return model(tokens)

    first = list(prompt.encode())
    written = continued(logits_of, first, options.sample, model.config.context, options.seed, device)
    return bytes(written).decode(errors="replace")


# ------------------------------------------------------------------------------------- precision


def autocast(options: Options, device: torch.device):
    if options.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def choose_precision(options: Options, device: torch.device) -> Options:
    """Replace precision "auto" by the dtype with the faster matrix product on rank 0."""
    if options.precision != "auto":
        return options
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(2048, 192, dtype=dtype), torch.ones(192, 768, dtype=dtype)
        a, b = a.to(device), b.to(device)
        times = []
        for _ in range(6):
            began = time.perf_counter()
            (a @ b).sum().item()
            times.append(time.perf_counter() - began)
        seconds[dtype] = min(times)
    choice = ["bfloat16" if seconds[torch.bfloat16] < seconds[torch.float32] else "float32"]
    dist.broadcast_object_list(choice)
    return replace(options, precision=choice[0])


# ------------------------------------------------------------------------------- the run


def describe(model: GPT, options: Options, log: Logbook) -> None:
    """Print the model and the plan before training starts."""
    config = model.config
    count = sum(p.numel() for p in model.parameters())
    log.say(
        f"GPT with {count / 1e6:.2f} million parameters: {config.depth} blocks, "
        f"width {config.width}, context {config.context} bytes; {options.precision} matrix products; "
        f"strategy {options.strategy} on {dist.get_world_size()} processes"
    )
    if options.strategy in OURS:
        import composable_shard as cs

        log.say(f"\n{cs.make_plan(model)}\n")


def last_step(model: GPT, options: Options):
    """Return the plan and the record of the last step, or None for strategies without them."""
    if options.strategy not in OURS:
        return None
    import composable_shard as cs

    return cs.make_plan(model), cs.last_record(model)


def run(options: Options, interrupt: Interrupt) -> int:
    """Run the demo on one rank. Return the exit status."""
    device = start_ranks(options.device)
    precision, options = options.precision, choose_precision(options, device)
    model = build_gpt(options.size, options.seed, device)
    shard(model, options, device)
    optimizer = make_optimizer(model, options)
    position = begin(options)
    directory = options.checkpoints or options.out / "checkpoints"
    aside = set_aside(directory, options.out / METRICS, options.fresh) if dist.get_rank() == 0 else None
    checkpoints = Checkpoints(directory, model, optimizer, position, options.save_every)
    resumed = checkpoints.resume()
    if precision == "auto":  # a resumed run keeps the dtype that it started with
        options = replace(options, precision=position.precision)
    log = Logbook(options.out, position.windows * model.config.context, device, after=position.step)
    if aside is not None:
        log.say(f"checkpoints of the previous run were moved to {aside}")
    describe(model, options, log)
    if resumed:
        log.say(f"resumed after step {position.step}, from {directory}")

    corpus = load_corpus()
    bigram = bigram_entropy(corpus.train, corpus.held_out)
    log.say(
        f"text: {len(corpus.train) / 1e6:.1f} MB of Python's standard library for training, "
        f"{len(corpus.held_out) / 1e6:.1f} MB held out; bigram entropy {bigram:.3f} nats per byte"
    )
    watched = OneStep(model, active=options.strategy in OURS)

    def report(moment: Moment) -> None:
        log.note(moment)
        watched.note(moment)

    with interrupt.deferred():
        history = train(
            model,
            optimizer,
            corpus,
            options,
            device,
            position,
            report=report,
            stop=lambda: interrupt.asked,
            after_step=checkpoints.after_step,
        )
        planned_and_done = last_step(model, options) if history else None
        path = checkpoints.save()
    log.display.close()
    tokens = position.step * position.windows * model.config.context
    log.say(f"{position.step} steps, {tokens:,} tokens in {position.seconds:.0f} s; {path}")
    if position.progress < 1.0:
        log.say("interrupted: metrics and checkpoint are saved; start the script again to resume")
        return INTERRUPTED
    held_out = evaluate(model, corpus, options, device, options.evaluation)
    log.note_final(held_out)
    side = "below" if held_out < bigram else "above"
    log.say(
        f"held-out loss {held_out:.3f} nats per byte, {abs(bigram - held_out):.3f} {side} the "
        f"bigram entropy of {bigram:.3f}"
    )
    if dist.get_rank() == 0:
        draw(log, bigram, planned_and_done, watched, options.out)
    if options.sample > 0:
        log.say(f"\nThe model writes:\n\n{sample(model, options, device)}")
    dist.barrier()
    return 0


def parse(arguments: list[str] | None = None) -> Options:
    defaults = Options()
    parser = argparse.ArgumentParser(
        description="Train a sharded byte-level GPT on Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, default=defaults.strategy, help="sharding strategy")
    add("--replicas", type=int, default=defaults.replicas, help="hsdp, hfsdp: ranks of the outer mesh axis")
    add("--size", choices=SIZES, default=defaults.size, help="model size")
    add("--optimizer", choices=PEAK_RATE, default=defaults.optimizer)
    add("--minutes", type=float, default=defaults.minutes, help="duration of the training")
    add("--steps", type=int, help="number of steps, instead of --minutes")
    add("--batch", type=int, default=defaults.batch, help="windows per rank and microbatch")
    add("--accumulate", type=int, default=defaults.accumulate, help="microbatches per step")
    add("--evaluation", type=int, default=defaults.evaluation, help="held-out windows at the end")
    add("--sample", type=int, default=defaults.sample, help="bytes to generate at the end")
    add("--precision", choices=("auto", "float32", "bfloat16"), default=defaults.precision)
    add("--seed", type=int, default=defaults.seed)
    add("--device", choices=("auto", "cpu", "cuda"), default=defaults.device)
    add("--processes", type=int, default=defaults.processes, help="processes to start")
    add("--out", type=Path, default=defaults.out, help="directory of metrics and checkpoints")
    add("--checkpoints", type=Path, help="directory of checkpoints; by default OUT/checkpoints")
    add("--save-every", type=int, default=defaults.save_every, help="steps between checkpoints; 0: only at the end")
    add("--fresh", action="store_true", help="start over, even if there are checkpoints")
    longer = ", ".join(f"--{name} {value}" for name, value in LONG.items())
    add("--long", action="store_true", help=f"same as {longer}")
    if parser.parse_args(arguments).long:
        parser.set_defaults(**LONG)
    options = vars(parser.parse_args(arguments))
    del options["long"]
    return Options(**options)


def main(interrupt: Interrupt) -> int:
    options = parse()
    if "LOCAL_RANK" not in os.environ:
        return launch(__file__, options.processes)
    return on_rank(lambda: run(options, interrupt), interrupt)


if __name__ == "__main__":
    sys.exit(main(interrupt))
