"""Train under Ray: it starts the workers, starts them again when one is lost, and is told of each checkpoint.

    pip install "ray[train]"
    python tutorials/08_ray_train.py   # two workers of this machine

A worker's function is a training like any other: Ray has made the process group, and the checkpoint is this library's,
written by all workers into a directory that all of them see. The training itself is in `_job.py`. To see it go on, give
it `--pause 1` and kill a worker with `kill -9`; runs/08/rank-1.json has its process id.
"""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

from _job import Job, train


def work(job: dict[str, Any]) -> None:
    """What each worker does, at every start of it."""
    for step in train(Job(**job), get_device()):
        known = step.checkpoint if dist.get_rank() == 0 else None  # all have written it; one of them says where it is
        ray.train.report(
            {"step": step.number, "loss": step.loss},
            checkpoint=Checkpoint.from_directory(known) if known else None,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it is where Ray keeps what belongs to this run
        )


def main() -> int:
    job = parse()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False)  # on a cluster: ray.init("auto")
    trainer = TorchTrainer(
        work,
        train_loop_config=asdict(job),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=job.out.name,
            storage_path=str(job.out.parent),
            failure_config=FailureConfig(max_failures=3),  # connecting again may take a second start
        ),
    )
    result = trainer.fit()
    print(f"step {result.metrics['step']}: loss {result.metrics['loss']!r}; {result.checkpoint.path}", flush=True)
    ray.shutdown()
    return 0


def parse(arguments: list[str] | None = None) -> Job:
    parser = argparse.ArgumentParser(
        description="Train a small GPT under Ray.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/08"), help="where checkpoints go, the same directory on all nodes")
    add("--steps", type=int, default=Job.steps, help="after how many it ends")
    add("--save-every", type=int, default=Job.save_every, help="steps between checkpoints")
    add("--windows", type=int, default=Job.windows, help="of text in a step, a multiple of the number of ranks")
    add("--pause", type=float, default=Job.pause, help="seconds of rest after each step")
    add("--fsdp2", action="store_true", help="shard with torch's own engine, to compare")
    job = parser.parse_args(arguments)
    job.out = job.out.absolute()  # workers have a working directory of their own
    return Job(**vars(job))


if __name__ == "__main__":
    sys.exit(main())
