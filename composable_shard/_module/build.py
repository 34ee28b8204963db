"""Build a root's plan and its engine from the states of the sharded modules at and below it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from .._comm.agreement import Settings, agree, groups_of, real, replicas_of
from .._comm.collectives import Transports
from .._comm.lanes import has_streams, lane_for
from .._comm.mesh import MeshInfo
from .._comm.transports import TransportCache
from .._engine.engine import Engine
from .._engine.listeners import follow_tools
from .._errors import ShardConfigStateError
from .._group.extension import is_extended
from .._group.group import GroupComm, ParamGroup, Runtime
from .._group.param import ShardedParam
from .._group.saved_tensors import give_way
from .._memory.pool import BufferPool
from .._plan.plan import GroupPlan, ParamPlan, ShardPlan
from .._plan.schedule import ROOT_NAME
from .._policies import Options
from .._torch.distributed import check_unmixed
from .state import Asked, Bound, ShardState, named_states, state_of


def _describe(
    fqn: str, params: Sequence[ShardedParam], info: MeshInfo, options: Options, is_root: bool, transports: Transports
) -> GroupPlan:
    """A group's part of a plan, made from declarations alone, so parameters may be on the meta device."""
    return GroupPlan(
        fqn=fqn,
        params=tuple(
            ParamPlan(
                fqn=p.fqn,
                shape=p.shape,
                stored=p.dtype,
                gathered=p.compute_dtype(options),
                reduced=options.reduce_dtype(p.dtype),
                trains=p.sharded.requires_grad,
                dim=p.dim,
            )
            for p in params
        ),
        shard_size=info.shard_size,
        mesh=str(info),
        is_root=is_root,
        reshard_after_forward=options.reshards(is_root),
        route=None if transports.gather is None else transports.gather.route,
        reduces_first=transports.replicate is None and options.reduces_first(has_streams(info.device)),
        reduces_last=options.reduce_unused,
        small_size=0 if any(map(is_extended, params)) else options.few_ranks,
    )


def _set_fqns(root: nn.Module) -> None:
    first = {id(p): name for name, p in reversed(list(root.named_parameters(remove_duplicate=False)))}
    for _, state in named_states(root):
        for param in state.declaration.params:
            param.fqn = first.get(id(param.sharded), param.fqn)


def _groups_of(root: nn.Module) -> list[tuple[str, ShardState]]:
    named = [(", ".join(names), state) for names, state in named_states(root) if state.declaration.params]
    return [
        (f"{fqn or ROOT_NAME} on {state.declaration.label}" if state.declaration.label else fqn, state)
        for fqn, state in named
    ]


def _around(root: nn.Module, own: Container[ShardState]) -> tuple[tuple[str, str], ...]:
    """Pairs of FQNs: each group nested in the modules of another one, the innermost enclosing group behind it.

    The root's own groups (`own`) enclose all others and are left out.
    """
    groups = {state: fqn for fqn, state in _groups_of(root) if state not in own}
    inside: dict[str, list[ShardState]] = {}  # by name of the module: its groups, outermost first
    for names, state in named_states(root):
        for name in names if state in groups else ():
            inside.setdefault(name, []).append(state)
    found = set()
    for name, states in inside.items():
        above = name
        while above and (above == name or above not in inside):
            above = above.rpartition(".")[0]
        chain = [*inside.get(above, ())[-1:], *states]
        found |= {(groups[one], groups[outer]) for outer, one in itertools.pairwise(chain) if one is not outer}
    return tuple(sorted(found))


def _of_root(root: nn.Module) -> set[ShardState]:
    """The states of the root's own parameters."""
    own = state_of(root)
    return set() if own is None else set(own.family)


def declared_plan(root: nn.Module) -> ShardPlan:
    """The plan of a root that has not run: groups in the order of their modules. Parameters may be meta tensors."""
    _set_fqns(root)
    transports = TransportCache()
    own = _of_root(root)
    plans: list[GroupPlan] = []
    for fqn, state in _groups_of(root):
        asked = state.declaration
        options = asked.settings.current
        made = asked.transports(transports)
        plans.append(_describe(fqn, asked.params, asked.info, options, state in own, made))
    plan = ShardPlan(tuple(plans), tuple(plan.fqn for plan in plans), around=_around(root, own))
    found = state_of(root)
    return plan if found is None else found.asked.applied(plan)


def _settings(root: nn.Module) -> Settings:
    """By FQN of a group: in words, the settings that must be equal on all ranks and are no part of a plan."""
    groups = _groups_of(root)
    names = {state: fqn for fqn, state in groups}
    found: dict[str, dict[str, str]] = {}
    for fqn, state in groups:
        options, its = state.declaration.settings.current, found.setdefault(fqn, {})
        if options.divide_factor is not None:
            its["gradient divide factor"] = str(options.divide_factor)
        if options.only_sums:
            its["only sums"] = "True"
        for direction, states in (("forward", state.prefetched(False)), ("backward", state.prefetched(True))):
            if states is not None:
                listed = [names[each] or ROOT_NAME for one in states for each in one.family if each in names]
                its[f"{direction} prefetch"] = ", ".join(listed) or "nothing"
    return found


def check_root(root: nn.Module) -> None:
    """Check that a module can run as the root.

    Raises:
        ShardConfigStateError: the module is one of a list.
    """
    own = state_of(root)
    if own is not None and own.declaration.modules > 1:
        raise ShardConfigStateError(
            f"FSDP requires a single root module but got {type(root).__name__}, which is one of a list of "
            f"{own.declaration.modules} modules; call fully_shard on the module that contains them too, and run that"
        )


