"""Measure the host time that a sharding runtime adds to a plain model, per module and step.

    python bench/overhead.py --world 8,64

Each engine has its own process, which is rank 0 of a simulated world, so hooks, garbage and memory of other engines
have no effect. Processes take turns with one step (forward and backward) per round, so other load on the machine
affects all engines alike. In each round: added = step - plain step, divided by the number of sharded modules (the
blocks and the root).

By default, collectives are those of torch's fake process group, and the time to issue them counts. With `--group noop`
they do nothing (`_noop.py`). The collectives of a step are then also called alone (*bare*), and their time is
subtracted.

    python bench/overhead.py --transport packed         # gathers into one buffer per group, with copies
    python bench/overhead.py --group noop --per-group 1,4,16      # host time per parameter
    python bench/overhead.py --group noop --model stack --blocks 48,200,1000    # host time by number of modules
    python bench/overhead.py --model gpt --engines ours,ours-placed-whole,fsdp2    # compiled steps, too
    python bench/overhead.py --device cuda              # host time and device time of steps on a GPU

Models compiled as one graph are compared with the plain model compiled as one graph (`compute-whole`).
"""

import argparse
import gc
import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import _device
import _engines
import _noop
import _report
from _models import GPT, ChainBlock, GPT2Block, GPT2Stack, GPTBlock, GPTConfig, TinyBlock, TinyStack
from _players import Player
from _profile import print_profile

PLAIN, PLAIN_COMPILED = "plain", "compute-whole"
CLOCKS = {"thread": time.thread_time, "process": time.process_time}
WARM_STEPS = 4
GPT_CONTEXT, GPT_HEADS = 16, 2


@dataclass(frozen=True)
class Case:
    """A model: number of blocks, and number of parameters per block for blocks of plain parameters."""

    blocks: int
    per_group: int | None
    model: str = "stack"

    @property
    def modules(self) -> int:
        return self.blocks + 1

    @property
    def params(self) -> int:
        return self.blocks * self.of_block + (3 if self.model == "gpt" else 2)

    @property
    def of_block(self) -> int:
        return self.per_group or (12 if self.model == "gpt2" else 6)

    def __str__(self) -> str:
        kind = "" if self.model == "stack" else f"{self.model} of "
        return f"{kind}{self.blocks} blocks of {self.of_block} parameters and the root"

    def build(self, width: int) -> tuple[nn.Module, type[nn.Module], torch.Tensor]:
        """Return the model, the class of its blocks, and inputs."""
        if self.model == "gpt2":
            return GPT2Stack(self.blocks, width, GPT_HEADS), GPT2Block, torch.randn(2, GPT_CONTEXT, width)
        if self.model == "gpt":
            config = GPTConfig(self.blocks, width, GPT_HEADS, GPT_CONTEXT)
            return GPT(config), GPTBlock, torch.randint(config.vocabulary, (2, GPT_CONTEXT))
        block = TinyBlock if self.per_group is None else ChainBlock
        return TinyStack(self.blocks, width, self.per_group), block, torch.randn(2, width)


@dataclass(frozen=True)
class EngineResult:
    """Times in microseconds, per sharded module and step; `added_param` is per parameter and step.

    Attributes:
        step: host time of a step.
        bare: host time of the collectives of a step alone.
        added: step - plain step - bare.
        ratio: added time over that of FSDP2, formed within each round.
        growth: added time per module over that with the first number of blocks, formed within each round.
        device: time from the first kernel to the last, on a GPU. It includes host time for which the GPU waits.
    """

    world: int
    blocks: int
    per_group: int
    engine: str
    step: _report.Spread
    bare: _report.Spread
    added: _report.Spread | None
    added_param: _report.Spread | None
    ratio: _report.Spread | None
    growth: _report.Spread | None
    collectives: int
    collective_bytes: int
    device: _report.Spread | None = None


@dataclass
class Side:
    """One engine's model, its recorded collectives, and the times of its rounds in seconds."""

    name: str
    case: Case
    model: nn.Module
    inputs: torch.Tensor
    calls: list[tuple[_noop.NoopGroup, _noop.Call]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)

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
        span = _device.Span(self.inputs.device.type)
        start = clock()
        self.step()
        self.step_s.append(clock() - start)
        self.device_s += span.seconds()
        self.clear()
        start = clock()
        _noop.replay(self.calls)
        self.bare_s.append(clock() - start)


def build(name: str, world: int, case: Case, options: argparse.Namespace) -> Side:
    """Build the model with one engine, and run warm-up steps."""
    torch.manual_seed(0)
    mesh = init_device_mesh(options.device, (world,))
    plain, block, inputs = case.build(options.width or max(64, world))
    model = _engines.build(name, plain.to(options.device), block, mesh)
    side = Side(name, case, model, inputs.to(options.device))
    side.warm()
    return side


