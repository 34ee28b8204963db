"""What the runtime needs of torch.distributed's private names, one shim each. Holds for torch 2.11 to 2.15."""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from types import CellType, CodeType
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as _collectives
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard import _fully_shard as _torchs
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo as FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo as HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo as ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState as ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as _TorchsState
from torch.distributed.fsdp._fully_shard._fully_shard import FSDPModule as _TorchsModule
from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard as _torchs_fully_shard
from torch.distributed.fsdp._fully_shard._fully_shard import register_fsdp_forward_method as _torchs_register
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from .._errors import MixedShardingError
from .ragged import RaggedTensor, is_ragged, own_rows_of, ragged_tensor

T = TypeVar("T")


@dataclass
class _MeshDims:
    """`DataParallelMeshDims`, where torch has none yet: names of the axes to shard and to replicate over."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


@dataclass
class _PlacementResult:
    """`ShardPlacementResult`, where torch has none yet: where to cut a parameter, and on which mesh."""

    placement: Shard | None
    mesh_info: FSDPMeshInfo


DataParallelMeshDims: Any = getattr(dist.fsdp, "DataParallelMeshDims", _MeshDims)
ShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", _PlacementResult)


# Torch's own functions whose place ours can take, by name; not all are in torch 2.11.
TORCHS_FUNCTIONS: dict[str, Any] = {
    name: getattr(_torchs, name)
    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
    if hasattr(_torchs, name)
}

# What to do about modules of both kinds.
_ONE_KIND = (
    "both kinds cannot be inside of each other. Shard all modules by one of them: composable_shard.install(), called "
    "before anything takes fully_shard from torch, turns every call into ours"
)

# Torch's own, whatever users have put in its place since: it is the key under which torch's code looks for a state.
_FULLY_SHARD: Any = _torchs_fully_shard.__wrapped__  # type: ignore[attr-defined]


def register_state(module: nn.Module, state: Any) -> None:
    """Have `torch.distributed.fsdp.fully_shard.state(module)` give `state`, and torch's other APIs know of it."""
    module.__dict__.setdefault(STATE_KEY, {})[_FULLY_SHARD] = state
    applied = module.__dict__[REGISTRY_KEY] = _Applied(module.__dict__.get(REGISTRY_KEY, {}))
    applied[_FULLY_SHARD.__name__] = RegistryItem()


def registered_state(module: nn.Module) -> Any:
    """What `register_state` was given for a module; None if it was not."""
    return module.__dict__.get(STATE_KEY, {}).get(_FULLY_SHARD)


# Where torch's own `fully_shard` asks each module inside of its own whether it may take it; None if it does otherwise.
_MAY_TAKE: CodeType | None = getattr(getattr(_fsdp_common, "_is_composable_with_fsdp", None), "__code__", None)


