"""Measure GPU-bound steps of a Llama 3 decoder: ours, torch's FSDP2 and the unsharded model.

    python bench/card/llama_steps.py                                           # eager, 4,096 and 8,192 tokens
    python bench/card/llama_steps.py --engines ours-blocks,fsdp2-blocks,unsharded-blocks
    python bench/card/llama_steps.py --engines ours-offload,fsdp2-offload
    python bench/card/llama_steps.py --device cpu --size tiny --tokens 32 --rounds 2    # a dry run

The decoder has four layers of Llama 3 8B, its embedding and its head: 1.92B parameters. Parameters and AdamW states are
float32, compute is bfloat16, gradients are reduced in float32. The unsharded model has bfloat16 parameters, so it needs
no casts. A batch is one sequence.

Each engine has its own process. The processes take turns, and free cached memory after each turn, because the GPU
cannot hold the activations of all of them. A process is rank 0 of a world (8 by default) and plays the other ranks
itself (`_echo.py`). Kernels, streams, buffers and copies are those of training, but a collective copies within the GPU
and uses no network. Exposed communication is the part of these copies that does not overlap with compute. It does not
predict the time that a network adds. Engine names can have these suffixes:

    -again      FSDP2 a second time, the control: its ratio to the first one shows the noise
    -blocks     every block is compiled before it is sharded
    -whole      the sharded model is compiled as one graph for forward and one for backward (`torch.compile`)
    -packed     gathers use one buffer per group (`COMPOSABLE_SHARD_TRANSPORT=packed`)
    -fp8        weights are gathered in 8 bits (`CommPolicy(gather="fp8")`)
    -float8     linear layers of blocks compute in float8, and their weights are gathered in float8 (torchao)
    -offload    shards, gradients and optimizer states are on the host (`CPUOffloadPolicy()`)

The exit status is 1 if the losses of the sharded engines differ by more than `--tolerance`, or are not finite. Figures
are written after each sequence length.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests"))

import _device
import _echo
import _engines
import _gpu_trace
import _report
from _blocks import TransformerBlock
from _llama_model import MIXED, SIZES, compute_scales, convert_to_float8, make_decoder
from _players import Player

OURS, FSDP2, UNSHARDED = "ours", "fsdp2", "unsharded"
BASES = (OURS, FSDP2, UNSHARDED)
AGAIN, BLOCKS, WHOLE, PACKED, FP8, FLOAT8, OFFLOAD = "again", "blocks", "whole", "packed", "fp8", "float8", "offload"
SUFFIXES = {
    OURS: {BLOCKS, WHOLE, PACKED, FP8, FLOAT8, OFFLOAD},
    FSDP2: {AGAIN, BLOCKS, FLOAT8, OFFLOAD},
    UNSHARDED: {BLOCKS},
}
WARM_STEPS = 3
TRACES = 3  # number of traces per engine and sequence length
MIB = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes of torch's CUDA allocator: allocated between steps, and peaks of allocated and reserved bytes in a step."""

    between: int
    allocated: int
    reserved: int


@dataclass(frozen=True)
class StepResult:
    """One engine with one sequence length.

    Attributes:
        step_ms: time of forward, loss and backward.
        over_fsdp2: ratio to `step_ms` of FSDP2 with the same `-blocks`, `-float8` or `-offload`, formed within each
            round.
        over_unsharded: ratio to the unsharded model with the same `-blocks`.
        optimizer_ms: time of AdamW's step, and of the scales of `-float8`.
        tokens_per_s: tokens / (median of `step_ms` + median of `optimizer_ms`).
        loss_difference: the largest relative difference between the losses of the sharded engines; None if a loss is
            not finite.
        memory: None on the CPU.
        traces: traces of forward, loss and backward of some steps; empty on the CPU. Copies on other streams are those
            of the echo: one per rank and, without `-packed`, per parameter, where NCCL launches about one kernel.
    """

    tokens: int
    engine: str
    step_ms: _report.Spread
    over_fsdp2: _report.Spread | None
    over_unsharded: _report.Spread | None
    optimizer_ms: _report.Spread
    tokens_per_s: float
    loss_difference: float | None
    memory: Memory | None = None
    traces: list[_gpu_trace.StepTrace] = field(default_factory=list)


