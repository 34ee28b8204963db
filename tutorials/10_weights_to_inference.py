"""Train a small GPT on two ranks. Two other ranks generate text with its newest weights.

    python tutorials/10_weights_to_inference.py                           # four processes, less than a minute
    python tutorials/10_weights_to_inference.py --steps 400 --every 40

The script starts itself under `torchrun`. Ranks 0 and 1 train with sharded parameters. Ranks 2 and 3 hold the model
with tensor parallelism: each has half of every MLP and half of the head. Every ten steps, the trainers send their
weights, and each generator receives the slices that it holds. No rank gathers a full tensor. The generators then print
a sample, with the step that its weights are from, while training continues.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import composable_shard as cs
from _course import adamw, continued
from _gpt import GPT, GPTConfig, next_byte_loss, random_windows
from _ranks import launch, start_ranks
from composable_shard import weights

CONFIG = GPTConfig(depth=2, width=128, heads=4, context=64)  # 0.46 million parameters
TENSOR_PARALLEL = {
    "blocks.*.mlp.up": ColwiseParallel(),
    "blocks.*.mlp.out": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)


def train(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Iterator[weights.Update]:
    """Train. Send the weights every few steps."""
    torch.manual_seed(0)  # the same weights on both trainers
    model = GPT(CONFIG).to(device)
    for block in model.blocks:
        cs.fully_shard(block, mesh=mesh)
    cs.fully_shard(model, mesh=mesh)
    plan = weights.plan_together(sends=model)
    if dist.get_rank() == 0:
        print(f"each update moves {plan}", flush=True)
    optimizer = adamw(model, rate=5e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, options.steps + 1):
        windows = random_windows(TEXT, options.batch, CONFIG.context + 1, data)
        next_byte_loss(model, windows.to(device)).backward()
        cs.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % options.every == 0:
            yield weights.send(model, plan, version=step)


def generate(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Iterator[weights.Update]:
    """Receive each version of the weights. Write a sample with it."""
    model = GPT(CONFIG).to(device)  # any values: all are replaced
    parallelize_module(model, mesh, TENSOR_PARALLEL)
    plan = weights.plan_together(receives=model)
    for _ in range(options.steps // options.every):
        update = weights.receive(plan, model)
        written = continued(model, list(b"    def "), options.sample, CONFIG.context, seed=0, device=device)
        if mesh.get_local_rank() == 0:
            print(f"step {update.version:3}, {update.received:,} bytes received: {bytes(written)!r}", flush=True)
        yield update


def run(options: argparse.Namespace, device: torch.device) -> list[weights.Update]:
    """Train or generate on one rank. Return its updates."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("job", "rank"))["rank"]
    return [*(train if dist.get_rank() < 2 else generate)(options, mesh, device)]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT, and generate text with its newest weights in other processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=100, help="training steps")
    add("--every", type=int, default=10, help="steps from one version of the weights to the next")
    add("--batch", type=int, default=16, help="windows per trainer and step")
    add("--sample", type=int, default=60, help="bytes to generate with each version")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if "LOCAL_RANK" not in os.environ:
        return launch(__file__, 4)
    run(options, start_ranks(options.device))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
