"""Shims for private names of torch.distributed that the runtime needs, one per name. Valid for torch 2.11 to 2.15."""

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
from urllib.parse import urlparse

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
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
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import MixedShardingError
from .ragged import RaggedTensor, is_ragged, ragged_tensor

T = TypeVar("T")


@dataclass
class _MeshDims:
    """`DataParallelMeshDims` for versions of torch without it: names of the axes to shard and to replicate over."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


@dataclass
class _PlacementResult:
    """`ShardPlacementResult` for versions of torch without it: the placement of a parameter, and its mesh."""

    placement: Shard | None
    mesh_info: FSDPMeshInfo


DataParallelMeshDims: Any = getattr(dist.fsdp, "DataParallelMeshDims", _MeshDims)
ShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", _PlacementResult)


# Torch's own functions that ours can replace, by name; not all are in torch 2.11.
TORCHS_FUNCTIONS: dict[str, Any] = {
    name: getattr(_torchs, name)
    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
    if hasattr(_torchs, name)
}

# The remedy for a mix of modules of torch's FSDP2 and of this library.
_ONE_KIND = (
    "one model cannot contain modules sharded by torch and modules sharded by composable_shard. Shard all modules with "
    "one of the two: call composable_shard.install() before any code imports fully_shard from torch"
)

# Torch's own function, even if users have replaced it: it is the key under which torch's code looks up a state.
_FULLY_SHARD: Any = _torchs_fully_shard.__wrapped__  # type: ignore[attr-defined]


class OurState(_TorchsState):
    """Base of the states that torch finds for our modules; torch's own code checks for its class.

    The attribute `_known` has weak references to the modules.
    """


def register_state(module: nn.Module, state: OurState) -> None:
    """Register `state`, so that `torch.distributed.fsdp.fully_shard.state(module)` and other torch APIs find it."""
    _module_state_mapping[module] = weakref.ref(state)
    module.__dict__.setdefault(STATE_KEY, {})[_FULLY_SHARD] = state
    applied = module.__dict__[REGISTRY_KEY] = _Applied(module.__dict__.get(REGISTRY_KEY, {}))
    applied[_FULLY_SHARD.__name__] = RegistryItem()


def registered_state(module: nn.Module) -> Any:
    """The state that was registered for a module by `register_state`; None if there is none."""
    return module.__dict__.get(STATE_KEY, {}).get(_FULLY_SHARD)


def register_copy(made: nn.Module, module: nn.Module) -> None:
    """Register the state of a module for its shallow copy, too; the attributes of the copy are set already."""
    state = registered_state(module)
    if isinstance(state, OurState):
        object.__getattribute__(state, "__dict__")["_known"].append(weakref.ref(made))
        _module_state_mapping[made] = weakref.ref(state)


# The code of the function by which torch's own `fully_shard` checks each inner module; None in other versions of torch.
_MAY_TAKE: CodeType | None = getattr(getattr(_fsdp_common, "_is_composable_with_fsdp", None), "__code__", None)


class _Applied(dict[str, RegistryItem]):
    """The registry of torch's composable functions on a module that we have sharded; refuses torch's `fully_shard`."""

    def __contains__(self, name: object) -> bool:
        asking = sys._getframe(1)
        if name == "replicate" and asking.f_code is _MAY_TAKE:
            of = type(asking.f_locals.get("module")).__name__
            raise MixedShardingError(
                f"torch's own fully_shard was called on a module that contains this {of}, which composable_shard has "
                f"sharded; {_ONE_KIND}"
            )
        return super().__contains__(name)


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` manages this module's parameters."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, {})


_GIL_S = 0.01  # seconds in which a thread that waits for the GIL gets it
_MANAGED = "_is_fsdp_managed_module"  # attribute that torch's FSDP sets on modules whose parameters it manages


class _Mark:
    """An object that is true for every library, but false for Dynamo.

    Dynamo does not guard the attributes of a module whose mark is true for it. It would then run outdated code for a
    module that was changed after compilation.
    """

    def __bool__(self) -> bool:
        if torch.compiler.is_dynamo_compiling():
            return True  # the caller is code that is being traced
        return not sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo")


def mark_managed(module: nn.Module) -> None:
    """Mark a module whose parameters `fully_shard` has sharded, as torch's `fully_shard` does.

    Other libraries check the mark to find out whether all ranks must run a module, for example in `generate` or with
    randomly skipped layers.
    """
    module.__dict__[_MANAGED] = _Mark()


def check_unmixed(root: nn.Module) -> None:
    """Check that torch's own `fully_shard` has not sharded a module, one inside of it, or one that contains it.

    Raises:
        MixedShardingError: it has.
    """
    kind = type(root).__name__
    for name, module in root.named_modules():
        state = registered_state(module)
        if isinstance(state, _TorchsState) and not isinstance(state, OurState) and isinstance(module, _TorchsModule):
            where = f"module {name} of this {kind}" if name else f"module: this {kind}"
            raise MixedShardingError(f"{where} was sharded by torch's own fully_shard; {_ONE_KIND}")
    # Some libraries set the mark on a model that they have sharded by our function, so a registered state takes
    # precedence. Torch's mark is not a `_Mark`.
    by_torch = registered_state(root) is None and not isinstance(root.__dict__.get(_MANAGED, _Mark()), _Mark)
    if by_torch and any(isinstance(p, DTensor) for p in root.parameters()):
        raise MixedShardingError(f"module: this {kind} is inside of one that torch's FSDP has sharded; {_ONE_KIND}")


# The code of the wrapper that torch's own `register_fsdp_forward_method` sets on a module; None in other versions.
_FORWARD_METHOD: CodeType | None = next(
    (
        it
        for it in inspect.unwrap(_torchs_register).__code__.co_consts
        if getattr(it, "co_name", "") == "wrapped_method"
    ),
    None,
)


def registered_by_torch(method: Any) -> CellType | None:
    """The closure cell with the method inside of a wrapper of torch's own `register_fsdp_forward_method`.

    None if `method` is not such a wrapper.
    """
    function: Any = getattr(method, "__func__", None)
    code: Any = getattr(function, "__code__", None)
    if _FORWARD_METHOD is None or code is not _FORWARD_METHOD:
        return None
    cell: CellType = function.__closure__[_FORWARD_METHOD.co_freevars.index("orig_method")]
    return cell


def called_by_forward_method() -> bool:
    """Whether the caller of this function was called by such a wrapper."""
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


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor; return other tensors unchanged."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


# The DTensorSpec of a DTensor.
spec_of: Callable[[torch.Tensor], Any] = attrgetter("_spec")

# Makes a DTensor from its local tensor and its spec. `DTensor.from_local` takes 20 times as long. Calling the class
# takes twice as long, because of an `__init__` that only disables Dynamo.
new_dtensor: Callable[[torch.Tensor, Any], DTensor] = functools.partial(DTensor.__new__, DTensor, requires_grad=False)


def dtensor_like(reference: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Make a DTensor from `local` with the layout of `reference`."""
    return (ragged_tensor if type(reference) is RaggedTensor else new_dtensor)(local, spec_of(reference))


