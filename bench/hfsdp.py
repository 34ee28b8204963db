"""Compare hfsdp with hsdp, zero3 and resharding to the ranks of a node, for a model of 70B parameters.

    python bench/hfsdp.py                       # both parts, a minute
    python bench/hfsdp.py --parts predicted --sequences 2048

Nothing is measured on GPUs. All figures are predictions or simulations.

- `predicted`: step time, exposed communication and bytes of a rank by the planner, for Llama 3 70B with full activation
  checkpointing, one sequence per rank.
- `network`: exposed communication of eight blocks on a simulated network (`testing.fabric`), compared with the plan's
  prediction. The engine runs with real tensors. The blocks are small, but the network is slower in proportion, and
  compute is declared, so that collectives and compute take as long as those of a block of 70B.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import _report
import composable_shard as cs
from composable_shard.planner import KNOWN, NAMED, Layout, Link, Machine, Strategy
from composable_shard.planner.advise import Planner
from composable_shard.planner.precision import PRECISIONS
from composable_shard.planner.profile import FORWARD
from composable_shard.planner.sources import source_of
from composable_shard.planner.timing import compute_seconds, costs_of, ring
from composable_shard.testing import Busy, fabric

PARTS = ("predicted", "network")
NODE = 8  # ranks of a node
MACHINE = dataclasses.replace(
    KNOWN["h100"],
    name="H100 SXM 80 GB, 300 GB/s in a node, 25 GB/s per rank between nodes",
    intra_node=Link(300e9, 2e-5),
    inter_node=Link(25e9, 1e-5),
)
MODEL, PRECISION = NAMED["llama3-70b"], PRECISIONS["bfloat16-mixed"]
STRATEGIES = ("hsdp", "hfsdp", "zero3", "few")
BLOCKS, WIDTH, HIDDEN = 8, 256, 1024  # of the model on the simulated network
STEPS = 4


@dataclass(frozen=True)
class Predicted:
    """The planner's prediction for a strategy: seconds of a step, and bytes of a rank."""

    part: str
    strategy: str
    world: int
    sequence: int
    step_s: float
    compute_s: float
    exposed_s: float
    optimizer_s: float
    sent_bytes: int
    memory_bytes: int
    fits: bool
    by_kind: dict[str, int]


@dataclass(frozen=True)
class OnNetwork:
    """Exposed seconds of a step of blocks: by the plan, and on the simulated network."""

    part: str
    strategy: str
    world: int
    sequence: int
    compute_s: float
    predicted_s: float
    simulated_s: float


