"""The course of a step: its launches, waits and compute in order, and the compute that hides each collective.

Plans and compiled steps both have a course, so that the two can be compared.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from .costs import Times
from .schedule import ROOT_NAME, Action, Kind

COMPUTE = (Kind.FORWARD, Kind.BACKWARD)
LAUNCHES = (Kind.UNSHARD, Kind.REDUCE)
WAITS = (Kind.WAIT, Kind.REDUCED)
_ENDS = {Kind.WAIT: Kind.UNSHARD, Kind.REDUCED: Kind.REDUCE}  # for each wait, the launch that it waits for
_GIVE_UP = (Kind.RESHARD, Kind.SHRINK)
_LETTERS = {Kind.UNSHARD: "G", Kind.REDUCE: "R", Kind.FORWARD: "c", Kind.BACKWARD: "c", Kind.RESHARD: ""}


class CourseStep(NamedTuple):
    """One step of a course.

    Attributes:
        kind: `UNSHARD` and `REDUCE` launch, `WAIT` and `REDUCED` wait, and `FORWARD` and `BACKWARD` compute. `RESHARD`
            follows the last read of the weights.
        module: FQN of the group's module, `(root)` for the root.
        share: for compute, the fraction of the compute of one use of the module in this direction.
        nbytes: for a launch, the bytes that stay allocated until the wait (`REDUCE`) or until the last read of the
            weights (`UNSHARD`).
        dtypes: for a launch in a graph, the dtypes of the tensors that it communicates.
    """

    kind: Kind
    module: str
    share: float = 0.0
    nbytes: int = 0
    dtypes: tuple[str, ...] = ()


Course = Sequence[CourseStep]


class Flight(NamedTuple):
    """A collective from its launch to the end of its wait.

    Attributes:
        kind: `UNSHARD` or `REDUCE`.
        module: FQN of the group's module.
        number: index of the collective among those of this kind and module in the course, from 0.
        nbytes, dtypes: those of the launch.
        behind: the modules that compute between launch and wait, in order.
        begin, end: beginning of the launch and end of the wait, in seconds. Without times, indices of steps.
        seconds: duration without contention on the link. None without times.
        waited: seconds of exposed communication. None without times.
    """

    kind: Kind
    module: str
    number: int
    nbytes: int
    behind: tuple[str, ...]
    begin: float
    end: float
    seconds: float | None
    waited: float | None
    dtypes: tuple[str, ...]

    @property
    def key(self) -> tuple[Kind, str, int]:
        """Identifies the same collective in another course."""
        return self.kind, self.module, self.number

    def __str__(self) -> str:
        return f"{'gather' if self.kind is Kind.UNSHARD else 'reduction'} of {self.module}"


def module_of(fqn: str) -> str:
    """The module name that a graph uses for a group: the first module in the group's FQN, without the mesh."""
    return fqn.partition(" on ")[0].partition(", ")[0] or ROOT_NAME


def by_module(times: Mapping[str, Times]) -> dict[str, Times]:
    """Seconds of each module: compute summed over its groups, and the collectives of its first group."""
    modules: dict[str, list[Times]] = {}
    for fqn, each in times.items():
        modules.setdefault(module_of(fqn), []).append(each)
    return {
        module: replace(
            those[0], forward=sum(each.forward for each in those), backward=sum(each.backward for each in those)
        )
        for module, those in modules.items()
    }


def courses_of(
    timed: Sequence[Action], nbytes: Mapping[str, tuple[int, int]]
) -> tuple[list[CourseStep], list[CourseStep]]:
    """The courses of a plan's forward and of its backward.

    Args:
        timed: the plan's actions with the beginnings and ends of forwards and backwards, see `timed_step`.
        nbytes: the bytes of each group's weights and of its reduction, by FQN.
    """
    timed = [action for action in timed if action.kind is not Kind.REFRESH]  # issued before all others, on another link
    turn = next((at for at, action in enumerate(timed) if action.kind is Kind.BACKWARD), len(timed))
    return _course_of(timed[:turn], nbytes), _course_of(timed[turn:], nbytes)


