"""The simulation of a list of actions: live bytes after each action and, if times are known, exposed communication.

Compute runs one group after another. The link runs one collective at a time, gathers and reductions in order of issue.
Let ``s`` and ``f`` be the start and the end of a collective that takes ``t`` seconds, and ``c`` the start of compute
that takes ``F`` seconds:

    s_i = max(issue_i, f_{i-1})    f_i = s_i + t_i    c_i = max(c_{i-1} + F_{i-1}, f_i)

This models a machine whose host blocks while compute waits. With streams, the host issues everything immediately, in
the same order. A gather then begins when the previous use of its memory has ended, so `issue_i` is the end of the last
use of that memory. Compute packs the gradients of a reduction, so it waits for the memory of the reduction.

There may be other links, which run at the same time:

- The outer link runs refreshes, and the part of a reduction over the outer axis of a mesh. A gather starts only after
  the refresh of its group has ended, and delays all gathers behind it. The outer part of a reduction is queued when the
  inner part ends, and compute waits for both.
- If the shard axis is on several nodes, gathers among the ranks of a node have a link of their own (`Times.apart`).

The time of a step beyond its compute is *exposed communication*: the sum of ``c_i - c_{i-1} - F_{i-1}``, and the waits
at the end. Issuing takes no time. All compute of the root counts at its beginning, in forward and in backward.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from .arena import Arena, Lifetime, followers, peak_bytes
from .costs import Sizes, Times
from .schedule import MARKS, Action, Kind


def _lifetime(what: str, fqn: str, nbytes: int, opened: int, closed: int, size: Sizes) -> Lifetime:
    queued = what == "reduction" and size.frees_queued
    return Lifetime(f"{what} {fqn}", nbytes, opened, opened + 1 if queued else closed, queued=queued)


def lifetimes(actions: Sequence[Action], sizes: Mapping[str, Sizes]) -> list[Lifetime]:
    """The lifetimes of the buffers that these actions lease, by action index. Names are ``weights layers.3`` etc."""
    opened: dict[tuple[str, str], list[int]] = {}
    lives: list[Lifetime] = []

    def close(what: str, fqn: str, nbytes: int, step: int) -> None:
        lives.append(_lifetime(what, fqn, nbytes, opened[what, fqn].pop(0), step, sizes[fqn]))

    for step, action in enumerate(actions):
        fqn, size = action.fqn, sizes[action.fqn]
        match action.kind:
            case Kind.UNSHARD:
                opened.setdefault(("weights", fqn), []).append(step)
                opened.setdefault(("landing", fqn), []).append(step)
            case Kind.WAIT if opened.get(("small", fqn)):
                close("landing", fqn, size.small_landing, step)
                close("small", fqn, size.small, step)
            case Kind.WAIT:
                close("landing", fqn, size.landing, step)
            case Kind.SHRINK:
                close("weights", fqn, size.weights, step + 1)  # the pieces are cut from them
                opened.setdefault(("small", fqn), []).append(step)
            case Kind.RESHARD if opened.get(("small", fqn)):
                close("small", fqn, size.small, step)
            case Kind.RESHARD:
                close("weights", fqn, size.weights, step)
            case Kind.REDUCE:
                opened.setdefault(("reduction", fqn), []).append(step)
            case Kind.REDUCED:
                close("reduction", fqn, size.reduction, step)
    return lives


def live_bytes(lives: Sequence[Lifetime], steps: int) -> list[int]:
    """Live bytes after each of the first `steps` steps of the lifetimes."""
    changes = [0] * (steps + 1)
    for life in lives:
        changes[life.opened] += life.nbytes
        changes[life.closed] -= life.nbytes
    live, totals = 0, []
    for change in changes[:steps]:
        live += change
        totals.append(live)
    return totals


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated times of a step, in seconds.

    Attributes:
        begins: time at which each forward and backward begins to compute, in order.
        gathers: duration of each gather on the link, in order of issue.
        waits: duration of waits, by action: for the gather of a group's forward (`FORWARD`) or backward (`BACKWARD`),
            for its reduction (`REDUCED`), or for the memory of its reduction (`REDUCE`). Zeros are left out.
        seconds: duration of the step.
        compute: duration of all compute.
    """

    begins: tuple[float, ...]
    gathers: tuple[float, ...]
    waits: Mapping[Action, float]
    seconds: float
    compute: float

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(self.waits.values())


