"""Train low-rank adapters (LoRA) over a frozen base, sharded as the planner recommends.

    python tutorials/06_lora.py              # two or three minutes, on two processes
    python tutorials/06_lora.py --memory 20  # plan for ranks with 20 MiB

1. The planner estimates the memory of a large model, once with all parameters trained and once with only adapters. No
   device is needed and nothing is trained.
2. The planner chooses a strategy for a small GPT with adapters on ranks with little memory.
3. The script trains the base on source code, freezes it, and trains adapters on the Python documentation.

Checkpoints contain only the adapters and their optimizer state. The script draws two pictures to runs/06/:
strategies.png (memory of each strategy for the large model) and lora.png (losses and memory of the small model).

Adapters change three lines, marked 1 to 3 below. `_lora.py` creates them. Models of Transformers use adapters of PEFT
instead (see `train.py --lora`). For a base in 4 or 8 bits see docs/lora.md.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pydoc_data import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn

import composable_shard as cs
from _blueprints import Blueprint, blueprint, build, load_weights, materialize, next_token_loss, traced
from _checks import on_devices
from _course import adamw, held_out_loss, learning_rate, settle
from _gpt import SIZES, python_sources, random_windows
from _lora import trained_parameters
from _pictures import BLUE, GREY, PALE, RED, SAND, picture
from _ranks import launch, start_ranks
from _text import BYTES, Text, read_text
from composable_shard import checkpoint
from composable_shard.planner import Advice, Machine, checkpoint_modules, repeated_blocks

MIB = 1 << 20
EVERY_PARAMETER, ADAPTERS = "all parameters", "adapters"
SEED = 0


# ------------------------------------------------------------------------------------- the advice


def ask_large(options: argparse.Namespace) -> dict[str, Advice]:
    """Ask for advice on a large model, with all parameters trained and with only adapters. Needs no devices."""
    given = {"devices": options.devices, "machine": options.machine, "sequence": 2048}
    return {
        EVERY_PARAMETER: cs.planner.advise(options.shape, **given),
        ADAPTERS: cs.planner.advise(options.shape, adapters=options.rank, **given),
    }


def ask_small(options: argparse.Namespace, machine: Machine) -> dict[str, Advice]:
    """Ask for advice on the small model, on ranks with `options.memory` MiB."""
    plan = blueprint(options.size, options.sequence)
    given = {"devices": options.processes, "machine": replace(machine, memory=int(options.memory * MIB))}
    given |= {"batch": options.batch, "sequence": options.sequence, "precision": "float32"}
    return {
        EVERY_PARAMETER: cs.planner.advise(traced(plan, options.sequence), **given),
        ADAPTERS: cs.planner.advise(traced(plan, options.sequence, options.rank), **given),
    }


def shown(advice: Advice) -> str:
    """Format an advice in one line: the strategy and its memory, or the least memory that is needed."""
    chosen = on_devices(advice)
    needed = {each.strategy: each.needed / MIB for each in advice.estimates if not each.strategy.offload}
    if chosen is None:
        return f"no strategy fits; the smallest needs {min(needed.values()):.1f} MiB"
    return f"{chosen}, in {needed[chosen]:.1f} MiB"


# ------------------------------------------------------------------------------------ the training


def prepare(
    options: argparse.Namespace, plan: Blueprint, device: torch.device, base: Path | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the sharded model and its optimizer. If `base` is a folder, load its weights and add adapters."""
    torch.manual_seed(SEED)
    model = build(plan, torch.float32, adapters=0 if base is None else options.rank)  # 1: add adapters, freeze the rest
    blocks = repeated_blocks(model)
    checkpoint_modules(blocks, "none" if base is None else options.checkpointing)
    cs.shard_auto(model, strategy="zero3" if base is None else options.strategy, replicas=options.replicas)
    materialize(model, blocks, plan, device)  # allocates and initializes only this rank's shards
    if base is not None:
        load_weights(model, base, has_adapters=True)  # 2: load frozen weights; adapters start as an identity
    return model, adamw(model)  # 3: optimize only trainable parameters


