"""Host time that a sharding runtime adds to a plain model, per module and step.

    python bench/overhead.py --world 8,64

One process plays rank 0 of a world whose collectives do nothing (`_noop.py`). In every round each
engine runs one step (forward and backward) and its own collectives are called bare, so what other
processes do to this machine falls on all sides alike. Of each round: added = step - plain step -
bare collectives, divided by the number of sharded modules (the blocks and the root).
"""

import argparse
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import _engines
import _noop
import _report
from _models import TinyBlock, TinyStack
from _profile import print_profile

CLOCKS = {"thread": time.thread_time, "process": time.process_time}
WARM_STEPS = 4


@dataclass(frozen=True)
class EngineResult:
    """Microseconds per sharded module and step.

    `ratio` is this engine's added time over that of torch's FSDP2, formed within each round.
    """

    world: int
    engine: str
    step: _report.Spread
    bare: _report.Spread
    added: _report.Spread | None
    ratio: _report.Spread | None
    collectives: int
    collective_bytes: int


@dataclass
class Side:
    """One engine's model, its recorded collectives and the seconds of its rounds."""

    name: str
    model: nn.Module
    inputs: torch.Tensor
    calls: list[tuple[_noop.NoopGroup, _noop.Call]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)

    def step(self) -> None:
        self.model(self.inputs).sum().backward()

    def clear(self) -> None:
        for param in self.model.parameters():
            param.grad = None

    def warm(self) -> None:
        for _ in range(WARM_STEPS):
            self.step()
            self.clear()
        with _noop.recording() as self.calls:
            self.step()
        self.clear()

    def measure(self, clock: Callable[[], float]) -> None:
        start = clock()
        self.step()
        self.step_s.append(clock() - start)
        self.clear()
        start = clock()
        _noop.replay(self.calls)
        self.bare_s.append(clock() - start)


def build(name: str, world: int, blocks: int, width: int) -> Side:
    """The tiny stack under one engine, warmed up."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    side = Side(
        name,
        _engines.build(name, TinyStack(blocks, width), TinyBlock, mesh),
        torch.randn(2, width),
    )
    side.warm()
    return side


def run(world: int, names: list[str], options: argparse.Namespace) -> list[EngineResult]:
    """Measures the engines at one world size."""
    width = max(64, world) if options.width is None else options.width
    _noop.init(world)
    try:
        sides = [build(name, world, options.blocks, width) for name in names]
        gc.collect()
        gc.freeze()  # no engine pays for scanning the models of the others
        # A fixed cycle would favour the engine that always follows its like.
        shuffle = random.Random(0)
        for _ in range(options.rounds):
            for side in shuffle.sample(sides, len(sides)):
                side.measure(CLOCKS[options.clock])
        gc.unfreeze()
        return _results(world, sides, options.blocks + 1)
    finally:
        _noop.shutdown()


def _results(world: int, sides: list[Side], modules: int) -> list[EngineResult]:
    by_name = {side.name: side for side in sides}
    plain = by_name["plain"].step_s

    def added(side: Side) -> list[float]:
        rounds = zip(side.step_s, plain, side.bare_s, strict=True)
        return [step - base - bare for step, base, bare in rounds]

    def per_module(seconds: list[float]) -> _report.Spread:
        return _report.Spread.of([1e6 * s / modules for s in seconds])

    def ratio(side: Side) -> _report.Spread | None:
        if side.name == "plain" or "fsdp2" not in by_name:
            return None
        rounds = zip(added(side), added(by_name["fsdp2"]), strict=True)
        return _report.Spread.of([a / b for a, b in rounds])

    return [
        EngineResult(
            world=world,
            engine=side.name,
            step=per_module(side.step_s),
            bare=per_module(side.bare_s),
            added=None if side.name == "plain" else per_module(added(side)),
            ratio=ratio(side),
            collectives=len(side.calls),
            collective_bytes=sum(call.nbytes() for _, call in side.calls),
        )
        for side in sides
    ]


def show(world: int, results: list[EngineResult], options: argparse.Namespace) -> None:
    """Prints one world's table."""

    def us(spread: _report.Spread) -> str:
        return f"{spread.median:.0f} [{spread.low:.0f}, {spread.high:.0f}]"

    rows = [
        (
            r.engine,
            us(r.step),
            us(r.bare),
            us(r.added) if r.added else "-",
            str(r.ratio) if r.ratio else "-",
            str(r.collectives),
        )
        for r in results
    ]
    columns = (
        "engine",
        "step, us",
        "bare collectives, us",
        "added, us",
        "added / FSDP2's",
        "collectives a step",
    )
    _report.table(
        f"Host time per module and step: world {world}, {options.blocks} blocks of 6 and the root",
        columns,
        rows,
        f"median [quartiles] of {options.rounds} interleaved rounds; CPU time of the {options.clock}",
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--world",
        type=_report.integers,
        default="8,64",
        help="simulated world sizes (default: %(default)s)",
    )
    parser.add_argument("--blocks", type=int, default=48, help="blocks of 6 parameters (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--width", type=int, help="dim 0 of every parameter (default: 64, or the world if larger)")
    parser.add_argument(
        "--engines",
        type=_engines.parse,
        default="ours,fsdp2",
        help=f"of {', '.join(_engines.ENGINES)}; plain always runs",
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="thread",
        help="CPU time counted (default: this thread's)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument(
        "--profile",
        choices=_engines.ENGINES,
        metavar="ENGINE",
        help="print where ENGINE's steady step goes, and measure nothing",
    )
    parser.add_argument("--sort", choices=("own", "total"), default="own", help="order of the profile")
    parser.add_argument("--lines", type=int, default=40, help="lines of the profile (default: %(default)s)")
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # outputs of no-op collectives hold whatever was in memory
    if options.profile:
        profile(options.profile, options.world[0], options)
        return
    names = list(dict.fromkeys(["plain", *options.engines]))
    results: list[EngineResult] = []
    for world in options.world:
        found = run(world, names, options)
        show(world, found, options)
        results += found
    if options.json:
        kept = ("world", "blocks", "rounds", "width", "engines", "clock")
        settings = {key: getattr(options, key) for key in kept}
        _report.write_json(options.json, "overhead", settings, results)


def profile(name: str, world: int, options: argparse.Namespace) -> None:
    _noop.init(world)
    try:
        side = build(name, world, options.blocks, options.width or max(64, world))
        print_profile(
            side.step,
            side.clear,
            modules=options.blocks + 1,
            sort=options.sort,
            lines=options.lines,
        )
    finally:
        _noop.shutdown()


if __name__ == "__main__":
    main()
