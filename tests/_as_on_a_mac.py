"""A rank in a process that lacks what only Linux has, as one on a Mac: it imports everything, trains, saves and loads.

    python _as_on_a_mac.py RANK FOLDER

It stands in for a Mac: what is missing there is taken away after torch is loaded and before the package is, files below
/proc, /sys and /dev/shm cannot be opened, and torch names an accelerator for which it has no collectives. What differs
beyond names (another gloo, another C library, another file system) is not seen in here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import select
import signal
import socket
import sys
import sysconfig
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "tools" / "release" / "smoke"))
from imports import import_everything  # a file that runs without the checkout, too

LINUX_ALONE = {
    os: "memfd_create posix_fallocate posix_fadvise fdatasync sched_getaffinity sched_setaffinity sched_getscheduler "
    "pidfd_open eventfd splice copy_file_range setns unshare preadv2 preadv pwritev getrandom O_TMPFILE O_DIRECT "
    "O_PATH O_NOATIME O_LARGEFILE O_RSYNC MFD_CLOEXEC POSIX_FADV_DONTNEED RWF_DSYNC GRND_NONBLOCK",
    mmap: "MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTFORK MADV_POPULATE_WRITE MAP_POPULATE MAP_STACK",
    resource: "prlimit RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_SIGPENDING",
    select: "epoll EPOLLIN EPOLLOUT",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGPOLL SIGPWR SIGRTMIN SIGRTMAX SIGSTKFLT",
    socket: "SOCK_CLOEXEC SOCK_NONBLOCK AF_NETLINK AF_PACKET SO_BINDTODEVICE SO_PEERCRED",
}
NOT_THERE = ("/proc", "/sys", "/dev/shm")
WORLD = 2


def become_a_mac():
    """Take away what a Mac does not have."""
    sysconfig.get_config_vars()  # of this interpreter, which has none of a Mac
    tempfile._O_TMPFILE_WORKS = False  # which Python itself would use
    for module, names in LINUX_ALONE.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = "darwin"
    platform.system = lambda: "Darwin"
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("mps")
    library = ctypes.CDLL

    class Library(library):  # its malloc_trim and sync_file_range are GNU's and Linux's
        def __init__(self, name, *args, **kwargs):
            if name is None:
                raise OSError("what the process is linked with is another C library's")
            super().__init__(name, *args, **kwargs)

    ctypes.CDLL = Library
    sys.addaudithook(refuse)


def refuse(event, args):
    if event == "open" and isinstance(args[0], str) and args[0].startswith(NOT_THERE):
        raise FileNotFoundError(2, "No such file or directory", args[0])


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def step(model, optimizer, inputs):
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(rank, folder):
    """Three steps beside the unsharded model; state that is saved, in both ways, and loaded."""
    import composable_shard as cs
    from composable_shard import checkpoint

    whole, model = model_of(0), model_of(0)
    for layer in model:
        if isinstance(layer, nn.Linear):
            cs.fully_shard(layer)
    cs.fully_shard(model)  # on the default mesh
    assert next(model.parameters()).device_mesh.device_type == "cpu"
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (whole, model)]
    batches = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    for batch in batches:  # the same on all ranks
        torch.testing.assert_close(step(model, optimizers[1], batch), step(whole, optimizers[0], batch))
    state = {"model": model, "optimizer": optimizers[1], "random": checkpoint.RandomState()}
    checkpoint.save(folder / "saved", state, step=1)
    checkpoint.async_save(folder / "saved", state, step=2).result()
    again = cs.fully_shard(model_of(2))
    state = {"model": again, "optimizer": torch.optim.AdamW(again.parameters()), "random": checkpoint.RandomState()}
    assert checkpoint.load(folder / "saved", state).step == 2
    for loaded, param in zip(again.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(loaded.full_tensor(), param.detach())
    for path in (folder / "saved").glob("step-*"):
        checkpoint.verify(path.parent, step=int(path.name[5:]))
    return model, optimizers[1]


def describes_itself():
    """What the machine is, without the tables of Linux."""
    from composable_shard.planner import environment, host
    from composable_shard.planner.ranks import default_ranks, device_kind

    assert host.cores() >= 1
    assert host.total_memory() >= host.available_memory() > 0
    assert (default_ranks("auto"), device_kind("auto", 2)) == (2, "cpu")
    states = {each.what: each.state for each in environment.environment().support}
    assert states["operating system"] == "untested"


def main(rank, folder):
    become_a_mac()
    assert "composable_shard" not in sys.modules
    count, _ = import_everything()
    describes_itself()
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    train(rank, folder)
    dist.destroy_process_group()
    print(f"{count} modules, as on a Mac")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
