"""State, communication and step time of optimizers: AdamW, AdamW inside backward, and Muon at owners of matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .._plan.group_plan import GroupPlan, ParamPlan
from .._plan.layout import ParamLayout, bucket_layout
from .._plan.plan import ShardPlan
from ..errors import ShardConfigValueError
from ..optim._forecast import Forecast, Sharded, forecast
from .machine import Machine
from .strategies import MOMENTS, Layout, Strategy
from .timing import ADAM_ACCESSES, ADAM_ON_DISK, ADAM_ON_LINK, ring

ADAMW, IN_BACKWARD, OWNED = "adamw", "in_backward", "owned"
OPTIMIZERS = (ADAMW, IN_BACKWARD, OWNED)
_MUON_ACCESSES = 6  # reads of value, gradient and momentum, writes of value and momentum, and the update
_NEWTON_SCHULZ = 5  # number of Newton-Schulz iterations of Muon


def check_optimizer(optimizer: str, tensor: tuple[int, ...] = (1,)) -> None:
    """Check that an optimizer can be planned.

    Raises:
        ShardConfigValueError: there is no such optimizer, or `owned` is combined with tensor parallelism.
    """
    if optimizer not in OPTIMIZERS:
        raise ShardConfigValueError(f"optimizer: {optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
    if optimizer == OWNED and max(tensor) > 1:
        raise ShardConfigValueError(
            "optimizer: 'owned' cannot be planned with tensor parallelism, which also shards matrices; leave `tensor` "
            "at 1, or use 'adamw'"
        )


def is_possible(optimizer: str, strategy: Strategy) -> bool:
    """Whether an optimizer can be planned with a strategy. Only AdamW's state can be stored apart from the shards."""
    if optimizer == OWNED and strategy.splits_outside:
        return False
    return optimizer == ADAMW or not (strategy.disk or strategy.state or (strategy.offload and optimizer == OWNED))


@dataclass(frozen=True, slots=True)
class Stepping:
    """The memory and time of an optimizer under a strategy.

    Attributes:
        state: bytes of optimizer state on the rank with the most.
        at_once: whether only the gradients of one group are live at a time.
        buffer_bytes: largest number of bytes of buffers in its step.
        sent: bytes that the rank that sends the most sends in its step.
        seconds: seconds of its step.
    """

    state: int
    at_once: bool
    buffer_bytes: int
    sent: int
    seconds: float


def stepping_of(optimizer: str, groups: tuple[GroupPlan, ...], strategy: Strategy, machine: Machine) -> Stepping:
    """Predict memory and time of an optimizer for the parameters of groups that are sharded by a strategy."""
    world = max([group.shard_size for group in groups], default=1)
    taken = dict(_matrices(groups)) if optimizer == OWNED else {}
    others = sum(
        replace(group, params=tuple(p for p in group.params if p.trains and p.fqn not in taken)).shard_bytes
        for group in groups
    )
    seconds = _adam_seconds(others, strategy, machine)
    if not taken:
        return Stepping(MOMENTS * others, optimizer == IN_BACKWARD, 0, 0, seconds)
    ahead = forecast_of(taken, world)
    state = MOMENTS * others + max(ahead.owned_bytes)
    seconds += _owned_seconds(ahead, strategy.layout, machine)
    return Stepping(state, False, max(ahead.buffer_bytes), max(ahead.sent), seconds)


def forecast_of(params: Mapping[str, ParamPlan], world: int) -> Forecast:
    """Predict what `owned` does with parameters of a plan."""
    return forecast({name: Sharded(p.shape, p.stored, _layout_of(p, world).chunk) for name, p in params.items()}, world)


def _matrices(groups: tuple[GroupPlan, ...]) -> Iterator[tuple[str, ParamPlan]]:
    """The matrices of blocks, and stacks of matrices, for Muon. Embeddings and heads are in the root and excluded."""
    for group in groups:
        for param in () if group.is_root else group.params:
            if param.trains and len(param.shape) in (2, 3):
                yield param.fqn, param


def _layout_of(param: ParamPlan, world: int) -> ParamLayout:
    return bucket_layout([param.shape], world, dims=[param.dim], rows=[param.rows]).params[0]


def _adam_seconds(trained: int, strategy: Strategy, machine: Machine) -> float:
    bandwidth = machine.host_memory_bandwidth if strategy.offloads else machine.memory_bandwidth
    seconds = ADAM_ACCESSES * trained / bandwidth
    if strategy.state:  # during the step, shards and gradients are copied to the host, and shards back
        return max(seconds, ADAM_ON_LINK * trained / machine.host_link.bandwidth)
    # During the step, both moments are read from disk and written to it.
    return max(seconds, ADAM_ON_DISK * trained / machine.disk_bandwidth) if strategy.disk else seconds


def _owned_seconds(ahead: Forecast, layout: Layout, machine: Machine) -> float:
    """Seconds of a step of `owned`.

    Buckets are sent while other buckets are stepped. The longer of the two counts, plus one bucket of the shorter.
    """
    steps = [
        _MUON_ACCESSES * nbytes / machine.memory_bandwidth
        + sum(map(_newton_schulz, shapes)) / machine.flops_of("bfloat16")
        for nbytes, shapes in zip(ahead.owned_bytes, ahead.owned, strict=True)
    ]
    if not ahead.buckets:
        return max(steps)
    link = ring(machine, layout.shard, layout.tensor)
    journeys = 2 * ahead.buckets * link.latency + max(ahead.sent) / link.bandwidth
    return max(max(steps), journeys) + min(max(steps), journeys) / ahead.buckets


def _newton_schulz(shape: tuple[int, ...]) -> float:
    """Floating-point operations of Muon's iterations for X (m, n): X X', (X X')², and a product of these with X."""
    if len(shape) < 2:
        return 0.0
    short, long = sorted(shape[-2:])
    return float(_NEWTON_SCHULZ * (4 * short * short * long + 2 * short**3))


def shown_groups(base: ShardPlan, plan: ShardPlan | None) -> tuple[GroupPlan, ...]:
    """The groups whose shards an optimizer steps. Without a plan, they are on one rank each."""
    if plan is not None:
        return plan.groups
    return tuple(replace(group, shard_size=1, route=None) for group in base.groups)
