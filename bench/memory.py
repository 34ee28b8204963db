"""Measure the memory of a training step by type, and resident memory, ours and FSDP2.

    python bench/memory.py --sizes 150m,1b --world 8,64

- *Live*: one process is rank 0 of a simulated world with collectives that do nothing (`_noop.py`). Allocations of
  torch's CPU allocator are read from its profiler and attributed to types (`_kinds.py`). Blocks use activation
  checkpointing and sequences are short, so that the runtime's memory is a large part of the total. Steps have no
  optimizer.
- *Resident*: real training on gloo with SGD, one engine per launch. The figure is the growth of resident memory.

On a GPU both use figures of torch's CUDA allocator, without types.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _device
import _engines
import _kinds
import _launch
import _report
from step import sizes

WORKER = Path(__file__).with_name("_memory_worker.py")
REFERENCE = "fsdp2"
AIMS = {"ours": 0.80, "ours-none-ahead": 0.60}  # target ratios of the runtime's bytes to FSDP2's


@dataclass(frozen=True)
class LiveResult:
    """Bytes of one rank at two peaks of a step: the peak of the runtime's bytes, and the peak of all bytes.

    Ratios are to FSDP2's peaks. `apart` is the largest difference between the sum of all types and the profiler's own
    count, relative to the peak.
    """

    size: str
    parameters: int
    world: int
    engine: str
    runtime: dict[str, Any]
    total: dict[str, Any]
    runtime_ratio: float | None
    total_ratio: float | None
    aim: float | None
    apart: float


@dataclass(frozen=True)
class CardResult:
    """Bytes of one rank on a GPU. Ratios are to FSDP2.

    Attributes:
        peak: peak of allocated bytes in a step.
        reserved: peak of the bytes that torch's allocator reserves.
        between: allocated bytes between steps.
        own: bytes of this rank's parameters.
        pool: bytes of the pool, only for ours.
        planned: peak of the pool that the plan predicts, only for ours.
    """

    size: str
    parameters: int
    world: int
    engine: str
    peak: int
    reserved: int
    between: int
    own: int
    pool: int | None
    planned: int | None
    total_ratio: float | None
    reserved_ratio: float | None


@dataclass(frozen=True)
class ResidentResult:
    """Growth of resident memory in MB, maximum over the ranks. Ratios to FSDP2 are formed by launch."""

    size: str
    world: int
    engine: str
    resident_mb: _report.Spread
    ratio: _report.Spread | None


def launched(options: argparse.Namespace, world: int, **settings: Any) -> dict[str, Any]:
    """Run a worker with these settings and return its result.

    Raises:
        _launch.WorkerError: a rank failed or reached the time limit.
    """
    kept = ("batch", "context", "steps", "device", "microbatches")
    common = {key: getattr(options, key) for key in kept} | {"backend": "none", "dtype": "float32"}
    text = _launch.launch(
        WORKER,
        json.dumps(common | settings),
        world=world,
        timeout=options.timeout,
        tuned=False,
        device=options.device,
        echo=_device.too_few(options.device, world),
    )
    found: dict[str, Any] = json.loads(text)
    return found


def living(size: str, options: argparse.Namespace) -> list[LiveResult]:
    """Measure bytes by type, for each simulated world. Counts are exact, so launches can run in parallel."""
    results: list[LiveResult] = []
    sides = [(world, name) for world in options.world for name in options.engines]

    def launch(side: tuple[int, str]) -> dict[str, Any]:
        return launched(options, 1, part="live", size=size, simulated=side[0], engine=side[1])

    with ThreadPoolExecutor(options.jobs) as pool:
        of_side = dict(zip(sides, pool.map(launch, sides), strict=True))
    for world in options.world:
        found = {name: of_side[world, name] for name in options.engines}
        reference = found.get(REFERENCE)

        def over(name: str, sum_of: str, reference: Any = reference, found: Any = found) -> float | None:
            return found[name][sum_of]["nbytes"] / reference[sum_of]["nbytes"] if reference else None

        of_world = [
            LiveResult(
                size=size,
                world=world,
                engine=name,
                runtime_ratio=over(name, "runtime") if found[name]["runtime"]["nbytes"] else None,
                total_ratio=over(name, "total"),
                aim=AIMS.get(name),
                **found[name],
            )
            for name in options.engines
        ]
        show_live(of_world, options)
        results += of_world
    return results


def show_live(results: list[LiveResult], options: argparse.Namespace) -> None:
    """Print the two peaks of one size in one world."""
    first = results[0]
    where = f"{first.size} ({first.parameters:,} parameters), simulated world {first.world}"
    kinds = [kind for kind in _kinds.RUNTIME if any(r.runtime["by_kind"][kind] for r in results)]
    _report.table(
        f"The runtime's bytes at their peak, MB: {where}",
        ("engine", "runtime", "/ FSDP2's", "target", *kinds, "reached in"),
        [
            (
                r.engine,
                _megabytes(r.runtime["nbytes"]),
                _ratio(r.runtime_ratio),
                _ratio(r.aim),
                *(_megabytes(r.runtime["by_kind"][kind]) for kind in kinds),
                r.runtime["moment"] if r.runtime["nbytes"] else "-",
            )
            for r in results
        ],
        f"activation checkpointing, {options.microbatches} x {options.batch} x {options.context} tokens, float32",
    )
    others = (_kinds.OWN, _kinds.OWN_GRADIENTS, _kinds.REST)
    _report.table(
        f"All bytes at their peak, MB: {where}",
        ("engine", "total", "/ FSDP2's", "runtime", *others, "reached in"),
        [
            (
                r.engine,
                _megabytes(r.total["nbytes"]),
                _ratio(r.total_ratio),
                _megabytes(sum(r.total["by_kind"][kind] for kind in _kinds.RUNTIME)),
                *(_megabytes(r.total["by_kind"][kind]) for kind in others),
                r.total["moment"],
            )
            for r in results
        ],
        "target: at most FSDP2's; the sum of all types differs from the profiler's own count by at most "
        f"{100 * max(r.apart for r in results):.2g} % of the peak",
    )


def living_on_card(size: str, options: argparse.Namespace) -> list[CardResult]:
    """Measure GPU memory for each simulated world."""
    results: list[CardResult] = []
    for world in options.world:
        found = {
            name: launched(options, 1, part="card", size=size, simulated=world, engine=name) for name in options.engines
        }
        reference = found.get(REFERENCE)
        of_world = [
            CardResult(
                size=size,
                world=world,
                engine=name,
                total_ratio=figures["peak"] / reference["peak"] if reference else None,
                reserved_ratio=figures["reserved"] / reference["reserved"] if reference else None,
                **figures,
            )
            for name, figures in found.items()
        ]
        _report.table(
            f"All bytes on the GPU at their peak, MB: {size} ({of_world[0].parameters:,} parameters), simulated world "
            f"{world}",
            ("engine", "peak", "/ FSDP2's", "reserved", "/ FSDP2's", "between steps", "parameters", "pool", "planned"),
            [
                (
                    r.engine,
                    _megabytes(r.peak),
                    _ratio(r.total_ratio),
                    _megabytes(r.reserved),
                    _ratio(r.reserved_ratio),
                    *map(_megabytes, (r.between, r.own, r.pool, r.planned)),
                )
                for r in of_world
            ],
            f"torch's CUDA allocator; activation checkpointing, {options.batch} x {options.context} tokens, float32",
        )
        results += of_world
    return results


def residing(size: str, options: argparse.Namespace) -> list[ResidentResult]:
    """Measure the memory growth of ranks, on gloo or on GPUs. Launches of the engines take turns."""
    names = options.resident_engines
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.repeats):
        for name in names:
            grown = launched(options, options.ranks, part="resident", size=size, engine=name)["resident"]
            if grown < 0:
                print("memory.py: this system does not report the resident memory of a process", file=sys.stderr)
                return []
            found[name].append(grown / 1e6)
    reference = found.get(REFERENCE)
    results = [
        ResidentResult(
            size=size,
            world=options.ranks,
            engine=name,
            resident_mb=_report.Spread.of(found[name]),
            ratio=_report.Spread.of([a / b for a, b in zip(found[name], reference, strict=True)])
            if reference
            else None,
        )
        for name in names
    ]
    card = options.device == _device.CUDA
    of_what = (
        "peak of the memory that torch's CUDA allocator reserved"
        if card
        else "VmHWM without the memory of the process before it had a model"
    )
    _report.table(
        f"Growth of a rank's memory: {size}, {'NCCL' if card else 'gloo'}, world {options.ranks}",
        ("engine", "peak, MB", "/ FSDP2's"),
        [
            (
                r.engine,
                r.resident_mb.shown(0),
                str(r.ratio or "-"),
            )
            for r in results
        ],
        f"{of_what}, over {options.steps} steps with SGD; no activation checkpointing; "
        f"median [quartiles] of {options.repeats} launches per engine, in turns",
    )
    return results


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f}"


def _ratio(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.3f}"


Result = LiveResult | CardResult | ResidentResult
PARTS: dict[str, Callable[[str, argparse.Namespace], Sequence[Result]]] = {
    "live": lambda size, options: (living if options.device == _device.CPU else living_on_card)(size, options),
    "resident": residing,
}


def parts(text: str) -> list[str]:
    """Parse a comma-separated list of parts."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    return names


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _device.add_option(parser)
    add = parser.add_argument
    add("--parts", type=parts, default="live,resident", help="what to measure (default: %(default)s)")
    add("--sizes", type=sizes, default="150m,1b", help="live: model sizes (default: %(default)s)")
    add("--world", type=_report.integers, default="8,64", help="live: simulated world sizes (default: %(default)s)")
    add(
        "--engines",
        type=_engines.parse,
        default="ours,ours-none-ahead,fsdp2",
        help="live: engines (default: %(default)s)",
    )
    add("--context", type=int, default=32, help="live: tokens per sequence (default: %(default)s)")
    add("--batch", type=int, default=1, help="sequences per rank (default: %(default)s)")
    add(
        "--microbatches",
        type=int,
        default=1,
        help="live, on a CPU: microbatches per step, of which only the last one reduces gradients (default: 1)",
    )
    add("--resident-sizes", type=sizes, default="150m", help="resident: model sizes (default: %(default)s)")
    add(
        "--resident-engines",
        type=_engines.parse,
        default="ours,fsdp2,ddp",
        help="resident: engines (default: %(default)s)",
    )
    add("--ranks", type=int, default=2, help="resident: number of ranks (default: %(default)s)")
    add("--steps", type=int, default=3, help="resident: steps (default: %(default)s)")
    add("--repeats", type=int, default=3, help="resident: launches per engine (default: %(default)s)")
    add("--jobs", type=int, default=os.cpu_count(), help="live: parallel launches (default: %(default)s)")
    add("--timeout", type=float, default=600.0, help="time limit per launch, in seconds (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args()


def main() -> int:
    options = parse()
    results: list[Result] = []
    for part in options.parts:
        for size in options.sizes if part == "live" else options.resident_sizes:
            try:
                results += PARTS[part](size, options)
            except _launch.WorkerError as error:
                print(f"memory.py: {size}, {part}: {error}", file=sys.stderr)
                return 1
    _report.save(options, "memory", results, options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
