"""What a list of actions costs: bytes over its course and, where times are known, how long compute waits.

Compute runs one group after the other. A link carries one collective at a time, gathers and reductions in the order of
issue: with ``s`` and ``f`` the start and the end of a collective that takes ``t``, and ``c`` the start of compute that
takes ``F``,

    s_i = max(issue_i, f_{i-1})    f_i = s_i + t_i    c_i = max(c_{i-1} + F_{i-1}, f_i)

What a step takes longer than its compute alone is *exposed*: the sum of ``c_i - c_{i-1} - F_{i-1}``, and what is waited
for at the end. Issuing takes no time. The compute of the root counts where it begins, in forward and in backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ._arena import Lifetime, peak_bytes
from ._errors import ShardConfigValueError
from ._schedule import ROOT_NAME, Action, Kind


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a group takes.

    Attributes:
        weights: its unsharded parameters.
        landing: the buffers that a gather needs besides, until it is waited for.
        reduction: the buffers of a reduction, until it is waited for.
        small: what is kept of weights that a few ranks share between forward and backward.
        small_landing: the buffers of a gather among these.
    """

    weights: int
    landing: int = 0
    reduction: int = 0
    small: int = 0
    small_landing: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that a group takes: compute, and each of its collectives alone on the link."""

    forward: float
    backward: float
    gather: float
    reduce: float
    small_gather: float = 0.0


Seconds = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured, or is assumed, of a machine: ``seconds = latency + (ranks - 1) / ranks * bytes / bandwidth``.

    All ranks must be given the same; ranks that measure take the slowest one's. Made by `of`.

    Attributes:
        latency: seconds of a collective of no bytes.
        bandwidth: bytes per second of a rank's link.
        forward, backward: seconds of compute of each group, by FQN, sorted.
        gather, reduce: seconds of its collectives, for groups where the formula is not to be used.

    Raises:
        ShardConfigValueError: a number is negative or not finite, or the bandwidth is 0.
    """

    latency: float
    bandwidth: float
    forward: Seconds
    backward: Seconds
    gather: Seconds = ()
    reduce: Seconds = ()

    def __post_init__(self) -> None:
        _require_seconds("latency", self.latency)
        _require_seconds("bandwidth", self.bandwidth)
        if self.bandwidth == 0:
            raise ShardConfigValueError("Costs.bandwidth=0: expected bytes per second above 0")
        for name in ("forward", "backward", "gather", "reduce"):
            for fqn, seconds in getattr(self, name):
                _require_seconds(f"{name}[{fqn!r}]", seconds)

    @classmethod
    def of(
        cls,
        *,
        latency: float,
        bandwidth: float,
        forward: Mapping[str, float],
        backward: Mapping[str, float],
        gather: Mapping[str, float] | None = None,
        reduce: Mapping[str, float] | None = None,
    ) -> Costs:
        """The costs of groups by FQN; arguments and errors as above."""
        by_fqn = (tuple(sorted((each or {}).items())) for each in (forward, backward, gather, reduce))
        return cls(latency, bandwidth, *by_fqn)

    def times(self, ranks: Mapping[str, int], moved: Mapping[str, tuple[int, int, int]]) -> dict[str, Times]:
        """Seconds of each group.

        Args:
            ranks: among how many ranks each group is sharded.
            moved: bytes of each one's gather, reduction, and gather among a few ranks.

        Raises:
            ShardConfigValueError: no compute is known of a group.
        """
        known = {name: dict(getattr(self, name)) for name in ("forward", "backward", "gather", "reduce")}
        found = {}
        for fqn, (gathered, reduced, small) in moved.items():
            for name in ("forward", "backward"):
                if fqn not in known[name]:
                    raise ShardConfigValueError(f"Costs.{name}: has no seconds for group {fqn or ROOT_NAME}")
            found[fqn] = Times(
                known["forward"][fqn],
                known["backward"][fqn],
                known["gather"].get(fqn, self._sent(gathered, ranks[fqn])),
                known["reduce"].get(fqn, self._sent(reduced, ranks[fqn])),
                self._sent(small, ranks[fqn]),
            )
        return found

    def _sent(self, nbytes: int, ranks: int) -> float:
        return 0.0 if ranks == 1 or not nbytes else self.latency + (ranks - 1) / ranks * nbytes / self.bandwidth


def _require_seconds(field: str, value: float) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ShardConfigValueError(f"Costs.{field}={value!r}: expected a finite number, 0 or more")


