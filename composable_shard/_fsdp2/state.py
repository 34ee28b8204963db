"""The state of a sharded module, under the names of torch's `FSDPState`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar

from torch import nn

from .._module.build import build_engine
from .._module.forward_hooks import post_forward, pre_forward
from .._module.forward_methods import adopt_forward_methods
from .._module.state import ShardState, change_settings, share_lanes
from .._torch.distributed import OurState, TrainingState, called_by_forward_method, registered_state
from ..errors import ShardConfigAssertionError, ShardConfigStateError
from .group import GroupFacade
from .hooks import Hooks
from .lazy_state import LazyState
from .views import View, check_idle, refuse_inherited


class CommContextFacade(View):
    """The communication streams of a root, given by its `_own` state; several roots can share them."""

    _title = "FSDPCommContext"


class ContextFacade(View):
    """State of the root, under the names of torch's `FSDPStateContext`; `_facade` returns the facade of the root."""

    _title = "FSDPStateContext"

    _names: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "_top": lambda c: c._facade(),
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
        return list(dict.fromkeys(state for state in states if isinstance(state, OurState)))  # type: ignore[misc]


class StateFacade(View, OurState):
    """The state of the modules of one call, under the names of torch's `FSDPState`."""

    _title = "FSDPState"

    _own: ShardState
    _hooks: tuple[Hooks, Hooks]
    _known: list[weakref.ref[nn.Module]]
    _initialised: bool
    _fsdp_param_groups: list[GroupFacade]  # type: ignore[assignment]
    _comm: CommContextFacade
    _context: ContextFacade  # as the root's

    _names: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "_modules": lambda s: tuple(module for known in s._known if (module := known()) is not None),
        "_engine": lambda s: None if s._own.bound is None else s._own.bound.engine,
        "_device": attrgetter("_own.declaration.info.device"),
        "_mp_policy": attrgetter("_own.declaration.settings.current.mp_policy"),
        "_states_to_forward_prefetch": lambda s: s._prefetched(backward=False),
        "_states_to_backward_prefetch": lambda s: s._prefetched(backward=True),
        "_state_ctx": lambda s: (s._root or s)._context,
    }

    def load(self, _known: list[weakref.ref[nn.Module]], _own: ShardState) -> None:
        """Set the attributes of an object that was a `LazyState`.

        Args:
            _known: the modules of the call; held weakly, because they refer to this object.
            _own: their state.
        """
        own = [each for each in _own.family if each.declaration.params]
        self.__dict__.update(_known=_known, _own=_own, _initialised=False, _comm=CommContextFacade(_own=_own))
        self.__dict__["_context"] = ContextFacade(_facade=weakref.ref(self))
        self.__dict__["_hooks"] = (Hooks(self, "_pre_forward", pre_forward), Hooks(self, "_post_forward", post_forward))
        self.__dict__["_fsdp_param_groups"] = [GroupFacade(self, each, index) for index, each in enumerate(own)]

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyState:
        return LazyState.__deepcopy__(self, memo)  # type: ignore[arg-type]  # the copy is lazy again

    @property
    def _fsdp_param_group(self) -> GroupFacade | None:  # type: ignore[override]
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
    def _is_root(self) -> bool | None:  # type: ignore[override]
        bound = self._own.bound
        return None if bound is None or self._root is None else bound.is_root

    @property
    def _training_state(self) -> Any:
        """The current phase. Setting IDLE has no effect, because an error needs no clean-up."""
        states = [group._training_state for group in self._fsdp_param_groups]
        return next((state for state in states if state is not TrainingState.IDLE), TrainingState.IDLE)

    @_training_state.setter
    def _training_state(self, value: Any) -> None:
        check_idle(value)

    @property
    def _auto_reshard_after_forward(self) -> bool:
        """Whether parameters are resharded after forward except in the root, the default. Can be set."""
        return self._own.declaration.settings.current.reshard_after_forward is None

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, value: bool) -> None:
        if bool(value) is not self._auto_reshard_after_forward:
            change_settings(self._own.family, reshard_after_forward=None if value else True)

    def _prefetched(self, backward: bool) -> list[StateFacade]:
        wanted = self._own.prefetched(backward) or ()
        by_state = {facade._own: facade for facade in self._state_ctx.all_states}
        return [by_state[state] for state in wanted if state in by_state]

    @property  # type: ignore[override]
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
            if not self._modules:
                raise ShardConfigStateError("_lazy_init: the modules of this state have been deleted")
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
            adopt_forward_methods(module)
            return args, kwargs
        engine = self._engine
        if engine is None or not engine.in_forward or not self._hooks[0].are_lent(module):
            raise ShardConfigStateError(
                f"{type(module).__name__}: _pre_forward and _post_forward cannot be called directly, because a method "
                "that fails between them would leave its weights unsharded; use register_fsdp_forward_method"
            )
        cast = pre_forward(module, args, kwargs)
        return (args, kwargs) if cast is None else cast

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Run our hook after forward, when called by a tool's hook that replaces ours."""
        return post_forward(module, args, output) if self._hooks[1].are_lent(module) else output

    def _reset_iter_state(self) -> None:
        module: Any = self._modules[0]
        module.reset_iter_state()

    def _root_post_backward_final_callback(self) -> None:
        if self._engine is not None:
            self._engine.finish_backward()


refuse_inherited(StateFacade, OurState.__mro__[1])
