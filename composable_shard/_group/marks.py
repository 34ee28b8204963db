"""Marks on `.grad`, which show whether `zero_grad` was called while gradients are accumulated elsewhere.

Nobody tells us of `zero_grad`. So `.grad` exists from the first accumulated gradient on, and its first element is -0.0
where it would be 0: adding to -0.0 changes no bit of a sum, and `zero_` clears the sign.

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
_State = tuple[weakref.ref[torch.Tensor], int, int]  # a `.grad`, and the versions of it and of its local tensor
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
        self._seen: dict[int, _State] = {}  # by index: `.grad` as it was marked
        self._made: dict[int, _State] = {}  # likewise, of those that were made here

    def put(self, indices: Iterable[int]) -> None:
        """Gradients of these parameters are accumulated: mark their `.grad`, and make those that are missing."""
        indices = [index for index in indices if not self._is_same(index)]
        missing = [index for index in indices if self._grad(index) is None]
        untouched = list(filter(self._is_untouched, indices))
        self._mark([index for index in indices if index not in missing])
        self._make(missing)
        self._note(self._made, (*missing, *untouched))
        self._note(self._seen, indices)

    def _note(self, states: dict[int, _State], indices: Iterable[int]) -> None:
        for index in indices:
            states[index] = _state(self._grad(index))

    def gone(self, indices: Iterable[int], or_untold: bool = False) -> set[int]:
        """Those of these parameters whose `.grad` was removed, or set to zero since it was marked.

        Args:
            indices: of the parameters.
            or_untold: whether those count whose `.grad` does not tell: it is empty on this rank, as are all others.
        """
        indices = list(indices)
        gone = {index for index in indices if self._is_gone(index)}
        asked = [index for index in indices if index not in gone and not (self._trusts and self._is_same(index))]
        return gone | self._void(asked, or_untold) if asked else gone

    def _void(self, asked: Sequence[int], or_untold: bool) -> set[int]:
        """Those of these parameters, which all have a `.grad`, whose mark on it is lost."""
        same = {index: self._is_same(index) for index in self._seen if not self._is_gone(index)}
        survives = self._look(same)
        # An empty piece has no mark. Another parameter of the group tells then, which was changed if this one was, and
        # which `zero_grad` sets to zero as well.
        others = {same[index]: mark for index, mark in survives.items()}
        shown = {index: survives.get(index, others.get(same[index])) for index in asked}
        kept = {index: same[index] and not or_untold if mark is None else mark for index, mark in shown.items()}
        return {index for index, is_kept in kept.items() if not is_kept}

    def _look(self, indices: Iterable[int]) -> dict[int, bool]:
        """Whether gradients survive, as far as their marks are on this rank."""
        marks = self._marks(indices)
        present = dict(zip(marks, _survive(marks.values()).tolist(), strict=True)) if marks else {}
        return {index: bool(mark) or self._has_values(index) for index, mark in present.items()}

    def _has_values(self, index: int) -> bool:
        """Whether something other than 0 is in a gradient whose mark is gone: users have added to it then."""
        grad = self._grad(index)
        return grad is not None and bool(local_tensor(grad).any())

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
        return self._grad(index) is None or index not in self._seen

    def _is_same(self, index: int) -> bool:
        """Whether `.grad` is as it was when it was marked, as far as versions tell."""
        seen, grad = self._seen.get(index), self._grad(index)
        return grad is not None and seen is not None and _is(grad, seen)

    def _make(self, indices: Sequence[int]) -> None:
        """Let `.grad` be -0.0 everywhere. Those of one dtype are made by one operator, and share their memory."""
        params = [self._params[index] for index in indices]
        for dtype in dict.fromkeys(param.dtype for param in params):
            alike = [param for param in params if param.dtype is dtype]
            sizes = [param.local.numel() for param in alike]
            flat = torch.full((sum(sizes),), -0.0, dtype=dtype, device=alike[0].local.device)
            for param, piece in zip(alike, torch.split(flat, sizes), strict=True):
                # By `data`, with a version of its own: views of one tensor share theirs.
                param.set_gradient(dtensor_like(param.sharded, piece.view(param.local.shape).data))

    def unmake(self, indices: Iterable[int]) -> None:
        """Take `.grad` away again where it was made here, and is as it was."""
        for index in filter(self._is_untouched, list(indices)):
            self._params[index].set_gradient(None)

    def _is_untouched(self, index: int) -> bool:
        """Whether `.grad` was made here, and is as it was."""
        made, grad = self._made.get(index), self._grad(index)
        return made is not None and grad is not None and _is(grad, made)

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


def _state(grad: torch.Tensor | None) -> _State:
    """What tells whether a `.grad` is this one later on, and has not been changed."""
    assert grad is not None
    return weakref.ref(grad), grad._version, local_tensor(grad)._version


def _is(grad: torch.Tensor, state: _State) -> bool:
    return state[0]() is grad and state[1:] == (grad._version, local_tensor(grad)._version)


def _survive(marks: Iterable[torch.Tensor]) -> torch.Tensor:
    """For each mark, 0 if `.grad` was set to zero."""
    first = torch.cat(list(marks))
    return first.view(_BITS[first.dtype.itemsize])  # of 0 none is set, of -0.0 one
