"""Measure fine-tuning of adapters over a frozen base in bfloat16, 4 bits (NF4) and 8 bits, with ours, FSDP2 and DDP.

    python bench/qlora.py --size 10m

Needs bitsandbytes. The model is the GPT of the tutorials with an adapter of rank 8 for every linear layer of its
blocks, on gloo. Figures are:

- peak memory, and tensors that a rank keeps between steps
- start-up, in which blocks are created, quantized and sharded one after the other
- tokens per second, and share of communication in a step
- bytes that a rank receives per step
- time to save and load the adapters with their optimizer state

Every engine has its own processes. Launches take turns, and ratios are formed within a turn.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import _launch
import _report
from _models import SIZES

WORKER = Path(__file__).with_name("_qlora_worker.py")
BASES, ENGINES = ("bf16", "nf4", "int8"), ("ours", "fsdp2", "ddp")
REFERENCE, COMPUTE = "fsdp2", "compute"
FIGURES = {  # the label, and the digits to print
    "peak_mb": ("peak, MB", 1),
    "kept_mb": ("between steps, MB", 1),
    "start_s": ("start-up, s", 2),
    "tokens_s": ("tokens/s", 0),
    "communication": ("share of communication", 2),
    "received_mb": ("received per step, MB", 2),
    "write_s": ("save, s", 3),
    "read_s": ("load, s", 3),
}


@dataclass(frozen=True)
class EngineResult:
    """The figures of an engine with one base by name (see `FIGURES`), and ratios to FSDP2 with the same base.

    Attributes:
        error: its error, if it failed. There are no figures then.
        loss: mean loss of all ranks after the first steps, for comparison of the engines.
    """

    size: str
    world: int
    base: str
    engine: str
    figures: dict[str, _report.Spread]
    ratios: dict[str, _report.Spread]
    loss: float | None
    error: str


def once(options: argparse.Namespace) -> dict[tuple[str, str], dict[str, float]]:
    """Launch every engine once with every base.

    Raises:
        _launch.WorkerError: a rank failed or reached the time limit.
    """
    raw = {}
    for base in options.bases:
        for engine in (COMPUTE, *options.engines):
            settings = {key: getattr(options, key) for key in ("size", "batch", "steps")}
            text = json.dumps(settings | {"base": base, "engine": engine})
            how = {"world": options.world, "timeout": options.timeout, "tuned": options.malloc == "tuned"}
            raw[base, engine] = json.loads(_launch.launch(WORKER, text, **how))
    tokens = options.world * options.batch * SIZES[options.size].context
    return {
        (base, engine): values if "error" in values else _figures(values, raw[base, COMPUTE]["step_s"], tokens)
        for (base, engine), values in raw.items()
        if engine != COMPUTE
    }


def _figures(raw: dict[str, float], compute_s: float, tokens: int) -> dict[str, float]:
    megabytes = {f"{key}_mb": raw[key] / 1e6 for key in ("peak", "kept", "received")}
    speed = {"tokens_s": tokens / raw["step_s"], "communication": (raw["step_s"] - compute_s) / raw["step_s"]}
    every = raw | megabytes | speed
    return {key: every[key] for key in (*FIGURES, "losses")}


def evaluate(turns: list[dict[tuple[str, str], dict[str, float]]], options: argparse.Namespace) -> list[EngineResult]:
    """Return medians and quartiles over all turns."""
    return [_result(turns, options, base, engine) for base in options.bases for engine in options.engines]


def _result(
    turns: list[dict[tuple[str, str], dict[str, float]]], options: argparse.Namespace, base: str, engine: str
) -> EngineResult:
    own, other = [turn[base, engine] for turn in turns], [turn.get((base, REFERENCE), {"error": ""}) for turn in turns]
    error = next((str(each["error"]) for each in own if "error" in each), "")
    figures, ratios = {}, {}
    if not error:
        figures = {key: _report.Spread.of([each[key] for each in own]) for key in FIGURES}
    if not error and not any("error" in each for each in other):
        pairs = list(zip(own, other, strict=True))
        compared = [key for key in FIGURES if key != "communication"]
        ratios = {key: _report.Spread.of([mine[key] / theirs[key] for mine, theirs in pairs]) for key in compared}
    loss = None if error else own[0]["losses"][-1]  # type: ignore[index]
    return EngineResult(options.size, options.world, base, engine, figures, ratios, loss, error)


def show(results: list[EngineResult], options: argparse.Namespace) -> None:
    """Print the figures and the ratios."""
    where = f"{options.size}, gloo, world {options.world}"
    rows = [
        (r.base, r.engine, *(r.figures[key].shown(FIGURES[key][1]) for key in FIGURES), f"{r.loss:.5f}")
        for r in results
        if not r.error
    ]
    _report.table(
        f"Adapters over a frozen base: {where}",
        ("base", "engine", *(label for label, _ in FIGURES.values()), "loss"),
        rows,
        f"median [quartiles] of {options.repeats} launches per engine, in turns; {options.steps} AdamW steps each; "
        f"communication: (step - compute alone) / step; malloc: {options.malloc}",
    )
    compared = [r for r in results if r.ratios]
    if compared:
        _report.table(
            f"Ratios to FSDP2: {where}",
            ("base", "engine", *(FIGURES[key][0].split(",")[0] for key in compared[0].ratios)),
            [(r.base, r.engine, *map(str, r.ratios.values())) for r in compared],
            "ratios within a turn; higher is better for tokens/s, lower for all others",
        )
    for r in results:
        if r.error:
            print(f"{r.base}, {r.engine}: {r.error}")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="10m", help="model size (default: %(default)s)")
    add("--bases", type=_report.names(BASES), default=",".join(BASES), help="frozen bases (default: %(default)s)")
    add("--engines", type=_report.names(ENGINES), default=",".join(ENGINES), help="engines (default: %(default)s)")
    add("--world", type=int, default=2, help="number of ranks (default: %(default)s)")
    add("--batch", type=int, default=1, help="sequences per rank (default: %(default)s)")
    add("--steps", type=int, default=4, help="measured steps per launch (default: %(default)s)")
    add("--repeats", type=int, default=3, help="launches per engine (default: %(default)s)")
    add("--malloc", choices=("default", "tuned"), default="default", help="tuned: glibc keeps free memory")
    add("--timeout", type=float, default=600.0, help="time limit per launch, in seconds (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args()


def main() -> int:
    options = parse()
    try:
        results = evaluate([once(options) for _ in range(options.repeats)], options)
    except _launch.WorkerError as error:
        print(f"qlora.py: {error}", file=sys.stderr)
        return 1
    show(results, options)
    _report.save(options, "qlora", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
