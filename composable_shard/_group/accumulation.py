"""Accumulated gradients, which wait for a later backward to reduce them.

There are two types: unsharded gradients that wait for a backward with gradient sync on, and reduced pieces that wait
for their all-reduce over the replicas. `zero_grad` must clear both, whether it sets `.grad` to None or to zero: see
`marks.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from sys import getrefcount
from typing import NamedTuple

import torch

from .._torch.core import is_of_cuda_graph, owns_memory
from .marks import GradientMarks
from .param import ShardedParam

# By index of the parameter: a reduced piece, and a number that is not 0 if any rank had a gradient for it.
Partial = dict[int, tuple[torch.Tensor, torch.Tensor]]


class Held(NamedTuple):
    """The gradients of a group between two backwards; a replay of a captured step makes them again, in the same memory.

    Attributes:
        whole, pieces, wanted: as in `AccumulatedGradients`.
        owned: the parameters whose sum in `whole` was made here.
        marked: the state of the marks (`GradientMarks.marked`).
    """

    whole: dict[int, torch.Tensor]
    pieces: Partial
    wanted: set[int]
    owned: set[int]
    marked: tuple[list[int], list[int]]

    def key(self) -> Hashable:
        """Return a value that is equal if the same is held for the same parameters, in any memory."""
        seen, made = self.marked
        return tuple(self.whole), tuple(self.pieces), *map(frozenset, (self.wanted, self.owned, seen, made))

    @property
    def is_empty(self) -> bool:
        """Whether no gradients are accumulated."""
        return not (self.whole or self.pieces or self.wanted)

    @property
    def is_voided(self) -> bool:
        """Whether `.grad` of a parameter was changed since its gradients were accumulated, perhaps by `zero_grad`."""
        return not {*self.whole, *self.pieces} <= {*self.marked[0]}

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, in the same order if the keys are equal."""
        return [*self.whole.values(), *(tensor for pair in self.pieces.values() for tensor in pair)]


