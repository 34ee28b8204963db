"""The model of a network: the duration of a collective, and its start and finish on a shared link. Only numbers.

    t = latency + (N - 1) / N * bytes / bandwidth      an all-gather or reduce-scatter among N ranks
    s_i = max(issue_i, f_(i-1)),  f_i = s_i + t_i      start and finish of the i-th collective of a link

This is the cost of a ring in the alpha-beta model (Hockney 1994; Thakur, Rabenseifner, Gropp 2005). The latency covers
all hops of the ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ShardConfigTypeError, ShardConfigValueError

# For each collective among N ranks: how many times its latency and its transfer count, and whether each rank keeps its
# own 1/N of the data, which is then not transferred.
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
    """A link that the collectives of some groups share.

    Attributes:
        name: for logs.
        latency_s: seconds that a collective takes independently of its size.
        bandwidth_Bps: bytes per second that a rank sends while it receives the same number.
    """

    name: str
    latency_s: float
    bandwidth_Bps: float  # noqa: N815 - a unit

    def seconds(self, kind: str, nbytes: int, ranks: int) -> float:
        """Seconds from the start to the finish of a collective.

        Args:
            kind: `all_gather`, `reduce_scatter`, ...
            nbytes: bytes of the full tensor: the output of a gather, the input of a scatter or reduction.
            ranks: number of ranks of the group; with one rank nothing takes time.
        """
        if ranks == 1:
            return 0.0
        times, own_stays = _COSTS[kind]
        moved = nbytes * (ranks - 1) / ranks if own_stays else nbytes
        return times * (self.latency_s + moved / self.bandwidth_Bps)


class Timeline:
    """The schedule of a link: it runs one collective at a time, in the order of issue."""

    def __init__(self) -> None:
        self.free_s = -math.inf

    def put(self, issue_s: float, seconds: float) -> tuple[float, float]:
        """Queue a collective that is issued at `issue_s` and takes `seconds`. Returns its start and finish."""
        start = max(issue_s, self.free_s)
        self.free_s = start + seconds
        return start, self.free_s


@dataclass(frozen=True)
class Network:
    """All ranks and the links between them.

    Attributes:
        world_size: number of ranks.
        intra: link of groups inside a node; of all groups if `ranks_per_node` is None.
        ranks_per_node: ranks 0 to `ranks_per_node - 1` are the first node, and so on; None without nodes.
        inter: link of groups that span nodes; None without nodes.
    """

    world_size: int
    intra: Link
    ranks_per_node: int | None = None
    inter: Link | None = None

    def link_of(self, ranks: list[int]) -> Link:
        """The link of a group of these ranks."""
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
    """Check the arguments and create a network.

    Raises:
        ShardConfigTypeError: an argument is not a number.
        ShardConfigValueError: a number is not positive and finite, `ranks_per_node` does not divide the world size, or
            `ranks_per_node` is given without the latency and bandwidth between nodes, or these without it.
    """
    _check_count("world_size", world_size)
    _check_figure("latency_s", latency_s, "seconds")
    _check_figure("bandwidth_Bps", bandwidth_Bps, "bytes per second")
    given = {"inter_latency_s": inter_latency_s, "inter_bandwidth_Bps": inter_bandwidth_Bps}
    if ranks_per_node is None:
        for name, value in given.items():
            if value is not None:
                raise ShardConfigValueError(f"{name}: applies to groups that span nodes; pass ranks_per_node too")
        return Network(world_size, Link("all", latency_s, bandwidth_Bps))
    _check_count("ranks_per_node", ranks_per_node)
    if world_size % ranks_per_node:
        raise ShardConfigValueError(f"ranks_per_node: {ranks_per_node} does not divide world_size {world_size}")
    if inter_latency_s is None or inter_bandwidth_Bps is None:
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise ShardConfigValueError(f"{missing}: required with ranks_per_node, for groups that span nodes")
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
