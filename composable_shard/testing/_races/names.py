"""Names for addresses: a parameter's shard or its gradient, an unsharded parameter, gradients in a bucket."""

from __future__ import annotations

import gc
import weakref

import torch

from ..._group.param import _all as _params
from ..._memory.pool import BufferPool
from ..._memory.slots import Slot
from ..._torch.distributed import local_tensor


class Names:
    """Finds names for the memory of the sharded models of this process."""

    def __init__(self) -> None:
        self._pools: weakref.WeakSet[BufferPool] = weakref.WeakSet()
        self._is_stale = True

    def note_engine(self) -> None:
        """Record that an engine with a new pool was created."""
        self._is_stale = True

    def at(self, address: int) -> str:
        """The name of the data at an address; empty if it does not belong to a sharded model."""
        if self._is_stale:  # there is no other list of all pools
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
    """The weight at an address in a slot, or the name of the slot's lease if it contains no weights."""
    bucket = None if slot.owner is None else slot.owner()
    begins = getattr(bucket, "begins", None)  # offset of each weight, in elements
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
