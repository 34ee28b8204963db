"""Compile a sharded GPT in two ways and compare it with the eager model.

    python tutorials/02_compile.py                 # two processes; compilation takes most of the time
    python tutorials/02_compile.py --size 10m --steps 20
    python tutorials/02_compile.py --backend aot_eager  # traced graphs without code generation, much faster

The script starts itself under `torchrun`. `prepare` builds the model in three ways: eager, with compiled blocks, and
compiled as one graph. The script prints each graph as a string with one letter per node of interest, in graph order:

    G  all-gather of one group's parameters     w  wait for an all-gather or a reduce-scatter
    m  matrix product                           R  reduce-scatter of one group's gradients

The model compiled as one graph has one graph for forward and one for backward. Forward gathers every group once.
Backward gathers the blocks again instead of saving their unsharded parameters, and reduces every group once.
runs/02/graphs.png shows the graphs and the step times.
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
    "eager": "not compiled",
    "blocks": "compiled blocks that share one graph; the root is eager",
    "whole": "one graph for forward and one for backward",
}


def prepare(way: str, options: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build the sharded model and compile it in the given way."""
    model = build_gpt(options.size, device=device)
    cs.shard_by_class(model, {Block}, strategy="zero3")
    if way == "blocks":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = cs.compile(block, backend=options.backend)
    return cs.compile(model, backend=options.backend) if way == "whole" else model


@dataclass
class Side:
    """The model of one way, with its step times (seconds), losses and graphs."""

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
    """Format the first step's time and graphs."""
    lines = [f"{way}: {WAYS[way]}; first step {first_step:.1f} s"]
    for graph in graphs:
        kept = f"   ({graph.saved / 1e6:.2f} MB for backward)" if graph.direction == "forward" else ""
        lines.append(f"  {graph.direction:<8} {graph.sequence}{kept}")
    return "\n".join(lines)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def draw_graphs(sides: dict[str, Side], path: Path) -> None:
    """Plot the nodes of all graphs in order, and the step times below."""
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
        above.set_xlabel("nodes in graph order")
        above.legend(ncols=4, frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        below.barh([*sides], [side.median_ms for side in sides.values()], color=BLUE)
        below.invert_yaxis()
        below.set_xlabel("median step time, ms")


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Side]:
    """Run all ways on one rank. Return them by name."""
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

    for i in range(2 + options.steps):  # in turns, so that other load on the machine affects all ways alike
        windows = draw()
        for side in sides.values():
            dist.barrier()
            side.step(windows)
            if i < 2:
                side.seconds.clear()
    say(f"\nmedian step time ({options.steps} steps of each, interleaved):")
    for way, side in sides.items():
        say(f"  {way:<8} {side.median_ms:8.1f} ms")
    apart = max((max(step) - min(step)) / min(step) for step in zip(*(s.losses for s in sides.values()), strict=True))
    say(f"losses agree: the largest relative difference is {apart:.0e}")
    if dist.get_rank() == 0:
        draw_graphs(sides, options.out / "graphs.png")
        print(f"graphs and step times: {options.out / 'graphs.png'}", flush=True)
    dist.barrier()
    return sides


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compile a sharded GPT in two ways. Show its graphs and step times.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="3m", help="model size")
    add("--steps", type=int, default=10, help="timed steps")
    add("--batch", type=int, default=2, help="windows per rank")
    add("--backend", default="inductor", help="backend of torch.compile")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--processes", type=int, default=2, help="processes to start")
    add("--out", type=Path, default=Path("runs/02"), help="directory of the picture")
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
