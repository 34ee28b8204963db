"""Chooses the transports of a parameter group: the one named in the environment, or one by backend and size.

Backend and size are the same on all ranks, so all ranks make the same choice without communication.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .._policies import Comms, Options
from .._torch.distributed import backend_name
from ..errors import ShardConfigValueError
from .collectives import PLAIN, Custom, Transport, Transports, transports_of
from .mesh import MeshInfo
from .own_groups import own_group

VARIABLE = "COMPOSABLE_SHARD_TRANSPORT"
# Bytes of a group. In measured steps, packed was faster at 4.7 MiB, p2p at 27 MiB, and both were equal at 12 MiB.
LARGE_FROM_BYTES = 16 << 20
_LARGE = {"gloo": "p2p"}  # transport of large groups, by backend; other backends use their first transport


# Worlds made by `testing` whose collectives do nothing. They accept fake tensors like real ones.
PLAYED: weakref.WeakSet[Any] = weakref.WeakSet()


class TransportCache:
    """The transports of each process group, made once.

    Args:
        runs: whether the transports will communicate. If so, they use our own process groups, and making these is a
            collective.
    """

    def __init__(self, runs: bool = False) -> None:
        self._made: dict[dist.ProcessGroup, dict[str, Transport]] = {}
        self._runs = runs

    def of(
        self,
        info: MeshInfo,
        options: Options,
        pieces: Sequence[int],
        small: MeshInfo | None = None,
        fake: bool = False,
    ) -> Transports:
        """Return the transports of one parameter group; None where an axis has only one rank.

        Args:
            info: the group's mesh.
            options: with the user's own communication, if any.
            pieces: bytes of a rank's piece of each parameter.
            small: the mesh of the few ranks that share parameters between forward and backward.
            fake: whether parameters are fake tensors. Except in a simulated world, only torch's public functions
                accept these.

        Raises:
            ShardConfigValueError: the environment names a transport that the backend does not have.
        """
        comms = options.comms
        own = comms if comms.all_gather is not None or comms.reduce_scatter is not None else None
        nbytes = sum(pieces) * info.shard_size
        get = partial(self._get, info.device, fake and dist.group.WORLD not in PLAYED)
        return Transports(
            gather=get(info.shard_group, info.shard_size, nbytes, own),
            reduce=get(comms.reduce_group or info.shard_group, info.shard_size, nbytes, own),
            replicate=get(info.replicate_group, info.replicate_size, sum(pieces)),
            small=None if small is None else get(small.shard_group, small.shard_size, nbytes),
        )

    def _get(
        self,
        device: torch.device,
        public: bool,
        group: dist.ProcessGroup | None,
        size: int,
        nbytes: int,
        own: Comms | None = None,
    ) -> Transport | None:
        """Return the transport for `nbytes` of parameters.

        With `public`, these are torch's public functions, unless the environment names another transport.
        """
        if group is None or size == 1:
            return None
        if group not in self._made:
            self._made[group] = transports_of(own_group(group, device) if self._runs else group, device, group)
        made, backend = self._made[group], backend_name(group, device)
        forced = os.environ.get(VARIABLE, "").strip().lower()
        if forced and forced not in made:
            raise ShardConfigValueError(
                f"{VARIABLE}={forced}: the {backend} process group of {group.size()} ranks has no such transport; it "
                f"has {', '.join(made)}. Unset the variable to choose one by backend and size"
            )
        transport = made[forced or (PLAIN if public else _by_size(made, backend, nbytes))]
        return transport if own is None else Custom(transport, group, own)


def _by_size(made: dict[str, Transport], backend: str, nbytes: int) -> str:
    large = _LARGE.get(backend) if nbytes >= LARGE_FROM_BYTES else None
    return large if large in made else next(iter(made))
