"""Steps of a Llama 3 decoder that keep the GPU busy: ours, torch's FSDP2 and the unsharded model.

    python bench/card/llama_steps.py                                           # eager, 4,096 and 8,192 tokens
    python bench/card/llama_steps.py --engines ours-blocks,fsdp2-blocks,unsharded-blocks
    python bench/card/llama_steps.py --engines ours-offload,fsdp2-offload
    python bench/card/llama_steps.py --device cpu --size tiny --tokens 32 --rounds 2    # a dry run

The decoder has four layers of Llama 3 8B, its embedding and its head: 1.92B parameters. Parameters and AdamW states are
float32, compute is bfloat16, gradients are reduced in float32. The unsharded model has bfloat16 parameters, so that it
does nothing but compute. One sequence is one batch.

Each engine has a process of its own. The processes take turns, and free cached memory after each turn. A process is
rank 0 of a world (8 by default) whose other ranks are its echo (`_echo.py`): kernels, streams, buffers and copies are
those of training, but a collective copies within the GPU and uses no network. So exposed communication is what the
schedule leaves exposed of such copies. Engine names take these suffixes:

    -blocks     every block is compiled before it is sharded
    -packed     gathers use one buffer per group (`COMPOSABLE_SHARD_TRANSPORT=packed`)
    -fp8        weights are gathered in 8 bits (`CommPolicy(gather="fp8")`)
    -offload    shards, gradients and optimizer states are on the host (`CPUOffloadPolicy()`)

The exit status is 1 if the losses of the sharded engines differ by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests"))

import _gpu_trace

import _device
import _echo
import _engines
import _report
from _blocks import Transformer, TransformerBlock
from _players import Player

OURS, FSDP2, UNSHARDED = "ours", "fsdp2", "unsharded"
BASES = (OURS, FSDP2, UNSHARDED)
BLOCKS, PACKED, FP8, OFFLOAD = "blocks", "packed", "fp8", "offload"
SUFFIXES = {OURS: {BLOCKS, PACKED, FP8, OFFLOAD}, FSDP2: {BLOCKS, OFFLOAD}, UNSHARDED: {BLOCKS}}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WARM_STEPS = 3
MIB = 1 << 20


@dataclass(frozen=True)
class Size:
    """Dimensions of a decoder."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int


SIZES = {
    "8b-4-layers": Size(128256, 4096, 4, 32, 8, 14336),
    "tiny": Size(512, 64, 2, 4, 2, 128),
}


@dataclass(frozen=True)
class Memory:
    """Bytes of torch's CUDA allocator: between two steps, and at most in a step."""

    between: int
    allocated: int
    reserved: int


@dataclass(frozen=True)
class StepResult:
    """One engine with one sequence length.

    Attributes:
        step_ms: forward, loss and backward.
        over_fsdp2: `step_ms` over FSDP2's with the same suffix, formed within each round.
        over_unsharded: the same over the unsharded model's.
        optimizer_ms: the step of AdamW.
        tokens_per_s: tokens over the median of a step with its optimizer.
        memory: None on the CPU.
        trace: None on the CPU.
        loss_difference: the largest relative difference between the losses of the sharded engines.
    """

    tokens: int
    engine: str
    step_ms: _report.Spread
    over_fsdp2: _report.Spread | None
    over_unsharded: _report.Spread | None
    optimizer_ms: _report.Spread
    tokens_per_s: float
    memory: Memory | None
    trace: _gpu_trace.StepTrace | None
    loss_difference: float


@dataclass(frozen=True)
class Turn:
    """Seconds of each step of a turn, and the losses."""

    steps: list[float]
    optimizers: list[float]
    losses: list[float]


def parts_of(engine: str) -> tuple[str, set[str]]:
    base, *suffixes = engine.split("-")
    return base, set(suffixes)


