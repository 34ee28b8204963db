"""One process, on one GPU, that plays all ranks of a world with real collectives.

With a world size of 1, FSDP2 and ours skip the collectives. Here the process group reports `size` ranks, and every
collective runs on a group of one rank (NCCL on a GPU, gloo on the CPU), as if all ranks had the data of this rank:

    all-gather                 gathers this rank's shard once for each rank
    reduce-scatter, all-reduce this rank's part of the sum, which is the mean of equal ranks
    all others                 nothing

Kernels, streams, events, buffers and copies are those of training. The network is missing, and the trained model is
another one, because its parameters are repetitions of this rank's shard. Engines that shard parameters in the same way
still have equal losses.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from _noop import NoopGroup

NAME = "echo"
LIMIT = timedelta(minutes=5)


class EchoGroup(NoopGroup):
    """A process group that reports `size` ranks and communicates with a group of one rank.

    `gathered_bytes` counts the outputs of the all-gathers of all groups of the process.
    """

    gathered_bytes = 0

    def __init__(self, size: int, inner: dist.ProcessGroup) -> None:
        super().__init__(0, size)
        self._inner = inner

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl"  # on the CPU too, so that engines use the collectives of a GPU, including AVG

    def _get_backend(self, device: torch.device) -> Any:
        return self._inner._get_backend(device) if device.type == "cuda" else self

    def shutdown(self) -> None:
        self._inner.shutdown()

    def allgather_into_tensor_coalesced(
        self, wholes: Sequence[Tensor], pieces: Sequence[Tensor], options: Any = None
    ) -> dist.Work:
        EchoGroup.gathered_bytes += sum(whole.nbytes for whole in wholes)
        places = [place for whole in wholes for place in whole.view(self.size(), -1)]
        echoes = [piece.reshape(-1) for piece in pieces for _ in range(self.size())]
        return self._inner.allgather_into_tensor_coalesced(places, echoes, options or AllgatherOptions())

    def _allgather_base(self, whole: Tensor, piece: Tensor, options: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([whole], [piece], options)

    def reduce_scatter_tensor_coalesced(
        self, outs: Sequence[Tensor], buckets: Sequence[Tensor], options: Any = None
    ) -> dist.Work:
        own = [bucket.view(self.size(), -1)[0] for bucket in buckets]
        flat = [out.view(-1) for out in outs]
        return self._inner.reduce_scatter_tensor_coalesced(flat, own, _sum(dist.ReduceScatterOptions(), options))

    def _reduce_scatter_base(self, out: Tensor, bucket: Tensor, options: Any = None) -> dist.Work:
        own = bucket.view(self.size(), -1)[0]
        return self._inner._reduce_scatter_base(out.view(-1), own, _sum(dist.ReduceScatterOptions(), options))

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self._inner.allreduce(tensors, _sum(dist.AllreduceOptions(), options))

    # Names of the same methods in newer versions of torch.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def _sum(options: Any, asked: Any) -> Any:
    """Use a sum, which equals any reduction on one rank. According to torch, NCCL's mean may be wrong on one rank."""
    options.reduceOp = dist.ReduceOp.SUM
    options.asyncOp = getattr(asked, "asyncOp", True)
    return options


def _of_one(store: dist.Store, device: torch.device) -> dist.ProcessGroup:
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(store, 0, 1)
    if device.type == "cuda":
        kind, backend = kinds.NCCL, dist.ProcessGroupNCCL(store, 0, 1, LIMIT)
    else:
        kind, backend = kinds.GLOO, dist.ProcessGroupGloo(store, 0, 1, LIMIT)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    group._set_group_name(f"{NAME} of one")
    return group


def init(size: int, device: torch.device) -> None:
    """Initialize the default process group as rank 0 of `size` equal ranks."""

    def create(store: dist.Store, _rank: int, of: int, _timeout: timedelta) -> EchoGroup:
        return EchoGroup(of, _of_one(store, device))  # each group has its own communicator

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=size)