@dataclass(frozen=True)
class Turn:
    """Times of the steps of a turn, in seconds, and their losses."""

    steps: list[float]
    optimizers: list[float]
    losses: list[float]


def split_name(engine: str) -> tuple[str, set[str]]:
    base, *suffixes = engine.split("-")
    return base, set(suffixes)


def parse_engines(text: str) -> list[str]:
    """Parse a comma-separated list of engines."""
    engines = text.split(",")
    if len(set(engines)) < len(engines):
        raise argparse.ArgumentTypeError(f"{text}: an engine is named twice; the control is {FSDP2}-{AGAIN}")
    for engine in engines:
        base, suffixes = split_name(engine)
        if base not in BASES or suffixes - SUFFIXES[base]:
            raise argparse.ArgumentTypeError(
                f"unknown engine {engine}; expected {', '.join(BASES)} with suffixes of "
                + "; ".join(f"{base}: {', '.join(sorted(SUFFIXES[base]))}" for base in BASES)
            )
    return engines


def name_reference(engine: str, base: str) -> str:
    """Return the engine of `base` for comparison, with the same `-blocks`, `-float8` and `-offload` suffixes.

    The reference of `-whole` is `-blocks`.
    """
    suffixes = split_name(engine)[1]
    if WHOLE in suffixes:
        suffixes.add(BLOCKS)
    kept = [suffix for suffix in (BLOCKS, FLOAT8, OFFLOAD) if suffix in suffixes & SUFFIXES[base]]
    return "-".join([base, *kept])


