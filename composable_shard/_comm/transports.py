"""The choice of transports for a group: the one that the environment names, else one by backend and size.

Backend and size are the same on all ranks, so all ranks choose alike, and before anything has run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from .._errors import ShardConfigValueError
from .._policies import Comms, Options
from .._torch.distributed import backend_name, is_played
from .collectives import PLAIN, Custom, Transport, Transports, transports_of
from .mesh import MeshInfo

VARIABLE = "COMPOSABLE_SHARD_TRANSPORT"
LARGE_FROM_BYTES = 16 << 20  # of a group: steps were faster packed at 4.7 MiB, by p2p at 27; 12 showed nothing
_LARGE = {"gloo": "p2p"}  # by backend: what large groups take; all others take the first transport of their backend


class TransportCache:
    """The transports of each process group, made once."""

    def __init__(self) -> None:
        self._made: dict[dist.ProcessGroup, dict[str, Transport]] = {}
        self._custom: dict[tuple[dist.ProcessGroup, Comms, str], Transport] = {}

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
        custom = comms if comms.all_gather is not None or comms.reduce_scatter is not None else None
        nbytes = sum(pieces) * info.shard_size
        get = partial(self._get, fake)
        return Transports(
            gather=get(info.shard_group, info.shard_size, info, nbytes, custom),
            reduce=get(comms.reduce_group or info.shard_group, info.shard_size, info, nbytes, custom),
            replicate=get(info.replicate_group, info.replicate_size, info, sum(pieces)),
            small=None if small is None else get(small.shard_group, small.shard_size, small, nbytes),
        )

    def _get(
        self,
        fake: bool,
        group: dist.ProcessGroup | None,
        size: int,
        info: MeshInfo,
        nbytes: int,
        comms: Comms | None = None,
    ) -> Transport | None:
        if group is None or size == 1:
            return None
        made = self._all(group, info.device)
        name = (
            _forced(made, group, info.device)
            or (PLAIN if fake and not is_played() else None)
            or _tabled(made, group, info.device, nbytes)
        )
        if comms is None:
            return made[name]
        key = group, comms, name
        if key not in self._custom:
            self._custom[key] = Custom(made[name], group, comms)
        return self._custom[key]

    def _all(self, group: dist.ProcessGroup, device: torch.device) -> dict[str, Transport]:
        if group not in self._made:
            self._made[group] = transports_of(group, device)
        return self._made[group]


def _forced(made: dict[str, Transport], group: dist.ProcessGroup, device: torch.device) -> str | None:
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if wanted and wanted not in made:
        raise ShardConfigValueError(
            f"{VARIABLE}={wanted}: {_words(group, device)} has no such transport; it has {', '.join(made)}. Unset the "
            "variable to let the backend and the size decide"
        )
    return wanted or None


def _tabled(made: dict[str, Transport], group: dist.ProcessGroup, device: torch.device, nbytes: int) -> str:
    large = _LARGE.get(backend_name(group, device))
    return large if large in made and nbytes >= LARGE_FROM_BYTES else next(iter(made))


def _words(group: dist.ProcessGroup, device: torch.device) -> str:
    return f"the {backend_name(group, device)} process group of {group.size()} ranks"
