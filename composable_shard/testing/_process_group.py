"""The process group of worlds in one process: implements torch's interface on top of a `Medium`."""

# mypy: disable-error-code="override, assignment, call-arg"
# (torch overloads these methods; it calls the signatures below)

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import ShardConfigValueError
from ._collectives import Call, Issued, Tensors, Work, together

DEVICES = ["cpu", "cuda"]
GroupKey = tuple[str, tuple[int, ...]]  # name and members


class Medium(Protocol):
    """The implementation of a group's collectives.

    Attributes:
        backend: name of the backend.
    """

    backend: str

    def launch(self, key: GroupKey, group_rank: int, call: Call) -> Work:
        """Launch a collective as rank `group_rank` of a group."""
        ...

    def send(self, key: GroupKey, group_rank: int, to: int, tag: int, call: Call) -> Work:
        """Send the inputs of `call` to rank `to` of the group."""
        ...

    def receive(self, key: GroupKey, group_rank: int, sources: Sequence[int], tag: int, call: Call) -> Work:
        """Receive a message from one of the ranks `sources` of the group into the outputs of `call`."""
        ...


class MemoryGroup(dist.ProcessGroup):
    """A process group in the memory of this process.

    torch calls the methods by these names, also from C++. Their signatures are those of torch's `ProcessGroup`.

    Args:
        group_rank: this rank's index in the group.
        members: global ranks of the group.
        name: name of the group.
        medium: implements its collectives.
    """

    def __init__(self, group_rank: int, members: tuple[int, ...], name: str, medium: Medium) -> None:
        super().__init__(group_rank, len(members))
        self._group_rank = group_rank
        self._members = members
        self._name = name
        self._description = ""
        self._medium = medium
        self._coalesced: list[dist.Work] | None = None

    def name(self) -> str:
        return self._medium.backend

    def getBackendName(self) -> str:  # noqa: N802 - torch's name, like the ones below
        return self._medium.backend

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def _get_backend(self, device: torch.device) -> MemoryGroup:
        return self  # torch asks the backend only for its name

    @property
    def _key(self) -> GroupKey:
        return self._name, self._members

    # ---- launching

    def _issued(self, kind: str, tensors: Tensors, details: str) -> Issued:
        label = self._name if self._description in ("", "undefined") else self._description
        dtype = tensors[0].dtype if tensors else None
        return Issued(kind, tuple(tuple(tensor.shape) for tensor in tensors), dtype, details, label, self._members)

    def _launch(
        self,
        kind: str,
        inputs: Tensors,
        outputs: Tensors,
        *,
        pieces: int = 1,
        op: Any = None,
        root: int | None = None,
        sizes_agree: bool = True,
        brings: bool = True,
        opts: Any = None,
    ) -> Work:
        """Launch a collective, with each input split into equal pieces.

        If `brings` is false, this rank sends nothing, and `inputs` only give the sizes and dtype that it expects.
        """
        details = "" if op is None else f" ({_op_name(op)})"
        if root is not None:
            details += f" of root {self._members[root]}"
        issued = self._issued(kind, inputs, details)
        sizes = tuple(math.prod(shape) for shape in issued.shapes) if sizes_agree else ()
        must_agree = (kind, issued.dtype, details, sizes)
        if not brings:
            issued, inputs = replace(issued, shapes=()), []
        call = Call(issued, inputs, outputs, pieces, must_agree, op, root or 0, not getattr(opts, "asyncOp", True))
        return self._remembered(self._medium.launch(self._key, self._group_rank, call))

    def _remembered(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return together(works)

    def _chunks(self, tensor: torch.Tensor) -> Tensors:
        """Split a tensor into equal parts, one per rank."""
        if tensor.numel() % self.size():
            raise ShardConfigValueError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be split evenly among {self.size()} ranks"
            )
        return list(tensor.detach().view(self.size(), -1).unbind())

    def _check_sizes(self, kind: str, wholes: Tensors, pieces: Tensors) -> None:
        for whole, piece in zip(wholes, pieces, strict=True):
            if whole.numel() != piece.numel() * self.size():
                raise ShardConfigValueError(
                    f"{kind}: {self.size()} pieces of {tuple(piece.shape)} do not fit {tuple(whole.shape)}"
                )

    # ---- gathers

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        return self._launch("all_gather", list(inputs), [part for parts in outputs for part in parts])

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        by_input = [outputs[rank][i] for i in range(len(inputs)) for rank in range(self.size())]
        return self._launch("all_gather", list(inputs), by_input)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:  # noqa: A002
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        self._check_sizes("all_gather", outputs, inputs)
        parts = [part for whole in outputs for part in self._chunks(whole)]
        return self._launch("all_gather", list(inputs), parts, opts=opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Work:
        own = list(outputs[0]) if outputs and self._group_rank == opts.rootRank else []
        return self._launch("gather", list(inputs), own, root=opts.rootRank)

    # ---- reductions

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        return self._launch("reduce_scatter", [each for parts in inputs for each in parts], list(outputs), op=_op(opts))

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:  # noqa: A002
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        self._check_sizes("reduce_scatter", inputs, outputs)
        pieces, op = self.size(), _op(opts)
        return self._launch("reduce_scatter", list(inputs), list(outputs), pieces=pieces, op=op, opts=opts)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return self._launch("all_reduce", tensors, tensors, op=_op(opts), opts=opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        outputs = list(tensors) if self._group_rank == opts.rootRank else []
        return self._launch("reduce", list(tensors), outputs, op=_op(opts), root=opts.rootRank)

    # ---- other collectives

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        outputs = [] if self._group_rank == opts.rootRank else list(tensors)
        return self._launch("broadcast", list(tensors), outputs, root=opts.rootRank)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Work:
        brings = bool(inputs) and self._group_rank == opts.rootRank
        parts = list(inputs[0]) if brings else [outputs[0]] * self.size()
        return self._launch("scatter", parts, list(outputs), root=opts.rootRank, brings=brings)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._launch("all_to_all", list(inputs), list(outputs), sizes_agree=False)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        outputs = torch.split(output.detach(), list(output_sizes)) if output_sizes else self._chunks(output)
        inputs = torch.split(input.detach(), list(input_sizes)) if input_sizes else self._chunks(input)
        return self.alltoall(list(outputs), list(inputs))

    def barrier(self, opts: Any = None) -> Work:
        return self._launch("barrier", [], [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # ---- messages

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Work:
        issued = self._issued("send", list(tensors), f" to rank {self._members[to]} with tag {tag}")
        call = Call(issued, list(tensors), [])
        return self._remembered(self._medium.send(self._key, self._group_rank, to, tag, call))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        return self._receive(tensors, [source], tag, f"rank {self._members[source]}")

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self._receive(tensors, range(self.size()), tag, "any rank")

    def _receive(self, tensors: Tensors, sources: Sequence[int], tag: int, whom: str) -> Work:
        call = Call(self._issued("recv", list(tensors), f" from {whom} with tag {tag}"), [], list(tensors))
        return self._remembered(self._medium.receive(self._key, self._group_rank, sources, tag, call))

    allreduce_coalesced = allreduce
    # C++ calls these methods by other names in torch 2.13 and later.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _op_name(op: Any) -> str:
    return str(getattr(op, "op", op)).rsplit(".", 1)[-1]


def register(backend: str, medium_of: Callable[[tuple[int, ...]], Medium]) -> None:
    """Register a backend with torch, unless it is registered already.

    Args:
        backend: name of the backend.
        medium_of: returns the medium of a new group, given its members.
    """

    def make(options: Any, _: Any) -> MemoryGroup:
        members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return MemoryGroup(options.group_rank, members, options.group_id, medium_of(members))

    if not hasattr(dist.Backend, backend.upper()):
        dist.Backend.register_backend(backend, make, extended_api=True, devices=DEVICES)