def _course_of(timed: Iterable[Action], nbytes: Mapping[str, tuple[int, int]]) -> list[CourseStep]:
    course: list[CourseStep] = []
    running: CourseStep | None = None
    for action in timed:
        if running is not None and action.kind in (*COMPUTE, Kind.ENDED, *_GIVE_UP):
            course.append(running)
            running = None
        module = module_of(action.fqn)
        if action.kind in COMPUTE:
            running = CourseStep(action.kind, module, 1.0)
        elif action.kind is Kind.REDUCED and running is not None and running.share == 1.0:
            running = running._replace(share=0.5)  # the engine waits once half of the saved tensors have been read
            course.append(running)
        if action.kind not in (*COMPUTE, Kind.ENDED):
            sizes = dict(zip(LAUNCHES, nbytes[action.fqn], strict=True))
            kind = Kind.RESHARD if action.kind in _GIVE_UP else action.kind
            course.append(CourseStep(kind, module, nbytes=sizes.get(action.kind, 0)))
    return course if running is None else [*course, running]


def sequence_of(course: Course) -> str:
    """A course as a string: G is a gather, R a reduction, w a wait, c compute."""
    return "".join(_LETTERS.get(step.kind, "w") for step in course)


class Span(NamedTuple):
    """Beginning and end of a step of a course in seconds. Without times, indices of steps."""

    begin: float
    end: float


def spans_of(course: Course, times: Mapping[str, Times] | None) -> list[Span]:
    """The span of each step, if one link runs all collectives in launch order."""
    if times is None:
        return [Span(at, at + 1) for at in range(len(course))]
    now = link = 0.0
    arrives: dict[tuple[Kind, str], deque[float]] = {}
    spans = []
    for step in course:
        begin, seconds = now, times.get(step.module, _NO_TIME)
        if step.kind in COMPUTE:
            now += step.share * (seconds.forward if step.kind is Kind.FORWARD else seconds.backward)
        elif step.kind in LAUNCHES:
            link = max(now, link) + _alone(step.kind, seconds)
            arrives.setdefault((step.kind, step.module), deque()).append(link)
        elif step.kind in _ENDS and (flying := arrives.get((_ENDS[step.kind], step.module))):
            now = max(now, flying.popleft())
        spans.append(Span(begin, now))
    return spans


_NO_TIME = Times(0.0, 0.0, 0.0, 0.0)


def _alone(kind: Kind, times: Times) -> float:
    return times.gather if kind is Kind.UNSHARD else times.reduce


def flights_of(course: Course, times: Mapping[str, Times] | None) -> Iterator[Flight]:
    """The collectives of a course in the order of their waits. Collectives without a wait are left out."""
    spans = spans_of(course, times)
    launched: dict[tuple[Kind, str], deque[int]] = {}
    numbers: Counter[tuple[Kind, str]] = Counter()
    for at, step in enumerate(course):
        if step.kind in LAUNCHES:
            launched.setdefault((step.kind, step.module), deque()).append(at)
        elif step.kind in _ENDS and launched.get(of := (_ENDS[step.kind], step.module)):
            begin = launched[of].popleft()
            computed = dict.fromkeys(each.module for each in course[begin:at] if each.kind in COMPUTE)
            alone = waited = None
            if times is not None:
                alone, waited = _alone(of[0], times.get(step.module, _NO_TIME)), spans[at].end - spans[at].begin
            when = spans[begin].begin, spans[at].end
            launch = course[begin]
            yield Flight(*of, numbers[of], launch.nbytes, tuple(computed), *when, alone, waited, launch.dtypes)
            numbers[of] += 1


def live_bytes(course: Course) -> list[int]:
    """Live bytes of unsharded weights and of gradients in flight after each step."""
    held: dict[tuple[Kind, str], deque[int]] = {}
    live, after = 0, []
    for step in course:
        if step.kind in LAUNCHES:
            held.setdefault((step.kind, step.module), deque()).append(step.nbytes)
            live += step.nbytes
        elif step.kind in (Kind.RESHARD, Kind.REDUCED):
            those = held.get((Kind.UNSHARD if step.kind is Kind.RESHARD else Kind.REDUCE, step.module))
            live -= those.popleft() if those else 0
        after.append(live)
    return after


def exposed(compiled: Iterable[Flight], planned: Iterable[Flight]) -> Iterator[tuple[Flight, Flight]]:
    """Find the collectives that are exposed in a compiled step and hidden in the plan.

    With times, a collective counts as exposed if its wait is longer than in the plan by more than half of its duration.
    Without times, it counts as exposed if nothing computes between its launch and its wait. In a plan it is
    unknown when the root computes, so the root's compute alone does not hide a collective of the plan.
    """
    others = {flight.key: flight for flight in planned}
    for mine in compiled:
        plan = others.get(mine.key)
        if plan is None:
            continue
        if mine.seconds is None or mine.waited is None or plan.waited is None:
            if not mine.behind and {*plan.behind} - {ROOT_NAME}:
                yield mine, plan
        elif mine.waited - plan.waited > mine.seconds / 2:
            yield mine, plan
