"""A parameter group, under the names of torch's `FSDPParamGroup`."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from .._comm.copies import Gradients
from .._group.group import ParamGroup
from .._group.phases import GATHERING, RESIDENT, SHARDED, UNSHARDED, GradPhase
from .._module.build import build_engine
from .._module.state import ShardState, change_settings
from .._policies import CPUOffloadPolicy, HSDPMeshInfo, OffloadPolicy
from .._torch.core import current_backward
from .._torch.distributed import ShardedState, TrainingState, data_parallel_mesh_info
from ..errors import ShardConfigStateError, ShardConfigValueError
from . import listening
from .listening import POST_BACKWARD, PRE_BACKWARD
from .param import ParamFacade
from .views import View, check_idle, uniform

if TYPE_CHECKING:
    from .state import CommContextFacade, StateFacade


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


class GroupFacade(View):
    """A parameter group, under the names of torch's `FSDPParamGroup`."""

    _title = "FSDPParamGroup"

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
        "_orig_dtype": lambda g: uniform(p.orig_dtype for p in g._trained),
        "_reduce_dtype": lambda g: uniform(p.reduce_dtype for p in g._trained),
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
        """The mesh over which parameters are sharded between forward and backward; None if they stay unsharded.

        Setting None keeps them unsharded, as `set_reshard_after_forward(False)`. Setting the group's mesh, or the value
        that was read before, reshards them.
        """
        asked = self._own.declaration
        if not self._options.reshards(self._of._is_root is True) or self._info.shard_group is None:
            return None
        return (
            self.mesh_info
            if asked.small is None or not self._options.few_ranks
            else data_parallel_mesh_info(asked.small)
        )

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        small = self._own.declaration.small
        reshard: bool | int = info is not None
        if small is not None and info is not None and info.shard_mesh_size == small.shard_size != self._info.shard_size:
            reshard = small.shard_size
        elif info is not None and info.shard_mesh_size != self._info.shard_size:
            raise ShardConfigValueError(
                f"post_forward_mesh_info: expected None, the mesh of the group ({self._info.shard_size} ranks) or the "
                f"one that fully_shard(reshard_after_forward=n) made, got {info.shard_mesh_size} ranks"
            )
        change_settings([self._own], reshard_after_forward=reshard)

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
        """The current phase. Setting IDLE has no effect, because an error needs no clean-up."""
        group, engine = self._group, self._engine
        if group is None or engine is None:
            return TrainingState.IDLE
        if any(param._param.in_graph for param in self.fsdp_params):
            return TrainingState.FORWARD if current_backward() < 0 else TrainingState.PRE_BACKWARD
        if any(param._param.in_pre_all_gather for param in self.fsdp_params):  # it may be a prefetch
            recomputes = engine.in_forward and group not in engine.active
            if engine.in_backward and not recomputes:
                return TrainingState.PRE_BACKWARD
            return TrainingState.FORWARD if engine.in_forward else TrainingState.IDLE
        if group in engine.active:
            return TrainingState.PRE_BACKWARD
        if group.running:
            return TrainingState.FORWARD
        return TrainingState.POST_BACKWARD if group.gradients.phase is GradPhase.REDUCING else TrainingState.IDLE

    @_training_state.setter
    def _training_state(self, value: Any) -> None:
        check_idle(value)

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

        The first call reshards and reduces; a replacement must call the original. A call between backwards reduces the
        accumulated gradients of the group if gradient sync is on, and sets `.grad`. Unsharded gradients that code has
        assigned to `.grad` of shards, such as delayed weight gradients, count as accumulated.
        """
        return self._replacements.get(POST_BACKWARD, self._post_backward)

    @post_backward.setter
    def post_backward(self, method: Callable[..., None]) -> None:
        self._replace(POST_BACKWARD, method, self._post_backward)

    def _post_backward(self, *unused: Any) -> None:
        if self._event is not None:
            self._do(POST_BACKWARD)
        elif self._engine is not None and self._group is not None and not self._engine.in_backward:
            self._group.gradients.take_assigned()
            self._engine.reduce_waiting(self._group)
            if self._options.reshard_after_backward and self._options.requires_gradient_sync:
                self._engine.reshard(self._group)

    def finalize_backward(self) -> None:
        """Do nothing: `post_backward` waits for its reduction, and a backward waits for all of its own."""

    def _replace(self, moment: str, method: Callable[..., None], ours: Callable[..., None]) -> None:
        if method == ours:
            self._replacements.pop(moment, None)
        elif not self._gone or method not in self._seen:
            self._replacements[moment] = method
            if isinstance(method, types.FunctionType):
                self._seen.add(method)
        self._listen()

    def _listen(self) -> None:
        (listening.add if self._replacements else listening.discard)(self)

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
