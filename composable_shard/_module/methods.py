"""The settings of a sharded module: the methods of torch's `FSDPModule` that change what the runtime does.

Each method replaces the frozen `Options` of the affected groups; forward and backward read the options as they run.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from .._engine.engine import Engine
from .._errors import (
    ShardConfigStateAssertionError,
    ShardConfigStateError,
    ShardConfigTypeError,
    ShardConfigTypeValueError,
    ShardConfigValueError,
)
from .._group.extension import is_extended
from .._plan.plan import ShardPlan
from .._policies import CommPolicy, Comms, PoolPolicy, PrefetchPolicy, as_bool, plain_value
from .._torch.distributed import is_torchs_comm, process_group_allocation, symmetric_memory_gather
from .additions import WatchedEntries
from .state import STATE, ShardState, share_lanes, states_below
from .torch_names import StateFacade, state_facade


class GradientReductionHandle:
    """Reductions of a backward that were issued and not yet waited for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def wait(self) -> None:
        """Wait for the reductions and set `.grad`."""
        self._engine.end_backward_by_hand()


class Methods(TorchFSDPModule):
    """Settings, with the names and signatures of torch, and policies of the plan.

    `recurse` says whether a setting also holds for the sharded modules below. Settings of gathers and reductions may
    change only between iterations, and on every rank alike.

    Policies are set on the root, the outermost sharded module, and on all ranks alike. A policy that is set between two
    forwards holds from the next one on. At the end of that forward, a rank whose policy differs from that of others
    raises `RankMismatchError`. If every rank has set a policy, all raise; if only some have, only these raise, and the
    others cannot go on without them.
    """

    _orig_cls_mro_index = 4  # FSDPLinear, FSDPModule, Methods, torch's FSDPModule, Linear

    # ---- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients.

        While this is off, backward accumulates unsharded gradients, in the dtype of reduction. A later backward with
        this setting on adds its own and reduces the sum. `zero_grad` clears accumulated gradients. This call also sets
        `set_requires_all_reduce` to the same value.

        With `set_manual_backward_finalization(True)` on this module, it also installs the sharded parameters, as
        `set_is_last_backward` does and for the same reason: torch's pipelines call it before each backward.

        Raises:
            ShardConfigValueError: the value is no truth value: no bool, number, None or tensor of one element.
        """
        sync = as_bool("requires_gradient_sync", requires_gradient_sync)
        _set(self, recurse, requires_gradient_sync=sync, requires_all_reduce=sync)
        if self._own_state().ends_by_hand:
            _show_sharded(self)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward, on a mesh with replicas, reduces gradients over the replicas.

        While this is off, backward stops after the reduce-scatter and keeps the resulting pieces apart from `.grad`. A
        later backward with this setting on adds its own pieces and reduces the sum over the replicas. `zero_grad`
        clears the pieces.

        Raises:
            ShardConfigValueError: the value is no truth value: no bool, number, None or tensor of one element.
        """
        _set(self, recurse, requires_all_reduce=as_bool("requires_all_reduce", requires_all_reduce))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether each following backward is the last one before the optimizer's step.

        Pipelines set it. In any case backward waits, at its end, for the reductions that it has issued: what clips
        gradients or sets them to zero after it must find all of them. Call it on the root; it holds for all sharded
        modules below. It also installs the sharded parameters again: they are the leaves of the graph, and torch's
        zero-bubble pipelines look for leaves in the modules.

        Raises:
            ShardConfigValueError: the value is no truth value: no bool, number, None or tensor of one element.
        """
        self._own_state().set_for_root(is_last_backward=as_bool("is_last_backward", is_last_backward))
        _show_sharded(self)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether the caller ends each backward, or several at once, by `finalize_backward`. Call it on the root.

        Raises:
            ShardConfigValueError: the value is no truth value: no bool, number, None or tensor of one element.
        """
        self._own_state().set_for_root(ends_by_hand=as_bool("enabled", enabled))

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce accumulated gradients, if gradient sync is on, wait for all reductions, and reshard.

        Args:
            async_op: return at once, with a handle whose `wait()` waits for the reductions and sets `.grad`.
        """
        bound, async_op = self._own_state().bound, as_bool("async_op", async_op)
        if bound is None:
            return None
        bound.engine.end_backward_by_hand(wait=not async_op)
        return GradientReductionHandle(bound.engine) if async_op else None

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's gradients, summed over all ranks, by `factor` instead of the number of ranks.

        Args:
            factor: a number, or a tensor of one element; None for the number of ranks again.

        Raises:
            ShardConfigValueError: the factor is not a positive, finite number.
        """
        plain = plain_value(factor)
        number = float(plain) if isinstance(plain, numbers.Real) and not isinstance(plain, bool) else math.nan
        if plain is not None and not 0 < number < math.inf:
            raise ShardConfigValueError(f"factor: expected a positive number that is finite, got {factor!r}")
        _set(self, False, divide_factor=None if plain is None else number)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether this module's reductions use sums only, with divisions apart, and never a collective mean.

        Raises:
            ShardConfigValueError: the value is no truth value: no bool, number, None or tensor of one element.
        """
        _set(self, False, only_sums=as_bool("enable", enable))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters that got no gradient in backward are given one of zeros.

        Then a backward reduces every group that was gathered since the last one (or is still unsharded), also without a
        gradient of its own, so that the losses of ranks may depend on different modules in a step.
        (Ranks on which only different parameters of one group get gradients need no setting.) Without this setting, as
        in FSDP2, a rank does not reduce a group of which it got no gradient at all, and ranks that got one wait for
        that rank for ever. So set it where a rank may use none of a group's experts, and on the module of the experts
        alone: its groups are reduced only when backward is over, in one order on all ranks, and their unsharded
        gradients take memory until then.

        A group is still gathered only where its modules run, and all ranks must run the same ones. Where they cannot,
        `unshard` on all ranks, before the forward, each module that only some ranks will run, and let its parameters
        stay (`reshard_after_forward=False`).

        Raises:
            ShardConfigValueError: the value is no truth value: no bool, number, None or tensor of one element.
        """
        _set(self, recurse, reduce_unused=as_bool("reduce_scatter_unused_params", reduce_scatter_unused_params))

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may be in flight: issuing one more waits for the oldest.

        By default, two may be. On a CPU without replicas, backward by default also waits for them before it gathers the
        next parameters, so that both use the same memory.

        Raises:
            ShardConfigTypeError: the value is no int.
            ShardConfigValueError: the value is less than 1.
        """
        most = plain_value(max_input_buffers)
        if isinstance(most, bool) or not isinstance(most, int):
            raise ShardConfigTypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__} ({max_input_buffers!r})"
            )
        if most < 1:
            raise ShardConfigValueError(f"max_input_buffers must be a positive int, got {most}")
        _set(self, recurse, max_reductions=most)

    # ---- parameters

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether the unsharded parameters are given up between forward and backward.

        Raises:
            ShardConfigValueError: the value is no bool, nor a NumPy scalar or tensor that holds one.
        """
        reshard = plain_value(reshard_after_forward)
        if not isinstance(reshard, bool):  # a number could be meant as the number of ranks that `fully_shard` takes
            raise ShardConfigTypeValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}: {reshard_after_forward!r}"
            )
        _set(self, recurse, reshard_after_forward=reshard)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether the unsharded parameters are given up after backward; False saves gathers while accumulating.

        The setting in force when a backward ends decides about its weights, also if it changes before the next forward.
        They never outlive an optimizer's step. After changing sharded parameters in another way, call `reshard`: a
        change by foreach functions or through ``.data`` cannot be noticed.

        Raises:
            ShardConfigValueError: the value is no truth value: no bool, number, None or tensor of one element.
        """
        _set(self, recurse, reshard_after_backward=as_bool("reshard_after_backward", reshard_after_backward))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this module's parameters. False saves a gather if backward reads no weight.

        An embedding's backward, for one, reads none. If backward asks for a weight nevertheless, it is gathered then.

        Raises:
            ShardConfigValueError: the value is no truth value: no bool, number, None or tensor of one element.
        """
        _set(self, False, unshard_in_backward=as_bool("unshard_in_backward", unshard_in_backward))

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether unsharded parameters have memory of their own for good, so that their addresses stay the same.

        This costs the memory of all unsharded parameters all the time. It is needed where something other than autograd
        keeps weights: CUDA graphs, transforms of `torch.func` in a forward, a selective checkpoint that saves views of
        weights.

        Raises:
            ShardConfigValueError: the value is no truth value: no bool, number, None or tensor of one element.
        """
        _set(self, recurse, keep_storage=as_bool("keep", keep))

    def set_modules_to_forward_prefetch(self, modules: Iterable[Any]) -> None:
        """Gather these modules' parameters when this module's forward begins, instead of those of the next to run.

        Raises:
            ShardConfigTypeError: it is no list, nor another iterable.
            ShardConfigValueError: one of them is not sharded.
        """
        self._own_state().set_prefetch(False, _states_to_prefetch(modules))

    def set_modules_to_backward_prefetch(self, modules: Iterable[Any]) -> None:
        """Gather these modules' parameters when this module's backward begins, instead of those of the next to run.

        Raises:
            ShardConfigTypeError: it is no list, nor another iterable.
            ShardConfigValueError: one of them is not sharded.
        """
        self._own_state().set_prefetch(True, _states_to_prefetch(modules))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the gathers of the next forward wait for `event` only, not for all work queued before that forward.

        Call it on the root, after every optimizer's step, with an event that was recorded right after that step.
        """
        self._own_state().set_for_root(changed_at=event)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: gathers never allocate memory on another stream, which torch's setting is about."""

    # ---- communication

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this module's parameters by `comm`, an object like torch's `AllGather`; None restores our own."""
        _set_comms(self, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this module's gradients by `comm`, an object like torch's `ReduceScatter`; None restores our own."""
        _set_comms(self, reduce_scatter=comm)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with this module's reduced gradients: a 1D tensor of averages, which it may change in place.

        Args:
            hook: called once for each dtype of reduction.
            stream: the stream on which the hook runs; by default that of reductions.

        Raises:
            ShardConfigTypeError: the hook is no function, and not None, which removes it.
            ShardConfigValueError: a stream is given and the mesh has replicas.
        """
        if hook is not None and not callable(hook):
            raise ShardConfigTypeError(f"hook: expected a function or None, got {type(hook).__name__}")
        infos = [state.declaration.info for state in self._own_state().family]
        if stream is not None and any(info.replicate_group is not None for info in infos):
            raise ShardConfigValueError(
                "stream cannot be set when using native HSDP: the hook runs behind the all-reduce over the replicas"
            )
        _set_comms(self, all_reduce_hook=hook, hook_stream=stream)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give reductions a process group (a communicator) of their own, so that they can overlap with gathers.

        Every rank of the mesh must call it.
        """
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        enable = as_bool("enable", enable)
        for state in _states(self, recurse):
            shard_group = state.declaration.info.shard_group
            wanted = enable and shard_group is not None
            _change_comms(state, reduce_group=_own_group(shard_group, made) if wanted else None)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether communication buffers come from the process group's own allocator, if its backend has one.

        Raises:
            ShardConfigStateError: custom communication is set, which allocates its own buffers.
        """
        enable = as_bool("enable", enable)
        _refuse_custom(self, "set_allocate_memory_from_process_group", "ProcessGroupAlloc")
        for state, group in _shard_groups(self):
            gather, scatter = process_group_allocation(group) if enable else (None, None)
            _change_comms(state, all_gather=gather, reduce_scatter=scatter)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather through torch's symmetric memory.

        Raises:
            ShardConfigStateError: custom communication is set, which allocates its own buffers; or this torch has no
                symmetric memory for FSDP.
        """
        _refuse_custom(self, "set_symm_mem", "SymmMem")
        for state, group in _shard_groups(self):
            gather = symmetric_memory_gather(group, backend)
            if gather is None:
                raise ShardConfigStateError(
                    f"symmetric memory: torch {torch.__version__} has none for FSDP; use 2.12 or later"
                )
            _change_comms(state, all_gather=gather)

    def set_comm_policy(self, policy: CommPolicy, recurse: bool = True) -> None:
        """Set in how many bits weights and gradients travel. Before the first forward, and on every rank alike.

        Raises:
            ShardConfigTypeError: `policy` is no CommPolicy.
            ShardConfigStateError: the model has run, or is unsharded.
            ShardConfigValueError: a parameter defines its own all-gather, or custom communication is set, which would
                be given bytes that it does not know.
        """
        _check_kind("policy", CommPolicy, policy)
        states = _states(self, recurse)
        for state in states:
            _check_takes_bits(state, policy)
        for state in states:
            state.declaration.settings.change(comm_policy=policy)

    # ---- the plan

    def set_prefetch_policy(self, policy: PrefetchPolicy) -> None:
        """Set how far ahead groups are gathered. Explicit lists (`set_modules_to_forward_prefetch`) take precedence.

        With `PrefetchPolicy.auto` the second and third training step are measured, with every collective waited for
        where it is issued. From then on the schedule hides as much communication as it can. Two steps are measured
        again when groups have joined, and more and more rarely (after 64 steps, 128, 256...) to see whether times have
        changed; then the plan is made anew.

        Raises:
            ShardConfigTypeError: `policy` is no PrefetchPolicy.
            ShardConfigStateError: this is not the root.
        """
        _check_kind("policy", PrefetchPolicy, policy)
        self._own_state().ask(prefetch=policy)

    def set_pool_policy(self, policy: PoolPolicy) -> None:
        """Set how much memory unsharded parameters and communication buffers may take.

        Raises:
            ShardConfigTypeError: `policy` is no PoolPolicy.
            ShardConfigStateError: this is not the root.
            PoolBudgetError: a group does not fit into the budget; before the first forward, that forward raises it.
        """
        _check_kind("policy", PoolPolicy, policy)
        self._own_state().ask(pool=policy)

    def set_plan(self, plan: ShardPlan) -> None:
        """Follow a plan that was made before, or elsewhere: its order, its schedule and its policies.

        If forwards then run in another order, or a setter changes what is resharded, a new schedule is made under the
        plan's policies, and a warning says so, once.

        Raises:
            ShardConfigTypeError: `plan` is no ShardPlan.
            ShardConfigStateError: this is not the root.
            ShardConfigValueError: the plan is of another model; before the first forward, that forward raises it.
        """
        _check_kind("plan", ShardPlan, plan)
        self._own_state().ask(plan=plan, prefetch=None, pool=None)

    # ---- state

    def allow_unmanaged_parameters(self, *, recurse: bool = True) -> None:
        """Accept parameters that are added to this module, or anywhere below it, after `fully_shard`.

        Nobody shards them or averages their gradients over the ranks: they train on each rank alone, as under torch's
        FSDP2, unless you do that yourself. Without this call they are an error, for which the other remedies are to
        call `fully_shard` on the module that was added, or to average their gradients in post-accumulate hooks (as
        Transformers does for adapters that were added late).

        Args:
            recurse: whether it also holds for what is added to the sharded modules that are below this one now.
        """
        for state in _states(self, recurse):
            if isinstance(state.entries, WatchedEntries):
                state.entries.allow_unmanaged()

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that an exception has ended. The next forward does so by itself.

        Accumulated gradients, and those in flight, are lost.

        Raises:
            ShardConfigStateError: this is not the root. (It is a RuntimeError.)
        """
        bound = self._own_state().bound
        if bound is None:
            return
        if not bound.is_root:
            raise ShardConfigStateError(
                "reset_iter_state must be called on the root FSDP module, the one whose forward runs first"
            )
        bound.engine.reset()

    def _get_fsdp_state(self) -> StateFacade:  # type: ignore[override]
        facade = state_facade(self)  # type: ignore[arg-type]
        assert facade is not None
        return facade

    def _own_state(self) -> ShardState:
        state: ShardState = self.__dict__[STATE]
        return state


def _check_kind(argument: str, kind: type, value: object) -> None:
    if not isinstance(value, kind):
        raise ShardConfigTypeError(f"{argument}: expected a {kind.__name__}, got {type(value).__name__}")


def _show_sharded(module: Methods) -> None:
    for state in _states(module, recurse=True):
        state.show_sharded()


def _states(module: Methods, recurse: bool) -> list[ShardState]:
    return states_below(module) if as_bool("recurse", recurse) else [*module._own_state().family]  # type: ignore[arg-type]


def _set(module: Methods, recurse: bool, **changes: Any) -> None:
    states = _states(module, recurse)
    for state in states:
        state.declaration.settings.change(**changes)
    planned = changes.keys() & {"reshard_after_forward", "max_reductions", "reduce_unused"}
    for engine in {state.bound.engine for state in states if state.bound is not None} if planned else ():
        engine.review.settings_changed()


def _set_comms(module: Methods, **changes: Any) -> None:
    for state in module._own_state().family:
        _change_comms(state, **changes)


def _change_comms(state: ShardState, **changes: Any) -> None:
    settings = state.declaration.settings
    comms = replace(settings.current.comms, **changes)
    _check_understood(state, comms, settings.current.comm_policy)
    settings.change(comms=comms)
    state.comms_changed()


def _check_takes_bits(state: ShardState, policy: CommPolicy) -> None:
    own = state.declaration
    if state.bound is not None:
        raise ShardConfigStateError(
            "set_comm_policy: the model has run or was unsharded; set it right after fully_shard, before the first "
            "forward"
        )
    _check_understood(state, own.settings.current.comms, policy)
    if policy.gather is not None and (extended := [p.fqn for p in own.params if is_extended(p)]):
        raise ShardConfigValueError(
            f"CommPolicy(gather={policy.gather!r}): parameter {extended[0]} defines its own all-gather "
            "(fsdp_pre_all_gather), which says itself what travels; give the other modules the policy one by one, with "
            "recurse=False, and this one a policy without gather"
        )


def _check_understood(state: ShardState, comms: Comms, policy: CommPolicy) -> None:
    """Refuse custom communication of what travels as bytes that only this library understands."""
    for name, form, custom, method in (
        ("gather", policy.gather, comms.all_gather, "set_custom_all_gather(None)"),
        ("reduce", policy.reduce, comms.reduce_scatter, "set_custom_reduce_scatter(None)"),
    ):
        if form is not None and custom is not None:
            names = [param.fqn for param in state.declaration.params[:1]] or ["no parameters"]
            raise ShardConfigValueError(
                f"CommPolicy({name}={form!r}) and {type(custom).__name__} on the module with {names[0]}: custom "
                f"communication moves tensors of the parameters' dtype, and not bytes; call {method} there, or give it "
                f"a policy without {name}"
            )


def _refuse_custom(module: Methods, what: str, own: str) -> None:
    """Refuse custom communication, unless it is torch's own class, named by `own`, that the method `what` sets."""
    comms = module._own_state().declaration.settings.current.comms
    for kind, comm in (("all gather", comms.all_gather), ("reduce scatter", comms.reduce_scatter)):
        if comm is not None and not is_torchs_comm(comm, own):
            raise ShardConfigStateAssertionError(
                f"cannot call {what}() when {kind} comm is custom: {type(comm).__name__}, which allocates for itself; "
                "set only one"
            )


