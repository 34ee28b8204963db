"""Check and measure training steps that are captured in CUDA graphs.

    python bench/card/graphs.py correctness                    # captured steps equal eager ones bit for bit
    python bench/card/graphs.py correctness --only plain,dropout
    python bench/card/graphs.py steps-1b                       # 1B parameters in bfloat16, 8 and 32 sequences
    python bench/card/graphs.py steps-150m                     # 150M parameters, compiled

Nothing can be captured on a CPU. There, all steps are eager, and only the script is checked.

`correctness` trains a small decoder on NCCL ranks that share the GPU (`decoders.py`): eager twice (the second time is
the control), with `torch.cuda.graph` as torchtitan uses it (one eager call on a side stream, then a capture on the same
stream), and with `make_graphed_step`. The exit status is 1 if a case has a problem. It checks what a CPU cannot show:

- Numerics: losses, gradients and norms of each step are bitwise identical to eager ones. So are an eager step after the
  replays, an evaluation, and an eager step after the graphs were freed.
- NCCL: collectives in a capture have the results of eager ones.
- Private pools: after a capture, only the results of the step, and gradients that it created or accumulates, are in
  the pools of the graphs. Any other tensor there would be overwritten by a replay.
- Memory: allocated and reserved bytes stay the same over 50 replays.
- Allocator: its assertions hold during a capture, and when graphs are freed.
- Random numbers: with dropout, each replay draws new masks, and these are the masks of eager steps from the same seed.
- Numbers of captures: `capture_number` is the same on all streams of a capture, different in the next capture, and
  otherwise 0.
- Failed captures: after one, random numbers can be drawn eagerly and in the next capture.

`steps-1b` and `steps-150m` compare ours with FSDP2 and the unsharded model, all eager and captured (`-graph`). Ours is
captured with `make_graphed_step`, the others as torchtitan does it. If a capture fails, its error is the result. Each
engine has its own process, which plays all ranks (`_echo.py`), and the processes take turns. A turn captures again, and
frees the graph at its end, because the GPU cannot hold the activations of all engines. A step is forward, loss and
backward. The optimizer is eager and not measured. `collectives-graph` runs only the collectives. We expect that our
captured step takes at most 10 % longer than the unsharded captured step plus the collectives.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _communication
import _device
import _echo
import _engines
import _report
import _step_worker
import composable_shard
import decoders
import step
from _models import SIZES
from _players import Player
from _side_stream import SideStreamGraph, Step
from decoders import CARD, DEVICE, Case

MIB = 1 << 20


# ------------------------------------------------------------------ correctness

STEPS = 6
EAGER, AGAIN, SIDE_STREAM, GRAPHED = "eager", "eager again", "torch.cuda.graph", "make_graphed_step"
WAYS: dict[str, Callable[[Step], Any]] = {
    EAGER: lambda step: step,
    AGAIN: lambda step: step,
    SIDE_STREAM: SideStreamGraph,
    GRAPHED: lambda step: composable_shard.make_graphed_step(step),
}
CAPTURED = (SIDE_STREAM, GRAPHED)
CASES = {
    **{name: decoders.CASES[name] for name in ("plain", "packed", "bf16", "no sync", "zero2")},
    "hsdp 2x1": Case(mesh=(2, 1)),
    "hsdp 1x2": Case(mesh=(1, 2)),
    "hfsdp 2x1": Case(decoders.OUTER, mesh=(2, 1)),
    "few ranks": Case({"reshard_after_forward": 2}, mesh=(4,)),
    "checkpoint": Case(recompute=True),
    "frozen unused": Case(freeze=("q.weight", "k.weight"), unused=True),
    "dropout": Case(dropout=0.1),
}


@dataclass(frozen=True)
class Outcome:
    """One way to run a case, on one rank.

    Attributes:
        problems: differences to the eager steps, and everything else that is wrong.
        captures, replays, eager_calls: number of calls of each type; 0 for eager steps.
        pool: bytes of the private pools of all graphs.
    """

    case: str
    way: str
    rank: int
    problems: list[str]
    captures: int = 0
    replays: int = 0
    eager_calls: int = 0
    pool: int = 0
    seconds: float = 0.0


class Trial:
    """A decoder that trains in one of the ways, and the results of its steps."""

    def __init__(self, case: Case, mesh: DeviceMesh, way: str) -> None:
        self._way = way
        self._side = decoders.Side("ours", case, mesh)
        self._call: Any = WAYS[way](self._side.gradients)
        self._addresses: set[int] = set()  # of the memory of results and, if graphs can create them, of gradients
        self.seen: list[dict[str, Tensor]] = []
        self.problems: list[str] = []
        self.counts: dict[str, int] = {}

    def run(self, replays: int) -> None:
        torch.manual_seed(7)
        for number in range(STEPS):
            # In torchtitan's way, the addresses of gradients must not change. `make_graphed_step` allows both.
            self._step(self._call, number, set_to_none=self._way != SIDE_STREAM and number < STEPS // 2)
        if self._way in CAPTURED:
            self._check_pools()
            self._check_replays(replays)
        self._finish()

    def _finish(self) -> None:
        """Run eagerly, and again without the graphs."""
        torch.manual_seed(8)
        self._step(self._side.gradients, STEPS)
        self.seen.append({"evaluation": torch.tensor(self._side.evaluate())})
        self._call = None
        gc.collect()
        if CARD:
            torch.cuda.empty_cache()
        self._side.model.train()
        self._step(self._side.gradients, STEPS + 1)

    def _step(self, call: Step, number: int, set_to_none: bool = False) -> None:
        side = self._side
        losses = self._gradients(call, number)
        gradients = {n: p.grad.to_local() for n, p in side.model.named_parameters() if p.grad is not None}
        results = [*losses, *(gradients.values() if self._way == GRAPHED else ())]
        self._addresses |= {each.untyped_storage().data_ptr() for each in results}
        seen = {**{f"loss {micro}": loss for micro, loss in enumerate(losses)}, **gradients}
        self.seen.append({name: each.clone() for name, each in seen.items()})
        self.seen[-1]["norm"] = torch.tensor(side.clip())
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=set_to_none)

    def _gradients(self, call: Step, number: int) -> list[Tensor]:
        model, full = self._side.model, self._side.model.blocks
        if self._side.case.unused:
            model.blocks = full[:-1]
        losses = call(*decoders.batches(self._side.case, number))
        model.blocks = full
        return losses

    def _check_pools(self) -> None:
        # `make_graphed_step` returns copies of results, and holds accumulated gradients between microbatches.
        for captured in self._call._graphs.values() if self._way == GRAPHED else ():
            held = [tensor for held in captured.after.held for tensor in held.tensors()]
            results = [each for each in captured.outputs if isinstance(each, Tensor)]
            self._addresses |= {each.untyped_storage().data_ptr() for each in (*held, *results)}
        self.counts["pool"], others = find_pool_tensors(self._addresses)
        if others:
            self.problems.append(f"{len(others)} tensors in private pools: {', '.join(others[:5])}")

    def _check_replays(self, count: int) -> None:
        """Repeat a step. Check that memory stays constant, and that losses differ only with dropout."""
        captures = self._call.captures
        losses, memory = set(), set()
        for _ in range(count):
            losses.add(self._gradients(self._call, STEPS)[0].item())
            self._side.optimizer.zero_grad(set_to_none=False)
            memory.add((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        self.counts |= {name: getattr(self._call, name) for name in ("captures", "replays", "eager_calls")}
        if CARD and self._call.replays <= count:
            self.problems.append("no step was replayed during training")
        if self._call.captures > captures:
            self.problems.append("captured again for equal inputs")
        if len(memory) > 1:
            self.problems.append(f"allocated and reserved bytes changed during replays: {sorted(memory)[:4]}")
        # Losses with different masks can be equal by chance.
        if len(losses) <= count / 2 if self._side.case.dropout else len(losses) > 1:
            self.problems.append(f"{len(losses)} different losses in {count} replays with the same batch")


def find_pool_tensors(allowed: set[int]) -> tuple[int, list[str]]:
    """Return the bytes of all private pools, and the tensors in them whose memory is not at an allowed address."""
    if not CARD:
        return 0, []
    gc.collect()
    pools = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) != (0, 0)]
    ranges = [range(each["address"], each["address"] + each["total_size"]) for each in pools]
    others = []
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.is_cuda:
            address = each.untyped_storage().data_ptr()
            if address not in allowed and any(address in one for one in ranges):
                others.append(f"{type(each).__name__} {tuple(each.shape)} {each.dtype}")
    return sum(map(len, ranges)), others


def check_capture_numbers() -> list[str]:
    from composable_shard._torch.capturing import capture_number

    seen = [capture_number(DEVICE)]
    for _ in range(2 if CARD else 0):
        other = torch.cuda.Stream()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device=DEVICE)
            seen.append(capture_number(DEVICE))
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                torch.zeros(1, device=DEVICE)
                seen.append(capture_number(DEVICE))
            torch.cuda.current_stream().wait_stream(other)
    seen.append(capture_number(DEVICE))
    names: dict[int, int] = {0: 0}  # ids are arbitrary: number them in the order in which they appear
    order = [names.setdefault(each, len(names)) for each in seen]
    return [] if order == ([0, 1, 1, 2, 2, 0] if CARD else [0, 0]) else [f"numbers of captures: {seen}"]


def check_failed_capture() -> list[str]:
    """Fail in a capture, then draw random numbers eagerly, in the next capture and in its replay."""
    from composable_shard._torch.capturing import SideStream, capture

    if not CARD:
        return []
    stream = SideStream()
    try:
        stream.run(lambda: capture(lambda: torch.rand(1, device=DEVICE).item(), None))
    except RuntimeError:
        pass
    else:
        return ["a capture in which the host reads a value did not fail"]
    drawn: list[Tensor] = [torch.rand(8, device=DEVICE)]
    graph, _ = stream.run(lambda: capture(lambda: drawn.append(torch.rand(8, device=DEVICE)), None))
    values = [drawn[0].tolist()]
    for _ in range(2):
        graph.replay()
        values.append(drawn[1].tolist())
    return [] if len(set(map(tuple, values))) == len(values) else ["random numbers repeat after a failed capture"]


def describe_differences(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> list[str]:
    """Describe the first difference of each step."""
    problems = []
    for number, (mine, others) in enumerate(zip(found, expected, strict=True)):
        if mine.keys() != others.keys():
            problems.append(f"step {number}: only one has {', '.join(mine.keys() ^ others.keys())}")
        elif names := [name for name in mine if not torch.equal(mine[name], others[name])]:
            apart = (mine[names[0]] - others[names[0]]).abs().max().item()
            problems.append(f"step {number}: {len(names)} tensors differ, {names[0]} by up to {apart:.1e}")
    return problems


def run_rank(options: argparse.Namespace) -> NoReturn:
    """Run the cases on a rank, and rewrite its file of outcomes after each way."""
    decoders.join(timedelta(seconds=60))
    # Kernels must not choose between algorithms. Filling empty tensors would add kernels to the graphs.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    faulthandler.dump_traceback_later(options.limit / 2)  # shows where a rank hangs
    rank = dist.get_rank()
    outcomes: list[Outcome] = []
    for name in options.only:
        os.environ["COMPOSABLE_SHARD_TRANSPORT"] = CASES[name].transport
        expected: list[dict[str, Tensor]] = []
        for way in WAYS:
            begin = time.monotonic()
            try:
                problems, counts = try_way(replace(CASES[name], clip=True), way, expected, options.replays)
            except Exception as error:
                traceback.print_exc()
                problems, counts = [f"{type(error).__name__}: {error}"], {}
            outcomes.append(Outcome(name, way, rank, problems, **counts, seconds=round(time.monotonic() - begin, 1)))
            _report.write_json(options.json.with_suffix(f".{rank}.json"), "ranks", {}, outcomes)
    if "dropout" in options.only:  # last, because it may leave the device unusable
        try:
            problems = check_failed_capture()
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        outcomes.append(Outcome("failed capture", "capture", rank, problems))
    _report.write_json(options.json.with_suffix(f".{rank}.json"), "ranks", {}, outcomes)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # closing an NCCL communicator may wait for a peer that has ended


def try_way(case: Case, way: str, expected: list[dict[str, Tensor]], replays: int) -> tuple[list[str], dict[str, int]]:
    """Train in one of the ways. Return the problems, and the counts of an `Outcome`.

    `expected` contains the results of the eager steps. The first call fills it.
    """
    mesh = init_device_mesh(DEVICE.type, case.mesh, mesh_dim_names=("replicate", "shard")[-len(case.mesh) :])
    trial = Trial(case, mesh, way)
    trial.run(replays)
    if not expected:
        expected += trial.seen
    problems = [*describe_differences(trial.seen, expected), *trial.problems]
    return problems + (check_capture_numbers() if way == SIDE_STREAM else []), trial.counts


def check_together(names: list[str], folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run cases in the same processes. Return the outcomes of all ranks."""
    file = folder / f"{names[0]}.json"
    arguments = ["correctness", "--only", ",".join(names), "--json", str(file)]
    arguments += ["--replays", str(options.replays), "--limit", str(options.limit)]
    world = math.prod(CASES[names[0]].mesh)
    statuses = decoders.run_ranks(arguments, options.limit, Path(__file__), world=world)
    files = [file.with_suffix(f".{rank}.json") for rank in range(world)]
    outcomes = [outcome for each in files if each.exists() for outcome in json.loads(each.read_text())["results"]]
    if statuses is None or any(statuses) or len(outcomes) < len(names) * len(WAYS) * world:
        text = f"the ranks ended with {statuses or 'a timeout'}"
        outcomes.append(asdict(Outcome(", ".join(names), "all", 0, [text])))
    return outcomes