def engine_names(text: str) -> list[str]:
    """Names from a comma-separated option of the command line."""
    engines = text.split(",")
    for engine in engines:
        base, suffixes = parts_of(engine)
        if base not in BASES or suffixes - SUFFIXES[base]:
            raise argparse.ArgumentTypeError(
                f"unknown engine {engine}; expected {', '.join(BASES)} with suffixes of "
                + "; ".join(f"{base}: {', '.join(sorted(SUFFIXES[base]))}" for base in BASES)
            )
    return engines


def reference_of(engine: str, base: str) -> str:
    """The engine that this one is compared with: of another base, compiled or offloaded alike."""
    kept = [suffix for suffix in (BLOCKS, OFFLOAD) if suffix in parts_of(engine)[1] & SUFFIXES[base]]
    return "-".join([base, *kept])


class Trainer:
    """One engine's model and optimizer: what a `Player` holds."""

    def __init__(self, engine: str, settings: dict[str, Any]) -> None:
        base, suffixes = parts_of(engine)
        if PACKED in suffixes:
            os.environ["COMPOSABLE_SHARD_TRANSPORT"] = "packed"
        self._device = torch.device(settings["device"], 0 if settings["device"] == _device.CUDA else None)
        self._size = SIZES[settings["size"]]
        _device.select(self._device.type)
        _echo.init(settings["world"], self._device)
        self.model = self._build(base, suffixes, settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._steps = 0
        for tokens in settings["tokens"]:
            self._run(tokens, WARM_STEPS)
        self._free_cache()

    def _build(self, base: str, suffixes: set[str], settings: dict[str, Any]) -> nn.Module:
        size = self._size
        torch.manual_seed(0)  # all engines start from the same weights
        with self._device:
            model = Transformer(
                size.vocabulary,
                size.width,
                size.layers,
                size.heads,
                size.kv_heads,
                size.hidden,
                max(settings["tokens"]),
            )
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

            model.set_comm_policy(composable_shard.CommPolicy(gather="fp8"))  # type: ignore[operator]
        return model

    def _shard(self, base: str, model: Any, world: int, options: dict[str, Any]) -> None:
        mesh = init_device_mesh(self._device.type, (world,))
        shard: Any = fsdp2
        if base == OURS:
            import composable_shard  # only here: the other engines are measured without it

            shard = composable_shard.fully_shard
        for block in model.blocks:
            shard(block, mesh=mesh, **options)
        shard(model, mesh=mesh, **options)

    def measure(self, tokens: int, steps: int) -> Turn:
        """Time so many steps, after one that is not timed; then free cached memory for the other processes."""
        self._run(tokens, 1)
        turn = self._run(tokens, steps)
        self._free_cache()
        return turn

    def memory(self, tokens: int) -> Memory | None:
        """Bytes of a step, counted in the second of two; None on the CPU."""
        if self._device.type != _device.CUDA:
            return None
        self._free_cache()
        self._run(tokens, 1)
        between = _device.forget_peak()
        self._run(tokens, 1)
        found = Memory(between, _device.peak(), torch.cuda.max_memory_reserved())
        self._free_cache()
        return found

    def trace(self, tokens: int) -> _gpu_trace.StepTrace | None:
        """What forward, loss and backward of one step launch; None on the CPU."""
        if self._device.type != _device.CUDA:
            return None
        self._run(tokens, 1)
        batch = self._batch(tokens)
        activities = _gpu_trace.record(lambda: self._loss(batch).backward())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._free_cache()
        return _gpu_trace.summarize(activities)

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def close(self) -> None:
        dist.destroy_process_group()

    def _batch(self, tokens: int) -> Tensor:
        """(1, tokens + 1), the same for all engines in the same step."""
        generator = torch.Generator().manual_seed(self._steps)
        self._steps += 1
        return torch.randint(self._size.vocabulary, (1, tokens + 1), generator=generator).to(self._device)

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

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
            self.optimizer.step()
            self.optimizer.zero_grad()
            _device.synchronize(self._device.type)
            turn.steps.append(middle - begin)
            turn.optimizers.append(time.perf_counter() - middle)
            turn.losses.append(loss.item())
        return turn

    def _free_cache(self) -> None:
        if self._device.type == _device.CUDA:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def run(options: argparse.Namespace) -> tuple[int, list[StepResult]]:
    """The number of parameters, and the figures of every engine with every sequence length."""
    settings = {name: getattr(options, name) for name in ("device", "size", "world", "tokens", "backend")}
    with ExitStack() as stack:
        players = {engine: stack.enter_context(Player(engine, Trainer, engine, settings)) for engine in options.engines}
        for player in players.values():
            player.ready()
        parameters = max(player.call("parameters") for player in players.values())
        results = []
        for tokens in options.tokens:
            results += of_length(players, tokens, options)
        return parameters, results


def of_length(players: dict[str, Player], tokens: int, options: argparse.Namespace) -> list[StepResult]:
    turns: dict[str, list[Turn]] = {engine: [] for engine in players}
    shuffle = random.Random(0)
    for _ in range(options.rounds):
        for engine in shuffle.sample(list(players), len(players)):
            turns[engine].append(players[engine].call("measure", tokens, options.steps))
    memory = {engine: player.call("memory", tokens) for engine, player in players.items()}
    traces = {engine: player.call("trace", tokens) for engine, player in players.items()}
    steps = {engine: [s for turn in turns[engine] for s in turn.steps] for engine in players}
    optimizers = {engine: [s for turn in turns[engine] for s in turn.optimizers] for engine in players}
    difference = loss_difference({engine: [x for turn in turns[engine] for x in turn.losses] for engine in players})

    def over(engine: str, base: str) -> _report.Spread | None:
        reference = steps.get(reference_of(engine, base))
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
            memory[engine],
            traces[engine],
            difference,
        )
        for engine in players
    ]


