"""Hide communication behind compute, and bound the memory that this takes: a walk through plans.

    python tutorials/03_plan_memory_and_overlap.py

Nothing here needs a cluster. `testing.fabric` is a network of 8 ranks in this process whose collectives take modelled
times, and `testing.Busy` stands for compute, so the figures are exact and the script takes seconds. What it does with
the model is what a training script does: set a policy, train, look.

It writes, for the slowest and for the best schedule, a timeline (open it at https://ui.perfetto.dev) and a picture of
the plan's memory. What policies, budgets and plans are is told in docs/planning.md.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from composable_shard import PoolPolicy, PrefetchPolicy, report, testing

RANKS = 8
LATENCY_S, BANDWIDTH_BPS = 20e-6, 62.5e6  # of the network: as slow for its model as 1 GB/s for one 16 times as large
WIDTH = 64
# Hidden width, and milliseconds of the forward, of each block. They are uneven, as blocks with experts are: the large
# ones compute no longer than the small ones, since a token uses few of their weights.
BLOCKS = ((64, 0.6), (64, 0.6), (512, 0.6), (64, 0.6), (64, 0.6), (512, 0.6), (64, 0.6), (64, 0.6))
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


def train(model: Model, network: testing.Fabric) -> float:
    """Some steps; gives the milliseconds that compute waited for communication in the last one."""
    cs.watch(model)  # note when what is done, for the timeline
    for step in range(STEPS):
        network.reset()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        model.zero_grad()
    return 1e3 * network.exposed_s


def edges(plan: cs.ShardPlan) -> str:
    """A schedule in a line: how far ahead it gathers, what it keeps, how many reductions are in flight."""
    schedule = plan.edges()
    ahead = [len(groups) for _, groups in schedule.forward + schedule.backward]
    kept = [fqn for fqn in schedule.kept if fqn]
    first = ", waited for before gathers" if schedule.reduces_first else ""
    return (
        f"at most {max(ahead, default=0)} gathers at an event; keeps {', '.join(kept) or 'none'}; "
        f"{schedule.max_reductions} reductions in flight{first}"
    )


def compare(network: testing.Fabric) -> tuple[dict[str, Model], dict[str, float]]:
    """Train under one policy after the other; gives the models and what each has left exposed."""
    least = least_budget(build())
    default = cs.make_plan(build()).peak_bytes
    policies: list[tuple[str, PrefetchPolicy, int | None]] = [
        ("depth(0)", PrefetchPolicy.depth(0), None),
        ("depth(1)", PrefetchPolicy.depth(1), None),
        ("depth(2)", PrefetchPolicy.depth(2), None),
        ("auto", PrefetchPolicy.auto(), None),
        ("auto, the peak of depth(1)", PrefetchPolicy.auto(), default),
        ("auto, twice that", PrefetchPolicy.auto(), 2 * default),
        ("auto, the least budget", PrefetchPolicy.auto(), least),
    ]
    models: dict[str, Model] = {}
    exposed: dict[str, float] = {}
    print(f"\n{'policy':28}{'exposed ms':>12}{'predicted':>12}{'peak MiB':>10}{'budget':>9}  schedule")
    for name, prefetch, budget in policies:
        model = models[name] = build()
        model.set_prefetch_policy(prefetch)
        if budget is not None:
            model.set_pool_policy(PoolPolicy(budget=budget))
        exposed[name] = train(model, network)
        plan, record = cs.current_plan(model), cs.last_record(model)
        foreseen = plan.predicted().exposed
        print(
            f"{name:28}{exposed[name]:12.3f}{'-' if foreseen is None else f'{1e3 * foreseen:.3f}':>12}"
            f"{record.peak_bytes / 2**20:10.2f}{'-' if budget is None else f'{budget / 2**20:.2f}':>9}  {edges(plan)}"
        )
    return models, exposed


def least_budget(model: Model) -> int:
    """The error of a budget that is too small, which says what would be enough."""
    plan = cs.make_plan(model)
    try:
        plan.with_policies(pool=PoolPolicy(budget=1 << 20))
    except cs.PoolBudgetError as error:
        print(f"a budget of 1 MiB is an error:\n  {error}")
        return error.least
    raise AssertionError("a budget of 1 MiB is too small for this model")


def main() -> int:
    parser = argparse.ArgumentParser(description="From a slow schedule to one that hides its communication.")
    parser.add_argument("--out", type=Path, default=Path("runs/03"), help="where timelines and pictures go")
    parser.add_argument("--clock", choices=("virtual", "streams"), default="virtual", help="as on a CPU, or as on a GPU")
    options = parser.parse_args()
    with testing.fabric(RANKS, latency_s=LATENCY_S, bandwidth_Bps=BANDWIDTH_BPS, clock=options.clock) as network:
        print(cs.make_plan(build()), end="\n\n")
        models, exposed = compare(network)
        for name, m in models.items():
            print(name); print(cs.current_plan(m)); print(network.log() if name=="auto" else ""); print(cs.drift(m))
    return 0


if __name__ == "__main__":
    sys.exit(main())
