"""Find the allocations that are live at the peak of a step, from the history of torch's CUDA allocator.

`record_peak` records the history of a step, and `find_peak` replays it. The history is a
`torch.cuda.memory._snapshot()`, which https://pytorch.org/memory_viz can show.
"""

from __future__ import annotations

import gc
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import _device

# Frames in these files do not show the purpose of an allocation, so the frames of their callers are used.
TORCH = Path(torch.__file__).parent
UNINFORMATIVE = tuple(f"{TORCH}/{name}" for name in ("_", "autograd/", "cuda/", "nn/", "optim/", "utils/"))
NO_FRAME = "no Python frame (the backward of an operator)"
TRACES = "device_traces"


@dataclass(frozen=True)
class Site:
    """Allocations from one source line on one stream that are live at the peak.

    Attributes:
        stream: address of the stream; 0 is the default stream.
    """

    where: str
    stream: int
    nbytes: int
    count: int


@dataclass(frozen=True)
class Peak:
    """The peak memory of a step above the memory that is live when it begins.

    Attributes:
        nbytes: requested bytes.
        allocated: bytes by `torch.cuda.max_memory_allocated`, in blocks of 512 bytes; 0 if only a history was read.
        reached_at: the allocation that reaches the peak.
        sites: live allocations at the peak, largest first. Memory that was allocated before the step and freed during
            it counts as negative bytes, at the site "freed by the step".
    """

    nbytes: int
    reached_at: str
    sites: list[Site]
    allocated: int = 0


FREED = "freed by the step"


def find_peak(trace: Iterable[dict[str, Any]]) -> Peak:
    """Replay the entries of one device in order.

    Memory counts as allocated until its free is requested, as in `torch.cuda.max_memory_allocated`. For memory that
    other streams still use, the allocator completes the free later.
    """
    events = [entry for entry in trace if entry["action"] in ("alloc", "free_requested")]
    live, highest, reached = 0, 0, -1
    for number, entry in enumerate(events):
        live += entry["size"] if entry["action"] == "alloc" else -entry["size"]
        if live > highest:
            highest, reached = live, number
    held: dict[int, dict[str, Any]] = {}
    sites: dict[tuple[str, int], list[int]] = defaultdict(list)
    for entry in events[: reached + 1]:
        if entry["action"] == "alloc":
            held[entry["addr"]] = entry
        elif held.pop(entry["addr"], None) is None:
            sites[FREED, entry["stream"]].append(-entry["size"])
    for entry in held.values():
        sites[describe_place(entry), entry["stream"]].append(entry["size"])
    found = [Site(where, stream, sum(sizes), len(sizes)) for (where, stream), sizes in sites.items()]
    found.sort(key=lambda site: -abs(site.nbytes))
    return Peak(highest, describe_place(events[reached]) if reached >= 0 else "", found)


def describe_place(entry: dict[str, Any]) -> str:
    """Return the innermost frame that shows the purpose of an allocation, and its caller in another function."""
    frames = [
        frame
        for frame in entry.get("frames", [])
        if frame["filename"].endswith(".py") and not frame["filename"].startswith(UNINFORMATIVE)
    ]
    if not frames:
        return NO_FRAME
    inner = frames[0]
    outer = next((frame for frame in frames if frame["name"] != inner["name"]), None)
    return format_frame(inner) + (f" < {format_frame(outer)}" if outer else "")


def format_frame(frame: dict[str, Any]) -> str:
    folder, _, file = frame["filename"].rpartition("/")
    return f"{folder.rpartition('/')[2]}/{file}:{frame['line']} {frame['name']}"


def record_peak(step: Callable[[], object], keep: Path | None = None) -> Peak:
    """Run a step on the current CUDA device and return its peak. If `keep` is given, write the history there."""
    gc.collect()
    gc.disable()  # a garbage collection during the step could free earlier memory
    before = _device.forget_peak()
    torch.cuda.memory._record_memory_history(stacks="python", clear_history=True)
    try:
        step()
        allocated = _device.peak() - before
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        gc.enable()
    if keep is not None:
        keep.write_bytes(pickle.dumps(snapshot))
    return replace(find_peak(snapshot[TRACES][torch.cuda.current_device()]), allocated=allocated)
