"""Start a tutorial's processes under torchrun, and initialize their process group."""

import logging
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from _console import INTERRUPTED, Interrupt


def start_ranks(kind: str) -> torch.device:
    """Initialize the process group and return this rank's device. `kind` is auto, cpu or cuda."""
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if kind == "auto":
        kind = "cuda" if torch.cuda.device_count() >= local_world else "cpu"
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    return device


def on_rank(run: Callable[[], int], interrupt: Interrupt) -> int:
    """Call `run`, destroy the process group, and return the exit status."""
    try:
        status = run()
    except RuntimeError:  # a lost connection, if Ctrl-C ended a peer first
        time.sleep(0.5)
        if interrupt.asked:
            interrupt.leave()
        raise
    dist.destroy_process_group()
    return status


def launch(script: str, processes: int, *more: str) -> int:
    """Start this script under torchrun, with additional arguments `more`. Return the exit status."""
    # All ranks are on this machine: use loopback, and divide the cores among the processes.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)  # hide a warning per signal
    here = ["--standalone", "--local-addr", "127.0.0.1", f"--nproc-per-node={processes}"]
    try:
        torchrun([*here, script, *sys.argv[1:], *more])
    except SignalException:
        return INTERRUPTED
    except ChildFailedError:  # torchrun and the failed rank have printed the error
        return 1
    return 0
