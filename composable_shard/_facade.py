"""What other code of torch reads of the state of an FSDP module: names it relies on, and nothing more.

`torch.distributed.pipelining` runs backward without `Tensor.backward`, asks each group for its `post_backward` when the
last micro-batch is through, and then ends the backward by hand.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn

from ._errors import ShardConfigStateError
from ._state import ShardState, named_states, state_of
from ._torch_distributed import register_state


class GroupFacade:
    """A group of parameters."""

    def post_backward(self) -> None:
        """Nothing: what is kept is reduced in plan order, by `StateFacade._root_post_backward_final_callback`."""


class ContextFacade:
    """What the states of one root share."""

    def __init__(self, states: list[StateFacade]) -> None:
        self.all_states = states


class StateFacade:
    """The state of a sharded module, which it holds weakly, for the module holds it."""

    def __init__(self, module: nn.Module, state: ShardState) -> None:
        self._module = weakref.ref(module)
        self._state = state

    def __deepcopy__(self, memo: dict[int, Any]) -> StateFacade:
        module = self._module()
        assert module is not None
        return StateFacade(copy.deepcopy(module, memo), copy.deepcopy(self._state, memo))

    @property
    def _fsdp_param_groups(self) -> list[GroupFacade]:
        return [GroupFacade() for each in self._state.family if each.declaration.params]

    @property
    def _fsdp_param_group(self) -> GroupFacade | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _state_ctx(self) -> ContextFacade:
        module = self._module()
        assert module is not None
        return ContextFacade([StateFacade(module, state) for _, state in named_states(module)])

    def _root_post_backward_final_callback(self) -> None:
        if self._state.bound is not None:
            self._state.bound.engine.end_backward_by_hand()


def state_facade(module: nn.Module) -> StateFacade:
    """The state of a sharded module, as `torch.distributed.fsdp.fully_shard.state` gives it.

    Raises:
        ShardConfigStateError: the module is not sharded.
    """
    state = state_of(module)
    if state is None:
        raise ShardConfigStateError(f"{type(module).__name__} is not sharded; call fully_shard on it first")
    return StateFacade(module, state)


def show_to_torch(module: nn.Module, state: ShardState) -> None:
    """Let `torch.distributed.fsdp.fully_shard.state` find the state too: torch's own code knows no other way."""
    register_state(module, StateFacade(module, state))
