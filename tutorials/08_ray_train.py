"""Train under Ray, which starts the workers and restarts them when one is lost.

    pip install "ray[train]"
    python tutorials/08_ray_train.py   # two workers on this machine

The worker's function is an ordinary training script. Ray initializes the process group. All workers write checkpoints
of this library to a shared directory, and one worker reports them to Ray. The training loop is in `_job.py`. To see a
restart, pass `--pause 1` and kill a worker with `kill -9`. runs/08/rank-1.json has its process id.
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
    """Train. Runs in each worker, at every start."""
    for step in train(Job(**job), get_device()):
        known = step.checkpoint if dist.get_rank() == 0 else None  # all ranks wrote it, only rank 0 reports it
        ray.train.report(
            {"step": step.number, "loss": step.loss},
            checkpoint=Checkpoint.from_directory(known) if known else None,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it is already in Ray's directory of this run
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
            failure_config=FailureConfig(max_failures=3),  # a restart may need a second attempt to connect
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
    add("--out", type=Path, default=Path("runs/08"), help="directory of checkpoints, shared by all nodes")
    add("--steps", type=int, default=Job.steps, help="number of steps")
    add("--save-every", type=int, default=Job.save_every, help="steps between checkpoints")
    add("--windows", type=int, default=Job.windows, help="windows of text per step, a multiple of the number of ranks")
    add("--pause", type=float, default=Job.pause, help="pause after each step, in seconds")
    add("--fsdp2", action="store_true", help="shard with torch's FSDP2, for comparison")
    job = parser.parse_args(arguments)
    job.out = job.out.absolute()  # workers have another working directory
    return Job(**vars(job))


if __name__ == "__main__":
    sys.exit(main())
