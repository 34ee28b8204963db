"""A rank in a process without Linux-only functions, like on a Mac. It imports all modules, trains, saves and loads.

    python _as_on_a_mac.py RANK FOLDER

After torch is imported and before the package is, the script removes names that do not exist on a Mac. Files in /proc,
/sys and /dev/shm cannot be opened, and torch reports an accelerator without collectives. Other differences (another
gloo, C library or file system) are not simulated.
"""

from __future__ import annotations

import ctypes
import ctypes.util  # now, because Debian removes its part for a Mac from Python
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
from imports import import_everything  # this file also runs without the checkout

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
    """Remove functions and constants that do not exist on a Mac."""
    sysconfig.get_config_vars()  # cache them now, because this interpreter has none for a Mac
    tempfile._O_TMPFILE_WORKS = False  # otherwise Python itself would use it
    for module, names in LINUX_ALONE.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = "darwin"
    platform.system = lambda: "Darwin"
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("mps")
    library = ctypes.CDLL

    class Library(library):  # malloc_trim and sync_file_range exist only on Linux
        def __init__(self, name, *args, **kwargs):
            if name is None:
                raise OSError("the C library of this process is not that of a Mac")
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
    """Train for three steps, compare with the unsharded model, save the state in both ways, and load it."""
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
    for batch in batches:  # the same batches on all ranks
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
    """Check that the description of the machine works without the tables in /proc."""
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
