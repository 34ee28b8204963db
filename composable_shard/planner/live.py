"""The memory of steps that really run, with fake tensors: what this library and torch allocate, counted.

`advise` derives memory from plans; here the sharded model itself runs, on one rank of a world whose other ranks do not
exist, so that whatever it does is counted. It takes longer, and is what the planner is held against.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import testing
from .._status import stats
from .._torch.core import tree_tensors
from .._wrap import shard_auto
from .checkpointing import checkpoint_modules
from .memory import Bytes
from .sources import Precision, Source, named_blocks
from .strategies import Strategy

_STEPS = 3  # the first ones learn the order and allocate the pool


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operators have seen, and keeps what there was when they were most.

    Attributes:
        peak: most bytes since `reset`.
        at_peak: then, the bytes of each storage, by its address.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.at_peak: dict[int, int] = {}
        self._storages: dict[int, Any] = {}

    def reset(self) -> None:
        """Begin anew with what there is."""
        self.peak, self.at_peak = 0, {}
        self._look()

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that no operator has seen yet."""
        for tensor in tensors:
            storage = _storage_of(tensor)
            key = storage_key(tensor)
            if key not in self._storages:
                self._storages[key] = weakref.ref(storage)
                weakref.finalize(storage, self._storages.pop, key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.note(tree_tensors((args, kwargs or {}, out)))
        self._look()
        return out

    def _look(self) -> None:
        storages = {key: reference() for key, reference in list(self._storages.items())}
        sizes = {
            key: each.nbytes() for key, each in storages.items() if each is not None
        }  # which a pool may have changed
        total = _distinct(each for each in storages.values() if each is not None)
        if total > self.peak:
            self.peak, self.at_peak = total, sizes


def _distinct(storages: Iterable[torch.UntypedStorage]) -> int:
    """Bytes of storages, memory that lies in several of them counted once; fake ones have no addresses."""
    total = end = 0
    for begin, nbytes in sorted(
        (each.data_ptr() if each.device.type != "meta" else 0, each.nbytes()) for each in storages
    ):
        total += nbytes if begin == 0 else max(0, begin + nbytes - max(begin, end))
        end = max(end, begin + nbytes) if begin else end
    return total


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def storage_key(tensor: torch.Tensor) -> int:
    """By which `LiveBytes` knows a tensor's storage."""
    return int(_storage_of(tensor)._cdata)


def live_bytes(source: Source, strategy: Strategy, precision: Precision, sequences: int) -> Bytes:
    """The bytes of each kind on a device when all are most, in a step of a sharded model that has run before.

    Args:
        source: of the model.
        strategy: without offload and tensor parallelism.
        precision: of its parameters.
        sequences: of the batch of a rank.
    """
    layout = strategy.layout
    with testing.fake(layout.shard * layout.replicas), FakeTensorMode():
        model, step = source.made()
        checkpoint_modules(named_blocks(model).values(), strategy.checkpointing)
        shard_auto(model, strategy=strategy.name, replicas=layout.replicas, mp_policy=precision.policy)  # type: ignore[arg-type]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        counter = LiveBytes()
        with counter:
            counter.note(model.parameters())
            for _ in range(_STEPS):
                counter.reset()
                step(model, sequences).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        return _by_kind(counter, model, optimizer)


def _by_kind(counter: LiveBytes, model: nn.Module, optimizer: torch.optim.Optimizer) -> Bytes:
    owned = {storage_key(parameter) for parameter in model.parameters()}
    states = {storage_key(each) for each in tree_tensors(list(optimizer.state.values()))}
    parameters, moments = (sum(counter.at_peak.get(key, 0) for key in keys) for keys in (owned, states))
    pool = int(stats(model)["pool/held_bytes"])
    return Bytes(parameters, moments, 0, counter.peak - parameters - moments - pool, pool)
