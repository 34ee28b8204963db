"""Draw docs/owners.png: which ranks store which elements of a weight, for four meshes.

    python tools/draw_owners.py docs/owners.png

The script shards a weight on four simulated ranks, and reads the elements that each rank stores.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import composable_shard as cs
from composable_shard import testing

ROWS, COLUMNS = 10, 8
COLORS = ("#9cc3e0", "#e3a15f", "#66a182", "#d5dde4")  # by rank
LAYOUTS = {  # title: the mesh of four ranks, and how the layer is split over `tp`
    "sharded over 4 ranks": ({"shard": 4}, None),
    "2 replicas of 2 shards (HSDP)": ({"replicate": 2, "shard": 2}, None),
    "dp=2, tp=2, column-parallel": ({"dp": 2, "tp": 2}, ColwiseParallel()),
    "dp=2, tp=2, row-parallel": ({"dp": 2, "tp": 2}, RowwiseParallel()),
}


def owners(axes: dict[str, int], style: ColwiseParallel | RowwiseParallel | None) -> torch.Tensor:
    """Return whether a rank stores an element of the weight: bool [ranks, rows, columns]."""

    def body(world: testing.World) -> list[int]:
        layer = nn.Linear(COLUMNS, ROWS, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS))
        if style is None:
            cs.fully_shard(layer, mesh=world.mesh)
        else:
            cs.fully_shard(parallelize_module(layer, world.mesh["tp"], style), mesh=world.mesh["dp"])
        return layer.weight.to_local().flatten().int().tolist()

    stored = testing.spmd(4, mesh=axes)(body)
    every = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
    return torch.stack([torch.isin(every, torch.tensor(indices)) for indices in stored])


def main(arguments: list[str]) -> int:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    (path,) = arguments or ["docs/owners.png"]
    figure = Figure(figsize=(9, 3), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, (mesh, style)) in zip(figure.subplots(1, len(LAYOUTS)), LAYOUTS.items(), strict=True):
        maps = owners(mesh, style)
        areas = maps.flatten(1).unique(dim=0).view(-1, ROWS, COLUMNS)  # one for each different set of elements
        for area in areas:
            ranks = [str(rank) for rank in range(len(maps)) if torch.equal(maps[rank], area)]
            (top, left), (bottom, right) = area.nonzero()[0].tolist(), (area.nonzero()[-1] + 1).tolist()
            axes.add_patch(
                Rectangle((left, top), right - left, bottom - top, facecolor=COLORS[int(ranks[0])], edgecolor="white")
            )
            label = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
            axes.text((left + right) / 2, (top + bottom) / 2, label, ha="center", va="center", fontsize=9)
        axes.set(xlim=(0, COLUMNS), ylim=(ROWS, 0), aspect="equal", xticks=[0, COLUMNS], yticks=range(0, ROWS + 1, 2))
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[:].set_visible(False)
    figure.axes[0].set_ylabel("rows of the weight", fontsize=8)
    figure.savefig(Path(path), dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
