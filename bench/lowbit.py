"""Measure steps with low-bit communication on simulated networks of 1, 10 and 100 Gb/s.

    python bench/lowbit.py
    python bench/lowbit.py --gbps 1,10 --world 16 --tokens 2048 --json results.json

Each setting trains the same blocks on `composable_shard.testing.fabric` (streams clock; exact, so figures have no
spread). Bytes are real. Compute is declared: the operations of a rank's tokens at a number of TFLOP/s, twice as many in
backward as in forward. The clock stops while values are rounded, so the time of rounding is listed next to the step:
estimated for an H100 from the bytes that it reads and writes, and measured on one thread of this machine.

The break-even is the bandwidth at which rounding on an H100 takes as long as the transfer of the saved bytes. On slower
links, low-bit communication is faster if communication is exposed. On faster links it is slower. The reference is
`bf16`: weights are gathered in bfloat16 and gradients are reduced in float32, as usual with FSDP2.

If torchao (0.18) is installed, its float8 all-gather is measured too. It uses one scale of all ranks per weight. The
time of its rounding is not measured.
"""

import argparse
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import _report
import composable_shard as cs
from composable_shard import CommPolicy, MixedPrecisionPolicy, testing
from composable_shard._comm.rounding import numbers_in
from composable_shard._plan.parcel import parcel
from composable_shard._policies import Wire
from composable_shard.planner.machine import KNOWN
from composable_shard.planner.timing import ADDED, ROUNDED, rounding_seconds

MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
REFERENCE = "bf16"
SIDES: dict[str, tuple[MixedPrecisionPolicy, CommPolicy]] = {
    "float32": (MixedPrecisionPolicy(), CommPolicy()),
    REFERENCE: (MIXED, CommPolicy()),
    "bf16, gradients too": (HALF, CommPolicy()),
    "gather fp8": (MIXED, CommPolicy(gather="fp8")),
    "reduce bf16": (MIXED, CommPolicy(reduce="bf16")),
    "gather fp8, reduce bf16": (MIXED, CommPolicy(gather="fp8", reduce="bf16")),
    "gather fp8, reduce int8": (MIXED, CommPolicy(gather="fp8", reduce="int8")),
}
TORCHAO = "torchao's float8 gather"
STEPS = 3


@dataclass(frozen=True)
class LowBitResult:
    """A step of one setting on one network. `over_bf16` is its time over that of `bf16`.

    The times of rounding `rounding_h100_ms` and `rounding_here_ms` are not included in the step. `break_even_gbps` is
    computed from the first of them.
    """

    side: str
    gbps: float
    megabytes: float
    step_ms: float
    exposed_share: float
    over_bf16: float
    rounding_h100_ms: float
    rounding_here_ms: float
    break_even_gbps: float | None


class Block(nn.Module):
    """A decoder block: four weights of attention, three of a gated layer, and a declared compute time."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.norm = nn.RMSNorm(width)
        self.busy = testing.Busy(seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        for layer in self.attention:
            y = layer(y)
        gate, up = self.up
        out: torch.Tensor = self.busy(x + self.down(gate(y).sigmoid() * up(y)))
        return out


def weights_of(width: int) -> int:
    return 13 * width * width


def build(side: str, options: argparse.Namespace) -> nn.Module:
    seconds = 2 * weights_of(options.width) * options.tokens / (1e12 * options.teraflops)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(options.width, seconds) for _ in range(options.blocks)])
    if side == TORCHAO:
        from torchao.float8 import (  # type: ignore[import-not-found, unused-ignore]
            Float8LinearConfig,
            convert_to_float8_training,
        )

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(model, config=config)
    mixed, comm = (MIXED, CommPolicy()) if side == TORCHAO else SIDES[side]
    for module in (*model, model):
        cs.fully_shard(module, mesh=init_device_mesh("cpu", (options.world,)), mp_policy=mixed)
        module.set_comm_policy(comm, recurse=False)  # type: ignore[operator]
    return model


def stepped(side: str, gbps: float, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return step time and exposed communication in seconds, and the communicated bytes of a step."""
    how: dict[str, Any] = {"latency_s": 1e-6 * options.latency_us, "bandwidth_Bps": 1e9 * gbps / 8, "clock": "streams"}
    with testing.fabric(options.world, **how) as net:
        model = build(side, options)
        dtype = torch.float32 if side == "float32" else torch.bfloat16
        for _ in range(STEPS):
            net.reset()
            model(torch.ones(1, options.width, dtype=dtype)).sum().backward()
            for param in model.parameters():
                param.grad = None
        return net.now(), net.exposed_s, float(sum(event.nbytes for event in net.events))


