"""The state of sharded modules: their declaration, their part in an engine, and their running forwards."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from .._comm.collectives import Transports
from .._comm.lanes import Lane, lane_for
from .._comm.mesh import MeshInfo
from .._comm.rounding import Rounding
from .._comm.transports import TransportCache
from .._engine.engine import Engine
from .._engine.node import Outputs, Use
from .._engine.order import Order
from .._graph.traced import TracedGroup
from .._group.extension import warn_of_old_state
from .._group.group import ParamGroup
from .._group.param import ShardedParam
from .._plan.layout import piece_numel
from .._plan.plan import ShardPlan
from .._policies import PoolPolicy, PrefetchPolicy, Settings
from .._torch.core import (
    ContainerCopy,
    apart_from_checkpoints,
    current_backward,
    has_memory,
    is_transforming,
    modes_in_force,
    with_side_effects,
)
from ..errors import ShardConfigStateError, ShardConfigValueError
from .entries import ModuleEntries

STATE = "_shard_state"  # key in a module's `__dict__`: its `ShardState`
PLACE = "_shard_place"  # ... and its index among the modules of its call of `fully_shard`


@dataclass(frozen=True)
class Declaration:
    """The arguments of a call of `fully_shard`, for the parameters on one mesh.

    Attributes:
        modules: number of modules that the call was given; more than one for a list.
        params: the sharded parameters, tied ones once.
        info: the mesh.
        settings: the options, which setters may replace.
        small: the mesh of the ranks over which the weights stay sharded between forward and backward, if
            `reshard_after_forward` is an int.
        label: the axes of the mesh, which distinguish this group from the call's first group; empty for the first.
        number: text that identifies the call among the calls with this mesh, the same on all ranks: "0", "1", ...; the
            copies of a module add their own numbers, such as "1.2".
        copies: the numbers of its copies.
        rounding: how its gradients are rounded if they are communicated in fewer bits.
    """

    modules: int
    params: tuple[ShardedParam, ...]
    info: MeshInfo
    settings: Settings
    small: MeshInfo | None = None
    label: str = ""
    number: str = ""
    copies: list[str] = field(default_factory=list, compare=False)
    rounding: Rounding = field(default_factory=Rounding, compare=False)

    def transports(self, made: TransportCache) -> Transports:
        """The transports that the current options select for the parameters and gradients."""
        fake = not all(has_memory(param.local) for param in self.params)
        options, world = self.settings.current, self.info.shard_size
        pieces = [piece_numel(p.shape, world, p.dim, p.rows) * p.compute_dtype(options).itemsize for p in self.params]
        return made.of(self.info, options, pieces, self.small, fake)


@dataclass(frozen=True)
class Asked:
    """What the plan of a root must follow.

    Attributes:
        prefetch, pool: the user's policies; None if not set.
        plan: the plan that a user has set; None if there is none.
        schedule: text of the `GraphSchedule` that graphs follow. Unlike the others, it is set by the engine and not by
            a user (`ShardState.order_changed`). It is here because graphs are traced again if this object changes.
    """

    prefetch: PrefetchPolicy | None = None
    pool: PoolPolicy | None = None
    plan: ShardPlan | None = None
    schedule: str = ""

    def applied(self, plan: ShardPlan) -> ShardPlan:
        """The plan, changed to follow these policies or the plan that was set.

        Raises:
            PoolBudgetError: a group does not fit into the budget.
            ShardConfigValueError: the plan to follow belongs to another model.
        """
        if (given := self.plan) is not None:
            given.check(plan)
            plan = replace(given, groups=plan.groups, places=(), phase=plan.phase)
        return plan if (self.prefetch, self.pool) == (None, None) else plan.with_policies(self.prefetch, self.pool)


@dataclass(frozen=True)
class Bound:
    """A module's part in an engine.

    Attributes:
        engine: the engine.
        group: the group of its parameters; None if the call found no parameter to shard.
        is_root: whether the module is the root.
        root: weak reference to the engine's root module.
    """

    engine: Engine
    group: ParamGroup | None
    is_root: bool
    root: weakref.ref[nn.Module]


class Way(Enum):
    """How a call of a sharded module runs."""

    EAGER = 0  # the engine gathers and reduces
    TRACED = 1  # Dynamo traces: the graph gathers and reduces
    AROUND = 2  # the engine gathers and reduces, outside of the module's compiled forward


EAGER, TRACED, _ = Way  # compared in every call, and the lookup of `Way.EAGER` is slow


class ShardState:
    """The state of the modules of one call of `fully_shard`. The modules of a list share one state.

    If the call shards parameters over several meshes, there is one state per mesh. The modules refer to the first one,
    which forwards everything to the others.

    Attributes:
        declaration: the arguments of the call.
        entries: the entries in which the modules look up the parameters.
        others: on the first state, the states of the other meshes.
        bound: the part in an engine; None until the engine is built.
        inputs_to: the device to which a forward moves its inputs. Only set on the root, on an accelerator.
        way: how the running call runs.
        open_calls: for each running forward, its use and the outputs of its node; None if it made no use, because no
            backward can follow or because a use exists already (see `Engine.before_forward`).
        copies: for each running forward, the containers among its inputs that were copied to cast or move the tensors
            in them; empty as long as no forward has such containers.
        calls: number of running calls that have entered the class's own `__call__`. While there are any, `_call_impl`
            is reached from there and must not begin another forward.
        lists: on the root, once its engine is built: the states of calls of `fully_shard` with a list of modules.
        asked: what the plan of this root must follow.
        left: for a call with a list, while Dynamo traces: the indices of its modules that have not run yet. (`_to_run`
            is the same for eager forwards.)
        traced: the group for traced code.
        compiled_as: number of the compilation whose graph ran last with the module (`graphs_compiled`), or -1.
        lanes: the lanes of gathers and of reductions, if several roots share theirs.
    """

    def __init__(
        self,
        declaration: Declaration,
        entries: ModuleEntries,
        others: tuple[ShardState, ...] = (),
        asked: Asked = Asked(),
    ) -> None:
        self.declaration = declaration
        self.entries = entries
        self.others = others
        self.compiled_as = -1
        self.traced = TracedGroup(declaration.params, declaration.info, declaration.settings)
        self.bound: Bound | None = None
        self.inputs_to: torch.device | None = None
        self.open_calls: list[tuple[Use, Outputs] | None] = []
        self.copies: list[list[ContainerCopy]] = []
        self._to_run: set[int] = set()  # for a call with a list: the indices of modules that have not run yet
        self.lanes: tuple[Lane, Lane] | None = None
        self.way = Way.EAGER
        self.calls = 0
        self._bypassed: weakref.WeakSet[Use] = weakref.WeakSet()
        self.asked = asked
        self.lists: tuple[ShardState, ...] = ()
        self.left: set[int] = set()
        self._for_root: dict[str, Any] = {}
        self._prefetch: dict[bool, list[ShardState]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardState:
        """Copy the state for a copied module, with its own parameters and entries, and no engine yet."""
        params = copy.deepcopy(self.declaration.params, memo)
        own = self.declaration
        number, settings = f"{own.number}.{len(own.copies) + 1}", Settings(own.settings.current)
        own.copies.append(number)
        rounding = Rounding(own.rounding.number)
        declaration = replace(own, params=params, settings=settings, number=number, copies=[], rounding=rounding)
        asked = replace(self.asked, schedule="")  # the copy's engine will set the schedule
        made = memo[id(self)] = ShardState(declaration, ModuleEntries((), params), (), asked)
        # Copying the entries copies modules that refer to this state, so its copy must already be in `memo`.
        made.entries, made.others = copy.deepcopy((self.entries, self.others), memo)
        made._prefetch = copy.deepcopy(self._prefetch, memo)
        return made

    @property
    def family(self) -> Iterator[ShardState]:
        """This state and the others of the same call."""
        yield self
        yield from self.others

    @property
    def groups(self) -> list[ParamGroup]:
        """The groups of the family; none before the engine is built."""
        return [each.bound.group for each in self.family if each.bound is not None and each.bound.group is not None]

    def bind(self, bound: Bound, lists: tuple[ShardState, ...]) -> None:
        """Note the part in a new engine and, on the root, `lists`; apply settings that users have made for the root."""
        self.bound, self.lists = bound, lists
        self.traced.bind(bound.group, bound.is_root, bound.engine.between_graphs)
        device = self.declaration.info.device
        self.inputs_to = device if bound.is_root and device.type not in ("cpu", "meta") else None
        if bound.is_root:
            self.set_for_root(**self._for_root)

    def set_for_root(self, **settings: Any) -> None:
        """Set attributes of the engine now or, before the engine is built, if this module becomes its root."""
        self._for_root |= settings
        if self.bound is not None:
            for name, value in settings.items():
                setattr(self.bound.engine, name, value)

    @property
    def ends_by_hand(self) -> bool:
        """Whether the caller ends each backward of this module, which is a root, as a pipeline does."""
        return bool(self._for_root.get("ends_by_hand"))

    def ask(self, **wanted: Any) -> None:
        """Change `asked`; the engine, if it is built, follows it immediately.

        Raises:
            ShardConfigStateError: this module is not the root; before the engine is built, the root's first forward
                raises it instead.
            PoolBudgetError, ShardConfigValueError: the plan cannot be made; the previous requests stay in effect.
        """
        if self.bound is None:
            self.asked = replace(self.asked, **wanted)
            return
        if not self.bound.is_root:
            raise ShardConfigStateError("plans and policies are for the root; set them on the outermost sharded module")
        asked = replace(self.asked, **wanted)
        engine = self.bound.engine
        plan, before, self.asked = asked.applied(engine.order.plan), self.asked, asked
        try:
            engine.review.asked(plan, given=wanted.get("plan") is not None)
        except ValueError:
            self.asked = before
            raise

    def set_prefetch(self, backward: bool, states: list[ShardState]) -> None:
        """Set the states whose groups to gather when this module's forward, or backward, begins."""
        before, self._prefetch = self._prefetch, {**self._prefetch, backward: states}
        try:
            self.link_prefetch()
        except ShardConfigValueError:
            self._prefetch = before
            raise
        if self.bound is not None:
            self.bound.engine.order.lists_changed()

    def prefetched(self, backward: bool) -> Sequence[ShardState] | None:
        """The states that `set_prefetch` was given last; None if it was never called."""
        return self._prefetch.get(backward)

    def link_prefetch(self) -> None:
        """Set in the engine which groups to prefetch; a no-op before the engine is built.

        Raises:
            ShardConfigValueError: a module to prefetch has another root.
        """
        for backward, states in self._prefetch.items() if self.bound is not None else ():
            assert self.bound is not None
            for state in states:
                self._check_same_root(state)
            groups = [group for state in states for group in state.groups]
            for index, own in enumerate(self.groups):
                self.bound.engine.order.set_prefetches(own, backward, [] if index else groups)

    def _check_same_root(self, other: ShardState) -> None:
        if self.bound is None or other.bound is None or other.bound.engine is not self.bound.engine:
            names = ", ".join(param.fqn for param in other.declaration.params)
            raise ShardConfigValueError(
                f"modules to prefetch: the module with {names or 'no parameters'} has another root; "
                "list modules of one model"
            )

    def order_changed(self, order: Order) -> None:
        """On the root: note the schedule for graphs that follows from the engine's order."""
        asked = self.asked
        reductions = order.plan.costs is not None or (asked.plan is not None and asked.prefetch is None)
        text = order.for_graphs(reductions).to_text()
        if text != asked.schedule:
            self.asked = replace(asked, schedule=text)

    def comms_changed(self) -> None:
        """Rebuild the group, because the user has set other communication.

        Raises:
            ShardConfigStateError: the group's modules are running.
        """
        if self.bound is None or self.bound.group is None:
            return
        self.release()
        if self.bound.group.running:
            raise ShardConfigStateError(
                f"group {self.bound.group.name}: its communication cannot change while it runs; change it between "
                "iterations"
            )
        self.bound.group.rebuild(self.declaration.transports(TransportCache(runs=True)))
        self.bound.engine.review.converted()  # the plan depends on whether reductions have a process group of their own

    def counted(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass a call to the class's own `__call__`, and count it in `calls` while it runs."""
        self.calls += 1
        try:
            return call(*args, **kwargs)
        finally:
            self.calls -= 1

    def note_bypass(self) -> None:
        """Note that the forward that has just ended did not go through our `__call__` (see `FSDPModule._call_impl`)."""
        if self.bound is not None:
            uses = [self.bound.engine.uses.newest(group) for group in self.groups]
            self._bypassed.update(use for use in uses if use is not None)

    def recomputes_bypass(self) -> bool:
        """Whether the running backward recomputes a forward of which `note_bypass` was called."""
        active = {} if self.bound is None else self.bound.engine.active
        return any(active.get(group) in self._bypassed for group in self.groups)

    @contextlib.contextmanager
    def around_compiled_code(self) -> Iterator[None]:
        """Gather and reduce around the compiled forward that runs in the body, not in its graph."""
        before, self.way = self.way, Way.AROUND
        try:
            yield
        finally:
            self.way = before

    # ---- while Dynamo traces

    def begin_traced(self) -> None:
        """Begin a module's forward in a graph. For a list, gather when the first of its modules begins."""
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
        with_side_effects(partial(self.entries.install, weights, traced=True))

    def end_traced(self, module: nn.Module) -> None:
        """End a module's forward in a graph. For a list, install the shards when the last of its modules ends."""
        for each in self.family:
            each.left.discard(module.__dict__[PLACE])
            if not each.left:
                with_side_effects(partial(each.entries.install_sharded, traced=True))
                each.traced.check_edits()

    def finish_traced(self) -> None:
        """After the root has run, end the lists in which some modules did not run."""
        for state in self.lists:
            state.left.clear()
            state.entries.install_sharded(traced=True)

    # ---- eager

    def begin(self, module: nn.Module, alone: bool = False) -> None:
        """Begin an eager forward of a module of the call.

        Args:
            module: the module.
            alone: whether to begin it only for the group of this state, and not for the other states of the call.
        """
        # `_begin_family` begins all states of the call, and keeps modes and transforms of user code away from the
        # engine's work. If there is neither, the code below does the same in less host time.
        if not alone and (self.others or modes_in_force() or is_transforming()):
            self._begin_family(module)
            return
        assert self.bound is not None
        group = self.bound.group
        if group is None:
            return
        if not group.running and self.open_calls:
            self.open_calls.clear()  # from an interrupted forward, or one in which some modules of a list did not run
        if self.declaration.modules > 1:
            if current_backward() >= 0:
                self._to_run = {module.__dict__[PLACE]}  # a recomputation may run a single module of the list
            elif group.running:
                return  # an earlier module of the list has begun for all of them
            else:
                self._to_run = set(range(self.declaration.modules))
        self.entries.check_kept()
        self.open_calls.append(self.bound.engine.before_forward(group))

    @apart_from_checkpoints
    def _begin_family(self, module: nn.Module) -> None:
        for each in self.family:
            each.begin(module, alone=True)

    def end(
        self, module: nn.Module, copied: Sequence[torch.Tensor], alone: bool = False
    ) -> Sequence[tuple[Use, Outputs]]:
        """End an eager forward of a module of the call.

        Args:
            module: the module.
            copied: its outputs that were views of weights.
            alone: as for `begin`.

        Returns:
            the uses, with the outputs of their nodes, whose backward will pass through the module's outputs.

        Raises:
            StaleStateError: the forward has modified its weights in place.
        """
        if not alone and (self.others or modes_in_force() or is_transforming()):
            return self._end_family(module, copied)
        assert self.bound is not None
        if self.bound.group is None or not self.open_calls:
            return ()
        own = self.open_calls[-1]
        if self._to_run:
            self._to_run.discard(module.__dict__[PLACE])
        if not self._to_run:
            self.open_calls.pop()
            self.bound.engine.after_forward(self.bound.group, copied)
        return () if own is None else (own,)

    @apart_from_checkpoints
    def _end_family(self, module: nn.Module, copied: Sequence[torch.Tensor]) -> list[tuple[Use, Outputs]]:
        last_begun_first = reversed(list(self.family))
        ended = [each.end(module, copied, alone=True) for each in last_begun_first]
        return [use for uses in reversed(ended) for use in uses]

    @apart_from_checkpoints
    def abort(self, depth: int) -> None:
        """End the forwards that a failed call of a module has begun.

        Args:
            depth: number of forwards of this state that were running before that call.
        """
        for each in self.family:
            assert each.bound is not None
            # The modules of a list share one forward, which fails as a whole.
            before = depth if each.declaration.modules == 1 else 0
            while each.bound.group is not None and len(each.open_calls) > before:
                each.open_calls.pop()
                each.bound.engine.after_forward(each.bound.group, failed=True)

    def before_load(self) -> None:
        """Prepare for a load of the sharded parameters: a pending backward must not read new values instead of old."""
        self.release()
        for each in self.family:
            each.traced.note_change()
            warn_of_old_state(each.declaration.params)
        for group in self.groups:
            group.before_change()

    def check_edits(self) -> None:
        """Check that no unsharded parameter was modified in place, because the sharded one lacks that change.

        Raises:
            StaleStateError: one was modified.
        """
        for group in self.groups:
            group.check_unedited()

    def show_sharded(self) -> None:
        """Install the sharded parameters, unless a forward is running; the unsharded ones stay in memory."""
        if not any(group.running for group in self.groups):
            self.entries.install_sharded()

    def release(self) -> None:
        """Reshard the groups, so that the sharded parameters are installed."""
        for group in self.groups:
            assert self.bound is not None
            self.bound.engine.reshard(group)


def change_settings(states: Iterable[ShardState], **changes: Any) -> None:
    """Change settings of these states, and tell their engines if the plan depends on them."""
    states = list(states)
    for state in states:
        state.declaration.settings.change(**changes)
    planned = changes.keys() & {"reshard_after_forward", "max_reductions", "reduce_unused"}
    for engine in {state.bound.engine for state in states if state.bound is not None} if planned else ():
        engine.review.settings_changed()


def share_lanes(states: Sequence[ShardState]) -> None:
    """Make the engines of these roots queue their communication on the same streams.

    Raises:
        ShardConfigStateError: one of them has an engine already.
    """
    if any(state.bound is not None for state in states):
        raise ShardConfigStateError(
            "modules: one of them has run already; share their streams before the first forward"
        )
    if states:
        device = states[0].declaration.info.device
        lanes = states[0].lanes or (lane_for(device), lane_for(device))
        for state in states:
            state.lanes = lanes


def state_of(module: nn.Module) -> ShardState | None:
    """The state of a sharded module; None for other modules."""
    return module.__dict__.get(STATE)


def family_of(module: nn.Module) -> Iterable[ShardState]:
    """The states of a module: the one of its own mesh, then those of other meshes of its call; none if not sharded."""
    state = state_of(module)
    return () if state is None else state.family


def states_below(root: nn.Module) -> list[ShardState]:
    """Each state at or below `root` once, in the order of the modules."""
    return list(dict.fromkeys(state for module in root.modules() for state in family_of(module)))