class _Link(StrEnum):
    """A link between ranks. Each runs its collectives in the order in which they are queued."""

    INNER = "inner"  # of the shard axis
    OUTER = "outer"  # of the outer axis
    APART = "apart"  # of the few ranks of a node, if the shard axis is on several nodes (`Times.apart`)


class _Clock:
    """The clocks of compute and of the links, advanced action by action.

    Args:
        times: seconds per use of each group.
        arena: the offsets of the buffers, if streams wait for communication. Gathers then begin when their memory is
            free.
    """

    def __init__(self, times: Mapping[str, Times], arena: Arena | None = None) -> None:
        self.times = times
        self.memory = None if arena is None else _Memory(arena)
        self.now = self.compute = 0.0
        self.free = dict.fromkeys(_Link, 0.0)  # when each link has run all collectives that were queued on it
        self.running: Action | None = None  # the forward or backward that has begun
        self.left = 0.0  # seconds of its remaining compute
        self.halved = False
        self.resident: set[str] = set()
        self.shrunk: set[str] = set()
        self.arrives: dict[tuple[Kind, str], deque[float]] = {}
        self.refreshed: dict[str, float] = {}  # when the refresh of a group ends
        self.begins: list[float] = []
        self.gathers: list[float] = []
        self.waits: dict[Action, float] = {}

    def advance(self, action: Action) -> None:
        """Advance by one action."""
        if self.memory is not None and action.kind not in MARKS:
            self.memory.advance()
        match action.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                self.begin(action)
            case Kind.ENDED:
                self.finish()
            case Kind.UNSHARD | Kind.REFRESH:
                self.gather(action)
            case Kind.WAIT:
                self.arrive(action.fqn)
            case Kind.RESHARD | Kind.SHRINK:
                self.give_up(action)
            case Kind.REDUCE:
                self.send(Kind.REDUCE, action.fqn, self.times[action.fqn].reduce)
            case Kind.REDUCED:
                self.settle(action)

    def gather(self, action: Action) -> None:
        fqn, times, small = action.fqn, self.times[action.fqn], action.fqn in self.shrunk
        if action.kind is Kind.REFRESH:
            self.refreshed[fqn] = self.occupy(_Link.OUTER, action, [(self.now, 1.0)], times.refresh)
            return
        seconds = times.small_gather if small else times.gather
        self.gathers.append(seconds)
        self.send(Kind.UNSHARD, fqn, seconds, _Link.APART if small and times.apart else _Link.INNER)

    def arrive(self, fqn: str) -> None:
        assert self.running is not None
        self.resident.add(fqn)
        self.shrunk.discard(fqn)
        self.wait(Kind.UNSHARD, fqn, self.running)
        self.begins[-1] = self.now

    def give_up(self, action: Action) -> None:
        self.finish()
        self.leave(self.now, action.kind is Kind.SHRINK)
        self.resident.discard(action.fqn)
        if action.kind is Kind.SHRINK:
            self.shrunk.add(action.fqn)

    def settle(self, action: Action) -> None:
        if self.running is not None and self.running.fqn in self.resident and not self.halved:
            self.run(0.5)  # the engine waits once half of the saved tensors have been read
            self.halved = True
        self.wait(Kind.REDUCE, action.fqn, action)

    def send(self, what: Kind, fqn: str, seconds: float, link: _Link = _Link.INNER) -> None:
        parts = [(self.now, 1.0)]
        action = Action(what, fqn)
        if self.memory is not None:
            parts = self.memory.parts()
            if what is Kind.REDUCE:
                self.wait_until(max(free_at for free_at, _ in parts), action)
                parts = [(self.now, 1.0)]
        if what is Kind.UNSHARD and fqn in self.refreshed:
            parts = [(max(free_at, self.refreshed[fqn]), share) for free_at, share in parts]
        ends = self.occupy(link, action, parts, seconds)
        if self.memory is not None:
            self.memory.used(ends)
        if what is Kind.REDUCE and (outer := self.times[fqn].outer_reduce):
            ends = self.occupy(_Link.OUTER, action, [(ends, 1.0)], outer)
        self.arrives.setdefault((what, fqn), deque()).append(ends)

    def occupy(self, link: _Link, action: Action, parts: Sequence[tuple[float, float]], seconds: float) -> float:
        """Queue the collectives of an action on a link. Return the time at which the last one ends.

        Args:
            link: the link.
            action: the action.
            parts: for each collective, the time at which it may start, and its share of the seconds.
            seconds: seconds of all collectives.
        """
        for free_at, share in parts:
            self.free[link] = max(free_at, self.free[link]) + share * seconds
        return self.free[link]

    def wait(self, what: Kind, fqn: str, on: Action) -> None:
        arrived = self.arrives[what, fqn].popleft()
        self.wait_until(arrived, on)
        self.leave(arrived)

    def wait_until(self, time: float, on: Action) -> None:
        late = time - self.now
        if late > 0:
            self.now += late
            self.waits[on] = self.waits.get(on, 0.0) + late

    def leave(self, time: float, lasts: bool = False) -> None:
        """Note that the memory that this action frees (with `lasts`, at its end) was used until `time`."""
        if self.memory is not None:
            self.memory.left(time, lasts)

    def begin(self, action: Action) -> None:
        self.finish()
        times = self.times[action.fqn]
        self.running, self.left = action, times.forward if action.kind is Kind.FORWARD else times.backward
        self.halved = False
        self.begins.append(self.now)

    def run(self, share: float = 1.0) -> None:
        """Run this share of the remaining compute of the running group."""
        self.now += share * self.left
        self.compute += share * self.left
        self.left -= share * self.left

    def finish(self) -> None:
        self.run()
        self.running = None