class Trainer:
    """One engine's model and optimizer. A `Player` runs it in its own process."""

    def __init__(self, engine: str, settings: dict[str, Any]) -> None:
        base, suffixes = split_name(engine)
        os.environ["COMPOSABLE_SHARD_TRANSPORT"] = "packed" if PACKED in suffixes else ""
        self._device = torch.device(settings["device"], 0 if settings["device"] == _device.CUDA else None)
        self._size = SIZES[settings["size"]]
        _device.select(self._device.type)
        _echo.init(settings["world"], self._device)
        self.model = self._build(base, suffixes, settings)
        self._call: Any = self.model
        if WHOLE in suffixes:
            self._call = torch.compile(self.model, fullgraph=True, dynamic=False, backend=settings["backend"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._in_float8 = FLOAT8 in suffixes
        self._steps = 0
        self._free_cache()

    def _build(self, base: str, suffixes: set[str], settings: dict[str, Any]) -> nn.Module:
        torch.manual_seed(0)  # all engines start from the same weights
        with self._device:
            model: Any = make_decoder(self._size, max(settings["tokens"]))
        if FLOAT8 in suffixes:
            convert_to_float8(model, emulate=self._device.type == _device.CPU)
        if BLOCKS in suffixes:
            _engines.compile_blocks(model, TransformerBlock, settings["backend"], dynamic=False)
        if base == UNSHARDED:
            return model.to(torch.bfloat16)
        options: dict[str, Any] = {"mp_policy": MIXED}
        if OFFLOAD in suffixes:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self._device.type == _device.CUDA)
            model.to("cpu")
        self._shard(base, model, settings["world"], options)
        model.cos, model.sin = model.cos.to(self._device), model.sin.to(self._device)
        if FP8 in suffixes:
            import composable_shard

            model.set_comm_policy(composable_shard.CommPolicy(gather="fp8"))
        return model

    def _shard(self, base: str, model: Any, world: int, options: dict[str, Any]) -> None:
        mesh = init_device_mesh(self._device.type, (world,))
        shard: Any = fsdp2
        if base == OURS:
            import composable_shard  # not imported in the processes of other engines

            shard = composable_shard.fully_shard
        for block in model.blocks:
            shard(block, mesh=mesh, **options)
        shard(model, mesh=mesh, **options)

    def warm_up(self, tokens: int) -> None:
        self._run(tokens, WARM_STEPS)
        self._free_cache()

    def measure(self, tokens: int, steps: int) -> Turn:
        """Run one step, then time `steps` steps. Free cached memory for the other processes."""
        self._run(tokens, 1)
        turn = self._run(tokens, steps)
        self._free_cache()
        return turn

    def memory(self, tokens: int) -> Memory | None:
        """Return the memory of the second of two steps; None on the CPU."""
        if self._device.type != _device.CUDA:
            return None
        self._free_cache()
        self._run(tokens, 1)
        between = _device.forget_peak()
        self._run(tokens, 1)
        found = Memory(between, _device.peak(), torch.cuda.max_memory_reserved())
        self._free_cache()
        return found

    def traces(self, tokens: int) -> list[_gpu_trace.StepTrace]:
        """Trace forward, loss and backward of some steps. Empty on the CPU."""
        found = []
        if self._device.type == _device.CUDA:
            self._run(tokens, 1)
            for _ in range(TRACES):
                batch = self._batch(tokens)
                found.append(_gpu_trace.record_step(lambda batch=batch: self._loss(batch).backward()))
                self._update()
            self._free_cache()
        return found

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def close(self) -> None:
        dist.destroy_process_group()

    def _batch(self, tokens: int) -> Tensor:
        """Return tokens, shape (1, tokens + 1). All engines get the same in the same step."""
        generator = torch.Generator().manual_seed(self._steps)
        self._steps += 1
        return torch.randint(self._size.vocabulary, (1, tokens + 1), generator=generator).to(self._device)

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self._call(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def _update(self) -> None:
        """Update the weights. In float8, also compute the scales of the next gathers."""
        self.optimizer.step()
        if self._in_float8:
            compute_scales(self.model)
        self.optimizer.zero_grad()

    def _run(self, tokens: int, steps: int) -> Turn:
        turn = Turn([], [], [])
        for _ in range(steps):
            batch = self._batch(tokens)
            _device.synchronize(self._device.type)
            begin = time.perf_counter()
            loss = self._loss(batch)
            loss.backward()
            _device.synchronize(self._device.type)
            middle = time.perf_counter()
            self._update()
            _device.synchronize(self._device.type)
            turn.steps.append(middle - begin)
            turn.optimizers.append(time.perf_counter() - middle)
            turn.losses.append(loss.item())
        return turn

    def _free_cache(self) -> None:
        if self._device.type == _device.CUDA:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def run(options: argparse.Namespace) -> list[StepResult]:
    """Measure every engine with every sequence length."""
    settings = {name: getattr(options, name) for name in ("device", "size", "world", "tokens", "backend")}
    results: list[StepResult] = []
    with ExitStack() as stack:
        players = {engine: stack.enter_context(Player(engine, Trainer, engine, settings)) for engine in options.engines}
        for player in players.values():
            player.ready()
        parameters = max(player.call("parameters") for player in players.values())
        for tokens in options.tokens:
            for player in players.values():
                player.call("warm_up", tokens)
            results += time_steps(players, tokens, options)
            save(results, parameters, options)
        # Trace after all steps are timed, because the profiler can slow down later steps.
        for method in ("memory", "traces"):
            for at, each in enumerate(results):
                found = players[each.engine].call(method, each.tokens)
                results[at] = replace(each, **{method: found})
            save(results, parameters, options)
    return results


def save(results: list[StepResult], parameters: int, options: argparse.Namespace) -> None:
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        settings["parameters"] = parameters
        _report.write_json(options.json, "llama_steps", settings, results, options.device)


def time_steps(players: dict[str, Player], tokens: int, options: argparse.Namespace) -> list[StepResult]:
    turns: dict[str, list[Turn]] = {engine: [] for engine in players}
    shuffle = random.Random(0)
    for _ in range(options.rounds):
        for engine in shuffle.sample(list(players), len(players)):
            turns[engine].append(players[engine].call("measure", tokens, options.steps))
    steps = {engine: [s for turn in turns[engine] for s in turn.steps] for engine in players}
    optimizers = {engine: [s for turn in turns[engine] for s in turn.optimizers] for engine in players}
    difference = loss_difference({engine: [x for turn in turns[engine] for x in turn.losses] for engine in players})

    def over(engine: str, base: str) -> _report.Spread | None:
        reference = steps.get(name_reference(engine, base))
        return reference and _report.Spread.of([a / b for a, b in zip(steps[engine], reference, strict=True)])

    def milliseconds(seconds: list[float]) -> _report.Spread:
        return _report.Spread.of([1e3 * each for each in seconds])

    return [
        StepResult(
            tokens,
            engine,
            milliseconds(steps[engine]),
            over(engine, FSDP2),
            over(engine, UNSHARDED),
            milliseconds(optimizers[engine]),
            1e3 * tokens / (milliseconds(steps[engine]).median + milliseconds(optimizers[engine]).median),
            difference,
        )
        for engine in players
    ]


def loss_difference(losses: dict[str, list[float]]) -> float | None:
    """Return the largest relative difference between the sharded engines; None if a loss is not finite.

    The unsharded model is excluded: with echoed ranks, sharded models consist of repetitions of rank 0's shard, so
    their weights differ from those of the unsharded model.
    """
    sharded = [of_engine for engine, of_engine in losses.items() if split_name(engine)[0] != UNSHARDED]
    if not all(math.isfinite(loss) for of_engine in losses.values() for loss in of_engine):
        return None
    return max(((max(step) - min(step)) / min(step) for step in zip(*sharded, strict=True)), default=0.0)


def show(results: list[StepResult], options: argparse.Namespace) -> None:
    for tokens in options.tokens:
        of_tokens = [result for result in results if result.tokens == tokens]
        _report.table(
            f"{options.size}, {tokens:,} tokens, world {options.world}, {options.device}",
            ("engine", "step, ms", "/ FSDP2", "/ unsharded", "optimizer, ms", "tokens/s"),
            [
                (
                    each.engine,
                    each.step_ms.shown(1),
                    str(each.over_fsdp2 or "-"),
                    str(each.over_unsharded or "-"),
                    each.optimizer_ms.shown(1),
                    f"{each.tokens_per_s:,.0f}",
                )
                for each in of_tokens
            ],
            f"median [quartiles] of {options.rounds} interleaved rounds of {options.steps} steps; "
            + describe_losses(of_tokens[0].loss_difference),
        )
        rows = []
        for each in of_tokens:
            if each.memory is None or not each.traces:
                continue
            one = each.traces[0]  # counts are the same in all steps
            times = [
                _report.Spread.of([getattr(trace, name) for trace in each.traces])
                for name in ("communication_ms", "exposed_ms", "idle_ms")
            ]
            rows.append(
                (
                    each.engine,
                    *(f"{b / MIB:,.0f}" for b in (each.memory.between, each.memory.allocated, each.memory.reserved)),
                    f"{one.kernels}+{one.copies}",
                    f"{one.other_kernels}+{one.other_copies}",
                    *(f"{time.median:.2f}" for time in times),
                )
            )
        if rows:
            columns = ("engine", "MiB between steps", "peak allocated", "peak reserved", "kernels+copies, compute")
            columns += ("other streams", "communication, ms", "exposed, ms", "idle, ms")
            _report.table(f"Memory (MiB), and medians of {TRACES} traces of forward and backward", columns, rows)


def describe_losses(difference: float | None) -> str:
    if difference is None:
        return "losses are NOT FINITE"
    return f"losses of the sharded engines differ by at most {difference:.1e}"


def add_options(parser: argparse.ArgumentParser, engines: str) -> None:
    """Add the options of a measurement, with the default engines."""
    _device.add_option(parser)
    parser.add_argument(
        "--size", choices=SIZES, default="8b-4-layers", help="size of the decoder (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=_report.integers, default="4096,8192", help="sequence lengths (default: %(default)s)"
    )
    parser.add_argument("--engines", type=parse_engines, default=engines, help="engines (default: %(default)s)")
    parser.add_argument("--world", type=int, default=8, help="number of ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each engine (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps per turn (default: %(default)s)")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile (default: %(default)s)")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "ours,fsdp2,unsharded")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-2,
        help="largest relative difference of losses (default: %(default)s); use 5e-2 for -fp8 and -float8, which "
        "round weights",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    results = run(options)
    show(results, options)
    for each in results:
        if each.loss_difference is None or each.loss_difference > options.tolerance:
            text = f"{each.tokens:,} tokens: {describe_losses(each.loss_difference)}; --tolerance {options.tolerance:g}"
            print(f"llama_steps.py: {text}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