def dtensor_of(local: torch.Tensor, spec: Any) -> DTensor:
    """Make a DTensor of the class that its placements require."""
    return (ragged_tensor if is_ragged(spec.placements) else new_dtensor)(local, spec)


def dtensor_at(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], like: torch.Tensor) -> DTensor:
    """Make a DTensor from `local`, on its device, with the global shape and stride of `like`.

    `DTensor.from_local` would move it to the mesh's device, and so would copy offloaded shards back to the accelerator.
    """
    meta = TensorMeta(torch.Size(like.shape), like.stride(), local.dtype)
    return dtensor_of(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta))


def own_offsets(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Torch's offsets and shape of this rank's part of a DTensor."""
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(shape)


def store_of(group: dist.ProcessGroup) -> c10d.Store:
    """The store through which the ranks of a process group have initialized it."""
    return dist.distributed_c10d._get_process_group_store(group)


Store = c10d.Store


def prefixed(prefix: str, store: c10d.Store) -> c10d.Store:
    """A view of a store in which all keys begin with a prefix."""
    return c10d.PrefixStore(prefix, store)


_clients: weakref.WeakSet[c10d.Store] = weakref.WeakSet()


CONNECT_S = 60.0  # within which a new connection to a store must be made


def another_client(store: c10d.Store, limit_s: float = CONNECT_S) -> c10d.Store:
    """The same store through a separate connection, for another thread; the store itself, if it has no `clone`.

    Classes of stores that are written in Python may lack `clone`. Then two threads call the same object. The store must
    support that, because backends have threads as well: its methods run under the GIL, and what they call without the
    GIL (for example a `TCPStore`) has its own lock. A wait of one thread can delay the other one, but not forever: our
    threads only read keys that exist, and waits by torch end at the store's timeout.

    The connection is made in a thread, because torch ignores the timeout of a `TCPStore` here: if the process that
    hosts it has ended, torch retries for longer than that (its log names 30 minutes). The thread is then left behind.

    Raises:
        RuntimeError: there was no connection within `limit_s` seconds.
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
    """Delete a key that is no longer read; a store written in Python without that method keeps the key."""
    try:
        store.delete_key(key)
    except RuntimeError as error:
        if not _is_missing(error):
            raise


def _is_missing(error: RuntimeError) -> bool:
    """Whether the error means that a store class written in Python lacks the method that was called."""
    return "pure virtual function" in str(error)  # pybind11's message


def new_twin(
    group: dist.ProcessGroup, limit: timedelta, number: int, description: str, backend: str = "gloo"
) -> dist.ProcessGroup:
    """Make a process group with the ranks of an existing group. This waits only for these ranks.

    Args:
        group: the existing group. Its ranks must be in ascending order.
        limit: timeout of a collective.
        number: number of this twin of `group`; all ranks make twins in the same order.
        description: description of the group, for tools.
        backend: name of its backend.
    """
    # Torch's own name counts the groups of a rank, and this count may differ between the ranks.
    name = f"{group.group_name} {description} {number}"
    with mock.patch.object(dist.distributed_c10d, "_process_group_name", return_value=name):
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=limit,
            backend=backend,
            use_local_synchronization=True,
            group_desc=description,
        )
    assert isinstance(made, dist.ProcessGroup)
    return made


