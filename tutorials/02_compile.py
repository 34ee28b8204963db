"""Compile a sharded GPT: block by block, and whole, beside the same model run eagerly.

    python tutorials/02_compile.py                 # two processes; most of the time is the compiler's
    python tutorials/02_compile.py --size 10m --steps 20
    python tutorials/02_compile.py --backend aot_eager  # the graphs as they are traced, at once

Started so, the script starts itself under `torchrun`. `prepare` shows the three ways. What the
library promises of a compiled model is read off its graphs, which are printed in short: a letter for
each node that counts, in their order.

    G  all-gather of one group's parameters     w  wait for it, or for a reduction
    m  matrix product                           R  reduce-scatter of its gradients

The whole model is one graph each way. Forward gathers every group once; backward gathers the blocks
again, instead of keeping their weights from forward, and reduces every group once. runs/02/graphs.png shows them,
with the step times.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import composable_shard as cs
from _gpt import SIZES, Block, build_gpt, next_byte_loss
from _pictures import BLUE, GREY, PALE, SAND, picture
from _ranks import launch, start_ranks
from composable_shard.report import GraphReport, watch_graphs

WAYS = {
    "eager": "every operator on its own",
    "blocks": "each block compiled, in one piece of code that they share; the root eager",
    "whole": "one graph each way",
}


def prepare(way: str, options: argparse.Namespace, device: torch.device) -> nn.Module:
    """The same sharded model each time, compiled or not."""
    model = build_gpt(options.size, device=device)
    cs.shard_by_class(model, {Block}, strategy="zero3")
    if way == "blocks":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = cs.compile(block, backend=options.backend)
    return cs.compile(model, backend=options.backend) if way == "whole" else model


@dataclass
class Side:
    """One way with a model of its own, and what its steps took and gave."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    graphs: Sequence[GraphReport] = ()

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)

    def step(self, windows: Tensor) -> None:
        began = time.perf_counter()
        loss = next_byte_loss(self.model, windows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - began)


def describe(way: str, first_step: float, graphs: Sequence[GraphReport]) -> str:
    """What the first step of this way has shown."""
    lines = [f"{way}: {WAYS[way]}; first step {first_step:.1f} s"]
    for graph in graphs:
        kept = f"   ({graph.saved / 1e6:.2f} MB for backward)" if graph.direction == "forward" else ""
        lines.append(f"  {graph.direction:<8} {graph.sequence}{kept}")
    return "\n".join(lines)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def draw_graphs(sides: dict[str, Side], path: Path) -> None:
    """The nodes of the graphs, from left to right, and the step times below."""
    letters = {"G": ("all-gather", PALE), "m": ("matrix product", BLUE), "R": ("reduce-scatter", SAND)}
    letters["w"] = ("wait", GREY)
    graphs = [(f"{way}, {graph.direction}", graph.sequence) for way, side in sides.items() for graph in side.graphs]
    with picture(path, 10, 4.5, rows=2, height_ratios=(2, 1)) as (above, below):
        for row, (_, nodes) in enumerate(graphs):
            for letter, (_, color) in letters.items():
                bars = [(at, 0.9) for at, node in enumerate(nodes) if node == letter]
                above.broken_barh(bars, (row - 0.4, 0.8), facecolor=color)
        for name, color in letters.values():
            above.plot([], [], "s", color=color, label=name)
        above.set_yticks(range(len(graphs)), [name for name, _ in graphs])
        above.invert_yaxis()
        above.set_xlabel("nodes of a graph, in their order")
        above.legend(ncols=4, frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        below.barh([*sides], [side.median_ms for side in sides.values()], color=BLUE)
        below.invert_yaxis()
        below.set_xlabel("milliseconds of a step, median")


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Side]:
    """All ways on one rank; gives them by name."""
    config = SIZES[options.size]
    generator = torch.Generator().manual_seed(dist.get_rank())

    def draw() -> Tensor:
        return torch.randint(config.vocabulary, (options.batch, config.context + 1), generator=generator).to(device)

    say(f"GPT with {config.depth} blocks of width {config.width} on {dist.get_world_size()} processes\n")
    sides = {}
    windows = draw()
    for way in WAYS:
        model = prepare(way, options, device)
        side = sides[way] = Side(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with watch_graphs() as graphs:
            side.step(windows)
        side.graphs = [*graphs]
        say(describe(way, side.seconds.pop(), graphs))

    for i in range(2 + options.steps):  # in turns, so that what else the machine does falls on all alike
        windows = draw()
        for side in sides.values():
            dist.barrier()
            side.step(windows)
            if i < 2:
                side.seconds.clear()
    say(f"\nmedian of {options.steps} steps, in turns:")
    for way, side in sides.items():
        say(f"  {way:<8} {side.median_ms:8.1f} ms")
    apart = max((max(step) - min(step)) / min(step) for step in zip(*(s.losses for s in sides.values()), strict=True))
    say(f"losses of all ways agree: {apart:.0e} apart at most, relatively")
    if dist.get_rank() == 0:
        draw_graphs(sides, options.out / "graphs.png")
        print(f"the graphs and the step times: {options.out / 'graphs.png'}", flush=True)
    dist.barrier()
    return sides


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compile a sharded GPT in two ways, and show its graphs and step times.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="3m", help="which model")
    add("--steps", type=int, default=10, help="timed steps")
    add("--batch", type=int, default=2, help="windows a rank")
    add("--backend", default="inductor", help="of torch.compile")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--processes", type=int, default=2, help="how many to start")
    add("--out", type=Path, default=Path("runs/02"), help="where the picture goes")
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