class AccumulatedGradients:
    """The accumulated gradients of one group, by the index of the parameter.

    Args:
        params: the parameters of the group.
        dtypes: returns the dtype of `.grad` of each parameter.
        streams: whether they are on an accelerator.

    Attributes:
        whole: the unsharded gradients. A call of `zero_grad` makes them void. It is detected by *marks* on `.grad`
            (`marks.py`), and most methods first drop void ones (`_drop_voided`). Other classes only read this.
        pieces: the reduced pieces that wait for an all-reduce over replicas. Other classes only read this.
        wanted: indices of the parameters that required gradients when some were accumulated. The next reduction
            includes these even if they are frozen by then, because it must have the same members on all ranks. Ranks
            may differ in which gradients they have, but not in which parameters require them.
    """

    def __init__(
        self, params: Sequence[ShardedParam], dtypes: Callable[[], Sequence[torch.dtype]], streams: bool
    ) -> None:
        self._params = params
        self._marks = GradientMarks(params, dtypes, streams)
        self.whole: dict[int, torch.Tensor] = {}
        self._owned: set[int] = set()  # indices in `whole` of sums made here, which no other code holds
        self.pieces: Partial = {}
        self.wanted: set[int] = set()

    def tensors(self) -> list[torch.Tensor]:
        """Return the accumulated gradients and pieces, including those that `zero_grad` has voided."""
        return [*self.whole.values(), *(piece for piece, _ in self.pieces.values())]

    def held_now(self) -> Held:
        """Return the accumulated gradients and pieces now, to hold them again after a replay."""
        return Held(dict(self.whole), dict(self.pieces), set(self.wanted), set(self._owned), self._marks.marked())

    def resume(self, held: Held) -> None:
        """Hold this instead. Each parameter must have the `.grad` that it had when `held` was noted."""
        self.whole, self.pieces, self.wanted = dict(held.whole), dict(held.pieces), set(held.wanted)
        self._owned = set(held.owned)
        self._marks.resume(held.marked, self._held())

    def note_wanted(self) -> None:
        """Note which parameters require gradients, right before gradients are accumulated."""
        self.wanted.update(index for index, param in enumerate(self._params) if param.sharded.requires_grad)

    def add(
        self, gradients: Mapping[int, torch.Tensor], dtypes: Sequence[torch.dtype], overwritten: bool = False
    ) -> None:
        """Add unsharded gradients to the accumulated ones of their parameters, in the dtype of accumulation.

        Args:
            gradients: the gradients, by the index of the parameter.
            dtypes: the dtype of accumulation, for each parameter of the group.
            overwritten: whether their memory may be overwritten after this call, like that of a CUDA graph.
        """
        self._drop_voided()
        added, first = _parted(gradients, self.whole.__contains__)
        sums = self._sums({index: gradients[index] for index in added})
        copied, kept = _parted(
            first, lambda i: overwritten or gradients[i].dtype is not dtypes[i] or is_of_cuda_graph(gradients[i])
        )
        if copied:
            made = [torch.empty_like(gradients[index], dtype=dtypes[index]) for index in copied]
            torch._foreach_copy_(made, _of(gradients, copied))
            sums.update(zip(copied, made, strict=True))
        self._owned.update(sums)
        self.whole.update(sums)
        self.whole.update(zip(kept, _of(gradients, kept), strict=True))
        self._marks.put(gradients)

    def own(self) -> None:
        """At the end of a backward: copy the accumulated gradients that other code holds too, as torch does.

        An autograd function may write its next gradient to the same memory.
        """
        for index in self.whole.keys() - self._owned:
            if not _is_held_here_only(self.whole, index):
                self.whole[index] = self.whole[index].clone()
            self._owned.add(index)

    def take(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the sums of these unsharded gradients and the accumulated ones, which are dropped here."""
        self._drop_voided()
        total = list(gradients)
        new = {index: gradient for index in self.whole if (gradient := total[index]) is not None}
        sums = self._sums(new)  # before there is another reference to the accumulated ones
        for index, gradient in {**self.whole, **sums}.items():
            total[index] = gradient
        # Accumulated pieces of the same parameters keep their marks on `.grad`.
        taken = [index for index in self.whole if index not in self.pieces]
        self.whole.clear()
        self._owned.clear()
        self._marks.forget(taken)
        return total

    def add_partial(self, indices: Sequence[int], pieces: Sequence[torch.Tensor], used: Sequence[torch.Tensor]) -> None:
        """Accumulate this rank's pieces of gradients that were reduced over the shard axis only.

        Args:
            indices: the indices of the parameters.
            pieces: this rank's piece of each gradient; later calls write to these tensors.
            used: for each gradient, a number that is not 0 if any rank of the shard axis had it (see `Partial`).
        """
        self._drop_voided()
        self.wanted.update(indices)
        new = dict(zip(indices, zip(pieces, used, strict=True), strict=True))
        if added := [index for index in new if index in self.pieces]:
            torch._foreach_add_(*([tensor for index in added for tensor in of[index]] for of in (self.pieces, new)))
        self.pieces = {**new, **self.pieces}
        self._marks.put(indices)

    def take_partial(self) -> Partial | None:
        """Return the accumulated pieces that `zero_grad` has not voided, and drop all; None if there were none at all.

        Call this after the members of the reduction have been chosen by `wanted`, which is cleared here.
        """
        if self.wanted:
            self.wanted.clear()
        if not self.pieces:
            return None
        self._drop_voided()
        taken, self.pieces = self.pieces, {}
        self._marks.forget([index for index in taken if index not in self.whole])
        return taken

    def held(self, stepped: Container[int]) -> list[str]:
        """Return the names of parameters, given by id, whose accumulated gradients `zero_grad` has not voided."""
        stepped_here = [index for index in self._held() if id(self._params[index].sharded) in stepped]
        # A rank whose shards have no rows has no marks, so it cannot know. Ranks with rows raise the error.
        gone = self._marks.gone(stepped_here, or_unknown=True)
        return [self._params[index].fqn for index in stepped_here if index not in gone]

    def forget(self) -> None:
        """Drop all accumulated gradients."""
        self.wanted.clear()
        self.whole.clear()
        self._owned.clear()
        self.pieces.clear()
        self._marks.drop(range(len(self._params)))

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Around code that adds to `.grad`: drop void gradients before, and mark `.grad` again afterwards.

        The addition changes marked elements, so whether `zero_grad` was called before cannot be seen after it.
        """
        self._drop_voided()
        yield
        self._marks.put(self._held())

    def unmake(self, indices: Iterable[int]) -> None:
        """Remove `.grad` of these parameters where it was made only to carry a mark (`marks.py`) and is unchanged."""
        self._marks.unmake(index for index in indices if index not in self.whole and index not in self.pieces)

    def _held(self) -> Iterable[int]:
        return dict.fromkeys((*self.whole, *self.pieces))

    def _drop_voided(self) -> None:
        """Drop the accumulated gradients that `zero_grad` has cleared."""
        gone = self._marks.gone(self._held())
        self._marks.drop(gone)
        for index in gone:
            self.whole.pop(index, None)
            self.pieces.pop(index, None)
            self._owned.discard(index)

    def _sums(self, new: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the sums of these gradients and the accumulated ones, in place if no other code holds the latter."""
        own, others = _parted(new, lambda index: index in self._owned or _is_held_here_only(self.whole, index))
        if own:
            torch._foreach_add_(_of(self.whole, own), _of(new, own))
        # Not in place: the accumulated one is the tensor that autograd passed, and hooks may keep it, for example.
        alike, unlike = _parted(others, lambda index: new[index].dtype is self.whole[index].dtype)
        made = list(torch._foreach_add(_of(self.whole, alike), _of(new, alike))) if alike else []
        # The sum has the dtype of the first. The other one is not converted before, so the sum is rounded only once.
        made += [self.whole[index].clone().add_(new[index]) for index in unlike]
        return dict(zip((*own, *alike, *unlike), (*_of(self.whole, own), *made), strict=True))


def _is_held_here_only(tensors: Mapping[int, torch.Tensor], index: int) -> bool:
    """Whether no other code refers to this tensor or uses its memory, so that it may be written to."""
    return getrefcount(tensors[index]) <= 2 and owns_memory(tensors[index])  # of the mapping and the argument


def _of(tensors: Mapping[int, torch.Tensor], indices: Iterable[int]) -> list[torch.Tensor]:
    return [tensors[index] for index in indices]


def _parted(indices: Iterable[int], belongs: Callable[[int], bool]) -> tuple[list[int], list[int]]:
    """Return those for which `belongs` is true, and the others."""
    parts: tuple[list[int], list[int]] = [], []
    for index in indices:
        parts[not belongs(index)].append(index)
    return parts
