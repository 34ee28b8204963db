"""A long run of the demo's model takes no more memory at its end than near its beginning."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from _engines import fully_shard
from _gpt import build_gpt, next_byte_loss
from _pool import distributed

STEPS, WARM_UP = 1000, 100
LIMIT_S = 1500.0


def resident_bytes() -> int:
    with open("/proc/self/statm") as found:
        return int(found.read().split()[1]) * 4096


@pytest.mark.matrix
@pytest.mark.timeout(LIMIT_S + 60)
@distributed(world=2, limit_s=LIMIT_S)
def test_a_thousand_steps_of_the_demo_grow_resident_memory_by_less_than_five_mib(rank, world):
    model = build_gpt("tiny")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    windows = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(rank))
    begin = 0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            gc.collect()
            begin = resident_bytes()
        next_byte_loss(model, windows).backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    grown = (resident_bytes() - begin) / 2**20
    if rank == 0:
        Path(os.environ.get("GROWTH", os.devnull)).write_text(f"{grown:.2f} MiB in {STEPS} steps")
    assert grown < 5
