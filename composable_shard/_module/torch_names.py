"""Facades of a sharded module's state under the private names of torch's FSDP2, for code that uses these names.

A *facade* stores no state: it computes each attribute from our state when it is read, mostly by the table `_names` of
its class. Most attributes are read-only. Setting one raises an error that names the module's method for this setting,
if there is one. Two types of code use facades:

- `torch.distributed.pipelining` runs backward without `Tensor.backward`, calls `post_backward` of each group after the
  last microbatch, and then finalizes the backward explicitly.
- Tools read a group's parameters, phases and meshes.

Torch's `FSDPMemTracker` also wraps forward and backward: it removes the forward hooks of a state, registers its own
hooks, which call `_pre_forward` and `_post_forward`, and replaces `pre_backward` and `post_backward` of a group. So
these attributes can be set. Our hooks are disabled until the tool registers them again (`_Hooks`), and the engine calls
the methods that replaced a group's (see `_engine/listeners.py`).
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.hooks import RemovableHandle

from .._comm.copies import Gradients
from .._engine.engine import LISTENERS
from .._engine.listeners import POST_BACKWARD, PRE_BACKWARD
from .._errors import ShardConfigAssertionError, ShardConfigAttributeError, ShardConfigStateError
from .._group.group import ParamGroup
from .._group.param import ShardedParam
from .._group.phases import GATHERING, RESIDENT, SHARDED, UNSHARDED, GradPhase
from .._policies import CPUOffloadPolicy, HSDPMeshInfo, OffloadPolicy
from .._torch.core import forward_hooks
from .._torch.distributed import (
    ParamModuleInfo,
    ShardedState,
    TrainingState,
    called_by_forward_method,
    data_parallel_mesh_info,
    register_state,
    registered_state,
    spec_of,
)
from .build import build_engine
from .state import ShardState, share_lanes, state_of

_SETTERS = {
    "reduce_grads": "set_requires_gradient_sync",
    "all_reduce_grads": "set_requires_all_reduce",
    "reshard_after_backward": "set_reshard_after_backward",
    "post_forward_mesh_info": "set_reshard_after_forward",
    "gradient_divide_factor": "set_gradient_divide_factor",
    "reduce_scatter_unused_params": "set_reduce_scatter_unused_params",
    "reduce_scatter_max_input_buffers": "set_reduce_scatter_max_input_buffers",
    "force_sum_reduction_for_comms": "set_force_sum_reduction_for_comms",
    "unshard_in_backward": "set_unshard_in_backward",
    "_all_reduce_hook": "set_all_reduce_hook",
    "_all_gather_comm": "set_custom_all_gather",
    "_reduce_scatter_comm": "set_custom_reduce_scatter",
    "_states_to_forward_prefetch": "set_modules_to_forward_prefetch",
    "_states_to_backward_prefetch": "set_modules_to_backward_prefetch",
    "is_last_backward": "set_is_last_backward",
    "post_optim_event": "set_post_optim_event",
}


class _View:
    """Base of the facades: attributes are read-only, except properties with a setter."""

    _names: ClassVar[dict[str, Callable[[Any], Any]]] = {}  # torch's name -> a function that computes it from a facade

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)

    def __getattr__(self, name: str) -> Any:
        if (read := self._names.get(name)) is not None:
            return read(self)
        known = getattr(type(self), name, None)
        if isinstance(known, property):  # its getter has raised an AttributeError: raise that again
            return known.__get__(self)
        raise ShardConfigAttributeError(
            f"{type(self).__name__} has no {name!r}: it only has attributes of torch's FSDP2 state that this library "
            "has as well; for other information see composable_shard.stats and last_record"
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._names]

    def __setattr__(self, name: str, value: Any) -> None:
        known = getattr(type(self), name, None)
        if isinstance(known, property) and known.fset is not None:
            object.__setattr__(self, name, value)
            return
        use = f"; use the module's {_SETTERS[name]}" if name in _SETTERS else ""
        raise ShardConfigAttributeError(f"{type(self).__name__}.{name}: is read-only{use}")


class UnshardedGradient(NamedTuple):
    """A substitute for an unsharded parameter during `post_backward`, when the weights may be freed already."""

    grad: torch.Tensor | None


class ParamFacade(_View):
    """A parameter, under the names of torch's `FSDPParam`."""

    _known: weakref.ref[GroupFacade]  # the group's facade, which owns this one
    _param: ShardedParam
    _index: int

    _names: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "_param_fqn": lambda p: None if p._group._of._root is None else p._param.fqn,
        # sharded
        "_dtensor": attrgetter("_param.sharded"),
        "sharded_param": attrgetter("_param.sharded"),
        "_sharded_local_tensor": attrgetter("_param.local"),
        "_sharding_spec": lambda p: spec_of(p._param.sharded),
        "_spmd_mesh": attrgetter("_param.sharded.device_mesh"),
        "_spmd_placements": lambda p: tuple(p._param.sharded.placements),
        "shard_mesh": attrgetter("_group._info.shard_mesh"),
        "fsdp_placement": lambda p: Shard(p._param.dim),
        "sharded_size": lambda p: p._param.local.size(),
        "contiguous_sharded_stride": lambda p: _strides(p.sharded_size),
        "sharded_state": attrgetter("_group._sharded_state"),
        # unsharded
        "_orig_size": lambda p: torch.Size(p._param.shape),
        "_contiguous_orig_stride": lambda p: _strides(p._orig_size),
        "is_dtensor": lambda p: p._param.parallel is not None,
        "unsharded_accumulated_grad": lambda p: (
            None if p._group._group is None else p._group._group.gradients.accumulated(p._index)
        ),
        # dtypes, devices, meshes
        "orig_dtype": attrgetter("_param.dtype"),
        "offload_to_cpu": attrgetter("_group._info.offloads"),
        "pin_memory": attrgetter("_group._info.pins"),
        "mp_policy": attrgetter("_group.mp_policy"),
        "device": attrgetter("_group.device"),
        "mesh_info": attrgetter("_group.mesh_info"),
        "post_forward_mesh_info": attrgetter("_group.post_forward_mesh_info"),
    }

    def __repr__(self) -> str:
        return f"FSDPParam(fqn={self._param_fqn}, orig_size={self._orig_size})"

    @property
    def _group(self) -> GroupFacade:
        group = self._known()
        if group is None:
            raise ShardConfigStateError(f"parameter {self._param.fqn}: its module has been deleted")
        return group

    @property
    def _module_info(self) -> Any:
        holders = {id(m._parameters): m for each in self._group.modules for m in each.modules()}
        places = [(names, name) for names, name, index in self._group._own.entries.places if index == self._index]
        held = [(holders[id(names)], name) for names, name in places if id(names) in holders]
        (module, name), *shared = held
        return ParamModuleInfo(module, name, [m for m, _ in shared], [name for _, name in shared])

    @property
    def unsharded_param(self) -> torch.Tensor:
        group = self._group._group
        if group is None or group.phase is not UNSHARDED:
            raise ShardConfigAttributeError(f"parameter {self._param.fqn}: is not unsharded; call unshard() first")
        entries = self._group._own.entries
        return entries.installed(self._index) if entries.shown else group.leaves()[self._index]

    @property
    def _unsharded_param(self) -> torch.Tensor | UnshardedGradient:
        event = self._group._event
        if event is None or event.moment != POST_BACKWARD:
            return self.unsharded_param
        return UnshardedGradient(event.gradients[self._index] if event.gradients else None)

    @property
    def param_dtype(self) -> torch.dtype | None:
        computed: torch.dtype = self._param.compute_dtype(self._group._options)
        return None if computed == self._param.dtype else computed

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        policy = self._group._options.mp_policy
        return None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype


