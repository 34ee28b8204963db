"""Count the live bytes of a program under fake tensors: existing storages with their current sizes."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators create, until they are freed.

    Attributes:
        now: live bytes.
        peak: peak of live bytes so far. Set it to `now` to reset it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._nbytes: dict[int, int] = {}  # by storage

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return made

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, or those of its inner tensors."""
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            for name in names:
                if isinstance(inner := getattr(tensor, name), torch.Tensor):
                    self.see(inner)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._nbytes:
            self._nbytes[key] = 0
            weakref.finalize(storage, self._resized, key, 0, True)
            self._resized(key, storage.nbytes())

    def _resized(self, key: int, nbytes: int, gone: bool = False) -> None:
        if key in self._nbytes:
            self.now += nbytes - self._nbytes[key]
            self._nbytes[key] = nbytes
            self.peak = max(self.peak, self.now)
        if gone:
            self._nbytes.pop(key, None)

    @contextmanager
    def counting(self) -> Iterator["LiveBytes"]:
        """Count storages in this context, including `resize_`."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            done = resize(storage, nbytes)
            self._resized(storage._cdata, storage.nbytes())
            return done

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
