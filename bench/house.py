"""Measure size and complexity of the package's sources and the Python calls of an eager step, compared with FSDP2.

    python bench/house.py
    python bench/house.py --list writes_to_others     # the items that a figure counts

The core is the package without `testing/` and `report/`. A step is forward, backward and optimizer step of four blocks
and a root, on rank 0 of a simulated world. The script counts the engine's Python functions that a step calls, their
files, and the depth of nested calls. Both implementations are measured in the same way (`_sources.py`).
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import _engines
import _report
import composable_shard
from _sources import Sources
from composable_shard import testing

ROOT = Path(__file__).parent.parent
FOLDERS = {"ours": Path(composable_shard.__file__).parent, "fsdp2": Path(fsdp2.__file__).parent}
NO_CORE = ("testing", "report")
LISTS = ("complexity", "attributes", "outside_constructors", "writes_to_others", "functions")
HARD = 10  # functions with a higher complexity are counted


@dataclass(frozen=True)
class HouseResult:
    """The figures of one engine. `names_on_top` and `readme_lines` are None for FSDP2."""

    engine: str
    names_on_top: int | None
    files: int
    lines: int
    code: int
    writes_to_others: int
    outside_constructors: int
    most_attributes: int
    functions_above_10: int
    most_complexity: int
    step_calls: int
    step_functions: int
    step_files: int
    step_depth: int
    readme_lines: int | None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)
        self.down = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Walk:
    """Records the functions of a folder that are called during a call."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._open = 0
        self.calls = self.depth = 0
        self.functions: set[str] = set()

    def through(self, call: Callable[[], None]) -> None:
        sys.setprofile(self._note)
        try:
            call()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(self._folder) or "/testing/" in file:
            return
        if event == "call":
            self.calls += 1
            self.functions.add(f"{Path(file).relative_to(self._folder)}: {frame.f_code.co_qualname}")
        self._open += 1 if event == "call" else -1
        self.depth = max(self.depth, self._open)

    @property
    def files(self) -> set[str]:
        return {function.partition(":")[0] for function in self.functions}


def walked(engine: str) -> Walk:
    """Record the calls of a step after some warm-up steps."""
    _engines.load(engine)
    walk = Walk(FOLDERS[engine])
    with testing.fake(8):
        blocks = [Block() for _ in range(4)]
        model = nn.Sequential(nn.Linear(64, 64), *blocks, nn.Linear(64, 64))
        _engines.shard_units(engine, model, blocks, init_device_mesh("cpu", (8,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(2, 64)

        def step() -> None:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(4):
            step()
        walk.through(step)
    return walk


def measured(engine: str, sources: Sources, walk: Walk) -> HouseResult:
    ours = engine == "ours"
    top = [path for path in FOLDERS[engine].iterdir() if path.name not in ("__pycache__", "py.typed")]
    return HouseResult(
        engine,
        names_on_top=len(top) if ours else None,
        files=sources.files,
        lines=sources.lines,
        code=sources.code,
        writes_to_others=len(sources.writes_to_others),
        outside_constructors=len(sources.outside_constructors),
        most_attributes=max(sources.attributes.values()),
        functions_above_10=sum(each > HARD for each in sources.complexity.values()),
        most_complexity=max(sources.complexity.values()),
        step_calls=walk.calls,
        step_functions=len(walk.functions),
        step_files=len(walk.files),
        step_depth=walk.depth,
        readme_lines=len((ROOT / "README.md").read_text().splitlines()) if ours else None,
    )


def print_list(name: str, sources: Sources, walk: Walk) -> None:
    counted = getattr(sources, name) if name != "functions" else sorted(walk.functions)
    if isinstance(counted, dict):
        counted = [f"{number:3} {what}" for what, number in sorted(counted.items(), key=lambda item: -item[1])]
    print("\n".join(counted))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=LISTS, help="print the items that a figure of ours counts, and no table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    sources = {engine: Sources.of(folder, NO_CORE if engine == "ours" else ()) for engine, folder in FOLDERS.items()}
    walks = {engine: walked(engine) for engine in (("ours",) if options.list else FOLDERS)}
    if options.list:
        print_list(options.list, sources["ours"], walks["ours"])
        return 0
    results = [measured(engine, sources[engine], walks[engine]) for engine in FOLDERS]
    rows = [
        [
            field.name.replace("_", " "),
            *("" if (value := getattr(result, field.name)) is None else str(value) for result in results),
        ]
        for field in fields(HouseResult)[1:]
    ]
    _report.table("Sources of the core, and calls of an eager step", ["", *FOLDERS], rows, "without testing/, report/")
    if options.json:
        _report.write_json(options.json, "house", {}, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