def check(options: argparse.Namespace) -> int:
    if "RANK" in os.environ:
        run_rank(options)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # makes cuBLAS deterministic
    worlds = {name: math.prod(CASES[name].mesh) for name in options.only}
    # An error in a capture can break the process, so on a GPU each case has its own processes.
    by_world = [[name for name in worlds if worlds[name] == world] for world in sorted(set(worlds.values()))]
    groups = [[name] for name in worlds] if CARD else by_world
    outcomes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as threads:
        jobs = [threads.submit(check_together, names, Path(folder), options) for names in groups]
        for job in as_completed(jobs):
            outcomes += job.result()
            _report.save(options, "graphs", outcomes, DEVICE.type)
    _report.table(
        f"Captured steps compared with eager ones, {DEVICE.type}",
        ("case", "way", "rank", "captures", "replays", "eager calls", "pool, MiB", "s", "result"),
        [
            (
                *(str(each[name]) for name in ("case", "way", "rank", "captures", "replays", "eager_calls")),
                f"{each['pool'] / MIB:.1f}",
                f"{each['seconds']:.1f}",
                "; ".join(each["problems"]) or ("bitwise identical" if each["way"] in WAYS else "no problem"),
            )
            for each in outcomes
            if each["rank"] == 0 or each["problems"]
        ],
    )
    return int(any(each["problems"] for each in outcomes))


