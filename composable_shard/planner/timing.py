"""Seconds of a step: compute from a roofline model, communication from the links, and the plan's simulation of both.

An operator takes as long as its operations or its memory accesses, whichever is longer (the roofline of Williams et
al., https://doi.org/10.1145/1498765.1498785). If the host launches operators more slowly than the device computes them,
the launches count. A ring sends ``(ranks - 1) / ranks`` of the bytes over every link
(https://doi.org/10.1016/j.jpdc.2008.09.002).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from .._plan.costs import Costs
from .._plan.group_plan import GroupPlan, ParamPlan
from .._plan.plan import ShardPlan
from .linear import FLOAT8
from .machine import Link, Machine
from .profile import FORWARD, Profile, Segment, Work
from .strategies import Layout, Strategy, between_replicas, replicated_bytes

ADAM_ACCESSES = 7  # reads of parameter, gradient and two moments, writes of all except the gradient
ADAM_ON_DISK = 4  # accesses on disk: two moments, read and written
ADAM_ON_LINK = 2  # copies from the device if Adam steps on the host: shards and gradients; fewer bytes return
SCALE_BYTES = 4  # bytes of the scale of a weight that is gathered in float8
ROUNDED, ADDED = 20, 60  # bytes of memory accesses per element that is gathered, or reduced, in low precision


def ring(machine: Machine, ranks: int, stride: int) -> Link:
    """The effective link of a ring whose consecutive ranks are `stride` ranks apart.

    A ring within a node uses the intra-node link. A ring over several nodes leaves each node once per direction. It is
    split into as many rings as it has ranks in a node, and each of them uses another device's link to other nodes.
    """
    within = max(1, min(ranks, machine.devices_per_node // stride)) if stride < machine.devices_per_node else 1
    nodes = math.ceil(ranks / within)
    if nodes == 1:
        return machine.intra_node
    bandwidth = within * machine.inter_node.bandwidth
    if within > 1:
        bandwidth = min(bandwidth, machine.intra_node.bandwidth)
    latency = (nodes - 1) * machine.inter_node.latency + (machine.intra_node.latency if within > 1 else 0.0)
    return Link(bandwidth, latency)


def sent(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds of a collective of `nbytes`, summed over ranks."""
    return link.latency + (ranks - 1) / ranks * nbytes / link.bandwidth if ranks > 1 and nbytes else 0.0


def compute_seconds(profile: Profile, machine: Machine, layout: Layout) -> dict[tuple[str, str], float]:
    """Seconds by direction and group ("" for the root), without data-parallel communication."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for segment in profile.segments:
        seconds[segment.direction, segment.group] += _seconds(segment, machine, layout)
    return seconds


def _seconds(segment: Segment, machine: Machine, layout: Layout) -> float:
    device = sum(_work_seconds(work, machine, layout) * count for work, count in segment.work.items())
    return max(device, machine.launch * segment.work.total())


def _work_seconds(work: Work, machine: Machine, layout: Layout) -> float:
    if work.sent:
        return sent(ring(machine, layout.tensor, 1), layout.tensor, work.sent)
    return max(work.flops / machine.flops_of(work.dtype), work.nbytes / machine.memory_bandwidth)


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step.

    Attributes:
        seconds: total.
        compute: forward and backward, including communication of tensor parallelism.
        exposed: exposed data-parallel communication.
        optimizer: the optimizer step, and the search for the scales of weights that are gathered in float8.
    """

    seconds: float
    compute: float
    exposed: float
    optimizer: float


def time_of(
    plan: ShardPlan | None,
    strategy: Strategy,
    computed: Mapping[tuple[str, str], float],
    machine: Machine,
    optimizer: float,
) -> Time:
    """Predict the seconds of a step.

    Args:
        plan: the plan; None if nothing is communicated.
        strategy: the strategy of the plan.
        computed: the result of `compute_seconds`.
        machine: the machine.
        optimizer: seconds of the optimizer step and of the search for scales.
    """
    compute = sum(computed.values())
    if plan is None:
        return Time(compute + optimizer, compute, 0.0, optimizer)
    predicted = plan.with_policies(costs=costs_of(plan, strategy, computed, machine)).predicted()
    assert predicted.seconds is not None
    assert predicted.exposed is not None
    return Time(predicted.seconds + optimizer, compute, predicted.exposed, optimizer)


