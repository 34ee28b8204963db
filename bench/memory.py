"""Memory of a training step: ours beside torch's FSDP2, by kind of bytes and as the system sees it.

    python bench/memory.py --sizes 150m,1b --world 8,64

*Live* plays rank 0 of a simulated world in one process, with collectives that do nothing (`_noop.py`), and reads from
torch's profiler what its CPU allocator has given out and to whom (`_kinds.py`). Blocks are checkpointed and sequences
short, so that what the runtime holds is a large part of all. *Resident* trains on gloo with one engine a launch and
reads from Linux how far a rank's process grew. The first leaves the optimizer out, the second steps with plain SGD.
On a card both read the figures of torch's CUDA allocator, which do not tell kinds.
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
AIMS = {"ours": 0.80, "ours-none-ahead": 0.60}  # of the runtime's bytes over FSDP2's


@dataclass(frozen=True)
class LiveResult:
    """Bytes of one rank at two moments of a step: when the runtime holds most, and when all together is most.

    The ratios are over FSDP2's peak of the same kind. `apart` is how far the sum of all kinds was at most from the
    profiler's own count, relative to the peak.
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
    """Bytes of one rank on a card: at most in a step (`peak`), and between steps; the ratios are over FSDP2's.

    `reserved` is what torch's allocator held of the card at most in that step, gaps between tensors included; `own` are
    its parameters; `pool` and `planned` are what ours counts itself: held, and foretold at most.
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
    """Megabytes by which a rank's process grew at most, of the rank that grew most; ratios to FSDP2's by launch."""

    size: str
    world: int
    engine: str
    resident_mb: _report.Spread
    ratio: _report.Spread | None


def launched(options: argparse.Namespace, world: int, **settings: Any) -> dict[str, Any]:
    """What a worker with these settings found. Raises _launch.WorkerError."""
    kept = ("batch", "context", "steps", "device")
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
    """Bytes by kind, for each simulated world. Counts are exact, so launches may run beside one another."""
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
    """Prints the two peaks of one size in one world."""
    first = results[0]
    where = f"{first.size} ({first.parameters:,} parameters), world {first.world} simulated"
    kinds = [kind for kind in _kinds.RUNTIME if any(r.runtime["by_kind"][kind] for r in results)]
    _report.table(
        f"The runtime's bytes at their peak, MB: {where}",
        ("engine", "runtime", "/ FSDP2's", "aim", *kinds, "when"),
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
        f"blocks checkpointed, {options.batch} x {options.context} tokens, float32",
    )
    others = (_kinds.OWN, _kinds.OWN_GRADIENTS, _kinds.REST)
    _report.table(
        f"All bytes at their peak, MB: {where}",
        ("engine", "total", "/ FSDP2's", "runtime", *others, "when"),
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
        "the aim is at most FSDP2's; the sum of the kinds and the profiler's own count are apart by at most "
        f"{100 * max(r.apart for r in results):.2g} % of the peak",
    )


def living_on_card(size: str, options: argparse.Namespace) -> list[CardResult]:
    """Bytes on a card, for each simulated world."""
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
            f"All bytes on the card at their peak, MB: {size} ({of_world[0].parameters:,} parameters), world {world} "
            "simulated",
            ("engine", "peak", "/ FSDP2's", "reserved", "/ FSDP2's", "between steps", "own", "our pool", "planned"),
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
            f"of torch's CUDA allocator; blocks checkpointed, {options.batch} x {options.context} tokens, float32",
        )
        results += of_world
    return results


def residing(size: str, options: argparse.Namespace) -> list[ResidentResult]:
    """How far ranks grow, on gloo or on a card; the launches of the engines take turns."""
    names = options.resident_engines
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.repeats):
        for name in names:
            grown = launched(options, options.ranks, part="resident", size=size, engine=name)["resident"]
            if grown < 0:
                print("memory.py: this system does not tell the resident memory of a process", file=sys.stderr)
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
        "what torch's CUDA allocator took from the card at most"
        if card
        else "VmHWM, less what the process held before it had a model"
    )
    _report.table(
        f"Growth of a rank: {size}, {'NCCL' if card else 'gloo'}, world {options.ranks}",
        ("engine", "resident at most, MB", "/ FSDP2's"),
        [
            (
                r.engine,
                r.resident_mb.shown(0),
                str(r.ratio or "-"),
            )
            for r in results
        ],
        f"{of_what}, over {options.steps} steps with SGD; blocks are not checkpointed; "
        f"median [quartiles] of {options.repeats} launches an engine, in turns",
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
    """Parts of the benchmark from a comma-separated option of the command line."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    return names


def parse() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _device.add_option(parser)
    add = parser.add_argument
    add("--parts", type=parts, default="live,resident", help="what to measure (default: %(default)s)")
    add("--sizes", type=sizes, default="150m,1b", help="of the live part (default: %(default)s)")
    add("--world", type=_report.integers, default="8,64", help="simulated worlds (default: %(default)s)")
    add("--engines", type=_engines.parse, default="ours,ours-none-ahead,fsdp2", help="default: %(default)s")
    add("--context", type=int, default=32, help="tokens of a sequence, live part (default: %(default)s)")
    add("--batch", type=int, default=1, help="sequences a rank (default: %(default)s)")
    add("--resident-sizes", type=sizes, default="150m", help="of the resident part (default: %(default)s)")
    add("--resident-engines", type=_engines.parse, default="ours,fsdp2,ddp", help="default: %(default)s")
    add("--ranks", type=int, default=2, help="processes of the resident part (default: %(default)s)")
    add("--steps", type=int, default=3, help="of the resident part (default: %(default)s)")
    add("--repeats", type=int, default=3, help="launches an engine, resident part (default: %(default)s)")
    add("--jobs", type=int, default=os.cpu_count(), help="launches at a time, live part (default: %(default)s)")
    add("--timeout", type=float, default=600.0, help="seconds for each launch (default: %(default)s)")
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
