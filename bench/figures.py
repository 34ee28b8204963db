"""Five figures of a training run side by side: torch's FSDP1, FSDP2 and DDP, and ours.

    python bench/figures.py --size 50m

Peak memory, start-up, tokens a second, the share of a step that communication takes, and the time to
write and read a checkpoint; the GPT of the tutorials in float32 with AdamW on gloo, or on NCCL with a
card for each rank. Every engine runs in processes of its own; the launches take turns and ratios are
formed within a turn.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import _device
import _engines
import _launch
import _report
from _models import SIZES

WORKER = Path(__file__).with_name("_figures_worker.py")
REFERENCE, COMPUTE = "fsdp2", "compute"


@dataclass(frozen=True)
class Figure:
    """What is measured, the digits to show, and whether a ratio to FSDP2's says something."""

    label: str
    digits: int
    compared: bool = True


FIGURES = {
    "peak_mb": Figure("peak memory, MB", 0),
    "start_s": Figure("start-up, s", 2),
    "tokens_s": Figure("tokens / s", 0),
    "communication": Figure("share of communication", 2, compared=False),
    "write_s": Figure("checkpoint written, s", 2),
    "read_s": Figure("checkpoint read, s", 2),
}


@dataclass(frozen=True)
class EngineResult:
    """The figures of an engine by name (see `FIGURES`), and the ratios to those of FSDP2.

    `communication` is (step - compute alone) / step: what the engine itself costs is in it.
    """

    size: str
    world: int
    engine: str
    figures: dict[str, _report.Spread]
    ratios: dict[str, _report.Spread]


def once(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One launch of every engine. Raises _launch.WorkerError."""
    found = {}
    for name in dict.fromkeys([COMPUTE, *options.engines]):
        settings = {key: getattr(options, key) for key in ("size", "batch", "steps", "device")} | {"engine": name}
        text = _launch.launch(
            WORKER,
            json.dumps(settings),
            world=options.world,
            timeout=options.timeout,
            tuned=options.malloc == "tuned",
            device=options.device,
        )
        found[name] = json.loads(text)
    compute = found.pop(COMPUTE)["step_s"]
    tokens = options.world * options.batch * SIZES[options.size].context
    return {name: _figures(raw, compute, tokens) for name, raw in found.items()}


def _figures(raw: dict[str, float], compute_s: float, tokens: int) -> dict[str, float]:
    figures = {key: raw[key] for key in ("start_s", "write_s", "read_s")}
    figures["tokens_s"] = tokens / raw["step_s"]
    figures["communication"] = (raw["step_s"] - compute_s) / raw["step_s"]
    if raw["peak"] is not None:
        figures["peak_mb"] = raw["peak"] / 1e6
    return {key: figures[key] for key in FIGURES if key in figures}


def evaluate(turns: list[dict[str, dict[str, float]]], options: argparse.Namespace) -> list[EngineResult]:
    """Medians and quartiles of all turns."""

    def ratio(name: str, key: str) -> _report.Spread:
        return _report.Spread.of([turn[name][key] / turn[REFERENCE][key] for turn in turns])

    compared = [key for key in turns[0][options.engines[0]] if FIGURES[key].compared and REFERENCE in options.engines]
    return [
        EngineResult(
            size=options.size,
            world=options.world,
            engine=name,
            figures={key: _report.Spread.of([turn[name][key] for turn in turns]) for key in turns[0][name]},
            ratios={key: ratio(name, key) for key in compared},
        )
        for name in options.engines
    ]


def show(results: list[EngineResult], options: argparse.Namespace) -> None:
    """Prints the figures and the ratios."""

    def text(spread: _report.Spread, digits: int) -> str:
        return f"{spread.median:.{digits}f} [{spread.low:.{digits}f}, {spread.high:.{digits}f}]"

    joined = "gloo" if options.device == _device.CPU else "NCCL"
    where = f"{options.size}, {joined}, world {options.world}"
    _report.table(
        f"Figures of a training run: {where}",
        ("engine", *(FIGURES[key].label for key in results[0].figures)),
        [(r.engine, *(text(spread, FIGURES[key].digits) for key, spread in r.figures.items())) for r in results],
        f"median [quartiles] of {options.repeats} launches an engine, in turns; {options.steps} steps each with AdamW; "
        f"communication: (step - compute alone) / step; malloc: {options.malloc}",
    )
    if results[0].ratios:
        _report.table(
            f"The same over FSDP2's: {where}",
            ("engine", *(FIGURES[key].label.split(",")[0] for key in results[0].ratios)),
            [(r.engine, *map(str, r.ratios.values())) for r in results],
            "ratios within a turn; of tokens a second more is better, of all else less",
        )


def parse() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _device.add_option(parser)
    add = parser.add_argument
    add("--size", choices=SIZES, default="50m", help="of the model (default: %(default)s)")
    add("--engines", type=_engines.parse, default="ours,fsdp2,fsdp1,ddp", help="default: %(default)s")
    add("--world", type=int, default=2, help="ranks (default: %(default)s)")
    add("--batch", type=int, default=1, help="sequences a rank (default: %(default)s)")
    add("--steps", type=int, default=6, help="measured steps of a launch (default: %(default)s)")
    add("--repeats", type=int, default=3, help="launches an engine (default: %(default)s)")
    add("--malloc", choices=("default", "tuned"), default="default", help="tuned: glibc keeps pages")
    add("--timeout", type=float, default=600.0, help="seconds for each launch (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    if _device.too_few(options.device, options.world):
        options.world = _device.cards()
        print(f"figures.py: a rank needs a card of its own: world {options.world}")
    return options


def main() -> int:
    options = parse()
    try:
        results = evaluate([once(options) for _ in range(options.repeats)], options)
    except _launch.WorkerError as error:
        print(f"figures.py: {error}", file=sys.stderr)
        return 1
    show(results, options)
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        _report.write_json(options.json, "figures", settings, results, options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
