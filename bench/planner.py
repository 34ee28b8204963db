"""Compare the planner's predictions of memory and time with measurements.

    python bench/planner.py                                   # all parts, minutes
    python bench/planner.py --parts published

- `traces`: memory of every strategy at world 8 to 512, compared with sharded models under fake tensors, where all
  storages are counted.
- `gloo`: memory and time of real steps on two ranks, compared with predictions for this machine, which `measure-links`
  measures in the same run.
- `published`: published measurements, compared with predictions from data sheets. No constant is fitted to them.
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

import _launch
import _report
from composable_shard.planner import KNOWN, NAMED, Layout, Machine, Shape, Strategy
from composable_shard.planner.advise import Planner
from composable_shard.planner.precision import PRECISIONS
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
    """A published measurement: tokens per second and device, and GiB reserved by the allocator."""

    what: str
    shape: str
    machine: str
    strategy: Strategy
    sequences: int
    tokens_per_second: float
    memory: float | None = None


# Llama 3.1 in torchtitan (https://arxiv.org/abs/2410.06511), eager; 70B without asynchronous tensor parallelism
# (https://discuss.pytorch.org/t/209487).
PUBLISHED = (
    Published("8B, 8 devices", "llama3-8b", "h100-96gb", Strategy("zero3", Layout(1, 8), "selective"), 2, 5762, 82.4),
    Published(
        "8B, 128 devices", "llama3-8b", "h100-96gb", Strategy("zero3", Layout(1, 128), "selective"), 2, 5605, 67.0
    ),
    Published("70B, 256 devices", "llama3-70b", "h100-96gb", Strategy("zero3", Layout(8, 32), "full"), 1, 597),
)


def published() -> Iterator[Row]:
    for each in PUBLISHED:
        planner = Planner(source_of(NAMED[each.shape]), PRECISIONS["bfloat16-mixed"], each.sequences)
        estimate = planner.estimate(each.strategy, KNOWN[each.machine])
        ranks = each.strategy.layout.tensor * each.strategy.layout.shard
        predicted = each.sequences * NAMED[each.shape].sequence * ranks / estimate.tokens_per_second
        measured = each.sequences * NAMED[each.shape].sequence / each.tokens_per_second
        yield Row("published", each.what, str(each.strategy), "seconds", predicted, measured, 0.25)
        if each.memory is not None:
            reserved = estimate.memory.reserved
            yield Row("published", each.what, str(each.strategy), "bytes", reserved, each.memory * 2**30, 0.15)


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
    if options.json:
        _report.write_json(options.json, "planner", {"parts": options.parts, "worlds": options.worlds}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
