"""What a sharded module knows of itself, and how the engine is made of all that a root's modules know."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ._collectives import Transport, Transports, transport_for
from ._engine import Engine
from ._entries import ModuleEntries
from ._errors import ShardConfigStateError
from ._group import ParamGroup, Runtime, describe
from ._mesh import MeshInfo
from ._node import Outputs, Use
from ._param import ShardedParam
from ._plan import GroupPlan, ShardPlan
from ._policies import Comms, Options, Settings
from ._pool import BufferPool
from ._streams import Lane, lane_for
from ._torch import apart_from_checkpoints, current_backward, with_side_effects
from ._traced import TracedGroup

STATE = "_shard_state"  # where a module keeps it
PLACE = "_shard_place"  # ... and which module it is of those of its call


@dataclass(frozen=True)
class Declaration:
    """What a call of `fully_shard` asked for.

    Attributes:
        modules: how many modules the call was given; more than one for a list.
        params: the sharded parameters, tied ones once.
        info: the mesh.
        small: the mesh of the few ranks among which weights stay cut between forward and backward, if that is wanted.
        settings: the options, which setters may replace.
    """

    modules: int
    params: tuple[ShardedParam, ...]
    info: MeshInfo
    settings: Settings
    small: MeshInfo | None = None


@dataclass(frozen=True)
class Bound:
    """A module's part in an engine; `group` is None where the call found no parameter to shard."""

    engine: Engine
    group: ParamGroup | None
    is_root: bool


class Way(Enum):
    """How a call of a sharded module runs."""

    EAGER = 0  # by the engine
    TRACED = 1  # the graph gathers and reduces
    AROUND = 2  # by the engine, around a module whose forward is compiled


