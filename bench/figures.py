"""Compare a training run with one process, torch's DDP, FSDP1 and FSDP2, and ours, eager and compiled.

    python bench/figures.py --size 50m
    python bench/figures.py --parts regimes
    python bench/figures.py --parts losses --loss-size 3m

- *Run*: step time, tokens per second, start-up, peak memory, share of communication in a step, and time to save and
  load a checkpoint. The GPT of the tutorials in float32 with AdamW on gloo, or on NCCL with one GPU per rank. Every
  engine has its own processes. Launches take turns, and ratios are formed within a turn.
- *Kinds*: peak memory by type, with memory.py.
- *Regimes*: steps with few or many tokens per rank, on slow and fast links of a simulated network (`_regimes.py`).
- *Losses*: losses of the demo, compared with FSDP2 and with one process. The exit status is 1 if they differ by more
  than `--tolerance`.

All parts except *run* use the CPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _device
import _engines
import _launch
import _regimes
import _report
import memory
from _models import SIZES

WORKER, LOSSES_WORKER = (Path(__file__).with_name(f"_{name}_worker.py") for name in ("figures", "losses"))
REFERENCE, COMPUTE, SINGLE = "fsdp2", "compute", "single"
ENGINES = "single,ddp,fsdp1,fsdp2,fsdp2-blocks,ours,ours-blocks,ours-placed-whole"
WITH_KINDS = ("plain", "ddp", "fsdp2", "ours")  # engines for which memory.py can attribute memory
WITH_LOSSES = (SINGLE, "fsdp2", "fsdp2-blocks", "ours", "ours-blocks", "ours-placed-whole")
LOSS_STEPS_SHOWN = (1, 10, 100, 1000)


@dataclass(frozen=True)
class Figure:
    """A measured quantity: its label, the digits to print, and whether to print the ratio to FSDP2's."""

    label: str
    digits: int
    compared: bool = True


FIGURES = {
    "step_ms": Figure("step, ms", 1),
    "peak_mb": Figure("peak memory, MB", 0),
    "start_s": Figure("start-up, s", 2),
    "tokens_s": Figure("tokens/s", 0),
    "communication": Figure("share of communication", 2, compared=False),
    "write_s": Figure("save, s", 2),
    "read_s": Figure("load, s", 2),
}


@dataclass(frozen=True)
class EngineResult:
    """The figures of an engine by name (see `FIGURES`), and the ratios to those of FSDP2.

    `communication` is (step - compute alone) / step, and includes the overhead of the engine. Compiled engines are
    compared with compiled compute.
    """

    size: str
    world: int
    engine: str
    figures: dict[str, _report.Spread]
    ratios: dict[str, _report.Spread]


@dataclass(frozen=True)
class LossResult:
    """The losses of the demo with an engine, in nats per byte, one per step.

    Attributes:
        world: number of ranks, which divide the windows of a step among them.
        apart: for `fsdp2` and `single`, the largest relative difference to their losses, and its step.
        seconds: time of the training, including compilation.
    """

    size: str
    world: int
    engine: str
    losses: list[float]
    apart: dict[str, tuple[float, int]]
    seconds: float


Result = EngineResult | memory.LiveResult | _regimes.RegimeResult | LossResult


# ------------------------------------------------------------------------------- a run, on gloo or NCCL


def launched(
    script: Path, world: int, settings: dict[str, Any], options: argparse.Namespace, device: str
) -> dict[str, Any]:
    """Run a worker with these settings and return its result.

    Raises:
        _launch.WorkerError: a rank failed or reached the time limit.
    """
    text = _launch.launch(
        script,
        json.dumps(settings | {"backend": options.backend}),
        world=world,
        timeout=options.timeout,
        tuned=options.malloc == "tuned",
        device=device,
    )
    found: dict[str, Any] = json.loads(text)
    return found


def compute_of(engine: str) -> str:
    """Return the unsharded engine without communication that an engine is compared with."""
    return f"{COMPUTE}{_engines.WHOLE}" if engine.endswith((_engines.WHOLE, _engines.BLOCKS)) else COMPUTE


