"""`import composable_shard` exports only the public names, with the signatures of torch's FSDP2."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
import types

import pytest
import torch.distributed.fsdp as fsdp

import composable_shard

CORE_METHODS = [
    "unshard",
    "reshard",
    "set_requires_gradient_sync",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
]


def test_all_is_sorted_and_lists_every_public_name():
    exported = composable_shard.__all__
    assert exported == sorted(set(exported))
    public = {
        name
        for name in dir(composable_shard)
        if not name.startswith("_") and not isinstance(getattr(composable_shard, name), types.ModuleType)
    }
    assert public == {name for name in exported if not name.startswith("_")}


def test_no_name_is_public_in_two_places():
    spaces = ["checkpoint", "errors", "optim", "planner", "report", "testing"]
    names = [*composable_shard.__all__, *(n for s in spaces for n in getattr(composable_shard, s).__all__)]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_errors_are_public_in_one_place():
    defined = {name for name, kind in vars(composable_shard.errors).items() if isinstance(kind, type)}
    public = set(composable_shard.errors.__all__)
    assert public <= defined
    for name in defined - public:  # also torch's type for the same mistake: caught by their public base
        assert issubclass(getattr(composable_shard.errors, name), composable_shard.errors.ShardConfigError)


def test_every_exported_name_belongs_to_this_package_or_torch():
    for name in composable_shard.__all__:
        value = getattr(composable_shard, name)
        home = getattr(value, "__module__", "composable_shard")
        assert home.split(".")[0] in ("composable_shard", "torch"), f"{name} comes from {home}"


def test_subpackages_need_no_separate_import():
    names = ("checkpoint", "errors", "optim", "planner", "report", "testing", "weights")
    code = f"import composable_shard as cs; print(*(getattr(cs, name).__name__ for name in {names}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [f"composable_shard.{name}" for name in names]


def test_the_version_is_the_version_of_the_package():
    assert composable_shard.__version__ == importlib.metadata.version("composable-shard")


def test_fully_shard_has_torchs_arguments_in_torchs_order():
    ours, theirs = (inspect.signature(f).parameters for f in (composable_shard.fully_shard, fsdp.fully_shard))
    assert list(ours)[: len(theirs)] == list(theirs), "another name, or another order"
    assert all(ours[name].kind is p.kind for name, p in theirs.items())


@pytest.mark.parametrize("name", CORE_METHODS)
def test_the_core_methods_are_our_own_with_the_signatures_of_torch(name):
    ours, theirs = getattr(composable_shard.FSDPModule, name), getattr(fsdp.FSDPModule, name)
    assert ours is not theirs
    assert [(p.name, p.kind, p.default) for p in inspect.signature(ours).parameters.values()] == [
        (p.name, p.kind, p.default) for p in inspect.signature(theirs).parameters.values()
    ]


def test_importing_and_sharding_do_not_patch_torch():
    code = """
import torch, torch.distributed.fsdp, torch._functorch.partitioners as partitioners, torch._inductor.config as config
names = [
    (torch.autograd.graph, "disable_saved_tensors_hooks"),
    (partitioners, "functionalize_rng_ops"),
    (config, "post_grad_custom_post_pass"),
    (torch.distributed.fsdp, "fully_shard"),
    (torch.nn.Module, "__call__"),
    (torch.nn.Module, "_call_impl"),
]
before = [getattr(of, name) for of, name in names]
import composable_shard
composable_shard.fully_shard(torch.nn.Linear(2, 2))
assert [getattr(of, name) for of, name in names] == before
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


@pytest.mark.matrix
def test_namespaces_are_imported_on_first_use():
    code = """
import sys, composable_shard
for name in ("checkpoint", "optim", "planner", "report", "testing", "weights"):
    assert f"composable_shard.{name}" not in sys.modules
    assert name in dir(composable_shard) and name not in composable_shard.__all__
for name in ("checkpoint", "optim", "planner", "report", "testing", "weights"):
    assert getattr(composable_shard, name) is sys.modules[f"composable_shard.{name}"]
assert not hasattr(composable_shard, "full_stop")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
