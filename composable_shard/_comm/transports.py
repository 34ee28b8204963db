"""The choice of transports for a group: the one that the environment names, else one by backend and size.

Backend and size are the same on all ranks, so all ranks choose alike, and before anything has run.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .._errors import ShardConfigValueError
from .._policies import Comms, Options
from .._torch.distributed import backend_name
from .collectives import PLAIN, Custom, Transport, Transports, transports_of
from .mesh import MeshInfo
from .own_groups import own_group

VARIABLE = "COMPOSABLE_SHARD_TRANSPORT"
LARGE_FROM_BYTES = 16 << 20  # of a group: steps were faster packed at 4.7 MiB, by p2p at 27; 12 showed nothing
_LARGE = {"gloo": "p2p"}  # by backend: what large groups take; all others take the first transport of their backend


# Worlds whose collectives do nothing, made by `testing`: there, fake tensors move as real ones do.
PLAYED: weakref.WeakSet[Any] = weakref.WeakSet()


class TransportCache:
    """The transports of each process group, made once.

    Args:
        runs: whether they will move anything; then they do so on process groups of our own, whose making is a
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
        """The transports of one group; None where an axis has one rank only.

        Args:
            info: the group's mesh.
            options: with the user's own communication, if any.
            pieces: bytes of a rank's piece of each parameter.
            small: the mesh of the few ranks that share weights between forward and backward.
            fake: whether parameters are fake tensors: only torch's public functions take these, except in a simulated
                world.

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
        """The transport for groups of parameters of `nbytes`; `public`: by torch's public functions, unless forced."""
        if group is None or size == 1:
            return None
        if group not in self._made:
            self._made[group] = transports_of(own_group(group, device) if self._runs else group, device, group)
        made, backend = self._made[group], backend_name(group, device)
        forced = os.environ.get(VARIABLE, "").strip().lower()
        if forced and forced not in made:
            raise ShardConfigValueError(
                f"{VARIABLE}={forced}: the {backend} process group of {group.size()} ranks has no such transport; it "
                f"has {', '.join(made)}. Unset the variable to let the backend and the size decide"
            )
        transport = made[forced or (PLAIN if public else _by_size(made, backend, nbytes))]
        return transport if own is None else Custom(transport, group, own)


def _by_size(made: dict[str, Transport], backend: str, nbytes: int) -> str:
    large = _LARGE.get(backend) if nbytes >= LARGE_FROM_BYTES else None
    return large if large in made else next(iter(made))
