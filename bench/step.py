"""Measure the step time of a GPT on gloo or NCCL: ours, torch's FSDP2, FSDP1, DDP, and compute alone.

    python bench/step.py --sizes 10m,50m
    python bench/step.py --runs 3                                        # three runs in new processes
    python bench/step.py --device cuda --sizes 150m,1b --dtype bfloat16  # on one GPU, one process plays all ranks

All engines are in the same processes, each with its own model, and take turns in a new random order in each round.
Ratios are formed within a round. A step is zero_grad, forward, loss, backward and SGD (none with `--optimizer none`),
with one sequence of 256 bytes and one thread per rank, in float32. Besides the engines there are:

- `compute`: the unsharded model
- `collectives`: FSDP2's gathers and reductions alone
- `fsdp2-again`: FSDP2 a second time, the control

With fewer GPUs than ranks, or with `--echo`, one process plays all ranks (`_echo.py`).
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import _communication
import _device
import _engines
import _launch
import _report
from _models import SIZES

WORKER = Path(__file__).with_name("_step_worker.py")
REFERENCE = "fsdp2"
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True)
class EngineResult:
    """Milliseconds per step, and ratios to a reference (FSDP2), formed within each round.

    `wall` is wall time of the slowest rank, `cpu` is CPU time of all threads of all ranks. `beyond` is
    (engine - compute) / (reference - compute), which excludes the time of the model itself. Spreads are median and
    quartiles of the rounds; with `runs`, the median and range of their medians.
    """

    size: str
    parameters: int
    engine: str
    wall_ms: _report.Spread
    cpu_ms: _report.Spread
    wall_ratio: _report.Spread | None
    cpu_ratio: _report.Spread | None
    wall_beyond: _report.Spread | None
    cpu_beyond: _report.Spread | None
    loss_difference: float
    runs: list["EngineResult"] = field(default_factory=list)


SPREADS = ("wall_ms", "cpu_ms", "wall_ratio", "cpu_ratio", "wall_beyond", "cpu_beyond")


def ratio(ours: list[float], theirs: list[float] | None, base: list[float] | None = None) -> _report.Spread | None:
    """Return (ours - base) / (theirs - base) by round; None without a reference, or if no round has theirs > base."""
    if theirs is None:
        return None
    base = base or [0.0] * len(ours)
    rounds = [(a - c) / (b - c) for a, b, c in zip(ours, theirs, base, strict=True) if b > c]
    return _report.Spread.of(rounds) if rounds else None


def evaluate(
    size: str, found: dict[str, Any], reference: str = REFERENCE, compute: str = "compute"
) -> list[EngineResult]:
    """Compute spreads and ratios from the times that the workers measured."""
    wall, cpu = found["wall_s"], found["cpu_s"]

    def beyond(times: dict[str, list[float]], engine: str) -> _report.Spread | None:
        base = times.get(compute)
        return (
            ratio(times[engine], times.get(reference), base)
            if base and engine not in (compute, _communication.NAME)
            else None
        )

    return [
        EngineResult(
            size=size,
            parameters=found["parameters"],
            engine=engine,
            wall_ms=_report.Spread.of([1e3 * s for s in wall[engine]]),
            cpu_ms=_report.Spread.of([1e3 * s for s in cpu[engine]]),
            wall_ratio=ratio(wall[engine], wall.get(reference)),
            cpu_ratio=ratio(cpu[engine], cpu.get(reference)),
            wall_beyond=beyond(wall, engine),
            cpu_beyond=beyond(cpu, engine),
            loss_difference=found["loss_difference"],
        )
        for engine in wall
    ]


def over_runs(runs: list[list[EngineResult]]) -> list[EngineResult]:
    """Combine several runs of one size, by engine."""
    if len(runs) == 1:
        return runs[0]
    found = []
    for of_engine in zip(*runs, strict=True):
        medians = {key: [getattr(r, key).median for r in of_engine if getattr(r, key)] for key in SPREADS}
        spreads = {key: _report.Spread.range_of(values) if values else None for key, values in medians.items()}
        worst = max(r.loss_difference for r in of_engine)
        found.append(replace(of_engine[0], **spreads, loss_difference=worst, runs=[*of_engine]))
    return found


def show(results: list[EngineResult], options: argparse.Namespace, reference: str = "FSDP2", notes: str = "") -> None:
    """Print the table of one size, and a line about the losses."""
    runs = results[0].runs
    what = f"median [range] of {len(runs)} runs in new processes, each of" if runs else "median [quartiles] of"
    rows = [
        (
            r.engine,
            f"{r.wall_ms.median:.1f} [{r.wall_ms.low:.1f}, {r.wall_ms.high:.1f}]",
            *(str(s) if s else "-" for s in (r.wall_ratio, r.wall_beyond, r.cpu_ratio, r.cpu_beyond)),
        )
        for r in results
    ]
    first = results[0]
    _report.table(
        f"Step time: {first.size} ({first.parameters:,} parameters, {options.dtype}), {where(options)}",
        (
            "engine",
            "step, ms",
            f"/ {reference}",
            f"beyond compute / {reference}'s",
            f"CPU / {reference}",
            f"CPU beyond compute / {reference}'s",
        ),
        rows,
        f"{what} {options.rounds} interleaved rounds; "
        f"optimizer in the step: {options.optimizer}; malloc: {options.malloc}"
        f"{'; activation checkpointing per block' if options.checkpoint else ''}{notes}",
    )
    agree = first.loss_difference <= options.tolerance
    print(
        f"losses of {', '.join(r.engine for r in results if compared(r.engine, options.echo))} "
        f"{'agree' if agree else 'DIFFER'} over all steps: "
        f"largest relative difference {first.loss_difference:.1e}"
    )


def compared(engine: str, echo: bool) -> bool:
    """Return whether an engine's losses are compared: with an echo only engines that shard parameters the same way."""
    return engine.startswith(("ours", "fsdp2")) if echo else engine != _communication.NAME


