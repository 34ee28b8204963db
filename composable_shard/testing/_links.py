"""The model of a network: how long a collective takes on a link, and when a shared link gets to it. Numbers only.

    t = latency + (N - 1) / N * bytes / bandwidth      an all-gather or reduce-scatter among N ranks
    s_i = max(issue_i, f_(i-1)),  f_i = s_i + t_i      the i-th collective that is issued on a link

It is the cost of a ring, the usual alpha-beta model (Hockney 1994; Thakur, Rabenseifner, Gropp 2005) with all hops of
the ring in one latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._errors import ShardConfigTypeError, ShardConfigValueError

# By kind of collective: how often latency and transfer are paid, and whether each rank keeps its own N-th at home.
_COSTS = {
    "all_gather": (1, True),
    "reduce_scatter": (1, True),
    "all_reduce": (2, True),
    "all_to_all": (1, True),
    "gather": (1, True),
    "scatter": (1, True),
    "broadcast": (1, False),
    "reduce": (1, False),
    "send": (1, False),
    "recv": (1, False),
    "barrier": (1, False),
}


@dataclass(frozen=True)
class Link:
    """What the collectives of some groups share.

    Attributes:
        name: to show.
        latency_s: seconds that a collective takes whatever its size.
        bandwidth_Bps: bytes per second that a rank sends while it receives as many.
    """

    name: str
    latency_s: float
    bandwidth_Bps: float  # noqa: N815 - a unit

    def seconds(self, kind: str, nbytes: int, ranks: int) -> float:
        """How long a collective takes once it has begun.

        Args:
            kind: `all_gather`, `reduce_scatter`, ...
            nbytes: bytes of the whole: of the gathered tensor, of the one to be scattered, of the one to be reduced.
            ranks: of the group; among one rank nothing moves and nothing takes time.
        """
        if ranks == 1:
            return 0.0
        times, own_stays = _COSTS[kind]
        moved = nbytes * (ranks - 1) / ranks if own_stays else nbytes
        return times * (self.latency_s + moved / self.bandwidth_Bps)


class Timeline:
    """When a link gets to what is issued on it: one after the other, in the order of issue."""

    def __init__(self) -> None:
        self.free_s = -math.inf

    def put(self, issue_s: float, seconds: float) -> tuple[float, float]:
        """Start and finish of something that is issued at a time and takes so long."""
        start = max(issue_s, self.free_s)
        self.free_s = start + seconds
        return start, self.free_s


@dataclass(frozen=True)
class Network:
    """All ranks and the links between them.

    Attributes:
        world_size: ranks.
        intra: serves groups inside a node; all groups, if nothing is said of nodes.
        ranks_per_node: ranks 0 to `ranks_per_node - 1` are the first node, and so on; None if nothing is said of nodes.
        inter: serves groups that span nodes.
    """

    world_size: int
    intra: Link
    ranks_per_node: int | None = None
    inter: Link | None = None

    def link_of(self, ranks: list[int]) -> Link:
        """The link that serves a group of these ranks."""
        if self.inter is None or self.ranks_per_node is None:
            return self.intra
        return self.intra if len({rank // self.ranks_per_node for rank in ranks}) == 1 else self.inter


def network(
    world_size: int,
    latency_s: float,
    bandwidth_Bps: float,  # noqa: N803 - a unit
    ranks_per_node: int | None = None,
    inter_latency_s: float | None = None,
    inter_bandwidth_Bps: float | None = None,  # noqa: N803
) -> Network:
    """A network, its figures checked.

    Raises:
        ShardConfigTypeError: a figure is no number.
        ShardConfigValueError: it is not positive and finite; the nodes do not divide the world, or lack their figures.
    """
    _check_count("world_size", world_size)
    _check_figure("latency_s", latency_s, "seconds")
    _check_figure("bandwidth_Bps", bandwidth_Bps, "bytes per second")
    given = {"inter_latency_s": inter_latency_s, "inter_bandwidth_Bps": inter_bandwidth_Bps}
    if ranks_per_node is None:
        for name, value in given.items():
            if value is not None:
                raise ShardConfigValueError(f"{name}: is of groups that span nodes; say ranks_per_node too")
        return Network(world_size, Link("all", latency_s, bandwidth_Bps))
    _check_count("ranks_per_node", ranks_per_node)
    if world_size % ranks_per_node:
        raise ShardConfigValueError(f"ranks_per_node: {ranks_per_node} does not divide world_size {world_size}")
    if inter_latency_s is None or inter_bandwidth_Bps is None:
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise ShardConfigValueError(f"{missing}: needed beside ranks_per_node, for groups that span nodes")
    _check_figure("inter_latency_s", inter_latency_s, "seconds")
    _check_figure("inter_bandwidth_Bps", inter_bandwidth_Bps, "bytes per second")
    intra = Link("intra", latency_s, bandwidth_Bps)
    return Network(world_size, intra, ranks_per_node, Link("inter", inter_latency_s, inter_bandwidth_Bps))


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ShardConfigTypeError(f"{name}: expected a number of ranks, got {type(value).__name__} {value!r}")
    if value < 1:
        raise ShardConfigValueError(f"{name}: must be at least 1, got {value}")


def _check_figure(name: str, value: object, unit: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ShardConfigTypeError(f"{name}: expected {unit}, got {type(value).__name__} {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ShardConfigValueError(f"{name}: must be positive and finite {unit}, got {value}")