def costs_of(plan: ShardPlan, strategy: Strategy, computed: Mapping[tuple[str, str], float], machine: Machine) -> Costs:
    """The costs for the simulation of a plan.

    Reductions over the outer axis run on a link of their own if that axis leaves the nodes, the shard axis does not,
    and streams wait for communication. Otherwise, they occupy the link of the shard axis. Refreshes always have a link
    of their own.
    """
    layout = strategy.layout
    shards, outer = ring(machine, layout.shard, layout.tensor), outer_ring(machine, layout)
    two_links = machine.streams and has_two_links(machine, layout)
    forward, backward = _by_direction(plan, computed)
    gather, reduce, refresh, outer_reduce = ({group.fqn: 0.0 for group in plan.groups} for _ in range(4))
    for group in plan.groups:
        fqn = group.fqn
        reduce[fqn] = sum(sent(shards, layout.shard, nbytes) for nbytes in group.moved.reduce)
        (outer_reduce if two_links else reduce)[fqn] += outer_reduce_seconds(group, strategy, outer)
        reduce[fqn] += rounding_seconds(group, group.comm_policy.reduce, ADDED, machine)
        gather[fqn] = gather_seconds(group, strategy, machine)
        refresh[fqn] = refresh_seconds(group, outer, machine)
        if strategy.offload:  # gradients are copied to the host
            reduce[fqn] += replicated_bytes(group) / layout.shard / machine.host_link.bandwidth
    return Costs.of(
        latency=shards.latency,
        bandwidth=shards.bandwidth,
        forward=forward,
        backward=backward,
        gather=gather,
        reduce=reduce,
        streams=machine.streams,
        outer_latency=outer.latency,
        outer_bandwidth=outer.bandwidth,
        small_gather=few_seconds(plan, machine, layout.tensor),
        refresh=refresh,
        outer_reduce=outer_reduce,
    )