def train(
    options: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, steps: int, peak: float
) -> Iterator[float]:
    """Train, and yield the mean loss of all ranks after each step."""
    device = next(model.parameters()).device
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.Generator().manual_seed(SEED)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step / steps, peak)
        windows = random_windows(text.train, options.batch * world, options.sequence + 1, data)[rank::world]
        loss = next_token_loss(model, windows.to(device))
        loss.backward()
        cs.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield settle(loss.detach(), 0.0, False, 0.0, device)[0]


def evaluate(options: argparse.Namespace, model: nn.Module, text: Text) -> float:
    """Return the loss in nats per byte on held-out text."""

    def loss_of(windows: Tensor) -> Tensor:
        return next_token_loss(model, windows)

    return held_out_loss(loss_of, text.held_out, options.evaluation, options.sequence + 1, torch.device(options.device))


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes that this rank holds between two steps, by type."""

    def size(tensors) -> int:
        local = (each.to_local() if hasattr(each, "to_local") else each for each in tensors)
        return sum(each.numel() * each.element_size() for each in local)

    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return {
        "frozen": size(p for p in model.parameters() if not p.requires_grad),
        "trained": size(p for p in model.parameters() if p.requires_grad),
        "optimizer": size(state),
    }


def run(options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Train the base and the adapters on one rank. Return the held-out losses before and after adapter training."""
    options.device = device.type
    first, plan = dist.get_rank() == 0, blueprint(options.size, options.sequence)
    code = read_text((each for each in python_sources() if not each[0].startswith("pydoc_data")), BYTES)
    about = read_text(sorted((name, text.encode()) for name, text in topics.topics.items()), BYTES)
    curves: dict[str, list[float]] = {"base": [], ADAPTERS: []}

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    def follow(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, steps: int) -> None:
        for loss in train(options, model, optimizer, text, steps, peak=2.5e-3):
            curves[name].append(loss)
            number = len(curves[name])
            if number == 1 or number % max(1, steps // 4) == 0:
                say(f"  {name}, step {number:4}: loss {loss:.3f}")

    say("training the base on source code")
    model, optimizer = prepare(options, plan, device, base=None)
    follow("base", model, optimizer, code, options.base_steps)
    held = {EVERY_PARAMETER: held_bytes(model, optimizer)}
    folder = checkpoint.export_safetensors(options.out / "base", model)
    del model, optimizer

    say(f"training adapters of rank {options.rank} on the Python documentation with {options.strategy}")
    model, optimizer = prepare(options, plan, device, base=folder)
    losses = {"before": evaluate(options, model, about)}
    follow(ADAPTERS, model, optimizer, about, options.steps)
    losses["after"] = evaluate(options, model, about)
    held[ADAPTERS] = held_bytes(model, optimizer)
    state = {"adapters": trained_parameters(model), "optimizer": optimizer}
    saved = checkpoint.save(options.out / "checkpoints", state, step=options.steps)
    say(
        f"held-out loss on the documentation: {losses['before']:.3f} before, {losses['after']:.3f} after, nats per byte"
    )
    for what, sizes in held.items():
        parts = ", ".join(f"{name} {nbytes / MIB:.2f} MiB" for name, nbytes in sizes.items())
        say(f"memory per rank between steps, training {what}: {parts}")
    nbytes = sum(file.stat().st_size for file in saved.iterdir())
    say(f"checkpoint {saved}, only adapters and their optimizer state: {nbytes / MIB:.2f} MiB")
    if first:
        draw(curves, losses, held, options.out / "lora.png")
        print(f"losses and memory: {options.out / 'lora.png'}", flush=True)
    dist.barrier()
    return losses


def draw(curves: dict[str, list[float]], losses: dict[str, float], held: dict[str, dict[str, int]], path: Path) -> None:
    """Plot the losses of both trainings, and the memory per rank between steps."""
    with picture(path, 10, 3.6, columns=2, width_ratios=(3, 2)) as (left, right):
        begin = len(curves["base"])
        left.plot(range(1, begin + 1), curves["base"], color=GREY, label="base, on source code")
        steps = range(begin + 1, begin + len(curves[ADAPTERS]) + 1)
        left.plot(steps, curves[ADAPTERS], color=BLUE, label="adapters, on documentation")
        left.plot([begin, steps[-1]], [*losses.values()], "o--", color=RED, label="held-out documentation")
        left.set_xlabel("step")
        left.set_ylabel("loss, nats per byte")
        left.legend(frameon=False, fontsize=8)
        begins = [0.0] * len(held)
        for kind, color in zip(("frozen", "trained", "optimizer"), (PALE, BLUE, SAND), strict=True):
            sizes = [each[kind] / MIB for each in held.values()]
            right.bar([*held], sizes, bottom=begins, color=color, label=kind, width=0.6)
            begins = [one + two for one, two in zip(begins, sizes, strict=True)]
        right.set_ylabel("memory per rank between steps, MiB")
        right.legend(frameon=False, fontsize=8)


# ------------------------------------------------------------------------------------- the command


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train low-rank adapters over a frozen base, sharded as the planner recommends.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="3m", help="size of the small model")
    add("--rank", type=int, default=8, help="rank of the adapters")
    add("--memory", type=float, default=38, help="memory per rank for the planner, MiB")
    add("--shape", default="llama3-8b", help="large model for the planner")
    add("--devices", type=int, default=8, help="number of devices for the large model")
    add("--machine", default="l40s", help="type of the devices, or a file written by measure-links")
    add("--strategy", help="strategy for the adapters; by default the recommended one")
    add("--replicas", type=int, default=1, help="replicas, with --strategy hsdp or hfsdp")
    add("--checkpointing", default="none", help="with --strategy: none, selective or full")
    add("--batch", type=int, default=2, help="sequences per rank")
    add("--sequence", type=int, default=128, help="bytes per sequence")
    add("--base-steps", type=int, default=400, help="training steps of the base")
    add("--steps", type=int, default=200, help="training steps of the adapters")
    add("--evaluation", type=int, default=128, help="held-out sequences")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--processes", type=int, default=2, help="processes to start")
    add("--out", type=Path, default=Path("runs/06"), help="directory of pictures and checkpoints; emptied first")
    return parser.parse_args(arguments)


