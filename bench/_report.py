"""Shared by the benchmarks: quartiles, parsers of options, tables, and JSON files."""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    @classmethod
    def range_of(cls, values: Sequence[float]) -> "Spread":
        """Return the median, with minimum and maximum instead of quartiles."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return self.shown(3)

    def shown(self, digits: int) -> str:
        """Format the median, and quartiles (or the range) in brackets."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def integers(text: str) -> list[int]:
    """Parse comma-separated positive integers."""
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be positive")
    return numbers


def names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names."""

    def parse(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",")]
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
        return found

    return parse


def ratios(text: str) -> list[float]:
    """Parse comma-separated positive numbers."""
    numbers = [float(part) for part in text.split(",")]
    if not all(0 < number < float("inf") for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: must be positive")
    return numbers


def about(device: str) -> dict[str, Any]:
    """Return the date, versions, the device of the benchmark, and the machine."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": device,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Print a table. The first column is text, the others are figures."""
    shown = Table(title=title, caption=escape(caption), title_justify="left", caption_justify="left")
    for i, column in enumerate(columns):
        shown.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
    for row in rows:
        shown.add_row(*row)
    console().print(shown)


def console() -> Console:
    """Return a console that is wide enough for the tables even if the output is a file."""
    return Console() if sys.stdout.isatty() else Console(width=180)


def save(options: argparse.Namespace, name: str, results: Sequence[Any], device: str = "cpu") -> None:
    """Write the figures and options of a benchmark to the file of `--json`, if given."""
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        write_json(options.json, name, settings, results, device)


def write_json(
    path: Path,
    name: str,
    settings: dict[str, Any],
    results: Sequence[Any],
    device: str = "cpu",
    machine: dict[str, Any] | None = None,
) -> None:
    """Write the figures of a benchmark on `device` to a JSON file. Dataclasses become objects.

    `machine` replaces the result of `about`, which uses memory of the first GPU.
    """
    document = {
        "benchmark": name,
        "about": machine or about(device),
        "settings": settings,
        "results": [r if isinstance(r, dict) else asdict(r) for r in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)  # atomic: if the benchmark is killed during a write, earlier figures are kept
