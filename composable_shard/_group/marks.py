"""Marks on `.grad`, which show whether `zero_grad` was called while gradients are accumulated elsewhere.

torch does not report a call of `zero_grad`. So this file makes a `.grad` of -0.0 with the first accumulated gradient,
if there is none. In a `.grad` that exists, it turns the first element to -0.0 if it is 0. That element is the *mark*:
adding to -0.0 changes no bit of a sum, and `zero_` sets it to 0, without the sign.

Version counters of `.grad` show most changes without reading values, but not all: on a DTensor, the foreach functions
of optimizers with ``foreach=True`` or ``fused=True`` do not increase them. On a CPU, reading a value is cheap, so the
marks are read. On an accelerator, unchanged versions are trusted. When the accumulated gradients are reduced, an
assertion on the device checks the marks (`forget`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import torch

from .._torch.capturing import capture_number
from .._torch.core import has_memory, without_torch_function
from .._torch.distributed import dtensor_like, local_tensor
from ..errors import ShardConfigStateError
from .param import ShardedParam

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_State = tuple[weakref.ref[torch.Tensor], int, int]  # a `.grad`, its version, and the version of its local tensor
_UNKNOWN: _State = (weakref.ref(torch.empty(0)), -1, -1)  # matches no `.grad`, so a check reads the value
_UNNOTICED = (
    "composable_shard: .grad was set to zero by a foreach function, which leaves no trace on an accelerator, while "
    "gradients of microbatches without gradient sync were accumulated; call zero_grad(set_to_none=True)"
)


class GradientMarks:
    """The marks on `.grad` of the parameters of one group.

    Args:
        params: the parameters of the group.
        dtypes: returns the dtype of `.grad` of each parameter.
        trusts: whether unchanged versions are enough, as on an accelerator.
    """

    def __init__(
        self, params: Sequence[ShardedParam], dtypes: Callable[[], Sequence[torch.dtype]], trusts: bool
    ) -> None:
        self._params, self._dtypes = params, dtypes
        self._on_device = trusts
        self._seen: dict[int, _State] = {}  # by index: the state of `.grad` when it was marked
        self._made: dict[int, _State] = {}  # by index: the state of each `.grad` that was made here

    @property
    def _trusts(self) -> bool:
        return self._on_device or _captured(self._params) != 0

    def marked(self) -> tuple[list[int], list[int]]:
        """Return the parameters whose `.grad` is marked, and those whose `.grad` was made here, and is unchanged."""
        seen = [index for index in self._seen if self._is_same(index)]
        return seen, [index for index in self._made if self._is_untouched(index)]

    def resume(self, marked: tuple[list[int], list[int]], held: Iterable[int]) -> None:
        """Take the current `.grad` of these parameters for marked, and for made here: a replay has done both.

        Args:
            marked: the parameters, as `marked` returned them.
            held: the parameters whose gradients are accumulated. If one of them is not marked, the captured step has
                changed its `.grad` afterwards, for example by clipping. A later check must read the value.
        """
        for states, indices in zip((self._seen, self._made), marked, strict=True):
            states.clear()
            self._note(states, [index for index in indices if self._grad(index) is not None])
        for index in held:
            self._seen.setdefault(index, _UNKNOWN)

    def put(self, indices: Iterable[int]) -> None:
        """Mark the `.grad` of these parameters, whose gradients are accumulated; make a `.grad` where it is missing."""
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

    def gone(self, indices: Iterable[int], or_unknown: bool = False) -> set[int]:
        """Return those of these parameters whose `.grad` was removed or set to zero since it was marked.

        Args:
            indices: the indices of the parameters.
            or_unknown: whether to include those of which this rank cannot know it: a parameter without rows on this
                rank has no mark, so the marks of others must tell (see `_void`).

        Raises:
            ShardConfigStateError: ranks without rows of a parameter cannot know it, and would decide otherwise.
        """
        indices = list(indices)
        gone = {index for index in indices if self._is_gone(index)}
        asked = [index for index in indices if index not in gone and not (self._trusts and self._is_same(index))]
        return gone | self._void(asked, or_unknown) if asked else gone

    def _void(self, asked: Sequence[int], or_unknown: bool) -> set[int]:
        """Return those of these parameters that have a `.grad` but lost the mark on it."""
        same = {index: self._is_same(index) for index in self._seen if not self._is_gone(index)}
        survives = self._look(same)
        if self._hidden and not or_unknown:
            self._check_seen(asked, same, survives)
        # A shard without rows has no mark. `zero_grad` usually clears all parameters of a group, so the mark of another
        # parameter is used: if the versions of its own `.grad` have changed, the mark of a parameter whose versions
        # have changed, too; if they have not, the mark of one whose versions have not. If there is no such mark,
        # gradients survive if the versions have not changed. Ranks with rows raise an error if this is wrong.
        by_change = {False: False, True: not or_unknown} | {same[index]: mark for index, mark in survives.items()}
        return {index for index in asked if not survives.get(index, by_change[same[index]])}

    @cached_property
    def _hidden(self) -> set[int]:
        """The parameters of which a rank has no rows."""
        return {index for index, param in enumerate(self._params) if param.is_empty_on_a_rank}

    def _check_seen(self, asked: Sequence[int], same: Mapping[int, bool], survives: Mapping[int, bool]) -> None:
        """Check that ranks without rows of a parameter, which have no mark on it, decide like those with the mark.

        Args:
            asked, same, survives: as in `_void`.
        """
        marked = survives.keys() - self._hidden  # on all ranks, if these use the same parameters
        for index in self._hidden.intersection(asked):
            decided = {survives[at] for at in marked if same[at] == same[index]}
            if index in survives:
                agree = (decided or {same[index]}) == {survives[index]}
            else:  # others may have a mark that is missing here, if they use other parameters
                agree = bool(decided) or same[index] or self._trained <= self._hidden | marked
            if not agree:
                raise ShardConfigStateError(
                    f"parameter {self._params[index].fqn}: .grad was changed while gradients of microbatches without "
                    "gradient sync were accumulated, and a rank without rows of this parameter cannot see whether it "
                    "was set to zero; clear it by zero_grad(set_to_none=True), and change it only after a microbatch "
                    "with gradient sync"
                )

    @property
    def _trained(self) -> set[int]:
        """The parameters that require gradients."""
        return {index for index, param in enumerate(self._params) if param.sharded.requires_grad}

    def _look(self, indices: Iterable[int]) -> dict[int, bool]:
        """Return whether gradients survive, for those that have a mark on this rank.

        Raises:
            ShardConfigStateError: in a capture of a CUDA graph, where the host cannot read a mark.
        """
        if _captured(self._params):
            raise ShardConfigStateError(
                f"a captured step has changed .grad of {self._params[0].fqn} or another parameter of its group while "
                "gradients of microbatches without gradient sync were accumulated, and the host cannot read in a "
                "capture whether it was set to zero; call zero_grad(set_to_none=True) before the first microbatch only"
            )
        marks = self._marks(indices)
        present = dict(zip(marks, _survive(marks.values()).tolist(), strict=True)) if marks else {}
        return {index: bool(mark) or self._has_values(index) for index, mark in present.items()}

    def _has_values(self, index: int) -> bool:
        """Whether a gradient without its mark has a value other than 0, which means that users have added to it."""
        grad = self._grad(index)
        return grad is not None and bool(local_tensor(grad).any())

    def forget(self, indices: Sequence[int]) -> None:
        """Forget these parameters, whose gradients are no longer accumulated. Assert that no change went unnoticed."""
        trusted = [index for index in indices if self._trusts and self._is_same(index)]
        if trusted and (marks := self._marks(trusted)):
            torch._assert_async(_survive(marks.values()).all(), _UNNOTICED)
        self.drop(indices)

    def drop(self, indices: Iterable[int]) -> None:
        """Forget the marks of these parameters, without a check."""
        for index in indices:
            self._seen.pop(index, None)

    def _grad(self, index: int) -> torch.Tensor | None:
        with without_torch_function():  # or a DTensor's `__torch_function__` would run
            return self._params[index].sharded.grad

    def _is_gone(self, index: int) -> bool:
        return self._grad(index) is None or index not in self._seen

    def _is_same(self, index: int) -> bool:
        """Whether `.grad` is unchanged since it was marked, judging by versions."""
        seen, grad = self._seen.get(index), self._grad(index)
        return grad is not None and seen is not None and _is(grad, seen)

    def _make(self, indices: Sequence[int]) -> None:
        """Set `.grad` to -0.0 everywhere. One operator makes all of one dtype, which share their memory."""
        if not indices:
            return
        dtypes = self._dtypes()
        for dtype in dict.fromkeys(dtypes[index] for index in indices):
            alike = [self._params[index] for index in indices if dtypes[index] is dtype]
            sizes = [param.local.numel() for param in alike]
            flat = torch.full((sum(sizes),), -0.0, dtype=dtype, device=alike[0].local.device)
            for param, piece in zip(alike, torch.split(flat, sizes), strict=True):
                # `data` has its own version: views of one tensor would share theirs.
                param.set_gradient(dtensor_like(param.sharded, piece.view(param.local.shape).data))

    def unmake(self, indices: Iterable[int]) -> None:
        """Remove `.grad` where it was made here and is unchanged."""
        for index in filter(self._is_untouched, list(indices)):
            self._params[index].set_gradient(None)

    def _is_untouched(self, index: int) -> bool:
        """Whether `.grad` was made here and is unchanged."""
        made, grad = self._made.get(index), self._grad(index)
        return made is not None and grad is not None and _is(grad, made)

    def _mark(self, indices: Sequence[int]) -> None:
        """Mark gradients that existed before."""
        if marks := list(self._marks(indices).values()):
            first = torch.cat(marks)
            torch._foreach_copy_(marks, list(torch.split(torch.where(first == 0, -0.0, first), 1)))

    def _marks(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return, by index, views of the elements of `.grad` that are marks; gradients empty on this rank have none."""
        marks = {}
        for index in indices:
            grad = self._grad(index)
            assert grad is not None
            try:
                local = local_tensor(grad)
            except AttributeError as error:
                raise ShardConfigStateError(
                    f"parameter {self._params[index].fqn}: its .grad is a plain tensor of shape {tuple(grad.shape)}; "
                    "assign a DTensor like the parameter. To reduce an unsharded gradient, such as a delayed weight "
                    "gradient, call post_backward() of the parameter's group before the next backward"
                ) from error
            if local.numel() and has_memory(local):
                real = torch.view_as_real(local) if local.is_complex() else local
                marks[index] = real.as_strided((1,), (1,))
        return marks


def _captured(params: Sequence[ShardedParam]) -> int:
    """Return the number of the capture of a CUDA graph in which these parameters are used now; 0 if there is none."""
    return capture_number(params[0].local.device) if params else 0


def _state(grad: torch.Tensor | None) -> _State:
    """Return the state by which a later check recognizes this `.grad` and any change of it."""
    assert grad is not None
    return weakref.ref(grad), grad._version, local_tensor(grad)._version


def _is(grad: torch.Tensor, state: _State) -> bool:
    return state[0]() is grad and state[1:] == (grad._version, local_tensor(grad)._version)


def _survive(marks: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return for each mark an integer: 0 if `.grad` was set to zero, else another number."""
    first = torch.cat(list(marks))
    return first.view(_BITS[first.dtype.itemsize])  # 0 has no bit set, -0.0 has the sign bit
