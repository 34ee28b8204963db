"""Draw charts of the benchmarks' figures from their JSON files.

python bench/_plots.py bench/results/memory-cpu-torch2.13.json      # writes a PNG next to the JSON file
"""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import _kinds

Results = list[dict[str, Any]]


@dataclass
class Panel:
    """A bar chart with a cluster of bars per group, and a bar (or a layer, if stacked) per series.

    A figure is a number, or a median with quartiles, which are drawn as whiskers.
    """

    title: str
    unit: str
    figures: dict[tuple[str, str], Any] = field(default_factory=dict)
    stacked: bool = False

    def add(self, group: str, series: str, figure: Any) -> None:
        if figure is not None:
            self.figures[group, series] = figure

    def draw(self, axes: Axes) -> None:
        groups, series = (list(dict.fromkeys(key[i] for key in self.figures)) for i in (0, 1))
        width = 0.8 if self.stacked else 0.8 / max(len(series), 1)
        floor = dict.fromkeys(groups, 0.0)
        axes.use_sticky_edges = False  # add a margin above the highest bar
        for i, name in enumerate(series):
            shown = [group for group in groups if (group, name) in self.figures]
            middles, down, up = zip(*(_whiskers(self.figures[group, name]) for group in shown), strict=True)
            at = [groups.index(group) + (0 if self.stacked else (i + 0.5) * width - 0.4) for group in shown]
            bottom = [floor[group] if self.stacked else 0.0 for group in shown]
            whiskers = None if self.stacked else (down, up)
            axes.bar(at, middles, width, bottom=bottom, label=name, yerr=whiskers, capsize=2, error_kw={"lw": 1})
            for group, middle in zip(shown, middles, strict=True):
                floor[group] += middle
        axes.set_title(self.title, fontsize=10)
        axes.set_ylabel(self.unit)
        axes.set_xticks(range(len(groups)), groups, fontsize=8, rotation=0 if len(groups) < 5 else 20)
        axes.set_ylim(bottom=axes.get_ylim()[0] if _lowest(self.figures) < 0 else 0.0)
        if self.unit.startswith("over "):
            axes.axhline(1.0, color="black", lw=0.8, ls=":")
        if len(series) > 1:
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _whiskers(figure: Any) -> tuple[float, float, float]:
    if isinstance(figure, dict):
        return figure["median"], figure["median"] - figure["low"], figure["high"] - figure["median"]
    return figure, 0.0, 0.0


def _lowest(figures: dict[tuple[str, str], Any]) -> float:
    return min(middle - down for middle, down, _ in map(_whiskers, figures.values()))


@dataclass
class Curves:
    """A line chart over steps. If lines should be equal (`alike`), earlier ones are wider, so that all are visible."""

    title: str
    unit: str
    figures: dict[str, list[float]] = field(default_factory=dict)
    alike: bool = False

    def draw(self, axes: Axes) -> None:
        for i, (name, curve) in enumerate(self.figures.items()):
            width = 1.0 + 2.0 * self.alike * (len(self.figures) - 1 - i)
            axes.plot(range(1, len(curve) + 1), curve, linewidth=width, alpha=0.6, label=name)
        axes.set_title(self.title, fontsize=10)
        axes.set_ylabel(self.unit)
        axes.set_xlabel("step")
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def overhead(results: Results) -> Iterable[Panel]:
    added = Panel("Added host time", "us per module and step")
    device = Panel("First kernel to last kernel", "us per module and step")
    param = Panel("Added host time per parameter", "us per parameter and step")
    growth = Panel("Added host time by number of blocks", "over the first number of blocks")
    grows = len({r["blocks"] for r in results}) > 1
    for r in results:
        group = f"world {r['world']}\n{r['blocks']} x {r['per_group']}"
        added.add(group, r["engine"], r["added"])
        device.add(group, r["engine"], r.get("device"))
        param.add(group, r["engine"], r["added_param"])
        if grows:
            growth.add(group, r["engine"], r["growth"])
    return added, param, growth, device