@dataclass(frozen=True)
class Figures:
    """The times of one engine with one model, by round, in seconds."""

    name: str
    case: Case
    step_s: list[float]
    bare_s: list[float]
    device_s: list[float]
    collectives: int
    collective_bytes: int

    @classmethod
    def of(cls, side: Side) -> Self:
        nbytes = sum(call.nbytes() for _, call in side.calls)
        return cls(side.name, side.case, side.step_s, side.bare_s, side.device_s, len(side.calls), nbytes)


class Stacks:
    """All models of one engine after warm-up. A `Player` runs them in its own process."""

    def __init__(self, name: str, world: int, cases: list[Case], options: argparse.Namespace) -> None:
        prepare(options)
        begin(world, options)
        self._sides = [build(name, world, case, options) for case in cases]
        self._clock = CLOCKS[options.clock]
        gc.collect()
        gc.freeze()  # so that garbage collection in a step does not scan older objects

    def measure(self, at: int) -> None:
        """Run one round of the model with this index."""
        self._sides[at].measure(self._clock)

    def figures(self) -> list[Figures]:
        """Return the figures of all models."""
        return [Figures.of(side) for side in self._sides]

    def close(self) -> None:
        _noop.shutdown()


def begin(world: int, options: argparse.Namespace) -> None:
    """Initialize the process group as rank 0 of a simulated world."""
    os.environ["COMPOSABLE_SHARD_TRANSPORT"] = options.transport
    if options.group == "noop":
        _noop.init(world)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def prepare(options: argparse.Namespace) -> None:
    """Set up a measuring process."""
    torch.set_num_threads(1)
    _device.select(options.device)
    torch.set_flush_denormal(True)  # outputs of no-op collectives are uninitialized and may contain slow denormals


def plain_of(name: str) -> str:
    """Return the unsharded engine that an engine is compared with."""
    return PLAIN_COMPILED if name.endswith(_engines.WHOLE) else PLAIN


def run(world: int, names: list[str], cases: list[Case], options: argparse.Namespace) -> list[EngineResult]:
    """Measure the engines at one world size, with every model, in turns."""
    with ExitStack() as stack:
        players = [stack.enter_context(Player(name, Stacks, name, world, cases, options)) for name in names]
        for player in players:
            player.ready()
        turns = [(player, at) for at in range(len(cases)) for player in players]
        # Random order: in a fixed cycle, an engine that follows a similar one would have an advantage.
        shuffle = random.Random(0)
        for _ in range(options.rounds):
            for player, at in shuffle.sample(turns, len(turns)):
                player.call("measure", at)
        by_engine: list[list[Figures]] = [player.call("figures") for player in players]
        return _results(world, [found[at] for at in range(len(cases)) for found in by_engine])


def _results(world: int, sides: list[Figures]) -> list[EngineResult]:
    found = {(side.case, side.name): side for side in sides}

    def added(case: Case, name: str) -> list[float]:
        """Return the added seconds per module, by round."""
        side, plain = found[case, name], found[case, plain_of(name)].step_s
        rounds = zip(side.step_s, plain, side.bare_s, strict=True)
        return [(step - base - bare) / case.modules for step, base, bare in rounds]

    def over(case: Case, name: str, other_case: Case, other: str) -> _report.Spread | None:
        if name in (PLAIN, PLAIN_COMPILED) or (other_case, other) not in found:
            return None
        rounds = zip(added(case, name), added(other_case, other), strict=True)
        return _report.Spread.of([a / b for a, b in rounds])

    def microseconds(seconds: list[float], count: float = 1.0) -> _report.Spread:
        return _report.Spread.of([1e6 * s / count for s in seconds])

    results: list[EngineResult] = []
    for (case, name), side in found.items():
        first = next(each for each, _ in found if each.per_group == case.per_group)
        per_group, alone = case.per_group or 6, name in (PLAIN, PLAIN_COMPILED)
        of_module = case.params / case.modules
        results.append(
            EngineResult(
                world=world,
                blocks=case.blocks,
                per_group=per_group,
                engine=name,
                step=microseconds(side.step_s, case.modules),
                bare=microseconds(side.bare_s, case.modules),
                added=None if alone else microseconds(added(case, name)),
                added_param=None if alone else microseconds(added(case, name), of_module),
                ratio=over(case, name, case, "fsdp2"),
                growth=over(case, name, first, name),
                collectives=side.collectives,
                collective_bytes=side.collective_bytes,
                device=microseconds(side.device_s, case.modules) if side.device_s else None,
            )
        )
    return results


