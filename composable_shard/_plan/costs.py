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
        outer: number of ranks of the outer axis over which the shards are split as well; 1 if they are not.
        refresh, outer_reduce: bytes of each collective over the outer axis.
    """

    ranks: int
    gather: tuple[int, ...]
    reduce: tuple[int, ...]
    few: int = 1
    small_gather: tuple[int, ...] = ()
    outer: int = 1
    refresh: tuple[int, ...] = ()
    outer_reduce: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a group's compute, and of each of its collectives without contention.

    Attributes:
        forward, backward: compute of one use.
        gather, reduce: collectives over the shard axis. They are on the inner link.
        small_gather: the gather among a few ranks.
        refresh: the refresh of the node's compute copy, on the outer link.
        outer_reduce: the part of a reduction that follows `reduce`, on the outer link.
        apart: whether `small_gather` is on a link of its own, not on the inner link.
    """

    forward: float
    backward: float
    gather: float
    reduce: float
    small_gather: float = 0.0
    refresh: float = 0.0
    outer_reduce: float = 0.0
    apart: bool = False


Seconds = tuple[tuple[str, float], ...]

_COMPUTE = ("forward", "backward")
_COLLECTIVES = ("gather", "reduce", "small_gather", "refresh", "outer_reduce")


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured or assumed times. A collective takes ``latency + (ranks - 1) / ranks * bytes / bandwidth`` seconds.

    This is the time of a ring all-gather or reduce-scatter, and `bytes` are those of the full tensors.

    All ranks must have the same costs. Measured costs are those of the slowest rank. Use `of` to create costs.

    There are two links. Gathers and reductions over the shard axis use the inner link. Collectives over the outer axis
    of a mesh with two axes use the outer link: the refresh of compute copies, and the second part of reductions. If the
    ranks of the shard axis are on several nodes, gathers among the few ranks of a node use a third link. All links run
    at the same time.

    Attributes:
        latency: seconds of an empty collective on the inner link.
        bandwidth: bytes per second of a rank's inner link.
        forward, backward: seconds of compute per step of each group, summed over its uses, by FQN, sorted.
        gather, reduce: seconds of the gather and of the reduction for groups that do not follow the formula, by FQN,
            sorted.
        streams: whether streams wait for communication, as on a GPU. Otherwise the host waits.
        outer_latency, outer_bandwidth: those of the outer link. Without a bandwidth, collectives over the outer axis
            take no time, except for the groups in `refresh` and `outer_reduce`.
        small_gather: seconds of the gather among a few ranks, for groups whose gather has a link of its own, by FQN,
            sorted.
        refresh, outer_reduce: seconds of the refresh, and of the reduction over the outer axis, for groups that do not
            follow the formula, by FQN, sorted. A reduction over replicas (HSDP) has no formula.

    Raises:
        ShardConfigValueError: a number is negative or not finite, or a bandwidth is 0.
    """

    latency: float
    bandwidth: float
    forward: Seconds
    backward: Seconds
    gather: Seconds = ()
    reduce: Seconds = ()
    streams: bool = False
    outer_latency: float = 0.0
    outer_bandwidth: float | None = None
    small_gather: Seconds = ()
    refresh: Seconds = ()
    outer_reduce: Seconds = ()

    def __post_init__(self) -> None:
        for name in ("latency", "outer_latency"):
            _require_seconds(name, getattr(self, name))
        _require_bandwidth("bandwidth", self.bandwidth)
        if self.outer_bandwidth is not None:
            _require_bandwidth("outer_bandwidth", self.outer_bandwidth)
        for name in _COMPUTE + _COLLECTIVES:
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
        outer_latency: float = 0.0,
        outer_bandwidth: float | None = None,
        small_gather: Mapping[str, float] | None = None,
        refresh: Mapping[str, float] | None = None,
        outer_reduce: Mapping[str, float] | None = None,
    ) -> Costs:
        """Create costs from mappings by FQN. Arguments and errors are those of the class."""

        def by_fqn(each: Mapping[str, float] | None) -> Seconds:
            return tuple(sorted((each or {}).items()))

        parts = by_fqn(forward), by_fqn(backward), by_fqn(gather), by_fqn(reduce)
        outer = by_fqn(small_gather), by_fqn(refresh), by_fqn(outer_reduce)
        return cls(latency, bandwidth, *parts, streams, outer_latency, outer_bandwidth, *outer)

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
        known = {name: dict(getattr(self, name)) for name in _COMPUTE + _COLLECTIVES}
        times = {}
        for fqn, sent in moved.items():
            for name in _COMPUTE:
                if fqn not in known[name]:
                    raise ShardConfigValueError(f"Costs.{name}: has no seconds for group {fqn or ROOT_NAME}")
            formula = {
                "gather": self._sent(sent.gather, sent.ranks),
                "reduce": self._sent(sent.reduce, sent.ranks),
                "small_gather": self._sent(sent.small_gather, sent.few),
                "refresh": self._sent_outside(sent.refresh, sent.outer),
                "outer_reduce": self._sent_outside(sent.outer_reduce, sent.outer),
            }
            seconds = {name: known[name].get(fqn, formula[name]) for name in _COLLECTIVES}
            apart = fqn in known["small_gather"]
            times[fqn] = Times(known["forward"][fqn], known["backward"][fqn], **seconds, apart=apart)
        return times

    def _sent(self, collectives: tuple[int, ...], ranks: int) -> float:
        return _seconds(collectives, ranks, self.latency, self.bandwidth)

    def _sent_outside(self, collectives: tuple[int, ...], ranks: int) -> float:
        if self.outer_bandwidth is None:
            return 0.0
        return _seconds(collectives, ranks, self.outer_latency, self.outer_bandwidth)


def _seconds(collectives: tuple[int, ...], ranks: int, latency: float, bandwidth: float) -> float:
    sent = [nbytes for nbytes in collectives if nbytes] if ranks > 1 else []
    return len(sent) * latency + (ranks - 1) / ranks * sum(sent) / bandwidth


def _require_bandwidth(field: str, value: float) -> None:
    _require_seconds(field, value)
    if value == 0:
        raise ShardConfigValueError(f"Costs.{field}=0: expected bytes per second above 0")


def _require_seconds(field: str, value: float) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ShardConfigValueError(f"Costs.{field}={value!r}: expected a finite number, 0 or more")
