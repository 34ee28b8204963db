"""Parameters that stay sharded among a few adjacent ranks between forward and backward (``reshard_after_forward=n``).

Each of `n` ranks keeps a piece of the gathered parameters. Backward then gathers among these `n` ranks only, for
example within one node.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._comm.collectives import Transport
from .._comm.copies import GatherCopies, own_pieces, own_rows
from .._comm.lanes import Job, Lane
from .._comm.mesh import MeshInfo
from .._memory.pool import BufferPool
from .._memory.slots import Slot
from .._plan.layout import GatherLayout, bucket_layout
from .._torch.core import plainly
from .bucket import GatherBucket, Gatherer
from .param import ShardedParam


class Resident:
    """The pieces that this rank keeps of one bucket's unsharded parameters.

    Args:
        bucket: the bucket that gathers the parameters in forward.
        info: the mesh of the few ranks.
        transport: gathers among the few ranks.
        pool, lane: the source of memory, and the queue of gathers.

    Attributes:
        for_pieces, for_landing: the pool's requests for the pieces, and for the buffer into which they are gathered.
    """

    def __init__(
        self,
        bucket: GatherBucket,
        info: MeshInfo,
        transport: Transport,
        pool: BufferPool,
        lane: Lane,
    ) -> None:
        self._bucket = bucket
        self._info = info
        self._pool = pool
        self._lane = lane
        shapes, dims = [p.shape for p in bucket.params], [p.dim for p in bucket.params]
        self._layout = layout = bucket_layout(shapes, info.shard_size, bucket.dtype.itemsize, dims)
        itemsize, name = bucket.dtype.itemsize, bucket.fqns[0]
        self.for_pieces = pool.request(f"pieces {name}", layout.numel * itemsize)
        self.for_landing = landing = pool.request(f"landing {name}", layout.total * itemsize)
        # The gathered pieces fill a slot of the bucket, which is large enough: the number of the few ranks divides that
        # of all ranks, so padding to a multiple of it needs no more memory. All pieces land in one buffer, and are then
        # copied to the slot.
        together = GatherLayout(layout, (), tuple(range(len(shapes))), layout, 0, landing.nbytes)
        copies = GatherCopies(together, info.shard_rank, transport)
        self._gatherer = Gatherer(copies, bucket.dtype, (landing, landing), pool, lane, bucket.begins)
        self._slot: Slot | None = None
        self._kept_at: torch.Event | None = None  # recorded after the pieces were copied
        self._shown: dict[Slot, list[nn.Parameter]] = {}

    def keep(self) -> None:
        """Copy this rank's pieces out of the gathered parameters."""
        slot = self._slot = self._pool.lease(self.for_pieces)
        slot.wait_until_free()
        with torch.no_grad():
            weights = zip(self._bucket.weights, self._layout.params, strict=True)
            own = [own_rows(weight, at, self._info.shard_rank) for weight, at in weights]
            torch._foreach_copy_(self._pieces(slot, written=True), own)
        # The gather in backward reads the pieces on another stream.
        self._kept_at = self._lane.record_current_stream()

    def _pieces(self, slot: Slot, written: bool = False) -> list[torch.Tensor]:
        return own_pieces(slot.typed(self._bucket.dtype, written), self._layout, self._info.shard_rank)

    def shown(self) -> list[nn.Parameter]:
        """Return the pieces as DTensor parameters on the small mesh, to install between forward and backward."""
        assert self._slot is not None
        pieces = self._shown.get(self._slot)
        if pieces is None:
            with plainly():
                locals_ = zip(self._pieces(self._slot), self._bucket.params, strict=True)
                pieces = self._shown[self._slot] = [
                    nn.Parameter(self._dtensor(local, param), requires_grad=False) for local, param in locals_
                ]
        for shown, param in zip(pieces, self._bucket.params, strict=True):
            shown.requires_grad_(param.sharded.requires_grad)
        return pieces

    def _dtensor(self, local: torch.Tensor, param: ShardedParam) -> DTensor:
        shape, info = torch.Size(param.shape), self._info  # if the parameter was a DTensor: that of its local tensor
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, info.mesh, info.placements(param.dim), run_check=False, shape=shape, stride=stride
        )

    def start(self) -> Job[None]:
        """Begin to gather the parameters from the pieces, into a slot of the bucket."""
        assert self._slot is not None
        slot = self._bucket.open()
        after = (self._kept_at, *slot.free_after)
        job = self._gatherer.start(slot, self._pieces(self._slot), after, read=[self._slot])
        self._slot = None  # the job releases it (`read`)
        return job

    def release(self) -> None:
        """Release the pieces."""
        if self._slot is not None:
            self._pool.release(self._slot, self._lane.record_current_stream())
            self._slot = None
