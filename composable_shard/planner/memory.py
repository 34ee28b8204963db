"""Predict the bytes of a rank at each moment of a step, by category, from a trace, a plan, and the shards.

Activations are those of the trace. Gradients grow by a shard after the backward of each group. The
pool of unsharded parameters and communication buffers is always as large as the plan's arena. In the first step there
is no arena yet: only buffers of the same size share memory, and the optimizer has no state.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from .._plan.arena import Lifetime
from .._plan.layout import slot_bytes
from .._plan.plan import ShardPlan
from .._plan.schedule import MARKS, Kind
from .._plan.simulation import lifetimes, live_bytes
from .profile import BACKWARD, Profile


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes by category.

    Attributes:
        parameters: parameters as they are stored between steps.
        optimizer: optimizer state.
        gradients: gradients that wait for the optimizer.
        activations: tensors that autograd has saved, and temporary tensors of operators.
        unsharded: unsharded parameters.
        communication: other buffers of gathers and reductions.
        copies: the node's compute copies, which ``hfsdp`` keeps between steps.
    """

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0
    unsharded: int = 0
    communication: int = 0
    copies: int = 0

    @property
    def total(self) -> int:
        """The sum of all categories."""
        return sum(getattr(self, each.name) for each in fields(self))


_total = attrgetter("total")


@dataclass(frozen=True, slots=True)
class Reducing:
    """Memory that reductions allocate outside the pool until they finish.

    Attributes:
        nbytes: bytes by group.
        passing: by group, additional bytes while gradients are rounded or added.
        at_once: limit of reductions in flight.
    """

    nbytes: Mapping[str, int]
    passing: Mapping[str, int]
    at_once: int


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients that wait for the optimizer.

    Attributes:
        nbytes: by FQN of a group, the bytes of its reduced gradients; "" for the root.
        at_once: whether only the gradients of one group are live at a time, because each group is stepped in backward.
    """

    nbytes: Mapping[str, int]
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a rank.

    Attributes:
        peak: bytes by category at the moment of the largest total: the memory of tensors.
        most: by category, the largest number of bytes at any moment of a step: of the first step if these add up to
            more, otherwise of a later one.
    """

    peak: Bytes
    most: Bytes

    @property
    def reserved(self) -> int:
        """Bytes that the caching allocator of an accelerator reserves on the device.

        The allocator returns memory only when it must. It reuses a freed block only on the same stream and for a
        fitting size. Weights, communication and activations use different streams and sizes, so in a step each
        category keeps its largest memory.
        """
        return self.most.total


@dataclass(frozen=True, slots=True)
class Pool:
    """Bytes of the pool of unsharded parameters and communication buffers. The pool keeps its slots allocated.

    Attributes:
        unsharded: bytes of unsharded parameters.
        communication: other bytes.
        first: bytes of both in the first step, by direction and FQN of the group that computes.
        first_ends: bytes of both after the first step.
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
    """Predict the memory of a step.

    Args:
        profile: the trace of the step.
        held: bytes that are always allocated, including those of the pool.
        pool: the pool, for the first step; None if nothing is sharded.
        gradients: gradients of each group.
        reducing: memory of the last reductions outside the pool.
        stepping: bytes of the buffers of the optimizer step.
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
    """The bytes at each moment of a step, or of the first step if `first` is given."""
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
            # Its gradients stay until they are packed and rounded, because the operators that made them hold them.
            yield moment(segment.activations, reducing.passing[segment.group])
            flying.append(reducing.nbytes[segment.group])
    waiting.extend([nbytes for group, nbytes in gradients.nbytes.items() if group not in came])
    if first is not None:
        held = replace(held, communication=first.first_ends - held.unsharded)
    yield moment(0)


def pool_of(plan: ShardPlan, stays: bool) -> Pool:
    """Compute the pool of a plan.

    Args:
        plan: the plan whose buffers are in the pool.
        stays: whether parameters stay unsharded until the optimizer step.
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
            computes = "", ""  # the backward of the group has ended and has freed its memory
        done += action.kind not in MARKS
        first[computes] = sums[done]
    return Pool(weights, beside, first, sums[-1])


def _without_arena(plan: ShardPlan, stays: bool) -> list[int]:
    """Bytes of the pool after each action of a first step.

    On a CPU, or with `PoolPolicy.keep_idle`, only buffers of the same size share memory, and the pool returns none of
    it. Otherwise each buffer has its own memory, which the pool returns when the buffer is free.
    """
    steps = len(plan.actions())
    # The memory of a reduction is in use until the reduction is waited for. Only an arena reuses it before that.
    by_fqn = {group.fqn: replace(group.sizes, frees_queued=False) for group in plan.groups}
    sizes: dict[int, list[Lifetime]] = {}
    for life in lifetimes(plan.actions(), by_fqn):
        closed = steps if stays and life.name.startswith("weights ") else life.closed
        sizes.setdefault(slot_bytes(life.nbytes), []).append(replace(life, closed=closed))
    if any(group.frees_queued for group in plan.groups) and not plan.pool.keep_idle:
        return [0, *live_bytes(list(itertools.chain(*sizes.values())), steps)]
    live = [itertools.accumulate(live_bytes(each, steps), max) for each in sizes.values()]
    return [0, *map(sum, zip(*live, strict=True))]
