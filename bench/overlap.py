"""Measure the exposed communication of the engines on a simulated network with declared compute.

    python bench/overlap.py

Every engine trains the same small models (`_stand_ins.py`) on `composable_shard.testing.fabric`, a process group in one
process whose collectives take modelled times. At ratio 0.3, 1 or 3, a gather of the whole model takes that many times
the time of forward. With the `virtual` clock a wait blocks the host, as on a CPU. With the `streams` clock it blocks a
stream, as on an accelerator. Both are exact, so figures have no spread. The tables also contain:

- simulations that prefetch one group, or all groups
- `no order can`: a lower bound for any schedule that communicates the same bytes
- for `auto`: the least exposed communication of any schedule within its budget (the bound), if reductions keep their
  buffers until they end. If streams order the memory, other schedules may expose less.

The exit status is 1 if

- `auto`, eager or compiled, exceeds its bound by more than a tenth and by more than 2 % of compute,
- `auto` exceeds FSDP2 on the streams clock, or
- engines communicate different amounts of bytes.

    python bench/overlap.py --clocks real --rounds 9     # real time; compute and transfers sleep; figures have a spread
    python bench/overlap.py --log ours --models uniform --ratios 1 --clocks streams
"""

import argparse
import dataclasses
import functools
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._dynamo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import _report
import _simulate
from _engines import COMPILED, compiled_whole, shard_units
from _optimum import least_exposed
from _simulate import Unit
from _stand_ins import MODELS, Model, units_of
from composable_shard import Costs, ShardPlan, last_record, make_plan, testing

WARM_STEPS = 6
TOKENS = 4
SAME_BYTES = 0.01  # allowed relative difference of bytes, for flags and padding of small groups
EXACT = ("virtual", "streams")
CLOCKS = (*EXACT, "real")
EAGER = ("ours", "ours-two", "ours-far", "ours-auto", "ours-auto-fsdp2", "ours-auto-whole")
GRAPHS = tuple(f"{COMPILED}{how}" for how in ("", "-far", "-budget", "-auto", "-auto-fsdp2"))
ENGINES = (*EAGER, *GRAPHS, "fsdp2", "fsdp2-again")
OVER_BOUND, OF_COMPUTE = 1.10, 0.02  # `auto` may exceed its bound by this factor, or by this share of compute
OVER_FSDP2 = 1.001  # our reductions include a few bytes of flags


@dataclass(frozen=True)
class OverlapResult:
    """Exposed communication of a step, in milliseconds.

    Attributes:
        compute_ms: declared compute.
        exposed_ms: exposed communication, the sum of the three parts below.
        over_fsdp2: ratio to FSDP2's, formed within each round.
        gathers_forward_ms: exposed gathers in forward.
        gathers_backward_ms: exposed gathers in backward.
        reductions_ms: exposed reductions.
        bytes: bytes of all collectives.
        predicted_ms: exposed communication that the plan predicts, only for ours.
        peak_bytes: peak of leased bytes of the pool, only for ours.
        planned_bytes: peak that the plan predicts, only for ours.
        bound_ms: least exposed communication of any schedule within the budget, only for `auto` with a budget.
    """

    model: str
    ratio: float
    clock: str
    engine: str
    compute_ms: float
    exposed_ms: _report.Spread
    over_fsdp2: _report.Spread | None
    gathers_forward_ms: float
    gathers_backward_ms: float
    reductions_ms: float
    bytes: int | None
    predicted_ms: float | None = None
    peak_bytes: int | None = None
    planned_bytes: int | None = None
    bound_ms: float | None = None

    @property
    def misses(self) -> list[str]:
        """Describe how `auto` misses its targets."""
        if self.bound_ms is None:
            return []
        limit = max(OVER_BOUND * self.bound_ms, self.bound_ms + OF_COMPUTE * self.compute_ms)
        found = [f"{self.exposed_ms.median:.3f} ms exposed, expected at most {limit:.3f}"]
        found = found if self.exposed_ms.median > limit else []
        if self.clock == "streams" and self.over_fsdp2 is not None and self.over_fsdp2.median > OVER_FSDP2:
            found.append(f"{self.over_fsdp2.median:.3f} times FSDP2's exposed communication")
        return found


