"""What a sharded module knows of itself."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from .._comm.collectives import Transports
from .._comm.lanes import Lane, lane_for
from .._comm.mesh import MeshInfo
from .._comm.transports import TransportCache
from .._engine.engine import Engine
from .._engine.node import Outputs, Use
from .._engine.order import Order
from .._errors import ShardConfigStateError, ShardConfigValueError
from .._graph.traced import TracedGroup
from .._group.group import ParamGroup
from .._group.param import ShardedParam
from .._plan.layout import piece_numel
from .._plan.plan import ShardPlan
from .._policies import PoolPolicy, PrefetchPolicy, Settings
from .._torch.core import (
    apart_from_checkpoints,
    current_backward,
    has_memory,
    is_transforming,
    modes_in_force,
    with_side_effects,
)
from .entries import ModuleEntries

STATE = "_shard_state"  # where a module keeps it
PLACE = "_shard_place"  # ... and which module it is of those of its call


@dataclass(frozen=True)
class Declaration:
    """What a call of `fully_shard` asked for, for the parameters on one mesh.

    Attributes:
        modules: how many modules the call was given; more than one for a list.
        params: the sharded parameters, tied ones once.
        info: the mesh.
        small: the mesh of the few ranks among which weights stay cut between forward and backward, if that is wanted.
        settings: the options, which setters may replace.
        label: tells a group from the first of the same call: the axes of its mesh; empty for the first.
    """

    modules: int
    params: tuple[ShardedParam, ...]
    info: MeshInfo
    settings: Settings
    small: MeshInfo | None = None
    label: str = ""

    def piece_bytes(self) -> list[int]:
        """Bytes of what a rank sends of each parameter, padding included."""
        options, world = self.settings.current, self.info.shard_size
        return [piece_numel(p.shape, world, p.dim) * p.compute_dtype(options).itemsize for p in self.params]

    def transports(self, made: TransportCache) -> Transports:
        """What moves its parameters and gradients now."""
        fake = not all(has_memory(param.local) for param in self.params)
        return made.of(self.info, self.settings.current, self.piece_bytes(), self.small, fake)


@dataclass(frozen=True)
class Asked:
    """What users have asked of the plan of a root: policies, or a plan to follow.

    Attributes:
        schedule: text of what graphs follow before policies (see `_overlap.GraphSchedule`).
    """

    prefetch: PrefetchPolicy | None = None
    pool: PoolPolicy | None = None
    plan: ShardPlan | None = None
    schedule: str = ""

    def for_graphs(self) -> tuple[str, int | None, int | None, str]:
        """Prefetch policy, budget, and what goes before them, as constants, for what Dynamo traces."""
        prefetch, pool = self.prefetch, self.pool
        if pool is None and self.plan is not None:
            pool = self.plan.pool
        kind, amount = ("depth", 1) if prefetch is None else (prefetch.kind, prefetch.amount)
        return kind, amount, None if pool is None else pool.budget, self.schedule

    def applied(self, plan: ShardPlan) -> ShardPlan:
        """A plan of the same groups that does so.

        Raises:
            PoolBudgetError: a group does not fit into the budget.
            ShardConfigValueError: the plan to follow is of another model.
        """
        if (given := self.plan) is not None:
            given.check(plan)
            plan = replace(given, groups=plan.groups, places=(), phase=plan.phase)
        return plan if (self.prefetch, self.pool) == (None, None) else plan.with_policies(self.prefetch, self.pool)


@dataclass(frozen=True)
class Bound:
    """A module's part in an engine.

    Attributes:
        group: None where the call found no parameter to shard.
        is_root: whether it is the root's own, or one of its list.
        root: the engine's root module, weakly.
    """

    engine: Engine
    group: ParamGroup | None
    is_root: bool
    root: weakref.ref[nn.Module]


class Way(Enum):
    """How a call of a sharded module runs."""

    EAGER = 0  # by the engine
    TRACED = 1  # the graph gathers and reduces
    AROUND = 2  # by the engine, around a module whose forward is compiled


EAGER, TRACED, _ = Way  # asked for in every call: to look a member up in its enumeration takes long


class ShardState:
    """The state of the modules of one call of `fully_shard`; a list shares one.

    Parameters that the call puts on other meshes than its own have states of their own, which the first one leads.

    Attributes:
        others: those of the parameters on other meshes.
        way: how the call that runs now does.
        open_calls: of each call that runs, what its forward was given, if a backward may follow.
        calls: how many eager calls of its modules run that lead to torch's own.
        lists: on the root, once it is known: the states below that several modules share.
        asked: what users want of the plan, if this is the root's.
        left: while Dynamo traces a list: its modules that have not run yet, by their place in it.
        traced: the group as traced code sees it.
        lanes: of gathers and of reductions, if several roots share theirs.
    """

    def __init__(self, declaration: Declaration, entries: ModuleEntries) -> None:
        self.declaration = declaration
        self.entries = entries
        self.others: tuple[ShardState, ...] = ()
        self.traced = TracedGroup(declaration.params, declaration.info, declaration.settings)
        self.bound: Bound | None = None
        self.open_calls: list[tuple[Use, Outputs] | None] = []
        self._to_run: set[int] = set()
        self.lanes: tuple[Lane, Lane] | None = None  # those of other roots, to be shared
        self.way = Way.EAGER
        self.calls = 0
        self.asked = Asked()
        self.lists: tuple[ShardState, ...] = ()
        self.left: set[int] = set()
        self._for_root: dict[str, Any] = {}
        self._prefetch: dict[bool, list[ShardState]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardState:
        """The state of a copied module: parameters and entries of its own, no engine yet."""
        asked = self.declaration
        params, settings = copy.deepcopy(asked.params, memo), Settings(asked.settings.current)
        made = memo[id(self)] = ShardState(
            replace(asked, params=params, settings=settings),
            copy.deepcopy(self.entries, memo),
        )
        made.others = copy.deepcopy(self.others, memo)
        made.asked = replace(self.asked, schedule="")  # which its own engine will tell
        made._prefetch = copy.deepcopy(self._prefetch, memo)
        return made

    @property
    def family(self) -> Iterator[ShardState]:
        """This and the others of the same call."""
        yield self
        yield from self.others

    @property
    def groups(self) -> list[ParamGroup]:
        """The groups of the family, once the root is known."""
        return [each.bound.group for each in self.family if each.bound is not None and each.bound.group is not None]

    def bind(self, bound: Bound) -> None:
        """The engine is there: this module's part in it, and what users have set before."""
        self.bound = bound
        if bound.is_root:
            self.set_for_root(**self._for_root)

    def set_for_root(self, **settings: Any) -> None:
        """Set attributes of the engine, or of the engine to come, if this module will be its root."""
        self._for_root |= settings
        if self.bound is not None:
            for name, value in settings.items():
                setattr(self.bound.engine, name, value)

    def ask(self, **wanted: Any) -> None:
        """Ask for a policy, or for a plan to follow, of the engine of which this module is the root, or will be.

        Raises:
            ShardConfigStateError: it is not the root.
            PoolBudgetError, ShardConfigValueError: that cannot be; what was asked for before stays in force.
        """
        if self.bound is None:
            self.asked = replace(self.asked, **wanted)
            return
        if not self.bound.is_root:
            raise ShardConfigStateError("plans and policies are the root's; set them on the outermost sharded module")
        asked = replace(self.asked, **wanted)
        engine = self.bound.engine
        plan, before, self.asked = asked.applied(engine.order.plan), self.asked, asked
        try:
            engine.learning.asked(plan, given=wanted.get("plan") is not None)
        except ValueError:
            self.asked = before
            raise

    def set_prefetch(self, backward: bool, states: list[ShardState]) -> None:
        """What to gather when this module's forward, or backward, begins."""
        before, self._prefetch = self._prefetch, {**self._prefetch, backward: states}
        try:
            self.link_prefetch()
        except ShardConfigValueError:
            self._prefetch = before
            raise
        if self.bound is not None:
            self.bound.engine.order.lists_changed()

    def prefetched(self, backward: bool) -> Sequence[ShardState] | None:
        """What `set_prefetch` was given last; None if it was never called."""
        return self._prefetch.get(backward)

    def link_prefetch(self) -> None:
        """Tell the engine; all states must be bound, or else it is too early."""
        if self.bound is None:
            return
        for backward, states in self._prefetch.items():
            for state in states:
                if state.bound is None or state.bound.engine is not self.bound.engine:
                    names = ", ".join(param.fqn for param in state.declaration.params)
                    raise ShardConfigValueError(
                        f"modules to prefetch: the one with {names or 'no parameters'} is not below the same root; "
                        "list modules of one model"
                    )
            groups = [group for state in states for group in state.groups]
            for index, own in enumerate(self.groups):
                self.bound.engine.order.gather_ahead(own, backward, [] if index else groups)

    def order_changed(self, order: Order) -> None:
        """This is the root: let graphs know what the order of its engine says."""
        asked = self.asked
        follows_plan = order.plan.costs is not None or (asked.plan is not None and asked.prefetch is None)
        text = order.for_graphs(follows_plan).to_text()
        if text != asked.schedule:
            self.asked = replace(asked, schedule=text)

    def comms_changed(self) -> None:
        """Users have put other communication in the place of ours."""
        if self.bound is None or self.bound.group is None:
            return
        self.release()
        if self.bound.group.running:
            raise ShardConfigStateError(f"group {self.bound.group.name}: its communication cannot change while it runs")
        self.bound.group.rebuild(self.declaration.transports(TransportCache()))

    # ---- while Dynamo traces

    def begin_traced(self, module: nn.Module) -> None:
        """A module of the call is about to run. A list gathers when the first of its modules does."""
        for each in self.family:
            each._begin_traced()

    def _begin_traced(self) -> None:
        if not self.declaration.params:
            return
        if self.declaration.modules > 1:
            if self.left:
                return
            self.left = set(range(self.declaration.modules))
        weights = self.traced.unshard(self.entries)
        with_side_effects(partial(self.entries.show, weights, traced=True))

    def end_traced(self, module: nn.Module) -> None:
        """It has run."""
        for each in self.family:
            each.left.discard(module.__dict__[PLACE])
            if not each.left:
                with_side_effects(partial(each.entries.hide, traced=True))

    def finish_traced(self) -> None:
        """The root has run: end what waits for modules of a list that did not run."""
        for state in self.lists:
            state.left.clear()
            state.entries.hide(traced=True)

    # ---- eager

    def begin(self, module: nn.Module) -> None:
        """A module of the call is about to run."""
        if self.others or modes_in_force() or is_transforming():
            self._begin_family(module)
        else:
            self._begin(module)

    @apart_from_checkpoints
    def _begin_family(self, module: nn.Module) -> None:
        for each in self.family:
            each._begin(module)

    def _begin(self, module: nn.Module) -> None:
        assert self.bound is not None
        group = self.bound.group
        if group is None:
            return
        if not group.running and self.open_calls:
            self.open_calls.clear()  # of a forward in which some of a list did not run, or that was interrupted
        if self.declaration.modules > 1:
            if current_backward() >= 0:
                self._to_run = {module.__dict__[PLACE]}  # a recomputation may run any of the list alone
            elif group.running:
                return  # an earlier module of the list has begun for all of them
            else:
                self._to_run = set(range(self.declaration.modules))
        self.entries.check_kept()
        self.open_calls.append(self.bound.engine.before_forward(group))

    def end(self, module: nn.Module, copied: Sequence[torch.Tensor]) -> Sequence[tuple[Use, Outputs]]:
        """It has run; of its outputs, these were views of weights.

        Returns:
            the uses whose backward will pass through its outputs.
        """
        if self.others or modes_in_force() or is_transforming():
            return self._end_family(module, copied)
        own = self._end(module, copied)
        return () if own is None else (own,)

    @apart_from_checkpoints
    def _end_family(self, module: nn.Module, copied: Sequence[torch.Tensor]) -> list[tuple[Use, Outputs]]:
        ended = [each._end(module, copied) for each in reversed(list(self.family))]  # the last one to begin first
        return [found for found in reversed(ended) if found is not None]

    def _end(self, module: nn.Module, copied: Sequence[torch.Tensor]) -> tuple[Use, Outputs] | None:
        assert self.bound is not None
        if self.bound.group is None or not self.open_calls:
            return None
        found = self.open_calls[-1]
        if self._to_run:
            self._to_run.discard(module.__dict__[PLACE])
        if not self._to_run:
            self.open_calls.pop()
            self.bound.engine.after_forward(self.bound.group, copied)
        return found

    @apart_from_checkpoints
    def abort(self, depth: int) -> None:
        """A module of the call has failed: end what it has begun.

        Args:
            depth: how many calls of it ran around the one that failed.
        """
        for each in self.family:
            assert each.bound is not None
            while each.bound.group is not None and len(each.open_calls) > (
                depth if each.declaration.modules == 1 else 0
            ):
                each.open_calls.pop()
                each.bound.engine.after_forward(each.bound.group)

    def overwritten(self) -> None:
        """The sharded parameters are about to be loaded: no graph may ask for the old ones."""
        self.release()
        for group in self.groups:
            group.stepped()

    def show_sharded(self) -> None:
        """Let the modules have their sharded parameters, unless a forward runs; the unsharded ones stay in memory."""
        if not any(group.running for group in self.groups):
            self.entries.hide()

    def release(self) -> None:
        """Give the unsharded parameters up, so that the modules have the sharded ones."""
        for group in self.groups:
            assert self.bound is not None
            self.bound.engine.reshard(group)


def share_lanes(states: Sequence[ShardState]) -> None:
    """Let the engines of these roots queue their work on the same streams.

    Raises:
        ShardConfigStateError: one of them has an engine already.
    """
    if any(state.bound is not None for state in states):
        raise ShardConfigStateError("modules: one of them has run; share before the first forward")
    if states:
        device = states[0].declaration.info.device
        lanes = states[0].lanes or (lane_for(device), lane_for(device))
        for state in states:
            state.lanes = lanes


def state_of(module: nn.Module) -> ShardState | None:
    """The state of a sharded module, None of others."""
    return module.__dict__.get(STATE)


def named_states(root: nn.Module) -> Iterator[tuple[list[str], ShardState]]:
    """Every state at or below `root`, with the names of its modules, in the order of the modules."""
    names: dict[ShardState, list[str]] = {}
    for name, module in root.named_modules():
        state = state_of(module)
        for each in state.family if state is not None else ():
            names.setdefault(each, []).append(name)
    for state, found in names.items():
        yield found, state
