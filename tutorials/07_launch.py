"""Train under any launcher, save checkpoints, and resume from the last one after a restart.

    python tutorials/07_launch.py                                        # two processes on this machine
    torchrun --standalone --nproc-per-node 2 tutorials/07_launch.py      # the same
    torchrun --nnodes 2 ... tutorials/07_launch.py --replicas 2          # two nodes, HSDP with one replica per node

docs/launching.md has the complete commands for several nodes. launch/ has files for Slurm and Kubernetes. The training
loop is in `_job.py`. The script does not depend on the launcher, which sets ranks in the environment.
"""

import argparse
import os
import sys
from pathlib import Path

import torch.distributed as dist

from _job import Job, train
from _ranks import launch, start_ranks
from composable_shard import checkpoint


def main() -> int:
    job = parse()
    if "LOCAL_RANK" not in os.environ:
        return launch(__file__, 2)
    device = start_ranks("auto")
    first, world = dist.get_rank() == 0, dist.get_world_size()
    if first and checkpoint.latest(job.out) is not None:
        print(f"resumed after step {checkpoint.latest(job.out)} on {world} ranks; delete {job.out} to start over")
    for step in train(job, device):
        if first and (step.checkpoint or step.number % 10 == 0):
            saved = f", saved in {step.checkpoint}" if step.checkpoint else ""
            print(f"step {step.number:3} on {world} ranks: loss {step.loss:.3f}{saved}", flush=True)
    dist.destroy_process_group()
    return 0


def parse(arguments: list[str] | None = None) -> Job:
    parser = argparse.ArgumentParser(
        description="Train a small GPT under any launcher.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/07"), help="directory of checkpoints, shared by all nodes")
    add("--steps", type=int, default=Job.steps, help="number of steps")
    add("--save-every", type=int, default=Job.save_every, help="steps between checkpoints")
    add("--windows", type=int, default=Job.windows, help="windows of text per step, a multiple of the number of ranks")
    add("--replicas", type=int, default=Job.replicas, help="copies of the sharded model; usually one per node")
    add("--pause", type=float, default=Job.pause, help="pause after each step, in seconds")
    add("--fsdp2", action="store_true", help="shard with torch's FSDP2, for comparison")
    return Job(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
