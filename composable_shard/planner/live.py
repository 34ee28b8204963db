"""`LiveBytes` counts the bytes of all tensors that a program makes, real or fake, while it runs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch.core import tree_tensors


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operators use, and keeps the sizes of the storages at the peak.

    Args:
        where: returns the position of the program. It is called at each new peak.
        counts: whether to count a tensor; by default all are counted.
        elsewhere: returns the tensors that are in other memory at the time of the call, and do not count.

    Attributes:
        peak: largest number of bytes since `reset`.
        at: the position at the peak.
    """

    def __init__(
        self,
        where: Callable[[], Any] = lambda: None,
        counts: Callable[[torch.Tensor], bool] = lambda _: True,
        elsewhere: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.at: Any = None
        self._where, self._counts, self._elsewhere = where, counts, elsewhere
        self._at_peak: dict[int, int] = {}  # bytes by storage number
        self._numbers = itertools.count()
        self._storages: dict[int, tuple[int, Any]] = {}  # number and weak reference, by address

    def reset(self) -> None:
        """Restart with the current bytes as the peak."""
        self.peak, self._at_peak = 0, {}
        self._look()

    def note(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Count tensors that no operator has used yet. Return whether there was a new one."""
        before = len(self._storages)
        for tensor in tensors:
            storage = _storage_of(tensor)
            key = storage._cdata
            if key not in self._storages and self._counts(tensor):
                self._storages[key] = next(self._numbers), weakref.ref(storage)
                weakref.finalize(storage, self._storages.pop, key, None)
        return len(self._storages) > before

    def bytes_at_peak(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes that the storages of these live tensors had at the peak. Each storage counts once."""
        return sum(self._at_peak.get(number, 0) for number in self._numbers_of(tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if self.note(tree_tensors((args, kwargs or {}, out))):
            self._look()
        return out

    def _look(self) -> None:
        known = [(number, reference()) for number, reference in list(self._storages.values())]
        living = {number: storage for number, storage in known if storage is not None}
        total = _distinct(living.values())
        if total > self.peak and (apart := self._numbers_of(self._elsewhere())):
            for number in apart & living.keys():
                del living[number]
            total = _distinct(living.values())
        if total > self.peak:  # read the sizes again, because a pool may have changed them
            self.peak, self.at = total, self._where()
            self._at_peak = {number: storage.nbytes() for number, storage in living.items()}

    def _numbers_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """The numbers of the storages of these tensors, without storages that were not counted."""
        keys = {_storage_of(tensor)._cdata for tensor in tensors}
        return {self._storages[key][0] for key in keys if key in self._storages}


def _distinct(storages: Iterable[torch.UntypedStorage]) -> int:
    """Total bytes of storages. Overlapping memory counts once. Fake storages have no addresses and never overlap."""
    total = end = 0
    real: list[tuple[int, int]] = []
    for each in storages:
        if each.device.type == "meta":
            total += each.nbytes()
        else:
            real.append((each.data_ptr(), each.nbytes()))
    for begin, nbytes in sorted(real):
        total += max(0, begin + nbytes - max(begin, end))
        end = max(end, begin + nbytes)
    return total


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