_joined: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def join_group(
    init_method: str, rank: int, world: int, backend: str | None, limit: timedelta, description: str
) -> dist.ProcessGroup:
    """Make a process group that is not the default one, of processes that may have other default process groups.

    Torch has no public function for this. Libraries for reinforcement learning do it in the same way.
    """
    functions = dist.distributed_c10d
    address = urlparse(init_method)
    store: Any
    # With torchrun, torch's rendezvous expects that torchrun's own store listens at a tcp address.
    if address.scheme == "tcp" and address.hostname and address.port:
        store = c10d.TCPStore(address.hostname, address.port, world, rank == 0, limit)
    else:
        store, rank, world = next(rendezvous(init_method, rank, world, timeout=limit))
    store.set_timeout(limit)
    name: Any = f"{description} {init_method}"
    kind, store = dist.Backend(backend or "undefined"), prefixed(name, store)
    made, _ = functions._new_process_group_helper(
        world, rank, [], kind, store, name, timeout=limit, group_desc=description
    )
    assert isinstance(made, dist.ProcessGroup)
    functions._world.pg_group_ranks[made] = {each: each for each in range(world)}
    _joined.add(made)
    return made


def owns_connections(group: dist.ProcessGroup) -> bool:
    """Whether a process group was made by `join_group`, so that only this library uses its connections."""
    return group in _joined


def leave_to_parent() -> None:
    """Leak a forked process's copies of the parent's process groups and stores, so that they are never destroyed.

    The destructor of a `FileStore` counts the processes that are done with the file, and the last one removes it: a
    child would remove the file while other ranks are training. It also takes a lock that another thread may have held
    during the fork. The destructor of a process group joins threads that exist only in the parent.
    """
    groups = all_groups()
    for each in (*_clients, *groups, *map(store_of, groups)):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def leave_to_gloo() -> None:
    """At the end of this process, prevent threads of gloo from releasing the Python object of a tensor.

    A thread of gloo keeps the tensors of a collective until the collective ends, and slightly longer than a `wait` for
    it. If it drops the last C++ reference, it releases the tensor's Python object (c10/util/intrusive_ptr.h), for which
    it needs the GIL. A thread that requests the GIL while the interpreter is shutting down aborts the process:
    "terminate called without an active exception" (pytorch#190489). One additional C++ reference, which is never
    dropped, prevents that. Without process groups there are no such threads.
    """
    if not all_groups():
        return
    plain = (torch.Tensor, torch.nn.Parameter)  # collectives get only these types, because subclasses are unwrapped
    held = [each for each in gc.get_objects() if type(each) in plain and each._use_count() > 1]
    if held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch._C.ScriptList(held)))  # a C++ list
    time.sleep(_GIL_S)  # for a thread that is already waiting for the GIL


