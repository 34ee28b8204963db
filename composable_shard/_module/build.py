"""Build the plan and the engine of a root from the states of the sharded modules at and below it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from .._comm.agreement import Among, Settings, agree, groups_of, real, replicas_of
from .._comm.collectives import Transports
from .._comm.lanes import has_streams, lane_for
from .._comm.transports import TransportCache
from .._engine.engine import Engine
from .._engine.iterations import two_threads
from .._engine.tools import follow_tools
from .._faults.seat import Seat
from .._group.extension import is_extended, sent_by
from .._group.group import ParamGroup
from .._group.param import reduced_as
from .._group.saved_tensors import give_way
from .._group.setup import GroupComm, Runtime, frees_queued
from .._memory.pool import BufferPool
from .._plan.plan import GroupPlan, ParamPlan, ShardPlan
from .._plan.schedule import ROOT_NAME
from .._torch.core import apart_from_checkpoints
from .._torch.distributed import check_unmixed
from ..errors import ShardConfigStateError
from .state import STATE, Asked, Bound, Declaration, ShardState, family_of, state_of


class _Tree:
    """The sharded modules at and below a root, found in one walk.

    Attributes:
        root: the root.
        modules: all modules at and below it, with their names.
        states: each state once, with the names of its modules.
        fqns: the FQN of the group of each state that has parameters.
        of_root: the states of the root's own parameters.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules = list(root.named_modules())
        self.states: dict[ShardState, list[str]] = {}
        for name, module in self.modules:
            for state in family_of(module):
                self.states.setdefault(state, []).append(name)
        self.fqns = {
            state: _group_fqn(", ".join(names), state.declaration.label)
            for state, names in self.states.items()
            if state.declaration.params
        }
        self.of_root = set(family_of(root))

    def name_params(self) -> None:
        """Rename each parameter to its first name in the root's `named_parameters`, which a class may override."""
        first: dict[int, str] = {}
        for name, param in self.root.named_parameters(remove_duplicate=False):
            first.setdefault(id(param), name)
        for state in self.states:
            for held in state.declaration.params:
                held.rename(first.get(id(held.sharded), held.fqn))

    def transports(self, runs: bool = False) -> dict[ShardState, Transports]:
        """The transports of each group; `runs` as for a `TransportCache`."""
        made = TransportCache(runs)
        return {state: state.declaration.transports(made) for state in self.fqns}

    def plan(self, transports: Mapping[ShardState, Transports]) -> ShardPlan:
        """The plan of the groups in the order of their modules, with the policies or plan that the user has set."""
        has_one_mesh = self.has_one_mesh()
        groups = tuple(
            _describe(fqn, state.declaration, state in self.of_root, transports[state], has_one_mesh)
            for state, fqn in self.fqns.items()
        )
        plan = ShardPlan(groups, tuple(group.fqn for group in groups), around=self._around())
        own = state_of(self.root)
        return plan if own is None else own.asked.applied(plan)

    def has_one_mesh(self) -> bool:
        """Whether all groups are sharded over the same ranks, so that their collectives run one after the other."""
        return len({state.declaration.info.mesh for state in self.states}) == 1

    def _around(self) -> tuple[tuple[str, str], ...]:
        """Pairs of FQNs: a group, and the innermost other group whose modules enclose the modules of the first.

        For the later groups of a module with several, it is the group before them.
        The root's own groups enclose all others and are left out.
        """
        inside: dict[str, list[ShardState]] = {}  # by name of a module: its groups, outermost first
        for each in self.fqns:
            for name in () if each in self.of_root else self.states[each]:
                inside.setdefault(name, []).append(each)
        pairs: set[tuple[str, str]] = set()
        for name, states in inside.items():
            enclosing = next((inside[above] for above in _above(name) if above in inside), [])
            for outer, inner in itertools.pairwise([*enclosing[-1:], *states]):
                if inner is not outer:
                    pairs.add((self.fqns[inner], self.fqns[outer]))
        return tuple(sorted(pairs))

    def settings(self) -> Settings:
        """By FQN of a group: in words, the settings that must be equal on all ranks and are not part of a plan."""
        return {fqn: self._settings_of(state) for state, fqn in self.fqns.items()}

    def _settings_of(self, state: ShardState) -> dict[str, str]:
        options = state.declaration.settings.current
        words = {
            "gradient divide factor": "" if options.divide_factor is None else str(options.divide_factor),
            "only sums": "True" if options.only_sums else "",
            "forward prefetch": self._listed(state.prefetched(backward=False)),
            "backward prefetch": self._listed(state.prefetched(backward=True)),
        }
        return {name: text for name, text in words.items() if text}

    def _listed(self, prefetched: Sequence[ShardState] | None) -> str:
        """The groups of a user's prefetch list, in words; empty if there is no list."""
        if prefetched is None:
            return ""
        family = [each for state in prefetched for each in state.family]
        return ", ".join(self.fqns[each] or ROOT_NAME for each in family if each in self.fqns) or "nothing"

    def check_ready(self) -> None:
        """Check that the root can have an engine.

        Raises:
            MixedShardingError: torch's own `fully_shard` has sharded a module below.
            ShardConfigStateError: a module below has run as a root, or a policy or plan was set on it.
        """
        check_unmixed(self.root)
        kind = type(self.root).__name__
        own = state_of(self.root)
        for state, names in self.states.items():
            if state is not own and replace(state.asked, schedule="") != Asked():
                raise ShardConfigStateError(
                    f"{', '.join(names)}: a policy or a plan was set on this module, but it runs inside of {kind}; "
                    "set it on the outermost sharded module"
                )
            if state.bound is not None and state.bound.engine.has_run:
                raise ShardConfigStateError(
                    f"FSDP state has already been lazily initialized for {', '.join(names) or kind}\nFSDP "
                    "requires running forward through the root module first: this module has run as a root, and now "
                    f"runs inside of {kind}"
                )

    def unsharded_by_users(self) -> dict[ShardState, bool]:
        """The states whose modules users have unsharded, and whether the unsharded parameters are installed."""
        bound = {state: state.bound for state in self.states}
        pinned = [state for state, part in bound.items() if part and part.group and part.group.stay.pinned]
        return {state: state.entries.are_replaced for state in pinned}

    def install_shards(self) -> None:
        """Install the sharded parameters, and adopt those by which users have replaced them.

        An engine of another root, which has not run, may have unsharded them.
        """
        names = {id(module._parameters): name for name, module in reversed(self.modules)}
        recurrent = [module for _, module in self.modules if vars(module).get("_flat_weights_names")]
        for state in self.states:
            state.release()
            state.entries.follow_in_rnns(recurrent)
            state.entries.name_modules(names)
            state.entries.adopt()
            for param in state.declaration.params:
                param.adopt_grad_dtype()

    def set_holders(self) -> None:
        """Set the module of each parameter."""
        holders = {id(module._parameters): weakref.ref(module) for _, module in self.modules}
        for state in self.states:
            state.entries.know_modules(holders)
            for names, _, index in reversed(state.entries.places):
                state.declaration.params[index].set_module(holders.get(id(names)))

    def groups(
        self, transports: Mapping[ShardState, Transports], runtime: Runtime, seat: Seat
    ) -> dict[ShardState, ParamGroup]:
        """Make the groups."""
        groups: dict[ShardState, ParamGroup] = {}
        for state, fqn in self.fqns.items():
            own, is_root, entries = state.declaration, state in self.of_root, weakref.ref(state.entries)
            comm = GroupComm(own.info, transports[state], own.small, seat.of(fqn), own.rounding)
            groups[state] = ParamGroup(fqn, own.params, own.settings, is_root, comm, runtime, entries)
        for state in self.states:
            if state.others:  # the first state of a call with several meshes
                family = [groups[each] for each in state.family if each in groups]
                for index, group in enumerate(family):
                    group.set_companions(family[index + 1 :])
        return groups

    def bind(self, engine: Engine, groups: Mapping[ShardState, ParamGroup]) -> None:
        """Bind each state to its part in the engine."""
        own = state_of(self.root)
        lists = tuple(state for state, names in self.states.items() if len(names) > 1)
        for state in self.states:
            bound = Bound(engine, groups.get(state), state in self.of_root, weakref.ref(self.root))
            state.bind(bound, lists if state is own else ())
        for state in self.states:
            state.link_prefetch()


