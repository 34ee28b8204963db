"""What lies at an address, in words: a parameter's shard or its gradient, gathered weights, gradients to be reduced."""

from __future__ import annotations

import gc
import weakref

import torch

from ..._group.param import _all as _params
from ..._memory.pool import BufferPool
from ..._memory.slots import Slot
from ..._torch.distributed import local_tensor


class Names:
    """Knows what the sharded models of this process have in memory."""

    def __init__(self) -> None:
        self._pools: weakref.WeakSet[BufferPool] = weakref.WeakSet()
        self._is_stale = True

    def note_engine(self) -> None:
        """There is one more engine, with a pool."""
        self._is_stale = True

    def at(self, address: int) -> str:
        """What lies at an address; empty if it is of no sharded model."""
        if self._is_stale:  # nobody else knows all pools
            self._pools.update([each for each in gc.get_objects() if type(each) is BufferPool])
            self._is_stale = False
        for slot in [slot for pool in self._pools for slot in pool.addresses]:
            if slot.begin <= address < slot.end and slot.request is not None:
                return _name_in(slot, address)
        for param in list(_params):
            if _lies_in(address, param.local):
                return f"shard {param.fqn}"
            if param.sharded.grad is not None and _lies_in(address, local_tensor(param.sharded.grad)):
                return f"gradient {param.fqn}"
        return ""


def _name_in(slot: Slot, address: int) -> str:
    """The weight at an address in a slot, or what else the slot is leased for."""
    bucket = None if slot.owner is None else slot.owner()
    begins = getattr(bucket, "begins", None)  # in elements, of each weight
    if bucket is None or begins is None:
        assert slot.request is not None
        return slot.request.name
    element = (address - slot.begin) // bucket.dtype.itemsize
    before = [(begin, fqn) for begin, fqn in zip(begins, bucket.fqns, strict=True) if begin <= element]
    return f"weight {max(before)[1]}"


def _lies_in(address: int, tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    storage = tensor.untyped_storage()
    return storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes()
