"""Bytes of a rank in a step, by kind: those of a trace, those of a plan, and those that follow from shards.

Activations are those of the trace, moment by moment. Gradients grow by a shard with each group whose backward is over.
The pool of unsharded parameters and of communication is as large as the plan's arena, all the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from .._plan.plan import ShardPlan
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


@dataclass(frozen=True, slots=True)
class Reducing:
    """What reductions allocate outside of the pool until they are over.

    Attributes:
        nbytes: by group.
        at_once: how many reductions may be in flight.
    """

    nbytes: Mapping[str, int]
    at_once: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a rank.

    Attributes:
        peak: the bytes of each kind when all together are most: what tensors hold.
        most: most bytes of each kind, at whatever moment.
    """

    peak: Bytes
    most: Bytes

    @property
    def reserved(self) -> int:
        """Bytes that a caching allocator of an accelerator takes of the device.

        It gives nothing back, and what was freed serves others only on the same stream and at a fitting size. So each
        kind keeps what it once had: weights, communication and activations are on streams and of sizes of their own.
        """
        return self.most.total


def memory_of(profile: Profile, held: Bytes, gradients: Mapping[str, int], reducing: Reducing) -> Memory:
    """The memory of a step.

    Args:
        profile: the trace of it.
        held: bytes that are there all the time, those of the pool among them.
        gradients: bytes of each group's gradients once they are reduced, by FQN; "" for the root.
        reducing: what the last reductions hold beyond the pool.
    """
    moments, waiting = [held], dict.fromkeys(gradients, 0)
    flying = deque([0], maxlen=reducing.at_once)

    def moment(activations: int) -> Bytes:
        return replace(
            held,
            gradients=held.gradients + sum(waiting.values()),
            activations=held.activations + activations,
            communication=held.communication + sum(flying),
        )

    for segment in profile.segments:
        moments.append(moment(segment.activations))
        if segment.direction == BACKWARD and segment.begins and segment.group:
            waiting[segment.group] = gradients[segment.group]
            flying.append(reducing.nbytes[segment.group])
    waiting.update(gradients)
    moments.append(moment(0))
    most = Bytes(**{each.name: max(getattr(at, each.name) for at in moments) for each in fields(Bytes)})
    return Memory(max(moments, key=lambda at: at.total), most)


def pool_bytes(plan: ShardPlan, stays: bool) -> tuple[int, int]:
    """Bytes of the pool, which keeps its slots from step to step: of unsharded parameters, and beyond them.

    Args:
        plan: whose buffers lie in it.
        stays: whether unsharded parameters stay until the optimizer steps.
    """
    predicted = plan.predicted()
    if stays:
        return sum(group.sizes.weights for group in plan.groups), predicted.landing + predicted.reductions
    return predicted.weights, plan.arena().nbytes - predicted.weights
