"""A process group backend that does nothing: every collective returns immediately and leaves its output unchanged.

    import _noop
    _noop.init(world_size=64)           # this process is rank 0 of a simulated world

It measures only host time. torch's own fake group copies the input into one chunk per rank, which would dominate at
world 512.

On unknown backends our engine would use torch's public functions, like FSDP2. `init` selects the transport that it
uses on known backends such as NCCL, because that is what the benchmarks measure.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

NAME = "noop"

# Collectives whose future has no value. They share one completed Work.
_PLAIN = (
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "_reduce_scatter_base",
)
# Collectives whose future has a value: DDP's reducer reads the reduced tensors from it.
_VALUED = ("allreduce", "allreduce_coalesced", "broadcast")


@dataclass(frozen=True)
class Call:
    """One recorded call of a collective, with placeholders for its tensors."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def nbytes(self) -> int:
        """Return the bytes of all tensors in the arguments."""
        return sum(t.numel() * t.element_size() for t in _tensors([self.args, list(self.kwargs.values())]))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _stand_in(value: Any) -> Any:
    """Replace each tensor by an expanded scalar with the same shape and dtype.

    A recorded call must not keep an engine's buffers alive.
    """
    if isinstance(value, torch.Tensor):
        return torch.empty((), dtype=value.dtype).expand(value.shape)
    if isinstance(value, list | tuple):
        return type(value)(_stand_in(item) for item in value)
    return value


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return Call(name, _stand_in(args), {key: _stand_in(value) for key, value in kwargs.items()})


def _done(value: object = None) -> dist.Work:
    # A future accepts only tensors on the devices that it was created with.
    future: Future[Any] = Future(devices=[*{t.device for t in _tensors(value) if t.is_cuda}])  # type: ignore[arg-type]
    future.set_result(value)
    return _create_work_from_future(future)


class NoopGroup(dist.ProcessGroup):
    """A process group of any size in one process.

    `calls` contains the recorded collectives while `recording()` is active.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: list[Call] | None = None
        self.done = _done()
        self._label = {"name": "", "desc": ""}

    # torch's C++ code calls these methods by name. The default implementations need a C++ backend.
    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._label["name"]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._label["name"] = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._label["desc"]

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._label["desc"] = desc

    def _get_backend(self, _device: torch.device) -> "NoopGroup":
        return self  # callers only read its name

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self.done


def _plain(name: str) -> Callable[..., dist.Work]:
    def collective(self: NoopGroup, *args: Any, **kwargs: Any) -> dist.Work:
        if self.calls is not None:
            self.calls.append(_call(name, args, kwargs))
        return self.done

    collective.__name__ = name
    return collective


def _valued(name: str) -> Callable[..., dist.Work]:
    def collective(self: NoopGroup, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> dist.Work:
        if self.calls is not None:
            self.calls.append(_call(name, (tensors, *args), kwargs))
        return _done(tensors)

    collective.__name__ = name
    return collective


for _name in _PLAIN:
    setattr(NoopGroup, _name, _plain(_name))
for _name in _VALUED:
    setattr(NoopGroup, _name, _valued(_name))


_groups: list[NoopGroup] = []


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> NoopGroup:
    group = NoopGroup(rank, size)
    _groups.append(group)
    return group


def register() -> None:
    """Register the backend with torch.distributed, unless it is registered."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def init(world_size: int, rank: int = 0) -> None:
    """Initialize the default process group as `rank` of `world_size` simulated ranks."""
    register()
    os.environ.setdefault("COMPOSABLE_SHARD_TRANSPORT", "direct")
    dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=world_size)


def shutdown() -> None:
    """Destroy the default process group and forget all groups."""
    dist.destroy_process_group()
    _groups.clear()


@contextmanager
def recording() -> Iterator[list[tuple[NoopGroup, Call]]]:
    """Record the collectives of all no-op groups, in order within each group.

    The list is filled when the context ends. `replay` repeats these calls.
    """
    found: list[tuple[NoopGroup, Call]] = []
    for group in _groups:
        group.calls = []
    try:
        yield found
    finally:
        for group in _groups:
            found.extend((group, call) for call in group.calls or ())
            group.calls = None


def replay(calls: list[tuple[NoopGroup, Call]]) -> None:
    """Repeat the recorded calls directly on their groups, and wait for each: the bare collectives of a step."""
    for group, call in calls:
        getattr(group, call.name)(*call.args, **call.kwargs).wait()