# The engines in the chart.
OVERLAPPING = ("ours", "ours-auto", "ours-auto-whole", "ours-compiled", "fsdp2", "no order can")


def overlap(results: Results) -> Iterable[Panel]:
    """Exposed communication on the streams clock, on which FSDP2 overlaps communication too. One panel per model."""
    models = list(dict.fromkeys(r["model"] for r in results))
    panels = {model: Panel(f"Exposed communication, {model}", "over FSDP2's") for model in models}
    for r in results:
        if r["clock"] == "streams" and r["engine"] in OVERLAPPING:
            panels[r["model"]].add(f"{r['ratio']:g}", r["engine"], r["over_fsdp2"])
    return panels.values()


def step(results: Results) -> Iterable[Panel]:
    wall = Panel("Step time", "over FSDP2's")
    beyond = Panel("Step time beyond the unsharded model's", "over FSDP2's")
    for r in results:
        wall.add(r["size"], r["engine"], r["wall_ratio"])
        beyond.add(r["size"], r["engine"], r["wall_beyond"])
    return wall, beyond


def compiled(results: Results) -> Iterable[Panel]:
    wall = Panel("Step time", "over compiled FSDP2's")
    compiling = Panel("Time to compile", "over the unsharded model's")
    live = Panel("Peak of live bytes without parameters", "over compiled FSDP2's")
    for r in results:
        if "wall_ms" in r:
            wall.add(r["size"], r["engine"], r["wall_ratio"])
        elif "layers" in r:
            compiling.add(f"{r['size']}, {r['layers']} layers", r["engine"], r["wall_ratio"])
        else:
            live.add(r["size"], r["engine"], r["live_ratio"])
    return wall, compiling, live


def memory(results: Results) -> Iterable[Panel]:
    panels: dict[str, Panel] = {}
    resident = Panel("Growth of a rank's memory", "MB")
    sums = {"runtime": ("the runtime", _kinds.RUNTIME), "total": ("all bytes", _kinds.KINDS)}
    for r in results:
        if "peak" in r:
            title = f"{r['size']}, world {r['world']}: peak on the GPU"
            panels.setdefault(title, Panel(title, "MB")).add(r["engine"], "peak", r["peak"] / 1e6)
            continue
        if "resident_mb" in r:
            resident.add(r["size"], r["engine"], r["resident_mb"])
            continue
        for key, (what, kinds) in sums.items():
            title = f"{r['size']}, world {r['world']}: peak of {what}"
            panel = panels.setdefault(title, Panel(title, "MB", stacked=True))
            for kind in kinds:
                panel.add(r["engine"].replace("-none", "\nnone"), kind, r[key]["by_kind"][kind] / 1e6)
    return *panels.values(), resident


def figures(results: Results) -> Iterable[Panel | Curves]:
    titles = {
        "step_ms": ("Step time", "ms"),
        "peak_mb": ("Peak memory", "MB"),
        "start_s": ("Start-up", "s"),
        "tokens_s": ("Speed", "tokens / s"),
        "communication": ("Share of communication", "of a step"),
        "write_s": ("Checkpoint save", "s"),
        "read_s": ("Checkpoint load", "s"),
    }
    panels = {key: Panel(*title) for key, title in titles.items()}
    regimes = Panel("Step time by regime: tokens per rank, Gb/s", "over FSDP2's")
    waits = Panel("Exposed communication by regime", "share of a step")
    losses = Curves("Losses of the demo", "nats per byte", alike=True)
    apart = Curves("Difference of losses to FSDP2's", "relative")
    living = [r for r in results if "runtime" in r]
    for r in results:
        for key, figure in r.get("figures", {}).items():
            panels[key].add(r["engine"], r["size"], figure)
        if "gbps" in r:
            group = f"{r['tokens']:,}\n{r['gbps']:g}"
            regimes.add(group, r["engine"], r["over_fsdp2"])
            waits.add(group, r["engine"], r["share"])
        if "losses" in r:
            losses.figures[r["engine"]] = r["losses"]
    if (reference := losses.figures.get("fsdp2")) is not None:
        for name, curve in losses.figures.items():
            apart.figures[name] = [abs(a - b) / b for a, b in zip(curve, reference, strict=True)]
    return *panels.values(), *memory(living), regimes, waits, losses, apart


