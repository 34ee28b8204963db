"""The strategies that the planner compares, and their effect on the plan and on memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .._comm.collectives import ALONE_FROM_BYTES
from .._comm.transports import LARGE_FROM_BYTES
from .._memory.state_on_host import MOST_COPIES
from .._plan.group_plan import GroupPlan
from .._plan.layout import Route
from .._plan.plan import ShardPlan
from .._plan.schedule import MAX_REDUCTIONS, Kind
from ..errors import ShardConfigValueError
from .checkpointing import CHECKPOINTING, Checkpointing
from .machine import Machine
from .memory import Bytes, Pool, Reducing
from .rounding import passing_bytes, replica_buffers

_KEEPS_AFTER_FORWARD = ("ddp", "zero1", "zero2")
STAYS = ("ddp", "zero1")  # parameters stay unsharded until the optimizer step
MOMENTS = 2  # moments of Adam, each as large as the parameters
DISK_MEMORY = 1 << 30  # bytes that a `DiskOffloadPolicy` may use for the part of the state that is in memory


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of ranks: tensor parallelism innermost, then shards, then replicas.

    Attributes:
        tensor, shard, replicas: number of ranks along each dimension.
    """

    tensor: int = 1
    shard: int = 1
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to train.

    Attributes:
        name: the `strategy` argument of `shard_by_class`, `shard_auto` and similar functions, or ``none``.
        layout: layout of the ranks.
        checkpointing: which activations are recomputed: those of whole blocks, or all except attention and every second
            matrix product.
        offload: whether parameters, gradients and optimizer state are in host memory.
        disk: whether the optimizer state is in files instead.
        state: whether only the optimizer state is in host memory.
    """

    name: str
    layout: Layout
    checkpointing: Checkpointing = "none"
    offload: bool = False
    disk: bool = False
    state: bool = False

    @property
    def offloads(self) -> bool:
        """Whether anything is not on the device."""
        return self.offload or self.state

    def __str__(self) -> str:
        parts = [self.name]
        if self.name == "hsdp":
            parts = [f"hsdp {self.layout.replicas}x{self.layout.shard}"]
        parts += [f"tp {self.layout.tensor}"] if self.layout.tensor > 1 else []
        parts += [f"{self.checkpointing} checkpointing"] if self.checkpointing != "none" else []
        parts += [f"offload{' to disk' if self.disk else ''}"] if self.offload else []
        parts += ["offload of the optimizer"] if self.state else []
        return ", ".join(parts)


def strategy_named(name: str, devices: int, checkpointing: Checkpointing = "none", replicas: int = 2) -> Strategy:
    """Return the strategy with a name for a number of devices.

    Args:
        name: ``none``, ``ddp``, ``zero1``, ``zero2``, ``zero3`` or ``hsdp``.
        devices: number of devices. ``none`` uses one.
        checkpointing: activation checkpointing of its blocks.
        replicas: number of replicas of ``hsdp``.

    Raises:
        ShardConfigValueError: the devices cannot be divided in this way.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ShardConfigValueError(f"devices: {devices!r} is not a number above 0")
    if name == "hsdp" and (replicas < 1 or devices % replicas):
        raise ShardConfigValueError(f"replicas: {devices} devices cannot be divided evenly into {replicas} replicas")
    layouts = {
        "none": Layout(),
        "ddp": Layout(replicas=devices),
        "hsdp": Layout(shard=devices // max(1, replicas), replicas=replicas),
    }
    return Strategy(name, layouts.get(name, Layout(shard=devices)), checkpointing)


def strategies(
    devices: int, per_node: int, tensor: tuple[int, ...], host_memory: int | None = None
) -> Iterator[Strategy]:
    """All possible strategies for a number of devices.

    Args:
        devices: total number of devices.
        per_node: number of devices that share a fast link. Tensor parallelism stays within it.
        tensor: numbers of ranks of tensor parallelism to consider.
        host_memory: bytes of host memory per device. If None, it is unknown and no strategy uses the disk.
    """
    for ranks in tensor:
        if devices % ranks or ranks > per_node:
            continue
        for name, layout in _layouts(devices // ranks, ranks):
            for checkpointing in CHECKPOINTING:
                yield Strategy(name, layout, checkpointing)
                if name in ("zero3", "hsdp"):
                    yield Strategy(name, layout, checkpointing, state=True)
                    yield Strategy(name, layout, checkpointing, offload=True)
                    if host_memory is not None:
                        yield Strategy(name, layout, checkpointing, offload=True, disk=True)


def _layouts(ranks: int, tensor: int) -> Iterator[tuple[str, Layout]]:
    if ranks == 1:
        yield "none", Layout(tensor)
        yield "zero3", Layout(tensor)
        return
    yield "ddp", Layout(tensor, 1, ranks)
    for name in ("zero1", "zero2", "zero3"):
        yield name, Layout(tensor, ranks)
    for shard in range(2, ranks):
        if ranks % shard == 0:
            yield "hsdp", Layout(tensor, shard, ranks // shard)


def plan_of(base: ShardPlan, strategy: Strategy, machine: Machine) -> ShardPlan | None:
    """Derive the plan of a strategy from the plan of the same model under another strategy."""
    if strategy.name == "none":
        return None
    groups = tuple(_group(group, strategy, machine) for group in base.groups)
    return replace(base, groups=groups, schedule=None, places=())


def _group(group: GroupPlan, strategy: Strategy, machine: Machine) -> GroupPlan:
    shard = strategy.layout.shard
    return replace(
        group,
        shard_size=shard,
        reshard_after_forward=strategy.name not in _KEEPS_AFTER_FORWARD and not group.is_root,
        route=_route(group, machine) if shard > 1 else None,
        reduces_first=not machine.streams and strategy.layout.replicas == 1,
        frees_queued=machine.streams,
    )


def _route(group: GroupPlan, machine: Machine) -> Route:
    """The route that `TransportCache` would choose with NCCL or gloo."""
    if machine.backend != "gloo":
        return Route("direct", gather_from=0)
    stored = sum(parameter.numel * parameter.stored.itemsize for parameter in group.params)
    if stored >= LARGE_FROM_BYTES:
        return Route("p2p", gather_from=ALONE_FROM_BYTES, sums=True)
    return Route("packed", sums=True)


def shard_bytes(base: ShardPlan, plan: ShardPlan | None) -> dict[str, tuple[int, int]]:
    """By group, the bytes that a rank stores: of all parameters, and of those that train."""
    groups = plan.groups if plan is not None else tuple(replace(each, shard_size=1, route=None) for each in base.groups)
    trained = (replace(each, params=tuple(p for p in each.params if p.trains)) for each in groups)
    return {each.fqn: (each.shard_bytes, part.shard_bytes) for each, part in zip(groups, trained, strict=True)}


def held_bytes(
    strategy: Strategy,
    pool: Pool | None,
    shards: Mapping[str, tuple[int, int]],
    state: int,
    cast: int = 0,
    rounding: int = 0,
) -> Bytes:
    """The bytes of a device that are always allocated.

    Args:
        strategy: the strategy.
        pool: the pool; None if nothing is sharded.
        shards: the result of `shard_bytes`.
        state: bytes of optimizer state.
        cast: bytes of unsharded parameters in the compute dtype, if there is no plan.
        rounding: bytes that low-precision communication keeps.
    """
    parameters = sum(stored for stored, _ in shards.values())
    unsharded, communication = (pool.unsharded, pool.communication + rounding) if pool is not None else (cast, 0)
    if strategy.offload:
        parameters = 0
    if strategy.offloads:
        state = 0
    return Bytes(parameters, state, unsharded=unsharded, communication=communication)


def off_device(strategy: Strategy, shards: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Bytes of a rank's shards, gradients and optimizer state in host memory, and on disk.

    Host memory includes the memory of steps: a part of the state on disk, or copies of shards and gradients.
    """
    if not strategy.offloads:
        return 0, 0
    stored, trained = (sum(each[index] for each in shards.values()) for index in (0, 1))
    moments = MOMENTS * trained
    if strategy.state:
        return moments + min(2 * trained, MOST_COPIES), 0
    return (stored + trained + min(DISK_MEMORY, moments), moments) if strategy.disk else (stored + trained + moments, 0)


def reducing(plan: ShardPlan | None, strategy: Strategy, machine: Machine) -> Reducing:
    """Memory that reductions allocate outside the pool.

    Over replicas, gloo needs scratch memory as large as the reduced gradients. In low precision, the scratch memory
    contains the sent and received values instead.
    """
    groups = plan.groups if plan is not None else ()
    replicas = strategy.layout.replicas
    adds = machine.backend == "gloo" and replicas > 1
    nbytes = {
        each.fqn: replica_buffers(each, replicas)
        or (replicated_bytes(each) // strategy.layout.shard if adds and each.replica_bytes is None else 0)
        for each in groups
    }
    passing = {each.fqn: passing_bytes(each, replicas, machine.streams) for each in groups}
    return Reducing(defaultdict(int, nbytes), defaultdict(int, passing), MAX_REDUCTIONS)


def moved_bytes(plan: ShardPlan | None, strategy: Strategy) -> int:
    """Bytes that a rank sends in a step to other shards and replicas."""
    if plan is None:
        return 0
    shard, replicas = strategy.layout.shard, strategy.layout.replicas
    moved = 0.0
    gathers = Counter(action.fqn for action in plan.actions() if action.kind is Kind.UNSHARD)
    for group in plan.groups:
        parts = gathers[group.fqn] * sum(group.moved.gather) + sum(group.moved.reduce)
        moved += parts * (shard - 1) / shard
        moved += (replicas - 1) / replicas * between_replicas(group, strategy.layout)
    return int(moved)


def between_replicas(group: GroupPlan, layout: Layout) -> float:
    """Bytes that a group's reduction over replicas moves: by a ring, or by a low-precision all-gather."""
    sent = group.replica_bytes
    return 2 * replicated_bytes(group) / layout.shard if sent is None else layout.replicas * sent


def replicated_bytes(group: GroupPlan) -> int:
    """Bytes of the gradients of a group in the dtype of their reduction."""
    return sum(parameter.numel * parameter.reduced.itemsize for parameter in group.params if parameter.trains)
