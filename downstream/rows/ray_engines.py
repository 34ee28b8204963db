"""Rows for Ray: trainers and inference engines are actors, and engines receive weights after training steps."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _launchers import TUTORIALS, launched_by

from _rows import OURS, TORCH, Rows, Run

rows = Rows(
    "Ray: actors that train and actors that receive weights",
    environment="ray",
    versions=("torch", "ray"),
    uses_ours=True,
)

LIMIT_S = 400.0
HERE = Path(__file__).resolve().parent


def actors(run: Run, mode: str) -> dict[str, Any]:
    """Run `_ray_actors.py`, record what it returns, and return it."""
    short = tempfile.mkdtemp(prefix="ray-")  # socket names have at most 107 bytes
    found = os.pathsep.join([str(HERE), str(TUTORIALS), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        with launched_by(run, LIMIT_S) as launched:
            command = [sys.executable, str(HERE / "_ray_actors.py"), mode, "noted.pt"]
            flags = ["--fsdp2"] if run.side == TORCH else []
            launched.finish(launched.start([*command, *flags], RAY_TMPDIR=short, PYTHONPATH=found))
    finally:
        shutil.rmtree(short, ignore_errors=True)
    noted = torch.load("noted.pt", weights_only=False)
    for classes in noted.pop("classes"):
        if any(name.startswith("composable_shard.") for name in classes) != (run.side == OURS):
            raise AssertionError(f"the trainers were not sharded by {run.side!r}: {classes}")
    for name, value in noted.items():
        run.note(name, value)
    return noted


def add(title: str, mode: str) -> None:
    def program(run: Run) -> None:
        noted = actors(run, mode)
        if mode in ("killed", "dies"):
            lost = noted["sent"] + [noted["received"]]
            assert set(lost) == {"PeerLostError"}, f"the update with a lost engine returned {lost}"

    rows.add(title, program, world=1, sharded=False, timeout=LIMIT_S + 60)


add("engine of two tensor-parallel actors with fused, padded weights, joined by weights.connect", "send")
add("the same engine gets weights.local_slices from Ray's object store, while training continues", "store")
add("an engine is killed before an update: training and the other engine continue", "killed")
add("an engine ends during an update: training and the other engine continue", "dies")
