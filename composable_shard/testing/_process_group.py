"""The process group of a fabric: it moves copies of this rank's data at once, and is done when the model says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import ShardConfigValueError
from ._clocks import Clock, Collective
from ._cuda import CudaLinks
from ._links import Link

NAME = "fabric"
_Base: Any = dist.ProcessGroup  # the signatures of its methods are overloaded, and differ among versions of torch
Tensors = Sequence[Tensor]


class Issuer(Protocol):
    """What a process group needs of its fabric."""

    cuda: CudaLinks

    @property
    def clock(self) -> Clock: ...

    def issue(self, kind: str, group: str, ranks: int, nbytes: int, link: Link) -> tuple[Collective, float]: ...

    def wait(self, event: Collective, finish_s: float) -> None: ...

    def done(self, finish_s: float) -> bool: ...


class FabricWork(dist.Work):
    """The handle of a collective.

    Args:
        fabric: whose clock tells.
        event, finish_s: what was issued, and when it is over.
        value: of its future.
        landed: on a GPU, the event behind it.
    """

    def __init__(
        self, fabric: Issuer, event: Collective, finish_s: float, value: list[Tensor], landed: torch.Event | None
    ) -> None:
        super().__init__()
        self._fabric = fabric
        self._event = event
        self._finish_s = finish_s
        self._value = value
        self._landed = landed

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._landed is not None:
            self._landed.wait()
        else:
            self._fabric.wait(self._event, self._finish_s)
        return True

    def is_completed(self) -> bool:
        return self._fabric.done(self._finish_s) if self._landed is None else self._landed.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._value

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Waits first: a future that is to be completed later needs somebody who does it."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._value)
        return future


class Together(dist.Work):
    """Several handles as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class FabricGroup(_Base):  # type: ignore[misc]
    """A process group whose other ranks hold what this one holds.

    torch calls the methods by these names, also from C++; their forms are those of torch's `ProcessGroup`.
    """

    def __init__(self, rank: int, size: int, fabric: Issuer, link: Link) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._fabric = fabric
        self._link = link
        self._label = {"name": "", "desc": ""}
        self._coalesced: list[dist.Work] | None = None

    def name(self) -> str:
        return NAME

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._label["name"]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._label["name"] = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._label["desc"]

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._label["desc"] = desc

    def _get_backend(self, device: torch.device) -> FabricGroup:
        return self  # who asks wants its name

    # ---- issuing

    def _issue(self, kind: str, whole: Iterable[Tensor], out: Tensors, move: Callable[[], None]) -> dist.Work:
        """Put a collective on the link, and move the data at once, while the clock stands still.

        Args:
            kind: for the model and the record.
            whole: the tensors whose bytes count.
            out: what it gives.
            move: gives it.
        """
        counted, nbytes = list(whole), 0
        for tensor in counted:
            nbytes += tensor.nbytes
        label = self._label["desc"] or self._label["name"]
        event, finish = self._fabric.issue(kind, label, self._size, nbytes, self._link)
        landed = None
        with self._fabric.clock.stopped(), torch.no_grad():
            if any(tensor.is_cuda for tensor in counted):
                seconds = self._link.seconds(kind, nbytes, self._size)
                landed = self._fabric.cuda.run(self._link.name, seconds, [*counted, *out], move)
            else:
                move()
        work = FabricWork(self._fabric, event, finish, list(out), landed)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return Together(works)

    # ---- gathers

    def allgather_into_tensor_coalesced(self, outs: Tensors, ins: Tensors, opts: Any = None) -> dist.Work:
        def move() -> None:
            for out, own in zip(outs, ins, strict=True):
                self._repeat(out, own)

        return self._issue("all_gather", outs, outs, move)

    def _allgather_base(self, out: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([out], [own])

    def allgather(self, outs: Sequence[Tensors], ins: Tensors, opts: Any = None) -> dist.Work:
        flat = list(chain.from_iterable(outs))

        def move() -> None:
            for each, own in zip(outs, ins, strict=True):
                for out in each:
                    _fill(out, own)

        return self._issue("all_gather", flat, flat, move)

    def allgather_coalesced(self, outs: Sequence[Tensors], ins: Tensors, opts: Any = None) -> dist.Work:
        return self.allgather([list(each) for each in zip(*outs, strict=True)], ins)  # theirs go by rank

    def gather(self, outs: Sequence[Tensors], ins: Tensors, opts: Any = None) -> dist.Work:
        flat = list(chain.from_iterable(outs))

        def move() -> None:
            for out in flat:
                _fill(out, ins[0])

        return self._issue("gather", [ins[0]] * self._size, flat, move)

    # ---- reductions

    def reduce_scatter_tensor_coalesced(self, outs: Tensors, ins: Tensors, opts: Any) -> dist.Work:
        def move() -> None:
            for out, whole in zip(outs, ins, strict=True):
                _fill(out, self._parts(whole, out.numel())[self._rank])
                self._reduce(out, opts)

        return self._issue("reduce_scatter", ins, outs, move)

    def _reduce_scatter_base(self, out: Tensor, whole: Tensor, opts: Any) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([out], [whole], opts)

    def reduce_scatter(self, outs: Tensors, ins: Sequence[Tensors], opts: Any) -> dist.Work:
        def move() -> None:
            for out, parts in zip(outs, ins, strict=True):
                _fill(out, parts[self._rank])
                self._reduce(out, opts)

        return self._issue("reduce_scatter", chain.from_iterable(ins), outs, move)

    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._issue("all_reduce", tensors, tensors, lambda: self._reduce_all(tensors, opts))

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._issue("reduce", tensors, tensors, lambda: self._reduce_all(tensors, opts))

    def _reduce_all(self, tensors: Tensors, opts: Any) -> None:
        for tensor in tensors:
            self._reduce(tensor, opts)

    def _reduce(self, tensor: Tensor, opts: Any) -> None:
        """Make of one rank's value what `size` such ranks have together."""
        op = opts.reduceOp
        if op == dist.ReduceOp.SUM:
            tensor.mul_(self._size)
        elif op == dist.ReduceOp.PRODUCT:
            tensor.pow_(self._size)
        elif not any(op == same for same in _SAME):
            raise ShardConfigValueError(f"fabric: reduces by SUM, AVG, PRODUCT, MIN, MAX, BAND or BOR, not by {op.op}")

    # ---- the others

    def alltoall_base(
        self, out: Tensor, whole: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        def move() -> None:
            own = torch.split(whole, _sizes(whole, in_sizes, self._size))[self._rank].clone()
            for part in torch.split(out, _sizes(out, out_sizes, self._size)):
                _fill(part, own)

        return self._issue("all_to_all", [whole], [out], move)

    def alltoall(self, outs: Tensors, ins: Tensors, opts: Any = None) -> dist.Work:
        def move() -> None:
            own = ins[self._rank].clone()
            for out in outs:
                _fill(out, own)

        return self._issue("all_to_all", ins, outs, move)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self._issue("broadcast", tensors, tensors, _nothing)

    def scatter(self, outs: Tensors, ins: Sequence[Tensors], opts: Any) -> dist.Work:
        def move() -> None:
            for at, out in enumerate(outs):
                if opts.rootRank == self._rank:
                    _fill(out, ins[at][self._rank])
                else:
                    out.zero_()

        return self._issue("scatter", [outs[0]] * self._size, outs, move)

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> dist.Work:
        return self._issue("send", tensors, (), _nothing)

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> dist.Work:
        def move() -> None:
            for tensor in tensors:
                tensor.zero_()

        return self._issue("recv", tensors, tensors, move)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self.recv(tensors, -1, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._issue("barrier", (), (), _nothing)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # ---- data

    def _parts(self, whole: Tensor, numel: int) -> Tensor:
        """A whole tensor by ranks."""
        if whole.numel() != self._size * numel:
            raise ShardConfigValueError(
                f"fabric: {whole.numel()} elements are not {numel} for each of {self._size} ranks"
            )
        return whole.view(self._size, numel)

    def _repeat(self, out: Tensor, own: Tensor) -> None:
        """Fill `out` with copies of `own`, which may be this rank's part of it."""
        parts, row = self._parts(out, own.numel()), own.reshape(-1)
        if parts[self._rank].data_ptr() != row.data_ptr():
            parts.copy_(row)
            return
        parts[: self._rank].copy_(row)
        parts[self._rank + 1 :].copy_(row)

    # torch 2.13 has given some of them new names.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base
    allreduce_coalesced = allreduce


_SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR)


def _nothing() -> None:
    pass


def _sizes(tensor: Tensor, given: Sequence[int], ranks: int) -> list[int]:
    """Rows of each rank: as given, or alike."""
    return list(given) or [tensor.shape[0] // ranks] * ranks


def _fill(out: Tensor, own: Tensor) -> None:
    """Copy as many elements as both have; the rest of `out` becomes zero."""
    if out.numel() == own.numel():
        if out.data_ptr() != own.data_ptr():
            out.copy_(own.reshape(out.shape))
        return
    common = min(out.numel(), own.numel())
    flat = out.view(-1)
    flat[:common].copy_(own.reshape(-1)[:common])
    flat[common:].zero_()