def seconds_here(form: str | None) -> float:
    """Return the seconds per number to round and restore it on one thread of this machine."""
    if form is None:
        return 0.0
    whole = torch.randn(512, 1024)
    sent = parcel([(512, 1024)], torch.bfloat16.itemsize, Wire(form, 256))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        if sent is None:
            whole.to(torch.bfloat16)
        else:
            (numbers,) = numbers_in(torch.zeros(sent.nbytes, dtype=torch.uint8), sent.parts, torch.bfloat16)
            numbers.put(whole.view(numbers.values.shape))
            numbers.fill(torch.empty(numbers.values.shape, dtype=torch.bfloat16))
        times.append(time.perf_counter() - begin)
    return min(times) / whole.numel()


def rounding_of(side: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the milliseconds of rounding in a step (two gathers and a reduction) on an H100 and on this machine."""
    if side == TORCHAO:
        return 0.0, 0.0
    _, comm = SIDES[side]
    with testing.fake(options.world):
        groups = cs.make_plan(build(side, options)).groups
    machine = KNOWN["h100"]
    h100 = 0.0
    for group in groups:
        h100 += 2 * rounding_seconds(group, comm.gather, ROUNDED, machine)
        h100 += rounding_seconds(group, comm.reduce, ADDED, machine)
    numbers = weights_of(options.width) * options.blocks
    here = numbers * (2 * seconds_here(comm.gather) + seconds_here(comm.reduce))
    return 1e3 * h100, 1e3 * here


def measured(options: argparse.Namespace) -> list[LowBitResult]:
    sides = [*SIDES, *([TORCHAO] if find_spec("torchao") else [])]
    results: list[LowBitResult] = []
    rounding = {side: rounding_of(side, options) for side in sides}
    for gbps in options.gbps:
        steps = {side: stepped(side, gbps, options) for side in sides}
        reference, _, most = steps[REFERENCE]
        for side, (seconds, exposed, nbytes) in steps.items():
            h100, here = rounding[side]
            saved = (most - nbytes) * (options.world - 1) / options.world
            even = 8e-9 * saved / (1e-3 * h100) if h100 else None
            results.append(
                LowBitResult(
                    side, gbps, 1e-6 * nbytes, 1e3 * seconds, exposed / seconds, seconds / reference, h100, here, even
                )
            )
    return results


def show(results: list[LowBitResult], options: argparse.Namespace) -> None:
    for gbps in options.gbps:
        rows = [
            (
                r.side,
                f"{r.megabytes:.1f}",
                f"{r.step_ms:.3f}",
                f"{r.exposed_share:.0%}",
                f"{r.over_bf16:.2f}",
                f"{r.rounding_h100_ms:.3f}",
                f"{r.rounding_here_ms:.0f}",
                "-" if r.break_even_gbps is None else f"{r.break_even_gbps:.0f}",
            )
            for r in results
            if r.gbps == gbps
        ]
        head = ("setting", "MB sent", "step, ms", "exposed", "/ bf16", "rounding, H100, ms", "here, ms")
        caption = f"world {options.world}, {options.blocks} blocks of {weights_of(options.width):,} weights"
        title = f"{gbps:g} Gb/s per rank, {options.tokens:,} tokens per rank"
        _report.table(title, (*head, "break-even, Gb/s"), rows, caption)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--gbps", type=_report.ratios, default="1,10,100", help=f"bandwidth per rank, Gb/s {shown}")
    add("--world", type=int, default=8, help=f"number of ranks {shown}")
    add("--blocks", type=int, default=4, help=f"number of blocks {shown}")
    add("--width", type=int, default=256, help=f"width of a block {shown}")
    add("--tokens", type=int, default=8192, help=f"tokens per rank and step {shown}")
    add("--teraflops", type=float, default=400.0, help=f"TFLOP/s per rank {shown}")
    add("--latency-us", type=float, default=1.0, help=f"latency of a collective; low, because blocks are small {shown}")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    results = measured(options)
    show(results, options)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        _report.write_json(options.json, "lowbit", settings, results)


if __name__ == "__main__":
    main()