class _Memory:
    """The times at which memory becomes free, action by action. `MARKS` do not count as actions."""

    def __init__(self, arena: Arena) -> None:
        self._index = -1  # index of the current action
        self._free_at = [0.0] * len(arena.lifetimes)
        self._before = followers(arena)
        self._lives = arena.lifetimes
        self._opened: dict[int, list[int]] = {}
        self._closed: dict[int, list[int]] = {}
        self._queued = {at for at, life in enumerate(arena.lifetimes) if life.queued}
        for at, life in enumerate(arena.lifetimes):
            self._opened.setdefault(life.opened, []).append(at)
            if not life.queued:
                self._closed.setdefault(life.closed, []).append(at)

    def advance(self) -> None:
        """Move to the next action."""
        self._index += 1

    def parts(self) -> list[tuple[float, float]]:
        """For each collective of this action, the time at which its memory is free, and its share of the bytes.

        A gather has one collective per slot of its weights. Other memory of the action must be free for all of them.
        """
        taken = self._opened.get(self._index, [])
        free = {at: max([self._free_at[other] for other in self._before[at]], default=0.0) for at in taken}
        weights = [at for at in taken if self._lives[at].name.startswith("weights ")]
        nbytes = sum(self._lives[at].nbytes for at in weights)
        if not nbytes:
            return [(max(free.values(), default=0.0), 1.0)]
        others = max((free[at] for at in taken if at not in weights), default=0.0)
        return [(max(free[at], others), self._lives[at].nbytes / nbytes) for at in weights]

    def used(self, time: float) -> None:
        """Note that memory that is leased only until work is queued becomes free at `time`, the end of that work."""
        for at in self._queued.intersection(self._opened.get(self._index, ())):
            self._free_at[at] = time

    def left(self, time: float, lasts: bool = False) -> None:
        """Note that the memory that this action frees (with `lasts`, at its end) becomes free at `time`."""
        for at in self._closed.get(self._index + lasts, ()):
            self._free_at[at] = time


_Span = tuple[Kind, str, float, float]  # kind, group, begin and end in seconds


class _NotingClock(_Clock):
    """A clock that records spans of compute, of the links, and of waits."""

    def __init__(self, times: Mapping[str, Times], arena: Arena | None = None) -> None:
        super().__init__(times, arena)
        self.spans: list[_Span] = []
        self.outer: list[_Span] = []

    def occupy(self, link: _Link, action: Action, parts: Sequence[tuple[float, float]], seconds: float) -> float:
        ends = super().occupy(link, action, parts, seconds)
        spans = self.outer if link is _Link.OUTER else self.spans
        spans.append((action.kind, action.fqn, ends - seconds, ends))
        return ends

    def wait_until(self, time: float, on: Action) -> None:
        begin = self.now
        super().wait_until(time, on)
        self._note(Kind.WAIT if on.kind in (Kind.FORWARD, Kind.BACKWARD) else Kind.REDUCED, on.fqn, begin)

    def run(self, share: float = 1.0) -> None:
        begin = self.now
        super().run(share)
        if self.running is not None:
            self._note(self.running.kind, self.running.fqn, begin)

    def _note(self, kind: Kind, fqn: str, begin: float) -> None:
        if self.now > begin:
            self.spans.append((kind, fqn, begin, self.now))


