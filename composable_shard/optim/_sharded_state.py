"""Convert the state of an `owned` optimizer from matrices on owners to DTensors by parameter, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.optim import Optimizer

from .._plan.boxes import Box, whole_box
from .._torch.distributed import dtensor_at, local_part, local_tensor
from ..errors import ShardConfigValueError
from ._exchange import Item, ToOwners, ToShards
from ._layout import Layout, Route
from ._matrices import Matrix
from ._state import Path, Sketch, filled, leaf_at, mapped, sketched, tensors_in


class Kept(NamedTuple):
    """A matrix, and the optimizer of its bucket. The optimizer is None if this rank owns no matrix of the bucket."""

    matrix: Matrix
    inner: Optimizer | None

    def state(self) -> Any:
        """The matrix's state on its owner, with sketches instead of tensors in shards mode.

        None on other ranks, or if there is no state.
        """
        whole = self.matrix.whole
        return None if self.inner is None or whole is None else self.inner.state.get(whole)

    def shown(self) -> dict[Any, Any]:
        """This rank's part of the state."""
        if self.matrix.kept:
            parts = self.matrix.kept.items()
            return {".".join(map(str, path)): part for path, part in parts if part is not None}
        return self.state() or {}


class Family:
    """A parameter and its matrices, whose states together are the parameter's state.

    Args:
        param: the parameter.
        members: its matrices, in order.
        note: note for the ledgers.
    """

    def __init__(self, param: torch.Tensor, members: Sequence[Kept], note: str) -> None:
        self._param, self._members = param, members
        self._matrices = [member.matrix for member in members]
        self._first = self._matrices[0]
        self._layout = self._first.route.layout
        self._note = f"{note}, state of {self._first.name}"

    # ---- from the owners

    def to_shards(self, sketch: Any) -> Any:
        """The state as DTensors with the parameter's placements. A collective.

        Args:
            sketch: sketch of the state of each matrix.
        """
        wholes = self._wholes(sketch)
        tensors: dict[Path, torch.Tensor] = {}
        items: list[Item] = []
        into: list[torch.Tensor | None] = []
        for path, each in tensors_in(sketch).items():
            shape, cut = self._cut(each)
            local = torch.empty(cut.own.shape, dtype=each.dtype, device=self._layout.device)
            for index, route in enumerate(self._routes(cut, each)):
                items.append(Item(route, each.dtype, wholes.get((index, path))))
                into.append(route.in_shard(local))
            tensors[path] = _placed(local, shape, cut)
        ToShards(self._layout, items, self._note).finish(into)
        at_home = {path: _at_home(tensor, self._param) for path, tensor in tensors.items()}
        return filled(sketch, at_home, self._layout.device)

    def _wholes(self, sketch: Any) -> dict[tuple[int, Path], torch.Tensor]:
        """The full state tensors of the matrices that this rank owns, by index of the matrix and path."""
        paths = tensors_in(sketch)
        wholes: dict[tuple[int, Path], torch.Tensor] = {}
        for index, member in enumerate(self._members):
            matrix, held = member.matrix, member.state()
            if matrix.kept:
                items = [Item(matrix.state_route(each), each.dtype, matrix.kept[path]) for path, each in paths.items()]
                arrived = ToOwners(matrix.route.layout, items, f"{self._note}, {index}").finish()
                wholes |= {(index, path): t for path, t in zip(paths, arrived, strict=True) if t is not None}
            elif held is not None:
                wholes |= {(index, path): leaf_at(held, path) for path in paths}
        return wholes

    def _cut(self, sketch: Sketch) -> tuple[tuple[int, ...], Layout]:
        """Shape and layout of the tensor that stores a state tensor of all matrices."""
        if sketch.shape == self._first.route.shape:
            return tuple(self._param.shape), self._layout
        shape = sketch.shape if len(self._members) == 1 else (len(self._members), *sketch.shape)
        return shape, self._layout.by_first_dim(shape)

    def _routes(self, cut: Layout, sketch: Sketch) -> list[Route]:
        """The route of a state tensor for each matrix, between its owner and the ranks that hold parts of it."""
        return [
            Route.of(cut, self._region(index, matrix, sketch), sketch.shape, matrix.route.owner)
            for index, matrix in enumerate(self._matrices)
        ]

    def _region(self, index: int, matrix: Matrix, sketch: Sketch) -> Box:
        if sketch.shape == matrix.route.shape:
            return matrix.route.region
        if len(self._members) == 1:
            return whole_box(sketch.shape)
        return Box((index, *[0] * len(sketch.shape)), (1, *sketch.shape))

    # ---- to the owners

    def to_owners(self, tree: Any) -> dict[Matrix, Any]:
        """Send the state to the owners, and return the sketch of each matrix's state. A collective.

        Raises:
            ShardConfigValueError: the state does not match the parameter.
        """
        sketch = mapped(tree, self._sketch_of_one)
        paths = tensors_in(sketch)
        items = []
        for path, each in paths.items():
            _, cut = self._cut(each)
            local = self._cut_so(leaf_at(tree, path), cut)
            items += [Item(route, each.dtype, route.in_shard(local)) for route in self._routes(cut, each)]
        arrived = iter(ToOwners(self._layout, items, self._note).finish())
        by_matrix: list[dict[Path, Any]] = [{} for _ in self._members]
        for path in paths:
            for tensors in by_matrix:
                tensors[path] = next(arrived)
        for (matrix, inner), tensors in zip(self._members, by_matrix, strict=True):
            if inner is not None and matrix.whole is not None:
                inner.state[matrix.whole] = filled(sketch, tensors, self._layout.device)
        return dict.fromkeys(self._matrices, sketch)

    def _sketch_of_one(self, path: Path, leaf: Any) -> Any:
        """The sketch of a leaf of the parameter's state for one matrix."""
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            return sketched(local_part(leaf))
        shape = tuple(leaf.shape)
        if shape == tuple(self._param.shape):
            return Sketch(self._first.route.shape, leaf.dtype)
        if len(self._members) == 1:
            return Sketch(shape, leaf.dtype)
        if shape[0] != len(self._members):
            where = ".".join(map(str, path))
            raise ShardConfigValueError(
                f"parameter {self._first.name}: its state {where} has shape {shape}, but needs one entry for each of "
                f"{len(self._members)} matrices; load it with the `blocks` with which it was saved"
            )
        return Sketch(shape[1:], leaf.dtype)

    def _cut_so(self, tensor: torch.Tensor, cut: Layout) -> torch.Tensor:
        """This rank's part of a tensor in the layout `cut`.

        The tensor may have any placements on the parameter's mesh, or may be a plain tensor that is equal on all ranks.
        """
        own = cut.own.slices(whole_box(tensor.shape))
        if not isinstance(tensor, DTensor):
            return tensor.detach()[own].to(cut.device)
        if all(isinstance(placed, Replicate) for placed in tensor.placements):
            return local_tensor(tensor)[own].to(cut.device)
        if tensor.device_mesh != cut.mesh:
            raise ShardConfigValueError(
                f"parameter {self._first.name}: its state is on {tensor.device_mesh}, but the parameter is on "
                f"{cut.mesh}; load DTensors on the parameter's mesh, or full tensors"
            )
        if tuple(tensor.placements) != cut.placements:
            tensor = tensor.redistribute(placements=cut.placements)
        return local_tensor(tensor).to(cut.device)


def _placed(local: torch.Tensor, shape: tuple[int, ...], cut: Layout) -> torch.Tensor:
    if cut.mesh is None:
        return local
    return dtensor_at(local, cut.mesh, cut.placements, torch.empty(shape, device="meta", dtype=local.dtype))


def _at_home(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The tensor on the device of its parameter's shards, which may be the CPU."""
    home = local_part(param).device
    if not isinstance(tensor, DTensor):
        return tensor.to(home)
    local = local_tensor(tensor)
    return tensor if local.device == home else dtensor_at(local.to(home), tensor.device_mesh, tensor.placements, tensor)