def _check_ready(root: nn.Module, found: Sequence[tuple[list[str], ShardState]]) -> None:
    check_unmixed(root)
    own = state_of(root)
    for listed, state in found:
        if state is not own and replace(state.asked, schedule="") != Asked():
            raise ShardConfigStateError(
                f"{', '.join(listed)}: a policy or a plan was set on it, and it runs inside of {type(root).__name__}; "
                "set it on the outermost sharded module"
            )
        if state.bound is not None and state.bound.engine.has_run:
            raise ShardConfigStateError(
                f"FSDP state has already been lazily initialized for {', '.join(listed) or type(root).__name__}\nFSDP "
                "requires running forward through the root module first: it has run as a root of its own, and now "
                f"runs inside of {type(root).__name__}"
            )


def _set_modules(root: nn.Module, found: Sequence[tuple[list[str], ShardState]]) -> None:
    """Tell each parameter which module holds it."""
    holders = {id(module._parameters): weakref.ref(module) for module in root.modules()}
    for _, state in found:
        for names, _, index in reversed(state.entries.places):
            state.declaration.params[index].module = holders.get(id(names))


def _check_materialised(found: Sequence[tuple[list[str], ShardState]]) -> None:
    meta = [p.fqn for _, state in found for p in state.declaration.params if p.sharded.is_meta]
    if meta:
        raise ShardConfigStateError(
            "FSDP parameters should be materialized from meta device before training, but the following were still on "
            f"meta device: {meta}\nCall model.to_empty(device=...), then initialise or load them, before the first "
            "forward"
        )


def _check_offloaded(found: Sequence[tuple[list[str], ShardState]]) -> None:
    offloaded = [p for _, state in found if state.declaration.info.offloads for p in state.declaration.params]
    moved = [(p.fqn, p.local.device) for p in offloaded if p.local.device.type not in ("cpu", "meta")]
    if moved:
        raise ShardConfigStateError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state "
            'dict or call module.to_empty(device="cpu"). Found following parameters on non-CPU device: '
            f"{moved}"
        )


def _group(fqn: str, state: ShardState, is_root: bool, transports: TransportCache, runtime: Runtime) -> ParamGroup:
    asked = state.declaration
    comm = GroupComm(asked.info, asked.transports(transports), asked.small)
    return ParamGroup(fqn, asked.params, asked.settings, is_root, comm, runtime, weakref.ref(state.entries))


def _nobody() -> None:
    """In the place of a weak reference to the listener to the engine's order: the root has no state to tell."""


def build_engine(root: nn.Module, agrees: bool = True, runs: bool = True) -> Engine:
    """Make the engine of a root out of the declarations at and below it.

    Args:
        root: the outermost sharded module.
        agrees: whether to check first, by a collective, that all ranks have the same plan.
        runs: whether the root is about to run. An engine that is made earlier, for `unshard`, may be that of a module
            which turns out not to be the outermost one.

    Raises:
        ShardConfigStateError: the root is one of a list; a module below has run as a root; parameters are on the meta
            device, or offloaded ones not on the CPU; a policy was set on another module than the root.
        MixedShardingError: torch's own `fully_shard` has sharded a module below.
        PoolBudgetError: a group does not fit into the budget.
        RankMismatchError: ranks have different plans.
    """
    give_way()
    found = list(named_states(root))
    if runs:
        check_root(root)
    _check_ready(root, found)
    recurrent = [module for module in root.modules() if vars(module).get("_flat_weights_names")]
    for _, state in found:
        state.release()  # if an engine of another root, which has not run, has unsharded its parameters
        state.entries.keep_lists(recurrent)
        state.entries.adopt()
    _set_fqns(root)
    _check_materialised(found)
    _check_offloaded(found)
    meshes = [(fqn, state.declaration.info) for fqn, state in _groups_of(root)]
    among, settings = groups_of(meshes), _settings(root)
    plan = declared_plan(root)
    if agrees:
        agree(plan, real(among), settings)
    _set_modules(root, found)
    device = found[0][1].declaration.info.device
    own = state_of(root)
    gather_lane, reduce_lane = (own.lanes if own is not None else None) or (lane_for(device), lane_for(device))
    runtime = Runtime(BufferPool(device, gather_lane), gather_lane, reduce_lane)
    transports = TransportCache()
    of_root = _of_root(root)
    groups = {state: _group(fqn, state, state in of_root, transports, runtime) for fqn, state in _groups_of(root)}
    for _, state in found:
        family = [groups[each] for each in state.family if each in groups]
        for index, group in enumerate(family):
            group.set_companions(family[index + 1 :])
    without = [state.entries for _, state in found if state not in groups]
    listener = _nobody if own is None else weakref.WeakMethod(own.order_changed)
    given = own is not None and own.asked.plan is not None
    engine = Engine(tuple(groups.values()), plan, runtime, among, follow_tools, without, listener, given)
    if replicas := replicas_of(meshes):
        engine.before_first_reduction(partial(agree, plan, replicas, settings))
    for _, state in found:
        state.traced.bind(groups.get(state), is_root=state in of_root)
        state.bind(Bound(engine, groups.get(state), state in of_root, weakref.ref(root)))
    for _, state in found:
        state.link_prefetch()
    if own is not None:
        own.order_changed(engine.order)
        own.lists = tuple(state for names, state in found if len(names) > 1)
    return engine
