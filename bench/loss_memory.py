"""Measure live bytes at the loss, where memory usually peaks, ours and FSDP2, with fake tensors.

    python bench/loss_memory.py                                 # Llama 3.1 8B, world 8 and 128: ten minutes
    python bench/loss_memory.py --shape layers=2,width=256,heads=8,vocabulary=32000,sequence=512 --world 8

Rank 0 of a world of torch's fake process group trains a decoder in bfloat16 with AdamW under fake tensors. All existing
storages are counted with their current sizes (`_live_bytes.py`), so figures are those of an ideal allocator. The pool
behaves as on an accelerator: `PoolPolicy(keep_idle=False)`. `ours-keeps` keeps its arena, as on a CPU.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.testing._internal.distributed.fake_pg import FakeStore

import _live_bytes
import _report
import composable_shard as cs
from composable_shard.planner.decoder import Decoder, loss_of
from composable_shard.planner.shape import Shape

LLAMA = "llama3-8b"
ENGINES = ("fsdp2", "ours", "ours-keeps")
STEPS = 3
TIMEOUT_S = 3600


@dataclass(frozen=True)
class LossMemoryResult:
    """Live bytes of one rank.

    Attributes:
        between: bytes between steps.
        first: peak of the first step.
        at_loss: bytes when the loss is computed, in a later step.
        peak: peak of a later step.
        ratio: `peak` over FSDP2's in the same world.
    """

    world: int
    engine: str
    between: int
    first: int
    at_loss: int
    peak: int
    ratio: float


def run_child(engine: str, world: int, shape: Shape) -> None:
    """Measure one engine and print the bytes as JSON."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    live = _live_bytes.LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), live.counting():
        model = Decoder(shape)
        shard = fsdp2 if engine == "fsdp2" else cs.fully_shard
        for module in [*model.blocks, model]:
            shard(module, mesh=mesh, mp_policy=policy)
        if engine != "fsdp2":
            model.set_pool_policy(cs.PoolPolicy(keep_idle=engine == "ours-keeps"))
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros(1, shape.sequence + 1, dtype=torch.long)
        peaks: list[int] = []
        at_loss = 0

        def note(*_: Any) -> None:
            nonlocal at_loss
            at_loss = live.now

        model.register_forward_hook(note)
        for _ in range(STEPS):
            live.peak = live.now
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(live.peak)
    dist.destroy_process_group()
    print(json.dumps({"between": live.now, "first": peaks[0], "at_loss": at_loss, "peak": peaks[-1]}))


def measured(engine: str, world: int, shape: str) -> dict[str, int]:
    child = [sys.executable, __file__, "--child", engine, "--world", str(world), "--shape", shape]
    done = subprocess.run(child, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"loss_memory.py: {engine}, world {world}: the process failed\n{done.stderr[-2000:]}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def results_in(world: int, options: argparse.Namespace) -> list[LossMemoryResult]:
    found = {engine: measured(engine, world, options.shape) for engine in options.engines}
    reference = found["fsdp2"]["peak"]
    return [LossMemoryResult(world, engine, **each, ratio=each["peak"] / reference) for engine, each in found.items()]


def print_table(results: Sequence[LossMemoryResult], shape: str) -> None:
    columns = ["world", "engine", "between steps", "first step", "at the loss", "peak", "peak / FSDP2's"]
    rows = []
    for each in results:
        sizes = [f"{nbytes / 2**30:.3f}" for nbytes in (each.between, each.first, each.at_loss, each.peak)]
        rows.append([str(each.world), each.engine, *sizes, f"{each.ratio:.4f}"])
    _report.table(f"Live GiB of a rank: {shape}, bfloat16, AdamW", columns, rows, "measured with fake tensors")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=_report.integers, default=[8, 128], help="world sizes (default: 8,128)")
    parser.add_argument("--shape", default=LLAMA, help="shape of the decoder (default: %(default)s)")
    parser.add_argument("--engines", type=_report.names(ENGINES), default=list(ENGINES), help="must include fsdp2")
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
        _report.write_json(options.json, "loss_memory", {"shape": asdict(shape)}, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