@dataclass
class Side:
    """One engine's model, and the exposed communication of its steps in milliseconds."""

    name: str
    model: nn.Module
    exposed: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    log: str = ""

    def step(self, sim: testing.Fabric, ids: torch.Tensor) -> None:
        """Run a step from time 0. There is no optimizer."""
        sim.reset()
        loss = self.model(ids).square().mean()
        forward = len(sim.events)
        loss.backward()
        for param in self.model.parameters():
            param.grad = None
        self.exposed.append(1e3 * sim.exposed_s)
        self.parts = dict.fromkeys(("gathers_forward", "gathers_backward", "reductions"), 0.0)
        for at, event in enumerate(sim.events):
            part = "gathers_forward" if at < forward else "gathers_backward"
            self.parts[part if event.kind == "all_gather" else "reductions"] += 1e3 * event.exposed_s
        self.nbytes = sum(event.nbytes for event in sim.events)
        self.log = sim.log()


@dataclass(frozen=True)
class Case:
    """A model on a link on which gathering it takes `ratio` times the time of forward."""

    model: str
    ratio: float
    clock: str
    world: int
    latency_s: float
    units: list[Unit]

    def make(self) -> Model:
        """Create the model of this case."""
        return MODELS[self.model]()

    @property
    def compute_ms(self) -> float:
        return 1e3 * sum(unit.forward_s + unit.backward_s for unit in self.units)

    @property
    def bandwidth(self) -> float:
        """Bandwidth of the link in bytes per second."""
        moving = self.ratio * sum(unit.forward_s for unit in self.units) - len(self.units) * self.latency_s
        if moving <= 0:
            raise SystemExit(f"overlap.py: {self}: the latencies alone take longer; use a smaller --latency-us")
        return sum(unit.nbytes for unit in self.units) * (self.world - 1) / self.world / moving

    def seconds(self, nbytes: int) -> float:
        """Return the time of a gather or reduction of `nbytes` bytes, in seconds."""
        return self.latency_s + (self.world - 1) / self.world * nbytes / self.bandwidth

    def timed(self, plan: ShardPlan) -> ShardPlan:
        """Return the plan with the times of this case and the same schedule."""
        forward = {fqn: unit.forward_s for fqn, unit in zip(plan.order, self.units, strict=True)}
        backward = {fqn: unit.backward_s for fqn, unit in zip(plan.order, self.units, strict=True)}
        link = {"latency": self.latency_s, "bandwidth": self.bandwidth, "streams": self.clock == "streams"}
        return dataclasses.replace(plan, costs=Costs.of(**link, forward=forward, backward=backward))

    def __str__(self) -> str:
        return f"{self.model}, ratio {self.ratio:g}, {self.clock} clock"


def build(name: str, case: Case, mesh: DeviceMesh) -> Side:
    torch.manual_seed(0)
    model = case.make()
    return Side(name, shard_units(name, model, list(model.units()), mesh))


def measure(case: Case, engines: list[str], rounds: int) -> list[Side]:
    """Measure all engines in turns on one simulated network."""
    with testing.fabric(case.world, latency_s=case.latency_s, bandwidth_Bps=case.bandwidth, clock=case.clock) as sim:
        mesh = init_device_mesh("cpu", (case.world,))
        sides = [build(name, case, mesh) for name in engines]
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        for side in sides:
            for _ in range(WARM_STEPS):
                side.step(sim, ids)
            if side.name in GRAPHS:
                side.model = compiled_whole(side.model)
                side.step(sim, ids)
            side.exposed.clear()
        shuffle = random.Random(0)
        for _ in range(rounds):
            for side in shuffle.sample(sides, len(sides)):
                side.step(sim, ids)
    return sides


def foreseen(case: Case, side: Side) -> dict[str, float | int | None]:
    """Return the predictions of our plan and the bytes of the record.

    Graphs have no record. Their plans predict only `auto`. On the real clock, host time matters too, so the plan is
    used with its measured times, if it has them.
    """
    if (
        not side.name.startswith("ours")
        or side.name == "ours-far"
        or (side.name in GRAPHS and "-auto" not in side.name)
    ):
        return {}
    plan = make_plan(side.model)
    if case.clock in EXACT:
        plan = case.timed(plan)
    elif plan.costs is None:
        return {}
    found: dict[str, float | int | None] = {"predicted_ms": 1e3 * (plan.predicted().exposed or 0.0)}
    if plan.pool.budget is not None and side.name != "ours-auto-whole":
        found["bound_ms"] = 1e3 * bound_of(plan)
    if side.name in GRAPHS:
        return found
    record = last_record(side.model)
    assert record is not None
    return found | {"peak_bytes": record.peak_bytes, "planned_bytes": plan.peak_bytes}