def _group_fqn(names: str, label: str) -> str:
    return f"{names or ROOT_NAME} on {label}" if label else names


def _above(name: str) -> Iterator[str]:
    """The names of the modules that contain a module, innermost first, without the root."""
    while name := name.rpartition(".")[0]:
        yield name


def _describe(fqn: str, asked: Declaration, is_root: bool, transports: Transports, has_one_mesh: bool) -> GroupPlan:
    """Make a group's part of a plan. It depends only on the declaration, so parameters may be on the meta device."""
    options, streams = asked.settings.current, has_streams(asked.info.device)
    return GroupPlan(
        fqn=fqn,
        params=tuple(
            ParamPlan(
                fqn=p.fqn,
                shape=p.shape,
                stored=p.dtype,
                gathered=p.compute_dtype(options),
                reduced=reduced,
                trains=p.sharded.requires_grad,
                dim=p.dim,
                rows=p.rows,
                packed=p.carried is not None,
                sent=sent_by(p, p.compute_dtype(options), asked.info, options.mp_policy),
            )
            for p, reduced in zip(asked.params, reduced_as(asked.params, options), strict=True)
        ),
        shard_size=asked.info.shard_size,
        mesh=str(asked.info),
        is_root=is_root,
        reshard_after_forward=options.reshards(is_root),
        route=None if transports.gather is None else transports.gather.route,
        reduces_first=not streams and transports.replicate is None and options.max_reductions is None,
        frees_queued=frees_queued(streams, has_one_mesh, options),
        reduces_last=options.reduce_unused,
        comm_policy=options.comm_policy,
        small_size=0 if options.few_ranks == 0 or any(map(is_extended, asked.params)) else options.few_ranks,
        outer_size=asked.info.replicate_size if asked.info.shards_outer else 1,
        outer_route=transports.replicate.route if asked.info.shards_outer and transports.replicate else None,
    )