@dataclass
class _Event:
    """Work that the engine passes to `pre_backward` or `post_backward`, where torch's group does the same work.

    Attributes:
        moment: `PRE_BACKWARD` or `POST_BACKWARD`.
        work: a function that does the work.
        gradients: the unsharded gradients, at the end of a backward.
        done: whether the work was done.
    """

    moment: str
    work: Callable[[], None]
    gradients: Gradients
    done: bool = False

    def do(self) -> None:
        """Do the work, once."""
        if not self.done:
            self.done = True
            self.work()


class GroupFacade(_View):
    """A parameter group, under the names of torch's `FSDPParamGroup`."""

    _state: weakref.ref[StateFacade]
    _own: ShardState
    _param_group_index: int
    fsdp_params: list[ParamFacade]
    _event: _Event | None  # the current work
    _replacements: dict[str, Callable[..., None]]  # by moment: the method that a tool has set instead of ours
    _seen: weakref.WeakSet[Any]  # all methods that a tool has set since it registered its hooks
    _gone: bool  # whether the tool has removed its hooks again

    _names: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "_info": attrgetter("_own.declaration.info"),
        "_options": attrgetter("_own.declaration.settings.current"),
        "_group": lambda g: None if g._own.bound is None else g._own.bound.group,
        "_engine": lambda g: None if g._own.bound is None else g._own.bound.engine,
        # structure
        "modules": attrgetter("_of._modules"),
        "_num_param_groups": lambda g: len(g._of._fsdp_param_groups),
        "mesh_info": lambda g: data_parallel_mesh_info(g._info),
        "_reshard_after_forward": lambda g: g.post_forward_mesh_info is not None,
        "_use_post_forward_mesh": lambda g: g._reshard_after_forward and g._options.few_ranks > 0,
        "_is_hsdp": lambda g: isinstance(g.mesh_info, HSDPMeshInfo),
        "_reduce_scatter_process_group": lambda g: g._options.comms.reduce_group or g._info.shard_group,
        "_all_reduce_process_group": attrgetter("_info.replicate_group"),
        "device": attrgetter("_info.device"),
        "mp_policy": attrgetter("_options.mp_policy"),
        "_orig_dtype": lambda g: _uniform(p.orig_dtype for p in g._trained),
        "_reduce_dtype": lambda g: _uniform(p.reduce_dtype for p in g._trained),
        "_trained": lambda g: [p for p in g.fsdp_params if p.sharded_param.requires_grad],
        # settings
        "reduce_grads": attrgetter("_options.requires_gradient_sync"),
        "all_reduce_grads": attrgetter("_options.requires_all_reduce"),
        "reshard_after_backward": attrgetter("_options.reshard_after_backward"),
        "unshard_in_backward": attrgetter("_options.unshard_in_backward"),
        "unshard_async_op": lambda g: False,
        "gradient_divide_factor": attrgetter("_options.divide_factor"),
        "reduce_scatter_unused_params": attrgetter("_options.reduce_unused"),
        "reduce_scatter_max_input_buffers": lambda g: g._options.max_reductions or 1,
        "force_sum_reduction_for_comms": attrgetter("_options.only_sums"),
        "_all_reduce_hook": attrgetter("_options.comms.all_reduce_hook"),
        "_all_reduce_hook_stream": attrgetter("_options.comms.hook_stream"),
        "_all_gather_comm": attrgetter("_options.comms.all_gather"),
        "_reduce_scatter_comm": attrgetter("_options.comms.reduce_scatter"),
        # state
        "is_sharded": lambda g: g._sharded_state is ShardedState.SHARDED,
        "is_sharded_post_forward": lambda g: g._sharded_state is ShardedState.SHARDED_POST_FORWARD,
        "is_unsharded": lambda g: g._sharded_state is ShardedState.UNSHARDED,
        "_all_gather_result": lambda g: g._group if g._is_gathering else None,  # not None while a gather is in flight
        "_is_gathering": lambda g: g._group is not None and g._group.phase is GATHERING,
    }

    def __init__(self, state: StateFacade, own: ShardState, index: int) -> None:
        params = [
            ParamFacade(_known=weakref.ref(self), _param=p, _index=at) for at, p in enumerate(own.declaration.params)
        ]
        super().__init__(_state=weakref.ref(state), _own=own, _param_group_index=index, fsdp_params=params)
        self.__dict__.update(_event=None, _replacements={}, _seen=weakref.WeakSet(), _gone=False)

    def __repr__(self) -> str:
        return f"FSDPParamGroup(fqn={self._module_fqn})"

    @property
    def _of(self) -> StateFacade:
        state = self._state()
        if state is None:
            raise ShardConfigStateError("the module of this group has been deleted")
        return state

    @property
    def _module_fqn(self) -> str | None:
        root = self._of._root
        if root is None or root._root_module is None:
            return None
        own = self.modules
        named = root._root_module.named_modules()
        return ", ".join(name for name, module in named if any(module is each for each in own))

    @property
    def post_forward_mesh_info(self) -> Any:
        asked = self._own.declaration
        if not self._options.reshards(self._of._is_root is True) or self._info.shard_group is None:
            return None
        return (
            self.mesh_info
            if asked.small is None or not self._options.few_ranks
            else data_parallel_mesh_info(asked.small)
        )

    @property
    def _all_gather_process_group(self) -> dist.ProcessGroup | None:
        small = self._own.declaration.small
        return small.shard_group if small is not None and self.is_sharded_post_forward else self._info.shard_group

    @property
    def offload_policy(self) -> OffloadPolicy:
        return CPUOffloadPolicy(pin_memory=self._info.pins) if self._info.offloads else OffloadPolicy()

    @property
    def _sharded_state(self) -> Any:
        phase = SHARDED if self._group is None else self._group.phase
        if phase is UNSHARDED:
            return ShardedState.UNSHARDED
        return ShardedState.SHARDED_POST_FORWARD if phase is RESIDENT else ShardedState.SHARDED

    @property
    def _training_state(self) -> Any:
        group, engine = self._group, self._engine
        if group is None or engine is None:
            return TrainingState.IDLE
        if group in engine.active:
            return TrainingState.PRE_BACKWARD
        if group.running:
            return TrainingState.FORWARD
        return TrainingState.POST_BACKWARD if group.gradients.phase is GradPhase.REDUCING else TrainingState.IDLE

    # ---- actions

    @property
    def comm_ctx(self) -> CommContextFacade:
        """The communication streams. Setting the context of another root shares its streams."""
        return self._of._comm_ctx

    @comm_ctx.setter
    def comm_ctx(self, context: CommContextFacade) -> None:
        self._of._share(context)

    def lazy_init(self) -> None:
        """Build the engine, if there is none yet."""
        if self._own.bound is None:
            build_engine(self.modules[0], runs=False)

    def unshard(self, async_op: bool = False) -> None:
        """Issue the gather; `wait_for_unshard` makes the parameters readable."""
        self.lazy_init()
        if self._engine is not None and self._group is not None:
            self._engine.unshard(self._group, wait=False)

    def wait_for_unshard(self) -> None:
        """Make the parameters readable in the modules, if a gather was issued."""
        if self._engine is not None and self._is_gathering:
            self._engine.unshard(self._group, wait=True)

    def reshard(self) -> None:
        """Reshard the parameters. Ignored while a forward reads them."""
        if self._engine is not None and self._group is not None:
            self._engine.reshard(self._group)

    # ---- methods that a tool can wrap

    @property
    def heard(self) -> ParamGroup | None:
        """Part of the `Listener` interface."""
        return None if self._own.bound is None else self._own.bound.group

    def around(self, moment: str, work: Callable[[], None], gradients: Gradients = ()) -> None:
        """Part of the `Listener` interface."""
        before, event = self._event, _Event(moment, work, gradients)
        self.__dict__["_event"] = event
        try:
            if moment == PRE_BACKWARD:
                self.pre_backward(self._own.prefetched(backward=True) is None)
            else:
                self.post_backward()
        finally:
            self.__dict__["_event"] = before
        if not event.done:
            raise ShardConfigStateError(
                f"group {self._module_fqn}: {moment} was replaced by a method that does not call the original one, so "
                "weights are not gathered or gradients are not reduced; call the original method"
            )

    def _do(self, moment: str) -> None:
        event = self._event
        if event is not None and event.moment == moment:
            event.do()

    @property
    def pre_backward(self) -> Callable[..., None]:
        """Called when backward reaches the outputs of the modules; gathers. A replacement must call the original."""
        return self._replacements.get(PRE_BACKWARD, self._pre_backward)

    @pre_backward.setter
    def pre_backward(self, method: Callable[..., None]) -> None:
        self._replace(PRE_BACKWARD, method, self._pre_backward)

    def _pre_backward(self, default_prefetch: bool = True, *unused: Any) -> None:
        self._do(PRE_BACKWARD)

    @property
    def post_backward(self) -> Callable[..., None]:
        """Called after backward has computed the group's gradients, and again after `.grad` of the shards is set.

        The first call reshards and reduces; a replacement must call the original. Calls from other code do nothing,
        because `StateFacade._root_post_backward_final_callback` reduces accumulated gradients in the plan's order.
        """
        return self._replacements.get(POST_BACKWARD, self._post_backward)

    @post_backward.setter
    def post_backward(self, method: Callable[..., None]) -> None:
        self._replace(POST_BACKWARD, method, self._post_backward)

    def _post_backward(self, *unused: Any) -> None:
        self._do(POST_BACKWARD)

    def _replace(self, moment: str, method: Callable[..., None], ours: Callable[..., None]) -> None:
        if method == ours:
            self._replacements.pop(moment, None)
        elif not self._gone or method not in self._seen:
            self._replacements[moment] = method
            if isinstance(method, types.FunctionType):
                self._seen.add(method)
        self._listen()

    def _listen(self) -> None:
        (LISTENERS.add if self._replacements else LISTENERS.discard)(self)

    def _note_tool(self, present: bool) -> None:
        """Note whether a tool's hooks replace ours (`present`); once they are removed, drop its methods as well.

        For a list of modules, a tool wraps the methods once per module, each wrapper around the previous one. When it
        is removed, it would therefore restore one of its own wrappers instead of our method.
        """
        if present and self._gone:
            self._seen.clear()
        self.__dict__["_gone"] = not present
        if not present:
            self._replacements.clear()
            self._listen()


