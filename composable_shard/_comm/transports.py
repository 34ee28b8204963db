"""Which transports serve a group: those that a user names, else those that a measurement has found to be fastest.

What is fastest depends on the network, the backend and the size of what is moved. So the first engine of a process
group measures the transports of its backend, for each size class that it needs, with gathers of a sample. All ranks of
the group take the slowest rank's times, and with them the same decision. It is kept as long as the process group is,
and without it (before the first forward, on a simulated network) the first transport is taken.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from .._errors import ShardConfigValueError
from .._plan.layout import gather_layout
from .._policies import Comms, Options
from .._torch.core import without_dispatch_modes
from .._torch.distributed import all_reduce_options, backend_name, is_played
from .collectives import PLAIN, Custom, Transport, Transports, transports_of
from .copies import GatherCopies, regions_in
from .lanes import lane_for
from .mesh import MeshInfo

VARIABLE = "COMPOSABLE_SHARD_TRANSPORT"
CLASS_LIMITS = (1 << 20, 8 << 20)  # bytes of a bucket at which the next size class begins
_SAMPLE_BYTES = (1 << 19, 4 << 20, 16 << 20)
_SHARES = (1, 768, 256, 1, 1024, 1024)  # of a sample among its parameters: a block of a transformer
_ROUNDS = 4  # of which the first is not counted
_WORTH = 0.9  # of the time of the first transport: what another one must not exceed to be taken
ALONE = ("fake", "fabric")  # backends that play the other ranks
SIMULATED = (*ALONE, "simulated")  # backends whose time says nothing

_measured: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, str]] = weakref.WeakKeyDictionary()


def size_class(nbytes: int) -> int:
    """The size class of a bucket: 0 for the smallest."""
    return sum(nbytes >= limit for limit in CLASS_LIMITS)


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
        """Transports for parameters of which a rank's pieces have so many bytes; None where an axis has one rank only.

        Fake parameters go by torch's own functions, which all take them, but in a world that plays a real one.

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
            or _measured.get(group, {}).get(size_class(nbytes))
            or next(iter(made))
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

    def measure(self, info: MeshInfo, pieces: Sequence[int]) -> None:
        """Find the fastest transport of the shard axis for such parameters, unless it is known or makes no difference.

        A collective: all ranks of the axis call it, in the same order.
        """
        group = info.shard_group
        if group is None or info.shard_size == 1 or info.device.type == "meta":
            return
        found, at = _measured.setdefault(group, {}), size_class(sum(pieces) * info.shard_size)
        made = self._all(group, info.device)
        if (
            next(iter(made)) == PLAIN
            or at in found
            or _forced(made, group, info.device)
            or backend_name(group, info.device) in SIMULATED
        ):
            return
        ours = [name for name in made if name != PLAIN]
        candidates = [name for name in ours if name in _CANDIDATES.get(backend_name(group, info.device), ours)]
        takes = {_takes_alone(made[name], pieces) for name in candidates}
        if len(takes) > 1:
            with without_dispatch_modes():
                found[at] = _fastest([made[name] for name in candidates], group, info, _SAMPLE_BYTES[at])


# Of gloo's, `direct` was never the fastest: its coalesced gathers run one after the other, each with a temporary.
_CANDIDATES = {"gloo": ("packed", "p2p")}


def _forced(made: dict[str, Transport], group: dist.ProcessGroup, device: torch.device) -> str | None:
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if wanted and wanted not in made:
        raise ShardConfigValueError(
            f"{VARIABLE}={wanted}: {_words(group, device)} has no such transport; it has {', '.join(made)}. Unset the "
            "variable to let a measurement decide"
        )
    return wanted or None


def _words(group: dist.ProcessGroup, device: torch.device) -> str:
    return f"the {backend_name(group, device)} process group of {group.size()} ranks"


def _takes_alone(transport: Transport, pieces: Sequence[int]) -> bool:
    least = transport.route.gather_from
    return least is not None and any(0 < piece >= least for piece in pieces)


def _fastest(transports: Sequence[Transport], group: dist.ProcessGroup, info: MeshInfo, nbytes: int) -> str:
    """The name of the transport to take for buckets of about that size."""
    with torch.inference_mode(False), torch.no_grad():
        runs = [_sample(transport, info, nbytes) for transport in transports]
        best = [float("inf")] * len(runs)
        for count in range(_ROUNDS):
            for at, run in enumerate(runs):  # in turns, so that what else happens falls on all
                taken = _timed(run, info.device)
                best[at] = min(best[at], taken) if count else best[at]
        agreed = torch.tensor(best, dtype=torch.float64, device=info.device)
        group.allreduce([agreed], all_reduce_options(dist.ReduceOp.MAX)).wait()
        seconds = agreed.tolist()
    quickest = min(range(len(seconds)), key=seconds.__getitem__)
    return transports[quickest if seconds[quickest] <= _WORTH * seconds[0] else 0].route.name


def _timed(run: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    begin = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def _sample(transport: Transport, info: MeshInfo, nbytes: int) -> Callable[[], None]:
    """A gather of parameters with so many bytes in all, with the copies that the transport demands."""
    world, rank, device = info.shard_size, info.shard_rank, info.device
    rows = -(-nbytes // (4 * sum(_SHARES) * world))
    shapes, dims = [(world, rows * share) for share in _SHARES], [0] * len(_SHARES)
    layout = gather_layout(shapes, world, 4, dims, transport.route)
    copies = GatherCopies(layout, rank, transport)
    slot = torch.zeros(layout.places.total, dtype=torch.float32, device=device)
    wholes = copies.into(regions_in(slot, layout.places, layout.places.begins))
    landing = None if layout.landing is None else copies.landing(slot.new_empty(layout.landing.total))
    shards = [torch.zeros(at.local_shape(rank), dtype=torch.float32, device=device) for at in layout.places.params]
    lane = lane_for(device)

    def run() -> None:
        lane.start(copies.steps(wholes, landing, shards)).finish()

    return run
