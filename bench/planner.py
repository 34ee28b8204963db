"""Compare the planner's predictions of memory and time with measurements.

    python bench/planner.py                                   # all parts, minutes
    python bench/planner.py --parts published

- `traces`: memory of every strategy at world 8 to 512, compared with sharded models under fake tensors, where all
  storages are counted.
- `gloo`: memory and time of real steps on two ranks, compared with predictions for this machine, which `measure-links`
  measures in the same run.
- `published`: published measurements of eager and compiled blocks, in bfloat16, float8 and MXFP8, compared with
  predictions from data sheets. No constant is fitted to them. The assumptions are printed.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _launch
import _report
from composable_shard.planner import KNOWN, NAMED, Layout, Machine, Shape, Strategy
from composable_shard.planner.advise import Planner
from composable_shard.planner.precision import PRECISIONS, precision_of
from composable_shard.planner.rehearsal import rehearse_source
from composable_shard.planner.sources import source_of

PARTS = ("traces", "gloo", "published")
CHECKPOINTING = ("none", "selective", "full")
TRACED = Shape(layers=6, width=384, heads=6, vocabulary=1024, sequence=256, key_value_heads=2)
GLOO = Shape(layers=6, width=384, heads=6, vocabulary=1024, sequence=256, key_value_heads=2)
SEQUENCES = 4


@dataclass(frozen=True)
class Row:
    """A prediction and a measurement, in bytes or seconds. `within` is the targeted relative error."""

    part: str
    what: str
    strategy: str
    quantity: str
    predicted: float
    measured: float
    within: float

    @property
    def apart(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def strategies(world: int) -> Iterator[Strategy]:
    """Yield all strategies, layouts and activation checkpointing settings except offload and tensor parallelism."""
    layouts = [("ddp", Layout(1, 1, world)), *((f"zero{stage}", Layout(1, world)) for stage in (1, 2, 3))]
    layouts += [("hsdp", Layout(1, world // 2, 2))] if world > 2 else []
    for name, layout in layouts:
        for checkpointing in CHECKPOINTING:
            yield Strategy(name, layout, checkpointing)  # type: ignore[arg-type]


def traces(worlds: Sequence[int]) -> Iterator[Row]:
    source, machine = source_of(TRACED), dataclasses.replace(KNOWN["h100"], backend="fake")
    for precision in ("float32", "bfloat16-mixed"):
        planner = Planner(source, PRECISIONS[precision], SEQUENCES)
        for world in worlds:
            for strategy in strategies(world):
                predicted = planner.estimate(strategy, machine).memory.peak.total
                measured = rehearse_source(source, strategy, PRECISIONS[precision], SEQUENCES).peak.total
                yield Row("traces", f"world {world}, {precision}", str(strategy), "bytes", predicted, measured, 0.05)


def gloo(rounds: int, timeout: float) -> Iterator[Row]:
    """Compare predictions with real steps on two ranks.

    The machine is measured before and after each strategy, because its speed varies. The prediction of time is the mean
    of the predictions for both measurements.
    """
    plan = [dataclasses.asdict(each) for each in strategies(2)]
    settings = {"shape": dataclasses.asdict(GLOO), "sequences": SEQUENCES, "strategies": plan, "rounds": rounds}
    worker = Path(__file__).with_name("_planner_worker.py")
    answer = json.loads(_launch.launch(worker, json.dumps(settings), world=2, timeout=timeout, tuned=True))
    machines = [Machine.from_json(each) for each in answer["machines"]]
    planner = Planner(source_of(GLOO), PRECISIONS["float32"], SEQUENCES)
    around = itertools.pairwise(machines)
    for strategy, found, both in zip(strategies(2), answer["strategies"], around, strict=True):
        estimates = [planner.estimate(strategy, machine) for machine in both]
        total = estimates[0].memory.peak.total
        seconds = statistics.fmean(estimate.time.seconds for estimate in estimates)
        yield Row("gloo", "world 2, float32", str(strategy), "bytes", total, found["bytes"], 0.05)
        yield Row("gloo", "world 2, float32", str(strategy), "seconds", seconds, found["seconds"], 0.25)


@dataclass(frozen=True)
class Published:
    """A published measurement of torchtitan: tokens per second and device, and GiB reserved by the allocator."""

    what: str
    shape: str
    machine: str
    strategy: Strategy
    sequences: int
    tokens_per_second: float
    memory: float | None = None
    linear_format: str | None = None
    compile_blocks: bool = True

    @property
    def technique(self) -> str:
        """The strategy, and how blocks run."""
        blocks = "compiled" if self.compile_blocks else "eager"
        return ", ".join([str(self.strategy), blocks, *([self.linear_format] if self.linear_format else [])])


TENSORWISE, ROWWISE, MXFP8 = "float8_tensorwise", "float8_rowwise", "mxfp8"


def of_8b(
    machine: str, devices: int, sequences: int, rows: Sequence[tuple[str | None, bool, float, float | None]]
) -> list[Published]:
    """Rows for Llama 3.1 8B: format of linear layers, whether blocks are compiled, tokens per second, and memory."""
    strategy = Strategy("zero3", Layout(1, devices), "selective")
    what = f"8B, {devices} {machine}, batch {sequences}"
    return [
        Published(what, "llama3-8b", machine, strategy, sequences, speed, memory, form, compiled)
        for form, compiled, speed, memory in rows
    ]


# Llama 3.1 in torchtitan, batch 2: https://arxiv.org/abs/2410.06511, and in its repository
# benchmarks/llama3_h100_202412_torchtitan.md and llama3-8b_h200_202506_trainy-whitefiber.md (its memory is of another
# checkpointing default). Batch 1: torchao's docs/source/workflows/training.md and prototype/mx_formats/README.md.
# 70B without asynchronous tensor parallelism: https://discuss.pytorch.org/t/209487.
PUBLISHED = (
    *of_8b("h100-96gb", 8, 2, [(None, False, 5762, 82.4), (None, True, 6667, 77.0), (TENSORWISE, True, 8532, 76.8)]),
    *of_8b("h100-96gb", 128, 2, [(None, False, 5605, 67.0), (None, True, 6514, 62.0), (TENSORWISE, True, 8380, 61.8)]),
    *of_8b("h200", 32, 2, [(TENSORWISE, True, 10938, None)]),
    *of_8b("h200", 64, 2, [(TENSORWISE, True, 10753, None)]),
    *of_8b("h100-96gb", 8, 1, [(None, True, 6150, None), (TENSORWISE, True, 7689.5, None)]),
    *of_8b("h100-96gb", 8, 1, [(ROWWISE, True, 6768, None)]),
    *of_8b("b200", 8, 1, [(None, True, 8307.5, None), (TENSORWISE, True, 10417, None), (MXFP8, True, 9969, None)]),
    Published(
        "70B, 256 h100-96gb", "llama3-70b", "h100-96gb", Strategy("zero3", Layout(8, 32), "full"), 1, 597,
        compile_blocks=False,
    ),
)  # fmt: skip

ASSUMPTIONS = (
    "h100-96gb: H100 SXM, 96 GB of HBM2e at 2.4 TB/s, power limit 500 W. Its peak is not published: 884 TFLOP/s in",
    "  bfloat16 lie between the data sheets of H100 SXM (989) and H100 NVL (835). float8 has twice the rate.",
    "h100-96gb, batch 1: the source does not name the variant; that of the other rows is assumed.",
    "b200: values of the data sheet; the measured devices had an unknown, lower power limit.",
    "All devices reach 60 % of the peak in products of any format, 85 % of the bandwidth of memory and 80 % of links.",
    "float8 and MXFP8 convert all linear layers of blocks. Each layer casts its own input.",
    "Compiled blocks fuse all operators between products, and save the same tensors for backward as eager blocks.",
    "float8_rowwise has the rate of float8_tensorwise, although its kernels are slower.",
)


def published() -> Iterator[Row]:
    planners: dict[Any, Planner] = {}
    for each in PUBLISHED:
        key = each.shape, each.sequences, each.linear_format, each.compile_blocks
        if key not in planners:
            precision = precision_of("bfloat16-mixed", each.linear_format)
            source = source_of(NAMED[each.shape])
            planners[key] = Planner(source, precision, each.sequences, compile_blocks=each.compile_blocks)
        estimate = planners[key].estimate(each.strategy, KNOWN[each.machine])
        ranks = each.strategy.layout.tensor * each.strategy.layout.shard
        predicted = each.sequences * NAMED[each.shape].sequence * ranks / estimate.tokens_per_second
        measured = each.sequences * NAMED[each.shape].sequence / each.tokens_per_second
        yield Row("published", each.what, each.technique, "seconds", predicted, measured, 0.25)
        if each.memory is not None:
            reserved = estimate.memory.reserved
            yield Row("published", each.what, each.technique, "bytes", reserved, each.memory * 2**30, 0.15)


def ranked_alike(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the number of pairs of strategies that are predicted in the right order, and the number of pairs.

    Pairs of one configuration are compared. Pairs whose measurements differ by less than the targeted error are
    ignored.
    """
    pairs = [
        (one, two)
        for one, two in itertools.combinations(rows, 2)
        if one.what == two.what and abs(one.measured / two.measured - 1) > one.within
    ]
    alike = sum((one.measured < two.measured) == (one.predicted < two.predicted) for one, two in pairs)
    return alike, len(pairs)


