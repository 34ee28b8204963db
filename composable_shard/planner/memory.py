"""Bytes of a rank in a step, by kind: those of a trace, those of a plan, and those that follow from shards.

Activations are those of the trace, moment by moment. Gradients grow by a shard with each group whose backward is over.
The pool of unsharded parameters and of communication is as large as the plan's arena, all the time. In the first step
there is no arena yet, only buffers of one size share memory, and the optimizer has no state.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from .._plan.arena import Lifetime, aligned
from .._plan.plan import ShardPlan
from .._plan.schedule import MARKS, Kind
from .._plan.simulation import lifetimes, live_bytes
from .profile import BACKWARD, Profile


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of each kind.

    Attributes:
        parameters: as they are stored between steps.
        optimizer: its state.
        gradients: that wait for the optimizer.
        activations: what autograd has saved, and what operators are at work with.
        unsharded: gathered parameters.
        communication: further buffers of gathers and reductions.
    """

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0
    unsharded: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(getattr(self, each.name) for each in fields(self))


_total = attrgetter("total")


@dataclass(frozen=True, slots=True)
class Reducing:
    """What reductions allocate outside of the pool until they are over.

    Attributes:
        nbytes: by group.
        passing: by group, what lives beside that while gradients are rounded or added up.
        at_once: how many reductions may be in flight.
    """

    nbytes: Mapping[str, int]
    passing: Mapping[str, int]
    at_once: int


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients that wait for the optimizer.

    Attributes:
        nbytes: of each group's once they are reduced, by FQN; "" for the root.
        at_once: whether those of one group alone live at a time, as each group is stepped inside of backward.
    """

    nbytes: Mapping[str, int]
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a rank.

    Attributes:
        peak: the bytes of each kind when all together are most: what tensors hold.
        most: most bytes of each kind, at whatever moment: of later steps, or of the first one, if that adds up to more.
    """

    peak: Bytes
    most: Bytes

    @property
    def reserved(self) -> int:
        """Bytes that a caching allocator of an accelerator takes of the device.

        It gives nothing back before it must, and what was freed serves others only on the same stream and at a fitting
        size. So in a step each kind keeps what it once had: weights, communication and activations are on streams and
        of sizes of their own.
        """
        return self.most.total


@dataclass(frozen=True, slots=True)
class Pool:
    """Bytes of the memory of unsharded parameters and of communication, which keeps its slots.

    Attributes:
        unsharded: of parameters.
        communication: beyond them.
        first: in the first step, of both: by direction and FQN of the group that computes.
        first_ends: after it.
    """

    unsharded: int
    communication: int
    first: Mapping[tuple[str, str], int]
    first_ends: int


def memory_of(
    profile: Profile,
    held: Bytes,
    pool: Pool | None,
    gradients: Gradients,
    reducing: Reducing,
    stepping: int = 0,
) -> Memory:
    """The memory of a step.

    Args:
        profile: the trace of it.
        held: bytes that are there all the time, those of the pool among them.
        pool: for what the first step holds; None if nothing is sharded.
        gradients: of each group.
        reducing: what the last reductions hold beyond the pool.
        stepping: bytes of the buffers of the optimizer's step.
    """
    steps = [[held, *_moments(profile, held, None, gradients, reducing)]]
    behind = steps[0][-1]
    steps[0].append(replace(behind, communication=held.communication + stepping))
    if pool is not None:
        steps.append([*_moments(profile, replace(held, optimizer=0, communication=0), pool, gradients, reducing)])
    most = [
        Bytes(**{each.name: max(getattr(at, each.name) for at in step) for each in fields(Bytes)}) for step in steps
    ]
    return Memory(max(itertools.chain(*steps), key=_total), max(most, key=_total))


def _moments(
    profile: Profile, held: Bytes, first: Pool | None, gradients: Gradients, reducing: Reducing
) -> Iterator[Bytes]:
    """The bytes at each moment of a step: of the first one, if `first` is given."""
    waiting = deque([0], maxlen=1 if gradients.at_once else None)
    flying = deque([0], maxlen=reducing.at_once)

    came: set[str] = set()

    def moment(activations: int, passing: int = 0) -> Bytes:
        return replace(
            held,
            gradients=held.gradients + sum(waiting),
            activations=held.activations + activations,
            communication=held.communication + sum(flying) + passing,
        )

    for segment in profile.segments:
        if first is not None:
            slots = first.first.get((segment.direction, segment.group), 0)
            held = replace(held, communication=max(held.communication, slots - held.unsharded))
        yield moment(segment.activations)
        if segment.direction == BACKWARD and segment.begins and segment.group:
            waiting.append(gradients.nbytes[segment.group])
            came.add(segment.group)
            # Its gradients are there until they are in the bucket, and rounded: the operators that made them have them.
            yield moment(segment.activations, reducing.passing[segment.group])
            flying.append(reducing.nbytes[segment.group])
    waiting.extend([nbytes for group, nbytes in gradients.nbytes.items() if group not in came])
    if first is not None:
        held = replace(held, communication=first.first_ends - held.unsharded)
    yield moment(0)


def pool_of(plan: ShardPlan, stays: bool) -> Pool:
    """The pool of a plan.

    Args:
        plan: whose buffers lie in it.
        stays: whether unsharded parameters stay until the optimizer steps.
    """
    predicted = plan.predicted()
    weights, beside = predicted.weights, plan.arena().nbytes - predicted.weights
    if stays:
        weights = sum(group.sizes.weights for group in plan.groups)
        beside = predicted.landing + predicted.reductions
    sums = _without_arena(plan, stays)
    first: dict[tuple[str, str], int] = {}
    done, computes = 0, ("", "")
    for action in plan.timed():
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            computes = action.kind.lower(), action.fqn
        elif action.kind is Kind.REDUCE:
            computes = "", ""  # by then, what backward needs is gone
        done += action.kind not in MARKS
        first[computes] = sums[done]
    return Pool(weights, beside, first, sums[-1])


def _without_arena(plan: ShardPlan, stays: bool) -> list[int]:
    """Bytes of the pool after so many actions of a first step.

    Only buffers of one size share memory, and none is given back; on an accelerator each has its own, which goes back.
    """
    steps = len(plan.actions())
    # A reduction's memory stands until it is waited for, and only in an arena something else lies there before.
    by_fqn = {group.fqn: replace(group.sizes, frees_queued=False) for group in plan.groups}
    sizes: dict[int, list[Lifetime]] = {}
    for life in lifetimes(plan.actions(), by_fqn):
        closed = steps if stays and life.name.startswith("weights ") else life.closed
        sizes.setdefault(aligned(life.nbytes), []).append(replace(life, closed=closed))
    if any(group.frees_queued for group in plan.groups) and not plan.pool.keep_idle:
        return [0, *live_bytes(list(itertools.chain(*sizes.values())), steps)]
    live = [itertools.accumulate(live_bytes(each, steps), max) for each in sizes.values()]
    return [0, *map(sum, zip(*live, strict=True))]
