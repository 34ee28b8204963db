"""Inspect a sharded model: its plan, how its execution differs from the plan, its memory use, figures for loggers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .._engine.engine import Engine
from .._engine.out_of_memory import MemoryUsers, explain
from .._group.optimizers import note_optimizer
from .._plan.course import COMPUTE, WAITS
from .._plan.drift import drift as drift_of
from .._plan.plan import ShardPlan
from .._plan.record import own_seconds
from .._plan.schedule import Action, Kind
from ..errors import ShardConfigValueError
from .build import declared_plan
from .module import FSDPModule
from .state import ShardState, states_below


def engines_of(model: nn.Module) -> list[Engine]:
    """The engines at or below a model; several if the model contains several roots."""
    bound = [state.bound for state in states_below(model)]
    return list(dict.fromkeys(each.engine for each in bound if each is not None))


def sharded_states(model: nn.Module) -> list[ShardState]:
    """The states of the sharded modules at or below a model; at least one.

    Raises:
        ShardConfigValueError: the model contains no sharded module.
    """
    states = states_below(model)
    if not states:
        raise ShardConfigValueError(f"model: {type(model).__name__} contains no sharded module; call fully_shard first")
    return states


def make_plan(model: nn.Module) -> ShardPlan:
    """The plan of a sharded model: the one that it follows if it has run, else the one that it will start with.

    This runs nothing, and parameters may be on the meta device. After the first forward, the plan contains the order in
    which modules ran, and the measured times if `PrefetchPolicy.auto` has measured them.

    Raises:
        ShardConfigValueError: the model contains no sharded module.
    """
    sharded_states(model)
    engines = engines_of(model)
    return engines[0].order.placed() if engines else declared_plan(model)


def drift(model: nn.Module) -> tuple[str, ...]:
    """How the last iteration of a sharded model differed from its plan: one line per difference, by group.

    The plan describes a training step in which every group runs once. Other iterations (validation, accumulation)
    differ from it.

    Args:
        model: a sharded model.

    Returns:
        The differences; empty if there are none.
    """
    return tuple(
        text
        for engine in engines_of(model)
        if (record := engine.last_record) is not None
        for text in drift_of(engine.order.plan, record)
    )


def watch(model: nn.Module, on: bool = True) -> None:
    """Switch the recording of times (`Record.spans`) on or off; it costs a few microseconds per module.

    It can be called before the first forward. On an accelerator these are host times: when work is issued, not when it
    runs.

    Raises:
        ShardConfigValueError: the model contains no sharded module.
    """
    states = sharded_states(model)
    for engine in engines_of(model):
        engine.watched = on
    for state in states:
        if state.bound is None:
            state.set_for_root(watched=on)


def living_roots() -> list[nn.Module]:
    """All sharded modules of this process that are not inside another one, in the order in which they were sharded."""
    sharded: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), FSDPModule)]
    nested = {id(child) for module in sharded for child in module.modules() if child is not module}
    return [each for each in sharded if id(each) not in nested]


def empty_pool(model: nn.Module) -> int:
    """Free the pool's unused memory, for a phase in which the model does not train.

    Returns:
        number of bytes that were freed.
    """
    before = sum(engine.pool.held_bytes for engine in engines_of(model))
    for engine in engines_of(model):
        engine.converted(engine.groups)
    return before - sum(engine.pool.held_bytes for engine in engines_of(model))


@contextlib.contextmanager
def explain_out_of_memory(model: nn.Module, *optimizers: Optimizer) -> Iterator[None]:
    """Add a note to an out-of-memory error in the body: memory use by category on this rank, and remedies.

    Use it around a step, or decorate a function with it. Without an error it costs one walk over the modules. An error
    in an eager forward, a gather or a reduction of a sharded model gets the note in any case. No error gets it twice.

        with cs.explain_out_of_memory(model, optimizer):
            loss_of(model, batch).backward()
            optimizer.step()

    The note lists the bytes of:

    - sharded parameters
    - their gradients
    - the state of optimizers
    - the pool, which holds unsharded parameters and communication buffers: held, in use, and at its peak
    - everything else, mostly activations, but also parameters that are not sharded: the allocator's total minus all of
      the above (not on a CPU, which has no such total)

    Remedies follow, the largest saving first.

    Args:
        model: a sharded model.
        optimizers: optimizers whose state to count. Optimizers that have stepped are counted in any case.

    Raises:
        ShardConfigValueError: the model contains no sharded module.
    """
    sharded_states(model)
    for optimizer in optimizers:
        note_optimizer(optimizer)
    try:
        yield
    except Exception as error:
        explain(error, [MemoryUsers(each.groups, each.pool, each.order.plan) for each in engines_of(model)])
        raise


def stats(model: nn.Module) -> dict[str, float]:
    """Figures of a sharded model for loggers, as a flat dict; empty before the first forward.

    If the model has several engines, the figures are sums over them.

    Keys:
        ``pool/live_bytes``, ``pool/peak_bytes``, ``pool/held_bytes``: bytes leased now, the peak of leased bytes, and
        bytes held.
        ``pool/arena_bytes``, ``pool/allocations``, ``pool/fallbacks``: bytes of the arena; number of allocations;
        number of leases for which the arena had no slot.
        ``plan/peak_bytes``, ``plan/replans``: the predicted peak; how often a new plan was made.
        ``plan/order_drifts``, ``plan/bytes_drifts``, ``plan/time_drifts``: how often the execution differed from the
        plan: in order (compared at each forward), in bytes (when a new peak is reached) and, with
        `PrefetchPolicy.auto`, in times (when steps are measured again).
        ``graphs/captures``, ``graphs/replays``, ``graphs/eager_steps``: what the functions of `make_graphed_step` have
        done, if there are any. Replays change no other figure.
        ``copies/bytes``, ``step/refreshes``: with `outer_sharding`, bytes of the compute copies, and how many groups
        refreshed theirs in the last iteration.
        ``step/unshards``, ``step/reductions``: number of gathers and reductions in the last iteration.
        ``step/exposed_ms``, ``step/compute_ms``, ``step/communication_share``: for the last iteration, while `watch` is
        on: exposed communication; compute; exposed communication divided by the sum of both.
    """
    return figures_of(engines_of(model))


def _refreshes(engine: Engine, actions: Sequence[Action]) -> dict[str, int]:
    """The figures about compute copies; empty without `outer_sharding`."""
    copies = [group.layout.copies for group in engine.groups if group.layout.copies is not None]
    if not copies:
        return {}
    nbytes = sum(tensor.nbytes for each in copies for tensor in each.tensors())
    return {"copies/bytes": nbytes, "step/refreshes": sum(action.kind is Kind.REFRESH for action in actions)}


def figures_of(engines: Sequence[Engine]) -> dict[str, float]:
    """The figures of `stats`."""
    figures: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        figures[name] = figures.get(name, 0.0) + float(value)

    for engine in engines:
        pool, record = engine.pool, engine.last_record
        pool.collect()
        for name in ("live_bytes", "peak_bytes", "held_bytes", "arena_bytes", "allocations"):
            add(f"pool/{name}", getattr(pool, name))
        add("pool/fallbacks", sum(pool.fallbacks.values()))
        add("plan/peak_bytes", engine.order.plan.peak_bytes)
        add("plan/replans", engine.review.replans)
        for kind, count in engine.review.drifts.items():
            add(f"plan/{kind}_drifts", count)
        for kind, count in engine.capturing.counts.items() if any(engine.capturing.counts.values()) else ():
            add(f"graphs/{kind}", count)
        actions = () if record is None else record.actions
        add("step/unshards", sum(action.kind is Kind.UNSHARD for action in actions))
        add("step/reductions", sum(action.kind is Kind.REDUCE for action in actions))
        for name, value in _refreshes(engine, actions).items():
            add(name, value)
        if record is not None and record.spans:
            own = own_seconds(record.spans)
            for name, kinds in (("exposed_ms", WAITS), ("compute_ms", COMPUTE)):
                add(f"step/{name}", 1e3 * sum(seconds for (kind, _), seconds in own.items() if kind in kinds))
    if "step/exposed_ms" in figures:
        whole = figures["step/exposed_ms"] + figures["step/compute_ms"]
        figures["step/communication_share"] = figures["step/exposed_ms"] / whole if whole else 0.0
    return figures