class CommContextFacade(_View):
    """The communication streams of a root, given by its `_own` state; several roots can share them."""


class ContextFacade(_View):
    """State of the root, whose facade is `_top`, under the names of torch's `FSDPStateContext`."""

    _names: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "_engine": attrgetter("_top._engine"),
        "iter_forward_root": lambda c: c._top if c._engine is not None and c._engine.in_forward else None,
        "post_backward_final_callback_queued": lambda c: c._engine is not None and c._engine.in_backward,
        "is_last_backward": lambda c: c._engine is None or c._engine.is_last_backward,
        "post_optim_event": lambda c: None if c._engine is None else c._engine.changed_at,
    }

    @property
    def all_states(self) -> list[StateFacade]:
        module = self._top._root_module
        states = [] if module is None else [registered_state(each) for each in module.modules()]
        return list(dict.fromkeys(state for state in states if isinstance(state, StateFacade)))


@dataclass(frozen=True)
class OurHooks:
    """The functions of `module.py` that a facade calls; passed as arguments because that file imports this one.

    Attributes:
        before, after: the hooks before and after forward.
        adopt: replaces the wrappers that torch's own `register_fsdp_forward_method` has set on a module by ours.
    """

    before: Callable[..., Any]
    after: Callable[..., Any]
    adopt: Callable[[nn.Module], None]