def _by_direction(
    plan: ShardPlan, computed: Mapping[tuple[str, str], float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the forward and of the backward of each group, by FQN."""
    forward, backward = ({group.fqn: 0.0 for group in plan.groups} for _ in range(2))
    for (direction, fqn), seconds in computed.items():
        (forward if direction == FORWARD else backward)[fqn] += seconds
    return forward, backward


def gather_seconds(group: GroupPlan, strategy: Strategy, machine: Machine) -> float:
    """Seconds of a gather over the shard axis, with its casts, and its copies from the host."""
    layout = strategy.layout
    link = ring(machine, layout.shard, layout.tensor)
    seconds = sum(sent(link, layout.shard, nbytes) for nbytes in group.moved.gather)
    seconds += rounding_seconds(group, group.comm_policy.gather, ROUNDED, machine)
    seconds += cast_bytes(group) / machine.memory_bandwidth
    return seconds + group.shard_bytes / machine.host_link.bandwidth if strategy.offload else seconds


def refresh_seconds(group: GroupPlan, link: Link, machine: Machine) -> float:
    """Seconds of a refresh over the link of the outer axis."""
    seconds = sum(sent(link, group.outer_size, nbytes) for nbytes in group.moved.refresh)
    return seconds + rounding_seconds(group, group.comm_policy.refresh, ROUNDED, machine) / group.shard_size


def few_seconds(plan: ShardPlan, machine: Machine, tensor: int = 1) -> dict[str, float]:
    """Seconds of gathers among a few ranks that are in one node while other gathers leave it, by FQN.

    Args:
        plan: the plan.
        machine: the machine.
        tensor: number of ranks of tensor parallelism. The few ranks are this number of ranks apart.
    """
    seconds = {}
    for group in plan.groups:
        few = group.small_size
        if few and tensor * few <= machine.devices_per_node < tensor * group.shard_size:
            link = ring(machine, few, tensor)
            seconds[group.fqn] = sum(sent(link, few, nbytes) for nbytes in group.moved.small_gather)
    return seconds


def outer_ring(machine: Machine, layout: Layout) -> Link:
    """The effective link of the outer axis: of replicas, or of the ranks that split a node's shards."""
    return ring(machine, layout.replicas, layout.tensor * layout.shard)


def has_two_links(machine: Machine, layout: Layout) -> bool:
    """Whether the shard axis stays in a node and the outer axis leaves it."""
    inner = layout.tensor * layout.shard
    return inner <= machine.devices_per_node < inner * layout.replicas


def outer_reduce_seconds(group: GroupPlan, strategy: Strategy, link: Link) -> float:
    """Seconds of the part of a reduction over the outer axis: an all-reduce, or a reduce-scatter if it splits."""
    replicas = strategy.layout.replicas
    if not strategy.splits_outside:
        return sent(link, replicas, between_replicas(group, strategy.layout))
    return sum(sent(link, replicas, nbytes) for nbytes in group.moved.outer_reduce)


def rounding_seconds(group: GroupPlan, form: str | None, accesses: int, machine: Machine) -> float:
    """Seconds in which a device rounds and decodes values of low-precision communication; 0 if there are none.

    Args:
        group: the group.
        form: the format in which values are sent; None if they are not rounded.
        accesses: bytes of memory accesses per element, summed over ranks.
        machine: the machine.
    """
    if form is None or group.shard_size == 1:
        return 0.0
    return accesses * sum(param.numel for param in group.params) / machine.memory_bandwidth


def cast_bytes(group: GroupPlan) -> float:
    """Bytes of memory accesses in which a rank casts its shards of weights that are gathered in float8."""
    return sum(each.numel * (each.stored.itemsize + FLOAT8.itemsize) for each in in_float8(group)) / group.shard_size


def in_float8(group: GroupPlan) -> list[ParamPlan]:
    """The parameters that are gathered in float8."""
    return [each for each in group.params if each.gathered == FLOAT8]


@dataclass(frozen=True, slots=True)
class Scales:
    """The search for the scales of weights that are gathered in float8, once per step after the optimizer.

    Attributes:
        seconds: seconds in which a rank reads its shards, and of one all-reduce of the largest numbers of all weights.
        sent: bytes that a rank sends.
    """

    seconds: float = 0.0
    sent: int = 0


def scales_of(plan: ShardPlan | None, strategy: Strategy, machine: Machine) -> Scales:
    """Predict the search for the scales of weights that are gathered in float8."""
    shard, groups = strategy.layout.shard, () if plan is None else plan.groups
    weights = [each for group in groups for each in in_float8(group)]
    if not weights:
        return Scales()
    nbytes = 2 * SCALE_BYTES * len(weights)  # an all-reduce sends everything twice
    read = sum(each.numel * each.stored.itemsize for each in weights) / shard
    seconds = read / machine.memory_bandwidth + sent(ring(machine, shard, strategy.layout.tensor), shard, nbytes)
    return Scales(seconds, int(nbytes * (shard - 1) / shard))


def on_links(plan: ShardPlan, machine: Machine) -> ShardPlan:
    """Move a plan with costs to the links of another machine. Compute times stay, and the schedule is made again.

    Ranks of a group count as consecutive ranks. Reductions over replicas are ignored.
    """
    assert plan.costs is not None
    gather, reduce, refresh, outer_reduce = ({group.fqn: 0.0 for group in plan.groups} for _ in range(4))
    for group in plan.groups:
        link, moved = ring(machine, group.shard_size, 1), group.moved
        gather[group.fqn] = sum(sent(link, moved.ranks, nbytes) for nbytes in moved.gather)
        reduce[group.fqn] = sum(sent(link, moved.ranks, nbytes) for nbytes in moved.reduce)
        outer = ring(machine, moved.outer, group.shard_size)
        refresh[group.fqn] = refresh_seconds(group, outer, machine)
        outer_reduce[group.fqn] = sum(sent(outer, moved.outer, nbytes) for nbytes in moved.outer_reduce)
    whole = ring(machine, max((group.shard_size for group in plan.groups), default=1), 1)
    costs = Costs.of(
        latency=whole.latency,
        bandwidth=whole.bandwidth,
        forward=dict(plan.costs.forward),
        backward=dict(plan.costs.backward),
        gather=gather,
        reduce=reduce,
        streams=machine.streams,
        small_gather=few_seconds(plan, machine),
        refresh=refresh,
        outer_reduce=outer_reduce,
    )
    return plan.with_policies(costs=costs)