def lifetimes(actions: Sequence[Action], sizes: Mapping[str, Sizes]) -> list[Lifetime]:
    """The buffers that these actions lease, by place in the list; named ``weights layers.3`` and so on."""
    opened: dict[tuple[str, str], list[int]] = {}
    lives: list[Lifetime] = []

    def close(what: str, fqn: str, nbytes: int, step: int) -> None:
        lives.append(Lifetime(f"{what} {fqn}", nbytes, opened[what, fqn].pop(0), step))

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
                close("weights", fqn, size.weights, step)
                opened.setdefault(("small", fqn), []).append(step)
            case Kind.RESHARD:
                close("weights", fqn, size.weights, step)
            case Kind.REDUCE:
                opened.setdefault(("reduction", fqn), []).append(step)
            case Kind.REDUCED:
                close("reduction", fqn, size.reduction, step)
    return lives


def live_bytes(lives: Sequence[Lifetime], steps: int) -> list[int]:
    """Bytes that are live after each of so many steps."""
    changes = [0] * (steps + 1)
    for life in lives:
        changes[life.opened] += life.nbytes
        changes[life.closed] -= life.nbytes
    live, found = 0, []
    for change in changes[:steps]:
        live += change
        found.append(live)
    return found


@dataclass(frozen=True, slots=True)
class Timeline:
    """How a step goes by.

    Attributes:
        begins: when each forward and backward begins to compute, in order; seconds from the start.
        gathers: seconds of each gather on the link, in order of issue.
        waits: seconds that compute waits before the forward (`FORWARD`) or the backward of a group, or for its
            reduction (`REDUCED`); those of 0 seconds are left out.
        seconds: the whole step.
        compute: seconds of compute.
    """

    begins: tuple[float, ...]
    gathers: tuple[float, ...]
    waits: Mapping[Action, float]
    seconds: float
    compute: float

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for communication."""
        return sum(self.waits.values())


class _Clock:
    """Compute and the link, as the actions are read one by one."""

    def __init__(self, times: Mapping[str, Times]) -> None:
        self.times = times
        self.now = self.link_free = self.compute = 0.0
        self.running: Action | None = None  # what has begun and did not compute yet
        self.left = 0.0  # seconds of its compute
        self.halved = False
        self.arrives: dict[tuple[Kind, str], float] = {}
        self.begins: list[float] = []
        self.gathers: list[float] = []
        self.waits: dict[Action, float] = {}

    def send(self, what: Kind, fqn: str, seconds: float) -> None:
        self.link_free = max(self.now, self.link_free) + seconds
        self.arrives[what, fqn] = self.link_free

    def wait(self, what: Kind, fqn: str, on: Action) -> None:
        late = self.arrives.pop((what, fqn)) - self.now
        if late > 0:
            self.now += late
            self.waits[on] = self.waits.get(on, 0.0) + late

    def begin(self, action: Action) -> None:
        self.finish()
        times = self.times[action.fqn]
        self.running, self.left = action, times.forward if action.kind is Kind.FORWARD else times.backward
        self.halved = False
        self.begins.append(self.now)

    def run(self, share: float = 1.0) -> None:
        """Compute this share of what is left of the group that runs."""
        self.now += share * self.left
        self.compute += share * self.left
        self.left -= share * self.left

    def finish(self) -> None:
        self.run()
        self.running = None


class _NotingClock(_Clock):
    """The same, and what took time: compute, the link, and waiting for it."""

    def __init__(self, times: Mapping[str, Times]) -> None:
        super().__init__(times)
        self.spans: list[tuple[Kind, str, float, float]] = []

    def send(self, what: Kind, fqn: str, seconds: float) -> None:
        super().send(what, fqn, seconds)
        self.spans.append((what, fqn, self.link_free - seconds, self.link_free))

    def wait(self, what: Kind, fqn: str, on: Action) -> None:
        begin = self.now
        super().wait(what, fqn, on)
        self._note(Kind.WAIT if what is Kind.UNSHARD else Kind.REDUCED, fqn, begin)

    def run(self, share: float = 1.0) -> None:
        begin = self.now
        super().run(share)
        if self.running is not None:
            self._note(self.running.kind, self.running.fqn, begin)

    def _note(self, kind: Kind, fqn: str, begin: float) -> None:
        if self.now > begin:
            self.spans.append((kind, fqn, begin, self.now))


def _played(actions: Sequence[Action], clock: _Clock) -> Iterator[Action]:
    """The actions, each when the clock has seen it."""
    times = clock.times
    resident: set[str] = set()
    shrunk: set[str] = set()
    for action in actions:
        fqn = action.fqn
        match action.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                clock.begin(action)
            case Kind.UNSHARD:
                seconds = times[fqn].small_gather if fqn in shrunk else times[fqn].gather
                clock.gathers.append(seconds)
                clock.send(Kind.UNSHARD, fqn, seconds)
            case Kind.WAIT:
                assert clock.running is not None
                resident.add(fqn)
                shrunk.discard(fqn)
                clock.wait(Kind.UNSHARD, fqn, clock.running)
                clock.begins[-1] = clock.now
            case Kind.RESHARD | Kind.SHRINK:
                clock.finish()
                resident.discard(fqn)
                if action.kind is Kind.SHRINK:
                    shrunk.add(fqn)
            case Kind.REDUCE:
                clock.send(Kind.REDUCE, fqn, times[fqn].reduce)
            case Kind.REDUCED:
                if clock.running is not None and clock.running.fqn in resident and not clock.halved:
                    clock.run(0.5)  # the engine waits when half of what the group saved was read
                    clock.halved = True
                clock.wait(Kind.REDUCE, fqn, action)
        yield action
    clock.finish()


def simulate(actions: Sequence[Action], times: Mapping[str, Times]) -> Timeline:
    """What becomes of `actions`, as `timed_step` writes them, where collectives and compute take so long."""
    clock = _Clock(times)
    for _ in _played(actions, clock):
        pass
    return Timeline(tuple(clock.begins), tuple(clock.gathers), clock.waits, clock.now, clock.compute)


class Trace(NamedTuple):
    """When what happens in a step. Spans of `UNSHARD` and `REDUCE` are of the link; `WAIT` and `REDUCED` are waits."""

    done: tuple[float, ...]  # seconds at which each action but the forwards and backwards was done, in order
    spans: tuple[tuple[Kind, str, float, float], ...]  # what took time, from when, until when


def trace(actions: Sequence[Action], times: Mapping[str, Times]) -> Trace:
    """`simulate`, and all of it noted, which takes longer."""
    clock, begins = _NotingClock(times), (Kind.FORWARD, Kind.BACKWARD)
    done = [clock.now for action in _played(actions, clock) if action.kind not in begins]
    return Trace(tuple(done), tuple(clock.spans))


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Seconds of a group in a step: its gathers, its compute, its reduction, and what compute waits for of them."""

    fqn: str
    gather: float
    compute: float
    reduce: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a training step takes.

    Attributes:
        peak: most bytes at once.
        weights, landing, reductions: most bytes at once of each kind; the peaks may be at different times.
        kept: bytes of weights that are there between forward and backward.
        groups: times of each group, in order of their forwards; None without costs, as is what follows.
        seconds: of the step.
        exposed: seconds of it that compute waits.
    """

    peak: int
    weights: int
    landing: int
    reductions: int
    kept: int
    groups: tuple[GroupTimes, ...] | None = None
    seconds: float | None = None
    exposed: float | None = None


def predict(actions: Sequence[Action], sizes: Mapping[str, Sizes], times: Mapping[str, Times] | None) -> Prediction:
    """What becomes of `actions`, as `timed_step` writes them."""
    lives = lifetimes(actions, sizes)
    by_kind: dict[str, list[Lifetime]] = {"weights": [], "small": [], "landing": [], "reduction": []}
    for life in lives:
        by_kind[life.name.partition(" ")[0]].append(life)
    turn = next((place for place, action in enumerate(actions) if action.kind is Kind.BACKWARD), 0)
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
    timeline = simulate(actions, times)
    exposed = dict.fromkeys(sizes, 0.0)
    for action, seconds in timeline.waits.items():
        exposed[action.fqn] += seconds
    gathers = dict.fromkeys(sizes, 0.0)
    for seconds, action in zip(timeline.gathers, (a for a in actions if a.kind is Kind.UNSHARD), strict=True):
        gathers[action.fqn] += seconds
    reduced = {action.fqn for action in actions if action.kind is Kind.REDUCE}
    groups = [
        GroupTimes(
            fqn, gathers[fqn], time.forward + time.backward, time.reduce if fqn in reduced else 0.0, exposed[fqn]
        )
        for fqn, time in times.items()
    ]
    return replace(memory, groups=tuple(groups), seconds=timeline.seconds, exposed=timeline.exposed)
