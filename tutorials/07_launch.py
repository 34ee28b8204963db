"""What a launcher starts on each rank: it trains, saves, and goes on from the last checkpoint when it is started again.

    python tutorials/07_launch.py                                        # two processes of this machine
    torchrun --standalone --nproc-per-node 2 tutorials/07_launch.py      # the same
    torchrun --nnodes 2 ... tutorials/07_launch.py --replicas 2          # two nodes, each with a whole model: HSDP

docs/launching.md has the whole commands for nodes, and launch/ the files for Slurm and Kubernetes. The training is in
`_job.py`. Nothing in here knows what has started it: torchrun tells each process its rank by the environment.
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
        print(f"goes on after step {checkpoint.latest(job.out)} on {world} ranks; remove {job.out} to begin anew")
    for step in train(job, device):
        if first and (step.checkpoint or step.number % 10 == 0):
            saved = f", saved in {step.checkpoint}" if step.checkpoint else ""
            print(f"step {step.number:3} on {world} ranks: loss {step.loss:.3f}{saved}", flush=True)
    dist.destroy_process_group()
    return 0


def parse(arguments: list[str] | None = None) -> Job:
    parser = argparse.ArgumentParser(
        description="Train a small GPT, whatever starts it.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/07"), help="where checkpoints go, the same directory on all nodes")
    add("--steps", type=int, default=Job.steps, help="after how many it ends")
    add("--save-every", type=int, default=Job.save_every, help="steps between checkpoints")
    add("--windows", type=int, default=Job.windows, help="of text in a step, a multiple of the number of ranks")
    add("--replicas", type=int, default=Job.replicas, help="copies of the sharded model; one for each node is usual")
    add("--pause", type=float, default=Job.pause, help="seconds of rest after each step")
    add("--fsdp2", action="store_true", help="shard with torch's own engine, to compare")
    return Job(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
