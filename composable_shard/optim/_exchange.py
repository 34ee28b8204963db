"""Exchange parts of tensors between ranks: pack them, run one all-to-all for each dtype, and unpack them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .._comm.collectives import MOVED
from .._comm.lanes import WAITING, Awaitable
from .._torch.distributed import all_to_all_options
from ._layout import Layout, Route

Parts = Sequence[Sequence[torch.Tensor]]  # by rank: the tensors to send to it, or to receive from it


class Item(NamedTuple):
    """A tensor that is sent between its owner and the ranks that hold parts of it.

    Attributes:
        route: its owner, and the part that each rank holds.
        dtype: dtype of the tensor.
        tensor: tensor to send: to the owner, this rank's part; from the owner, the full tensor. None if this rank
            sends nothing.
    """

    route: Route
    dtype: torch.dtype
    tensor: torch.Tensor | None


class _Flight(NamedTuple):
    """A running all-to-all of the parts of one dtype."""

    dtype: torch.dtype
    received: torch.Tensor
    sent: torch.Tensor
    handle: Awaitable | None


class _Exchange:
    """A running exchange of parts.

    Args:
        layout: layout with the process group and the device.
        outgoing: tensors to send to each rank. They may change after the constructor returns.
        incoming: dtypes and numbers of elements of the tensors from each rank, in the order of that rank.
        dtypes: dtypes that any rank sends. Must be equal on all ranks.
        note: note for the ledgers. Must be equal on all ranks.

    Attributes:
        nbytes: bytes that this rank sends to other ranks.
    """

    def __init__(
        self,
        layout: Layout,
        outgoing: Parts,
        incoming: Sequence[Sequence[tuple[torch.dtype, int]]],
        dtypes: Iterable[torch.dtype],
        note: str,
    ) -> None:
        self._flights: list[_Flight] = []
        self._arrived: list[tuple[torch.dtype, torch.Tensor]] = []
        self.nbytes = 0
        for dtype in sorted(dtypes, key=str):
            for ledger in layout.ledgers:
                ledger.issue(f"{note}, {str(dtype).removeprefix('torch.')}")
            parts = [[part for part in to if part.dtype == dtype] for to in outgoing]
            self._launch(layout, dtype, parts, [_count(dtype, frm) for frm in incoming])

    def _launch(self, layout: Layout, dtype: torch.dtype, parts: Parts, counts: list[int]) -> None:
        sizes = [sum([part.numel() for part in to]) for to in parts]
        sent = _packed([part for to in parts for part in to], dtype, layout.device)
        self._flights.append(_launched(layout.group, sent, counts, sizes))
        self.nbytes += dtype.itemsize * (sum(sizes) - sizes[layout.rank])

    def wait(self) -> None:
        """Wait until all parts are received, and free the send buffers.

        Raises:
            PeerLostError: another rank is lost.
        """
        while self._flights:
            dtype, received, sent, handle = self._flights.pop(0)
            if handle is not None:
                WAITING.wait(handle)
            del sent, handle
            self._arrived.append((dtype, received))

    def unpack(self, into: Parts) -> None:
        """Copy the received parts into tensors, given by sending rank. Tensors may be strided."""
        while self._arrived:
            dtype, received = self._arrived.pop(0)
            _unpack(received, [tensor for frm in into for tensor in frm if tensor.dtype == dtype])


def _count(dtype: torch.dtype, incoming: Sequence[tuple[torch.dtype, int]]) -> int:
    """Number of elements of a dtype to receive from one rank."""
    return sum([count for of, count in incoming if of == dtype])


def _packed(parts: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy tensors into one flat tensor of shape (n,), in order."""
    flat = torch.empty(sum([part.numel() for part in parts]), dtype=dtype, device=device)
    pieces = torch.split(flat, [part.numel() for part in parts]) if parts else ()
    if parts:
        torch._foreach_copy_([piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)], [*parts])
    return flat


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """The inverse of `_packed`."""
    if tensors:
        pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
        torch._foreach_copy_([*tensors], [p.view(t.shape) for p, t in zip(pieces, tensors, strict=True)])


def _launched(group: dist.ProcessGroup | None, sent: torch.Tensor, counts: list[int], sizes: list[int]) -> _Flight:
    if group is None:
        return _Flight(sent.dtype, sent, sent, None)
    received = torch.empty(sum(counts), dtype=sent.dtype, device=sent.device)
    wires, widths = (received, sent), 1
    if sent.dtype not in MOVED:
        wires, widths = (received.view(torch.uint8), sent.view(torch.uint8)), sent.dtype.itemsize
    counts, sizes = [widths * count for count in counts], [widths * size for size in sizes]
    handle = group.alltoall_base(*wires, counts, sizes, all_to_all_options())
    return _Flight(sent.dtype, received, sent, handle)


class ToOwners:
    """A running transfer of tensors from the ranks that hold parts of them to their owners.

    Args:
        layout: layout with the process group and the device.
        items: items to send. Routes and dtypes must be equal and in the same order on all ranks.
        note: note for the ledgers.
    """

    def __init__(
        self,
        layout: Layout,
        items: Sequence[Item],
        note: str,
    ) -> None:
        self._items, self._layout = items, layout
        ranks = len(layout.boxes)
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        incoming: list[list[tuple[torch.dtype, int]]] = [[] for _ in range(ranks)]
        for route, dtype, tensor in items:
            if tensor is not None and route.sends:
                outgoing[route.owner].append(tensor)
            if route.is_owner:
                for frm, part in route.senders:
                    incoming[frm].append((dtype, part.numel))
        self._exchange = _Exchange(layout, outgoing, incoming, {item.dtype for item in items}, note)
        self.nbytes = self._exchange.nbytes

    def finish(self) -> list[torch.Tensor | None]:
        """Wait for the transfer. Returns for each item the full tensor on its owner, and None on other ranks."""
        self._exchange.wait()
        into: list[list[torch.Tensor]] = [[] for _ in self._layout.boxes]
        wholes: list[torch.Tensor | None] = []
        for route, dtype, _ in self._items:
            wholes.append(torch.empty(route.shape, dtype=dtype, device=self._layout.device) if route.is_owner else None)
            for frm, part in route.senders if route.is_owner else ():
                into[frm].append(route.part_of(wholes[-1], part))
        self._exchange.unpack(into)
        return wholes


class ToShards:
    """A running transfer of tensors from their owners to the ranks that hold parts of them.

    Args:
        layout, items, note: as in `ToOwners`.
    """

    def __init__(
        self,
        layout: Layout,
        items: Sequence[Item],
        note: str,
    ) -> None:
        self._routes = [item.route for item in items]
        ranks = len(layout.boxes)
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        incoming: list[list[tuple[torch.dtype, int]]] = [[] for _ in range(ranks)]
        for route, dtype, tensor in items:
            if route.is_owner:
                assert tensor is not None
                for to, part in route.holders():
                    outgoing[to].append(route.part_of(tensor, part))
            if route.own is not None:
                incoming[route.owner].append((dtype, route.own.numel))
        self._ranks = ranks
        self._exchange = _Exchange(layout, outgoing, incoming, {item.dtype for item in items}, note)
        self.nbytes = self._exchange.nbytes

    def finish(self, into: Sequence[torch.Tensor | None]) -> None:
        """Wait for the transfer, and fill this rank's part of each item. None for items without a part on this rank."""
        by_rank: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
        for route, tensor in zip(self._routes, into, strict=True):
            if tensor is not None and route.own is not None:
                by_rank[route.owner].append(tensor)
        self._exchange.wait()
        self._exchange.unpack(by_rank)
