"""The settings of a sharded module: methods of torch's `FSDPModule`, and this library's policies.

Most of these methods replace the frozen `Options` of the affected groups, which forward and backward read while they
run. Those that apply to a whole root set attributes of its engine, or what was asked of it (`state.Asked`).
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from .._engine.engine import Engine
from .._group.extension import is_extended
from .._plan.plan import ShardPlan
from .._policies import CommPolicy, Comms, PoolPolicy, PrefetchPolicy, as_bool, plain_value
from .._torch.distributed import is_torchs_comm, process_group_allocation, registered_state, symmetric_memory_gather
from ..errors import (
    ShardConfigStateAssertionError,
    ShardConfigStateError,
    ShardConfigTypeError,
    ShardConfigTypeValueError,
    ShardConfigUnsupportedError,
    ShardConfigValueError,
)
from .additions import WatchedEntries
from .state import STATE, ShardState, change_settings, share_lanes, states_below


class GradientReductionHandle:
    """A handle for the reductions of a backward that may still be in flight."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def wait(self) -> None:
        """Wait for the reductions and set `.grad`."""
        self._engine.finish_backward()


class Methods(TorchFSDPModule):
    """Settings with the names and signatures of torch, and policies of the plan.

    `recurse` applies a setting to the sharded modules below as well. Change settings of gathers and reductions only
    between iterations, and identically on all ranks.

    Set policies on the root, the outermost sharded module, identically on all ranks. A policy that is set between two
    forwards takes effect in the next one. Ranks compare their plans before the first collective of that forward. If one
    rank has another policy, or has set none, all ranks raise `RankMismatchError`.
    """

    _orig_cls_mro_index = 4  # of Linear, for example: FSDPLinear, FSDPModule, Methods, torch's FSDPModule, Linear

    # ---- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients.

        While this is off, backward accumulates unsharded gradients in the dtype of reduction. A later backward with
        this setting on adds its own gradients and reduces the sum. `zero_grad` clears accumulated gradients. This call
        also sets `set_requires_all_reduce` to the same value.

        After `set_manual_backward_finalization(True)` on this module, this call also installs the sharded parameters:
        torch's pipelines call it before each backward, and look for the leaves of the graph in the modules.

        Raises:
            ShardConfigValueError: the value is not a bool, number, None or tensor of one element.
        """
        sync = as_bool("requires_gradient_sync", requires_gradient_sync)
        _set(self, recurse, requires_gradient_sync=sync, requires_all_reduce=sync)
        if self._own_state().ends_by_hand:
            _show_sharded(self)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward, on a mesh with replicas, all-reduces gradients over the replicas.

        While this is off, backward stops after the reduce-scatter and accumulates the sharded gradients separately from
        `.grad`. A later backward with this setting on adds its own gradients and all-reduces the sum over the replicas.
        `zero_grad` clears the accumulated gradients.

        Raises:
            ShardConfigValueError: the value is not a bool, number, None or tensor of one element.
        """
        _set(self, recurse, requires_all_reduce=as_bool("requires_all_reduce", requires_all_reduce))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether each following backward is the last one before the optimizer step.

        Pipelines call this. Call it on the root; it applies to all sharded modules below. The value matters only to
        `torch.autograd.grad` while gradient sync is off: with False it accumulates gradients, with True it reduces
        them. `backward` follows gradient sync alone, and waits at its end for the reductions that it has issued. After
        `set_manual_backward_finalization(True)`, the value has no effect, and `finalize_backward` waits for them.

        This call also installs the sharded parameters. They are the leaves of the graph, and torch's zero-bubble
        pipelines look for leaves in the modules.

        Raises:
            ShardConfigValueError: the value is not a bool, number, None or tensor of one element.
        """
        self._own_state().set_for_root(is_last_backward=as_bool("is_last_backward", is_last_backward))
        _show_sharded(self)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether the caller calls `finalize_backward` after one or several backwards. Call this on the root.

        Raises:
            ShardConfigValueError: the value is not a bool, number, None or tensor of one element.
        """
        self._own_state().set_for_root(ends_by_hand=as_bool("enabled", enabled))

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce accumulated gradients (if gradient sync is on), wait for all reductions, and reshard.

        Args:
            async_op: return immediately, with a handle whose `wait()` waits for the reductions and sets `.grad`.
        """
        bound, async_op = self._own_state().bound, as_bool("async_op", async_op)
        if bound is None:
            return None
        bound.engine.finish_backward(wait=not async_op)
        return GradientReductionHandle(bound.engine) if async_op else None

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's gradients, summed over all ranks, by `factor` instead of the number of ranks.

        Args:
            factor: a number, or a tensor of one element; None restores the number of ranks.

        Raises:
            ShardConfigValueError: the factor is not a positive, finite number.
        """
        plain = plain_value(factor)
        number = float(plain) if isinstance(plain, numbers.Real) and not isinstance(plain, bool) else math.nan
        if plain is not None and not 0 < number < math.inf:
            raise ShardConfigValueError(f"factor: expected a positive, finite number, got {factor!r}")
        _set(self, False, divide_factor=None if plain is None else number)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether this module's reductions use only sums, with separate divisions, and never the backend's mean.

        Raises:
            ShardConfigValueError: the value is not a bool, number, None or tensor of one element.
        """
        _set(self, False, only_sums=as_bool("enable", enable))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters that got no gradient in backward get a gradient of zeros.

        With this setting, the losses of ranks may depend on different modules in a step: a backward reduces every group
        that was gathered since the last backward or is still unsharded, even if the group got no gradient.

        Without it, a rank does not reduce a group that got no gradient at all. If the group got one on other ranks, all
        ranks raise `RankMismatchError`; in FSDP2 they hang. (If only some parameters of a group got gradients, no
        setting is needed.)

        Set it on modules of experts, if a rank may use none of the experts of a group. Do not set it on other modules:
        groups with this setting are reduced only after backward, in the same order on all ranks, and their unsharded
        gradients take memory until then.

        All ranks must still run the same modules, because a group is gathered only if its modules run. If they cannot,
        call `unshard` on all ranks, before the forward, for each module that only some ranks will run, and keep its
        parameters (`reshard_after_forward=False`).

        Raises:
            ShardConfigValueError: the value is not a bool, number, None or tensor of one element.
        """
        _set(self, recurse, reduce_unused=as_bool("reduce_scatter_unused_params", reduce_scatter_unused_params))

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may be in flight: issuing one more waits for the oldest.

        The default is 2. On a CPU without replicas, backward by default also waits for reductions before it gathers the
        next parameters, so that both use the same memory.

        Raises:
            ShardConfigTypeError: the value is not an int.
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
        """Set whether the unsharded parameters are freed between forward and backward.

        Raises:
            ShardConfigValueError: the value is not a bool, nor a NumPy scalar or tensor with a bool.
        """
        reshard = plain_value(reshard_after_forward)
        if not isinstance(reshard, bool):  # an int could be meant as a number of ranks, which only `fully_shard` takes
            raise ShardConfigTypeValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}: {reshard_after_forward!r}"
            )
        _set(self, recurse, reshard_after_forward=reshard)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether the unsharded parameters are freed after backward; False saves gathers while accumulating.

        The setting at the end of a backward applies to the weights of this backward, even if it changes before the next
        forward. An optimizer step always reshards them. If you change sharded parameters in another way, call `reshard`
        afterwards, because changes by foreach functions or through ``.data`` cannot be detected.

        Raises:
            ShardConfigValueError: the value is not a bool, number, None or tensor of one element.
        """
        _set(self, recurse, reshard_after_backward=as_bool("reshard_after_backward", reshard_after_backward))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this module's parameters. False saves a gather if backward reads no weight.

        For example, an embedding's backward reads no weight. If backward does read a weight, it is gathered then.

        Raises:
            ShardConfigValueError: the value is not a bool, number, None or tensor of one element.
        """
        _set(self, False, unshard_in_backward=as_bool("unshard_in_backward", unshard_in_backward))

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether unsharded parameters keep their memory permanently, so that their addresses do not change.

        This takes the memory of all unsharded parameters all the time. It is needed if something other than autograd
        refers to weights: a CUDA graph of code between sharded modules, `torch.func` transforms in a forward, or a
        selective activation checkpoint that saves views of weights.

        Raises:
            ShardConfigValueError: the value is not a bool, number, None or tensor of one element.
        """
        _set(self, recurse, keep_storage=as_bool("keep", keep))

    def set_modules_to_forward_prefetch(self, modules: Iterable[Any]) -> None:
        """Gather these modules' parameters when this module's forward begins, instead of the next module's.

        Raises:
            ShardConfigTypeError: `modules` is not a list or another iterable.
            ShardConfigValueError: one of the modules is not sharded, or has another root.
        """
        self._own_state().set_prefetch(False, _states_to_prefetch(modules))

    def set_modules_to_backward_prefetch(self, modules: Iterable[Any]) -> None:
        """Gather these modules' parameters when this module's backward begins, instead of the next module's.

        Raises:
            ShardConfigTypeError: `modules` is not a list or another iterable.
            ShardConfigValueError: one of the modules is not sharded, or has another root.
        """
        self._own_state().set_prefetch(True, _states_to_prefetch(modules))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the gathers of the next forward wait only for `event`, not for all work queued before that forward.

        Call it on the root, after every optimizer step, with an event that was recorded right after that step.
        """
        self._own_state().set_for_root(changed_at=event)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: torch's setting avoids allocations on other streams. Here, only low-bit gathers make any."""

    # ---- communication

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this module's parameters with `comm`, an object like torch's `AllGather`; None for the default."""
        _set_comms(self, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this module's gradients with `comm`, an object like torch's `ReduceScatter`; None for the default."""
        _set_comms(self, reduce_scatter=comm)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with this module's reduced gradients: a 1D tensor of averages, which it may change in place.

        Args:
            hook: called once for each dtype of reduction; None removes the hook.
            stream: the stream on which the hook runs; by default, the stream of reductions.

        Raises:
            ShardConfigTypeError: the hook is neither a function nor None.
            ShardConfigValueError: a stream is given and the mesh has replicas.
        """
        if hook is not None and not callable(hook):
            raise ShardConfigTypeError(f"hook: expected a function or None, got {type(hook).__name__}")
        infos = [state.declaration.info for state in self._own_state().family]
        if stream is not None and any(info.replicate_group is not None for info in infos):
            raise ShardConfigValueError(
                "stream cannot be set when using native HSDP: the hook runs after the all-reduce over the replicas; "
                "leave stream out"
            )
        _set_comms(self, all_reduce_hook=hook, hook_stream=stream)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Use a separate process group (a separate communicator) for reductions, so that they can overlap with gathers.

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
        """Set the formats in which parameters and gradients are communicated.

        Call it before the first forward, with the same policy on all ranks.

        Raises:
            ShardConfigTypeError: `policy` is not a CommPolicy.
            ShardConfigStateError: the model has run, or has been unsharded.
            ShardConfigValueError: a parameter defines its own all-gather, or custom communication is set, which does
                not support quantized bytes.
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

        With `PrefetchPolicy.auto`, the second and third training step are measured. In these steps, each collective is
        waited for immediately. Afterwards the schedule hides as much communication as possible. Two steps are measured
        again if a group runs that was not measured before, and after 64 steps, 128, 256, ... in case times have
        changed. If they have, a new plan is made.

        Raises:
            ShardConfigTypeError: `policy` is not a PrefetchPolicy.
            ShardConfigStateError: this is not the root. Before the first forward, the error is raised by the first
                forward of the root instead.
        """
        _check_kind("policy", PrefetchPolicy, policy)
        self._own_state().ask(prefetch=policy)

    def set_pool_policy(self, policy: PoolPolicy) -> None:
        """Set how much memory unsharded parameters and communication buffers may take.

        Raises:
            ShardConfigTypeError: `policy` is not a PoolPolicy.
            ShardConfigStateError: this is not the root. Before the first forward, the error is raised by the first
                forward of the root instead.
            PoolBudgetError: a group does not fit into the budget. Before the first forward, the error is raised by that
                forward instead.
        """
        _check_kind("policy", PoolPolicy, policy)
        self._own_state().ask(pool=policy)

    def set_plan(self, plan: ShardPlan) -> None:
        """Follow a plan that was made earlier or in another process: its order, its schedule and its policies.

        If forwards then run in another order, or a setter changes which groups reshard, a new schedule is made under
        the plan's policies, with one warning.

        Raises:
            ShardConfigTypeError: `plan` is not a ShardPlan.
            ShardConfigStateError: this is not the root. Before the first forward, the error is raised by the first
                forward of the root instead.
            ShardConfigValueError: the plan belongs to another model. Before the first forward, the error is raised by
                that forward instead.
        """
        _check_kind("plan", ShardPlan, plan)
        self._own_state().ask(plan=plan, prefetch=None, pool=None)

    # ---- state

    def allow_unmanaged_parameters(self, *, recurse: bool = True) -> None:
        """Accept parameters that are added to this module, or anywhere below it, after `fully_shard`.

        These parameters are not sharded and their gradients are not averaged: they train on each rank separately, as
        under torch's FSDP2, unless you average the gradients yourself. Without this call they raise an error. The
        alternatives are to call `fully_shard` on the module that was added, or to average the gradients in
        post-accumulate hooks (as Transformers does for adapters that are added later).

        Args:
            recurse: whether to accept parameters in the sharded modules that are currently below this one, too.
        """
        for state in _states(self, recurse):
            if isinstance(state.entries, WatchedEntries):
                state.entries.allow_unmanaged()

    def reset_iter_state(self) -> None:
        """Discard the state of a forward or backward that an exception has ended.

        Gradients in flight and accumulated gradients are lost. The next forward does the same without this call, but
        keeps accumulated gradients.

        Raises:
            ShardConfigStateError: this is not the root (also a RuntimeError).
        """
        bound = self._own_state().bound
        if bound is None:
            return
        if not bound.is_root:
            raise ShardConfigStateError(
                "reset_iter_state must be called on the root FSDP module, whose forward runs first"
            )
        bound.engine.reset()

    def _get_fsdp_state(self) -> Any:
        return registered_state(self)  # type: ignore[arg-type]

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
    change_settings(_states(module, recurse), **changes)


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
            "set_comm_policy: the model has run or was unsharded; call it right after fully_shard, before the first "
            "forward"
        )
    _check_understood(state, own.settings.current.comms, policy)
    if policy.gather is not None and (extended := [p.fqn for p in own.params if is_extended(p)]):
        raise ShardConfigValueError(
            f"CommPolicy(gather={policy.gather!r}): parameter {extended[0]} defines its own all-gather "
            "(fsdp_pre_all_gather), which defines the format itself; set the policy on each other module with "
            "recurse=False, and a policy without gather on this one"
        )


def _check_understood(state: ShardState, comms: Comms, policy: CommPolicy) -> None:
    """Refuse custom communication for formats that only this library can decode."""
    for name, form, custom, method in (
        ("gather", policy.gather, comms.all_gather, "set_custom_all_gather(None)"),
        ("reduce", policy.reduce, comms.reduce_scatter, "set_custom_reduce_scatter(None)"),
    ):
        if form is not None and custom is not None:
            names = [param.fqn for param in state.declaration.params[:1]] or ["no parameters"]
            raise ShardConfigValueError(
                f"CommPolicy({name}={form!r}) and {type(custom).__name__} on the module with {names[0]}: custom "
                f"communication expects tensors of the parameters' dtype, not quantised bytes; call {method} there, or "
                f"set a policy without {name} on it"
            )


def _refuse_custom(module: Methods, what: str, own: str) -> None:
    """Refuse custom communication, except torch's own class `own`, which the method `what` sets."""
    comms = module._own_state().declaration.settings.current.comms
    for kind, comm in (("all gather", comms.all_gather), ("reduce scatter", comms.reduce_scatter)):
        if comm is not None and not is_torchs_comm(comm, own):
            raise ShardConfigStateAssertionError(
                f"cannot call {what}() when {kind} comm is custom: {type(comm).__name__} allocates its own buffers; "
                "set only one of the two"
            )


