"""A long run of the demo does not increase its memory."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
from pathlib import Path

import pytest
import torch

from _gpt import build_gpt, load_corpus
from _pool import distributed

STEPS, WARM_UP = 1000, 100
LIMIT_S = 1500.0


def resident_mib() -> float:
    """Resident memory of this process in MiB, without free memory in glibc's heap.

    The location of validation's large activations in the heap is random. If free memory counted, ranks would grow by 1
    to 12 MiB in a thousand steps, in jumps at validations. Torch's FSDP2 shows the same growth.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.matrix
@pytest.mark.timeout(LIMIT_S + 60)
@distributed(world=2, limit_s=LIMIT_S)
def test_a_thousand_steps_of_the_demo_grow_resident_memory_by_less_than_five_mib(rank, world):
    """Run the demo's loop with its smallest model. It validates four times, and once more during warm-up."""
    tutorial = importlib.import_module("01_train_gpt")
    device, options = torch.device("cpu"), tutorial.Options(size="tiny", steps=WARM_UP + STEPS)
    options = tutorial.choose_precision(options, device)
    model, corpus = build_gpt(options.size, options.seed), load_corpus()
    tutorial.shard(model, options, device)
    optimizer = tutorial.make_optimizer(model, options)
    resident: list[float] = []

    def report(moment):
        if moment.step == WARM_UP // 2:
            tutorial.evaluate(model, corpus, options, device, options.evaluation // 4)
        if moment.step in (WARM_UP, WARM_UP + STEPS):
            resident.append(resident_mib())

    tutorial.train(model, optimizer, corpus, options, device, report=report)
    before, after = resident
    if "GROWTH" in os.environ:
        Path(f"{os.environ['GROWTH']}-{rank}").write_text(f"{after - before:.2f} MiB in {STEPS} steps")
    assert after - before < 5
