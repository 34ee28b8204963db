"""When a step would be over by a given rule of gathering ahead: the model of DESIGN in numbers, without an engine.

s_i = max(issue_i, f_(i-1)),  f_i = s_i + t_i           the link, in the order of issue
c_i = max(c_(i-1) + F_(i-1), f_i)                       compute, which needs its gather
exposed = sum of c_i - c_(i-1) - F_(i-1), and what is left of the reductions at the end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class Unit:
    """A group as a simulation sees it: seconds of its compute, bytes of its parameters."""

    nbytes: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Stage:
    """A forward or backward of a group: seconds of the gather before it, of itself, of the reduction after it."""

    gather_s: float
    compute_s: float
    reduce_s: float


def stages_of(units: Sequence[Unit], seconds: Callable[[int], float]) -> list[Stage]:
    """A step whose first unit is a root, which keeps its weights for backward; `seconds` are those of so many bytes."""
    took = [seconds(unit.nbytes) for unit in units]
    forward = [Stage(t, unit.forward_s, 0.0) for t, unit in zip(took, units, strict=True)]
    others = list(zip(took, units, strict=True))[:0:-1]
    return [*forward, *(Stage(t, unit.backward_s, t) for t, unit in others), Stage(0.0, units[0].backward_s, took[0])]


def kept(stages: Sequence[Stage]) -> list[Stage]:
    """The same step where no weights are given up after forward."""
    half = len(stages) // 2
    return [*stages[:half], *(Stage(0.0, stage.compute_s, stage.reduce_s) for stage in stages[half:])]


def exposed(stages: Sequence[Stage], ahead: int, gathers_first: bool = True) -> float:
    """Seconds that compute waits if each gather is issued when the stage `ahead` before its own begins.

    When one stage follows another at once, the reduction of the former and the gather that the latter issues are of the
    same moment: `gathers_first` tells which goes first.
    """
    waiting: list[tuple[float, int, int]] = []  # issue, 0 of a gather or the turn of a reduction, stage
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
    """What no order can fall below: what must come before all compute and after it, or all that the link has to move.

    Before the first compute comes its gather, with those of all stages before it, and after the last one its reduction.
    """
    busy = [at for at, stage in enumerate(stages) if stage.compute_s]
    before = sum(stage.gather_s for stage in stages[: busy[0] + 1])
    after = sum(stage.reduce_s for stage in stages[busy[-1] :])
    moved = sum(stage.gather_s + stage.reduce_s for stage in stages)
    return max(before + after, moved - sum(stage.compute_s for stage in stages))
