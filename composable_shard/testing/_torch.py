"""What of torch's private names only these tools need: worlds, groups and streams that are played, and calls seen."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch._C import _distributed_c10d as c10d
from torch._library.custom_ops import OPDEFS
from torch.distributed.device_mesh import _mesh_resources
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

from composable_shard._comm.transports import PLAYED
from composable_shard._torch.distributed import local_tensor


def python_kernel(operator: Any) -> Callable[..., Any] | None:
    """What an operator of `torch.library.custom_op` runs on a CPU; None for all others."""
    defined = OPDEFS.get(str(operator._schema.name)) if isinstance(operator, torch._ops.OpOverload) else None
    if defined is None:
        return None
    kernels: dict[str | None, Callable[..., Any]] = defined._backend_fns
    return kernels.get("cpu", kernels.get(None))


@contextlib.contextmanager
def cpu_streams(stream: Callable[..., Any], event: Callable[[], Any], default: object) -> Iterator[None]:
    """Within, `torch.cpu` makes streams and events by these, and `default` is its current stream.

    torch's own do nothing; they are there for code that knows no device.
    """
    cpu: Any = torch.cpu
    was = cpu.Stream, cpu.Event, cpu._current_stream
    cpu.Stream, cpu.Event, cpu._current_stream = stream, event, default
    try:
        yield
    finally:
        cpu.Stream, cpu.Event, cpu._current_stream = was


class Streams(Protocol):
    """What knows the current stream of each thread."""

    def current(self, _device: object = None) -> Any: ...

    def use(self, stream: Any) -> None: ...

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]: ...

    def synchronize(self, _device: object = None) -> None: ...

    @property
    def compute(self) -> Any: ...


@contextlib.contextmanager
def streams_of_torch(
    stream: type,
    event: type,
    streams: Streams,
    record: Callable[[torch.UntypedStorage, Any], None],
    resize: Callable[[torch.UntypedStorage, Callable[[], Any]], Any],
) -> Iterator[None]:
    """Within, tensors of the CPU lie on a device with streams: all that torch makes and tells of streams is played.

    Args:
        stream, event: the classes of streams and of events.
        streams: tells which one is current.
        record: is called in the place of `Tensor.record_stream`.
        resize: is called in the place of `UntypedStorage.resize_`, with that to call.
    """
    real: Any = torch.UntypedStorage.resize_

    def record_stream(tensor: torch.Tensor, on: Any) -> None:
        record((local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).untyped_storage(), on)

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        return resize(storage, lambda: real(storage, nbytes))

    def default(_device: object = None) -> Any:
        return streams.compute

    kinds = {"Stream": stream, "Event": event}
    current = {"current_stream": streams.current, "synchronize": streams.synchronize}
    with contextlib.ExitStack() as stack:
        for owner, names in (
            (torch, kinds),
            (torch.cpu, {**kinds, **current, "stream": streams.on}),
            (torch.accelerator, {**current, "set_stream": streams.use}),
            (
                torch.cuda,
                {**kinds, **current, "stream": streams.on, "set_stream": streams.use, "default_stream": default},
            ),
            (torch.Tensor, {"record_stream": record_stream}),
            (torch.UntypedStorage, {"resize_": resize_}),
        ):
            for name, value in names.items():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        yield


def raise_in_thread(thread: int, kind: type[BaseException]) -> None:
    """Have a thread of Python raise an exception at its next line."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, called: Callable[[str, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._called = called

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._called(func.namespace, func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def calls_of_operators(called: Callable[[str, str], None]) -> contextlib.AbstractContextManager[Any]:
    """Within, tell of each operator that this thread calls: its namespace and its name."""
    return _Calls(called)


def forget_meshes() -> None:
    """Drop what torch keeps of meshes for later.

    A mesh of another world would look equal to one of these, and while it lives, its groups do.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # which loads Dynamo

    _mesh_resources.mesh_stack.clear()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def share_gloo_device() -> None:
    """Let all gloo groups of this process share a device.

    torch gives each one of its own, with a thread that polls a hundred times a second until the group is gone, and for
    a group that anything still knows (compiled code, a mesh in a cycle) that is never.
    """
    device = dist.ProcessGroupGloo.create_default_device()

    class Sharing(dist.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: bool) -> None:
            if any(others.values()):  # settings of torch 2.15, which options cannot hold
                super().__init__(store, rank, size, timeout=timeout, **others)
                return
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]


class _ThreadsWorld(threading.local):
    """All that torch.distributed knows of its groups, apart for each thread."""

    def __init__(self, fresh: dict[str, Any]) -> None:
        for name, value in fresh.items():
            setattr(self, name, type(value)() if isinstance(value, dict | list) else value)


@contextlib.contextmanager
def world_per_thread() -> Iterator[None]:
    """Each thread has its own default process group within; this process must have none."""
    module = dist.distributed_c10d
    torch_world = module._world
    known = [name for name, value in vars(type(torch_world)).items() if isinstance(value, property)]
    fresh = {
        name: getattr(torch_world, name) for name in known if name != "pg_config_info"
    }  # of which that one is made
    torch._C._ensureCUDADeviceGuardSet()  # what torch 2.11 makes here dies with the thread that first needs it
    module._world = _ThreadsWorld(fresh)  # type: ignore[assignment]
    c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        module._world = torch_world


def fake_group(world_size: int, rank: int) -> None:
    """Make torch's fake process group the default one; its collectives do nothing, on fake tensors too."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _let_fake_tensors_gather()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    PLAYED.add(dist.group.WORLD)


@functools.cache
def _let_fake_tensors_gather() -> torch.library.Library:
    """The one collective of ours that torch has no meta function for; it gives work that is done."""
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    name = "allgather_into_tensor_coalesced_"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
        library.impl(name, lambda *args: c10d.FakeWork().boxed(), "Meta")  # type: ignore[no-untyped-call]
    return library


def count_groups() -> int:
    """How many process groups this process has."""
    return len(dist.distributed_c10d._world.pg_map)


def own_part(tensor: DTensor) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """This rank's part of a DTensor and where, in the whole, it begins; None if it is not cut into plain pieces."""
    if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
        return None
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local_tensor(tensor), tuple(offsets)