def strategy_of(name: str, world: int) -> Strategy:
    """Return a strategy whose shard axis is a node (hsdp, hfsdp) or the world (zero3, few)."""
    if name in ("hsdp", "hfsdp"):
        return Strategy(name, Layout(1, NODE, world // NODE), "full")
    return Strategy("zero3", Layout(1, world), "full", few=NODE if name == "few" else 0)


def predicted(worlds: Sequence[int], sequences: Sequence[int], names: Sequence[str]) -> Iterator[Predicted]:
    for sequence in sequences:
        planner = Planner(source_of(MODEL, sequence), PRECISION, 1)
        for world in worlds:
            for name in names:
                estimate = planner.estimate(strategy_of(name, world), MACHINE)
                time, most = estimate.time, estimate.memory.most
                yield Predicted(
                    part="predicted",
                    strategy=name,
                    world=world,
                    sequence=sequence,
                    step_s=time.seconds,
                    compute_s=time.compute,
                    exposed_s=time.exposed,
                    optimizer_s=time.optimizer,
                    sent_bytes=estimate.moved,
                    memory_bytes=estimate.needed,
                    fits=estimate.fits,
                    by_kind=dataclasses.asdict(most),
                )


class Block(nn.Module):
    """A small block that takes the time of a block of the large model."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.busy = Busy(forward_s, backward_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.busy(x + self.down(self.up(x).relu()))
        return output


def slowed() -> Machine:
    """Return the machine with links that take as long for a small block as the real links for a large block."""
    large = (MODEL.parameters - 2 * MODEL.vocabulary * MODEL.width) / MODEL.layers
    factor = 2 * WIDTH * HIDDEN / large
    links = {
        name: Link(factor * link.bandwidth, link.latency)
        for name in ("intra_node", "inter_node")
        for link in [getattr(MACHINE, name)]
    }
    return dataclasses.replace(MACHINE, **links)


def sharded(strategy: Strategy, forward_s: float, backward_s: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(forward_s, backward_s) for _ in range(BLOCKS)))
    policy = cs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mp_policy": policy}
    layout = strategy.layout
    if strategy.name != "zero3":
        sizes = (layout.replicas, layout.shard)
        settings["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    if strategy.few:
        settings["reshard_after_forward"] = strategy.few
    if strategy.name == "hfsdp":
        settings["outer_sharding"] = "optimizer"
    cs.shard_by_class(model, {Block}, strategy=strategy.name, root=False, **settings)  # type: ignore[arg-type]
    cs.fully_shard(model, **settings)
    return model


def network(worlds: Sequence[int], sequences: Sequence[int], names: Sequence[str]) -> Iterator[OnNetwork]:
    machine = slowed()
    for sequence in sequences:
        traced = source_of(MODEL, sequence).traced(PRECISION, "full", 1)
        seconds = compute_seconds(traced, MACHINE, Layout())
        block = next(group for direction, group in seconds if group)
        times = {direction: took for (direction, group), took in seconds.items() if group == block}
        forward_s = times.pop(FORWARD)
        backward_s = sum(times.values())
        for world in worlds:
            for name in names:
                yield on_network(strategy_of(name, world), name, machine, sequence, forward_s, backward_s)


def on_network(
    strategy: Strategy, name: str, machine: Machine, sequence: int, forward_s: float, backward_s: float
) -> OnNetwork:
    layout = strategy.layout
    ranks, stride = (layout.replicas, layout.shard) if layout.replicas > 1 else (layout.shard, 1)
    between = ring(machine, ranks, stride)
    world = layout.shard * layout.replicas
    with fabric(
        world,
        latency_s=machine.intra_node.latency,
        bandwidth_Bps=machine.intra_node.bandwidth,
        ranks_per_node=NODE,
        inter_latency_s=between.latency,
        inter_bandwidth_Bps=between.bandwidth,
        clock="streams",
    ) as net:
        model = sharded(strategy, forward_s, backward_s)
        for _ in range(STEPS):
            net.reset()
            model(torch.ones(2, WIDTH)).sum().backward()
            for parameter in model.parameters():
                parameter.grad = None
        simulated_s, plan = net.exposed_s, cs.make_plan(model)
    compute = {
        (direction, group.fqn): took
        for direction, took in ((FORWARD, forward_s), ("backward", backward_s))
        for group in plan.groups
    }
    timed = dataclasses.replace(plan, costs=costs_of(plan, strategy, compute, machine))
    exposed_s = timed.predicted().exposed
    assert exposed_s is not None
    return OnNetwork("network", name, world, sequence, BLOCKS * (forward_s + backward_s), exposed_s, simulated_s)


def print_tables(rows: Sequence[Predicted | OnNetwork]) -> None:
    plans = [row for row in rows if isinstance(row, Predicted)]
    if plans:
        _report.table(
            "Predicted, not measured: Llama 3 70B, full activation checkpointing, one sequence per rank",
            ("strategy", "ranks", "tokens per rank", "step", "compute", "exposed", "sent", "memory", "fits"),
            [
                (
                    row.strategy,
                    str(row.world),
                    str(row.sequence),
                    f"{row.step_s:.3f} s",
                    f"{row.compute_s:.3f} s",
                    f"{row.exposed_s:.3f} s",
                    f"{row.sent_bytes / 1e9:.0f} GB",
                    f"{row.memory_bytes / 2**30:.1f} GiB",
                    "yes" if row.fits else "no",
                )
                for row in plans
            ],
            f"{MACHINE.name}; nodes of {NODE} ranks; shards of hsdp and hfsdp are one node",
        )
    simulated = [row for row in rows if isinstance(row, OnNetwork)]
    if simulated:
        _report.table(
            f"Exposed communication of {BLOCKS} blocks, predicted and on a simulated network",
            ("strategy", "ranks", "tokens per rank", "compute", "predicted", "simulated", "error"),
            [
                (
                    row.strategy,
                    str(row.world),
                    str(row.sequence),
                    f"{1e3 * row.compute_s:.1f} ms",
                    f"{1e3 * row.predicted_s:.2f} ms",
                    f"{1e3 * row.simulated_s:.2f} ms",
                    f"{row.predicted_s / row.simulated_s - 1:+.1%}",
                )
                for row in simulated
            ],
            "an all-reduce (hsdp) has the latency of one collective in the prediction, and of two on the network",
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = "(default: %(default)s)"
    parser.add_argument("--parts", type=_report.names(PARTS), default=",".join(PARTS), help=f"parts to run {shown}")
    parser.add_argument("--worlds", type=_report.integers, default="64,512", help=f"numbers of ranks {shown}")
    parser.add_argument("--sequences", type=_report.integers, default="8192,2048,1024", help=f"tokens per rank {shown}")
    parser.add_argument(
        "--strategies", type=_report.names(STRATEGIES), default=",".join(STRATEGIES), help=f"strategies {shown}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args()


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    rows: list[Predicted | OnNetwork] = []
    if "predicted" in options.parts:
        rows += predicted(options.worlds, options.sequences, options.strategies)
    if "network" in options.parts:
        rows += network(options.worlds, options.sequences, options.strategies)
    print_tables(rows)
    _report.save(options, "hfsdp", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