@functools.cache
def bound_of(plan: ShardPlan) -> float:
    """Return the least exposed communication in seconds within the plan's budget, if reductions keep their buffers."""
    steps, sizes, times = plan.schedule_inputs()
    sizes = {fqn: dataclasses.replace(size, frees_queued=False) for fqn, size in sizes.items()}
    assert times is not None
    known = plan.predicted().exposed
    assert known is not None
    return least_exposed(steps, sizes, times, plan.pool.budget, known)


def results_of(case: Case, sides: list[Side]) -> list[OverlapResult]:
    """Return the measured results, then the simulated ones."""
    reference = next((side for side in sides if side.name == "fsdp2"), None)
    found = []
    for side in sides:
        ratios = [a / b for a, b in zip(side.exposed, reference.exposed, strict=True)] if reference else None
        found.append(
            OverlapResult(
                model=case.model,
                ratio=case.ratio,
                clock=case.clock,
                engine=side.name,
                compute_ms=case.compute_ms,
                exposed_ms=_report.Spread.of(side.exposed),
                over_fsdp2=None if ratios is None else _report.Spread.of(ratios),
                gathers_forward_ms=side.parts["gathers_forward"],
                gathers_backward_ms=side.parts["gathers_backward"],
                reductions_ms=side.parts["reductions"],
                bytes=side.nbytes,
                **foreseen(case, side),  # type: ignore[arg-type]
            )
        )
    stages = _simulate.stages_of(case.units, case.seconds)
    rules: dict[str, Callable[[], float]] = {
        "simulated, one ahead": lambda: _simulate.exposed(stages, 1, gathers_first=False),
        "the same, gathers first": lambda: _simulate.exposed(stages, 1),
        "simulated, all ahead": lambda: _simulate.exposed(stages, len(stages)),
        "no order can": lambda: _simulate.least_exposed(stages),
        "no order can, all kept": lambda: _simulate.least_exposed(_simulate.kept(stages)),
    }
    for name, rule in rules.items():
        exposed = 1e3 * rule()
        ratios = None if reference is None else [exposed / each for each in reference.exposed]
        over = None if ratios is None else _report.Spread.of(ratios)
        spread = _report.Spread.of([exposed])
        found.append(
            OverlapResult(case.model, case.ratio, case.clock, name, case.compute_ms, spread, over, 0.0, 0.0, 0.0, None)
        )
    return found


def show(model: str, clock: str, results: list[OverlapResult], options: argparse.Namespace) -> None:
    """Print the tables of a model, with columns for each ratio, and the parts with `--parts`."""

    def text(spread: _report.Spread | None) -> str:
        if spread is None:
            return "-"
        return f"{spread.median:.3f}" if clock in EXACT else str(spread)

    by = {(r.engine, r.ratio): r for r in results}
    engines = list(dict.fromkeys(r.engine for r in results))
    found = [(engine, [by[engine, ratio] for ratio in options.ratios]) for engine in engines]
    caption = (
        f"world {options.world}, latency {options.latency_us:g} us; compute {results[0].compute_ms:.1f} ms and "
        f"{results[0].bytes or 0:,} bytes of communication per step"
    )
    _report.table(
        f"Exposed communication, ms: {model}, {clock} clock",
        ("engine", *(word for ratio in options.ratios for word in (f"at {ratio:g}", "/ FSDP2", "/ bound"))),
        [
            (name, *(cell for r in row for cell in (text(r.exposed_ms), text(r.over_fsdp2), over_bound(r))))
            for name, row in found
        ],
        caption,
    )
    ours = [(name, row) for name, row in found if row[0].predicted_ms is not None]
    _report.table(
        "Measured / predicted: exposed communication, and peak bytes of the pool",
        ("engine", *(word for ratio in options.ratios for word in (f"time at {ratio:g}", "bytes"))),
        [(name, *(cell for r in row for cell in over_prediction(r))) for name, row in ours],
    )
    if options.parts:
        parts = ("gathers_forward_ms", "gathers_backward_ms", "reductions_ms")
        _report.table(
            "Exposed gathers in forward (fwd), gathers in backward (bwd) and reductions, ms, last round",
            ("engine", *(f"{word} at {ratio:g}" for ratio in options.ratios for word in ("fwd", "bwd", "reduce"))),
            [
                (name, *(f"{getattr(r, part):.3f}" for r in row for part in parts))
                for name, row in found
                if row[0].bytes is not None
            ],
        )


