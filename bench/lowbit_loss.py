"""Measure the effect of low-bit communication on the loss of a small GPT.

    python bench/lowbit_loss.py --json lowbit_loss.json

Trains the tutorials' `tiny` GPT (41,000 parameters) on Python's standard library, on two simulated ranks, with each
policy and from several seeds (weights and data). Policies apply to the blocks. Embedding and head are not rounded. A
result is the mean loss of the last steps; its spread is over the seeds.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import _report
import composable_shard as cs
from _models import tutorial
from composable_shard import CommPolicy, testing

POLICIES = {
    "fp32": CommPolicy(),
    "gather fp8": CommPolicy(gather="fp8"),
    "gather int8": CommPolicy(gather="int8"),
    "gather fp8, reduce bf16": CommPolicy(gather="fp8", reduce="bf16"),
    "gather fp8, reduce int8": CommPolicy(gather="fp8", reduce="int8"),
}
RANKS, WINDOWS, LAST = 2, 8, 20  # ranks, windows per rank and step, steps whose losses are averaged


@dataclass(frozen=True)
class PolicyLoss:
    """Mean loss of the last steps with a policy, in nats per byte: by seed, and the mean difference to fp32."""

    policy: str
    losses: list[float]
    over_fp32: float


def train(policy: CommPolicy, seed: int, steps: int) -> float:
    """Train from a seed. Returns the mean loss of all ranks in the last steps."""
    gpt = tutorial("_gpt")
    text = gpt.load_corpus().train

    def body(world: testing.World) -> float:
        model = gpt.build_gpt("tiny", seed)
        cs.shard_by_class(model, {gpt.Block})
        for block in model.blocks:
            block.set_comm_policy(policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        data = torch.Generator().manual_seed(seed)
        losses = []
        for _ in range(steps):
            windows = gpt.random_windows(text, RANKS * WINDOWS, 33, data)[world.rank :: RANKS]
            loss = gpt.next_byte_loss(model, windows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return statistics.fmean(losses[-LAST:])

    return statistics.fmean(testing.spmd(RANKS, timeout=600.0)(body))


def measure(options: argparse.Namespace) -> Iterator[PolicyLoss]:
    exact: list[float] = []
    for name, policy in POLICIES.items():
        losses = [train(policy, seed, options.steps) for seed in range(options.seeds)]
        exact = exact or losses
        yield PolicyLoss(name, losses, statistics.fmean(losses) - statistics.fmean(exact))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = list(measure(options))
    rows = [
        (
            r.policy,
            f"{statistics.fmean(r.losses):.3f}",
            f"{r.over_fp32:+.3f}",
            f"{min(r.losses):.3f} to {max(r.losses):.3f}",
        )
        for r in results
    ]
    title = f"Mean loss of the last {LAST} of {options.steps} steps, nats per byte"
    _report.table(title, ("policy", "loss", "minus fp32", "over seeds"), rows, f"{options.seeds} seeds, {RANKS} ranks")
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        _report.write_json(options.json, "lowbit_loss", settings, results)


if __name__ == "__main__":
    main()