# ------------------------------------------------------------------ step time

GRAPH = "-graph"
COLLECTIVES = _communication.NAME
WARM_CALLS = 4  # eager calls and the capture, before the steps of a turn are timed
DTYPE = "bfloat16"
EXPECTED = 1.1
DEFAULTS: dict[str, dict[str, Any]] = {
    "steps-1b": {
        "size": "1b",
        "batch": "8,32",
        "engines": "ours,ours-graph,fsdp2,fsdp2-graph,compute,compute-graph,collectives-graph",
    },
    "steps-150m": {
        "size": "150m",
        "batch": "8",
        "engines": "ours-placed-whole,ours-placed-whole-graph,fsdp2-blocks,fsdp2-blocks-graph,"
        "compute-whole,compute-whole-graph,collectives-graph",
    },
}


@dataclass(frozen=True)
class Turn:
    """Times of the steps of a turn in seconds, their losses, and peaks of memory in bytes (0 on the CPU)."""

    steps: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    allocated: int = 0
    reserved: int = 0
    error: str | None = None


@dataclass(frozen=True)
class GraphedStep:
    """One engine with one number of sequences. Ratios are formed within each round.

    Attributes:
        step_ms: time of forward, loss and backward.
        over_unsharded: ratio to the unsharded model, captured if the engine is captured.
        over_eager: ratio to the same engine without graphs.
        over_parts: ratio to the captured unsharded step plus the captured collectives, only for captured engines.
        allocated, reserved: peaks of torch's CUDA allocator, in bytes. The memory of a graph is reserved.
        loss_difference: the largest relative difference between the losses of the sharded engines; None if a loss is
            not finite.
        error: the reason if there are no figures.
    """

    batch: int
    engine: str
    step_ms: _report.Spread | None
    over_unsharded: _report.Spread | None
    over_eager: _report.Spread | None
    over_parts: _report.Spread | None
    allocated: int
    reserved: int
    loss_difference: float | None
    error: str | None


