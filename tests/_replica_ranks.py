"""One rank of `faults/test_replicas_that_end.py`: of two replicas with two ranks each, the first one ends early."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, mesh_of
from _reports import reported

LIMIT_S = 20.0


def main():
    shard = ENGINES[sys.argv[1]]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank = dist.get_rank()
    model, plain = Transformer(layers=2), Transformer(layers=2)
    plain.load_state_dict(model.state_dict())
    for block in model.blocks:
        shard(block, mesh=mesh_of(2, 2))
    shard(model, mesh=mesh_of(2, 2))
    next_token_loss(model, *token_batch(rank, 0)).backward()
    dist.barrier()
    if rank < 2:
        os._exit(0)  # rank 0 hosts the store
    time.sleep(1.0)
    with torch.no_grad():
        for step in range(2):
            torch.testing.assert_close(model(token_batch(rank, step)[0]), plain(token_batch(rank, step)[0]))
    with reported(rank):
        next_token_loss(model, *token_batch(rank, 1)).backward()


main()