def once(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Launch every engine once.

    Raises:
        _launch.WorkerError: a rank failed or reached the time limit.
    """
    found = {}
    for name in dict.fromkeys([*map(compute_of, options.engines), *options.engines]):
        world = 1 if name == SINGLE else options.world  # the single process has the sequences of all ranks
        settings = {key: getattr(options, key) for key in ("size", "steps", "device")}
        settings |= {"engine": name, "batch": options.batch * options.world // world}
        found[name] = launched(WORKER, world, settings, options, options.device)
    tokens = options.world * options.batch * SIZES[options.size].context
    return {name: _figures(found[name], found[compute_of(name)]["step_s"], tokens) for name in options.engines}


def _figures(raw: dict[str, float], compute_s: float, tokens: int) -> dict[str, float]:
    figures = {key: raw[key] for key in ("start_s", "write_s", "read_s")}
    figures |= {"step_ms": 1e3 * raw["step_s"], "tokens_s": tokens / raw["step_s"]}
    figures["communication"] = (raw["step_s"] - compute_s) / raw["step_s"]
    if raw["peak"] is not None:
        figures["peak_mb"] = raw["peak"] / 1e6
    return {key: figures[key] for key in FIGURES if key in figures}


def evaluate(turns: list[dict[str, dict[str, float]]], options: argparse.Namespace) -> list[EngineResult]:
    """Return medians and quartiles over all turns."""

    def ratio(name: str, key: str) -> _report.Spread:
        return _report.Spread.of([turn[name][key] / turn[REFERENCE][key] for turn in turns])

    compared = [key for key in turns[0][options.engines[0]] if FIGURES[key].compared and REFERENCE in options.engines]
    results = []
    for name in options.engines:
        figures = {key: _report.Spread.of([turn[name][key] for turn in turns]) for key in turns[0][name]}
        if name == SINGLE:
            del figures["communication"]  # one process does not communicate
        ratios = {key: ratio(name, key) for key in compared}
        results.append(EngineResult(options.size, options.world, name, figures, ratios))
    return results


def show(results: list[EngineResult], options: argparse.Namespace) -> None:
    """Print the figures and the ratios."""
    joined = "gloo" if options.device == _device.CPU else "NCCL"
    where = f"{options.size}, {joined}, world {options.world}"
    keys = [key for key in FIGURES if any(key in r.figures for r in results)]
    _report.table(
        f"Figures of a training run: {where}",
        ("engine", *(FIGURES[key].label for key in keys)),
        [
            (r.engine, *(r.figures[key].shown(FIGURES[key].digits) if key in r.figures else "-" for key in keys))
            for r in results
        ],
        f"median [quartiles] of {options.repeats} launches per engine, in turns; {options.steps} AdamW steps each; "
        f"communication: (step - compute alone) / step; malloc: {options.malloc}; {SINGLE}: one process with one "
        "thread, like each rank, and the sequences of all ranks",
    )
    if results[0].ratios:
        _report.table(
            f"Ratios to FSDP2: {where}",
            ("engine", *(FIGURES[key].label.split(",")[0] for key in results[0].ratios)),
            [(r.engine, *map(str, r.ratios.values())) for r in results],
            "ratios within a turn; higher is better for tokens/s, lower for all others",
        )


def run(options: argparse.Namespace) -> list[EngineResult]:
    results = evaluate([once(options) for _ in range(options.repeats)], options)
    show(results, options)
    return results


# ------------------------------------------------------------------------------- kinds, regimes, losses


def kinds(options: argparse.Namespace) -> list[memory.LiveResult]:
    """Measure peaks by type, of a step without optimizer, with activation checkpointing."""
    settings = {key: getattr(options, key) for key in ("batch", "steps", "timeout")}
    settings |= {"engines": WITH_KINDS, "world": [options.kinds_world], "context": 32, "microbatches": 1}
    settings |= {"jobs": 1, "device": _device.CPU}
    return memory.living(options.size, argparse.Namespace(**settings))


def regimes(options: argparse.Namespace) -> list[_regimes.RegimeResult]:
    results = [*_regimes.regimes(options)]
    _regimes.show(results, options)
    return results


def losses(options: argparse.Namespace) -> list[LossResult]:
    """Train the demo with each engine.

    Raises:
        _launch.WorkerError: a rank failed or reached the time limit.
    """
    found = {}
    for name in options.loss_engines:
        world = 1 if name == SINGLE else options.world
        settings = {
            "engine": name,
            "size": options.loss_size,
            "steps": options.loss_steps,
            "windows": 2 * options.world,
        }
        found[name] = world, launched(LOSSES_WORKER, world, settings, options, _device.CPU)
        print(f"losses, {name}: {found[name][1]['seconds']:.0f} s", flush=True)
    curves = {name: raw["losses"] for name, (_, raw) in found.items()}
    beside = [name for name in (REFERENCE, SINGLE) if name in curves]
    results = [
        LossResult(
            size=options.loss_size,
            world=world,
            engine=name,
            losses=raw["losses"],
            apart={other: furthest(raw["losses"], curves[other]) for other in beside},
            seconds=raw["seconds"],
        )
        for name, (world, raw) in found.items()
    ]
    shown = [step for step in LOSS_STEPS_SHOWN if step <= options.loss_steps]
    where = f"{options.loss_size}, {options.loss_steps:,} steps, gloo, world {options.world}"
    _report.table(
        f"Losses of the demo, nats per byte: {where}",
        ("engine", *(f"step {step:,}" for step in shown), *(f"largest difference to {name}" for name in beside)),
        [
            (
                r.engine,
                *(f"{r.losses[step - 1]:.6f}" for step in shown),
                *(f"{apart:.1e}" + (f" at {step:,}" if apart else "") for apart, step in r.apart.values()),
            )
            for r in results
        ],
        f"all engines use the same {2 * options.world} windows per step; differences are relative; AdamW, learning "
        "rate and clipping of the demo, float32",
    )
    return results


def furthest(one: Sequence[float], other: Sequence[float]) -> tuple[float, int]:
    """Return the largest relative difference of two curves, and its step, counted from 1."""
    return max((abs(a - b) / b, step) for step, (a, b) in enumerate(zip(one, other, strict=True), start=1))


PARTS: dict[str, Callable[[argparse.Namespace], Sequence[Result]]] = {
    "run": run,
    "kinds": kinds,
    "regimes": regimes,
    "losses": losses,
}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _device.add_option(parser)
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--parts", type=_report.names(tuple(PARTS)), default=",".join(PARTS), help=f"what to measure {shown}")
    add("--size", choices=SIZES, default="50m", help=f"model size {shown}")
    add("--engines", type=_engines.parse, default=ENGINES, help=f"run: engines {shown}")
    add("--world", type=int, default=2, help=f"number of ranks {shown}")
    add("--batch", type=int, default=1, help=f"sequences per rank {shown}")
    add("--steps", type=int, default=6, help=f"measured steps per launch {shown}")
    add("--repeats", type=int, default=3, help=f"launches per engine {shown}")
    add("--malloc", choices=("default", "tuned"), default="default", help="tuned: glibc keeps free memory")
    add("--backend", default="inductor", help=f"backend of torch.compile {shown}")
    add("--kinds-world", type=int, default=8, help=f"kinds: simulated ranks {shown}")
    add("--tokens", type=_report.integers, default="512,2048,8192", help=f"regimes: tokens per rank {shown}")
    add("--gbps", type=_report.ratios, default="25,100,400", help=f"regimes: Gb/s per rank {shown}")
    add("--teraflops", type=float, default=400.0, help=f"regimes: TFLOP/s per rank {shown}")
    add("--width", type=int, default=4096, help=f"regimes: width of the model {shown}")
    add("--regime-world", type=int, default=8, help=f"regimes: simulated ranks {shown}")
    add(
        "--regime-engines",
        type=_report.names(_regimes.ENGINES),
        default=",".join(_regimes.ENGINES),
        help=f"regimes: engines {shown}",
    )
    add("--loss-size", choices=SIZES, default="tiny", help=f"losses: size of the demo's model {shown}")
    add("--loss-steps", type=int, default=1000, help=f"losses: number of steps {shown}")
    add(
        "--loss-engines",
        type=_report.names(WITH_LOSSES),
        default=",".join(WITH_LOSSES),
        help=f"losses: engines {shown}",
    )
    add("--tolerance", type=float, default=1e-3, help=f"losses: largest relative difference {shown}")
    add("--timeout", type=float, default=900.0, help=f"time limit per launch, in seconds {shown}")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    if _device.too_few(options.device, options.world):
        options.world = _device.cards()
        print(f"figures.py: each rank needs its own GPU, so world is {options.world}")
    return options


def main() -> int:
    options = parse()
    results: list[Result] = []
    try:
        for part in options.parts:
            results += PARTS[part](options)
    except _launch.WorkerError as error:
        print(f"figures.py: {error}", file=sys.stderr)
        return 1
    _report.save(options, "figures", results, options.device)
    apart = [difference for r in results if isinstance(r, LossResult) for difference, _ in r.apart.values()]
    if max(apart, default=0.0) > options.tolerance:
        print(f"figures.py: losses differ by {max(apart):.1e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
