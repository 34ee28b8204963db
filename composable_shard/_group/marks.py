"""Marks on `.grad`, which show whether `zero_grad` was called while gradients are accumulated elsewhere.

Nobody tells us of `zero_grad`. So `.grad` exists from the first accumulated gradient on, and its first element is -0.0
where it would be 0: adding to -0.0 changes no bit of a sum, and `zero_` clears the sign. A `.grad` that is gone or
another one was set to None, or replaced.

Version counters show most changes without a look at the values, but not all: the foreach functions of optimizers with
``foreach=True`` or ``fused=True`` bump none on a DTensor. Values are looked at where that costs little, on a CPU. An
accelerator is trusted while versions are the same; that they tell the truth is asserted on the device, at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from .._torch.core import has_memory, without_torch_function
from .._torch.distributed import dtensor_like, local_tensor
from .param import ShardedParam

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNNOTICED = (
    "composable_shard: .grad was set to zero by a foreach function, which leaves no trace on an accelerator, while "
    "gradients of micro-batches without gradient sync were accumulated; call zero_grad(set_to_none=True)"
)


class GradientMarks:
    """The marks on `.grad` of the parameters of one group.

    Args:
        params: of the group.
        trusts: whether versions that have not changed are enough, as on an accelerator.
    """

    def __init__(self, params: Sequence[ShardedParam], trusts: bool) -> None:
        self._params = params
        self._trusts = trusts
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}  # by index: `.grad`, and versions of it

    def put(self, indices: Iterable[int]) -> None:
        """Gradients of these parameters are accumulated: mark their `.grad`, and make those that are missing."""
        indices = [index for index in indices if not self._is_same(index)]
        missing = [index for index in indices if self._grad(index) is None]
        self._mark([index for index in indices if index not in missing])
        self._make(missing)
        for index in indices:
            grad = self._grad(index)
            assert grad is not None
            self._seen[index] = weakref.ref(grad), *_versions(grad)

    def gone(self, indices: Iterable[int], or_untold: bool = False) -> set[int]:
        """Those of these parameters whose `.grad` was removed, replaced or set to zero since it was marked.

        Args:
            indices: of the parameters.
            or_untold: whether those count whose `.grad` does not tell: it is empty on this rank, as are all others.
        """
        indices = list(indices)
        gone = {index for index in indices if self._is_gone(index)}
        asked = [index for index in indices if index not in gone and not (self._trusts and self._is_same(index))]
        return gone | self._void(asked, or_untold) if asked else gone

    def _void(self, asked: Sequence[int], or_untold: bool) -> set[int]:
        """Those of these parameters whose `.grad`, the same as it was, has lost its mark."""
        marks = self._marks([index for index in self._seen if not self._is_gone(index)])
        survives = dict(zip(marks, _survive(marks.values()).tolist(), strict=True)) if marks else {}
        # An empty piece has no mark. Another parameter of the group tells then, which `zero_grad` sets to zero as well.
        other = next(iter(survives.values()), None)
        untold = {index for index in asked if other is None and (or_untold or not self._is_same(index))}
        return untold | {index for index in asked if survives.get(index, other) == 0}

    def forget(self, indices: Sequence[int]) -> None:
        """The gradients of these parameters are not accumulated any more. Assert that no change was unnoticed."""
        trusted = [index for index in indices if self._trusts and self._is_same(index)]
        if trusted and (marks := self._marks(trusted)):
            torch._assert_async(_survive(marks.values()).all(), _UNNOTICED)
        self.drop(indices)

    def drop(self, indices: Iterable[int]) -> None:
        """These marks are not looked at any more."""
        for index in indices:
            self._seen.pop(index, None)

    def _grad(self, index: int) -> torch.Tensor | None:
        with without_torch_function():  # else a DTensor is asked for a `__torch_function__`
            return self._params[index].sharded.grad

    def _is_gone(self, index: int) -> bool:
        seen, grad = self._seen.get(index), self._grad(index)
        return grad is None or seen is None or seen[0]() is not grad

    def _is_same(self, index: int) -> bool:
        """Whether `.grad` is as it was when it was marked, as far as versions tell."""
        seen, grad = self._seen.get(index), self._grad(index)
        return grad is not None and seen is not None and seen[0]() is grad and seen[1:] == _versions(grad)

    def _make(self, indices: Sequence[int]) -> None:
        """Let `.grad` be -0.0 everywhere. Those of one dtype are made by one operator, and share their memory."""
        params = [self._params[index] for index in indices]
        for dtype in dict.fromkeys(param.dtype for param in params):
            alike = [param for param in params if param.dtype is dtype]
            sizes = [param.local.numel() for param in alike]
            flat = torch.full((sum(sizes),), -0.0, dtype=dtype, device=alike[0].local.device)
            for param, piece in zip(alike, torch.split(flat, sizes), strict=True):
                param.sharded.grad = dtensor_like(param.sharded, piece.view(param.local.shape))

    def _mark(self, indices: Sequence[int]) -> None:
        """Mark gradients that were there before."""
        if marks := list(self._marks(indices).values()):
            first = torch.cat(marks)
            torch._foreach_copy_(marks, list(torch.split(torch.where(first == 0, -0.0, first), 1)))

    def _marks(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        """By index, a view of the element of `.grad` that is its mark; not of those that are empty on this rank."""
        marks = {}
        for index in indices:
            grad = self._grad(index)
            assert grad is not None
            local = local_tensor(grad)
            if local.numel() and has_memory(local):
                real = torch.view_as_real(local) if local.is_complex() else local
                marks[index] = real.as_strided((1,), (1,))
        return marks


def _versions(grad: torch.Tensor) -> tuple[int, int]:
    return grad._version, local_tensor(grad)._version


def _survive(marks: Iterable[torch.Tensor]) -> torch.Tensor:
    """For each mark, 0 if `.grad` was set to zero."""
    first = torch.cat(list(marks))
    return first.view(_BITS[first.dtype.itemsize])  # of 0 none is set, of -0.0 one
