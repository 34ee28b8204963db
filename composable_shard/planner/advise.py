"""Estimate all possible strategies for a model, a number of devices and a network, and recommend one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from .._plan.plan import ShardPlan
from .._policies import AS_IT_IS, CommPolicy
from ..errors import ShardConfigTypeError, ShardConfigValueError
from .checkpointing import CHECKPOINTING
from .linear import LinearFormat
from .machine import KNOWN, Machine
from .memory import Gradients, Memory, memory_of, pool_of
from .precision import Precision, precision_of
from .profile import Profile
from .shape import Shape
from .sources import Source, check_linear, source_of
from .stepping import ADAMW, check_optimizer, is_possible, shown_groups, stepping_of
from .strategies import (
    STAYS,
    Strategy,
    held_bytes,
    moved_bytes,
    off_device,
    plan_of,
    reducing,
    shard_bytes,
    strategies,
)
from .timing import Time, compute_seconds, scales_of, time_of

_CLOSE = 0.05  # relative difference in throughput below which the simpler, then the smaller strategy is recommended
_TIGHT = 0.9  # fraction of the device memory that the recommended strategy should not exceed
_REPLICATED = ("none", "ddp")


@dataclass(frozen=True)
class Estimate:
    """The predicted memory and time of one strategy.

    Attributes:
        strategy: the strategy.
        memory: memory of one device.
        host_bytes: bytes of host memory per device, if parameters or the optimizer state are offloaded.
        disk_bytes: bytes on disk per device, if the optimizer state is on disk.
        disk_moved: bytes that a step reads from disk and writes to it, in total, per device.
        disk_seconds: seconds of this disk traffic. `time.optimizer` is at least this.
        moved: bytes that a rank sends in a step.
        exchanged: the part of `moved` that is sent to the owners of matrices and back.
        time: time of a step.
        tokens_per_second: throughput of all devices together.
        needed: bytes of memory that a device must have.
        short: bytes that are missing on a device; 0 if the strategy fits.
        host_short: bytes that are missing in host memory, per device.
    """

    strategy: Strategy
    memory: Memory
    host_bytes: int
    disk_bytes: int
    disk_moved: int
    disk_seconds: float
    moved: int
    exchanged: int
    time: Time
    tokens_per_second: float
    needed: int
    short: int
    host_short: int

    @property
    def exposed_share(self) -> float:
        """The fraction of a step that is exposed communication between shards and replicas."""
        return self.time.exposed / self.time.seconds

    @property
    def fits(self) -> bool:
        """Whether the memory of the device and of the host suffices."""
        return self.short == 0 and self.host_short == 0


@dataclass(frozen=True)
class Advice:
    """The estimates of all strategies, and a recommendation.

    Attributes:
        model: name of the model.
        machine: the machine.
        devices: number of devices.
        precision: name of the precision.
        tokens: tokens per step, on all devices.
        estimates: the estimates of all strategies. Those that fit come first, the fastest first.
        recommended: the estimate of the recommended strategy; None if no strategy fits.
        reason: the reason for the recommendation or, if no strategy fits, the missing memory.
        optimizer: name of the optimizer.
        comm_policy: the precision in which weights and gradients are sent.
        linear_format: format of the matrix products of linear layers in blocks; None for the compute dtype.
        compile_blocks: whether the blocks are compiled.
        on: estimates the same strategies on another machine, in the same order, without tracing again.
    """

    model: str
    machine: Machine
    devices: int
    precision: str
    tokens: int
    estimates: tuple[Estimate, ...]
    recommended: Estimate | None
    reason: str
    optimizer: str
    on: Callable[[Machine], list[Estimate]] = field(repr=False, compare=False)
    comm_policy: CommPolicy = AS_IT_IS
    linear_format: str | None = None
    compile_blocks: bool = False


def advise(
    model: Shape | str | os.PathLike[str] | Callable[[], Any],
    *,
    devices: int,
    machine: Machine | str = "h100",
    batch: int = 1,
    sequence: int | None = None,
    precision: str = "bfloat16-mixed",
    tensor: Sequence[int] = (1,),
    adapters: int = 0,
    optimizer: str = ADAMW,
    comm_policy: CommPolicy = AS_IT_IS,
    linear_format: str | None = None,
    compile_blocks: bool = False,
) -> Advice:
    """Estimate all strategies for a model and recommend one.

    Nothing is allocated and no device is needed. Activations, activation checkpointing and tensor parallelism are
    measured in a trace of a step with fake tensors. Communication buffers come from the plan that this library would
    follow. Times come from a roofline model of the operators and a simulation of the plan. The formulas are in
    `planner/memory.py` and `planner/timing.py`.

    Args:
        model: one of

            - a `Shape`, its name in `NAMED`, or its text form (`Shape.parse`);
            - the path of a Hugging Face ``config.json``;
            - a function without arguments that makes the model, or its import path ``package.module:function``. It may
              return a pair: the model, and a function that takes the model and a number of sequences and returns the
              loss.
        devices: number of devices.
        machine: a `Machine`, a name in `KNOWN`, or the file that ``measure-links`` wrote. To change a value, call
            ``dataclasses.replace(KNOWN["h100"], memory=40 * 2**30)``. If its `host_memory` is known, offload must fit
            into it, and strategies with the optimizer state on disk are considered.
        batch: sequences per step and device.
        sequence: tokens per sequence. Default: that of the shape. Required if a function makes the model.
        precision: ``float32``, ``bfloat16-mixed`` (parameters, optimizer and reductions in float32),
            ``float16-mixed`` or ``bfloat16``.
        tensor: numbers of ranks of tensor parallelism to consider. Only for shapes.
        adapters: rank of low-rank adapters, if only these train; 0 if all parameters train.
        optimizer: ``adamw`` (fused), ``in_backward`` (AdamW that steps inside backward, `cs.optim.in_backward`), or
            ``owned`` (Muon for the matrices of blocks, stepped by their owners, `cs.optim.owned`; AdamW for all other
            parameters).
        comm_policy: the precision in which every sharding strategy sends weights and gradients.
        linear_format: format of the matrix products of linear layers in blocks: ``float8_tensorwise`` (weights are
            gathered in float8, 1 byte each), ``float8_rowwise``, ``mxfp8`` (both gather in the compute dtype), or None
            for the compute dtype. Layers that do not train, or whose sizes are not multiples of 16, and all layers
            outside of blocks keep the compute dtype. `Machine.flops` must have the rate of the format. Casts count as
            memory accesses (`planner/linear.py`). Not with `adapters` or `tensor`.
        compile_blocks: whether blocks are compiled: operators between matrix products become one kernel, which reads
            and writes each tensor once. Use it with `linear_format`, because eager casts are slow.

    Returns:
        the estimates of all strategies, the recommended one, and the reason.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: an argument is invalid. The message names the argument and what is
            valid.
    """
    chosen = machine_of(machine)
    for name, value in (("devices", devices), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ShardConfigValueError(f"{name}: {value!r} is not a number above 0")
    dtypes = precision_of(precision, linear_format)
    source = source_of(model, sequence, adapters)
    check_optimizer(optimizer, tuple(tensor))
    check_linear(dtypes.linear, max(tensor, default=1), adapters, comm_policy)
    planner = Planner(source, dtypes, batch, optimizer, comm_policy, compile_blocks=compile_blocks)
    known = strategies(devices, chosen.devices_per_node, tuple(tensor), chosen.host_memory)
    possible = list(filter(partial(is_possible, optimizer), known))
    if not possible:
        raise ShardConfigValueError(f"tensor: none of {list(tensor)} divides {devices} devices and fits into a node")
    estimates = [planner.estimate(each, chosen) for each in possible]
    estimates.sort(key=lambda each: (each.short + each.host_short, -each.tokens_per_second))
    recommended, reason = _recommended(estimates, devices, chosen)
    return Advice(
        model=source.name,
        machine=chosen,
        devices=devices,
        precision=precision,
        tokens=batch * devices * source.sequence,
        estimates=tuple(estimates),
        recommended=recommended,
        reason=reason,
        optimizer=optimizer,
        on=lambda other: [planner.estimate(each.strategy, other) for each in estimates],
        comm_policy=comm_policy,
        linear_format=linear_format,
        compile_blocks=compile_blocks,
    )


def machine_of(machine: Machine | str | os.PathLike[str]) -> Machine:
    """Return the machine with a name in `KNOWN`, or read the file that ``measure-links`` wrote.

    Raises:
        ShardConfigTypeError: `machine` is neither a `Machine` nor a name or path.
        ShardConfigValueError: there is no such name or file, or the file has other content.
    """
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, (str, os.PathLike)):
        raise ShardConfigTypeError(f"machine: {machine!r} is a {type(machine).__name__}; give a name or a path")
    name = os.fspath(machine)
    if name in KNOWN:
        return KNOWN[name]
    try:
        return Machine.from_json(Path(name).read_text())
    except OSError:
        raise ShardConfigValueError(
            f"machine: {name!r} is neither a file nor one of {', '.join(KNOWN)}; measure your machine with "
            "`composable-shard measure-links --json FILE`"
        ) from None


def check_rate(form: LinearFormat | None, machine: Machine) -> None:
    """Check that a machine has the rate of a format of linear layers.

    Raises:
        ShardConfigValueError: it does not.
    """
    if form is not None and form.rate not in machine.flops:
        having = [name for name, each in KNOWN.items() if form.rate in each.flops]
        raise ShardConfigValueError(
            f"linear_format: {machine.name} has no rate for {form.name!r}. If it supports the format, add "
            f"{form.rate!r} to Machine.flops, in operations per second; known machines with it: {', '.join(having)}"
        )


class Planner:
    """Estimates strategies. Caches traces and plans."""

    def __init__(
        self,
        source: Source,
        precision: Precision,
        batch: int,
        optimizer: str = ADAMW,
        comm: CommPolicy = AS_IT_IS,
        *,
        compile_blocks: bool = False,
    ) -> None:
        self._source, self._precision, self._batch = source, precision, batch
        self._optimizer, self._comm, self._compiles = optimizer, comm, compile_blocks
        self._profiles: dict[tuple[int, str, bool], Profile] = {}
        self._plans: dict[int, ShardPlan] = {}

    def estimate(self, strategy: Strategy, machine: Machine) -> Estimate:
        """Estimate the memory and the time of a strategy on a machine.

        Raises:
            ShardConfigValueError: the machine has no rate for the format of linear layers.
        """
        check_rate(self._precision.linear, machine)
        layout = strategy.layout
        profile, base = self._profile(strategy), self._base(layout.tensor)
        plan = plan_of(base, strategy, machine)
        shards = shard_bytes(base, plan)
        pool = None if plan is None else pool_of(plan, strategy.name in STAYS)
        rounding = 0 if plan is None else sum(group.rounding_bytes for group in plan.groups)
        stepping = stepping_of(self._optimizer, shown_groups(base, plan), strategy, machine)
        copies = 0 if plan is None else sum(group.copy_bytes for group in plan.groups)
        held = held_bytes(strategy, pool, shards, stepping.state, self._cast(base, plan), rounding, copies)
        by_group = {fqn: 0 if strategy.offload else trained for fqn, (_, trained) in shards.items()}
        gradients = Gradients(by_group, stepping.at_once)
        memory = memory_of(profile, held, pool, gradients, reducing(plan, strategy, machine), stepping.buffer_bytes)
        host, disk = off_device(strategy, shards)
        scales = scales_of(plan, strategy, machine)
        computed = compute_seconds(profile, machine, layout)
        time = time_of(plan, strategy, computed, machine, stepping.seconds + scales.seconds)
        needed = memory.reserved if machine.streams else memory.peak.total
        return Estimate(
            strategy=strategy,
            memory=memory,
            host_bytes=host,
            disk_bytes=disk,
            disk_moved=2 * disk,
            disk_seconds=2 * disk / machine.disk_bandwidth,
            moved=moved_bytes(plan, strategy) + stepping.sent + scales.sent,
            exchanged=stepping.sent,
            time=time,
            tokens_per_second=profile.tokens * layout.shard * layout.replicas / time.seconds,
            needed=needed,
            short=max(0, needed - machine.memory),
            host_short=0 if machine.host_memory is None else max(0, host - machine.host_memory),
        )

    def _cast(self, base: ShardPlan, plan: ShardPlan | None) -> int:
        """Bytes of the copies that autocast makes of unsharded parameters and keeps until the step ends."""
        if plan is not None or self._precision.compute == self._precision.stored:
            return 0
        return sum(p.numel * p.gathered.itemsize for group in base.groups for p in group.params)

    def _profile(self, strategy: Strategy) -> Profile:
        tensor, shards = strategy.layout.tensor, strategy.name != "none"
        # Only weights that are gathered in float8 make a difference between sharded and other models.
        key = tensor, strategy.checkpointing, shards or self._precision.linear is None
        if key not in self._profiles:
            self._profiles[key] = self._source.traced(
                self._precision,
                strategy.checkpointing,
                self._batch * tensor,
                tensor,
                shards=shards,
                compiles=self._compiles,
            )
        return self._profiles[key]

    def _base(self, tensor: int) -> ShardPlan:
        if tensor not in self._plans:
            self._plans[tensor] = self._source.plan(self._precision, tensor, self._comm)
        return self._plans[tensor]


def _recommended(estimates: list[Estimate], devices: int, machine: Machine) -> tuple[Estimate | None, str]:
    fitting = [each for each in estimates if each.fits]
    if not fitting:
        least = estimates[0]
        return None, (
            f"Nothing fits. {least.strategy} comes closest but needs {_lacking(least)}. Use more devices, shorter "
            "sequences or a smaller batch."
        )
    fastest = fitting[0].tokens_per_second
    close = [each for each in fitting if each.tokens_per_second >= (1 - _CLOSE) * fastest]
    loose = _TIGHT * machine.memory
    chosen = min(close, key=lambda each: (each.needed > loose, *_complexity(each.strategy), each.needed))
    return chosen, _reason(chosen, fitting, estimates, devices) + _offload(chosen, fitting, machine)


def _complexity(strategy: Strategy) -> tuple[int, bool, int, int]:
    sharding = _REPLICATED.index(strategy.name) if strategy.name in _REPLICATED else len(_REPLICATED)
    sharding += strategy.splits_outside or strategy.few > 0
    checkpoints = CHECKPOINTING.index(strategy.checkpointing)
    return 2 * strategy.offload + strategy.disk + strategy.state, strategy.layout.tensor > 1, sharding, checkpoints


def _reason(chosen: Estimate, fitting: list[Estimate], estimates: list[Estimate], devices: int) -> str:
    name = chosen.strategy.name
    begin = {
        "none": "Do not shard: the model fits on one device",
        "ddp": "Do not shard parameters, replicate them: the model fits on each device",
    }.get(name, f"Use {chosen.strategy}")
    text = f"{begin}. It needs {_gib(chosen.needed)} per device and reaches {chosen.tokens_per_second:,.0f} tokens/s"
    text += f"; {chosen.exposed_share:.0%} of a step is exposed communication." if devices > 1 else "."
    simpler = [each for each in estimates if _complexity(each.strategy) < _complexity(chosen.strategy)]
    if missing := [each for each in simpler if not each.fits]:
        closest = min(missing, key=lambda each: each.short + each.host_short)
        text += f" {closest.strategy} would be simpler but needs {_lacking(closest, '')}."
    others = [each for each in fitting if each.strategy.name != name]
    if others:
        best = others[0]
        ratio = chosen.tokens_per_second / best.tokens_per_second
        text += f" The best alternative, {best.strategy}, reaches {1 / ratio:.0%} of this throughput."
    return text + _nodes(chosen, estimates) + _exchange(chosen.exchanged)


def _nodes(chosen: Estimate, estimates: list[Estimate]) -> str:
    """Compare ``hfsdp`` with the strategies that replicate over nodes, or gather between nodes."""
    strategy, layout = chosen.strategy, chosen.strategy.layout
    if not strategy.splits_outside:
        return ""
    text = (
        f" {strategy.name} gathers within a node, from compute copies of {_gib(chosen.memory.most.copies)} per device, "
        "which one refresh per step updates between nodes."
    )
    everywhere = replace(layout, shard=layout.shard * layout.replicas, replicas=1)
    replicated, gathered = (
        next((each for each in estimates if each.strategy == other), None)
        for other in (replace(strategy, name="hsdp"), replace(strategy, name="zero3", layout=everywhere))
    )
    if replicated is not None:
        fits = "" if replicated.fits else ", which does not fit"
        text += f" {replicated.strategy} keeps a whole optimizer state in each node and needs "
        text += f"{_gib(replicated.needed)} per device{fits}."
    if gathered is not None:
        text += f" {gathered.strategy} gathers between nodes, which exposes {gathered.exposed_share:.0%} of its step."
    return text


def _offload(chosen: Estimate, fitting: list[Estimate], machine: Machine) -> str:
    """Describe the memory and time that offload needs, and whether another strategy avoids it."""
    if not chosen.strategy.offloads:
        return ""
    text = "" if any(not each.strategy.offloads for each in fitting) else " Without offload nothing fits."
    text += f" Offload needs {_gib(chosen.host_bytes)} of host memory per device"
    text += ", which is assumed to be available (the size is unknown)" if machine.host_memory is None else ""
    if chosen.disk_bytes:
        text += (
            f", and {_gib(chosen.disk_bytes)} on disk. A step reads and writes {_gib(chosen.disk_moved)}, which takes "
            f"{chosen.disk_seconds:.3g} s of its {chosen.time.seconds:.3g} s"
        )
    return f"{text}."


def _exchange(nbytes: int) -> str:
    return f" Of the bytes sent per rank and step, {_gib(nbytes)} go to owners of matrices and back." if nbytes else ""


def _lacking(estimate: Estimate, on: str = " on each device") -> str:
    """Describe the missing memory of a strategy that does not fit."""
    device = [f"{_gib(estimate.short)} more{on}"] if estimate.short else []
    host = [f"{_gib(estimate.host_short)} more host memory per device"] if estimate.host_short else []
    return " and ".join(device + host)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
