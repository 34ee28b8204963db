"""Overlap communication with compute within a memory budget.

    python tutorials/03_plan_memory_and_overlap.py

The script needs no cluster and takes seconds. `testing.fabric` simulates a network of 8 ranks in one process, where
collectives take modelled times. `testing.Busy` simulates compute, so all figures are exact. The script uses the model
like a training script does: it sets a policy, trains, and reads the plan and the record.

For the slowest schedule, the fastest one and one within a budget, it writes:

- a timeline (open it at https://ui.perfetto.dev)
- pictures of memory and of step time
- the plan and the record, for `composable-shard explain`, which reports exposed communication and its causes

docs/memory.md explains policies, budgets and plans.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _pictures import BLUE, PALE, SAND, picture
from composable_shard import PoolPolicy, PrefetchPolicy, report, testing

RANKS = 8
LATENCY_S, BANDWIDTH_BPS = 20e-6, 150e6  # network latency and bandwidth; slow, because the model is small
WIDTH = 64
# Hidden width and forward time (ms) of each block. As in mixture-of-experts models, large blocks take no longer than
# small ones, because each token uses few of their weights.
BLOCKS = ((64, 0.6), (64, 0.6), (64, 0.6), (512, 0.6), (64, 0.6), (64, 0.6), (512, 0.6), (64, 0.6))
ACTIONS = {"all-gather": "UNSHARD", "reduce-scatter": "REDUCE"}  # the actions that issue collectives
STEPS = 5  # the first step records the order of the groups; `auto` measures the next two


class Block(nn.Module):
    """Two linear layers, each with half of the block's simulated compute time."""

    def __init__(self, hidden: int, milliseconds: float) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.busy_up = testing.Busy(0.5e-3 * milliseconds)
        self.busy_down = testing.Busy(0.5e-3 * milliseconds)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.busy_up(self.up(x)).relu()
        return x + self.busy_down(self.down(hidden))


class Model(nn.Module):
    """Blocks and a head, which belongs to the root group."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*each) for each in BLOCKS)
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Model:
    """Build the model and shard each block, then the root."""
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        cs.fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return cs.fully_shard(model, mesh=mesh)


@dataclass
class Run:
    """A model trained under one policy, and the communication of its last step."""

    name: str
    model: Model
    exposed_ms: float  # exposed communication
    collectives: list[testing.Collective]

    @property
    def plan(self) -> cs.ShardPlan:
        return cs.make_plan(self.model)

    @property
    def record(self) -> cs.Record:
        return cs.last_record(self.model)


def train(name: str, model: Model, network: testing.Fabric) -> Run:
    """Run `STEPS` training steps."""
    cs.watch(model)  # record times for the timeline
    for step in range(STEPS):
        network.reset()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        model.zero_grad()
    return Run(name, model, 1e3 * network.exposed_s, network.events)


def under_policies(network: testing.Fabric) -> list[Run]:
    """Train a new model under each policy."""
    least, default = least_budget(build()), cs.make_plan(build()).peak_bytes
    policies: list[tuple[str, PrefetchPolicy, int | None]] = [
        ("depth(0)", PrefetchPolicy.depth(0), None),
        ("depth(1)", PrefetchPolicy.depth(1), None),
        ("depth(2)", PrefetchPolicy.depth(2), None),
        ("auto", PrefetchPolicy.auto(), None),
        ("auto, 1.5 x the memory", PrefetchPolicy.auto(), 3 * default // 2),
        ("auto, 2.5 x the memory", PrefetchPolicy.auto(), 5 * default // 2),
        ("auto, least budget", PrefetchPolicy.auto(), least),
    ]
    runs = []
    for name, prefetch, budget in policies:
        model = build()
        model.set_prefetch_policy(prefetch)
        model.set_pool_policy(PoolPolicy(budget=budget))
        runs.append(train(name, model, network))
    return runs


def least_budget(model: Model) -> int:
    """Return the smallest budget that works, in bytes, from the error of a smaller one."""
    try:
        cs.make_plan(model).with_policies(pool=PoolPolicy(budget=64 << 10))
    except cs.errors.PoolBudgetError as error:
        print(f"A budget of 64 KiB is too small:\n  {error}\n")
        return error.least
    raise SystemExit("expected a PoolBudgetError for a budget of 64 KiB")


def schedule_text(plan: cs.ShardPlan) -> str:
    """Format a schedule in one line: prefetched groups, groups that stay gathered, reductions in flight."""
    schedule = plan.effective_schedule()
    ahead = max((len(groups) for _, groups in schedule.forward + schedule.backward), default=0)
    kept = [fqn.removeprefix("blocks.") for fqn in schedule.kept if fqn]
    blocks = "all blocks" if len(kept) == len(BLOCKS) else f"blocks {', '.join(kept)}" if kept else "none"
    return f"prefetch {ahead}, keep {blocks}, {schedule.max_reductions} reductions in flight"


def show(runs: list[Run], costs: cs.Costs) -> None:
    """Print the table. Predictions use the times that `auto` measured."""
    print(f"{'policy':26}{'exposed ms':>11}{'predicted':>11}{'peak KiB':>10}{'budget':>8}  schedule")
    for run in runs:
        foreseen = run.plan.with_policies(costs=costs).predicted()
        budget = run.plan.pool.budget
        cells = f"{run.exposed_ms:11.3f}{1e3 * foreseen.exposed:11.3f}{run.record.peak_bytes / 1024:10.1f}"
        print(f"{run.name:26}{cells}{f'{budget / 1024:.1f}' if budget else '-':>8}  {schedule_text(run.plan)}")


def write(run: Run, costs: cs.Costs, stem: str, out: Path) -> None:
    """Write the timeline, the pictures of memory and time, the plan and the record."""
    report.timeline(run.plan.with_policies(costs=costs), run.record, out / f"{stem}_timeline.json")
    report.memory(run.plan, out / f"{stem}_memory.png", run.record)
    report.time(run.plan.with_policies(costs=costs), out / f"{stem}_time.png", run.record)
    (out / f"{stem}_plan.json").write_text(run.plan.to_json())
    (out / f"{stem}_record.json").write_text(run.record.to_json())


def draw_overlap(runs: list[Run], path: Path) -> None:
    """Plot compute and communication over time, one panel per run."""
    with picture(path, 9, 1.7 * len(runs), rows=len(runs), sharex=True) as panels:
        for axes, run in zip(panels, runs, strict=True):
            draw_times(axes, run)
        panels[-1].set_xlabel("milliseconds of a training step")
        panels[0].legend(ncols=4, frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def draw_times(axes, run: Run) -> None:
    """Draw one panel of `draw_overlap`."""
    spans = [span for span in run.record.spans if span.fqn and span.kind in ("FORWARD", "BACKWARD")]
    waits = [span for span in run.record.spans if span.kind in ("WAIT", "REDUCED")]
    link = {kind: [each for each in run.collectives if each.kind == kind] for kind in ("all_gather", "reduce_scatter")}
    for row, color, label, times in (
        (1, BLUE, "compute", [(span.begin, span.end) for span in spans]),
        (1, "#e9ecef", "waiting", [(span.begin, span.end) for span in waits]),
        (0, PALE, "all-gather", [(each.start_s, each.finish_s) for each in link["all_gather"]]),
        (0, SAND, "reduce-scatter", [(each.start_s, each.finish_s) for each in link["reduce_scatter"]]),
    ):
        bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in times]
        axes.broken_barh(bars, (row + 0.1, 0.8), facecolor=color, edgecolor="white", linewidth=0.5, label=label)
    axes.set_yticks([0.5, 1.5], ["link", "compute"])
    axes.set_title(f"{run.name}: {run.exposed_ms:.1f} ms exposed", fontsize=9, loc="left")


def without(waits: list[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the parts of a span that are in none of the waits, which are sorted by time."""
    parts = []
    for first, last in waits:
        if begin < last and first < end:
            parts.append((begin, max(begin, first)))
            begin = min(last, end)
    return [(first, last) for first, last in [*parts, (begin, end)] if last > first]


