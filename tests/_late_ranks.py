"""One rank of `faults/test_first_forward.py`: it fails or sleeps before its first forward, and prints how it ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from _blocks import Transformer, next_token_loss, token_batch
from _reports import reported
from composable_shard import fully_shard

LIMIT_S = 8.0  # timeout of collectives


def fail():
    raise ValueError("bad data")


def end():
    sys.exit(0)


def end_at_once():
    os._exit(0)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep():
    time.sleep(1.7 * LIMIT_S)


def sharded(axes):
    """A decoder on a mesh with axes of these sizes. It is compiled if COMPILED is set in the environment."""
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("replicate", "shard")[-len(axes) :]) if axes else None
    torch.manual_seed(0)
    model = Transformer(layers=2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
        if "COMPILED" in os.environ:
            block.compile(backend="aot_eager")
    return fully_shard(model, mesh=mesh)


def main():
    what, who, axes = sys.argv[1], json.loads(sys.argv[2]), tuple(json.loads(sys.argv[3]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank = dist.get_rank()
    model = sharded(axes)
    dist.barrier()
    with reported(rank):
        if rank in who:
            globals()[what]()
        next_token_loss(model, *token_batch(rank, 0)).backward()


main()
