"""The gathers, for compiled graphs, of parameters that define their own all-gather (see `extension.py`).

A graph gets the gathered tensors and the tensors of the metadata. It calls `fsdp_post_all_gather` itself. The memory
does not belong to the pool, and lives as long as the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._comm.lanes import Job
from .._memory.pool import BufferPool
from .extension import gathered_shapes
from .extension_bucket import ExtensionBucket, bytes_of


class ExtensionGathers:
    """The gathers of one bucket of such parameters.

    Args:
        bucket: the bucket. Unlike for other parameters it is held, because its shards are not inputs of the graph.
        members: indices of its parameters in the group.
        pool: waits for gathers that are abandoned.
    """

    def __init__(self, bucket: ExtensionBucket, members: Sequence[int], pool: BufferPool) -> None:
        self.members = members
        self._bucket, self._pool = bucket, pool

    def start(self, shards: Sequence[torch.Tensor]) -> ExtensionGathering:
        """Begin to gather. The parameters themselves are gathered instead of `shards`, which only stand in for them."""
        info = self._bucket.extensions[0].info
        sent: list[torch.Tensor] = []
        arriving: list[Arriving] = []
        with torch.inference_mode(False), torch.no_grad():
            for index, extension in zip(self.members, self._bucket.extensions, strict=True):
                inputs, metadata = extension.call_pre(in_graph=True)
                shapes = gathered_shapes(inputs, info.shard_size)
                outputs = [
                    torch.empty(shape, dtype=tensor.dtype, device=info.device)
                    for shape, tensor in zip(shapes, inputs, strict=True)
                ]
                sent += inputs
                arriving.append(Arriving(index, extension.name, outputs, metadata))
        into = [bytes_of(output) for each in arriving for output in each.outputs]
        job = self._bucket.gather(list(map(bytes_of, sent)), into)
        return ExtensionGathering(job, self.members, arriving, self._pool)

    def leave_slots(self) -> None:
        """Drop all views of slots."""
        self._bucket.leave_slots()


@dataclass(frozen=True)
class Arriving:
    """One parameter that is being gathered.

    Attributes:
        index: its index in the group.
        name: the parameter and its class, for messages.
        outputs: the gathered tensors.
        metadata: the metadata that `fsdp_pre_all_gather` has returned.
    """

    index: int
    name: str
    outputs: list[torch.Tensor]
    metadata: Any

    def tensors(self) -> list[torch.Tensor]:
        """The gathered tensors and copies of the metadata's tensors: a graph may reuse the memory of its values."""
        leaves = pytree.tree_leaves(self.metadata)
        return [*self.outputs, *(leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor))]


class ExtensionGathering:
    """A gather in flight.

    Args:
        job: the gather.
        members: indices of the parameters in the group.
        arriving: the parameters.
        pool: waits for the gather if it is abandoned.

    Attributes:
        members, arriving: as given.
    """

    def __init__(self, job: Job[None], members: Sequence[int], arriving: Sequence[Arriving], pool: BufferPool) -> None:
        self.members, self.arriving = members, arriving
        self._job, self._pool = job, pool

    def finish(self) -> list[list[torch.Tensor]]:
        """Wait; returns for each parameter the gathered tensors and then the tensors of the metadata."""
        self._job.finish()
        return [each.tensors() for each in self.arriving]

    def abandon(self) -> None:
        """Give the gather to the pool, which waits for it and then drops its memory."""
        self._pool.finish_later(self.finish)  # this method holds the memory until then
