"""State-dict hooks: save the sharded parameters even while unsharded ones are installed, and load full tensors, too.

The hooks find the state through the module that they are called with, so that a copied module uses its own state.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._group.param import ShardedParam
from .._torch.core import HANDLES
from .state import ShardState

OWNED_BY = "_shard_owner"  # key in a module's `__dict__`: the `StateDictOwner` of its own parameters


def watch_state_dict(owner: nn.Module, state: ShardState) -> None:
    """Hook the state dicts of `owner`, a module that holds parameters of `state`."""
    owner.__dict__[OWNED_BY] = StateDictOwner(state)
    owner.register_state_dict_pre_hook(_before_save)  # type: ignore[no-untyped-call]
    owner.register_state_dict_post_hook(_after_save)  # type: ignore[no-untyped-call]
    owner.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
    HANDLES.give(3)


class StateDictOwner:
    """A weak reference to the state of a module's parameters, in the module's `__dict__`. A copied module's
    refers to the copied state.

    It is also the `WatchedEntries.claim` of the state: called with a module into which parameters were moved.
    """

    def __init__(self, state: ShardState) -> None:
        self.state = weakref.ref(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictOwner:
        state = self.state()
        return self if state is None else StateDictOwner(copy.deepcopy(state, memo))

    def __call__(self, module: nn.Module) -> None:
        """Watch a module into which parameters of the state were moved."""
        state = self.state()
        if state is not None and OWNED_BY not in module.__dict__:
            watch_state_dict(module, state)


def states_with_parameters_in(model: nn.Module) -> list[ShardState]:
    """List the states with parameters in `model` or below, each once, even if only an enclosing module is sharded."""
    owners = [owner for module in model.modules() if (owner := module.__dict__.get(OWNED_BY)) is not None]
    firsts = [state for owner in owners if (state := owner.state()) is not None]
    return list(dict.fromkeys(each for state in firsts for each in state.family))


def _params(module: nn.Module) -> list[tuple[ShardState, str, ShardedParam]]:
    """The sharded parameters that a module itself holds: state, name in the module, parameter."""
    first: ShardState | None = module.__dict__[OWNED_BY].state()
    return [
        (state, name, state.entries.params[index])
        for state in (first.family if first is not None else ())
        for names, name, index in state.entries.places
        if names is module._parameters
    ]


def _before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    # Users' hooks on this module run before `_after_save`, and may rename or replace the tensors. So install the
    # sharded parameters here already.
    for state in {state: None for state, _, _ in _params(module)}:
        state.check_edits()
        state.show_sharded()


def _after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    params = _params(module)
    for state in {state: None for state, _, _ in params}:
        state.check_edits()
    for state, name, param in params:
        value = state_dict.get(prefix + name)
        # A module saves the installed tensors. Unsharded ones are replaced here. If sharded parameters were installed,
        # a DTensor is one of them, or comes from a user's hook, and is left alone.
        if value is not None and (state.entries.are_replaced or not isinstance(value, DTensor)):
            state_dict[prefix + name] = value if value is param.sharded else param.sharded.detach()
    for state in {state: None for state, _, _ in params}:
        # After state_dict(), callers look up parameters by name, and must find those that optimizers hold.
        state.show_sharded()


def _is_placed_otherwise(given: DTensor, sharded: torch.Tensor) -> bool:
    assert isinstance(sharded, DTensor)
    alike = given.device_mesh == sharded.device_mesh and given.shape == sharded.shape
    return alike and given.placements != sharded.placements and not given.is_meta


def _before_load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
) -> None:
    params = _params(module)
    for state in {state: None for state, _, _ in params}:
        state.before_load()
    for state, name, param in params:
        given = state_dict.get(prefix + name)
        if not isinstance(given, torch.Tensor):
            continue
        if isinstance(given, DTensor):
            # Copying redistributes a DTensor. With assign=True it must already have the same placements.
            if not (local_metadata.get("assign_to_params_buffers") and _is_placed_otherwise(given, param.sharded)):
                continue
            given = given.full_tensor()
        if tuple(given.shape) in (param.shape, tuple(param.sharded.shape)):
            state_dict[prefix + name] = param.piece_of(given, state.declaration.info)
