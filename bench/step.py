"""Step time of a GPT on gloo or NCCL: ours, torch's FSDP2, FSDP1, DDP, and compute alone.

    python bench/step.py --sizes 10m,50m
    python bench/step.py --runs 3                                        # fresh processes each time
    python bench/step.py --device cuda --sizes 150m,1b --dtype bfloat16  # one card: its echo plays the other ranks

All engines live in the same processes, each with a model of its own, and take turns in an order
drawn anew in every round; ratios are formed within a round. A step is zero_grad, forward, loss,
backward and plain SGD (`--optimizer none` leaves SGD out), on one sequence of 256 bytes a rank in
float32, one thread a rank. `compute` is the unsharded model stepping by itself, `collectives` are
the gathers and reductions of FSDP2 by themselves, and `fsdp2-again` is a second FSDP2: the control.
With fewer cards than ranks, or `--echo`, one process plays all ranks (`_echo.py`).
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
    """Milliseconds a step, and per-round ratios to a reference: torch's FSDP2.

    `wall` is the slowest rank's, `cpu` the sum of all ranks' threads; `beyond` is
    (engine - compute) / (reference - compute), which the time of the model itself cannot hide. Spreads are the median
    and the quartiles of the rounds; with `runs`, the median of their medians and its range.
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
    """Per-round (ours - base) / (theirs - base); None where there is nothing to divide by."""
    if theirs is None:
        return None
    base = base or [0.0] * len(ours)
    rounds = [(a - c) / (b - c) for a, b, c in zip(ours, theirs, base, strict=True) if b > c]
    return _report.Spread.of(rounds) if rounds else None


def evaluate(
    size: str, found: dict[str, Any], reference: str = REFERENCE, compute: str = "compute"
) -> list[EngineResult]:
    """Turns the seconds that the workers measured into spreads and ratios."""
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
    """What fresh runs of one size have in common, engine by engine."""
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
    """Prints one size's table and the line about the losses."""
    runs = results[0].runs
    what = f"median [range] of {len(runs)} fresh runs of" if runs else "median [quartiles] of"
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
            f"CPU beyond / {reference}'s",
        ),
        rows,
        f"{what} {options.rounds} interleaved rounds; "
        f"optimizer in the step: {options.optimizer}; malloc: {options.malloc}"
        f"{'; every block is a checkpoint' if options.checkpoint else ''}{notes}",
    )
    agree = first.loss_difference <= options.tolerance
    print(
        f"losses of {', '.join(r.engine for r in results if compared(r.engine, options.echo))} "
        f"{'agree' if agree else 'DIFFER'} over all steps: "
        f"relative difference at most {first.loss_difference:.1e}"
    )


def compared(engine: str, echo: bool) -> bool:
    """Whether the engine's losses must be those of the others: of an echo only those that cut parameters alike."""
    return engine.startswith(("ours", "fsdp2")) if echo else engine != _communication.NAME


def sizes(text: str) -> list[str]:
    """Names of models from a comma-separated option of the command line."""
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
    """A command line with what every benchmark of steps takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        type=sizes,
        default="10m,50m",
        help=f"of {', '.join(SIZES)} (default: %(default)s)",
    )
    _device.add_option(parser)
    parser.add_argument("--world", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--echo", action="store_true", help="one process plays all ranks; so it is with too few cards")
    parser.add_argument("--dtype", choices=_device.DTYPES, default="float32", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank (default: %(default)s)")
    parser.add_argument("--engines", type=parse, default=engines, help="default: %(default)s")
    parser.add_argument("--optimizer", choices=("sgd", "none"), default="sgd", help="default: %(default)s")
    parser.add_argument("--checkpoint", action="store_true", help="every block is an activation checkpoint")
    parser.add_argument("--malloc", choices=("default", "tuned"), default="default", help="tuned: glibc keeps pages")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="of the losses, relative (default: 1e-4, with bfloat16 2e-2)",
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each size (default: %(default)s)")
    parser.add_argument("--backend", default="inductor", help="of engines that are compiled (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with what follows from others."""
    options = parser.parse_args()
    options.echo = options.echo or _device.too_few(options.device, options.world)
    if options.tolerance is None:
        options.tolerance = TOLERANCES[options.dtype]
    return options


def where(options: argparse.Namespace) -> str:
    """The device, the ranks and what joins them."""
    joined = "NCCL" if options.device == _device.CUDA else "gloo"
    return f"{joined}, world {options.world}{', one process and its echo' if options.echo else ''}"


def measure(worker: Path, settings: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What the ranks that run `worker` found. Raises _launch.WorkerError."""
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
    """The figures as JSON, if that was asked for."""
    if options.json:
        chosen = {key: value for key, value in vars(options).items() if key != "json"}
        _report.write_json(options.json, name, chosen, results, options.device)


def main() -> int:
    parser = options_of_steps(__doc__, "ours,fsdp2,fsdp2-again,fsdp1,ddp,compute,collectives", engines_or_collectives)
    parser.add_argument("--aa", action="store_true", help="add a second FSDP2, if --engines leaves it out: the control")
    parser.add_argument("--runs", type=int, default=1, help="in fresh processes each (default: %(default)s)")
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
