"""Run an unchanged script on a rank of a launcher, and count the bytes of its live tensors.

    torchrun --nproc-per-node 2 _counted.py ours|torch OUT SCRIPT [ARGUMENT ...]

Rank 0 writes the peak to OUT, in bytes.
"""

import os
import sys
from pathlib import Path

import torch

import composable_shard
from composable_shard._torch.tracing import shapes_apart
from composable_shard.cli.program import run_program
from composable_shard.planner.live import LiveBytes

PLAIN = (torch.Tensor, torch.nn.Parameter)  # other subclasses are fake tensors, or wrap plain tensors


if __name__ == "__main__":
    side, out, script, *arguments = sys.argv[1:]
    if side == "ours":
        composable_shard.install()
    out = Path(out).absolute()
    with shapes_apart(), LiveBytes(counts=lambda tensor: type(tensor) in PLAIN) as counter:
        run_program(script, arguments)
    if os.environ["RANK"] == "0":
        out.write_text(str(counter.peak))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
