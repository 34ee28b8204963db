"""What lies at an address, in words: a parameter's shard, gathered weights, gradients that are reduced."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..._group.param import ShardedParam
from ..._group.param import _all as _living
from ..._memory.pool import BufferPool
from ..._module.state import state_of
from ..._torch.distributed import local_tensor


def name_at(address: int) -> str:
    """What the sharded models of this process have at an address; empty if it is none of theirs."""
    params = list(_living)
    for pool in _pools(params):
        for slot in pool.addresses:
            if slot.begin <= address < slot.end and slot.request is not None:
                return slot.request.name
    for param in params:
        if _lies_in(address, param.local):
            return f"shard {param.fqn}"
        if param.sharded.grad is not None and _lies_in(address, local_tensor(param.sharded.grad)):
            return f"gradient {param.fqn}"
    return ""


def _pools(params: list[ShardedParam]) -> Iterator[BufferPool]:
    modules = {module for param in params if param.module is not None and (module := param.module()) is not None}
    states = filter(None, map(state_of, modules))
    bound = {state.bound.engine for state in states if state.bound is not None}
    return (engine.pool for engine in bound)


def _lies_in(address: int, tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    storage = tensor.untyped_storage()
    return storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes()
