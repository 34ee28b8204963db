"""One rank of `faults/test_exits.py`: it ends while a collective of its own is on the way and gradients are unreduced.

Rank 1 joins that collective only once rank 0 shuts its interpreter down. The collective then ends on rank 0 in a thread
of gloo, which asks for the GIL of an interpreter that does not give it away any more.
"""

# ruff: noqa: E402

import atexit
import ctypes
import sys
import time
from datetime import timedelta
from pathlib import Path

ENDS = Path(sys.argv[1]) / "rank 0 ends"
JOINED_S = 0.5  # in which rank 1 joins, while rank 0 keeps the GIL
LIMIT_S = 20.0


def announce():
    if dist.get_rank() == 0:
        ENDS.touch()


# What is registered first runs last, after what torch and the library do at exit. PyDLL does not release the GIL, and
# as no function of Python's calls it here, the interpreter shuts down without giving the GIL to a thread that waits.
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
    dist.all_reduce(model.metric, async_op=True)  # its handle, which holds the tensor too, is freed here
    print("trained", flush=True)
    if rank == 1:
        time.sleep(2 * JOINED_S)  # its end would end collectives of rank 0, too


main()
