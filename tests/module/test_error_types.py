"""A mistake raises the same error type as with torch's FSDP2, and the message contains the words of torch's."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import composable_shard
from _engines import ENGINES, mesh_of, named_mesh
from _pool import distributed
from composable_shard import DataParallelMeshDims, ShardPlacementResult
from composable_shard.errors import ShardConfigError

MODULES = {"ours": composable_shard, "fsdp2": fsdp}


class Odd(nn.Module):
    """Has a parameter that cannot be sharded."""

    def __init__(self, value):
        super().__init__()
        self.odd = nn.Parameter(value)


def linear(engine, **options):
    return engine(nn.Linear(4, 4), **options)


def chain(engine, **options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        engine(layer, **options)
    return engine(model, **options)


def tied(engine):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    for layer in model:
        engine(layer)
    engine(model)(torch.ones(1, 4))


def ran_before(engine):
    model = chain(engine)
    model[0](torch.ones(1, 4))
    model(torch.ones(1, 4))


def on_meta(engine):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine(model)(torch.ones(1, 4))


def list_as_root(engine):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine([model[0], model[1]])
    model[0](torch.ones(1, 4))


def of_another_device(engine):
    other = DeviceMesh("meta", [0, 1], mesh_dim_names=("tp",), _init_backend=False)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(torch.empty(4, 4, device="meta"), other, [Replicate()]))
    if engine is fsdp2:  # FSDP2 checks the devices of tensors first, and accepts those on meta
        raise ValueError("Requires DTensor to have mesh of the same type as the FSDP mesh but got meta")
    engine(model, mesh=mesh_of(2))


def extended(**methods):
    def make(engine):
        model = engine(nn.Linear(4, 4, bias=False))
        for name, method in methods.items():
            setattr(model.weight._local_tensor, name, method)
        model(torch.ones(1, 4))

    return make


class Comm:
    """Custom communication."""

    def allocate(self, *size, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args, **kwargs):
        raise NotImplementedError


def with_comm(method, setter):
    def make(engine):
        model = linear(engine)
        getattr(model, setter)(Comm())
        getattr(model, method)(*([True] if "allocate" in method else []))

    return make


def reset_below(engine):
    model = chain(engine)
    model(torch.ones(1, 4))
    model[0].reset_iter_state()


def name_of(engine):
    return next(module for key, module in MODULES.items() if ENGINES[key] is engine)


FULL = ("a", "b")


EVERYWHERE = (Replicate(), Replicate())


def full(dims, placements=EVERYWHERE, names=FULL):
    def make(engine):
        mesh = named_mesh((1, 2), FULL) if names else init_device_mesh("cpu", (1, 2))
        model = nn.Linear(4, 4, bias=False)
        if placements is not None:
            model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, placements))
        engine(model, mesh=mesh, dp_mesh_dims=dims)

    return make


def no_dims():
    dims = DataParallelMeshDims(shard="b")
    dims.shard = None
    return dims


META = (
    r"FSDP parameters should be materialized from meta device before training, but the following were still on meta "
    r"device: \['0.weight', '0.bias', '1.weight', '1.bias'\]"
)
RESHARD = r"reshard_after_forward should be a bool or an int representing the group size to reshard to, not "
RAN = r"been lazily initialized for 0\nFSDP requires running forward through the root module first"
CUSTOM = r"cannot call set_allocate_memory_from_process_group\(\) when {} comm is custom: Comm"

# By mistake: a function that makes it, and the words of torch's message that torch's tests match.
TWICE = (
    r"Each distinct composable distributed API can only be applied to a module once\. fully_shard has already been "
    r"applied to the following module:"
)
TIED = (
    r"Parameter '.*' is shared with a parameter already managed by another FSDP group\. For shared/tied parameters, "
    r"use fully_shard\(\[module_a, module_b\]\) to place them in the same FSDP group"
)
MISTAKES = {
    "a container": (
        lambda e: e(nn.ModuleList([nn.Linear(2, 2)])),
        r"fully_shard does not support containers that do not implement forward",
    ),
    "a dict of modules": (lambda e: e(nn.ModuleDict({"a": nn.Linear(2, 2)})), r"do not implement forward"),
    "a mesh of three axes": (
        lambda e: linear(e, mesh=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("x", "y", "z"))),
        r"fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh",
    ),
    "axes without names": (
        lambda e: linear(e, mesh=init_device_mesh("cpu", (1, 2))),
        r"Please init the 2D mesh for HSDP with mesh_dim_names specified",
    ),
    "sharded twice": (lambda e: e(e(nn.Linear(2, 2))), TWICE),
    "sharded twice in a list": (lambda e: e([e(nn.Linear(2, 2)), nn.Linear(2, 2)]), TWICE),
    "a scalar": (
        lambda e: e(Odd(torch.tensor(1.0))),
        r"doesn't support scalar parameters. Change odd to a 1D tensor with numel equal to 1",
    ),
    "a strided parameter": (
        lambda e: e(Odd(torch.ones(4, 6).t())),
        r"FSDP does not support non-contiguous parameters yet: param.shape=torch.Size\(\[6, 4\]\) param",
    ),
    "a dim that is not there": (
        lambda e: linear(e, shard_placement_fn=lambda p: Shard(2)),
        r"Shard dim 2 is invalid for 2D tensor: torch.Size\(\[4, 4\]\)",
    ),
    "an uneven dim": (
        lambda e: e(Odd(torch.ones(4, 3)), shard_placement_fn=lambda p: Shard(1)),
        r"FSDP does not support uneven sharding on dim 1: torch.Size\(\[4, 3\]\) \(world size: 2\)",
    ),
    "no placement": (lambda e: linear(e, shard_placement_fn=lambda p: "0"), r"Invalid shard_placement_fn result: "),
    "another placement": (
        lambda e: linear(e, shard_placement_fn=lambda p: Replicate()),
        r"Invalid shard_placement_fn result: ",
    ),
    "reshard to three of two": (
        lambda e: linear(e, reshard_after_forward=3),
        r"If passing reshard_after_forward as an int, it should be a factor of 2, not 3",
    ),
    "reshard to none": (lambda e: linear(e, reshard_after_forward=0), r"it should be a factor of 2, not 0"),
    "reshard to a word": (lambda e: linear(e, reshard_after_forward="yes"), RESHARD),
    "reshard set to a word": (
        lambda e: linear(e).set_reshard_after_forward("yes"),
        r"reshard_after_forward should be a bool, got <class 'str'>",
    ),
    "reshard set to a number": (
        lambda e: chain(e).set_reshard_after_forward(2),
        r"reshard_after_forward should be a bool, got <class 'int'>",
    ),
    "tied across calls": (tied, TIED),
    "on meta": (on_meta, META),
    "a list as root": (list_as_root, r"FSDP requires a single root module but got "),
    "a child that ran first": (ran_before, RAN),
    "of another device": (
        of_another_device,
        r"Requires DTensor to have mesh of the same type as the FSDP mesh but got meta",
    ),
    "half an extension": (
        extended(fsdp_pre_all_gather=lambda mesh: ((), None)),
        r"Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined",
    ),
    "an extension of two arguments": (
        extended(fsdp_pre_all_gather=lambda a, b: ((), None), fsdp_post_all_gather=lambda *a, **k: None),
        r"Invalid fsdp_pre_all_gather: ",
    ),
    "too few buffers": (
        lambda e: linear(e).set_reduce_scatter_max_input_buffers(0),
        r"max_input_buffers must be a positive int, got 0",
    ),
    "buffers of another type": (
        lambda e: linear(e).set_reduce_scatter_max_input_buffers(True),
        r"max_input_buffers must be an int, got bool",
    ),
    "a stream among replicas": (
        lambda e: linear(e, mesh=named_mesh((1, 2), FULL)).set_all_reduce_hook(lambda t: None, stream=object()),
        r"stream cannot be set when using native HSDP",
    ),
    "allocation of a custom gather": (
        with_comm("set_allocate_memory_from_process_group_for_comm", "set_custom_all_gather"),
        CUSTOM.format("all gather"),
    ),
    "allocation of a custom reduction": (
        with_comm("set_allocate_memory_from_process_group_for_comm", "set_custom_reduce_scatter"),
        CUSTOM.format("reduce scatter"),
    ),
    "symmetric memory of a custom gather": (
        with_comm("set_symm_mem_for_comm", "set_custom_all_gather"),
        r"cannot call set_symm_mem\(\) when all gather comm is custom: Comm",
    ),
    "a reset below the root": (reset_below, r"reset_iter_state must be called on the root FSDP module"),
    "a method that is not there": (
        lambda e: name_of(e).register_fsdp_forward_method(linear(e), "generate"),
        r"does not have a method",
    ),
    "sharing of plain modules": (
        lambda e: name_of(e).share_comm_ctx([nn.Linear(2, 2)]),
        r"Expects list of FSDPModules but got Linear",
    ),
    "prefetch of plain modules": (
        lambda e: linear(e).set_modules_to_forward_prefetch([nn.Linear(2, 2)]),
        r"Expects FSDPModule but got <class 'torch.nn.modules.linear.Linear'>: Linear",
    ),
    "backward prefetch of plain modules": (
        lambda e: linear(e).set_modules_to_backward_prefetch([nn.Linear(2, 2)]),
        r"Expects FSDPModule but got ",
    ),
    "no axis": (lambda e: full(no_dims())(e), r"At least one of shard or replicate must be set in dp_mesh_dims"),
    "an axis that is not there": (
        full(DataParallelMeshDims(shard="c")),
        r"Mesh dim name 'c' not found in mesh.mesh_dim_names \('a', 'b'\)",
    ),
    "dims of axes without names": (
        full(DataParallelMeshDims(shard="b"), names=None),
        r"mesh must have mesh_dim_names when dp_mesh_dims is provided",
    ),
    "a plain parameter on the full mesh": (
        full(DataParallelMeshDims(shard="b"), placements=None),
        r"When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh",
    ),
    "already sharded on the shard axis": (
        full(DataParallelMeshDims(shard="b"), (Replicate(), Shard(0))),
        r"Expected Replicate\(\) on DP shard dim 'b' \(index 1\) but got ",
    ),
    "sharded on the replicate axis": (
        full(DataParallelMeshDims(shard="b", replicate="a"), (Shard(0), Replicate())),
        r"Expected Replicate\(\) on DP replicate dim 'a' \(index 0\) but got ",
    ),
}


def caught(make, engine):
    try:
        make(engine)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("part", range(4))
@distributed(world=2)
def test_a_mistake_raises_torchs_error_type_with_torchs_message(rank, world, part):
    wrong = []
    for name, (make, words) in list(MISTAKES.items())[part::4]:
        theirs, ours = caught(make, fsdp2), caught(make, ENGINES["ours"])
        if not re.search(words, str(theirs)):
            if torch.__version__ < "2.13":
                continue  # older versions do not detect the mistake, or have another message
            wrong.append(f"{name}: torch says {theirs}")
        if not isinstance(ours, (type(theirs), *standard(theirs))) or not isinstance(ours, ShardConfigError):
            wrong.append(f"{name}: a {type(ours).__name__}, and torch's is a {type(theirs).__name__}: {ours}")
        elif not re.search(words, str(ours)):
            wrong.append(f"{name}: lacks {words!r}: {ours}")
    assert not wrong, "\n".join(wrong)


def standard(error):
    """The built-in base class of an error."""
    return tuple(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")[:1]


def test_every_error_is_also_a_built_in_error():
    kinds = {kind for kind in vars(composable_shard.errors).values() if isinstance(kind, type)}
    for kind in kinds:
        if issubclass(kind, ShardConfigError) and kind is not ShardConfigError:
            assert any(issubclass(kind, k) for k in (ValueError, TypeError, RuntimeError, AttributeError)), kind


@distributed(world=2)
def test_some_errors_of_fsdp2_are_supported_here(rank, world):
    """The errors of FSDP2 that are missing above."""
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    composable_shard.fully_shard(mixed)
    mixed[0].weight.sum().backward()
    hook = linear(ENGINES["ours"])
    hook.set_allocate_memory_from_process_group_for_comm(True)
    hook.set_allocate_memory_from_process_group_for_comm(False)
    mesh = mesh_of(2)
    other = composable_shard.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    several = linear(
        ENGINES["ours"],
        mesh=mesh,
        shard_placement_fn=lambda p: ShardPlacementResult(None, other) if p.ndim == 1 else None,
    )
    several(torch.ones(1, 4)).sum().backward()
    assert dist.get_world_size() == world