def loss_difference(losses: dict[str, list[float]]) -> float:
    """Largest relative difference between sharded engines. The unsharded model has other weights after a step: of the
    sharded ones each rank holds the echo of rank 0."""
    sharded = [of_engine for engine, of_engine in losses.items() if parts_of(engine)[0] != UNSHARDED]
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
            f"losses of the sharded engines differ by at most {of_tokens[0].loss_difference:.1e}",
        )
        rows = [
            (
                each.engine,
                *(f"{b / MIB:,.0f}" for b in (each.memory.between, each.memory.allocated, each.memory.reserved)),
                *(f"{each.trace.kernels}+{each.trace.copies}", f"{each.trace.other_kernels}+{each.trace.other_copies}"),
                *(f"{ms:.2f}" for ms in (each.trace.communication_ms, each.trace.exposed_ms, each.trace.idle_ms)),
            )
            for each in of_tokens
            if each.memory is not None and each.trace is not None
        ]
        if rows:
            columns = ("engine", "MiB between steps", "peak allocated", "peak reserved", "kernels+copies, compute")
            columns += ("other streams", "communication, ms", "exposed, ms", "idle, ms")
            _report.table("Memory, and what forward and backward launch", columns, rows)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _device.add_option(parser)
    parser.add_argument("--size", choices=SIZES, default="8b-4-layers", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=_report.integers, default="4096,8192", help="(default: %(default)s)")
    parser.add_argument("--engines", type=engine_names, default="ours,fsdp2,unsharded", help="(default: %(default)s)")
    parser.add_argument("--world", type=int, default=8, help="number of ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each engine (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a turn (default: %(default)s)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: %(default)s)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-2,
        help="largest relative difference of losses (default: %(default)s); use 5e-2 for -fp8, which rounds weights",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    parameters, results = run(options)
    show(results, options)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        settings["parameters"] = parameters
        _report.write_json(options.json, "llama_steps", settings, results, options.device)
    difference = max(result.loss_difference for result in results)
    if difference > options.tolerance:
        print(f"llama_steps.py: losses differ by {difference:.1e}, more than {options.tolerance:.1e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
