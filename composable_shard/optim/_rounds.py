"""Run a step bucket by bucket: send gradients and values to owners, step there, and send values back to the shards."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import torch

from .._group.param import run_all
from ..errors import ShardConfigStateError
from ._checks import check_unchanged
from ._exchange import Item, ToOwners, ToShards
from ._matrices import Bucket, Matrix
from ._state import Path, leaf_at, mapped, sketched, tensors_in


def stand_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this shape with the memory of one element: a placeholder for a matrix outside of its step."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


def _part_of(item: Item) -> torch.Tensor | None:
    """An empty tensor for this rank's part of an item; None if it has no part."""
    own = item.route.own
    return None if own is None else torch.empty(own.shape, dtype=item.dtype, device=item.route.layout.device)


class Round:
    """One bucket in one step.

    Args:
        bucket: the bucket.
        matrices: the matrices of the bucket to step, which have gradients.
        note: note of the optimizer for the ledgers.

    Attributes:
        bucket, matrices: the arguments.
        nbytes: bytes that this rank has sent to other ranks.
    """

    def __init__(self, bucket: Bucket, matrices: Sequence[Matrix], note: str) -> None:
        self.bucket, self.matrices = bucket, matrices
        which = zlib.crc32(",".join([matrix.name for matrix in matrices]).encode())
        self._note = f"{note}, bucket {bucket.number} ({len(matrices)} matrices, {which:08x})"
        self._arrival: ToOwners | None = None
        self._departure: ToShards | None = None
        self._state: list[Item] = []
        self.nbytes = 0

    @property
    def _here(self) -> list[Matrix]:
        """The matrices that this rank owns."""
        return [matrix for matrix in self.matrices if matrix.steps_here]

    # ---- to the owners

    def begin(self) -> None:
        """Send gradients, values and state to the owners."""
        if self.bucket.stays:
            return
        items: list[Item] = []
        for matrix in self.matrices:
            items.append(Item(matrix.route, matrix.dtype, matrix.gradient()))
            items.append(Item(matrix.route, matrix.dtype, matrix.value()))
            for path, sketch in tensors_in(matrix.sketch).items():
                items.append(Item(matrix.state_route(sketch), sketch.dtype, matrix.kept[path]))
        self._arrival = ToOwners(self.bucket.layout, items, f"{self._note} to owners")
        self.nbytes += self._arrival.nbytes

    # ---- on the owner

    def arrive(self) -> None:
        """Wait for gradients, values and state, and assemble the full matrices of this rank."""
        gradients = self._hold_in_place() if self._arrival is None else self._hold_arrived(self._arrival.finish())
        self._arrival = None
        run_all(map(setattr, [matrix.whole for matrix in self._here], repeat("grad"), gradients))

    def step(self, options: Mapping[str, Any]) -> None:
        """Step the matrices that this rank owns."""
        inner = self.bucket.inner
        if inner is None:
            return
        inner.param_groups[0].update(options)
        try:
            inner.step()
        finally:
            inner.zero_grad()
        check_unchanged(inner, inner.param_groups[0], options, self.matrices[0].name)
        if self.bucket.stays:
            self._let_go()

    def _hold_in_place(self) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = []
        for matrix in self._here:
            value, gradient = matrix.value(), matrix.gradient()
            assert matrix.whole is not None
            assert value is not None
            assert gradient is not None
            matrix.whole.set_(_as_matrix(value, matrix))  # type: ignore[call-overload]
            gradients.append(_as_matrix(gradient, matrix))
        return gradients

    def _hold_arrived(self, wholes: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = []
        arrived = iter(wholes)
        for matrix in self.matrices:
            gradient, value = next(arrived), next(arrived)
            state = {path: next(arrived) for path in tensors_in(matrix.sketch)}
            if matrix.whole is None:
                continue
            assert value is not None
            matrix.whole.set_(value)  # type: ignore[call-overload]
            gradients.append(gradient)
            if matrix.sketch is not None:
                self._put_state(matrix, state)
        return gradients

    def _put_state(self, matrix: Matrix, tensors: Mapping[Path, Any]) -> None:
        inner = self.bucket.inner
        assert inner is not None
        assert matrix.whole is not None
        inner.state[matrix.whole] = mapped(inner.state[matrix.whole], lambda path, leaf: tensors.get(path, leaf))

    # ---- to the shards

    def leave(self) -> None:
        """Send values and state back to the shards."""
        if self.bucket.stays:
            return
        values = [
            Item(matrix.route, matrix.dtype, None if matrix.whole is None else matrix.whole.detach())
            for matrix in self.matrices
        ]
        self._send(values, "to shards")
        self._let_go()

    def scatter_state(self) -> None:
        """Send the state of the matrices to the shards, in shards mode after a first step. Needs their sketches."""
        self._send([], "its state to shards")
        self._finish([])

    def _send(self, values: list[Item], how: str) -> None:
        state = [item for matrix in self.matrices for item in self._state_items(matrix)]
        self._departure = ToShards(self.bucket.layout, [*values, *state], f"{self._note} {how}")
        self.nbytes += self._departure.nbytes
        self._state = [item._replace(tensor=None) for item in state]

    def _state_items(self, matrix: Matrix) -> list[Item]:
        """The state items of a matrix to send in shards mode. On the owner, sketches replace the state tensors."""
        if matrix.sketch is None:
            return []
        inner, sketches = self.bucket.inner, tensors_in(matrix.sketch)
        state = None if inner is None or matrix.whole is None else inner.state[matrix.whole]
        if state is not None and tensors_in(sketched(state)) != sketches:
            raise ShardConfigStateError(
                f"parameter {matrix.name}: its state has other tensors or shapes than after its first step, so it "
                "cannot be kept as shards; use owned(..., state='owner')"
            )
        items = [
            Item(matrix.state_route(sketch), sketch.dtype, None if state is None else leaf_at(state, path))
            for path, sketch in sketches.items()
        ]
        if state is not None:
            self._put_state(matrix, sketches)
        return items

    def _let_go(self) -> None:
        for matrix in self._here:
            assert matrix.whole is not None
            matrix.whole.set_(stand_in(matrix.route.shape, matrix.dtype, matrix.whole.device))  # type: ignore[call-overload]

    def finish(self) -> None:
        """Wait for the values from the owners, and write them into the shards."""
        if self._departure is not None:
            self._finish([matrix.value() for matrix in self.matrices])

    def _finish(self, values: Sequence[torch.Tensor | None]) -> None:
        assert self._departure is not None
        parts = [_part_of(item) for item in self._state]
        self._departure.finish([*values, *parts])
        self._departure, arrived = None, iter(parts)
        for matrix in self.matrices:
            matrix.kept.update({path: next(arrived) for path in tensors_in(matrix.sketch)})


def run(rounds: Sequence[Round], options: Sequence[Mapping[str, Any]]) -> None:
    """Run the rounds of a step. Transfers of the next and the previous round overlap with the current round's step.

    Args:
        rounds: rounds of the step.
        options: options of each param group.
    """
    before: Round | None = None
    if rounds:
        rounds[0].begin()
    for now, following in zip(rounds, [*rounds, None][1:], strict=True):
        now.arrive()
        if following is not None:
            following.begin()
        now.step(options[now.bucket.options])
        if before is not None:
            before.finish()
        now.leave()
        before = now
    if before is not None:
        before.finish()


def _as_matrix(part: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """A view of a full matrix, without a leading dim of size 1 that its shape does not have."""
    return part[0] if part.ndim > len(matrix.route.shape) else part
