"""Gather tensors from their shards, or send them from one rank to the others, in batches.

Small tensors are communicated together, as bytes in one buffer of bounded size. A larger tensor is communicated alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from ..._comm.collectives import MOVED, transports_of
from ..._comm.mesh import compute_device
from ..._comm.parts import aligned, begins_of, view_of
from ..._plan.boxes import batches, chunk_of
from ..._torch.core import storage_id
from ..._torch.distributed import local_part, local_tensor
from ..._torch.ragged import Ragged
from .ranks import ModelRanks, along, wire_device

LIMIT = 64 * 2**20  # bytes of a buffer, unless one tensor alone needs more
CPU_LIMIT = 4 * 2**20  # on CPUs: larger tensors are received in place, and large buffers would fragment the heap

T = TypeVar("T")


class Cut(NamedTuple):
    """How one axis of a mesh splits a DTensor along one dim. The other axes replicate it."""

    mesh: DeviceMesh
    axis: int
    dim: int
    rows: int = 1  # pieces begin at multiples of this many rows

    @property
    def world(self) -> int:
        """Number of pieces."""
        return self.mesh.size(self.axis)

    def sizes(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Begin and size of each piece along the dim."""
        return [chunk_of(shape[self.dim], self.world, index, self.rows) for index in range(self.world)]

    def most(self, shape: Sequence[int]) -> int:
        """Size of the largest piece along the dim."""
        return chunk_of(shape[self.dim], self.world, 0, self.rows)[1]

    def piece(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """A view of one of the pieces."""
        return whole.narrow(self.dim, *chunk_of(whole.shape[self.dim], self.world, index, self.rows))

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of the largest piece in a buffer."""
        numel = math.prod(shape[: self.dim]) * self.most(shape) * math.prod(shape[self.dim + 1 :])
        return aligned(numel * dtype.itemsize)


_PLAIN = (torch.Tensor, nn.Parameter)


def cut_of(tensor: torch.Tensor) -> Cut | None:
    """How a tensor is split; None if it is not a DTensor, has other placements, or its local tensor is a subclass."""
    if not isinstance(tensor, DTensor) or type(local_tensor(tensor)) not in _PLAIN:
        return None
    cuts: list[tuple[int, Any]] = [
        (a, placed) for a, placed in enumerate(tensor.placements) if type(placed) is not Replicate
    ]
    if len(cuts) != 1 or type(cuts[0][1]) not in (Shard, Ragged):
        return None
    [(axis, placed)] = cuts
    return Cut(tensor.device_mesh, axis, placed.dim % tensor.ndim, getattr(placed, "rows", 1))


def _by_cut(batch: Iterable[T], cut: Callable[[T], Cut | None]) -> dict[tuple[DeviceMesh, int] | None, list[T]]:
    """The items of a batch by mesh and axis. Items with the same mesh and axis can be communicated together."""
    together: dict[tuple[DeviceMesh, int] | None, list[T]] = {}
    for item in batch:
        own = cut(item)
        together.setdefault(None if own is None else (own.mesh, own.axis), []).append(item)
    return together


# ---- gathering


class Part(NamedTuple):
    """A tensor to gather, and the dtype of the result."""

    name: Any
    tensor: torch.Tensor
    dtype: torch.dtype
    cut: Cut | None

    @classmethod
    def of(cls, name: Any, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Part:
        """Make a part. A floating-point tensor is cast to `dtype`, if given."""
        kept = dtype is None or not tensor.is_floating_point()
        return cls(name, tensor, tensor.dtype if kept or dtype is None else dtype, cut_of(tensor))

    @property
    def sent_as(self) -> torch.dtype:
        """The dtype in which it is communicated: the smaller of the two."""
        return min(self.tensor.dtype, self.dtype, key=lambda dtype: dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer into which it is gathered."""
        return 0 if self.cut is None else self.cut.world * self.cut.nbytes(self.tensor.shape, self.sent_as)


def gathered(
    parts: Iterable[Part], ranks: ModelRanks, *, limit: int, lead_only: bool, device: torch.device | None
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield names and full tensors in the order of the parts. Each tensor has its own memory. A collective.

    Args:
        parts: tensors to gather, the same on all ranks.
        ranks: ranks that hold them.
        limit: bytes to gather at a time.
        lead_only: if True, only the lead gets the tensors.
        device: device of the full tensors. Default: the compute device.
    """
    wanted = ranks.leads or not lead_only
    for batch in batches(parts, lambda part: part.nbytes, limit):
        full: dict[Any, torch.Tensor] = {}
        for mesh_axis, alike in _by_cut(batch, lambda part: part.cut).items():
            if mesh_axis is None:
                for part in alike:
                    one = _whole(part, device or ranks.device, wanted)
                    full |= {} if one is None else {part.name: one}
            else:
                full |= _gather(alike, mesh_axis, ranks.lead if lead_only else None, device)
        for part in batch:
            if wanted:
                assert part.name in full, f"{part.name} was not gathered"
                yield part.name, full.pop(part.name)


def _whole(part: Part, device: torch.device, wanted: bool) -> torch.Tensor | None:
    """Gather one tensor that is not split by exactly one axis. None if it is not wanted on this rank."""
    tensor = part.tensor.detach()
    with torch.no_grad():
        whole = _full(tensor) if isinstance(tensor, DTensor) else tensor
        if not wanted:
            return None
        own = local_part(tensor)
        made = whole.to(device, part.dtype)
        return made.clone() if storage_id(made) == storage_id(own) else made


def _full(tensor: DTensor) -> torch.Tensor:
    """Gather a DTensor; as bytes if its dtype is one that not every backend sends."""
    if tensor.dtype in MOVED:
        return tensor.full_tensor()
    local = local_tensor(tensor).unsqueeze(-1).contiguous().view(torch.uint8)
    shape = torch.Size((*tensor.shape, tensor.dtype.itemsize))
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = tensor.device_mesh, tensor.placements
    sent = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return sent.full_tensor().contiguous().view(tensor.dtype).squeeze(-1)


def _gather(
    parts: list[Part], mesh_axis: tuple[DeviceMesh, int], lead: int | None, device: torch.device | None
) -> dict[Any, torch.Tensor]:
    """Gather parts that the same axis splits, in one collective. If `lead` is given, only this rank gets them."""
    mesh, axis = mesh_axis
    group, world = mesh.get_group(axis), mesh.size(axis)
    if lead is not None and lead not in dist.get_process_group_ranks(group):
        return {}  # this group is a replica; the lead gathers from its own group
    wire = wire_device(group, compute_device(mesh.device_type))
    home = device or compute_device(mesh.device_type)
    wanted = lead is None or lead == dist.get_rank()
    with torch.no_grad():
        if (direct := _direct(parts, wire, home)) is not None:
            whole = torch.empty(parts[0].tensor.shape, dtype=parts[0].dtype, device=home) if wanted else None
            rows = None if whole is None else whole.view(-1).view(torch.uint8).view(world, -1)
            _exchange(direct, rows, group, lead)
            return {} if whole is None else {parts[0].name: whole}
        own, begins = _packed(parts, wire)
        rows = torch.empty((world, begins[-1]), dtype=torch.uint8, device=wire) if wanted else None
        _exchange(own, rows, group, lead)
        del own
        if rows is None:
            return {}
        return {part.name: _put_together(part, rows, at, home) for part, at in zip(parts, begins, strict=False)}


def _packed(parts: list[Part], wire: torch.device) -> tuple[torch.Tensor, list[int]]:
    """The bytes of this rank's pieces in one buffer, and the offset of each piece."""
    sizes = [0 if part.cut is None else part.cut.nbytes(part.tensor.shape, part.sent_as) for part in parts]
    begins = begins_of(sizes)
    own = torch.empty(begins[-1], dtype=torch.uint8, device=wire)
    for part, begin in zip(parts, begins, strict=False):
        local = local_tensor(part.tensor)
        view_of(own, begin, local.shape, part.sent_as).copy_(local)
    return own, begins


def _direct(parts: list[Part], wire: torch.device, home: torch.device) -> torch.Tensor | None:
    """This rank's piece as bytes, if there is only one tensor and its concatenated pieces are the full tensor."""
    [part, *others] = parts
    assert part.cut is not None
    shape = part.tensor.shape
    even = part.cut.dim == 0 and part.cut.most(shape) * part.cut.world == shape[0] and math.prod(shape) > 0
    if others or not even or wire != home or part.sent_as != part.dtype:
        return None
    local = local_tensor(part.tensor)
    return local.to(wire, part.dtype).contiguous().view(-1).view(torch.uint8)


def _exchange(own: torch.Tensor, rows: torch.Tensor | None, group: dist.ProcessGroup, lead: int | None) -> None:
    """Gather the bytes of all ranks of a group into `rows` (ranks, bytes), on all of them or on the lead."""
    if not own.numel():
        return
    if group.size() == 1:
        if rows is not None:
            rows[0].copy_(own)
    elif lead is None and own.device.type != "cpu":
        assert rows is not None
        transport = next(iter(transports_of(group, own.device).values()))
        transport.all_gather([rows.view(-1)], [own]).wait()
    else:
        _send_around(own, rows, group, lead)


def _send_around(own: torch.Tensor, rows: torch.Tensor | None, group: dist.ProcessGroup, lead: int | None) -> None:
    """Gather by sends and receives: gloo's own gathers allocate temporaries of the full size."""
    members, rank = dist.get_process_group_ranks(group), dist.get_rank()
    messages = []
    if rows is not None:
        rows[members.index(rank)].copy_(own)
        for row, sender in zip(rows, members, strict=True):
            messages += [] if sender == rank else [dist.P2POp(dist.irecv, row, sender, group)]
    receivers = members if lead is None else [lead]
    messages += [dist.P2POp(dist.isend, own, receiver, group) for receiver in receivers if receiver != rank]
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()


def _put_together(part: Part, rows: torch.Tensor, begin: int, device: torch.device) -> torch.Tensor:
    """Assemble one full tensor from the gathered buffer."""
    cut, shape = part.cut, part.tensor.shape
    assert cut is not None
    full = torch.empty(shape, dtype=part.dtype, device=device)
    for index, row in enumerate(rows):
        piece = cut.piece(full, index)
        if piece.numel():
            piece.copy_(view_of(row, begin, piece.shape, part.sent_as))
    return full


# ---- sending


class Expected(NamedTuple):
    """A tensor that the lead sends.

    Attributes:
        name: name by which the lead looks it up.
        shape, dtype: shape and dtype of the full tensor.
        cut: how the receivers split it. None if each receives the full tensor.
    """

    name: Any
    shape: torch.Size
    dtype: torch.dtype
    cut: Cut | None

    @property
    def nbytes(self) -> int:
        """Bytes of the lead's buffer."""
        if self.cut is None:
            return aligned(math.prod(self.shape) * self.dtype.itemsize)
        return self.cut.world * self.cut.nbytes(self.shape, self.dtype)


def sent(
    expected: Iterable[Expected], ranks: ModelRanks, look_up: Callable[[Any], torch.Tensor], limit: int
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield names and this rank's pieces, or full tensors if they are not split. A collective.

    Each yielded tensor is a view of a buffer. Copy it before you resume the iteration.

    Args:
        expected: tensors to receive, the same on all ranks.
        ranks: ranks that take part. The mesh of each cut must have all of them.
        look_up: returns the full tensor of a name. Called only on the lead.
        limit: bytes to send at a time.
    """
    for batch in batches(expected, lambda each: each.nbytes, limit):
        for mesh_axis, alike in _by_cut(batch, lambda each: each.cut).items():
            yield from _broadcast(alike, ranks, look_up) if mesh_axis is None else _scatter(alike, ranks, look_up)


def _broadcast(
    alike: list[Expected], ranks: ModelRanks, look_up: Callable[[Any], torch.Tensor]
) -> Iterator[tuple[Any, torch.Tensor]]:
    begins = begins_of(each.nbytes for each in alike)
    data = torch.empty(begins[-1], dtype=torch.uint8, device=ranks.wire())
    views = [view_of(data, begin, each.shape, each.dtype) for each, begin in zip(alike, begins, strict=False)]
    if ranks.leads:
        for each, view in zip(alike, views, strict=True):
            view.copy_(look_up(each.name))
    if data.numel():
        ranks.broadcast(data)
    yield from zip((each.name for each in alike), views, strict=True)


def _scatter(
    alike: list[Expected], ranks: ModelRanks, look_up: Callable[[Any], torch.Tensor]
) -> Iterator[tuple[Any, torch.Tensor]]:
    cuts = [each.cut for each in alike if each.cut is not None]
    mesh, axis = cuts[0].mesh, cuts[0].axis
    wire = ranks.wire(mesh.get_group(axis))
    begins = begins_of(cut.nbytes(each.shape, each.dtype) for cut, each in zip(cuts, alike, strict=True))
    own = torch.empty(begins[-1], dtype=torch.uint8, device=wire)
    rows = torch.empty((mesh.size(axis), begins[-1]) if ranks.leads else (0, 0), dtype=torch.uint8, device=wire)
    for index, row in enumerate(rows):
        for cut, each, begin in zip(cuts, alike, begins, strict=False):
            piece = cut.piece(look_up(each.name), index)
            view_of(row, begin, piece.shape, each.dtype).copy_(piece)
    if own.numel():
        _pass_on(own, [*rows], mesh, axis, ranks.lead)
    del rows
    coordinate = mesh.get_local_rank(axis)
    for cut, each, begin in zip(cuts, alike, begins, strict=False):
        shape = [*each.shape]
        shape[cut.dim] = cut.sizes(each.shape)[coordinate][1]
        yield each.name, view_of(own, begin, shape, each.dtype)


def _pass_on(own: torch.Tensor, rows: list[torch.Tensor], mesh: DeviceMesh, axis: int, lead: int) -> None:
    """Scatter the lead's rows among its group of one axis, then broadcast each row along the other axes."""
    group = mesh.get_group(axis)
    if group.size() == 1:
        own.copy_(rows[0] if rows else own)
    elif lead in (members := dist.get_process_group_ranks(group)):
        _deal(own, dict(zip(members, rows, strict=False)), group, lead)
    for others, source in along(mesh, lead, (other for other in range(mesh.ndim) if other != axis)):
        dist.broadcast(own, src=source, group=others)


def _deal(own: torch.Tensor, rows: Mapping[int, torch.Tensor], group: dist.ProcessGroup, lead: int) -> None:
    """Send each rank its row from the lead. Uses sends, because gloo's scatter keeps the rows alive after its end."""
    if rows:
        own.copy_(rows[lead])
        messages = [dist.P2POp(dist.isend, row, rank, group) for rank, row in rows.items() if rank != lead]
    else:
        messages = [dist.P2POp(dist.irecv, own, lead, group)]
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()
