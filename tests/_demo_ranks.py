"""Ranks of the demo as processes that a test can kill: forks of a process that has imported torch, or under torchrun.

The text is short, and no figures are drawn. Everything else is the same as in the demo.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # needed for sharding, and slow to import

from _console import Interrupt
from _gpt import Corpus
from _launched import free_port

DEMO = importlib.import_module("01_train_gpt")
TEXT = torch.frombuffer(bytearray(Path(importlib.__file__).read_bytes()), dtype=torch.uint8)
DEMO.load_corpus = lambda: Corpus(TEXT, TEXT)
DEMO.draw = lambda *_: None
FEW = ["--size", "tiny", "--precision", "float32", "--evaluation", "16", "--sample", "0"]


def options(out, steps, every):
    return [*FEW, "--out", str(out), "--steps", str(steps), "--save-every", str(every)]


def rank_of_the_demo(arguments, output, rank, world, port):
    """Run one rank of the demo, in a forked process."""
    descriptor = os.open(f"{output}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    sys.argv[:] = ["01_train_gpt.py", *arguments]
    sys.exit(DEMO.main(Interrupt()))


def start(out, world, steps, every, *more):
    """Start the ranks. Returns their processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["_demo_ranks"])
    port = free_port()
    arguments = [*options(out, steps, every), *more]
    ranks = [
        context.Process(target=rank_of_the_demo, args=(arguments, out / "said", rank, world, port), daemon=True)
        for rank in range(world)
    ]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # Python 3.11 finds preloaded modules through it
    for each in ranks:
        each.start()
    del os.environ["PYTHONPATH"]
    os.environ |= {} if before is None else {"PYTHONPATH": before}
    return ranks


def end(ranks, limit_s=120):
    """Wait for the ranks. Returns their exit codes. Processes that are still running at the limit are killed."""
    deadline = time.monotonic() + limit_s
    for each in ranks:
        each.join(max(0.0, deadline - time.monotonic()))
    kill(ranks)
    return [each.exitcode for each in ranks]


def kill(ranks):
    for each in ranks:
        each.kill()
    for each in ranks:
        each.join()


def rows(out):
    """The metrics of finished steps, by step."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def curve(out):
    """Step, loss, gradient norm and learning rate of every step."""
    return [
        (row["step"], row["loss"], row["gradient_norm"], row["learning_rate"]) for row in rows(out) if "loss" in row
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(DEMO.main(Interrupt()))