class _Applied(dict[str, RegistryItem]):
    """What of torch's composable functions was applied to a module that we have sharded; its own must not take it."""

    def __contains__(self, name: object) -> bool:
        asking = sys._getframe(1)
        if name == "replicate" and asking.f_code is _MAY_TAKE:
            of = type(asking.f_locals.get("module")).__name__
            raise MixedShardingError(
                f"torch's own fully_shard was called on a module around this {of}, which composable_shard has "
                f"sharded; {_ONE_KIND}"
            )
        return super().__contains__(name)


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` has this module's parameters."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, {})


_GIL_S = 0.01  # in which a thread that waits for the GIL gets it
_MANAGED = "_is_fsdp_managed_module"  # what torch's FSDP sets on modules whose parameters it has taken


class _Mark:
    """True for every library that asks; false for Dynamo, which would stop guarding a marked module's attributes.

    It would then run old code for a module that was changed after it was compiled.
    """

    def __bool__(self) -> bool:
        if torch.compiler.is_dynamo_compiling():
            return True  # code asks that is being traced
        return not sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo")


def mark_managed(module: nn.Module) -> None:
    """Mark a module whose parameters `fully_shard` has taken, as torch's does.

    Other libraries ask for it to tell whether all ranks must run a module: as many steps of `generate` as the others,
    and layers that are left out by chance.
    """
    module.__dict__[_MANAGED] = _Mark()


def check_unmixed(root: nn.Module) -> None:
    """See that torch's own `fully_shard` has sharded neither a module, nor one inside of it, nor one around it.

    Raises:
        MixedShardingError: it has.
    """
    kind = type(root).__name__
    for name, module in root.named_modules():
        if isinstance(registered_state(module), _TorchsState) and isinstance(module, _TorchsModule):
            where = f"module {name} of this {kind}" if name else f"module: this {kind}"
            raise MixedShardingError(f"{where} was sharded by torch's own fully_shard; {_ONE_KIND}")
    # Some libraries mark the model that they have sharded by ours; torch marks what we have not taken yet.
    by_torch = registered_state(root) is None and not isinstance(root.__dict__.get(_MANAGED, _Mark()), _Mark)
    if by_torch and any(isinstance(p, DTensor) for p in root.parameters()):
        raise MixedShardingError(f"module: this {kind} is inside of one that torch's FSDP has sharded; {_ONE_KIND}")


# What torch's own `register_fsdp_forward_method` sets on a module, as compiled; None if it is made otherwise.
_FORWARD_METHOD: CodeType | None = next(
    (
        it
        for it in inspect.unwrap(_torchs_register).__code__.co_consts
        if getattr(it, "co_name", "") == "wrapped_method"
    ),
    None,
)


def registered_by_torch(method: Any) -> CellType | None:
    """The cell that holds the method under a wrapper that torch's own `register_fsdp_forward_method` has made.

    None if it is no such wrapper.
    """
    function: Any = getattr(method, "__func__", None)
    code: Any = getattr(function, "__code__", None)
    if _FORWARD_METHOD is None or code is not _FORWARD_METHOD:
        return None
    cell: CellType = function.__closure__[_FORWARD_METHOD.co_freevars.index("orig_method")]
    return cell


def called_by_forward_method() -> bool:
    """Whether such a wrapper has called the function that asks."""
    return sys._getframe(2).f_code is _FORWARD_METHOD


def data_parallel_mesh_info(info: Any) -> Any:
    """Torch's own description of a `MeshInfo`."""
    full = info.full
    extra: dict[str, Any] = {}
    if full is not None:
        names = full.mesh.mesh_dim_names
        shard, replicate = (tuple(names[axis] for axis in axes) or None for axes in (full.shard, full.replicate))
        extra = {"dp_mesh_dims": DataParallelMeshDims(shard=shard, replicate=replicate), "spmd_mesh": full.mesh}
    if info.shard_group is None:
        return _fsdp_common.DDPMeshInfo(info.mesh, replicate_mesh_dim=0, **extra)
    if info.replicate_group is None:
        return FSDPMeshInfo(info.mesh, shard_mesh_dim=0, **extra)
    return HSDPMeshInfo(info.mesh, shard_mesh_dim=1, replicate_mesh_dim=0, **extra)


# The local tensor of a DTensor, without the autograd node and the copy that `to_local` makes.
local_tensor: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")

# What a DTensor knows of its placement, as torch's own code passes it on.
spec_of: Callable[[torch.Tensor], Any] = attrgetter("_spec")

# A DTensor from its local tensor and its spec. `DTensor.from_local` costs 20 times as much, and half of what the class
# itself costs is an `__init__` that does nothing but keep Dynamo out.
new_dtensor: Callable[[torch.Tensor, Any], DTensor] = functools.partial(DTensor.__new__, DTensor, requires_grad=False)


def dtensor_like(reference: torch.Tensor, local: torch.Tensor) -> DTensor:
    """A DTensor over `local` with the layout of `reference`."""
    return (ragged_tensor if type(reference) is RaggedTensor else new_dtensor)(local, spec_of(reference))


def dtensor_of(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor of the class that its placements want."""
    return (ragged_tensor if is_ragged(spec.placements) else new_dtensor)(local, spec)


def dtensor_at(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], like: torch.Tensor) -> DTensor:
    """A DTensor over `local` with the global shape and stride of `like`, where it lies.

    `DTensor.from_local` would move it to the mesh's device, and so take offloaded shards back to the accelerator.
    """
    meta = TensorMeta(torch.Size(like.shape), like.stride(), local.dtype)
    return dtensor_of(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta))


def own_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Where this rank's part of a DTensor lies in the full tensor; no axis may hold a partial sum."""
    if is_ragged(tensor.placements):
        begin, rows = own_rows_of(tensor.shape[0], tensor.device_mesh, tensor.placements)
        return (slice(begin, begin + rows), *(slice(0, size) for size in tensor.shape[1:]))
    sizes, begins = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


def store_of(group: dist.ProcessGroup) -> c10d.Store:
    """The store over which the ranks of a process group have met."""
    return dist.distributed_c10d._get_process_group_store(group)


Store = c10d.Store


def prefixed(prefix: str, store: c10d.Store) -> c10d.Store:
    """The part of a store whose keys begin with a prefix."""
    return c10d.PrefixStore(prefix, store)


_clients: weakref.WeakSet[c10d.Store] = weakref.WeakSet()


CONNECT_S = 60.0  # within which a new connection to a store must be made


def another_client(store: c10d.Store, limit_s: float = CONNECT_S) -> c10d.Store:
    """The same store through a connection of its own, for another thread; or itself, if its class has no `clone`.

    A class written in Python may lack it. Two threads then call one object, and the store must be ready for that, as
    for the threads of backends: each of its methods runs under the GIL, and what it calls without the GIL (a
    `TCPStore`, say) has a lock of its own. A wait of one thread can delay the other one, but not for ever: our threads
    only get keys that are there, and a wait by torch ends at the limit of the store.

    The connection is made in a thread, because torch ignores the timeout of a `TCPStore` here: if the process that
    hosts it has ended, torch retries for longer than that (its log names 30 minutes). The thread is then left behind.

    Raises:
        RuntimeError: the store was not reached within `limit_s` seconds.
    """
    connected: Future[c10d.Store] = Future()
    threading.Thread(target=_connect, args=(store, connected), name="store-client", daemon=True).start()
    try:
        made = connected.result(limit_s)
    except TimeoutError:
        raise RuntimeError(
            f"a new connection to the store was not made within {limit_s:g} s; the process that hosts it, which is "
            "usually that of rank 0, may have ended"
        ) from None
    except RuntimeError as error:
        if not _is_missing(error):
            raise
        return store
    _clients.add(made)
    return made


def _connect(store: c10d.Store, connected: Future[c10d.Store]) -> None:
    """Set the new connection, or the error, as the result."""
    try:
        connected.set_result(store.clone())  # type: ignore[attr-defined]  # torch's stubs lack `clone`
    except BaseException as error:  # raised in the thread that waits
        connected.set_exception(error)


def delete_key(store: c10d.Store, key: str) -> None:
    """Delete a key that is not read any more; a store of a class written in Python that cannot do that keeps it."""
    try:
        store.delete_key(key)
    except RuntimeError as error:
        if not _is_missing(error):
            raise


def _is_missing(error: RuntimeError) -> bool:
    """Whether a class of stores that is written in Python lacks the method that was called."""
    return "pure virtual function" in str(error)  # pybind11's words


def new_twin(group: dist.ProcessGroup, limit: timedelta, number: int, description: str) -> dist.ProcessGroup:
    """Another process group of gloo with the ranks of one that there is; it waits for these ranks, and for no others.

    Args:
        group: whose ranks. These must be in rising order.
        limit: how long a collective may take.
        number: of the twins of `group`; ranks make them in one order.
        description: for tools.
    """
    # torch's own name counts the groups that a rank belongs to, which need not be the same on all of these.
    name = f"{group.group_name} {description} {number}"
    with mock.patch.object(dist.distributed_c10d, "_process_group_name", return_value=name):
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=limit,
            backend="gloo",
            use_local_synchronization=True,
            group_desc=description,
        )
    assert isinstance(made, dist.ProcessGroup)
    return made


def leave_to_parent() -> None:
    """Called in a forked process: never destroy its copies of the parent's process groups and stores.

    The destructor of a `FileStore` counts the processes that are done with the file, and the last one removes it: a
    child would take the file from ranks that train. It also takes a lock that another thread may have held at the fork.
    The destructor of a process group joins threads that only the parent has.
    """
    groups = all_groups()
    for each in (*_clients, *groups, *map(store_of, groups)):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def leave_to_gloo() -> None:
    """Called when this process ends: never let a thread of gloo release the Python object of a tensor.

    A thread of gloo keeps the tensors of a collective until the collective ends, and for a moment longer than a `wait`
    for it. Where it drops the last reference in C++, it releases the tensor's Python object (c10/util/intrusive_ptr.h),
    for which it needs the GIL. A thread that asks for the GIL of an interpreter that is shutting down aborts the
    process: "terminate called without an active exception" (pytorch#190489). One more reference in C++, which nothing
    ever drops, prevents that. Without process groups there are no such threads.
    """
    if not all_groups():
        return
    plain = (torch.Tensor, torch.nn.Parameter)  # collectives get no others: subclasses are unwrapped before
    held = [each for each in gc.get_objects() if type(each) in plain and each._use_count() > 1]
    if held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch._C.ScriptList(held)))  # a list of C++
    time.sleep(_GIL_S)  # for a thread that waits for the GIL already


def exists(group: dist.ProcessGroup) -> bool:
    """Whether a process group was not destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def all_groups() -> list[dist.ProcessGroup]:
    """The process groups that were not destroyed."""
    return list(dist.distributed_c10d._world.pg_map)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend (``gloo``, ``nccl``, ...) that serves `device` in a process group."""
    try:
        return group._get_backend(device).name().lower()
    except (RuntimeError, NotImplementedError):
        if is_native(group):
            raise
        return group.name().lower()  # one that is made in Python has no backends within


def is_native(group: dist.ProcessGroup) -> bool:
    """Whether a process group is torch's own, which hands all that it is asked for to its backends.

    One of a class made in Python may look the same, and do less, or something else.
    """
    return type(group) is dist.ProcessGroup


# What torch's FSDP2 calls, by the names of the version that is installed: the older ones warn where there are newer.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def public_all_gather(whole: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """The asynchronous all-gather of `torch.distributed`, whatever stands there now."""
    return getattr(dist, _ALL_GATHER)(output_tensor=whole, input_tensor=piece, group=group, async_op=True)


def public_reduce_scatter(out: torch.Tensor, bucket: torch.Tensor, group: dist.ProcessGroup, op: Any) -> Any:
    """The asynchronous reduce-scatter of `torch.distributed`, whatever stands there now."""
    return getattr(dist, _REDUCE_SCATTER)(output=out, input=bucket, group=group, op=op, async_op=True)


def group_all_gather(whole: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """The asynchronous all-gather of any process group, its own method: no payload, and nothing that tools count."""
    gather = getattr(group, _ALL_GATHER, None) or group._allgather_base
    return gather(whole, piece, all_gather_options())


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A new tensor with the sum over the ranks of a process group: an operation that Dynamo can put into a graph."""
    total: torch.Tensor = functional.all_reduce(tensor, "sum", group)
    return total


def _options(kind: Callable[[], T], asynchronous: bool = True, **fields: Any) -> T:
    """Options of a collective. One that is not asynchronous runs on the current stream, in NCCL and its like."""
    options = kind()
    for name, value in {"asyncOp": asynchronous, **fields}.items():
        setattr(options, name, value)
    return options


def all_gather_options(asynchronous: bool = True) -> c10d.AllgatherOptions:
    """Options of an all-gather."""
    return _options(c10d.AllgatherOptions, asynchronous)


def broadcast_options(root: int) -> c10d.BroadcastOptions:
    """Options of an asynchronous broadcast from group rank `root`."""
    return _options(c10d.BroadcastOptions, rootRank=root)


def reduce_scatter_options(op: Any, asynchronous: bool = True) -> c10d.ReduceScatterOptions:
    """Options of a reduce-scatter."""
    return _options(c10d.ReduceScatterOptions, asynchronous, reduceOp=op)


def all_reduce_options(op: Any, asynchronous: bool = True) -> c10d.AllreduceOptions:
    """Options of an all-reduce."""
    return _options(c10d.AllreduceOptions, asynchronous, reduceOp=op)


def all_to_all_options(asynchronous: bool = True) -> c10d.AllToAllOptions:
    """Options of an all-to-all."""
    return _options(c10d.AllToAllOptions, asynchronous)


def store_of_one_process() -> Any:
    """A store for a process group of one process; it opens no port."""
    return c10d.HashStore()


def shared_store() -> Any:
    """The store that the processes of the default group share; None where there is none, as in simulated worlds."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, (c10d.TCPStore, c10d.FileStore)) else None


def launched() -> bool:
    """Whether a launcher has set the environment of `torch.distributed`."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def process_group_allocation(group: dist.ProcessGroup) -> tuple[Any, Any]:
    """torch's all-gather and reduce-scatter whose buffers come from the process group's own allocator."""
    return _collectives.ProcessGroupAllocAllGather(group), _collectives.ProcessGroupAllocReduceScatter(group)


def symmetric_memory_gather(group: dist.ProcessGroup, backend: str) -> Any:
    """torch's all-gather through symmetric memory; None where this version of torch has none."""
    kind = getattr(_collectives, "SymmMemAllGather", None)
    return None if kind is None else kind(group, backend)


def is_torchs_comm(comm: Any, kind: str) -> bool:
    """Whether a gather or a reduction is one of torch's, of its default kind or of another (``SymmMem``, say)."""
    of = type(comm)
    return of.__module__ == _collectives.__name__ and of.__name__.startswith(("Default", kind))


def new_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of all ranks."""
    with unset_fake_temporarily():  # a mesh holds the numbers of its ranks, also where other tensors are fake
        return init_device_mesh(device_type, shape, mesh_dim_names=names)


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The axes of several submeshes of one mesh, one after the other, as one mesh."""
    with unset_fake_temporarily():
        return DeviceMesh._concatenate(meshes)


def strided_shard(dim: int, factor: int) -> Shard:
    """The placement of a mesh axis that cuts `dim` within each of the `factor` pieces of a later axis."""
    return _StridedShard(dim, split_factor=factor)  # type: ignore[return-value]


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh, those along its last axis side by side; as if in order where tensors have no values."""
    with _disable_current_modes():
        ranks = mesh.mesh
        return list(range(mesh.size())) if isinstance(ranks, FakeTensor) else ranks.flatten().tolist()


def flattened_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Some axes of a mesh as one axis."""
    with unset_fake_temporarily():
        return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))
