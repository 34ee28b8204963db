"""Hide communication behind compute, and bound the memory that this takes: a walk through plans.

    python tutorials/03_plan_memory_and_overlap.py

Nothing here needs a cluster. `testing.fabric` is a network of 8 ranks in this process whose collectives take modelled
times, and `testing.Busy` stands for compute, so the figures are exact and the script takes seconds. What it does with
the model is what a training script does: set a policy, train, look.

It writes, for the slowest schedule, the best one and one within a budget: a timeline (open it at
https://ui.perfetto.dev), pictures of the plan's memory and of where the time goes, the plan and the record, of which
`composable-shard explain` says why the step waits. docs/memory.md explains policies, budgets and plans.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _pictures import BLUE, GREY, PALE, SAND, picture
from composable_shard import PoolPolicy, PrefetchPolicy, report, testing

RANKS = 8
LATENCY_S, BANDWIDTH_BPS = 20e-6, 150e6  # of the network: a small model needs a slow one
WIDTH = 64
# Hidden width, and milliseconds of the forward, of each block. They are uneven, as blocks with experts are: the large
# ones compute no longer than the small ones, since a token uses few of their weights.
BLOCKS = ((64, 0.6), (64, 0.6), (64, 0.6), (512, 0.6), (64, 0.6), (64, 0.6), (512, 0.6), (64, 0.6))
STEPS = 5  # the first learns the order; `auto` measures the next two


class Block(nn.Module):
    """Two matrices, and the time that they would take: half of it each."""

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
    """Blocks, and a head that stays with the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*each) for each in BLOCKS)
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Model:
    """The model, sharded: every block, then the root with the rest."""
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        cs.fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return cs.fully_shard(model, mesh=mesh)


@dataclass
class Run:
    """A model under one policy, and what its last step did."""

    name: str
    model: Model
    exposed_ms: float  # that compute waited for communication
    collectives: list[testing.Collective]

    @property
    def plan(self) -> cs.ShardPlan:
        return cs.make_plan(self.model)

    @property
    def record(self) -> cs.Record:
        return cs.last_record(self.model)


def train(name: str, model: Model, network: testing.Fabric) -> Run:
    """Some training steps."""
    cs.watch(model)  # note when what is done, for the timeline
    for step in range(STEPS):
        network.reset()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        model.zero_grad()
    return Run(name, model, 1e3 * network.exposed_s, network.events)


