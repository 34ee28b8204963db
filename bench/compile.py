"""Measure compiled models on gloo or NCCL, ours and torch's FSDP2: step time, time to compile, memory and copies.

    python bench/compile.py --sizes 10m,50m

- `steps`: step time as in `step.py`, all engines in the same processes and in turns. Ours is compiled as one graph
  (`torch.compile(model, fullgraph=True)`), by blocks, and eager. FSDP2 is compiled by blocks, and eager.
  `compute-whole` is the unsharded model, compiled as one graph.
- `compile`: time of the first forward and backward with empty caches.
- `warm`: the same in new processes, with caches that an earlier process filled.
- `memory`: memory, copies and page faults of a step, in processes that run one engine each. Live bytes are those of
  torch's CPU allocator with collectives that do nothing. Growth is that of resident memory with gloo. On a GPU, live
  bytes are those of torch's CUDA allocator.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _device
import _launch
import _report
import step

WORKER = Path(__file__).with_name("_compile_worker.py")
REFERENCE = "fsdp2-blocks"
PLAIN = "compute-whole"
EAGER = "ours"
WHOLE = "ours-whole"
PLACED = "ours-placed-whole"
SIDES = {
    WHOLE: "as in ours, in one graph for forward and one for backward",
    PLACED: "the same, started earlier and waited for later",
    "ours-blocks": "as in ours, with a graph per block",
    EAGER: "broadcasts, and all-to-all with a local sum, in hooks",
    REFERENCE: "gloo's all-gather and reduce-scatter, in hooks around a graph per block",
    "fsdp2": "the same, eager",
    PLAIN: "none, in one graph for forward and one for backward",
}


@dataclass(frozen=True)
class CompileResult:
    """Times until the first gradients with empty caches, in seconds, and ratios to the unsharded model by round.

    `wall_s` is that of the slowest rank, `cpu_s` that of all ranks. `a_layer` is the CPU time per additional layer,
    from the next smaller number of layers to this one.
    """

    size: str
    layers: int
    engine: str
    wall_s: _report.Spread
    cpu_s: _report.Spread
    wall_ratio: _report.Spread | None
    cpu_ratio: _report.Spread | None
    a_layer: float | None


@dataclass(frozen=True)
class RatioResult:
    """Step time over that of each eager engine, formed within each round."""

    size: str
    engine: str
    over: dict[str, _report.Spread]


@dataclass(frozen=True)
class WarmResult:
    """Times of the first forward and backward of a process in seconds, including the import of the compiler.

    `cold_s` is the time with empty caches, on the slowest rank. `warm_s` (slowest rank) and `cpu_s` (all ranks) are for
    later processes. `hits` and `misses` of AOTAutograd's cache are sums over all ranks of the last process.
    """

    size: str
    layers: int
    engine: str
    cold_s: float
    warm_s: _report.Spread
    cpu_s: _report.Spread
    hits: int
    misses: int


@dataclass(frozen=True)
class MemoryResult:
    """Memory, copies and page faults of a step on one rank; see `_compile_worker.memory`.

    Attributes:
        model: bytes of its parameters.
        live: peak of allocated bytes without the parameters.
        resident: growth of resident memory, in bytes.
        copied: bytes that operators copy in a step.
        faults: page faults of a step.
        over: these figures, by name, over those of `REFERENCE` and of `EAGER`, if both engines have them.
    """

    size: str
    engine: str
    model: int
    live: int
    resident: int | None
    copied: int | None
    faults: int | None
    over: dict[str, dict[str, float]]


def compiling(size: str, options: argparse.Namespace) -> list[CompileResult]:
    """Time the compilation of ours and of the unsharded model, by number of layers."""
    settings = {
        "size": size,
        "engines": [PLAIN, WHOLE, PLACED],
        "layers": options.layers,
        "compile_rounds": options.compile_rounds,
    }
    found = step.measure(WORKER, settings, options)["seconds"]
    wall, cpu = ({(name, depth): times[i] for name, depth, *times in found} for i in (0, 1))
    results: list[CompileResult] = []
    before: dict[str, tuple[int, float]] = {}
    for name, depth in cpu:
        spread, last, plain = _report.Spread.of(cpu[name, depth]), before.get(name), (PLAIN, depth)
        before[name] = depth, spread.median
        results.append(
            CompileResult(
                size=size,
                layers=depth,
                engine=name,
                wall_s=_report.Spread.of(wall[name, depth]),
                cpu_s=spread,
                wall_ratio=step.ratio(wall[name, depth], wall[plain]),
                cpu_ratio=step.ratio(cpu[name, depth], cpu[plain]),
                a_layer=(spread.median - last[1]) / (depth - last[0]) if last else None,
            )
        )
    _report.table(
        f"Time to compile: {size}, {step.where(options)}",
        ("engine", "layers", "first step, s", f"/ {PLAIN}", "CPU, s", f"CPU / {PLAIN}", "CPU s per added layer"),
        [
            (r.engine, *map(str, (r.layers, r.wall_s, r.wall_ratio, r.cpu_s, r.cpu_ratio)), _rounded(r.a_layer))
            for r in results
        ],
        f"first forward and backward, empty caches; {options.compile_rounds} rounds, in turns; CPU time of all ranks",
    )
    return results


def warming(size: str, options: argparse.Namespace) -> list[WarmResult]:
    """Time the first step in new processes with the caches of an earlier one."""
    engines = [PLAIN, WHOLE, PLACED]
    results: list[WarmResult] = []
    for depth in options.layers:
        with tempfile.TemporaryDirectory(prefix="composable_shard_bench_") as folder:

            def first(name: str, depth: int = depth, folder: str = folder) -> dict[str, Any]:
                return step.measure(WORKER, {"size": size, "first": name, "depth": depth, "cache": folder}, options)

            cold = {name: first(name)["wall"] for name in engines}
            rounds = [{name: first(name) for name in engines} for _ in range(options.compile_rounds)]
        for name in engines:
            wall, cpu = (_report.Spread.of([found[name][key] for found in rounds]) for key in ("wall", "cpu"))
            hits, misses = (int(rounds[-1][name][key]) for key in ("hits", "misses"))
            results.append(WarmResult(size, depth, name, cold[name], wall, cpu, hits, misses))
    _report.table(
        f"First step of a process: {size}, {step.where(options)}",
        ("engine", "layers", "cold, s", "warm, s", "warm, CPU s", "hits", "misses"),
        [
            (r.engine, str(r.layers), f"{r.cold_s:.2f}", *map(str, (r.warm_s, r.cpu_s, r.hits, r.misses)))
            for r in results
        ],
        f"first forward and backward; a new process per rank and figure, {options.compile_rounds} with warm caches, in "
        "turns; CPU time, and hits and misses of AOTAutograd's cache, of all ranks",
    )
    return results


def _rounded(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.3f}"


def remembering(size: str, options: argparse.Namespace) -> list[MemoryResult]:
    """Measure peak memory and copies of a step, each engine in its own processes."""
    found = {
        name: step.measure(WORKER, {"size": size, "engine": name}, options)
        for name in dict.fromkeys([REFERENCE, EAGER, *options.engines])
    }

    def over(name: str, other: str) -> dict[str, float]:
        ours, theirs = found[name], found[other]
        return {key: ours[key] / theirs[key] for key in theirs if key != "model" and theirs[key] and ours[key]}

    results = [
        MemoryResult(size, name, **found[name], over={other: over(name, other) for other in (REFERENCE, EAGER)})
        for name in options.engines
    ]
    show_memory(size, results, options)
    return results


def show_memory(size: str, results: list[MemoryResult], options: argparse.Namespace) -> None:
    """Print the tables of one size."""
    where = f"{size}, {step.where(options)}{'; activation checkpointing per block' if options.checkpoint else ''}"
    _report.table(
        f"Peak memory of a step: {where}",
        (
            "engine",
            "parameters, MB",
            "live without parameters, MB",
            f"/ {REFERENCE}",
            f"/ {EAGER}",
            "growth, MB",
            f"/ {REFERENCE}",
        ),
        [
            (
                r.engine,
                *(_megabytes(count) for count in (r.model, r.live)),
                *(_rounded(r.over[other].get("live")) for other in (REFERENCE, EAGER)),
                _megabytes(r.resident),
                _rounded(r.over[REFERENCE].get("resident")),
            )
            for r in results
        ],
        "of one rank; live: peak of allocated bytes, including gradients; growth: from resident memory between steps "
        "to its peak, including gloo's memory",
    )
    if all(r.copied is not None for r in results):
        _report.table(
            f"Copies and page faults of a step: {where}",
            ("engine", "copied, MB", f"/ {EAGER}", "page faults"),
            [(r.engine, _megabytes(r.copied), _rounded(r.over[EAGER].get("copied")), str(r.faults)) for r in results],
            "of one rank; copied: bytes written by operators that only copy; page faults: minor faults",
        )


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f}"


def stepping(size: str, options: argparse.Namespace) -> list[Any]:
    """Measure step times as in `step.py`, and ratios to the eager engines."""
    found = step.measure(step.WORKER, {"size": size, "engines": options.engines}, options)
    results = step.evaluate(size, found, REFERENCE, PLAIN)
    sides = "".join(f"\n{name}: {SIDES[name]}" for name in options.engines if name in SIDES)
    on_gloo = options.world == 2 and options.device == _device.CPU and not options.echo
    step.show(results, options, REFERENCE, f"\nCollectives{sides}" if on_gloo else "")
    return [*results, *over_eager(size, found["wall_s"], options)]


def over_eager(size: str, wall: dict[str, list[float]], options: argparse.Namespace) -> list[RatioResult]:
    """Return step times over those of the eager engines."""
    eager = [name for name in (EAGER, "fsdp2") if name in wall]
    results = [
        RatioResult(size, engine, {name: spread for name in eager if (spread := step.ratio(wall[engine], wall[name]))})
        for engine in wall
    ]
    if eager:
        rows = [(r.engine, *(str(r.over[name]) for name in eager)) for r in results]
        columns = ("engine", *(f"/ {name}" for name in eager))
        _report.table(
            f"Step time over eager engines: {size}, {step.where(options)}", columns, rows, "ratios within a round"
        )
    return results


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = step.options_of_steps(__doc__, ",".join(SIDES))
    parser.add_argument(
        "--layers", type=_report.integers, default="2,4,8", help="numbers of layers to compile (default: %(default)s)"
    )
    parser.add_argument("--compile-rounds", type=int, default=3, help="rounds of compilation (default: %(default)s)")
    parser.add_argument("--parts", default="steps,compile,warm,memory", help="what to measure (default: %(default)s)")
    return step.parsed(parser)


def main() -> int:
    options = parse()
    parts = {"steps": stepping, "compile": compiling, "warm": warming, "memory": remembering}
    results: list[Any] = []
    for size in options.sizes:
        for part in options.parts.split(","):
            try:
                results += parts[part](size, options)
            except _launch.WorkerError as error:
                print(f"compile.py: {size}, {part}: {error}", file=sys.stderr)
                return 1
    step.write(options, "compile", results)
    worst = [r.loss_difference for r in results if isinstance(r, step.EngineResult)]
    return int(max(worst, default=0.0) > options.tolerance)


if __name__ == "__main__":
    sys.exit(main())