def qlora(results: Results) -> Iterable[Panel]:
    """Compare the engines for each base. An engine that failed has no bar."""
    titles = {
        "peak_mb": ("Peak memory", "MB"),
        "kept_mb": ("Memory between steps", "MB"),
        "start_s": ("Start-up", "s"),
        "tokens_s": ("Speed", "tokens / s"),
        "communication": ("Share of communication", "of a step"),
        "received_mb": ("Received per step", "MB"),
        "write_s": ("Save of adapters", "s"),
        "read_s": ("Load of adapters", "s"),
    }
    panels = {key: Panel(*title) for key, title in titles.items()}
    for r in results:
        for key, figure in r["figures"].items():
            panels[key].add(r["base"], r["engine"], figure)
    return panels.values()


OPERATIONS = {"steps beside": "Steps during a save", "dcp reads": "Load with DCP", "blocked": "Blocked by a save"}


def checkpoint(results: Results) -> Iterable[Panel]:
    """Times of saves and loads, for each model and number of tensors."""
    panels: dict[str, Panel] = {}
    for r in results:
        if "operation" in r:
            title = OPERATIONS.get(r["operation"], r["operation"].capitalize())
            panel = panels.setdefault(r["operation"], Panel(title, "s"))
            panel.add(f"{r['model']}, {r['tensors']} tensors", r["who"], r["seconds"])
    return panels.values()


def transfer(results: Results) -> Iterable[Panel]:
    """Compare the ways to send weights for each dtype of the receivers."""
    time = Panel("Time of a transfer", "over a plain copy's")
    received = Panel("Bytes that all ranks receive", "over the minimum")
    trainer, receiver = Panel("Memory on a trainer", "MB"), Panel("Memory on a receiver", "MB")
    for r in results:
        time.add(r["dtype"], r["way"], r["over_plain"])
        received.add(r["dtype"], r["way"], r["over_minimum"])
        trainer.add(r["dtype"], r["way"], r["trainer"] / 1e6)
        receiver.add(r["dtype"], r["way"], r["receiver"] / 1e6)
    return time, received, trainer, receiver


PANELS: dict[str, Callable[[Results], Iterable[Panel | Curves]]] = {
    "overhead": overhead,
    "overlap": overlap,
    "step": step,
    "compile": compiled,
    "memory": memory,
    "figures": figures,
    "checkpoint": checkpoint,
    "qlora": qlora,
    "transfer": transfer,
}


def plot(path: Path) -> Path:
    """Draw the figures of a JSON file. Return the path of the PNG next to it."""
    document = json.loads(path.read_text())
    panels = [panel for panel in PANELS[document["benchmark"]](document["results"]) if panel.figures]
    columns = min(len(panels), 2 if document["benchmark"] in ("memory", "overlap") else 3)
    rows = -(-len(panels) // columns)
    chart, grid = plt.subplots(rows, columns, figsize=(5.5 * columns, 3.6 * rows), squeeze=False, layout="constrained")
    places: list[Axes] = [*grid.ravel()]
    for axes, panel in zip(places, panels, strict=False):
        panel.draw(axes)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    about = document["about"]
    chart.suptitle(f"{document['benchmark']}: {about.get('device', 'cpu')}, torch {about['torch']}", fontsize=11)
    image = path.with_suffix(".png")
    chart.savefig(image, dpi=120)
    plt.close(chart)
    return image


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(plot(Path(name)))