def declared_plan(root: nn.Module) -> ShardPlan:
    """The plan of a root that has not run: groups in the order of their modules. Parameters may be meta tensors."""
    tree = _Tree(root)
    tree.name_params()
    return tree.plan(tree.transports())


def check_root(root: nn.Module) -> None:
    """Check that a module can run as the root.

    Raises:
        ShardConfigStateError: the module was sharded as part of a list.
    """
    own = state_of(root)
    if own is not None and own.declaration.modules > 1:
        raise ShardConfigStateError(
            f"FSDP requires a single root module but got {type(root).__name__}, which was sharded in a list of "
            f"{own.declaration.modules} modules; also call fully_shard on the module that contains them, and run that"
        )


def _check_materialised(asked: Sequence[Declaration]) -> None:
    meta = [p.fqn for each in asked for p in each.params if p.sharded.is_meta]
    if meta:
        raise ShardConfigStateError(
            "FSDP parameters should be materialized from meta device before training, but the following were still on "
            f"meta device: {meta}\nCall model.to_empty(device=...), then initialise or load the parameters, before "
            "the first forward"
        )


def _check_offloaded(asked: Sequence[Declaration]) -> None:
    offloaded = [p for each in asked if each.info.offloads for p in each.params]
    moved = [(p.fqn, p.local.device) for p in offloaded if p.local.device.type not in ("cpu", "meta")]
    if moved:
        raise ShardConfigStateError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state "
            'dict or call module.to_empty(device="cpu"). Found following parameters on non-CPU device: '
            f"{moved}"
        )