def _stand_in(*unused: Any) -> None:
    """Do nothing, in place of a disabled hook."""


class _Hooks:
    """Our forward pre-hooks, or forward hooks, of a state's modules; replaces torch's `RemovableHandle`.

    Our hooks are disabled when a tool removes them. The tool then registers a hook and sets its handle on the state. If
    that hook is the state's own `_pre_forward` or `_post_forward`, as in torch, our hook is enabled again. Otherwise it
    is the tool's hook.
    """

    def __init__(self, state: StateFacade, name: str, ours: Callable[..., Any]) -> None:
        self._state = weakref.ref(state)
        self._name, self._before, self._ours = name, name == "_pre_forward", ours
        self._lent: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()

    def are_lent(self, module: nn.Module) -> bool:
        """Whether a tool's hook replaces ours on a module."""
        return module in self._lent

    def remove(self) -> None:
        """Disable our hooks; if a tool's hooks replace them already, remove those."""
        for handle in self._lent.values():
            handle.remove()
        state = self._state()
        for module in state._modules if state is not None and not self._lent else ():
            self._swap(module, self._ours, _stand_in)

    def take(self, handle: Any) -> None:
        """Note a hook that a tool has registered on one of the modules.

        Raises:
            ShardConfigAttributeError: `handle` does not belong to a forward hook of these modules.
        """
        state = self._state()
        assert state is not None
        for module in state._modules:
            hooks = forward_hooks(module, self._before)
            if isinstance(handle, RemovableHandle) and handle.hooks_dict_ref() is hooks and handle.id in hooks:
                break
        else:
            raise ShardConfigAttributeError(
                f"{self._name}_hook_handle: expected the handle of a forward hook on one of the state's modules; "
                "register the hook on the module and set the handle that this returns"
            )
        if hooks[handle.id] != getattr(state, self._name):
            self._swap(module, self._ours, _stand_in)
            self._lent[module] = handle
            return
        handle.remove()
        self._swap(module, _stand_in, self._ours)
        self._lent.pop(module, None)

    def _swap(self, module: nn.Module, old: Callable[..., Any], new: Callable[..., Any]) -> None:
        hooks = forward_hooks(module, self._before)
        hooks.update({key: new for key, hook in hooks.items() if hook is old})


