"""The process group of a simulated world: torch's interface in front of `Network`."""

# mypy: disable-error-code="override, assignment, call-arg"
# (torch overloads these methods, and calls the forms that are here)

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._errors import ShardConfigValueError
from .._torch.core import without_dispatch_modes
from ._network import Call, GroupKey, Issued, Network, Tensors, Work

BACKEND = "simulated"
DEVICES = ["cpu", "cuda"]


class _Here(threading.local):
    """Where the thread is: in which world, as which rank. None in threads of no world."""

    network: Network | None = None
    rank: int = 0


HERE = _Here()


class _Name:
    def name(self) -> str:
        return BACKEND


class SimulatedGroup(dist.ProcessGroup):
    """A process group whose ranks are threads of this process.

    Args:
        place: of this rank in the group.
        members: ranks of the group.
        name: the group's.
        network: the world's.
    """

    def __init__(self, place: int, members: tuple[int, ...], name: str, network: Network) -> None:
        super().__init__(place, len(members))
        self._place = place
        self._key: GroupKey = (name, members)
        self._network = network
        self._label = name

    # ---- what torch asks of a group

    def size(self) -> int:
        return len(self._key[1])

    def rank(self) -> int:
        return self._place

    @property
    def group_name(self) -> str:
        return self._key[0]

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> _Name:
        return _Name()

    def _set_group_desc(self, desc: str) -> None:
        if desc not in ("", "undefined"):
            self._label = desc

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls are not grouped: each is a collective of its own."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return Work(lambda: None, lambda: True, [])

    def shutdown(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Nothing is open."""

    # ---- collectives

    def _issue(
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
    ) -> Work:
        """Launch; each input is cut into so many equal pieces."""
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        dtype = inputs[0].dtype if inputs else None
        details = "" if op is None else f" ({_op_name(op)})"
        if root is not None:
            details += f" of root {self._key[1][root]}"
        issued = Issued(kind, shapes if brings else (), dtype, details, self._label, self._key[1])
        agree: tuple[Any, ...] = (dtype, details)
        if sizes_agree:
            agree += (tuple(math.prod(shape) for shape in shapes),)
        with without_dispatch_modes(), torch.no_grad():
            copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in inputs]
            parts = [part for copy in copies for part in (copy.view(pieces, -1).unbind() if pieces > 1 else [copy])]
        call = Call(issued, parts if brings else [], outputs, agree, op, root or 0)
        return self._network.join(self._key, self._place, call)

    def _chunks(self, tensor: torch.Tensor) -> Tensors:
        """Equal parts of a tensor, one a rank."""
        if tensor.numel() % self.size():
            raise ShardConfigValueError(f"{tuple(tensor.shape)} cannot be cut among {self.size()} ranks")
        return list(tensor.detach().view(self.size(), -1).unbind())

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        return self._issue("all_gather", list(inputs), [part for parts in outputs for part in parts])

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        by_input = [outputs[rank][i] for i in range(len(inputs)) for rank in range(self.size())]
        return self._issue("all_gather", list(inputs), by_input)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:  # noqa: A002
        return self.allgather_into_tensor_coalesced([output], [input])

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for whole, piece in zip(outputs, inputs, strict=True):
            if whole.numel() != piece.numel() * self.size():
                raise ShardConfigValueError(
                    f"all_gather: {self.size()} pieces of {tuple(piece.shape)} do not fit {tuple(whole.shape)}"
                )
        return self._issue("all_gather", list(inputs), [part for whole in outputs for part in self._chunks(whole)])

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        return self._issue("reduce_scatter", [each for parts in inputs for each in parts], list(outputs), op=_op(opts))

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:  # noqa: A002
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for piece, whole in zip(outputs, inputs, strict=True):
            if whole.numel() != piece.numel() * self.size():
                raise ShardConfigValueError(
                    f"reduce_scatter: {tuple(whole.shape)} is not {self.size()} pieces of {tuple(piece.shape)}"
                )
        return self._issue("reduce_scatter", list(inputs), list(outputs), pieces=self.size(), op=_op(opts))

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return self._issue("all_reduce", tensors, tensors, op=_op(opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        outputs = list(tensors) if self._place == opts.rootRank else []
        return self._issue("reduce", list(tensors), outputs, op=_op(opts), root=opts.rootRank)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        outputs = [] if self._place == opts.rootRank else list(tensors)
        return self._issue("broadcast", list(tensors), outputs, root=opts.rootRank)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Work:
        own = list(outputs[0]) if outputs and self._place == opts.rootRank else []
        return self._issue("gather", list(inputs), own, root=opts.rootRank)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Work:
        brings = bool(inputs) and self._place == opts.rootRank
        parts = list(inputs[0]) if brings else [outputs[0]] * self.size()
        return self._issue("scatter", parts, list(outputs), root=opts.rootRank, brings=brings)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._issue("all_to_all", list(inputs), list(outputs), sizes_agree=False)

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
        return self._issue("barrier", [], [])

    # ---- messages

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        issued = self._message("send", tensors[0], f" to rank {self._key[1][to]} with tag {tag}")
        return self._network.send(self._key, self._place, to, tag, tensors[0].detach().clone(), issued)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        issued = self._message("recv", tensors[0], f" from rank {self._key[1][source]} with tag {tag}")
        return self._network.receive(self._key, self._place, [source], tag, tensors[0], issued)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        issued = self._message("recv", tensors[0], f" from any rank with tag {tag}")
        return self._network.receive(self._key, self._place, range(self.size()), tag, tensors[0], issued)

    def _message(self, kind: str, tensor: torch.Tensor, details: str) -> Issued:
        return Issued(kind, (tuple(tensor.shape),), tensor.dtype, details, self._label, self._key[1])

    # Names of torch 2.13 and later, by which C++ calls them.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _op_name(op: Any) -> str:
    return str(getattr(op, "op", op)).rsplit(".", 1)[-1]


def _make(options: Any, _: Any) -> SimulatedGroup:
    """What torch calls to make a group."""
    assert HERE.network is not None, "groups of this backend are made by ranks of a simulated world"
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return SimulatedGroup(options.group_rank, members, options.group_id, HERE.network)


def register() -> None:
    """Make the backend known to torch, once."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=DEVICES)
