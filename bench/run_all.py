"""Run the benchmarks with settings that take about an hour on two cores, or on one GPU.

    python bench/run_all.py --results bench/results
    python bench/run_all.py --device cuda --only step,figures     # some of them, on a GPU

Prints the tables, and writes a JSON file and a chart for each benchmark, `<benchmark>-<device>-torch<version>`. A GPU
is used if there is one, except with `--device cpu`. overlap.py is simulated, and it and transfer.py always run on the
CPU.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import _device
import _plots
import _report

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """A script with its options on a CPU, on a GPU (None: always on the CPU), and with `--smoke`."""

    script: str
    options: str
    card: str | None
    smoke: str


COMPILED = "--engines ours-whole,ours-blocks,fsdp2-blocks,compute-whole"
HALF = "--dtype bfloat16 --batch 8"

RUNS = {
    "overhead": Run("overhead.py", "--world 8,64", "--world 8,64,512", "--group noop --world 4 --blocks 2 --rounds 2"),
    "overhead-per-group": Run(
        "overhead.py",
        "--group noop --world 8 --per-group 1,4,16 --rounds 20",
        "--group noop --world 8 --per-group 1,4,16 --rounds 20",
        "--world 4 --blocks 2 --per-group 1,2 --rounds 2",
    ),
    "overhead-growth": Run(
        "overhead.py",
        "--group noop --model stack --world 8 --blocks 48,200,1000 --rounds 10",
        "--group noop --model stack --world 8 --blocks 48,200,1000 --rounds 10",
        "--world 4 --blocks 2,3 --rounds 2",
    ),
    "overlap": Run("overlap.py", "--rounds 1", None, "--models uniform --ratios 1 --rounds 1"),
    "step": Run(
        "step.py", "--sizes 10m,50m --rounds 6", f"--sizes 150m,1b --rounds 15 {HALF}", "--sizes tiny --rounds 2"
    ),
    "compile": Run(
        "compile.py",
        f"--sizes 10m --rounds 8 --layers 2 --compile-rounds 1 {COMPILED}",
        f"--sizes 150m --rounds 15 --layers 2,4 --compile-rounds 1 {HALF} {COMPILED},ours-placed-whole",
        "--sizes tiny --rounds 2 --layers 1 --compile-rounds 1 --backend aot_eager",
    ),
    "memory": Run(
        "memory.py",
        "--sizes 150m --world 8,64 --repeats 2",
        "--sizes 150m --world 8,64,512 --repeats 2",
        "--sizes tiny --world 4 --resident-sizes tiny --repeats 1",
    ),
    "memory-1b": Run(
        "memory.py",
        "--parts live --sizes 1b --world 64 --engines ours,fsdp2",
        "--parts live --sizes 1b --world 8,64,512",
        "--parts live --sizes tiny --world 4",
    ),
    "figures": Run(
        "figures.py",
        "--size 10m --steps 6 --repeats 2",
        "--parts run --size 150m --batch 8 --steps 10",
        "--size tiny --steps 1 --repeats 1 --backend aot_eager --tokens 2048 --gbps 100 --loss-steps 4 "
        "--loss-engines single,fsdp2,ours,ours-placed-whole",
    ),
    "checkpoint": Run(
        "checkpoint.py",
        "--parameters 50000000 --rounds 3",
        "--parameters 50000000 --rounds 3 --parts files,gpt,async,exchange",
        "--parameters 100000 --tensors 6,30 --gpt tiny --rounds 1",
    ),
    "transfer": Run("transfer.py", "--size 50m --rounds 4", None, "--size tiny --dtypes bfloat16 --rounds 1"),
}


def names(text: str) -> list[str]:
    """Parse a comma-separated list of runs."""
    found = text.split(",")
    if unknown := [name for name in found if name not in RUNS]:
        raise argparse.ArgumentTypeError(f"unknown run {', '.join(unknown)}; known: {', '.join(RUNS)}")
    return found


def file_of(name: str, device: str, results: Path) -> Path:
    """Return the file of the figures of a run."""
    version = ".".join(torch.__version__.split(".")[:2])
    return results / f"{name}-{device}-torch{version}.json"


def perform(name: str, device: str, results: Path, smoke: bool) -> bool:
    """Run a benchmark and draw its chart. Return False if it failed."""
    run = RUNS[name]
    device = _device.CPU if run.card is None else device
    file, settings = file_of(name, device, results), run.options if device == _device.CPU else run.card
    options = (run.smoke if smoke else settings or "").split()
    if run.card is not None:
        options += ["--device", device]
    print(f"\n{run.script} {' '.join(options)}", flush=True)
    start = time.monotonic()
    done = subprocess.run([sys.executable, str(HERE / run.script), *options, "--json", str(file)], check=False)
    took = f"{(time.monotonic() - start) / 60:.1f} minutes"
    if done.returncode:
        print(f"{name} ended with exit status {done.returncode} after {took}", file=sys.stderr)
        return False
    print(f"{took}: {file}, {_plots.plot(file)}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _device.add_option(parser)
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="folder for results (default: %(default)s)"
    )
    parser.add_argument("--only", type=names, default=",".join(RUNS), help="runs (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="use tiny settings, to check that all benchmarks run")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    about = _report.about(options.device)
    print(", ".join(f"{key} {value}" for key, value in about.items() if value is not None), flush=True)
    done = [perform(name, options.device, options.results, options.smoke) for name in options.only]
    return int(not all(done))


if __name__ == "__main__":
    sys.exit(main())