def exists(group: dist.ProcessGroup) -> bool:
    """Whether a process group still exists, that is, was not destroyed.

    A process can have groups of `join_group` without a default one, so that is not checked.
    """
    return group in dist.distributed_c10d._world.pg_map


def all_groups() -> list[dist.ProcessGroup]:
    """All process groups that were not destroyed."""
    return list(dist.distributed_c10d._world.pg_map)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend (``gloo``, ``nccl``, ...) that serves `device` in a process group."""
    try:
        return group._get_backend(device).name().lower()
    except (RuntimeError, NotImplementedError):
        if is_native(group):
            raise
        return group.name().lower()  # a process group written in Python has no backends


def is_native(group: dist.ProcessGroup) -> bool:
    """Whether a process group is of torch's own class, which passes all calls to its backends.

    A class written in Python may have the same methods and behave differently.
    """
    return type(group) is dist.ProcessGroup


# The functions that torch's FSDP2 calls, by their names in the installed version. Older names warn in newer versions.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def public_all_gather(whole: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """The asynchronous all-gather of `torch.distributed`, looked up at each call because tools may patch it."""
    return getattr(dist, _ALL_GATHER)(output_tensor=whole, input_tensor=piece, group=group, async_op=True)


def public_reduce_scatter(out: torch.Tensor, bucket: torch.Tensor, group: dist.ProcessGroup, op: Any) -> Any:
    """The asynchronous reduce-scatter of `torch.distributed`, looked up at each call because tools may patch it."""
    return getattr(dist, _REDUCE_SCATTER)(output=out, input=bucket, group=group, op=op, async_op=True)


def group_all_gather(whole: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """The asynchronous all-gather method of a process group, for data that tools must not count as a gather."""
    gather = getattr(group, _ALL_GATHER, None) or group._allgather_base
    return gather(whole, piece, all_gather_options())


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A new tensor with the sum over the ranks of a process group, by an operator that Dynamo can trace."""
    total: torch.Tensor = functional.all_reduce(tensor, "sum", group)
    return total


def _options(kind: Callable[[], T], asynchronous: bool = True, **fields: Any) -> T:
    """Options of a collective. With NCCL and similar backends, a synchronous one runs on the current stream."""
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
    """The store that the processes of the default group share; None if there is none, as in simulated worlds."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, (c10d.TCPStore, c10d.FileStore)) else None


def launched() -> bool:
    """Whether a launcher has set the environment variables of `torch.distributed`."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def process_group_allocation(group: dist.ProcessGroup) -> tuple[Any, Any]:
    """torch's all-gather and reduce-scatter whose buffers come from the process group's own allocator."""
    return _collectives.ProcessGroupAllocAllGather(group), _collectives.ProcessGroupAllocReduceScatter(group)


def symmetric_memory_gather(group: dist.ProcessGroup, backend: str) -> Any:
    """torch's all-gather through symmetric memory; None if this version of torch has none."""
    kind = getattr(_collectives, "SymmMemAllGather", None)
    return None if kind is None else kind(group, backend)


def is_torchs_comm(comm: Any, kind: str) -> bool:
    """Whether a custom gather or reduction is torch's own: its default, or the type `kind` (for example SymmMem)."""
    of = type(comm)
    return of.__module__ == _collectives.__name__ and of.__name__.startswith(("Default", kind))


def new_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Make a mesh of all ranks."""
    with unset_fake_temporarily():  # a mesh needs the values of its tensor of ranks, even in a fake-tensor mode
        return init_device_mesh(device_type, shape, mesh_dim_names=names)


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Concatenate the axes of several submeshes of one mesh."""
    with unset_fake_temporarily():
        return DeviceMesh._concatenate(meshes)


def strided_shard(dim: int, factor: int) -> Shard:
    """The placement of a mesh axis that shards `dim` within each of the `factor` pieces of a later axis."""
    return _StridedShard(dim, split_factor=factor)  # type: ignore[return-value]


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh in row-major order; 0, 1, 2, ... if the mesh tensor is fake and has no values."""
    with _disable_current_modes():
        ranks = mesh.mesh
        return list(range(mesh.size())) if isinstance(ranks, FakeTensor) else ranks.flatten().tolist()


def flattened_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Flatten some axes of a mesh into one axis."""
    with unset_fake_temporarily():
        return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))
