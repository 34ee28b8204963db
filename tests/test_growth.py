"""A long run of the demo takes no more memory at its end than near its beginning."""

from __future__ import annotations

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
    with open("/proc/self/statm") as found:
        return int(found.read().split()[1]) * 4096 / 2**20


@pytest.mark.matrix
@pytest.mark.timeout(LIMIT_S + 60)
@distributed(world=2, limit_s=LIMIT_S)
def test_a_thousand_steps_of_the_demo_grow_resident_memory_by_less_than_five_mib(rank, world):
    """As `make demo` trains: its model, its options, its loop, which validates four times on the way; warm-up does once."""
    tutorial = importlib.import_module("01_train_gpt")
    device, options = torch.device("cpu"), tutorial.Options(steps=WARM_UP + STEPS, strategy=os.environ.get("STRATEGY", "zero3"))
    options = tutorial.choose_precision(options, device)
    model, corpus = build_gpt(options.size, options.seed), load_corpus()
    tutorial.shard(model, options, device)
    optimizer = tutorial.make_optimizer(model, options)
    resident: list[float] = []

    def report(moment):
        if moment.step == WARM_UP // 2:
            tutorial.evaluate(model, corpus, options, device, options.evaluation // 4)
        if moment.step % 10 == 0:
            resident.append(resident_mib())

    tutorial.train(model, optimizer, corpus, options, device, report=report)
    if "GROWTH" in os.environ:
        Path(os.environ["GROWTH"] + str(rank)).write_text(f"{resident}\n")
    assert resident[-1] - resident[WARM_UP // 10 - 1] < 5
