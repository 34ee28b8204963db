"""Measure live gradients and all live bytes, for optimizer steps in backward and ordinary steps, ours and FSDP2.

    python bench/backward_memory.py                 # one minute: a decoder with 0.1B parameters, world 2 and 8
    python bench/backward_memory.py --shape llama3-8b --world 8,128

Rank 0 of a world of torch's fake process group trains a decoder in float32 with AdamW under fake tensors. The script
counts the bytes of:

- `.grad` of all shards, each time a gradient is set and before the step
- the storages of these gradients, which gradients of a group share
- all storages (`_live_bytes.py`)

Figures are peaks of the third step, and the bytes after its backward. For steps in backward, FSDP2 has a hook and an
optimizer per parameter.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.testing._internal.distributed.fake_pg import FakeStore

import _live_bytes
import _report
import composable_shard as cs
from composable_shard.planner.decoder import Decoder, loss_of
from composable_shard.planner.shape import Shape

SHAPE = "layers=8,width=768,heads=12,vocabulary=32000,sequence=256"
ENGINES = ("ours", "ours-in-backward", "fsdp2", "fsdp2-hooks")
REFERENCE = "fsdp2"
STEPS = 3
TIMEOUT_S = 1800


@dataclass(frozen=True)
class BackwardMemoryResult:
    """Bytes of one rank.

    Attributes:
        gradients: peak of live `.grad`.
        ratio: `gradients` over those of FSDP2's ordinary step in the same world.
        memory: peak of the storages of live `.grad`.
        peak: peak of all live bytes.
        peak_ratio: `peak` over that of FSDP2's ordinary step in the same world.
        behind_backward: all live bytes after backward.
        between: all live bytes between steps.
    """

    world: int
    engine: str
    gradients: int
    ratio: float
    memory: int
    peak: int
    peak_ratio: float
    behind_backward: int
    between: int


def stepping(engine: str, model: torch.nn.Module, params: list[Any]) -> Any:
    """Return the optimizer for the training loop; None if hooks do all steps."""
    if engine == "ours-in-backward":
        return cs.optim.in_backward(model, torch.optim.AdamW)
    if engine != "fsdp2-hooks":
        return torch.optim.AdamW(params)
    for param in params:
        optimizer = torch.optim.AdamW([param])

        def step(_: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    return None


def run_child(engine: str, world: int, shape: Shape) -> None:
    """Measure one engine and print the bytes as JSON."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,))
    live = _live_bytes.LiveBytes()
    gradients = memory = behind = 0
    with FakeTensorMode(allow_non_fake_inputs=True), live.counting():
        model = Decoder(shape)
        shard = fsdp2 if engine.startswith("fsdp2") else cs.fully_shard
        for module in [*model.blocks, model]:
            shard(module, mesh=mesh)
        if engine.startswith("ours"):
            model.set_pool_policy(cs.PoolPolicy(keep_idle=False))
        params = list(model.parameters())

        def note(_: Any = None) -> None:
            nonlocal gradients, memory
            there = [param.grad.to_local() for param in params if param.grad is not None]
            gradients = max(gradients, sum(each.nbytes for each in there))
            storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in there}
            memory = max(memory, sum(storages.values()))

        for param in params if engine in ("ours-in-backward", "fsdp2-hooks") else ():
            param.register_post_accumulate_grad_hook(note)  # otherwise all gradients are live after backward
        optimizer = stepping(engine, model, params)
        tokens = torch.zeros(1, shape.sequence + 1, dtype=torch.long)
        for _ in range(STEPS):
            live.peak, gradients, memory = live.now, 0, 0
            loss_of(model, tokens).backward()
            note()
            behind = live.now
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()
    counted = {"gradients": gradients, "memory": memory, "peak": live.peak, "behind": behind, "between": live.now}
    print(json.dumps(counted))


def measured(engine: str, world: int, shape: str) -> dict[str, int]:
    child = [sys.executable, __file__, "--child", engine, "--world", str(world), "--shape", shape]
    done = subprocess.run(child, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"backward_memory.py: {engine}, world {world}: the process failed\n{done.stderr[-2000:]}")
    counted: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counted


def results_in(world: int, options: argparse.Namespace) -> list[BackwardMemoryResult]:
    counted = {engine: measured(engine, world, options.shape) for engine in ENGINES}
    base = counted[REFERENCE]
    return [
        BackwardMemoryResult(
            world,
            engine,
            each["gradients"],
            each["gradients"] / base["gradients"],
            each["memory"],
            each["peak"],
            each["peak"] / base["peak"],
            each["behind"],
            each["between"],
        )
        for engine, each in counted.items()
    ]


def print_table(results: Sequence[BackwardMemoryResult], shape: str) -> None:
    columns = ["world", "engine", "gradients, MB", "/ FSDP2's", "their storages, MB", "peak, MB", "/ FSDP2's",
               "after backward, MB", "between steps, MB"]  # fmt: skip
    rows = [
        [str(each.world), each.engine, f"{each.gradients / 1e6:.2f}", f"{each.ratio:.3f}", f"{each.memory / 1e6:.2f}",
         f"{each.peak / 1e6:.1f}", f"{each.peak_ratio:.3f}", f"{each.behind_backward / 1e6:.1f}",
         f"{each.between / 1e6:.1f}"]
        for each in results
    ]  # fmt: skip
    _report.table(f"Live bytes of a rank: {shape}, float32, AdamW", columns, rows, "measured with fake tensors")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=_report.integers, default=[2, 8], help="world sizes (default: 2,8)")
    parser.add_argument("--shape", default=SHAPE, help="shape of the decoder (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    shape = Shape.parse(options.shape)
    if options.child:
        run_child(options.child, options.world[0], shape)
        return 0
    results = [result for world in options.world for result in results_in(world, options)]
    print_table(results, options.shape)
    if options.json:
        _report.write_json(options.json, "backward_memory", {"shape": options.shape}, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