def sizes(text: str) -> list[str]:
    """Parse a comma-separated list of model sizes."""
    names = text.split(",")
    unknown = [name for name in names if name not in SIZES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown size {', '.join(unknown)}; known: {', '.join(SIZES)}")
    return names


def engines_or_collectives(text: str) -> list[str]:
    return _engines.parse(text, [_communication.NAME])


def options_of_steps(
    description: str | None, engines: str, parse: Callable[[str], list[str]] = _engines.parse
) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks of steps."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        type=sizes,
        default="10m,50m",
        help=f"model sizes: {', '.join(SIZES)} (default: %(default)s)",
    )
    _device.add_option(parser)
    parser.add_argument("--world", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--echo", action="store_true", help="one process plays all ranks; implied by too few GPUs")
    parser.add_argument("--dtype", choices=_device.DTYPES, default="float32", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank (default: %(default)s)")
    parser.add_argument("--engines", type=parse, default=engines, help="engines (default: %(default)s)")
    parser.add_argument("--optimizer", choices=("sgd", "none"), default="sgd", help="(default: %(default)s)")
    parser.add_argument("--checkpoint", action="store_true", help="use activation checkpointing per block")
    parser.add_argument(
        "--malloc", choices=("default", "tuned"), default="default", help="tuned: glibc keeps free memory"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest relative difference of losses (default: 1e-4, with bfloat16 2e-2)",
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="time limit per size (default: %(default)s s)")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and fill in options that depend on others."""
    options = parser.parse_args()
    options.echo = options.echo or _device.too_few(options.device, options.world)
    if options.tolerance is None:
        options.tolerance = TOLERANCES[options.dtype]
    return options


def where(options: argparse.Namespace) -> str:
    """Describe the backend and the ranks."""
    joined = "NCCL" if options.device == _device.CUDA else "gloo"
    return f"{joined}, world {options.world}{', played by one process' if options.echo else ''}"


def measure(worker: Path, settings: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run `worker` on all ranks and return its result.

    Raises:
        _launch.WorkerError: a rank failed or reached the time limit.
    """
    kept = ("rounds", "batch", "optimizer", "backend", "device", "dtype", "checkpoint")
    common = {key: getattr(options, key) for key in kept}
    text = _launch.launch(
        worker,
        json.dumps(common | settings),
        world=options.world,
        timeout=options.timeout,
        tuned=options.malloc == "tuned",
        device=options.device,
        echo=options.echo,
    )
    found: dict[str, Any] = json.loads(text)
    return found


def write(options: argparse.Namespace, name: str, results: list[Any]) -> None:
    """Write the figures to the file of `--json`, if given."""
    if options.json:
        chosen = {key: value for key, value in vars(options).items() if key != "json"}
        _report.write_json(options.json, name, chosen, results, options.device)


def main() -> int:
    parser = options_of_steps(__doc__, "ours,fsdp2,fsdp2-again,fsdp1,ddp,compute,collectives", engines_or_collectives)
    parser.add_argument("--aa", action="store_true", help="add fsdp2-again, the control, to --engines")
    parser.add_argument("--runs", type=int, default=1, help="runs in new processes (default: %(default)s)")
    options = parsed(parser)
    engines = list(dict.fromkeys(options.engines + (["fsdp2-again"] if options.aa else [])))
    results: list[EngineResult] = []
    for size in options.sizes:
        runs: list[list[EngineResult]] = []
        for _ in range(options.runs):
            try:
                runs.append(evaluate(size, measure(WORKER, {"size": size, "engines": engines}, options)))
            except _launch.WorkerError as error:
                print(f"step.py: {size}: {error}", file=sys.stderr)
                return 1
            show(runs[-1], options)
        if options.runs > 1:
            show(over_runs(runs), options)
        results += over_runs(runs)
    write(options, "step", results)
    return int(any(r.loss_difference > options.tolerance for r in results))


if __name__ == "__main__":
    sys.exit(main())