class StateFacade(_View):
    """The state of the modules of one call, under the names of torch's `FSDPState`.

    Args:
        modules: the modules of the call; held weakly, because they refer to this object.
        state: their state.
        ours: our hooks.
    """

    _own: ShardState
    _ours: OurHooks
    _hooks: tuple[_Hooks, _Hooks]
    _known: list[weakref.ref[nn.Module]]
    _initialised: bool
    _fsdp_param_groups: list[GroupFacade]
    _comm: CommContextFacade

    _names: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "_modules": lambda s: tuple(module for known in s._known if (module := known()) is not None),
        "_engine": lambda s: None if s._own.bound is None else s._own.bound.engine,
        "_device": attrgetter("_own.declaration.info.device"),
        "_mp_policy": attrgetter("_own.declaration.settings.current.mp_policy"),
        "_auto_reshard_after_forward": lambda s: s._own.declaration.settings.current.reshard_after_forward is None,
        "_states_to_forward_prefetch": lambda s: s._prefetched(backward=False),
        "_states_to_backward_prefetch": lambda s: s._prefetched(backward=True),
        "_state_ctx": lambda s: ContextFacade(_top=s._root or s),
    }

    def __init__(self, modules: Sequence[nn.Module], state: ShardState, ours: OurHooks) -> None:
        super().__init__(_own=state, _ours=ours, _known=[weakref.ref(module) for module in modules])
        own = [each for each in state.family if each.declaration.params]
        self.__dict__.update(
            _hooks=(_Hooks(self, "_pre_forward", ours.before), _Hooks(self, "_post_forward", ours.after)),
            _initialised=False,
            _fsdp_param_groups=[GroupFacade(self, each, index) for index, each in enumerate(own)],
            _comm=CommContextFacade(_own=state),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StateFacade:
        made = memo[id(self)] = object.__new__(StateFacade)
        modules = [copy.deepcopy(module, memo) for module in self._modules]
        StateFacade.__init__(made, modules, copy.deepcopy(self._own, memo), self._ours)
        return made

    @property
    def _fsdp_param_group(self) -> GroupFacade | None:
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise ShardConfigAssertionError(
                f"Expected at most 1 param group, but got {len(groups)}: the call has sharded parameters over several "
                "meshes; read _fsdp_param_groups"
            )
        return groups[0] if groups else None

    @property
    def _root(self) -> StateFacade | None:
        """The facade of the root module's state; None until the root is certain."""
        bound = self._own.bound
        module = None if bound is None else bound.root()
        facade: StateFacade | None = None if module is None else registered_state(module)
        if bound is None or facade is None:
            return None
        # An engine that was built for `unshard` and has not run may still be replaced by the engine of another root.
        return facade if facade._initialised or bound.engine.has_run or bound.engine.in_forward else None

    @property
    def _root_module(self) -> nn.Module | None:
        """The root module of the engine; before the engine is built, the first module of the call."""
        module = None if self._own.bound is None else self._own.bound.root()
        return module if module is not None else next(iter(self._modules), None)

    @property
    def _is_root(self) -> bool | None:
        bound = self._own.bound
        return None if bound is None or self._root is None else bound.is_root

    @property
    def _training_state(self) -> Any:
        states = [group._training_state for group in self._fsdp_param_groups]
        return next((state for state in states if state is not TrainingState.IDLE), TrainingState.IDLE)

    def _prefetched(self, backward: bool) -> list[StateFacade]:
        wanted = self._own.prefetched(backward) or ()
        by_state = {facade._own: facade for facade in self._state_ctx.all_states}
        return [by_state[state] for state in wanted if state in by_state]

    @property
    def _comm_ctx(self) -> CommContextFacade:
        """The communication streams. Setting the context of another root shares its streams."""
        return (self._root or self)._comm

    @_comm_ctx.setter
    def _comm_ctx(self, context: CommContextFacade) -> None:
        self._share(context)

    def _share(self, context: CommContextFacade) -> None:
        if context is not self._comm_ctx:
            share_lanes([context._own, self._own])
            self.__dict__["_comm"] = context

    def _lazy_init(self) -> None:
        """Build the engine, with the module as its root, if there is none yet."""
        if self._own.bound is None:
            build_engine(self._modules[0])
            self.__dict__["_initialised"] = True

    @property
    def _pre_forward_hook_handle(self) -> Any:
        """The hooks before forward; a tool removes them and sets the handle of its own hook."""
        return self._hooks[0]

    @_pre_forward_hook_handle.setter
    def _pre_forward_hook_handle(self, handle: Any) -> None:
        self._set_hooks(0, handle)

    @property
    def _post_forward_hook_handle(self) -> Any:
        """The hooks after forward; used like `_pre_forward_hook_handle`."""
        return self._hooks[1]

    @_post_forward_hook_handle.setter
    def _post_forward_hook_handle(self, handle: Any) -> None:
        self._set_hooks(1, handle)

    def _set_hooks(self, index: int, handle: Any) -> None:
        self._hooks[index].take(handle)
        lent = any(hooks.are_lent(module) for hooks in self._hooks for module in self._modules)
        for group in self._fsdp_param_groups:
            group._note_tool(lent)

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run our hook before forward, when called by a tool's hook that replaces ours.

        The wrapper of torch's own `register_fsdp_forward_method` calls this, too. Then the method that it wraps is
        replaced by ours.

        Raises:
            ShardConfigStateError: the caller is neither of the two.
        """
        if called_by_forward_method():
            self._ours.adopt(module)
            return args, kwargs
        engine = self._engine
        if engine is None or not engine.in_forward or not self._hooks[0].are_lent(module):
            raise ShardConfigStateError(
                f"{type(module).__name__}: _pre_forward and _post_forward cannot be called directly, because a method "
                "that fails between them would leave its weights unsharded; use register_fsdp_forward_method"
            )
        cast = self._ours.before(module, args, kwargs)
        return (args, kwargs) if cast is None else cast

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Run our hook after forward, when called by a tool's hook that replaces ours."""
        return self._ours.after(module, args, output) if self._hooks[1].are_lent(module) else output

    def _reset_iter_state(self) -> None:
        self._modules[0].reset_iter_state()

    def _root_post_backward_final_callback(self) -> None:
        if self._engine is not None:
            self._engine.end_backward_by_hand()


def _uniform(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """The common dtype; None if they differ."""
    kinds = set(dtypes)
    return kinds.pop() if len(kinds) == 1 else None


def _strides(size: torch.Size) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


def state_facade(module: nn.Module) -> StateFacade | None:
    """The facade of a sharded module, which `torch.distributed.fsdp.fully_shard.state` returns; None for others."""
    facade = registered_state(module) if state_of(module) is not None else None
    return facade if isinstance(facade, StateFacade) else None


def show_to_torch(modules: Sequence[nn.Module], state: ShardState, ours: OurHooks) -> None:
    """Register a facade where `torch.distributed.fsdp.fully_shard.state` and other torch code find it."""
    facade = StateFacade(modules, state, ours)
    for module in modules:
        register_state(module, facade)