def _states_of(modules: Iterable[Any], expected: str = "list of FSDPModules but got {module}") -> list[ShardState]:
    # A sharded Sequential is an iterable, of its children.
    if isinstance(modules, Methods) or not isinstance(modules, Iterable):
        raise ShardConfigTypeError(
            f"modules: expected a list of FSDPModules, got {type(modules).__name__}; pass [module], or [] for none"
        )
    states = []
    for module in modules:
        if not isinstance(module, Methods):
            expectation = expected.format(module=module, kind=type(module))
            raise ShardConfigValueError(
                f"Expects {expectation}; {type(module).__name__} is not sharded, call fully_shard on it first"
            )
        states.append(module._own_state())
    return states


def _states_to_prefetch(modules: Iterable[Any]) -> list[ShardState]:
    return _states_of(modules, "FSDPModule but got {kind}: {module}")


def _shard_groups(module: Methods) -> list[tuple[ShardState, dist.ProcessGroup]]:
    """The states of the module's call whose mesh has a shard axis, with the process group of that axis."""
    pairs = [(state, state.declaration.info.shard_group) for state in module._own_state().family]
    return [(state, group) for state, group in pairs if group is not None]


def _own_group(
    shard_group: dist.ProcessGroup | None, made: dict[tuple[int, ...], dist.ProcessGroup]
) -> dist.ProcessGroup:
    """A new process group over the ranks of a shard axis; `made` has one for all meshes with the same ranks."""
    ranks = tuple(dist.get_process_group_ranks(shard_group))
    if ranks not in made:
        # From torch 2.15 on, its type also covers ranks outside of the group; this rank is one of `ranks`.
        group: Any = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="composable_shard_reduce")
        made[ranks] = group
    return made[ranks]


def share_comm_ctx(modules: Iterable[Any]) -> None:
    """Let several roots (say, the model chunks of a pipeline) queue their communication on the same streams.

    Raises:
        ShardConfigValueError: one of them is not sharded.
        ShardConfigStateError: one of them has run already.
    """
    share_lanes(_states_of(modules))