class ShardState:
    """The state of the modules of one call of `fully_shard`; a list shares one.

    Attributes:
        way: how the call that runs now does.
        lists: on the root, once it is known: the states below that several modules share.
    """

    def __init__(self, declaration: Declaration, entries: ModuleEntries) -> None:
        self.declaration = declaration
        self.entries = entries
        self.traced = TracedGroup(declaration.params, declaration.info, declaration.settings)
        self.bound: Bound | None = None
        self._found: list[tuple[Use, Outputs] | None] = []
        self._to_run: set[int] = set()
        self.lanes: tuple[Lane, Lane] | None = None  # those of other roots, to be shared
        self.way = Way.EAGER
        self.lists: tuple[ShardState, ...] = ()
        self.left: set[int] = set()
        self._for_root: dict[str, Any] = {}
        self._prefetch: dict[bool, list[ShardState]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardState:
        """The state of a copied module: parameters and entries of its own, no engine yet."""
        asked = self.declaration
        params, settings = copy.deepcopy(asked.params, memo), Settings(asked.settings.current)
        made = memo[id(self)] = ShardState(
            Declaration(asked.modules, params, asked.info, settings, asked.small), copy.deepcopy(self.entries, memo)
        )
        made._prefetch = copy.deepcopy(self._prefetch, memo)
        return made

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

    def set_prefetch(self, backward: bool, states: list[ShardState]) -> None:
        """What to gather when this module's forward, or backward, begins."""
        self._prefetch[backward] = states
        self.link_prefetch()

    def link_prefetch(self) -> None:
        """Tell the engine; all states must be bound, or else it is too early."""
        if self.bound is None or self.bound.group is None:
            return
        for backward, states in self._prefetch.items():
            groups = [
                state.bound.group for state in states if state.bound is not None and state.bound.group is not None
            ]
            self.bound.engine.order.explicit[backward, self.bound.group] = groups

    def comms_changed(self) -> None:
        """Users have put other communication in the place of ours."""
        if self.bound is None or self.bound.group is None:
            return
        self.release()
        if self.bound.group.running:
            raise ShardConfigStateError(f"group {self.bound.group.name}: its communication cannot change while it runs")
        asked = self.declaration
        self.bound.group.rebuild(_TransportCache().of(asked.info, asked.settings.current, asked.small))

    def begin_traced(self, module: nn.Module) -> None:
        """`begin`, while Dynamo traces. A list gathers when the first of its modules runs."""
        if not self.declaration.params:
            return
        if self.declaration.modules > 1:
            if self.left:
                return
            self.left = set(range(self.declaration.modules))
        weights = self.traced.unshard(self.entries)
        with_side_effects(partial(self.entries.show, weights))

    def end_traced(self, module: nn.Module) -> None:
        """`end`, while Dynamo traces."""
        self.left.discard(module.__dict__[PLACE])
        if not self.left:
            with_side_effects(self.entries.hide)

    def finish_traced(self) -> None:
        """The root has run: end what waits for modules of a list that did not run."""
        for state in self.lists:
            state.left.clear()
            state.entries.hide()

    @apart_from_checkpoints
    def begin(self, module: nn.Module) -> None:
        """A module of the call is about to run."""
        assert self.bound is not None
        group = self.bound.group
        if group is None:
            return
        if self.declaration.modules > 1 and current_backward() < 0:
            if group.running:
                return  # an earlier module of the list has begun for all of them
            self._to_run = set(range(self.declaration.modules))
            self._found.clear()  # of a forward in which some of the list did not run
        else:
            self._to_run = {module.__dict__[PLACE]}  # a recomputation may run any of the list alone
        self._found.append(self.bound.engine.before_forward(group, self.entries))

    @apart_from_checkpoints
    def end(self, module: nn.Module, copied: Sequence[torch.Tensor]) -> tuple[Use, Outputs] | None:
        """It has run; of its outputs, these were views of weights.

        Returns:
            the use whose backward will pass through its outputs, if there is one.
        """
        assert self.bound is not None
        if self.bound.group is None or not self._found:
            return None
        found = self._found[-1]
        self._to_run.discard(module.__dict__[PLACE])
        if not self._to_run:
            self._found.pop()
            self.bound.engine.after_forward(self.bound.group, copied)
        return found

    @apart_from_checkpoints
    def abort(self) -> None:
        """A module of the call has failed."""
        assert self.bound is not None
        if self.bound.group is not None and self._found:
            self._found.pop()
            self.bound.engine.after_forward(self.bound.group)

    def overwritten(self) -> None:
        """The sharded parameters are about to be loaded: no graph may ask for the old ones."""
        self.release()
        if self.bound is not None and self.bound.group is not None:
            self.bound.group.stepped()

    def release(self) -> None:
        """Give the unsharded parameters up, so that the modules have the sharded ones."""
        if self.bound is not None and self.bound.group is not None:
            self.bound.engine.reshard(self.bound.group)


def share_lanes(states: Sequence[ShardState]) -> None:
    """Let the engines of these roots queue their work on the same streams.

    Raises:
        ShardConfigStateError: one of them has an engine already.
    """
    if any(state.bound is not None for state in states):
        raise ShardConfigStateError("modules: one of them has run; share before the first forward")
    if states:
        device = states[0].declaration.info.device
        lanes = lane_for(device), lane_for(device)
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
        if state is not None:
            names.setdefault(state, []).append(name)
    for state, found in names.items():
        yield found, state


class _TransportCache:
    """The transports of each process group, made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[dist.ProcessGroup, Comms | None], Transport] = {}

    def of(self, info: MeshInfo, options: Options, small: MeshInfo | None = None) -> Transports:
        """Transports of the shard axis and of the replicate axis; None where an axis has one rank only."""
        comms = options.comms
        custom = comms if comms.all_gather is not None or comms.reduce_scatter is not None else None
        shards = info.shard_size > 1
        group = info.replicate_group
        return Transports(
            gather=self._get(info.shard_group, info, custom) if shards else None,
            reduce=self._get(comms.reduce_group or info.shard_group, info, custom) if shards else None,
            replicate=self._get(group, info) if group is not None and info.replicate_size > 1 else None,
            small=None if small is None else self._get(small.shard_group, small),
        )

    def _get(self, group: dist.ProcessGroup, info: MeshInfo, comms: Comms | None = None) -> Transport:
        key = group, comms
        if key not in self._made:
            self._made[key] = (
                transport_for(group, info.device) if comms is None else transport_for(group, info.device, comms)
            )
        return self._made[key]


def _set_fqns(root: nn.Module) -> None:
    first = {id(p): name for name, p in reversed(list(root.named_parameters(remove_duplicate=False)))}
    for _, state in named_states(root):
        for param in state.declaration.params:
            param.fqn = first.get(id(param.sharded), param.fqn)


def _groups_of(root: nn.Module) -> list[tuple[str, ShardState]]:
    return [(", ".join(names), state) for names, state in named_states(root) if state.declaration.params]


def declared_plan(root: nn.Module) -> ShardPlan:
    """The plan of a root that has not run: groups in the order of their modules. Meta parameters will do."""
    _set_fqns(root)
    transports = _TransportCache()
    own = state_of(root)
    plans: list[GroupPlan] = []
    for fqn, state in _groups_of(root):
        asked = state.declaration
        options = asked.settings.current
        plans.append(describe(fqn, asked.params, asked.info, options, state is own, transports.of(asked.info, options)))
    return ShardPlan(tuple(plans), tuple(plan.fqn for plan in plans))


def _check_ready(root: nn.Module, found: Sequence[tuple[list[str], ShardState]]) -> None:
    own = state_of(root)
    if own is not None and own.declaration.modules > 1:
        names = ", ".join(next(names for names, state in found if state is own)) or type(root).__name__
        raise ShardConfigStateError(
            f"modules of one list ({names}) cannot be the root; call fully_shard on the module that contains them too"
        )
    for listed, state in found:
        if state.bound is not None and state.bound.engine.has_run:
            raise ShardConfigStateError(
                f"{', '.join(listed) or type(root).__name__}: has already run as a root of its own, and now runs "
                f"inside of {type(root).__name__}; run the outermost sharded module first"
            )


def _check_materialised(found: Sequence[tuple[list[str], ShardState]]) -> None:
    meta = [p.fqn for _, state in found for p in state.declaration.params if p.sharded.is_meta]
    if meta:
        raise ShardConfigStateError(
            f"parameters still on the meta device: {', '.join(meta)}; call model.to_empty(device=...), then initialise "
            "or load them, before the first forward"
        )


def _check_offloaded(found: Sequence[tuple[list[str], ShardState]]) -> None:
    offloaded = [p for _, state in found if state.declaration.info.offloads for p in state.declaration.params]
    moved = [p.fqn for p in offloaded if p.local.device.type not in ("cpu", "meta")]
    if moved:
        raise ShardConfigStateError(
            f"offloaded parameters that are not on the CPU: {', '.join(moved)}; load them there or move them back"
        )


def build_engine(root: nn.Module) -> Engine:
    """Make the engine of a root out of the declarations at and below it.

    Raises:
        ShardConfigStateError: a list as root; a module below that has run as a root; parameters on the meta device.
    """
    found = list(named_states(root))
    _check_ready(root, found)
    for _, state in found:
        state.release()  # unsharded before the root was known
        state.entries.keep_lists(root)
        state.entries.adopt()
    plan = declared_plan(root)
    _check_materialised(found)
    _check_offloaded(found)
    device = found[0][1].declaration.info.device
    own = state_of(root)
    gather_lane, reduce_lane = (own.lanes if own is not None else None) or (lane_for(device), lane_for(device))
    runtime = Runtime(BufferPool(device, gather_lane), gather_lane, reduce_lane)
    transports = _TransportCache()
    groups: dict[ShardState, ParamGroup] = {}
    for fqn, state in _groups_of(root):
        asked = state.declaration
        groups[state] = ParamGroup(
            fqn,
            asked.params,
            asked.info,
            asked.settings,
            state is own,
            transports.of(asked.info, asked.settings.current, asked.small),
            runtime,
            asked.small,
        )
    engine = Engine([(group, state.entries) for state, group in groups.items()], plan, runtime)
    for _, state in found:
        state.traced.bind(groups.get(state), is_root=state is own)
        state.bind(Bound(engine, groups.get(state), state is own))
    for _, state in found:
        state.link_prefetch()
    if own is not None:
        own.lists = tuple(state for names, state in found if len(names) > 1)
    return engine
