"""Which transports serve a group: made once for each process group and each communication of a user's own."""

from __future__ import annotations

import torch.distributed as dist

from ._collectives import Transport, Transports, transport_for
from ._mesh import MeshInfo
from ._policies import Comms, Options


class TransportCache:
    """The transports of each process group, made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[dist.ProcessGroup, Comms | None], Transport] = {}

    def of(self, info: MeshInfo, options: Options, small: MeshInfo | None = None) -> Transports:
        """Transports of the shard axis and of the replicate axis; None where an axis has one rank only."""
        comms = options.comms
        custom = comms if comms.all_gather is not None or comms.reduce_scatter is not None else None
        own = comms.reduce_group or info.shard_group
        group = info.replicate_group
        return Transports(
            gather=self._get(info.shard_group, info.shard_size, info, custom),
            reduce=self._get(own, info.shard_size, info, custom),
            replicate=self._get(group, info.replicate_size, info),
            small=None if small is None else self._get(small.shard_group, small.shard_size, small),
        )

    def _get(
        self, group: dist.ProcessGroup | None, size: int, info: MeshInfo, comms: Comms | None = None
    ) -> Transport | None:
        if group is None or size == 1:
            return None
        key = group, comms
        if key not in self._made:
            self._made[key] = transport_for(group, info.device, comms)
        return self._made[key]
