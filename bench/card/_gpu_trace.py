"""Count kernels and copies and measure exposed communication of a step, from a trace of `torch.profiler`."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KERNEL = "kernel"
COPIES = ("gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Activity:
    """One kernel or copy on a stream. Times are in microseconds."""

    stream: int
    kind: str
    begin: float
    end: float
    name: str = ""


@dataclass(frozen=True)
class StepTrace:
    """Kernels, copies and times of one step. The compute stream is the one with the longest total kernel time.

    Attributes:
        kernels: kernels on the compute stream.
        copies: copies and fills (`memcpy`, `memset`) on the compute stream.
        other_kernels: kernels on all other streams, which communicate or prepare communication.
        other_copies: copies and fills on all other streams.
        span_ms: time from the begin of the first activity to the end of the last one.
        compute_ms: time in which the compute stream is busy.
        communication_ms: time in which at least one other stream is busy.
        exposed_ms: exposed communication: at least one other stream is busy and the compute stream is not.
        idle_ms: time in which no stream is busy.
    """

    kernels: int
    copies: int
    other_kernels: int
    other_copies: int
    span_ms: float
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    idle_ms: float


Intervals = list[tuple[float, float]]


def union(activities: Iterable[Activity]) -> Intervals:
    """Return the sorted disjoint intervals in which at least one activity runs."""
    merged: Intervals = []
    for begin, end in sorted((each.begin, each.end) for each in activities):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)


def summarize(activities: Sequence[Activity]) -> StepTrace:
    """Summarize the activities of a step.

    Raises:
        ValueError: there is no kernel.
    """
    kernel_time: Counter[int] = Counter()
    for each in activities:
        if each.kind == KERNEL:
            kernel_time[each.stream] += each.end - each.begin
    if not kernel_time:
        raise ValueError("the trace contains no kernel: run the step on a GPU, with ProfilerActivity.CUDA")
    compute_stream = kernel_time.most_common(1)[0][0]
    compute = [each for each in activities if each.stream == compute_stream]
    other = [each for each in activities if each.stream != compute_stream]
    busy, busy_compute, busy_other = (union(those) for those in (activities, compute, other))
    span = busy[-1][1] - busy[0][0]
    return StepTrace(
        kernels=sum(each.kind == KERNEL for each in compute),
        copies=sum(each.kind in COPIES for each in compute),
        other_kernels=sum(each.kind == KERNEL for each in other),
        other_copies=sum(each.kind in COPIES for each in other),
        span_ms=1e-3 * span,
        compute_ms=1e-3 * length(busy_compute),
        communication_ms=1e-3 * length(busy_other),
        exposed_ms=1e-3 * (length(busy) - length(busy_compute)),
        idle_ms=1e-3 * (span - length(busy)),
    )


def read_activities(trace: dict[str, Any]) -> list[Activity]:
    """Read the GPU's activities from a trace in Chrome's format, as `export_chrome_trace` writes it."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in (KERNEL, *COPIES):
            begin = float(event["ts"])
            end = begin + float(event["dur"])
            found.append(Activity(int(event["args"]["stream"]), event["cat"], begin, end, event["name"]))
    return found


def record_step(step: Callable[[], object]) -> StepTrace:
    """Run a step under the profiler. Synchronize with the device before and after."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return summarize(read_activities(json.loads(path.read_text())))
