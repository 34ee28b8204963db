"""Time tests of sharded layers, per test and for a hundred tests.

    python bench/testing.py

A test is `assert_matches_unsharded` of one transformer block, three steps, on 2 and 4 simulated ranks. The first test
is reported separately, because torch imports modules in it.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn as nn

from composable_shard import testing


class Block(nn.Module):
    """Attention with a single head, and an MLP."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(self.up(self.norms[1](x)).relu())


def one(world_size: int) -> tuple[float, float]:
    """Return wall time and CPU time of a test, in seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    testing.assert_matches_unsharded(
        Block,
        lambda batch, step: torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(100 * step + batch)),
        world_size=world_size,
    )
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=int, default=100, help="number of tests")
    count = parser.parse_args().tests
    print(f"torch {torch.__version__}; first test: {one(2)[0]:.2f} s")
    for world_size in (2, 4):
        walls, cpus = zip(*(one(world_size) for _ in range(count)), strict=True)
        low, mid, high = statistics.quantiles(walls, n=4)
        print(
            f"{world_size} ranks: {mid:.3f} s per test [{low:.3f}, {high:.3f}], {sum(walls):.1f} s for {count} "
            f"({sum(cpus):.1f} s CPU time)"
        )


if __name__ == "__main__":
    main()
