"""A worker process of `processes`: runs named functions on a process group until its pipe closes."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # otherwise DTensor would import it in the first job
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh

from .._torch.core import active_saved_tensors_hooks
from .._torch.distributed import all_groups
from ._processes import Job, Outcome
from ._spmd import World
from ._torch import forget_meshes, share_gloo_device

_COLLECTIVE_LIMIT_S = 100


class Group:
    """The default process group of this worker. It is re-created when a job has a new epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def enter(self, job: Job) -> None:
        if job.epoch == self.epoch and dist.is_initialized():
            return
        self.leave()
        store = dist.FileStore(job.store, job.world)  # type: ignore[attr-defined]
        limit = timedelta(seconds=_COLLECTIVE_LIMIT_S)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=limit)
        self.epoch = job.epoch

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
            forget_meshes()
        self.epoch = 0


def resolve(target: str, file: str | None = None) -> Any:
    """Import the object `module:name`, from a script if `file` is given."""
    name, _, path = target.partition(":")
    named: Any = importlib.import_module(name) if file is None else _script(file)
    for part in path.split("."):
        named = getattr(named, part)
    return named


def _script(file: str) -> Any:
    """Import a script as a module. Code under ``if __name__ == "__main__"`` does not run."""
    name = f"_script_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def check_hygiene(number: int, world: int) -> None:
    """Check that a job restored all process-wide state, and that the ranks issued the same collectives.

    Raises:
        AssertionError: they did not.
    """
    left = {
        "left grad mode off": not torch.is_grad_enabled(),
        "left inference mode on": torch.is_inference_mode_enabled(),
        "left saved-tensor hooks behind": active_saved_tensors_hooks() is not None,
        "changed the default dtype": torch.get_default_dtype() != torch.float32,
        "changed the number of threads": torch.get_num_threads() != 1,
        "destroyed the default process group": not dist.is_initialized(),
    }
    for what, is_so in left.items():
        if is_so:
            raise AssertionError(f"the job {what}")
    if world > 1:
        seen = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(seen, torch.tensor([number]))
        if [int(s) for s in seen] != [number] * world:
            raise AssertionError("ranks issued different collectives")


def run_job(group: Group, job: Job) -> Outcome:
    """Run a job. An exception becomes part of the outcome."""
    try:
        group.enter(job)
        torch.manual_seed(0)
        with resolve(job.around)() if job.around else contextlib.nullcontext():
            function = resolve(job.target, job.file)
            mesh = init_device_mesh("cpu", tuple(job.axes.values()), mesh_dim_names=tuple(job.axes))
            args, kwargs = pickle.loads(job.arguments)
            value = function(World(job.rank, job.world, mesh), *args, **kwargs)
        del mesh
        gc.collect()
        gc.freeze()  # most remaining objects are modules and caches; scanning them again takes longer than a test
        check_hygiene(job.number, job.world)
        return Outcome(job.rank, True, value, groups=len(all_groups()))
    except BaseException as error:
        outcome = Outcome(job.rank, False, trace=_format(error), at=time.monotonic())
        traceback.clear_frames(error.__traceback__)
    group.leave()  # makes the collectives of peers fail now instead of at the time limit
    gc.collect()
    torch.set_grad_enabled(True)
    return outcome


def _format(error: BaseException) -> str:
    """The traceback without the frames of this file."""
    lines = traceback.TracebackException.from_exception(error, capture_locals=False)
    while len(lines.stack) > 1 and lines.stack[0].filename == __file__:
        del lines.stack[0]
    return "".join(lines.format())


def leave_with(parent: int) -> None:
    """End this process when its parent has ended, even while a collective blocks the main thread."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(pipe: Connection, parent: int) -> None:
    """Run jobs until the parent sends empty bytes."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    leave_with(parent)
    share_gloo_device()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # makes the collection after each job cheap
    group = Group()
    pipe.send("ready")
    while given := pipe.recv_bytes():
        outcome = run_job(group, pickle.loads(given))
        try:
            answer = pickle.dumps(outcome)
        except Exception as error:
            text = f"the result cannot be sent: {error!r}"
            answer = pickle.dumps(Outcome(outcome.rank, False, trace=text, at=time.monotonic()))
        pipe.send_bytes(answer)
    group.leave()
