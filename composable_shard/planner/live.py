"""`LiveBytes`: the bytes of all tensors that a program makes, real or fake, counted while it runs."""

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
    """Counts the bytes of all storages that operators have seen, and keeps what there was when they were most.

    Args:
        where: says where the program is; asked whenever there are more bytes than before.
        counts: whether a tensor that is seen shall be counted; all are by default.
        elsewhere: gives tensors that are in other memory, as they are when it is asked, and do not count.

    Attributes:
        peak: most bytes since `reset`.
        at: what `where` said then.
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
        self._at_peak: dict[int, int] = {}  # bytes, by number of storage
        self._numbers = itertools.count()
        self._storages: dict[int, tuple[int, Any]] = {}  # number and reference, by address

    def reset(self) -> None:
        """Begin anew with what there is."""
        self.peak, self._at_peak = 0, {}
        self._look()

    def note(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Count tensors that no operator has seen yet; gives whether there was one."""
        before = len(self._storages)
        for tensor in tensors:
            storage = _storage_of(tensor)
            key = storage._cdata
            if key not in self._storages and self._counts(tensor):
                self._storages[key] = next(self._numbers), weakref.ref(storage)
                weakref.finalize(storage, self._storages.pop, key, None)
        return len(self._storages) > before

    def bytes_at_peak(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes that storages of tensors, which are still alive, had when all were most; each counted once."""
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
        if total > self.peak:  # sizes are asked for again, for a pool may have changed them
            self.peak, self.at = total, self._where()
            self._at_peak = {number: storage.nbytes() for number, storage in living.items()}

    def _numbers_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Of the storages of those tensors that have been seen."""
        keys = {_storage_of(tensor)._cdata for tensor in tensors}
        return {self._storages[key][0] for key in keys if key in self._storages}


def _distinct(storages: Iterable[torch.UntypedStorage]) -> int:
    """Bytes of storages, memory that lies in several of them counted once; fake ones have no addresses."""
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
