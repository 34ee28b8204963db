"""Live bytes of fine-tuning adapters over a frozen base of 7B, in bfloat16, 4 bits and 8: without memory or a card.

    python bench/qlora_memory.py                            # Llama 2 7B in a world of 8: minutes
    python bench/qlora_memory.py --shape layers=4,width=512,heads=8,vocabulary=32000,sequence=512 --world 2

Rank 0 of a world that is played makes a decoder under fake tensors, block by block:
each is quantized and sharded before the next one is made. Then it trains adapters of rank 8 with AdamW, with activation
checkpoints around blocks. All storages that exist are counted, as they are resized (`_live_bytes.py`). The pool does
what it does on an accelerator: `PoolPolicy(keep_idle=False)`. The layers are stand-ins: the classes of bitsandbytes
cannot be made under fake tensors. They have the bytes of its layers, weights, scales and all, unpack a whole weight for
each product, and keep the packed one on the `ctx` of a function, as it does.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils.checkpoint import checkpoint

import _live_bytes
import _report
import composable_shard as cs
from _qlora_worker import BF16, adapted
from composable_shard.planner.decoder import Block, Decoder, loss_of
from composable_shard.planner.shape import Shape

BASES, ENGINES = ("bf16", "nf4", "int8"), ("fsdp2", "ours")
STEPS, TIMEOUT_S = 2, 1800


@dataclass(frozen=True)
class QloraMemoryResult:
    """Bytes of one rank: at most while the model is made, between steps, and at most in a later step; or the error.

    `ratio` is the last over FSDP2's over the same base, and `ratio_bf16` over FSDP2's over a base in bfloat16.
    """

    base: str
    engine: str
    making: int
    between: int
    peak: int
    ratio: float | None
    ratio_bf16: float | None
    error: str


class Multiply(torch.autograd.Function):
    """x times the transpose of a packed weight; forward and backward unpack it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.packed, ctx.unpacked = packed, shape
        return x @ x.new_empty(shape).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ grad.new_empty(ctx.unpacked), None, None


class Packed(nn.Module):
    """A layer of 4 bits with compressed scales of blocks of 64, or of 8 bits with a scale a row."""

    def __init__(self, layer: nn.Linear, base: str) -> None:
        super().__init__()
        self.shape = rows, columns = layer.out_features, layer.in_features
        numel = rows * columns
        data = torch.empty(numel // 2, 1, dtype=torch.uint8)
        scales = [torch.empty(numel // 64, dtype=torch.uint8), torch.empty(numel // 64 // 256 + 1)]
        if base == "int8":
            data, scales = torch.empty(rows, columns, dtype=torch.int8), [torch.empty(rows)]
        self.weight = nn.Parameter(data, requires_grad=False)
        self.weight.scales = scales  # type: ignore[attr-defined]
        self.scales = scales

    def forward(self, x: Tensor) -> Tensor:
        return Multiply.apply(x, self.weight, self.shape)  # type: ignore[no-any-return, no-untyped-call]


def made(shape: Shape, base: str) -> nn.Module:
    """A block with adapters."""
    return adapted(CheckpointedBlock(shape), base, lambda layer, _: layer if base == "bf16" else Packed(layer, base))


class CheckpointedBlock(Block):
    """A block that keeps its inputs alone until backward."""

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, *args, use_reentrant=False)  # type: ignore[no-any-return]


def run_child(base: str, engine: str, world: int, shape: Shape) -> None:
    """Prints the bytes as JSON."""
    with cs.testing.fake(world):  # in such a world ours moves fake tensors as it moves those of an accelerator
        print(json.dumps(figures_of(base, engine, world, shape)))


def figures_of(base: str, engine: str, world: int, shape: Shape) -> dict[str, int]:
    """The bytes of a rank by name: while the model is made, between steps, and at most in a step."""
    shard = partial(fsdp2 if engine == "fsdp2" else cs.fully_shard, mesh=init_device_mesh("cpu", (world,)))
    live = _live_bytes.LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), live.counting():
        torch.set_default_dtype(BF16)
        model = Decoder(replace(shape, layers=1)).requires_grad_(False)
        model.blocks = torch.nn.ModuleList()
        for _ in range(shape.layers):
            model.blocks.append(made(shape, base))
            shard(model.blocks[-1])
        shard(model)
        if engine == "ours":
            model.set_pool_policy(cs.PoolPolicy(keep_idle=False))  # type: ignore[operator]
        making = live.peak
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        tokens = torch.zeros(1, shape.sequence + 1, dtype=torch.long)
        for _ in range(STEPS):
            live.peak = live.now
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"making": making, "between": live.now, "peak": live.peak}


def measured(base: str, engine: str, options: argparse.Namespace) -> dict[str, int | str]:
    child = [sys.executable, __file__, "--child", f"{base},{engine}", "--world", str(options.world)]
    done = subprocess.run([*child, "--shape", options.shape], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        return {"making": 0, "between": 0, "peak": 0, "error": done.stderr.strip().splitlines()[-1][:200]}
    found: dict[str, int | str] = json.loads(done.stdout.splitlines()[-1])
    return found | {"error": ""}


def results_of(options: argparse.Namespace) -> list[QloraMemoryResult]:
    found = {(base, engine): measured(base, engine, options) for base in options.bases for engine in options.engines}

    def over(own: int, reference: tuple[str, str]) -> float | None:
        other = found.get(reference, {}).get("peak")
        return own / other if own and other else None  # type: ignore[operator]

    return [
        QloraMemoryResult(
            base,
            engine,
            **each,  # type: ignore[arg-type]
            ratio=over(each["peak"], (base, "fsdp2")),  # type: ignore[arg-type]
            ratio_bf16=over(each["peak"], ("bf16", "fsdp2")),  # type: ignore[arg-type]
        )
        for (base, engine), each in found.items()
    ]


def print_table(results: Sequence[QloraMemoryResult], options: argparse.Namespace) -> None:
    columns = ["base", "engine", "while made", "between steps", "peak", "peak / FSDP2's", "/ FSDP2's in bf16"]
    rows = []
    for each in results:
        sizes = [f"{nbytes / 2**30:.3f}" for nbytes in (each.making, each.between, each.peak)]
        ratios = ["" if ratio is None else f"{ratio:.3f}" for ratio in (each.ratio, each.ratio_bf16)]
        rows.append([each.base, each.engine, *(sizes if not each.error else ("fails", "", "")), *ratios])
    title = f"Live GiB of a rank: adapters over {options.shape}, world {options.world}"
    _report.table(title, columns, rows, "counted under fake tensors; blocks are activation checkpoints")
    for each in results:
        if each.error:
            print(f"{each.base}, {each.engine}: {each.error}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=8, help="ranks (default: %(default)s)")
    parser.add_argument("--shape", default="llama2-7b", help="(default: %(default)s)")
    parser.add_argument("--bases", type=_report.names(BASES), default=list(BASES), help="(default: all)")
    parser.add_argument("--engines", type=_report.names(ENGINES), default=list(ENGINES), help="(default: both)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    shape = Shape.parse(options.shape)
    if options.child:
        run_child(*options.child.split(","), options.world, shape)
        return 0
    results = results_of(options)
    print_table(results, options)
    if options.json:
        _report.write_json(options.json, "qlora_memory", {"shape": asdict(shape), "world": options.world}, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
