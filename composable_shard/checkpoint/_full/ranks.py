"""The ranks that hold a model together, their communication, and their lead rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..._comm.mesh import compute_device
from ..._torch.distributed import backend_name
from ...errors import CheckpointMismatchError
from .._ranks import Ranks

_T = TypeVar("_T")


class ModelRanks:
    """The ranks that hold a model together.

    These are the ranks of the largest mesh. If nothing is sharded, they are the ranks of the default process group, or
    only this process if there is no process group.

    Args:
        meshes: meshes of the model's DTensors. On every rank, the largest one must have the same ranks.

    Attributes:
        lead: the first rank. It is rank 0 unless only some ranks have the model, as for a stage of a pipeline.
        size: number of ranks.
        everyone: global ranks.
        device: compute device of this rank.
    """

    def __init__(self, meshes: Iterable[DeviceMesh]) -> None:
        mesh = max(meshes, key=lambda each: each.size(), default=None)
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank()
        if mesh is None:
            self.everyone, self.device = list(range(1 if alone else dist.get_world_size())), torch.device("cpu")
        else:
            self.everyone = mesh.mesh.flatten().tolist()
            self.device = compute_device(mesh.device_type)
        self.lead, self.size = min(self.everyone), len(self.everyone)
        self._mesh = None if alone or self.size == dist.get_world_size() else mesh
        self._alone = alone or self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this rank is the lead."""
        return self.rank == self.lead

    def are_all_of(self, cut: Any) -> bool:
        """Whether the mesh of a `Cut` has all these ranks; False for None."""
        return cut is not None and cut.mesh.size() == self.size

    def _groups(self) -> Iterator[tuple[dist.ProcessGroup, int]]:
        """Yield process groups that reach all ranks one after the other, and the rank in each that has the data.

        For a mesh, these are the groups of its axes. A rank sends the data that it received along one axis along the
        next axis.
        """
        if self._alone:
            return
        if self._mesh is None:
            assert dist.group.WORLD is not None
            yield dist.group.WORLD, self.lead
            return
        yield from along(self._mesh, self.lead, range(self._mesh.ndim))

    def from_lead(self, value: Any) -> Any:
        """Broadcast the lead's value to all ranks. It is pickled."""
        box = [value if self.leads else None]
        for group, source in self._groups():
            dist.broadcast_object_list(box, src=source, group=group)
        return box[0]

    def broadcast(self, data: torch.Tensor) -> None:
        """Overwrite a tensor with the lead's values."""
        for group, source in self._groups():
            dist.broadcast(data, src=source, group=group)

    def collected(self, value: Any) -> list[Any]:
        """Gather every rank's value on all ranks. The values are pickled."""
        values = [value]
        for group, _ in self._groups():
            lists: list[list[Any]] = [[] for _ in range(group.size())]
            dist.all_gather_object(lists, values, group=group)
            values = [each for some in lists for each in some]
        return values

    def agree(self, what: str, problems: list[str], held: object = None) -> None:
        """Raise on all ranks if a rank has a problem, or if the ranks hold different parameters.

        Args:
            what: name of the operation, for the message.
            problems: descriptions of the problems on this rank.
            held: value that must be equal on all ranks.

        Raises:
            CheckpointMismatchError: a rank has problems, or `held` differs. Lists the problems of the first such rank.
        """
        reports = self.collected((self.rank, problems, held))
        for rank, seen, _ in reports:
            if seen:
                more = f" (and {len(seen) - _MOST_PROBLEMS} more)" if len(seen) > _MOST_PROBLEMS else ""
                text = "\n    ".join(seen[:_MOST_PROBLEMS])
                raise CheckpointMismatchError(f"{what}, on rank {rank}: nothing was changed.\n    {text}{more}")
        first_rank, _, first = reports[0]
        for rank, _, other in reports:
            if other != first:
                raise CheckpointMismatchError(
                    f"{what}: nothing was changed. Ranks {first_rank} and {rank} hold different parameters: "
                    f"{_first_difference(first, other)}; build and shard the model in the same way on both"
                )

    def wire(self, group: dist.ProcessGroup | None = None) -> torch.device:
        """The device that tensors must be on to be sent in a group. Default: the first group of all ranks."""
        group = group or next((each for each, _ in self._groups()), None)
        return self.device if group is None else wire_device(group, self.device)


class Together(Ranks):
    """The ranks of a model, with the lead as rank 0."""

    def __init__(self, ranks: ModelRanks) -> None:
        self._ranks = ranks
        self.everyone = sorted(ranks.everyone)
        self.rank = self.everyone.index(ranks.rank)
        self.size = ranks.size

    def gather(self, value: _T) -> list[_T]:
        """Gather every rank's value, in the order of the ranks."""
        values = dict(self._ranks.collected((self._ranks.rank, value)))
        return [values[rank] for rank in self.everyone]

    def from_first(self, value: _T) -> _T:
        """Broadcast the lead's value."""
        first: _T = self._ranks.from_lead(value)
        return first


_MOST_PROBLEMS = 20


def _first_difference(one: Any, two: Any) -> str:
    for left, right in zip(one, two, strict=False):
        if left != right:
            return f"{left} and {right}"
    return f"{len(one)} and {len(two)} of them"


def along(mesh: DeviceMesh, lead: int, axes: Iterable[int]) -> Iterator[tuple[dist.ProcessGroup, int]]:
    """Yield this rank's process group on each axis of a mesh, and the rank in it with the lead's coordinate there."""
    own = mesh.get_coordinate()
    assert own is not None
    leads = (mesh.mesh == lead).nonzero()[0].tolist()
    for axis in axes:
        at = [*own]
        at[axis] = leads[axis]
        yield mesh.get_group(axis), int(mesh.mesh[tuple(at)])


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device that tensors must be on to be sent in a process group: the CPU for gloo."""
    return torch.device("cpu") if backend_name(group, device) == "gloo" else device