def draw_step(run: Run, path: Path) -> None:
    """Plot one step over time: all-gathers, compute and reduce-scatters, with the block of each."""
    spans, events = run.record.spans, run.collectives
    rows = {"reduce-scatter": SAND, "compute": BLUE, "all-gather": PALE}
    with picture(path, 9, 2.2) as axes:
        for row, (label, color) in enumerate(rows.items()):
            if label == "compute":
                waits = [(x.begin, x.end) for x in spans if x.kind in ("WAIT", "REDUCED") and x.end > x.begin]
                modules = [x for x in spans if x.fqn and x.kind in ("FORWARD", "BACKWARD")]
                bars = [(x.fqn, *part) for x in modules for part in without(waits, x.begin, x.end)]
            else:  # each of these actions issued one collective
                issued = [span.fqn for span in spans if span.kind == ACTIONS[label]]
                done = [event for event in events if event.kind == label.replace("-", "_")]
                bars = [(fqn, event.start_s, event.finish_s) for fqn, event in zip(issued, done, strict=True)]
            for fqn, begin, end in ((fqn, 1e3 * begin, 1e3 * end) for fqn, begin, end in bars):
                axes.broken_barh([(begin, end - begin)], (row + 0.1, 0.8), facecolor=color, edgecolor="white")
                text = {"color": "white" if color == BLUE else "black", "ha": "center", "va": "center", "fontsize": 8}
                axes.text((begin + end) / 2, row + 0.5, fqn.removeprefix("blocks."), **text)
        axes.set_yticks([row + 0.5 for row in range(len(rows))], list(rows))
        axes.tick_params(labelsize=8)
        axes.set_xlabel("milliseconds of a training step; the numbers are those of the blocks", fontsize=8)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare schedules of a training step by exposed communication and memory."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/03"), help="directory of timelines and pictures")
    out = parser.parse_args(arguments).out
    torch.set_num_threads(1)  # the matrices are tiny
    out.mkdir(parents=True, exist_ok=True)
    with testing.fabric(RANKS, latency_s=LATENCY_S, bandwidth_Bps=BANDWIDTH_BPS, clock="virtual") as network:
        print(cs.make_plan(build()), end="\n\n")
        runs = under_policies(network)
        slow, hidden = runs[0], runs[5]
        costs = hidden.plan.costs
        assert costs is not None, "`auto` measures times"

        # A plan is data. Another process that builds the same model can follow it from the first step.
        model = build()
        model.set_plan(cs.ShardPlan.from_json(hidden.plan.to_json()))
        runs.append(train("the same plan, as JSON", model, network))

        show(runs, costs)
        print(f"\nThe plan of `auto` with 2.5 times the memory of depth(1):\n\n{hidden.plan}\n")
        print(f"Differences between this plan and its last step: {', '.join(cs.drift(hidden.model)) or 'none'}")
        write(slow, costs, "slow", out)
        write(hidden, costs, "hidden", out)
        write(runs[4], costs, "budget", out)
        draw_overlap([slow, runs[1], hidden], out / "overlap.png")
        draw_step(runs[1], out / "step.png")
        print(f"Timelines (for https://ui.perfetto.dev), pictures and plans are in {out}/:")
        print("  " + ", ".join(sorted(path.name for path in out.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
