"""Train a small GPT with gradient accumulation, and replay its microbatches from CUDA graphs.

    python tutorials/09_cuda_graphs.py               # two processes; on a CPU, all calls are eager
    python tutorials/09_cuda_graphs.py --size 10m --microbatches 8 --steps 50

The script starts itself under `torchrun`. It trains two equal models on the same batches: one eagerly, and one through
`make_graphed_step`. Both use the same function for forward, loss and backward of a microbatch. Clipping, the optimizer
and the learning rate schedule stay eager.

On GPUs, each position of a microbatch gets a graph of its own: the first, the second, further ones, and the last. Each
runs eagerly in the first step, is captured in the second or third, and replayed in later ones. At the end, the script
prints what the graphed step did, and the losses and step times of both models.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import composable_shard as cs
from _gpt import GPT, SIZES, Block, build_gpt, next_byte_loss, random_windows
from _ranks import launch, start_ranks

TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
WARM = 3  # steps that are eager or captured, and not timed


def make_step(model: GPT, microbatches: int) -> Callable[[Tensor], Tensor]:
    """Return the function that is captured. It must not read values on the host, for example with `.item()`."""

    def forward_backward(windows: Tensor) -> Tensor:
        loss = next_byte_loss(model, windows) / microbatches
        loss.backward()
        return loss.detach()

    return forward_backward


@dataclass
class Side:
    """A model, with its step times (seconds) and losses."""

    model: GPT
    call: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, batch: list[Tensor]) -> None:
        began = time.perf_counter()
        loss = torch.zeros((), device=batch[0].device)
        for index, windows in enumerate(batch):
            self.model.set_requires_gradient_sync(index == len(batch) - 1)
            loss += self.call(windows)
        cs.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # the host waits for the device
        self.seconds.append(time.perf_counter() - began)


def make_side(graphed: bool, options: argparse.Namespace, device: torch.device) -> Side:
    model = build_gpt(options.size, device=device)
    cs.shard_by_class(model, {Block}, strategy="zero3")
    call = make_step(model, options.microbatches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    return Side(model, cs.make_graphed_step(call) if graphed else call, optimizer, schedule)


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Side]:
    """Train both models on one rank. Return them by name."""
    sides = {name: make_side(name == "graphed", options, device) for name in ("eager", "graphed")}
    length = SIZES[options.size].context + 1
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(options.steps):
        batch = [random_windows(TEXT, options.batch, length, data).to(device) for _ in range(options.microbatches)]
        for side in sides.values():
            side.step(batch)
    if dist.get_rank() == 0:
        show(sides, device)
    dist.barrier()
    return sides


def show(sides: dict[str, Side], device: torch.device) -> None:
    if device.type != "cuda":
        print(f"no CUDA graphs on {device.type}: all calls were eager\n")
    graphed = sides["graphed"]
    print(graphed.call)
    for name, figure in cs.stats(graphed.model).items():
        if name.startswith("graphs/"):
            print(f"  {name:<20} {figure:.0f}")
    print()
    for name, side in sides.items():
        milliseconds = 1e3 * statistics.median(side.seconds[WARM:] or side.seconds)
        print(f"{name:<8} loss {side.losses[0]:.3f} to {side.losses[-1]:.3f}, median step {milliseconds:.1f} ms")
    pairs = zip(*(side.losses for side in sides.values()), strict=True)
    apart = max(abs(one - other) / one for one, other in pairs)
    print(f"the largest relative difference of losses is {apart:.0e}", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT, and replay its microbatches from CUDA graphs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="3m", help="model size")
    add("--steps", type=int, default=12, help="training steps")
    add("--microbatches", type=int, default=4, help="microbatches per step")
    add("--batch", type=int, default=2, help="windows per rank and microbatch")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--processes", type=int, default=2, help="processes to start")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if "LOCAL_RANK" not in os.environ:
        return launch(__file__, options.processes)
    run(options, start_ranks(options.device))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