def over_bound(result: OverlapResult) -> str:
    if result.bound_ms is None:
        return "-"
    return f"{result.exposed_ms.median / result.bound_ms:.3f}" if result.bound_ms else "1"


def over_prediction(result: OverlapResult) -> tuple[str, str]:
    assert result.predicted_ms is not None
    time = result.exposed_ms.median / result.predicted_ms if result.predicted_ms else 1.0
    if result.peak_bytes is None or result.planned_bytes is None:
        return f"{time:.3f}", "-"
    return f"{time:.3f}", f"{result.peak_bytes / result.planned_bytes:.3f}"


def differing(sides: list[Side]) -> bool:
    """Return whether the engines communicated different amounts of bytes, which invalidates the comparison."""
    sizes = [side.nbytes for side in sides if "auto" not in side.name]  # `auto` may keep groups gathered
    return max(sizes, default=0) > (1 + SAME_BYTES) * min(sizes, default=0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = "(default: %(default)s)"
    parser.add_argument("--models", type=_report.names(tuple(MODELS)), default=",".join(MODELS), help=f"models {shown}")
    parser.add_argument(
        "--ratios", type=_report.ratios, default="0.3,1,3", help=f"time to gather the model / time of forward {shown}"
    )
    parser.add_argument(
        "--clocks", type=_report.names(CLOCKS), default="virtual,streams", help=f"{', '.join(CLOCKS)} {shown}"
    )
    parser.add_argument("--engines", type=_report.names(ENGINES), default=",".join(ENGINES), help=f"engines {shown}")
    parser.add_argument("--world", type=int, default=8, help=f"simulated ranks {shown}")
    parser.add_argument("--latency-us", type=float, default=10.0, help=f"latency of a collective {shown}")
    parser.add_argument("--rounds", type=int, default=2, help=f"interleaved rounds {shown}")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help=f"models in parallel, with exact clocks {shown}"
    )
    parser.add_argument("--log", choices=ENGINES, help="print all collectives of ENGINE's last step")
    parser.add_argument("--parts", action="store_true", help="print exposed gathers and reductions separately")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args()


def run(model: str, options: argparse.Namespace) -> list[tuple[str, list[OverlapResult], list[str]]]:
    """Return the results of one model by clock, and missed targets."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 4 * len(options.ratios) * len(CLOCKS)  # a graph for each schedule of `auto`
    torch.compiler.reset()
    units = units_of(MODELS[model]())
    found = []
    for clock in options.clocks:
        results: list[OverlapResult] = []
        faults: list[str] = []
        for ratio in options.ratios:
            case = Case(model, ratio, clock, options.world, 1e-6 * options.latency_us, units)
            sides = measure(case, options.engines, options.rounds)
            made = results_of(case, sides)
            results += made
            if clock in EXACT:
                faults += [f"{case}: {result.engine}: {miss}" for result in made for miss in result.misses]
            if differing(sides):
                faults.append(f"{case}: the engines communicated different amounts of bytes")
            for side in sides:
                if side.name == options.log:
                    print(f"{options.log}: {case}\n{side.log}", flush=True)
        found.append((clock, results, faults))
    return found


def main() -> int:
    options = parse()
    jobs = 1 if options.log or not set(options.clocks) <= set(EXACT) else options.jobs
    results: list[OverlapResult] = []
    failed = False
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        each = functools.partial(run, options=options)
        for model, found in zip(options.models, (map if jobs == 1 else pool.map)(each, options.models), strict=True):
            for clock, of_clock, faults in found:
                for fault in faults:
                    print(f"overlap.py: {fault}", file=sys.stderr)
                failed = failed or bool(faults)
                show(model, clock, of_clock, options)
                results += of_clock
    if options.json:
        kept = ("models", "ratios", "clocks", "engines", "world", "latency_us", "rounds")
        _report.write_json(options.json, "overlap", {key: getattr(options, key) for key in kept}, results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