_roots: weakref.WeakKeyDictionary[Engine, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def living_engines() -> list[tuple[Engine, nn.Module]]:
    """All engines of this process with their roots, in the order in which they were built."""
    pairs = [(engine, root()) for engine, root in list(_roots.items())]
    return [(engine, root) for engine, root in pairs if root is not None]


# Key in a root's `__dict__`: the id of the thread that builds its engine. It is set by `setdefault`, which is atomic.
_BUILDER = "_shard_builder"


def bound_of(module: nn.Module, agrees: bool = True, runs: bool = True) -> Bound:
    """Return a module's part in its engine. Build the engine if there is none; the arguments are `build_engine`'s."""
    state: ShardState = module.__dict__[STATE]
    if state.bound is None:
        here = threading.get_ident()
        if module.__dict__.setdefault(_BUILDER, here) != here:
            raise two_threads("its first forward")
        try:
            if state.bound is None:  # else another thread has built the engine in the meantime
                apart_from_checkpoints(build_engine)(module, agrees, runs)
        finally:
            module.__dict__.pop(_BUILDER, None)
    assert state.bound is not None
    return state.bound


def build_engine(root: nn.Module, agrees: bool = True, runs: bool = True) -> Engine:
    """Build the engine of a root from the declarations at and below it.

    Args:
        root: the outermost sharded module.
        agrees: whether to check first, by a collective, that all ranks have the same plan.
        runs: whether the root is about to run. If False (for `unshard`), the module may later turn out not to be the
            outermost one.

    Raises:
        ShardConfigStateError: the root was sharded as part of a list; a module below has run as a root; parameters are
            on the meta device, or offloaded parameters are not on the CPU; a policy was set on a module other than the
            root.
        MixedShardingError: torch's own `fully_shard` has sharded a module below.
        PoolBudgetError: a group does not fit into the budget.
        RankMismatchError: ranks have different plans.
    """
    give_way()  # makes torch.func transforms work in forwards of sharded modules, from now on and in the whole process
    own = state_of(root)
    assert own is not None
    if runs:
        check_root(root)
    tree = _Tree(root)
    tree.check_ready()
    tree.name_params()  # for errors of `install_shards`; it may tie parameters, so they are named again after it
    unsharded = tree.unsharded_by_users() if agrees else {}  # not while Dynamo traces: to gather them is a collective
    tree.install_shards()
    tree.name_params()
    asked = [state.declaration for state in tree.states]
    _check_materialised(asked)
    _check_offloaded(asked)
    meshes = [(fqn, state.declaration.info) for state, fqn in tree.fqns.items()]
    among, settings = groups_of(meshes), tree.settings()
    transports = tree.transports(runs=True)
    plan = tree.plan(transports)
    seat = Seat(meshes, own.declaration.number, root)
    if agrees:
        agree(plan, real(among), settings)
    tree.set_holders()
    device = own.declaration.info.device
    gather_lane, reduce_lane = own.lanes or (lane_for(device), lane_for(device))
    runtime = Runtime(BufferPool(device, gather_lane), gather_lane, reduce_lane, tree.has_one_mesh())
    groups = tree.groups(transports, runtime, seat)
    without = [state.entries for state in tree.states if state not in groups]
    listener = weakref.WeakMethod(own.order_changed)
    given = own.asked.plan is not None
    engine = Engine(tuple(groups.values()), plan, runtime, among, seat, follow_tools, without, listener, given)
    _agree_over_replicas(engine, plan, replicas_of(meshes), settings)
    # Groups on which users have called `unshard()` before this forward. `install_shards` has resharded them, in engines
    # that this one replaces.
    for state, installed in unsharded.items():
        engine.unshard(groups[state], wait=installed)
    if agrees:
        planned = {g.fqn: (g.layout.note, g.gradients.planned_note(), g.layout.refresh_note) for g in groups.values()}
        seat.plan(plan.actions(), planned)
    tree.bind(engine, groups)
    _roots[engine] = weakref.ref(root)
    own.order_changed(engine.order)
    return engine


def _agree_over_replicas(engine: Engine, plan: ShardPlan, replicas: Among, settings: Settings) -> None:
    """Have the ranks of the replicas agree on the plan, too, before they communicate for the first time."""
    if replicas:
        engine.before_first_reduction(partial(agree, plan, replicas, settings))