class Trainer:
    """One engine's model. A `Player` runs it in its own process."""

    def __init__(self, engine: str, settings: dict[str, Any]) -> None:
        self._settings, self._engine = settings, engine
        self._device = torch.device(settings["device"], 0 if settings["device"] == _device.CUDA else None)
        _device.select(self._device.type)
        _echo.init(settings["world"], self._device)
        mesh = init_device_mesh(self._device.type, (settings["world"],))
        self._side = _step_worker.build(engine.removesuffix(GRAPH), settings, mesh)
        self._number = 0

    def measure(self, rows: int, steps: int) -> Turn:
        """Capture if the engine is a captured one, time `steps` steps, and free the graph and cached memory."""
        cuda = self._device.type == _device.CUDA
        if cuda:
            _device.forget_peak()
        try:
            call = self._make_call()
            for _ in range(WARM_CALLS):
                self._run(call, rows)
            replays = getattr(call, "replays", 0)
            timed = [self._run(call, rows) for _ in range(steps)]
            if cuda and self._engine.endswith(GRAPH) and call.replays - replays < steps:
                raise RuntimeError(f"only {call.replays - replays} of {steps} steps were replayed")
        except Exception as error:
            traceback.print_exc()
            return Turn(error=f"{type(error).__name__}: {error}")
        peaks = (_device.peak(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
        del call
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        return Turn([seconds for seconds, _ in timed], [loss for _, loss in timed], *peaks)

    def close(self) -> None:
        dist.destroy_process_group()

    def _make_call(self) -> Any:
        if not self._engine.endswith(GRAPH):
            return self._side.backward
        return WAYS[GRAPHED if self._engine.startswith("ours") else SIDE_STREAM](self._side.backward)

    def _run(self, call: Step, rows: int) -> tuple[float, float]:
        ids = _step_worker.batch(self._settings["size"], rows, 0, self._number).to(self._device)
        self._number += 1
        _device.synchronize(self._device.type)
        begin = time.perf_counter()
        loss = call(ids)
        _device.synchronize(self._device.type)
        seconds = time.perf_counter() - begin
        self._side.optimizer.step()
        # The graph adds to gradients at fixed addresses.
        self._side.optimizer.zero_grad(set_to_none=not self._engine.endswith(GRAPH))
        return seconds, loss.item()


def measure(options: argparse.Namespace) -> int:
    settings = {name: getattr(options, name) for name in ("device", "size", "world", "backend")} | {"dtype": DTYPE}
    results: list[GraphedStep] = []
    with ExitStack() as stack:
        players = {engine: stack.enter_context(Player(engine, Trainer, engine, settings)) for engine in options.engines}
        for player in players.values():
            player.ready()
        for rows in options.batch:
            results += evaluate(rows, take_turns(players, rows, options))
            _report.save(options, "graphs", results, options.device)
            show([each for each in results if each.batch == rows], options)
    tolerance = step.TOLERANCES[DTYPE]
    right = all(each.loss_difference is not None and each.loss_difference <= tolerance for each in results)
    return int(not right or any(each.error and not each.engine.startswith("fsdp2") for each in results))


def take_turns(players: dict[str, Player], rows: int, options: argparse.Namespace) -> dict[str, list[Turn]]:
    """Return the turns of each engine. An engine that fails gets no further turns."""
    turns: dict[str, list[Turn]] = {engine: [] for engine in players}
    shuffle = random.Random(0)
    for _ in range(options.rounds):
        for engine in shuffle.sample(list(players), len(players)):
            if any(turn.error for turn in turns[engine]):
                continue
            try:
                turn = players[engine].call("measure", rows, options.steps)
            except SystemExit as error:  # its process ended
                turn = Turn(error=str(error))
            turns[engine].append(turn)
    return turns


def evaluate(rows: int, turns: dict[str, list[Turn]]) -> list[GraphedStep]:
    errors = {
        engine: next((turn.error for turn in of_engine if turn.error), None) for engine, of_engine in turns.items()
    }
    times = {e: [s for turn in of_engine for s in turn.steps] for e, of_engine in turns.items() if not errors[e]}
    sharded = [e for e in times if not e.startswith(("compute", COLLECTIVES))]
    losses = [[loss for turn in turns[e] for loss in turn.losses] for e in sharded]
    finite = all(math.isfinite(loss) for of_engine in losses for loss in of_engine)
    difference = max(((max(s) - min(s)) / min(s) for s in zip(*losses, strict=True)), default=0.0) if finite else None
    unsharded = {e.endswith(GRAPH): times[e] for e in times if e.startswith("compute")}
    parts = None
    if True in unsharded and COLLECTIVES + GRAPH in times:
        parts = [sum(pair) for pair in zip(unsharded[True], times[COLLECTIVES + GRAPH], strict=True)]

    def compare(engine: str, others: list[float] | None) -> _report.Spread | None:
        return step.ratio(times[engine], others) if engine in times else None

    return [
        GraphedStep(
            rows,
            engine,
            _report.Spread.of([1e3 * s for s in times[engine]]) if engine in times else None,
            compare(engine, unsharded.get(engine.endswith(GRAPH))),
            compare(engine, times.get(engine.removesuffix(GRAPH)) if engine.endswith(GRAPH) else None),
            compare(engine, parts if engine.endswith(GRAPH) else None),
            max(turn.allocated for turn in of_engine),
            max(turn.reserved for turn in of_engine),
            difference,
            errors[engine],
        )
        for engine, of_engine in turns.items()
    ]


def show(results: list[GraphedStep], options: argparse.Namespace) -> None:
    difference = results[0].loss_difference
    losses = "are NOT FINITE" if difference is None else f"differ by at most {difference:.1e}"
    _report.table(
        f"{options.size}, {results[0].batch} sequences, {DTYPE}, world {options.world}, {options.device}",
        ("engine", "step, ms", "/ unsharded", "/ eager", "/ parts", "allocated, MiB", "reserved, MiB", "error"),
        [
            (
                each.engine,
                each.step_ms.shown(1) if each.step_ms else "-",
                *(str(ratio or "-") for ratio in (each.over_unsharded, each.over_eager, each.over_parts)),
                f"{each.allocated / MIB:,.0f}",
                f"{each.reserved / MIB:,.0f}",
                each.error or "-",
            )
            for each in results
        ],
        f"median [quartiles] of {options.rounds} interleaved rounds of {options.steps} steps; parts: the captured "
        f"unsharded step plus the captured collectives, expected at most {EXPECTED} for ours; losses of the sharded "
        f"engines {losses}",
    )


# ------------------------------------------------------------------ command line


def parse_engines(text: str) -> list[str]:
    """Parse a comma-separated list of engines, which can end with `-graph`."""
    _engines.parse(text.replace(GRAPH, ""), [COLLECTIVES])
    return text.split(",")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("correctness", help="compare captured steps with eager ones")
    checking.add_argument("--only", type=_report.names(tuple(CASES)), default=[*CASES], help="cases (default: all)")
    checking.add_argument("--replays", type=int, default=50, help="replays with constant memory (default: %(default)s)")
    checking.add_argument("--jobs", type=int, default=4, help="cases at the same time (default: %(default)s)")
    checking.add_argument("--limit", type=float, default=150.0, help="seconds per case (default: %(default)s)")
    for name, defaults in DEFAULTS.items():
        measuring = commands.add_parser(name, help=f"time steps of {defaults['size']} parameters")
        _device.add_option(measuring)
        measuring.add_argument("--size", choices=SIZES, help="size of the GPT (default: %(default)s)")
        measuring.add_argument("--batch", type=_report.integers, help="numbers of sequences (default: %(default)s)")
        measuring.add_argument("--engines", type=parse_engines, help="engines (default: %(default)s)")
        measuring.add_argument("--world", type=int, default=2, help="number of ranks (default: %(default)s)")
        measuring.add_argument("--rounds", type=int, default=6, help="turns of each engine (default: %(default)s)")
        measuring.add_argument("--steps", type=int, default=4, help="timed steps per turn (default: %(default)s)")
        measuring.add_argument("--backend", default="inductor", help="backend of torch.compile (default: %(default)s)")
        measuring.set_defaults(**defaults)
    for each in commands.choices.values():
        each.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return check(options) if options.command == "correctness" else measure(options)


if __name__ == "__main__":
    sys.exit(main())