def print_table(rows: Sequence[Row]) -> None:
    def shown(row: Row, value: float) -> str:
        return f"{value:.3f} s" if row.quantity == "seconds" else f"{value / 1e6:,.1f} MB"

    _report.table(
        "Predictions and measurements",
        ["part", "configuration", "strategy", "predicted", "measured", "error", "target"],
        [
            [
                row.part,
                row.what,
                row.strategy,
                shown(row, row.predicted),
                shown(row, row.measured),
                f"{row.apart:+.1%}",
                f"{row.within:.0%}{'' if abs(row.apart) <= row.within else ', missed'}",
            ]
            for row in rows
        ],
    )
    for part in dict.fromkeys((row.part, row.quantity) for row in rows):
        apart = [abs(row.apart) for row in rows if (row.part, row.quantity) == part]
        missed = sum(abs(row.apart) > row.within for row in rows if (row.part, row.quantity) == part)
        print(f"{part[0]}, {part[1]}: error at most {max(apart):.1%}, {missed} of {len(apart)} miss the target")
        alike, clear = ranked_alike([row for row in rows if (row.part, row.quantity) == part])
        if clear:
            print(f"  of {clear} pairs of strategies that clearly differ, {alike} are predicted in the right order")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=_report.names(PARTS), default=list(PARTS), help="parts to run (default: all)")
    parser.add_argument(
        "--worlds", type=_report.integers, default=[8, 64, 512], help="traces: world sizes (default: 8,64,512)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="gloo: measured steps (default: 5)")
    parser.add_argument("--timeout", type=float, default=900, help="gloo: time limit in seconds (default: 900)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    rows: list[Row] = []
    if "traces" in options.parts:
        rows += traces(options.worlds)
    if "gloo" in options.parts:
        rows += gloo(options.rounds, options.timeout)
    if "published" in options.parts:
        rows += published()
    print_table(rows)
    settings = {"parts": options.parts, "worlds": options.worlds}
    if "published" in options.parts:
        settings["assumptions"] = list(ASSUMPTIONS)
        print("Assumptions of the published part:", *ASSUMPTIONS, sep="\n  ")
    if options.json:
        _report.write_json(options.json, "planner", settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