def _states_of(modules: Iterable[Any], expected: str = "list of FSDPModules but got {module}") -> list[ShardState]:
    # A sharded Sequential is also an iterable: of its children.
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
    """Make a process group over the ranks of a shard axis; `made` caches it for meshes with the same ranks."""
    ranks = tuple(dist.get_process_group_ranks(shard_group))
    if ranks not in made:
        # Typed as Any, because from torch 2.15 on the result type includes that of ranks outside of the group.
        group: Any = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="composable_shard_reduce")
        made[ranks] = group
    return made[ranks]


def share_comm_ctx(modules: Iterable[Any]) -> None:
    """Make several roots (for example, the model chunks of a pipeline) queue their communication on the same streams.

    Raises:
        ShardConfigValueError: one of the modules is not sharded.
        ShardConfigStateError: one of the modules has an engine already, because it has run or was unsharded.
    """
    share_lanes(_states_of(modules))


# Methods of FSDP2 in versions of torch after 2.15, by name: what to do instead.
_NEWER = {
    "set_all_gather_layout": "the pool decides where gathered parameters are. Use set_custom_all_gather",
    "set_all_gather_output_fn": "the pool decides where gathered parameters are. Use set_custom_all_gather",
    "set_reduce_scatter_input_fn": "transports copy gradients themselves. Use set_custom_reduce_scatter",
}


def refuse_newer(cls: type, base: type) -> None:
    """Make methods of torch's `FSDPModule` that `cls` does not override raise an error.

    They belong to a newer version of torch, and would change state that modules of this library do not have.
    """
    for name, value in vars(base).items():
        if inspect.isfunction(value) and not name.startswith("_") and getattr(cls, name) is value:
            setattr(cls, name, _newer(name))


def _newer(name: str) -> Callable[..., None]:
    def refuse(_self: object, *_args: Any, **_kwargs: Any) -> None:
        raise ShardConfigUnsupportedError(
            f"{name}: a method of FSDP2 in torch {torch.__version__} that composable_shard does not support: "
            f"{_NEWER.get(name, 'this version of the library was written for torch up to 2.15')}"
        )

    return refuse
