"""Compare composable_shard (*ours*) with FSDP2 on a node with eight GPUs, next to torchtitan's published figures.

    bash bench/eight_gpus.sh                                      # checks the environment, then runs this script
    bash bench/eight_gpus.sh --modes eager,compiled --rounds 1    # a first look, about 6 minutes
    bash bench/eight_gpus.sh --batch 1                            # for GPUs with less than 96 GB
    bash bench/eight_gpus.sh --device cpu --gpus 2 --size tiny --sequence 32 --backend aot_eager --skip-unsupported

By default it trains Llama 3.1 8B with 2 sequences of 8,192 random tokens per GPU: parameters, gradients and AdamW
states in float32, compute in bfloat16, reductions in float32. Each block and the root are sharded, all blocks except
the last one reshard after forward, and blocks use selective activation checkpointing (attention and every second
matrix product are saved). This is the configuration of torchtitan's rows of December 2024, except that gradients are
not clipped and AdamW is fused. Nothing is downloaded. A run is expected to take 60 to 90 minutes on eight H100. This is
an estimate: the script has not been run on eight GPUs yet.

A mode is measured with both libraries:

    eager       no compiler
    compiled    `torch.compile` of each block
    float8      compiled blocks, linear layers in float8 (torchao, tensorwise scales), weights gathered in float8
    graphs      compiled blocks; forward, loss and backward are captured in a CUDA graph, the optimizer is eager. Ours:
                `make_graphed_step`. FSDP2: `torch.cuda.graph`, as torchtitan does it
    one-graph   ours only: `composable_shard.compile`, compared with `compiled` of FSDP2

Each combination of mode, library and round is a job: one process per GPU, started and ended by this script. So a peak
of memory is that of one library. The first library changes from round to round, and ratios are formed within a round.
A step is forward, loss, backward and optimizer step. The slowest GPU counts. Memory is the peak that the allocator
reserved on the GPU with the largest one, over all steps. Both libraries start from the same weights, and train on the
same two batches in turn, so their losses must agree.

If a job fails, its error is its result, later rounds omit it, and the others continue. The figures are written to the
JSON file after every job, and output of all processes to the log file next to it. Ctrl-C prints the figures of the
finished jobs.

Exit status: 0 if everything of ours ran with the losses of FSDP2; 1 if a job of ours failed, losses differ by more than
`--tolerance`, or float8 cannot run here and `--skip-unsupported` is not given; 2 if the machine or an option is
unsuitable; 130 after Ctrl-C. It is not an error if FSDP2 fails, for example in a capture.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import _device
import _launch
import _llama_model
import _report
import planner
from _eight_gpus_worker import COMPILED, EAGER, FLOAT8, FSDP2, GRAPHS, MODES, ONE_GRAPH, OURS, Machine, describe_machine

WORKER = Path(__file__).with_name("_eight_gpus_worker.py")
GIB = 1 << 30
ENGINES = (FSDP2, OURS)
# The modes of FSDP2 with which a mode of ours is compared, the best one first
REFERENCES = {ONE_GRAPH: (COMPILED,), GRAPHS: (GRAPHS, COMPILED)}
PUBLISHED = {
    FLOAT8 if each.linear_format else COMPILED if each.compile_blocks else EAGER: each
    for each in planner.PUBLISHED
    if each.what == "8B, 8 h100-96gb, batch 2"
}
PUBLISHED_SETTINGS = ("8b", 8192, 2, 8)  # size, sequence, batch, GPUs
PUBLISHED_ON = "8 H100 with 96 GB of HBM2e at 500 W"
ERROR_LINES = 4


@dataclass(frozen=True)
class Job:
    """One engine in one mode and round.

    Attributes:
        step_s: seconds of each timed step, on the slowest GPU.
        losses: the losses of all steps, including those for warm-up, on each rank.
        allocated, reserved: peaks of torch's CUDA allocator in bytes on the GPU with the largest one; 0 on the CPU.
        replays: number of timed steps that were replays of a CUDA graph.
        seconds: time of the job, including its start.
        error: the error, if the job failed. Then there are no figures.
    """

    mode: str
    engine: str
    round: int
    seconds: float
    step_s: Sequence[float] = ()
    losses: Sequence[Sequence[float]] = ()
    allocated: int = 0
    reserved: int = 0
    replays: int = 0
    parameters: int = 0
    error: str | None = None

    def tokens_per_s(self, tokens: int) -> float:
        """Return the tokens per second and GPU of the median step, for `tokens` per step and GPU."""
        return tokens / statistics.median(self.step_s)


@dataclass(frozen=True)
class ModeResult:
    """A mode. Spreads are median and range of the rounds. Figures are None if they were not measured.

    Attributes:
        ours, fsdp2: tokens per second and GPU.
        reference: the mode of FSDP2 that ours is compared with.
        ratio: tokens per second of ours over FSDP2, formed within each round.
        ours_reserved, fsdp2_reserved: peaks of reserved memory in bytes.
        reserved_ratio: ratio of the peaks, formed within each round.
        loss_difference: the largest relative difference between ours and FSDP2, over rounds, steps and ranks.
        repeated_difference: the same between rounds of FSDP2, as the noise; None with one round.
        published: torchtitan's tokens per second and GPU, and GiB of reserved memory.
        unsupported: why the mode cannot run here; None if it can.
        problems: failures of ours.
        notes: failures of FSDP2.
        jobs: the figures of all rounds.
    """

    mode: str
    ours: _report.Spread | None
    fsdp2: _report.Spread | None
    reference: str | None
    ratio: _report.Spread | None
    ours_reserved: _report.Spread | None
    fsdp2_reserved: _report.Spread | None
    reserved_ratio: _report.Spread | None
    loss_difference: float | None
    repeated_difference: float | None
    published: tuple[float, float | None] | None
    unsupported: str | None
    problems: list[str]
    notes: list[str]
    jobs: list[Job]


# ------------------------------------------------------------------ evaluation


def evaluate(
    jobs: Sequence[Job], options: argparse.Namespace, unsupported: Mapping[str, str] | None = None
) -> list[ModeResult]:
    """Compare ours with FSDP2 in every mode, with the jobs that have finished. `unsupported` has reasons by mode."""
    return [evaluate_mode(mode, jobs, options, (unsupported or {}).get(mode)) for mode in options.modes]


def evaluate_mode(
    mode: str, jobs: Sequence[Job], options: argparse.Namespace, unsupported: str | None = None
) -> ModeResult:
    tokens = options.batch * options.sequence
    ours, fsdp2 = select(jobs, OURS, mode), select(jobs, FSDP2, mode)
    reference = next((each for each in REFERENCES.get(mode, (mode,)) if select(jobs, FSDP2, each)), None)
    others = select(jobs, FSDP2, reference) if reference else {}
    pairs = [(ours[number], others[number]) for number in ours if number in others]
    difference = largest_difference(pairs)
    failed = [job for job in jobs if job.mode == mode and job.error]
    problems = [f"{mode}, ours, round {job.round}: {job.error}" for job in failed if job.engine == OURS]
    if difference is not None and difference > options.tolerance:
        problems.append(
            f"{mode}: losses of ours differ from those of FSDP2 by {difference:.1e}; --tolerance {options.tolerance:g}"
        )
    is_published = (options.size, options.sequence, options.batch, options.gpus) == PUBLISHED_SETTINGS
    published = PUBLISHED.get(mode) if is_published else None

    def spread(of_engine: dict[int, Job], figure: Callable[[Job], float]) -> _report.Spread | None:
        return range_of([figure(job) for job in of_engine.values()])

    def speed(job: Job) -> float:
        return job.tokens_per_s(tokens)

    return ModeResult(
        mode,
        spread(ours, speed),
        spread(others, speed),
        reference,
        range_of([speed(one) / speed(other) for one, other in pairs]),
        spread(ours, lambda job: job.reserved),
        spread(others, lambda job: job.reserved),
        range_of([one.reserved / other.reserved for one, other in pairs if other.reserved]),
        difference,
        largest_difference(list(itertools.pairwise(others.values()))),
        (published.tokens_per_second, published.memory) if published else None,
        unsupported,
        problems,
        [f"{mode}, FSDP2, round {job.round}: {job.error}" for job in failed if job.engine == FSDP2],
        [*ours.values(), *fsdp2.values(), *failed],
    )


def select(jobs: Sequence[Job], engine: str, mode: str) -> dict[int, Job]:
    """Return the jobs with figures, by round."""
    return {job.round: job for job in jobs if (job.engine, job.mode) == (engine, mode) and not job.error}


def range_of(values: Sequence[float]) -> _report.Spread | None:
    return _report.Spread.range_of(values) if values else None


def largest_difference(pairs: Sequence[tuple[Job, Job]]) -> float | None:
    """Return the largest relative difference between losses of the same step and rank; None without pairs."""
    differences = [
        abs(one - other) / abs(other)
        for job, reference in pairs
        for ranks in zip(job.losses, reference.losses, strict=True)
        for one, other in zip(*ranks, strict=True)
    ]
    return max(differences, default=None)


def find_status(results: Sequence[ModeResult], options: argparse.Namespace) -> int:
    """Return the exit status of a complete run."""
    unsupported = any(each.unsupported for each in results) and not options.skip_unsupported
    return int(unsupported or any(each.problems for each in results))


# ------------------------------------------------------------------ jobs


def run(options: argparse.Namespace, machine: Machine, finished: list[Job]) -> None:
    """Run all jobs. Append each to `finished`, and write the figures."""
    modes = [mode for mode in options.modes if mode not in machine.unsupported]
    with options.log.open("wb") as log:
        for number, mode in itertools.product(range(1, options.rounds + 1), modes):
            for engine in ENGINES if number % 2 else reversed(ENGINES):
                failed = any(job.error for job in finished if (job.engine, job.mode) == (engine, mode))
                if failed or (engine, mode) == (FSDP2, ONE_GRAPH):
                    continue
                log.write(f"\n==== round {number}, {mode}, {engine} ====\n".encode())
                log.flush()
                finished.append(run_job(mode, engine, number, options, log))
                show_job(finished[-1], options)
                save(finished, options, machine)


def run_job(mode: str, engine: str, number: int, options: argparse.Namespace, log: Any) -> Job:
    settings = {name: getattr(options, name) for name in ("device", "size", "sequence", "batch", "backend")}
    settings |= {"warm_steps": options.warm_steps, "steps": options.steps, "mode": mode, "engine": engine}
    begin = time.monotonic()
    try:
        text = _launch.launch(
            WORKER,
            json.dumps(settings),
            world=options.gpus,
            timeout=options.timeout,
            tuned=False,
            device=options.device,
            log=log,
        )
    except _launch.WorkerError as error:
        return Job(mode, engine, number, time.monotonic() - begin, error=str(error))
    return Job(mode, engine, number, time.monotonic() - begin, **json.loads(text))


def show_job(job: Job, options: argparse.Namespace) -> None:
    if job.error:
        figures = f"failed: {shorten(job.error)}"
    else:
        figures = (
            f"{job.tokens_per_s(options.batch * options.sequence):,.0f} tokens/s/GPU, {show_gib(job.reserved)} GiB"
        )
    print(
        f"round {job.round} of {options.rounds}, {job.mode}, {job.engine}: {figures} ({job.seconds:.0f} s)", flush=True
    )


def save(jobs: Sequence[Job], options: argparse.Namespace, machine: Machine) -> None:
    settings = {name: value if name not in ("json", "log") else str(value) for name, value in vars(options).items()}
    settings["published_on"] = PUBLISHED_ON
    results = [asdict(each) for each in evaluate(jobs, options, machine.unsupported)]
    _report.write_json(options.json, "eight_gpus", settings, results, options.device, machine.about)


# ------------------------------------------------------------------ output


def show(results: Sequence[ModeResult], options: argparse.Namespace) -> None:
    captured = "graphs: forward, loss and backward are captured"
    if options.device == _device.CPU:
        captured = "nothing is captured on a CPU, so steps of graphs are eager"
    published = (
        f"; torchtitan: published figures of FSDP2 from December 2024 on {PUBLISHED_ON}. "
        "Absolute figures compare only on the same GPUs"
        if any(each.published for each in results)
        else ""
    )
    _report.table(
        f"{options.size}, {options.batch} sequences of {options.sequence:,} tokens per GPU, {options.gpus} ranks, "
        f"{options.device}: tokens/s/GPU and reserved GiB",
        ("mode", "ours, tokens/s", "FSDP2, tokens/s", "ratio", "ours, GiB", "FSDP2, GiB", "ratio, GiB")
        + ("loss difference", "torchtitan, tokens/s", "torchtitan, GiB"),
        [describe(each) for each in results],
        f"median [range] of {options.rounds} round(s); ratios are ours / FSDP2, formed within each round; {captured}; "
        "loss difference: largest relative difference of ours to FSDP2, in parentheses between rounds of FSDP2"
        + published,
    )
    for result in results:
        for text in (*result.problems, *result.notes):
            print(shorten(text))
        if result.unsupported:
            print(f"{result.mode}: {result.unsupported}")


def describe(result: ModeResult) -> tuple[str, ...]:
    """Return the row of a mode."""
    of_other_mode = f" ({result.reference})" if result.reference not in (None, result.mode) else ""
    speed, memory = result.published or (None, None)
    difference = "-" if result.loss_difference is None else f"{result.loss_difference:.1e}"
    noise = "" if result.repeated_difference is None else f" ({result.repeated_difference:.1e})"
    missing = "not run" if result.unsupported else "failed" if result.problems else "-"
    return (
        result.mode,
        f"{result.ours.median:,.0f}" if result.ours else missing,
        f"{result.fsdp2.median:,.0f}{of_other_mode}" if result.fsdp2 else "failed" if result.notes else "-",
        result.ratio.shown(3) if result.ratio else "-",
        show_gib(result.ours_reserved.median if result.ours_reserved else 0),
        show_gib(result.fsdp2_reserved.median if result.fsdp2_reserved else 0),
        result.reserved_ratio.shown(3) if result.reserved_ratio else "-",
        difference + noise,
        f"{speed:,.0f}" if speed else "-",
        f"{memory:.1f}" if memory else "-",
    )


def show_gib(count: float) -> str:
    return f"{count / GIB:.1f}" if count else "-"


def shorten(error: str) -> str:
    """Return the first lines of an error."""
    lines = [line for line in error.splitlines() if line.strip()]
    return "\n    ".join([*lines[:ERROR_LINES], *(["..."] if len(lines) > ERROR_LINES else [])])


# ------------------------------------------------------------------ command line


def inspect_machine(device: str) -> Machine:
    """Describe the machine, with GPUs in a process that ends immediately, because it uses memory of each GPU."""
    if device == _device.CPU or not _device.cards():
        return describe_machine(device)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(describe_machine, device).result()


def find_obstacle(options: argparse.Namespace, machine: Machine) -> str | None:
    """Return why this machine cannot run the benchmark, and how to solve it; None if it can."""
    if options.device == _device.CPU:
        if options.size != "tiny":
            return f"--size {options.size} is too large for a CPU; add --size tiny --sequence 32"
        return None
    if machine.gpus < options.gpus:
        hint = "see nvidia-smi and CUDA_VISIBLE_DEVICES, or pass another --gpus"
        if torch.version.cuda is None:
            hint = f"torch {torch.__version__} is a build without CUDA; see https://pytorch.org/get-started"
        return f"--gpus is {options.gpus}, but torch finds {machine.gpus} CUDA GPUs; {hint}"
    if not machine.has_nccl:
        return f"torch {torch.__version__} has no NCCL; install a build for Linux"
    return None


def warn(options: argparse.Namespace, machine: Machine) -> None:
    """Print what can make jobs fail."""
    largest = max((each.memory or 0.0) for each in PUBLISHED.values())
    if machine.gpus and (options.size, options.batch) == ("8b", 2) and machine.least_gib < 1.05 * largest:
        print(
            f"note: GPUs have {machine.least_gib:.1f} GiB, and eager FSDP2 reserved {largest} GiB in the published run "
            "with 8 GPUs. If jobs run out of memory, use --batch 1"
        )
    for each in machine.busy:
        print(f"note: another process uses memory: {each}")
    for mode in machine.unsupported.keys() & set(options.modes):
        print(f"note: {mode} is left out: {machine.unsupported[mode]}")


def count_parameters(size: str) -> int:
    """Return the number of parameters of a model, built on the meta device."""
    with torch.device("meta"):
        model = _llama_model.make_decoder(_llama_model.SIZES[size], 1)
    return sum(parameter.numel() for parameter in model.parameters())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="eight_gpus.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8, help="number of GPUs, one rank each (default: %(default)s)")
    parser.add_argument(
        "--modes", type=_report.names(MODES), default=",".join(MODES), help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="jobs per mode and library (default: %(default)s)")
    parser.add_argument(
        "--size", choices=_llama_model.SIZES, default="8b", help="size of the model (default: %(default)s)"
    )
    parser.add_argument("--sequence", type=int, default=8192, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per GPU (default: %(default)s)")
    parser.add_argument("--warm-steps", type=int, default=6, help="steps before timing, at least 6 (default: 6)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per job (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds per job (default: %(default)g)")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile (default: %(default)s)")
    parser.add_argument(
        "--allocator",
        default="expandable_segments:True",
        help="PYTORCH_ALLOC_CONF of all jobs, by default as in torchtitan (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-2,
        help="largest relative difference of losses between ours and FSDP2 (default: %(default)s)",
    )
    parser.add_argument("--skip-unsupported", action="store_true", help="exit status 0 if float8 cannot run here")
    parser.add_argument("--json", type=Path, default=Path("eight_gpus.json"), help="(default: %(default)s)")
    parser.add_argument("--device", choices=(_device.CUDA, _device.CPU), default=_device.CUDA, help="(default: cuda)")
    parser.add_argument("--check", action="store_true", help="check this machine, and measure nothing")
    options = parser.parse_args(argv)
    for name in ("gpus", "rounds", "sequence", "batch", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.warm_steps < 6:
        parser.error("--warm-steps must be at least 6: a graph is captured after some eager steps")
    options.log = options.json.with_suffix(".log")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the running job
    try:
        machine = inspect_machine(options.device)
    except RuntimeError as error:  # of CUDA
        print(f"eight_gpus.sh: torch cannot use the GPUs: {error}", file=sys.stderr)
        return 2
    if obstacle := find_obstacle(options, machine):
        print(f"eight_gpus.sh: {obstacle}", file=sys.stderr)
        return 2
    os.environ["PYTORCH_ALLOC_CONF"] = options.allocator
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # the old name of the variable
    print(f"{options.size}: {count_parameters(options.size):,} parameters; log: {options.log}", flush=True)
    warn(options, machine)
    if options.check:
        return 0
    options.json.parent.mkdir(parents=True, exist_ok=True)
    jobs: list[Job] = []
    interrupted = False
    try:
        run(options, machine, jobs)
    except KeyboardInterrupt:
        print("eight_gpus.sh: interrupted", file=sys.stderr)
        interrupted = True
    results = evaluate(jobs, options, machine.unsupported)
    show(results, options)
    return 130 if interrupted else find_status(results, options)


if __name__ == "__main__":
    sys.exit(main())
