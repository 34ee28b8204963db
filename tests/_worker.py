"""A worker of the test pool (see _pool.py): runs named functions on a process group until its pipe closes.

Started as a script with the number of its pipe's file descriptor; never imported by pytest.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

ALLOWED_WARNINGS = [
    "DTensor random operators may not have complete support on cpu",  # torch, when shards are initialised on CPU
]


class Group:
    """The default process group of this worker, renewed when the pool names a new epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def enter(self, epoch: int, store: str, rank: int, world: int) -> None:
        import torch.distributed as dist

        if epoch == self.epoch and dist.is_initialized():
            return
        self.leave()
        file_store = dist.FileStore(store, world)
        dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world, timeout=timedelta(seconds=100))
        self.epoch = epoch

    def leave(self) -> None:
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
            # DTensor's caches take equal meshes for the same one, and would name groups that are gone
            torch.distributed.tensor.debug._clear_sharding_prop_cache()
        self.epoch = 0


def rewrite_asserts() -> None:
    """Have pytest rewrite the asserts of test modules here too, so that a failure shows both sides."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config()).mark_rewrite("_parity", "_stepping")


def resolve(job: str) -> Any:
    module, _, name = job.partition(":")
    target = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return getattr(target, "__wrapped__", target)


def check_hygiene(number: int, world: int) -> None:
    """Nothing that a job sets for the whole process may outlive it, and ranks must have issued the same collectives."""
    import torch
    import torch.distributed as dist

    assert torch.is_grad_enabled(), "the job left grad mode off"
    assert not torch.is_inference_mode_enabled(), "the job left inference mode on"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "the job left saved-tensor hooks behind"
    assert torch.get_default_dtype() == torch.float32, "the job changed the default dtype"
    assert torch.get_num_threads() == 1, "the job changed the number of threads"
    assert dist.is_initialized(), "the job destroyed the default process group"
    if world > 1:
        seen = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(seen, torch.tensor([number]))
        assert [int(s) for s in seen] == [number] * world, "ranks issued different collectives"


def run_job(group: Group, job: str, number: int, rank: int, world: int, epoch: int, store: str, kwargs: Any) -> Any:
    import torch
    import torch.distributed as dist

    from _pool import Outcome

    try:
        group.enter(epoch, store, rank, world)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message in ALLOWED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            value = resolve(job)(rank=rank, world=world, **kwargs)
        gc.collect()
        gc.freeze()  # what is left stays, modules and caches above all; else each collection takes longer than a test
        check_hygiene(number, world)
        return Outcome(rank, True, value, groups=len(dist.distributed_c10d._world.pg_map))
    except BaseException as error:
        outcome = Outcome(rank, False, trace=_format(error), at=time.monotonic())
        traceback.clear_frames(error.__traceback__)
    group.leave()  # the peers' collectives now end with an error, not at the time limit
    gc.collect()
    torch.set_grad_enabled(True)
    return outcome


def _format(error: BaseException) -> str:
    """The traceback below this file's own frames."""
    lines = traceback.TracebackException.from_exception(error, capture_locals=False)
    while len(lines.stack) > 1 and lines.stack[0].filename == __file__:
        del lines.stack[0]
    return "".join(lines.format())


def leave_with_parent() -> None:
    """End this process when pytest is gone, also while a collective blocks the main thread."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    leave_with_parent()
    conn = Connection(int(sys.argv[1]))
    sys.path[:] = conn.recv()

    import torch
    import torch._dynamo  # DTensor would load it in the first job
    import torch.distributed.fsdp
    import torch.distributed.tensor.debug

    torch.set_num_threads(1)
    rewrite_asserts()
    gc.collect()
    gc.freeze()  # makes the collection after each job cheap
    group = Group()
    conn.send("ready")
    while (message := conn.recv()) is not None:
        conn.send(run_job(group, *message))
    group.leave()


if __name__ == "__main__":
    main()