def settled(options: argparse.Namespace) -> list[str]:
    """Ask the planner, draw its estimates, and return the recommended command line arguments."""
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    large = ask_large(options)
    advices = ask_small(options, large[ADAPTERS].machine)
    print(f"{options.shape} on {options.devices} x {options.machine}")
    for what, advice in large.items():
        print(f"  {what}: {advice.reason}")
    cs.planner.draw(large[ADAPTERS], options.out / "strategies.png")
    print(f"  memory of each strategy with adapters: {options.out / 'strategies.png'}")
    print(f"{options.size} on {options.processes} ranks with {options.memory:g} MiB")
    for what, advice in advices.items():
        print(f"  {what}: {shown(advice)}")
    print(flush=True)
    if options.strategy is not None:
        return []
    chosen = on_devices(advices[ADAPTERS])
    if chosen is None:
        raise SystemExit(f"--memory {options.memory:g}: {shown(advices[ADAPTERS])}")
    layout = f"--replicas={chosen.layout.replicas}"
    return [f"--strategy={chosen.name}", layout, f"--checkpointing={chosen.checkpointing}"]


def main() -> int:
    options = parse()
    if "LOCAL_RANK" not in os.environ:
        return launch(__file__, options.processes, *settled(options))
    run(options, start_ranks(options.device))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
