"""The costs of a group: bytes of memory, and seconds of compute and communication on a machine. Frozen data."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import ShardConfigValueError
from .schedule import ROOT_NAME


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a group leases from the pool.

    Attributes:
        weights: the unsharded parameters.
        landing: additional buffers of a gather, leased until the gather has been waited for.
        reduction: the buffers of a reduction, leased until the reduction has been waited for.
        small: this rank's pieces of weights that are resharded to a few ranks between forward and backward.
        small_landing: additional buffers of a gather among these ranks.
        frees_queued: whether the buffers of a reduction are leased only until the reduction is queued (see
            `GroupPlan.frees_queued`).
    """

    weights: int
    landing: int = 0
    reduction: int = 0
    small: int = 0
    small_landing: int = 0
    frees_queued: bool = False

    @property
    def queued(self) -> int:
        """Bytes of reduction buffers that are leased only until the reduction is queued."""
        return self.reduction if self.frees_queued else 0


def held(sizes: Mapping[str, Sizes], fqns: Container[str]) -> dict[str, Sizes]:
    """Copy the sizes. Reductions of the groups `fqns` keep their memory until they have been waited for."""
    return {fqn: replace(size, frees_queued=False) if fqn in fqns else size for fqn, size in sizes.items()}


class Moved(NamedTuple):
    """Bytes that the collectives of a group move, summed over ranks. Each dtype has its own collective.

    Attributes:
        ranks: number of ranks over which the group is sharded.
        few: number of ranks to which the weights are resharded between forward and backward; 1 if they are not.
        gather, reduce: bytes of each collective.
        small_gather: bytes of each gather among the few ranks.
    """

    ranks: int
    gather: tuple[int, ...]
    reduce: tuple[int, ...]
    few: int = 1
    small_gather: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a group's compute, and of each of its collectives without contention."""

    forward: float
    backward: float
    gather: float
    reduce: float
    small_gather: float = 0.0


Seconds = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured or assumed times: a collective takes ``latency + (ranks - 1) / ranks * bytes / bandwidth`` seconds.

    All ranks must have the same costs. Measured costs are those of the slowest rank. Use `of` to create costs.

    Attributes:
        latency: seconds of an empty collective.
        bandwidth: bytes per second of a rank's link.
        forward, backward: seconds of compute per step of each group, summed over its uses, by FQN, sorted.
        gather, reduce: seconds of the gather and of the reduction for groups that do not follow the formula, by FQN,
            sorted.
        streams: whether streams wait for communication, as on a GPU. Otherwise the host waits.

    Raises:
        ShardConfigValueError: a number is negative or not finite, or the bandwidth is 0.
    """

    latency: float
    bandwidth: float
    forward: Seconds
    backward: Seconds
    gather: Seconds = ()
    reduce: Seconds = ()
    streams: bool = False

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
        streams: bool = False,
    ) -> Costs:
        """Create costs from mappings by FQN. Arguments and errors are those of the class."""

        def by_fqn(each: Mapping[str, float] | None) -> Seconds:
            return tuple(sorted((each or {}).items()))

        parts = by_fqn(forward), by_fqn(backward), by_fqn(gather), by_fqn(reduce)
        return cls(latency, bandwidth, *parts, streams)

    def scaled(self, by: Mapping[str, float]) -> Costs:
        """Copy the costs, with the compute of each group multiplied by its factor in `by` (by FQN, default 1)."""
        parts = ({fqn: seconds * by.get(fqn, 1.0) for fqn, seconds in of} for of in (self.forward, self.backward))
        forward, backward = (tuple(part.items()) for part in parts)
        return replace(self, forward=forward, backward=backward)

    def times(self, moved: Mapping[str, Moved]) -> dict[str, Times]:
        """Seconds of each group, by FQN.

        Args:
            moved: the bytes that each group's collectives move, by FQN.

        Raises:
            ShardConfigValueError: the compute time of a group is unknown.
        """
        known = {name: dict(getattr(self, name)) for name in ("forward", "backward", "gather", "reduce")}
        times = {}
        for fqn, sent in moved.items():
            for name in ("forward", "backward"):
                if fqn not in known[name]:
                    raise ShardConfigValueError(f"Costs.{name}: has no seconds for group {fqn or ROOT_NAME}")
            times[fqn] = Times(
                known["forward"][fqn],
                known["backward"][fqn],
                known["gather"].get(fqn, self._sent(sent.gather, sent.ranks)),
                known["reduce"].get(fqn, self._sent(sent.reduce, sent.ranks)),
                self._sent(sent.small_gather, sent.few),
            )
        return times

    def _sent(self, collectives: tuple[int, ...], ranks: int) -> float:
        sent = [nbytes for nbytes in collectives if nbytes] if ranks > 1 else []
        return len(sent) * self.latency + (ranks - 1) / ranks * sum(sent) / self.bandwidth


def _require_seconds(field: str, value: float) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ShardConfigValueError(f"Costs.{field}={value!r}: expected a finite number, 0 or more")
