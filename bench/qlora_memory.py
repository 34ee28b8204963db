"""Measure live bytes of fine-tuning adapters over a frozen 7B base in bfloat16, 4 and 8 bits, with fake tensors.

    python bench/qlora_memory.py                            # Llama 2 7B, world 8: minutes
    python bench/qlora_memory.py --shape layers=4,width=512,heads=8,vocabulary=32000,sequence=512 --world 2

Rank 0 of a simulated world builds a decoder under fake tensors. Each block is quantized and sharded before the next one
is created. Then it trains adapters of rank 8 with AdamW and activation checkpointing per block. All existing storages
are counted with their current sizes (`_live_bytes.py`). The pool behaves as on an accelerator:
`PoolPolicy(keep_idle=False)`.

Layers of bitsandbytes do not work with fake tensors, so the script uses layers that imitate them: same bytes of weights
and scales, the weight is unpacked for each product, and the packed weight is stored in the `ctx` of an autograd
function.
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
    """Live bytes of one rank.

    Attributes:
        making: peak while the model is created.
        between: bytes between steps.
        peak: peak of a later step.
        ratio: `peak` over FSDP2's with the same base.
        ratio_bf16: `peak` over FSDP2's with a base in bfloat16.
        error: its error, if it failed.
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
    """Multiply x by the transpose of a packed weight. Forward and backward unpack it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.packed, ctx.unpacked = packed, shape
        return x @ x.new_empty(shape).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ grad.new_empty(ctx.unpacked), None, None


class Packed(nn.Module):
    """A linear layer in 4 bits with compressed scales per block of 64, or in 8 bits with a scale per row."""

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
    """Build a block with adapters."""
    return adapted(CheckpointedBlock(shape), base, lambda layer, _: layer if base == "bf16" else Packed(layer, base))


class CheckpointedBlock(Block):
    """A block with activation checkpointing."""

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, *args, use_reentrant=False)  # type: ignore[no-any-return]


def run_child(base: str, engine: str, world: int, shape: Shape) -> None:
    """Measure one engine and print the bytes as JSON."""
    with cs.testing.fake(world):  # ours treats fake tensors like those of an accelerator in a simulated world
        print(json.dumps(figures_of(base, engine, world, shape)))


def figures_of(base: str, engine: str, world: int, shape: Shape) -> dict[str, int]:
    """Return the bytes of a rank: peak while the model is created, between steps, and peak of a step."""
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
    columns = ["base", "engine", "peak of creation", "between steps", "peak", "peak / FSDP2's", "/ FSDP2's in bf16"]
    rows = []
    for each in results:
        sizes = [f"{nbytes / 2**30:.3f}" for nbytes in (each.making, each.between, each.peak)]
        ratios = ["" if ratio is None else f"{ratio:.3f}" for ratio in (each.ratio, each.ratio_bf16)]
        rows.append([each.base, each.engine, *(sizes if not each.error else ("fails", "", "")), *ratios])
    title = f"Live GiB of a rank: adapters over {options.shape}, world {options.world}"
    _report.table(title, columns, rows, "measured with fake tensors; activation checkpointing per block")
    for each in results:
        if each.error:
            print(f"{each.base}, {each.engine}: {each.error}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=8, help="number of ranks (default: %(default)s)")
    parser.add_argument("--shape", default="llama2-7b", help="shape of the decoder (default: %(default)s)")
    parser.add_argument("--bases", type=_report.names(BASES), default=list(BASES), help="frozen bases (default: all)")
    parser.add_argument("--engines", type=_report.names(ENGINES), default=list(ENGINES), help="engines (default: both)")
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
