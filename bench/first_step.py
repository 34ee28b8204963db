"""Time sharding and the first steps of models with thousands of modules.

    python bench/first_step.py                                  # 2,000 and 5,000 modules
    python bench/first_step.py --modules 1000 --rounds 3

The model is a chain of small linear layers. The process is rank 0 of a world whose collectives do nothing
(`_noop.py`). `each`: every layer is a group. `one`: all layers are in the root group. Each engine has its own process,
and processes take turns. The figure is CPU time of the process, without imports.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import _engines
import _noop
import _report

WORLD = 8
WIDTH = 8
ENGINES = ("ours", "fsdp2")
GROUPS = ("each", "one")
TIMEOUT_S = 900


@dataclass(frozen=True)
class FirstStepResult:
    """Times in seconds. `ratio` is the first step over that of FSDP2, formed within each round."""

    modules: int
    groups: str
    engine: str
    shard: _report.Spread
    first: _report.Spread
    second: _report.Spread
    third: _report.Spread
    ratio: _report.Spread


def run_child(engine: str, modules: int, groups: str) -> None:
    """Time sharding and three steps, and print the seconds as JSON."""
    torch.set_num_threads(1)
    _engines.load(engine)
    _noop.init(WORLD)
    try:
        warm(engine)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(modules)))
        inputs = torch.randn(2, WIDTH)
        seconds = [time.process_time()]
        shard(engine, model, groups)
        for _ in range(3):
            seconds.append(time.process_time())
            model(inputs).sum().backward()
        seconds.append(time.process_time())
        print(json.dumps([after - before for before, after in itertools.pairwise(seconds)]))
    finally:
        _noop.shutdown()


def shard(engine: str, model: nn.Sequential, groups: str) -> None:
    _engines.shard_units(engine, model, list(model) if groups == "each" else [], init_device_mesh("cpu", (WORLD,)))


def warm(engine: str) -> None:
    """Run a step of a small model, so that lazy imports are done."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    shard(engine, model, "each")
    model(torch.randn(2, WIDTH)).sum().backward()


def measured(engine: str, modules: int, groups: str) -> list[float]:
    child = [sys.executable, __file__, "--child", engine, "--modules", str(modules), "--groups", groups]
    done = subprocess.run(child, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"first_step.py: {engine}, {modules} modules: the process failed\n{done.stderr[-2000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def results_of(modules: int, groups: str, seconds: dict[str, list[list[float]]]) -> list[FirstStepResult]:
    """Return the results of one model from the seconds by engine, round and part."""
    reference = [parts[1] for parts in seconds["fsdp2"]]
    return [
        FirstStepResult(
            modules,
            groups,
            engine,
            *(_report.Spread.of(part) for part in zip(*rounds, strict=True)),
            ratio=_report.Spread.of([parts[1] / other for parts, other in zip(rounds, reference, strict=True)]),
        )
        for engine, rounds in seconds.items()
    ]


def print_table(results: list[FirstStepResult]) -> None:
    columns = ["modules", "groups", "engine", "shard, s", "first step, s", "second", "third", "first / FSDP2's"]
    rows = [
        [str(r.modules), r.groups, r.engine, *map(str, (r.shard, r.first, r.second, r.third, r.ratio))] for r in results
    ]
    _report.table(
        f"A model with many modules: world {WORLD}, CPU time", columns, rows, "median [quartiles] of interleaved rounds"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--modules", type=_report.integers, default=[2000, 5000], help="numbers of modules (default: 2000,5000)"
    )
    parser.add_argument("--groups", type=_report.names(GROUPS), default=list(GROUPS), help="groups (default: each,one)")
    parser.add_argument("--rounds", type=int, default=1, help="interleaved rounds (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.child:
        run_child(options.child, options.modules[0], options.groups[0])
        return 0
    results: list[FirstStepResult] = []
    for modules in options.modules:
        for groups in options.groups:
            seconds: dict[str, list[list[float]]] = {engine: [] for engine in ENGINES}
            for _ in range(options.rounds):
                for engine in ENGINES:
                    seconds[engine].append(measured(engine, modules, groups))
            results += results_of(modules, groups, seconds)
    print_table(results)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name not in {"json", "child"}}
        _report.write_json(options.json, "first_step", settings, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
