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
HFSDP = "hfsdp"
MOMENTS = 2  # moments of Adam, each as large as the parameters
DISK_MEMORY = 1 << 30  # bytes that a `DiskOffloadPolicy` may use for the part of the state that is in memory


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of ranks: tensor parallelism innermost, then shards, then replicas.

    Attributes:
        tensor, shard, replicas: number of ranks along each dimension. With ``hfsdp``, `replicas` is the outer axis,
            which splits the shards once more.
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
        few: with ``zero3``, the number of consecutive ranks to which weights are resharded after forward, so that
            backward gathers among these; 0 if they are resharded to all ranks.
    """

    name: str
    layout: Layout
    checkpointing: Checkpointing = "none"
    offload: bool = False
    disk: bool = False
    state: bool = False
    few: int = 0

    @property
    def splits_outside(self) -> bool:
        """Whether stored parameters, gradients and optimizer state are split over the outer axis as well."""
        return self.name == HFSDP and self.layout.replicas > 1

    @property
    def offloads(self) -> bool:
        """Whether anything is not on the device."""
        return self.offload or self.state

    def __str__(self) -> str:
        parts = [self.name]
        if self.name in ("hsdp", HFSDP):
            parts = [f"{self.name} {self.layout.replicas}x{self.layout.shard}"]
        parts += [f"few {self.few}"] if self.few else []
        parts += [f"tp {self.layout.tensor}"] if self.layout.tensor > 1 else []
        parts += [f"{self.checkpointing} checkpointing"] if self.checkpointing != "none" else []
        parts += [f"offload{' to disk' if self.disk else ''}"] if self.offload else []
        parts += ["offload of the optimizer"] if self.state else []
        return ", ".join(parts)


def strategy_named(name: str, devices: int, checkpointing: Checkpointing = "none", replicas: int = 2) -> Strategy:
    """Return the strategy with a name for a number of devices.

    Args:
        name: ``none``, ``ddp``, ``zero1``, ``zero2``, ``zero3``, ``hsdp`` or ``hfsdp``.
        devices: number of devices. ``none`` uses one.
        checkpointing: activation checkpointing of its blocks.
        replicas: number of replicas of ``hsdp``, or of ranks of the outer axis of ``hfsdp``.

    Raises:
        ShardConfigValueError: the devices cannot be divided in this way.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ShardConfigValueError(f"devices: {devices!r} is not a number above 0")
    if name in ("hsdp", HFSDP) and (replicas < 1 or devices % replicas):
        raise ShardConfigValueError(f"replicas: {devices} devices cannot be divided evenly into {replicas} replicas")
    layouts = {
        "none": Layout(),
        "ddp": Layout(replicas=devices),
        "hsdp": (between := Layout(shard=devices // max(1, replicas), replicas=replicas)),
        HFSDP: between,
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
        for basic in _basic(devices // ranks, ranks, per_node // ranks):
            for checkpointing in CHECKPOINTING:
                strategy = replace(basic, checkpointing=checkpointing)
                yield strategy
                if basic.name in ("zero3", "hsdp") and not basic.few:
                    yield replace(strategy, state=True)
                    yield replace(strategy, offload=True)
                    if host_memory is not None:
                        yield replace(strategy, offload=True, disk=True)


def _basic(ranks: int, tensor: int, in_node: int) -> Iterator[Strategy]:
    """The strategies for a number of ranks, of which `in_node` share a fast link, without checkpointing and offload."""
    if ranks == 1:
        yield Strategy("none", Layout(tensor))
        yield Strategy("zero3", Layout(tensor))
        return
    yield Strategy("ddp", Layout(tensor, 1, ranks))
    for name in ("zero1", "zero2", "zero3"):
        yield Strategy(name, Layout(tensor, ranks))
    for shard in range(2, ranks):
        if ranks % shard == 0:
            yield Strategy("hsdp", Layout(tensor, shard, ranks // shard))
    if 1 < in_node < ranks and ranks % in_node == 0:  # several whole nodes
        yield Strategy("zero3", Layout(tensor, ranks), few=in_node)
        yield Strategy(HFSDP, Layout(tensor, in_node, ranks // in_node))


def plan_of(base: ShardPlan, strategy: Strategy, machine: Machine) -> ShardPlan | None:
    """Derive the plan of a strategy from the plan of the same model under another strategy."""
    if strategy.name == "none":
        return None
    groups = tuple(_group(group, strategy, machine) for group in base.groups)
    return replace(base, groups=groups, schedule=None, places=())


def _group(group: GroupPlan, strategy: Strategy, machine: Machine) -> GroupPlan:
    shard = strategy.layout.shard
    # A number of ranks applies to the root as well. Without one, the root is not resharded.
    reshards = strategy.name not in _KEEPS_AFTER_FORWARD and (strategy.few > 0 or not group.is_root)
    splits = strategy.splits_outside
    return replace(
        group,
        shard_size=shard,
        reshard_after_forward=reshards,
        route=_route(group, machine) if shard > 1 else None,
        small_size=strategy.few if reshards else 0,
        outer_size=strategy.layout.replicas if splits else 1,
        outer_route=_route(group, machine) if splits else None,
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
    copies: int = 0,
) -> Bytes:
    """The bytes of a device that are always allocated.

    Args:
        strategy: the strategy.
        pool: the pool; None if nothing is sharded.
        shards: the result of `shard_bytes`.
        state: bytes of optimizer state.
        cast: bytes of unsharded parameters in the compute dtype, if there is no plan.
        rounding: bytes that low-precision communication keeps.
        copies: bytes of the node's compute copies.
    """
    parameters = sum(stored for stored, _ in shards.values())
    unsharded, communication = (pool.unsharded, pool.communication + rounding) if pool is not None else (cast, 0)
    if strategy.offload:
        parameters = 0
    if strategy.offloads:
        state = 0
    return Bytes(parameters, state, unsharded=unsharded, communication=communication, copies=copies)


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
    contains the sent and received values instead. If the outer axis splits gradients, the result of the reduction over
    the shard axis and the bucket of the reduction over the outer axis are allocated.
    """
    groups = plan.groups if plan is not None else ()
    nbytes = {each.fqn: _outside_pool(each, strategy, machine) for each in groups}
    passing = {each.fqn: passing_bytes(each, strategy.layout.replicas, machine.streams) for each in groups}
    return Reducing(defaultdict(int, nbytes), defaultdict(int, passing), MAX_REDUCTIONS)


def _outside_pool(group: GroupPlan, strategy: Strategy, machine: Machine) -> int:
    """Bytes that a group's reduction allocates outside the pool until it finishes."""
    replicas = strategy.layout.replicas
    if strategy.splits_outside:
        return _split_bytes(group)
    if nbytes := replica_buffers(group, replicas):
        return nbytes
    adds = machine.backend == "gloo" and replicas > 1 and group.replica_bytes is None
    return replicated_bytes(group) // strategy.layout.shard if adds else 0


def _split_bytes(group: GroupPlan) -> int:
    """Bytes of a reduction that also runs over the outer axis, outside the pool."""
    outer = sum(layout.nbytes + layout.scratch * dtype.itemsize for dtype, layout in group.outer_reduce_layouts)
    return replicated_bytes(group) // group.shard_size + outer


def moved_bytes(plan: ShardPlan | None, strategy: Strategy) -> int:
    """Bytes that a rank sends in a step to other shards and replicas, and over the outer axis."""
    if plan is None:
        return 0
    shard, replicas = strategy.layout.shard, strategy.layout.replicas
    moved = 0.0
    gathers = Counter(action.fqn for action in plan.actions() if action.kind is Kind.UNSHARD)
    for group in plan.groups:
        parts = gathers[group.fqn] * sum(group.moved.gather) + sum(group.moved.reduce)
        moved += parts * (shard - 1) / shard
        moved += (replicas - 1) / replicas * over_outer_axis(group, strategy)
    return int(moved)


def over_outer_axis(group: GroupPlan, strategy: Strategy) -> float:
    """Bytes that a group moves between replicas or, if these are split, in its refresh and in its reduction."""
    if strategy.splits_outside:
        return sum(group.moved.refresh) + sum(group.moved.outer_reduce)
    return between_replicas(group, strategy.layout)


def between_replicas(group: GroupPlan, layout: Layout) -> float:
    """Bytes that a group's reduction over replicas moves: by a ring, or by a low-precision all-gather."""
    sent = group.replica_bytes
    return 2 * replicated_bytes(group) / layout.shard if sent is None else layout.replicas * sent


def replicated_bytes(group: GroupPlan) -> int:
    """Bytes of the gradients of a group in the dtype of their reduction."""
    return sum(parameter.numel * parameter.reduced.itemsize for parameter in group.params if parameter.trains)
