"""A sharded module has the methods of torch's FSDP2, in every version of torch, and they check their arguments."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
import torch
import torch.distributed.fsdp as fsdp
import torch.nn as nn

import composable_shard
from _engines import fully_shard
from _pool import distributed
from composable_shard._module.methods import refuse_newer

# ---- the contract


# The reviewed methods of torch's `FSDPModule`. Review the new methods when you add a version.
SINCE_2_11 = {
    "_apply",
    "_get_fsdp_state",
    "_set_unshard_async_op",
    "reshard",
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_post_optim_event",
    "set_reduce_scatter_divide_factor",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_unshard_in_backward",
    "unshard",
}
SINCE_2_13 = {
    "reset_iter_state",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
}
SINCE_2_15 = {
    "finalize_backward",
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
}
REVIEWED = {
    "2.11": SINCE_2_11,
    "2.13": SINCE_2_11 | SINCE_2_13,
    "2.15": SINCE_2_11 | SINCE_2_13 | SINCE_2_15,
}


def test_our_module_has_the_methods_of_every_reviewed_version():
    missing = {name for name in REVIEWED["2.15"] if name not in dir(composable_shard.FSDPModule)}
    assert missing == set()


def test_the_installed_version_has_the_reviewed_methods():
    version = ".".join(torch.__version__.split(".")[:2])
    if version in REVIEWED:
        theirs = {n for n, v in vars(fsdp.FSDPModule).items() if inspect.isfunction(v) and not n.startswith("__")}
        assert theirs == REVIEWED[version]


RESERVED = {"get_pending_gradients", "synchronize_gradients"}  # torch is about to add these


def test_upcoming_names_of_torch_are_not_used_otherwise():
    assert RESERVED.isdisjoint(dir(composable_shard.FSDPModule)) or set(dir(fsdp.FSDPModule)) >= RESERVED


# The reviewed arguments of `fully_shard` and fields of its policies.
ARGUMENTS_2_11 = [
    *["module", "mesh", "reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params"]
]
ARGUMENTS = {
    "2.11": ARGUMENTS_2_11,
    "2.13": [*ARGUMENTS_2_11, "dp_mesh_dims"],
    "2.15": [*ARGUMENTS_2_11, "dp_mesh_dims"],
}
FIELDS_2_11 = ["param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"]
FIELDS = {"2.11": FIELDS_2_11, "2.13": FIELDS_2_11, "2.15": [*FIELDS_2_11, "param_dtype_override_fn"]}


def test_our_functions_have_the_arguments_of_every_reviewed_version():
    ours = list(inspect.signature(composable_shard.fully_shard).parameters)
    assert ours == [*ARGUMENTS["2.15"], "outer_sharding"]  # this library's own ones follow
    version = ".".join(torch.__version__.split(".")[:2])
    if version in ARGUMENTS:
        assert list(inspect.signature(fsdp.fully_shard).parameters) == ARGUMENTS[version]
        assert list(inspect.signature(fsdp.MixedPrecisionPolicy).parameters) == FIELDS[version]
    assert issubclass(composable_shard.DataParallelMeshDims, getattr(fsdp, "DataParallelMeshDims", object))


def test_our_classes_are_subclasses_of_torchs():
    assert issubclass(composable_shard.FSDPModule, fsdp.FSDPModule)
    assert issubclass(composable_shard.UnshardHandle, fsdp.UnshardHandle)


def test_every_method_of_torch_is_overridden():
    inherited = {
        name
        for name, value in vars(fsdp.FSDPModule).items()
        if inspect.isfunction(value) and getattr(composable_shard.FSDPModule, name) is value
    }
    assert inherited == set()


def test_methods_of_newer_versions_raise_an_error_that_names_the_version():
    class Newer:
        def set_all_gather_layout(self, layout):
            raise AssertionError("torch's method was called")

        def set_something_else(self):
            raise AssertionError("torch's method was called")

        def reshard(self):
            raise AssertionError("torch's method was called")

    class Ours(Newer):
        def reshard(self):
            return "ours"

    refuse_newer(Ours, Newer)
    assert Ours().reshard() == "ours"
    version = re.escape(torch.__version__)
    with pytest.raises(NotImplementedError, match=rf"^set_all_gather_layout: .* {version} .* set_custom_all_gather"):
        Ours().set_all_gather_layout(None)
    with pytest.raises(
        composable_shard.errors.ShardConfigError, match=r"something_else: .* written for torch up to 2\.15"
    ):
        Ours().set_something_else()


@pytest.mark.parametrize(
    "name", [n for n, v in vars(fsdp.FSDPModule).items() if inspect.isfunction(v) and not n.startswith("_")]
)
def test_signatures_are_equal_to_torchs(name):
    ours, theirs = (inspect.signature(getattr(c, name)) for c in (composable_shard.FSDPModule, fsdp.FSDPModule))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


@distributed(world=1)
def test_a_slice_of_a_container_has_its_original_class(rank, world):
    class Both(nn.Sequential):
        pass

    model = fully_shard(Both(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert isinstance(model, fsdp.FSDPModule)
    assert isinstance(model, Both)
    assert type(model[:1]) is Both


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("set_requires_gradient_sync", "false", ValueError),
        ("set_requires_all_reduce", "false", ValueError),
        ("set_reshard_after_forward", 2, ValueError),
        ("set_reshard_after_backward", "no", ValueError),
        ("set_unshard_in_backward", "false", ValueError),
        ("set_is_last_backward", "false", ValueError),
        ("set_force_sum_reduction_for_comms", "false", ValueError),
        ("set_reduce_scatter_unused_params", "false", ValueError),
        ("set_gradient_divide_factor", 0, ValueError),
        ("set_gradient_divide_factor", True, ValueError),
        ("set_reduce_scatter_max_input_buffers", True, TypeError),
        ("set_reduce_scatter_max_input_buffers", 1.5, TypeError),
        ("set_reduce_scatter_max_input_buffers", 0, ValueError),
    ],
)
@distributed(world=1)
def test_errors_for_wrong_types_name_the_argument(rank, world, name, value, kind):
    model = fully_shard(nn.Linear(2, 2))
    argument = next(iter(inspect.signature(getattr(model, name)).parameters))
    with pytest.raises(kind, match=rf"\b{argument}\b.* (should|must) be|{argument}: "):
        getattr(model, name)(value)


def test_every_public_name_of_fsdp2_is_exported():
    names = [
        *["fully_shard", "FSDPModule", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx"],
        *["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims", "ShardPlacementResult"],
        *["FSDPMeshInfo", "HSDPMeshInfo", "AllGather", "ReduceScatter"],
    ]
    assert [name for name in names if not hasattr(composable_shard, name)] == []
    theirs = importlib.import_module("torch.distributed.fsdp._fully_shard")
    assert [name for name in theirs.__all__ if not hasattr(composable_shard, name)] == []