def show(world: int, case: Case, results: list[EngineResult], options: argparse.Namespace) -> None:
    """Print the table of one model in one world."""

    def us(spread: _report.Spread | None, digits: int = 0) -> str:
        if spread is None:
            return "-"
        return f"{spread.median:.{digits}f} [{spread.low:.{digits}f}, {spread.high:.{digits}f}]"

    grows = len(options.blocks) > 1
    rows = [
        (
            r.engine,
            us(r.step),
            us(r.bare),
            us(r.added),
            us(r.added_param, 1),
            str(r.ratio or "-"),
            *([str(r.growth or "-")] if grows else []),
            *([us(r.device)] if r.device else []),
            str(r.collectives),
        )
        for r in results
    ]
    columns = (
        "engine",
        "step, us",
        "bare collectives, us",
        "added, us",
        "added per parameter, us",
        "added / FSDP2's",
        *([f"added / with {options.blocks[0]} blocks"] if grows else []),
        *(["first kernel to last, us"] if results[0].device else []),
        "collectives per step",
    )
    _report.table(
        f"Host time per module and step: {options.device}, world {world}, {case}",
        columns,
        rows,
        f"median [quartiles] of {options.rounds} interleaved rounds; CPU time of the {options.clock}",
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _device.add_option(parser)
    parser.add_argument(
        "--world",
        type=_report.integers,
        default="8,64",
        help="simulated world sizes (default: %(default)s)",
    )
    parser.add_argument(
        "--blocks",
        type=_report.integers,
        default="48",
        help="numbers of blocks; with several, prints the growth of the added time (default: %(default)s)",
    )
    parser.add_argument(
        "--per-group",
        type=_report.integers,
        help="blocks of this many small parameters, for the time per parameter (default: blocks of --model)",
    )
    parser.add_argument(
        "--model",
        choices=("gpt2", "gpt", "stack"),
        default="gpt2",
        help="GPT-2 blocks (12 parameters), the tutorials' GPT, or a LayerNorm and two Linears (default: %(default)s)",
    )
    parser.add_argument(
        "--group",
        choices=("fake", "noop"),
        help="fake: issuing collectives counts; noop: it is subtracted (default: fake, on a GPU noop)",
    )
    parser.add_argument(
        "--transport", choices=("direct", "packed"), default="direct", help="our transport (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=100, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--width", type=int, help="dim 0 of every parameter (default: 64, or the world size if larger)")
    parser.add_argument(
        "--engines",
        type=_engines.parse,
        default="ours,fsdp2",
        help=f"engines: {', '.join(_engines.ENGINES)}; plain always runs (default: %(default)s)",
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        help="CPU time of the main thread or the process (default: thread; on a GPU process, for the backward thread)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument(
        "--profile",
        choices=_engines.ENGINES,
        metavar="ENGINE",
        help="print a profile of ENGINE's step instead of measuring",
    )
    parser.add_argument("--sort", choices=("own", "total"), default="own", help="order of the profile")
    parser.add_argument("--lines", type=int, default=40, help="lines of the profile (default: %(default)s)")
    options = parser.parse_args(argv)
    options.group = options.group or ("fake" if options.device == _device.CPU else "noop")
    if options.per_group:
        options.model = "stack"
    options.clock = options.clock or ("thread" if options.device == _device.CPU else "process")
    return options


def main() -> None:
    options = parse()
    if options.profile:
        prepare(options)
        profile(options.profile, options.world[0], options)
        return
    names = list(dict.fromkeys([PLAIN, *map(plain_of, options.engines), *options.engines]))
    cases = all_cases(options)
    results: list[EngineResult] = []
    for world in options.world:
        found = run(world, names, cases, options)
        for at, case in enumerate(cases):
            show(world, case, found[at * len(names) :][: len(names)], options)
        results += found
        save(results, options)


def save(results: list[EngineResult], options: argparse.Namespace) -> None:
    """Write the figures so far. Called after each world."""
    if options.json:
        kept = (
            "device",
            "world",
            "model",
            "group",
            "transport",
            "blocks",
            "per_group",
            "rounds",
            "width",
            "engines",
            "clock",
        )
        settings = {key: getattr(options, key) for key in kept}
        _report.write_json(options.json, "overhead", settings, results, options.device)


def all_cases(options: argparse.Namespace) -> list[Case]:
    """Return all combinations of numbers of blocks and numbers of parameters."""
    counts = options.per_group or [None]
    return [Case(blocks, count, options.model) for count in counts for blocks in options.blocks]


def profile(name: str, world: int, options: argparse.Namespace) -> None:
    begin(world, options)
    try:
        case = all_cases(options)[0]
        side = build(name, world, case, options)
        print_profile(
            side.step,
            side.clear,
            modules=case.modules,
            sort=options.sort,
            lines=options.lines,
        )
    finally:
        _noop.shutdown()


if __name__ == "__main__":
    main()
