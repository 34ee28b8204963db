"""What a sharded model is doing: its plan, where it left it, its memory, and figures for loggers."""

from __future__ import annotations

from torch import nn

from ._engine.engine import Engine
from ._errors import ShardConfigValueError
from ._module.build import declared_plan
from ._module.state import states_below
from ._plan.drift import drift as drift_of
from ._plan.plan import ShardPlan
from ._plan.record import own_seconds
from ._plan.schedule import Kind

_WAITING = (Kind.WAIT, Kind.REDUCED)
_COMPUTE = (Kind.FORWARD, Kind.BACKWARD)


def _engines(model: nn.Module) -> list[Engine]:
    """The engines at or below a model; several if it holds roots that run by themselves."""
    bound = [state.bound for state in states_below(model)]
    return list(dict.fromkeys(each.engine for each in bound if each is not None))


def current_plan(model: nn.Module) -> ShardPlan:
    """The plan that a sharded model follows now; before its first forward, the one that it will begin with."""
    engines = _engines(model)
    return engines[0].order.placed() if engines else declared_plan(model)


def drift(model: nn.Module) -> tuple[str, ...]:
    """What the last iteration did otherwise than the plan says, a statement each, by group; none if it kept to it.

    The plan is of a training step in which every group runs once: other iterations (validation, accumulation) differ.
    """
    return tuple(
        text
        for engine in _engines(model)
        if (record := engine.last_record) is not None
        for text in drift_of(engine.order.plan, record)
    )


def drift_log(model: nn.Module) -> tuple[str, ...]:
    """What the engine has noticed to differ from the plan so far, a statement each, by group; the last of them.

    Orders are compared at each forward, bytes when more are live than ever before, and times, under
    `PrefetchPolicy.auto`, when steps are measured again. `stats` counts them.
    """
    return tuple(line for engine in _engines(model) for line in engine.review.log.lines)


def watch(model: nn.Module, on: bool = True) -> None:
    """Have a sharded model note when it does what (`Record.spans`), or no longer; costs some microseconds a module.

    Before the first forward, too. On an accelerator the times are the host's: of issuing, not of running.

    Raises:
        ShardConfigValueError: the model holds no sharded module.
    """
    states = states_below(model)
    if not states:
        raise ShardConfigValueError(f"model: {type(model).__name__} holds no sharded module; call fully_shard first")
    for engine in _engines(model):
        engine.watched = on
    for state in states:
        if state.bound is None:
            state.set_for_root(watched=on)


def empty_pool(model: nn.Module) -> int:
    """Give the memory of the pool back that nobody uses, for a phase in which the model does not train.

    Returns:
        bytes that were given back.
    """
    before = sum(engine.pool.held_bytes for engine in _engines(model))
    for engine in _engines(model):
        engine.converted(engine.groups)
    return before - sum(engine.pool.held_bytes for engine in _engines(model))


def stats(model: nn.Module) -> dict[str, float]:
    """Figures of a sharded model for loggers, flat; none before its first forward. `model.stats()` is the same,
    unless the module has something of that name itself.

    Sums over the engines where it has several.

    Keys:
        ``pool/live_bytes``, ``pool/peak_bytes``, ``pool/held_bytes``: leased now, at most so far, and held in all.
        ``pool/arena_bytes``, ``pool/allocations``, ``pool/fallbacks``: of the arena; how often memory was asked for;
        leases for which the arena had no slot.
        ``plan/peak_bytes``, ``plan/replans``: what the plan predicts; how often it was made anew.
        ``plan/order_drifts``, ``plan/bytes_drifts``, ``plan/time_drifts``: how often what happened was seen to differ
        from the plan; see `drift_log`.
        ``step/unshards``, ``step/reductions``: gathers and reductions of the last iteration.
        ``step/exposed_ms``, ``step/compute_ms``, ``step/communication_share``: of the last iteration, while `watch` is
        on: waiting for gathers and reductions; compute; waiting over both.
    """
    figures: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        figures[name] = figures.get(name, 0.0) + float(value)

    for engine in _engines(model):
        pool, record = engine.pool, engine.last_record
        pool.reclaim()
        for name in ("live_bytes", "peak_bytes", "held_bytes", "arena_bytes", "allocations"):
            add(f"pool/{name}", getattr(pool, name))
        add("pool/fallbacks", sum(pool.fallbacks.values()))
        add("plan/peak_bytes", engine.order.plan.peak_bytes)
        add("plan/replans", engine.review.replans)
        for kind, count in engine.review.log.counts.items():
            add(f"plan/{kind}_drifts", count)
        actions = () if record is None else record.actions
        add("step/unshards", sum(action.kind is Kind.UNSHARD for action in actions))
        add("step/reductions", sum(action.kind is Kind.REDUCE for action in actions))
        if record is not None and record.spans:
            own = own_seconds(record.spans)
            for name, kinds in (("exposed_ms", _WAITING), ("compute_ms", _COMPUTE)):
                add(f"step/{name}", 1e3 * sum(seconds for (kind, _), seconds in own.items() if kind in kinds))
    if "step/exposed_ms" in figures:
        whole = figures["step/exposed_ms"] + figures["step/compute_ms"]
        figures["step/communication_share"] = figures["step/exposed_ms"] / whole if whole else 0.0
    return figures
