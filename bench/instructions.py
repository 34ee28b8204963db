"""Count the instructions that a sharding runtime adds to a plain model, per module and step.

    python bench/instructions.py

Callgrind (valgrind's profiler) counts the instructions of steps after warm-up, for the models of `overhead.py`. Counts
are the same on all machines within a few tenths of a percent, and do not depend on other load. They do not include the
cost of memory accesses and branches. `--profile ENGINE` keeps callgrind's file for `callgrind_annotate`.
"""

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import _engines
import _noop
import _report
import overhead

STEPS = 2
TIMEOUT_S = 900


@dataclass(frozen=True)
class InstructionsResult:
    """Instructions per sharded module and step. `ratio` is the added instructions over those of FSDP2."""

    world: int
    engine: str
    instructions: float
    added: float | None
    ratio: float | None


def counted(engine: str, world: int, blocks: int, model: str, group: str, to: Path) -> float:
    """Count the instructions per module and step in a new process under callgrind."""
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={to}"]
    child = [sys.executable, __file__, "--child", engine, "--world", str(world), "--blocks", str(blocks)]
    child += ["--model", model, "--group", group]
    done = subprocess.run([*valgrind, *child], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"instructions.py: {engine}, world {world}: the process failed\n{done.stderr[-2000:]}")
    return total_of(to.read_text()) / (STEPS * (blocks + 1))


def total_of(text: str) -> int:
    """Return the total instructions in a callgrind file."""
    totals = sum(map(int, re.findall(r"^totals: (\d+)", text, re.MULTILINE)))
    if not totals:
        raise SystemExit("instructions.py: callgrind counted no instructions")
    return totals


def run_child(engine: str, world: int, blocks: int, model: str, group: str) -> None:
    """Run the counted steps after warm-up."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    options = overhead.parse(["--group", group])
    overhead.begin(world, options)
    try:
        side = overhead.build(engine, world, overhead.Case(blocks, None, model), options)
        gc.collect()
        gc.freeze()
        _switch("on")
        for _ in range(STEPS):
            side.step()
            side.clear()
        _switch("off")
    finally:
        _noop.shutdown()


def _switch(to: str) -> None:
    """Turn callgrind's instrumentation of this process on or off."""
    subprocess.run(["callgrind_control", "-i", to, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def results_of(world: int, counts: dict[str, float]) -> list[InstructionsResult]:
    added = {name: count - counts["plain"] for name, count in counts.items() if name != "plain"}
    reference = added.get("fsdp2")
    return [
        InstructionsResult(
            world,
            name,
            count,
            added.get(name),
            added[name] / reference if reference and name in added else None,
        )
        for name, count in counts.items()
    ]


def show(world: int, results: list[InstructionsResult], options: argparse.Namespace) -> None:
    def thousands(number: float | None) -> str:
        return "-" if number is None else f"{number / 1e3:,.0f}"

    _report.table(
        f"Instructions per module and step, thousands: world {world}, "
        f"{overhead.Case(options.blocks, None, options.model)}, {options.group} collectives",
        ("engine", "step", "added", "added / FSDP2's"),
        [
            (r.engine, thousands(r.instructions), thousands(r.added), "-" if r.ratio is None else f"{r.ratio:.3f}")
            for r in results
        ],
        f"callgrind, {STEPS} steps",
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = "(default: %(default)s)"
    parser.add_argument("--world", type=_report.integers, default="8", help=f"simulated world sizes {shown}")
    parser.add_argument("--blocks", type=int, default=48, help=f"number of blocks {shown}")
    parser.add_argument("--model", choices=("stack", "gpt", "gpt2"), default="stack", help=f"as in overhead.py {shown}")
    parser.add_argument("--group", choices=("noop", "fake"), default="noop", help=f"as in overhead.py {shown}")
    parser.add_argument("--engines", type=_engines.parse, default="ours,fsdp2", help=f"in addition to plain {shown}")
    parser.add_argument("--profile", choices=_engines.ENGINES, metavar="ENGINE", help="keep callgrind's file of ENGINE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    if options.child:
        run_child(options.child, options.world[0], options.blocks, options.model, options.group)
        return
    if shutil.which("valgrind") is None:
        raise SystemExit("instructions.py: needs valgrind, which is not on PATH; install your system's package")
    results: list[InstructionsResult] = []
    for world in options.world:
        counts: dict[str, float] = {}
        for name in dict.fromkeys(["plain", *options.engines]):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "callgrind.out"
                counts[name] = counted(name, world, options.blocks, options.model, options.group, file)
                if name == options.profile:
                    kept = Path(f"callgrind.{name}.world{world}.out")
                    shutil.copy(file, kept)
                    print(f"callgrind_annotate {kept}")
        found = results_of(world, counts)
        show(world, found, options)
        results += found
    if options.json:
        settings = {key: getattr(options, key) for key in ("world", "blocks", "engines", "model", "group")}
        _report.write_json(options.json, "instructions", settings, results)


if __name__ == "__main__":
    main()
