"""Simulate the exposed communication of a step for a prefetch depth, without an engine.

s_i = max(issue_i, f_(i-1)),  f_i = s_i + t_i           link: begin and end of transfers, in the order of issue
c_i = max(c_(i-1) + F_(i-1), f_i)                       begin of compute, which waits for its gather
exposed = sum of c_i - c_(i-1) - F_(i-1), and unfinished reductions at the end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class Unit:
    """A group: bytes of its parameters, and seconds of its compute."""

    nbytes: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Stage:
    """A forward or backward of a group: seconds of its gather, its compute, and its reduction."""

    gather_s: float
    compute_s: float
    reduce_s: float


def stages_of(units: Sequence[Unit], seconds: Callable[[int], float]) -> list[Stage]:
    """Return the stages of a step. The first unit is the root, which stays gathered for backward.

    `seconds` returns the time of a gather or reduction of a number of bytes.
    """
    took = [seconds(unit.nbytes) for unit in units]
    forward = [Stage(t, unit.forward_s, 0.0) for t, unit in zip(took, units, strict=True)]
    others = list(zip(took, units, strict=True))[:0:-1]
    return [*forward, *(Stage(t, unit.backward_s, t) for t, unit in others), Stage(0.0, units[0].backward_s, took[0])]


def kept(stages: Sequence[Stage]) -> list[Stage]:
    """Return the step without resharding after forward."""
    half = len(stages) // 2
    return [*stages[:half], *(Stage(0.0, stage.compute_s, stage.reduce_s) for stage in stages[half:])]


def exposed(stages: Sequence[Stage], ahead: int, gathers_first: bool = True) -> float:
    """Return the exposed communication in seconds if each gather is issued `ahead` stages before its own.

    If a stage starts immediately after another, the reduction of the first and the gather issued by the second have the
    same issue time. `gathers_first` selects which is transferred first.
    """
    waiting: list[tuple[float, int, int]] = []  # issue time, 0 for a gather or the priority of a reduction, stage
    arrived: dict[int, float] = {}
    link = now = 0.0
    issued = 0

    def issue(last: int, at_s: float) -> None:
        nonlocal issued
        while issued <= min(last, len(stages) - 1):
            heappush(waiting, (at_s, 0, issued))
            issued += 1

    def serve() -> None:
        nonlocal link
        at_s, turn, stage = heappop(waiting)
        link = max(at_s, link) + (stages[stage].reduce_s if turn else stages[stage].gather_s)
        if not turn:
            arrived[stage] = link

    issue(ahead - 1, 0.0)
    for at, stage in enumerate(stages):
        issue(at, now)
        while stage.gather_s and at not in arrived:
            serve()
        now = max(now, arrived.get(at, 0.0) if stage.gather_s else now)
        issue(at + ahead, now)
        now += stage.compute_s
        heappush(waiting, (now, 1 if gathers_first else -1, at))
    while waiting:
        serve()
    return max(now, link) - sum(stage.compute_s for stage in stages)


def least_exposed(stages: Sequence[Stage]) -> float:
    """Return a lower bound of exposed communication for any order of transfers, in seconds.

    It is the larger one of two bounds: (1) gathers that must finish before the first compute, plus the reductions after
    the last compute, and (2) total transfer time minus total compute time.
    """
    busy = [at for at, stage in enumerate(stages) if stage.compute_s]
    before = sum(stage.gather_s for stage in stages[: busy[0] + 1])
    after = sum(stage.reduce_s for stage in stages[busy[-1] :])
    moved = sum(stage.gather_s + stage.reduce_s for stage in stages)
    return max(before + after, moved - sum(stage.compute_s for stage in stages))
