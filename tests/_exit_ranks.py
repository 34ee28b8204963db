"""One rank of `faults/test_exits.py`: it ends while a collective is in flight and gradients are unreduced.

Rank 1 joins the collective only when rank 0 shuts its interpreter down. The collective then ends on rank 0 in a thread
of gloo. That thread requests the GIL, which the interpreter no longer releases.
"""

# ruff: noqa: E402

import atexit
import ctypes
import sys
import time
from datetime import timedelta
from pathlib import Path

ENDS = Path(sys.argv[1]) / "rank 0 ends"
JOINED_S = 0.5  # rank 1 joins within this time, while rank 0 holds the GIL
LIMIT_S = 20.0


def announce():
    if dist.get_rank() == 0:
        ENDS.touch()


# The first registered function runs last, after the exit handlers of torch and the library. PyDLL does not release the
# GIL, and no Python function calls it here. So the interpreter shuts down without passing the GIL to a waiting thread.
atexit.register(ctypes.PyDLL(None).usleep, int(JOINED_S * 1e6))
atexit.register(announce)

import torch
import torch.distributed as dist

from _blocks import Transformer, next_token_loss, token_batch
from composable_shard import fully_shard


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank = dist.get_rank()
    model = Transformer(layers=2)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.set_requires_gradient_sync(False)
    for i in range(2):
        next_token_loss(model, *token_batch(rank, i)).backward()
    until = time.monotonic() + LIMIT_S
    while rank == 1 and not ENDS.exists() and time.monotonic() < until:
        time.sleep(0.01)
    model.metric = torch.zeros(1000)
    dist.all_reduce(model.metric, async_op=True)  # the handle, which also refers to the tensor, is freed here
    print("trained", flush=True)
    if rank == 1:
        time.sleep(2 * JOINED_S)  # if it ended, the collectives of rank 0 would end too


main()
