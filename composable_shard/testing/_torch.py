"""Uses of torch's private API that only the testing tools need: simulated worlds, groups and streams, traced calls."""

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
from composable_shard._torch.distributed import local_part, local_tensor


def python_kernel(operator: Any) -> Callable[..., Any] | None:
    """The Python function that an operator of `torch.library.custom_op` runs on a CPU; None for other operators."""
    defined = OPDEFS.get(str(operator._schema.name)) if isinstance(operator, torch._ops.OpOverload) else None
    if defined is None:
        return None
    kernels: dict[str | None, Callable[..., Any]] = defined._backend_fns
    return kernels.get("cpu", kernels.get(None))


@contextlib.contextmanager
def cpu_streams(stream: Callable[..., Any], event: Callable[[], Any], default: object) -> Iterator[None]:
    """Replace the streams and events of `torch.cpu`, and make `default` its current stream.

    torch's own classes do nothing. They exist for code that is written for any device.
    """
    cpu: Any = torch.cpu
    was = cpu.Stream, cpu.Event, cpu._current_stream
    cpu.Stream, cpu.Event, cpu._current_stream = stream, event, default
    try:
        yield
    finally:
        cpu.Stream, cpu.Event, cpu._current_stream = was


class Streams(Protocol):
    """The current stream of each thread."""

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
    """Simulate streams for CPU tensors: replace torch's functions and classes for streams and events.

    Args:
        stream, event: classes that replace torch's streams and events.
        streams: gives and changes the current stream.
        record: replaces `Tensor.record_stream`; is called with the storage and the stream.
        resize: replaces `UntypedStorage.resize_`; is called with the storage and a function that resizes it.
    """
    real: Any = torch.UntypedStorage.resize_

    def record_stream(tensor: torch.Tensor, on: Any) -> None:
        record(local_part(tensor).untyped_storage(), on)

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
    """Make a Python thread raise an exception at its next line."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


class CallsOfOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `called` with the namespace and the name of each operator that this thread calls."""

    def __init__(self, called: Callable[[str, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._called = called

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._called(func.namespace, func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def forget_meshes() -> None:
    """Clear torch's caches of meshes.

    A mesh of a later world compares equal to a cached one, whose process groups no longer exist. A cached mesh also
    keeps its process groups alive.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # this import loads Dynamo

    _mesh_resources.mesh_stack.clear()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def share_gloo_device() -> None:
    """Let all gloo groups of this process share a device.

    By default each group has its own device, with a thread that polls a hundred times per second until the group is
    deleted. A group that is still referenced (by compiled code, or by a mesh in a reference cycle) is never deleted.
    """
    device = dist.ProcessGroupGloo.create_default_device()

    class Sharing(dist.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: bool) -> None:
            if any(others.values()):  # settings of torch 2.15, which `_Options` cannot store
                super().__init__(store, rank, size, timeout=timeout, **others)
                return
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]


class _ThreadsWorld(threading.local):
    """The state of torch.distributed (its process groups), separately for each thread."""

    def __init__(self, fresh: dict[str, Any]) -> None:
        for name, value in fresh.items():
            setattr(self, name, type(value)() if isinstance(value, dict | list) else value)


class _PerThread:
    """A cached function with a separate cache for each thread.

    How torch redistributes an uneven DTensor depends on the rank, and its caches do not contain the rank.

    Args:
        function: the function, without a cache.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.cache_clear()

    def __call__(self, *args: Any) -> Any:
        cached = getattr(self._local, "cached", None)
        if cached is None:
            cached = self._local.cached = functools.cache(self._function)
        return cached(*args)

    def cache_clear(self) -> None:
        """Empty the caches of all threads."""
        self._local = threading.local()


@contextlib.contextmanager
def _redistribution_per_thread() -> Iterator[None]:
    """Cache separately for each thread how torch redistributes DTensors."""
    uncached: dict[str, Any] = {
        "_gen_transform_infos": _redistribute._gen_transform_infos_non_cached,
        "get_redistribute_planner": _redistribute.DTensorRedistributePlanner,
    }
    before = {name: getattr(_redistribute, name) for name in uncached}
    for name, function in uncached.items():
        setattr(_redistribute, name, _PerThread(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(_redistribute, name, function)


@contextlib.contextmanager
def world_per_thread() -> Iterator[None]:
    """Give each thread its own default process group. This process must not have one."""
    module = dist.distributed_c10d
    torch_world = module._world
    known = [name for name, value in vars(type(torch_world)).items() if isinstance(value, property)]
    fresh = {
        name: getattr(torch_world, name) for name in known if name != "pg_config_info"
    }  # `pg_config_info` is derived from the others
    torch._C._ensureCUDADeviceGuardSet()  # in torch 2.11 the guard is freed with the thread that first needs it
    module._world = _ThreadsWorld(fresh)  # type: ignore[assignment]
    c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    try:
        with _redistribution_per_thread():
            yield
    finally:
        c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        module._world = torch_world


def fake_group(world_size: int, rank: int) -> None:
    """Make torch's fake process group the default one. Its collectives do nothing, also with fake tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _let_fake_tensors_gather()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    PLAYED.add(dist.group.WORLD)


@functools.cache
def _let_fake_tensors_gather() -> torch.library.Library:
    """Register a meta function for the only collective of ours that has none in torch. It returns completed work."""
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    name = "allgather_into_tensor_coalesced_"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
        library.impl(name, lambda *args: c10d.FakeWork().boxed(), "Meta")  # type: ignore[no-untyped-call]
    return library


def own_part(tensor: DTensor) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """This rank's part of a DTensor, and its offset in each dimension; None if it is not sharded in plain pieces."""
    if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
        return None
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local_tensor(tensor), tuple(offsets)