def _played(actions: Sequence[Action], clock: _Clock) -> Iterator[Action]:
    """Advance the clock by each action, then yield that action."""
    for action in actions:
        clock.advance(action)
        yield action
    clock.finish()


def simulate(actions: Sequence[Action], times: Mapping[str, Times], arena: Arena | None = None) -> Timeline:
    """Simulate a step.

    Args:
        actions: the actions of the step, as `timed_step` returns them.
        times: seconds per use of each group.
        arena: the offsets of the buffers, if streams wait for communication; None if the host waits.
    """
    clock = _Clock(times, arena)
    for _ in _played(actions, clock):
        pass
    return Timeline(tuple(clock.begins), tuple(clock.gathers), clock.waits, clock.now, clock.compute)


class Trace(NamedTuple):
    """The times of a step.

    Spans of `UNSHARD` and `REDUCE` are on the inner link, or on that of a few ranks. Spans of `WAIT` and `REDUCED` are
    waits.
    """

    done: tuple[float, ...]  # time in seconds at which each action (except `MARKS`) ended, in order
    spans: tuple[_Span, ...]
    outer: tuple[_Span, ...]  # spans on the outer link: `REFRESH`, and the second part of `REDUCE`


def trace(actions: Sequence[Action], times: Mapping[str, Times], arena: Arena | None = None) -> Trace:
    """`simulate` with spans of compute, link and waits. Slower."""
    clock = _NotingClock(times, arena)
    done = [clock.now for action in _played(actions, clock) if action.kind not in MARKS]
    return Trace(tuple(done), tuple(clock.spans), tuple(clock.outer))


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Seconds of a group in a step.

    Attributes:
        fqn: the group.
        gather: its gathers.
        compute: its forwards and backwards.
        reduce: its reductions, without their part on the outer link.
        exposed: exposed communication.
        outer: its refresh, and its reductions on the outer link.
    """

    fqn: str
    gather: float
    compute: float
    reduce: float
    exposed: float
    outer: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted memory and time of a training step.

    Attributes:
        peak: peak of live bytes.
        weights, landing, reductions: peak of live bytes of each type. The peaks may be at different times.
        kept: bytes of weights that stay unsharded between forward and backward.
        groups: times of each group, in order of their forwards. None without costs.
        seconds: duration of the step in seconds. None without costs.
        exposed: seconds of exposed communication. None without costs.
    """

    peak: int
    weights: int
    landing: int
    reductions: int
    kept: int
    groups: tuple[GroupTimes, ...] | None = None
    seconds: float | None = None
    exposed: float | None = None


def predict(
    actions: Sequence[Action],
    sizes: Mapping[str, Sizes],
    times: Mapping[str, Times] | None,
    arena: Arena | None = None,
) -> Prediction:
    """Predict the memory and, if `times` is given, the time of a step. Arguments are those of `simulate`."""
    lives = lifetimes(actions, sizes)
    by_kind: dict[str, list[Lifetime]] = {"weights": [], "small": [], "landing": [], "reduction": []}
    for life in lives:
        by_kind[life.name.partition(" ")[0]].append(life)
    turn = next((index for index, action in enumerate(actions) if action.kind is Kind.BACKWARD), 0)
    resident = by_kind["weights"] + by_kind["small"]
    memory = Prediction(
        peak_bytes(lives),
        peak_bytes(resident),
        peak_bytes(by_kind["landing"]),
        peak_bytes(by_kind["reduction"]),
        sum(life.nbytes for life in resident if life.opened < turn < life.closed),
    )
    if times is None:
        return memory
    timeline = simulate(actions, times, arena)
    exposed = dict.fromkeys(sizes, 0.0)
    for action, seconds in timeline.waits.items():
        exposed[action.fqn] += seconds
    gathers = dict.fromkeys(sizes, 0.0)
    for seconds, action in zip(timeline.gathers, (a for a in actions if a.kind is Kind.UNSHARD), strict=True):
        gathers[action.fqn] += seconds
    often = Counter((action.kind, action.fqn) for action in actions)
    groups = []
    for fqn, time in times.items():
        computed = often[Kind.FORWARD, fqn] * time.forward + often[Kind.BACKWARD, fqn] * time.backward
        reductions = often[Kind.REDUCE, fqn]
        outer = often[Kind.REFRESH, fqn] * time.refresh + reductions * time.outer_reduce
        groups.append(GroupTimes(fqn, gathers[fqn], computed, reductions * time.reduce, exposed[fqn], outer))
    return replace(memory, groups=tuple(groups), seconds=timeline.seconds, exposed=timeline.exposed)