def under_policies(network: testing.Fabric) -> list[Run]:
    """Train under one policy after the other."""
    least, default = least_budget(build()), cs.make_plan(build()).peak_bytes
    policies: list[tuple[str, PrefetchPolicy, int | None]] = [
        ("depth(0)", PrefetchPolicy.depth(0), None),
        ("depth(1)", PrefetchPolicy.depth(1), None),
        ("depth(2)", PrefetchPolicy.depth(2), None),
        ("auto", PrefetchPolicy.auto(), None),
        ("auto, half as much again", PrefetchPolicy.auto(), 3 * default // 2),
        ("auto, 2.5 times as much", PrefetchPolicy.auto(), 5 * default // 2),
        ("auto, the least budget", PrefetchPolicy.auto(), least),
    ]
    runs = []
    for name, prefetch, budget in policies:
        model = build()
        model.set_prefetch_policy(prefetch)
        model.set_pool_policy(PoolPolicy(budget=budget))
        runs.append(train(name, model, network))
    return runs


def least_budget(model: Model) -> int:
    """What the error of a budget that is too small says."""
    try:
        cs.make_plan(model).with_policies(pool=PoolPolicy(budget=64 << 10))
    except cs.PoolBudgetError as error:
        print(f"A budget of 64 KiB is an error:\n  {error}\n")
        return error.least
    raise SystemExit("a budget of 64 KiB was expected to be too small")


def schedule_text(plan: cs.ShardPlan) -> str:
    """A schedule in a line: how much it gathers ahead, what it keeps, how many reductions are in flight."""
    schedule = plan.edges()
    ahead = max((len(groups) for _, groups in schedule.forward + schedule.backward), default=0)
    kept = [fqn.removeprefix("blocks.") for fqn in schedule.kept if fqn]
    blocks = "all blocks" if len(kept) == len(BLOCKS) else f"blocks {', '.join(kept)}" if kept else "none"
    return f"gathers {ahead} at once ahead, keeps {blocks}, {schedule.max_reductions} reductions in flight"


def show(runs: list[Run], costs: cs.Costs) -> None:
    """The table; what is predicted takes the times that `auto` has measured."""
    print(f"{'policy':26}{'exposed ms':>11}{'predicted':>11}{'peak KiB':>10}{'budget':>8}  schedule")
    for run in runs:
        foreseen = run.plan.with_policies(costs=costs).predicted()
        budget = run.plan.pool.budget
        cells = f"{run.exposed_ms:11.3f}{1e3 * foreseen.exposed:11.3f}{run.record.peak_bytes / 1024:10.1f}"
        print(f"{run.name:26}{cells}{f'{budget / 1024:.1f}' if budget else '-':>8}  {schedule_text(run.plan)}")


def write(run: Run, costs: cs.Costs, stem: str, out: Path) -> None:
    """The timeline, the pictures of memory and time, the plan and the record."""
    report.timeline(run.plan.with_policies(costs=costs), run.record, out / f"{stem}_timeline.json")
    report.memory(run.plan, out / f"{stem}_memory.png", run.record)
    report.time(run.plan.with_policies(costs=costs), out / f"{stem}_time.png", run.record)
    (out / f"{stem}_plan.json").write_text(run.plan.to_json())
    (out / f"{stem}_record.json").write_text(run.record.to_json())


def draw_overlap(runs: list[Run], path: Path) -> None:
    """When the blocks compute and what the link carries, a panel a run."""
    with picture(path, 9, 1.7 * len(runs), rows=len(runs), sharex=True) as panels:
        for axes, run in zip(panels, runs, strict=True):
            draw_times(axes, run)
        panels[-1].set_xlabel("milliseconds of a training step")
        panels[0].legend(ncols=4, frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def draw_times(axes, run: Run) -> None:
    """One panel of it."""
    spans = [span for span in run.record.spans if span.fqn and span.kind in ("FORWARD", "BACKWARD")]
    waits = [span for span in run.record.spans if span.kind in ("WAIT", "REDUCED")]
    link = {kind: [each for each in run.collectives if each.kind == kind] for kind in ("all_gather", "reduce_scatter")}
    for row, color, label, times in (
        (1, BLUE, "compute", [(span.begin, span.end) for span in spans]),
        (1, "#e9ecef", "waiting", [(span.begin, span.end) for span in waits]),
        (0, PALE, "gathers", [(each.start_s, each.finish_s) for each in link["all_gather"]]),
        (0, SAND, "reductions", [(each.start_s, each.finish_s) for each in link["reduce_scatter"]]),
    ):
        bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in times]
        axes.broken_barh(bars, (row + 0.1, 0.8), facecolor=color, edgecolor="white", linewidth=0.5, label=label)
    axes.set_yticks([0.5, 1.5], ["link", "compute"])
    axes.set_title(f"{run.name}: {run.exposed_ms:.1f} ms exposed", fontsize=9, loc="left")


def draw_step(run: Run, path: Path) -> None:
    """One step, a row a group: its gathers until they are waited for, how long it stays gathered, its reduction."""
    begun: dict[tuple[str, str], float] = {}
    bars: dict[str, list[tuple[int, float, float]]] = {}
    rows = {"": len(BLOCKS)} | {f"blocks.{i}": len(BLOCKS) - 1 - i for i in range(len(BLOCKS))}
    stages = {  # from which action to which
        "gather": ("UNSHARD", "WAIT"),
        "gathered": ("WAIT", "RESHARD"),
        "reduction": ("REDUCE", "REDUCED"),
    }
    for span in run.record.spans:
        for label, (first, last) in stages.items():
            if span.kind == last and (label, span.fqn) in begun:
                bars.setdefault(label, []).append((rows[span.fqn], begun.pop((label, span.fqn)), span.end))
            if span.kind == first:
                begun[label, span.fqn] = span.end if label == "gathered" else span.begin
        if span.kind in ("FORWARD", "BACKWARD") and span.fqn:
            bars.setdefault("forward, backward", []).append((rows[span.fqn], span.begin, span.end))
    colors = {"gather": PALE, "gathered": GREY, "forward, backward": BLUE, "reduction": SAND}
    with picture(path, 9, 3.2) as axes:
        for label, color in colors.items():
            for row, begin, end in bars[label]:
                axes.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (row + 0.15, 0.7), facecolor=color, label=label)
                label = "_"  # matplotlib lists each once
        axes.set_yticks([row + 0.5 for row in rows.values()], [name or "root" for name in rows])
        axes.tick_params(labelsize=8)
        axes.set_xlabel("milliseconds of a training step")
        axes.legend(ncols=4, frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="From a slow schedule to one that hides its communication.")
    parser.add_argument("--out", type=Path, default=Path("runs/03"), help="where timelines and pictures go")
    out = parser.parse_args(arguments).out
    torch.set_num_threads(1)  # the matrices are tiny
    out.mkdir(parents=True, exist_ok=True)
    with testing.fabric(RANKS, latency_s=LATENCY_S, bandwidth_Bps=BANDWIDTH_BPS, clock="virtual") as network:
        print(cs.make_plan(build()), end="\n\n")
        runs = under_policies(network)
        slow, hidden = runs[0], runs[5]
        costs = hidden.plan.costs
        assert costs is not None, "`auto` has measured"

        # A plan is data: made once, it is followed from the first step by whoever builds the same model.
        model = build()
        model.set_plan(cs.ShardPlan.from_json(hidden.plan.to_json()))
        runs.append(train("the same plan, as JSON", model, network))

        show(runs, costs)
        print(f"\nThe plan that `auto` has made of 2.5 times the memory of depth(1):\n\n{hidden.plan}\n")
        print(f"Where its last step left the plan: {', '.join(cs.drift(hidden.model)) or 'nowhere'}")
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
