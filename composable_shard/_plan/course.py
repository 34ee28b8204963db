"""The course of a step: launches, waits and compute in their order, and what each collective is hidden behind.

A plan has one, and a step that was compiled has one, so that the two can be laid side by side.
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
_ENDS = {Kind.WAIT: Kind.UNSHARD, Kind.REDUCED: Kind.REDUCE}  # what a wait is for
_GIVE_UP = (Kind.RESHARD, Kind.SHRINK)
_LETTERS = {Kind.UNSHARD: "G", Kind.REDUCE: "R", Kind.FORWARD: "c", Kind.BACKWARD: "c", Kind.RESHARD: ""}


class CourseStep(NamedTuple):
    """What happens next.

    Attributes:
        kind: `UNSHARD` and `REDUCE` launch, `WAIT` and `REDUCED` wait, `FORWARD` and `BACKWARD` compute, and at
            `RESHARD` the weights were read for the last time.
        module: FQN of the module whose group it is, `(root)` for the root.
        share: of compute, the share of what a use of the module computes in this direction.
        nbytes: of a launch, the bytes that stay until the wait, or until the weights were read last.
    """

    kind: Kind
    module: str
    share: float = 0.0
    nbytes: int = 0


Course = Sequence[CourseStep]


class Flight(NamedTuple):
    """A collective from its launch to the end of the wait for it.

    Attributes:
        kind: `UNSHARD` or `REDUCE`.
        module: FQN of the module whose group it is.
        number: counts the collectives of this kind and module in the course, from 0.
        nbytes: as the launch says.
        behind: the modules that compute meanwhile, in order.
        begin, end: of launch and wait, in seconds; without times, counted in steps.
        seconds: alone on the link; None without times, as the next is.
        waited: seconds that compute waits for it.
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

    @property
    def key(self) -> tuple[Kind, str, int]:
        """What it has in common with the same collective of another course."""
        return self.kind, self.module, self.number

    def __str__(self) -> str:
        return f"{'gather' if self.kind is Kind.UNSHARD else 'reduction'} of {self.module}"


def module_of(fqn: str) -> str:
    """The module of a group, as a graph names it: the first one of a list of modules, without the mesh."""
    return fqn.partition(" on ")[0].partition(", ")[0] or ROOT_NAME


def by_module(times: Mapping[str, Times]) -> dict[str, Times]:
    """The seconds of each module: of all its groups compute, of the first one a collective."""
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
    """The course of a plan's forward, and that of its backward.

    Args:
        timed: its actions with the beginnings and ends of forwards and backwards, see `timed_step`.
        nbytes: by FQN, the bytes of a group's weights and of its reduction.
    """
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
            running = running._replace(share=0.5)  # the engine waits when half of what the group saved was read
            course.append(running)
        if action.kind not in (*COMPUTE, Kind.ENDED):
            sizes = dict(zip(LAUNCHES, nbytes[action.fqn], strict=True))
            kind = Kind.RESHARD if action.kind in _GIVE_UP else action.kind
            course.append(CourseStep(kind, module, nbytes=sizes.get(action.kind, 0)))
    return course if running is None else [*course, running]


def sequence_of(course: Course) -> str:
    """A course as a sequence of letters: G gathers, R reduces, w waits, c computes."""
    return "".join(_LETTERS.get(step.kind, "w") for step in course)


class Span(NamedTuple):
    """When a step of a course begins and ends, in seconds; without times, counted in steps."""

    begin: float
    end: float


def spans_of(course: Course, times: Mapping[str, Times] | None) -> list[Span]:
    """When each step begins and ends, if one link serves all collectives in the order of their launch."""
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
    """The collectives of a course, in the order of their waits; those that nobody waits for are left out."""
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
            yield Flight(*of, numbers[of], course[begin].nbytes, tuple(computed), *when, alone, waited)
            numbers[of] += 1


def live_bytes(course: Course) -> list[int]:
    """Bytes of weights and of gradients in flight that are live after each step."""
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
    """The collectives that are exposed in one course and hidden in the other, which has them too.

    With times, one is exposed if it is waited for longer than in the other by more than half of what it takes. Without,
    it is if nothing is computed while it flies; the root's compute alone, of which a plan does not know where it is,
    counts as nothing in the plan.
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
