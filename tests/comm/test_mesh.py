"""The runtime's description of a mesh: axes, ranks, device, text."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor.placement_types import Replicate, Shard

from _engines import mesh_of
from _pool import distributed
from composable_shard import fully_shard
from composable_shard._comm.mesh import (
    compute_device,
    default_device_type,
    default_mesh,
    ensure_process_group,
    mesh_info,
    replicated_mesh,
)
from composable_shard.errors import ShardConfigValueError


@distributed(world=(1, 2))
def test_a_mesh_of_one_axis_shards_over_it(rank, world):
    info = mesh_info(mesh_of(world))
    assert (info.shard_size, info.shard_rank, info.replicate_size, info.size) == (world, rank, 1, world)
    assert info.shard_group.size() == world
    assert info.replicate_group is None
    assert info.placements(0) == (Shard(0),)
    assert info.device == torch.device("cpu")
    assert str(info) == f"shard over {world}"


@distributed(world=4)
def test_a_mesh_of_two_axes_replicates_over_the_first_and_shards_over_the_second(rank, world):
    info = mesh_info(mesh_of(2, 2))
    assert (info.shard_size, info.shard_rank, info.replicate_size, info.size) == (2, rank % 2, 2, 4)
    assert dist.get_process_group_ranks(info.shard_group) == [2 * (rank // 2), 2 * (rank // 2) + 1]
    assert dist.get_process_group_ranks(info.replicate_group) == [rank % 2, rank % 2 + 2]
    assert info.placements(0) == (Replicate(), Shard(0))
    assert str(info) == "replicate over 2, shard over 2"


@distributed(world=4)
def test_a_submesh_of_a_larger_mesh_is_read_like_any_other(rank, world):
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    info = mesh_info(whole["dp"])
    assert (info.shard_size, info.shard_rank) == (2, rank // 2)
    assert dist.get_process_group_ranks(info.shard_group) == [rank % 2, rank % 2 + 2]


@distributed(world=2)
def test_mesh_info_is_frozen(rank, world):
    with pytest.raises(dataclasses.FrozenInstanceError):
        mesh_info(mesh_of(2)).shard_rank = 5


@distributed(world=2)
def test_the_default_mesh_is_one_axis_over_all_ranks(rank, world):
    mesh = default_mesh()
    assert mesh == default_mesh()
    assert mesh.get_group() is dist.group.WORLD
    assert mesh.mesh.tolist() == [0, 1]
    assert mesh.mesh_dim_names is None, "unnamed as in torch: PEFT depends on it"
    assert mesh.device_type == default_device_type()


@distributed(world=2)
def test_the_default_mesh_is_that_of_fsdp2_and_equals_the_users_own(rank, world):
    for shard in (fsdp2, fully_shard):
        torch.manual_seed(0)
        one, two, three = (nn.Linear(4, 4) for _ in range(3))
        shard(one)
        shard(two, mesh=init_device_mesh("cpu", (world,)))
        fsdp2(three)
        assert one.weight.device_mesh == two.weight.device_mesh == three.weight.device_mesh
        assert one.weight.device_mesh.mesh_dim_names is None
        mixed = (one.weight + two.weight - three.weight).full_tensor()
        torch.manual_seed(0)
        first, second, third = (nn.Linear(4, 4) for _ in range(3))
        assert torch.equal(mixed, first.weight + second.weight - third.weight)
        two(one(torch.ones(1, 4))).sum().backward()
        second(first(torch.ones(1, 4))).sum().backward()
        norm = nn.utils.clip_grad_norm_([*one.parameters(), *two.parameters()], 1.0).full_tensor()
        want = nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)
        torch.testing.assert_close(norm, want)


@distributed(world=2)
def test_a_users_mesh_of_one_axis_may_have_any_name_and_keeps_it(rank, world):
    for name in ("shard", "fsdp", "anything"):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=(name,))
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        model(torch.ones(1, 4)).sum().backward()
        assert model.weight.device_mesh == mesh == model.weight.grad.device_mesh


@pytest.mark.parametrize(("replicas", "shape"), [(1, (1, 4)), (2, (2, 2)), (4, (4, 1))])
@distributed(world=4)
def test_a_replicated_mesh_has_the_requested_number_of_replicas(rank, world, replicas, shape):
    mesh = replicated_mesh(replicas)
    assert tuple(mesh.shape) == shape
    assert mesh.mesh_dim_names == ("replicate", "shard")


@pytest.mark.parametrize("replicas", [0, -1, 3, 8, 2.0, "2", None])
@distributed(world=4)
def test_a_number_of_replicas_that_does_not_divide_the_world_size_is_an_error(rank, world, replicas):
    with pytest.raises(ShardConfigValueError) as caught:
        replicated_mesh(replicas)
    assert repr(replicas) in str(caught.value)
    assert "4" in str(caught.value)


@distributed(world=2)
def test_an_initialised_process_group_is_kept(rank, world):
    group = dist.group.WORLD
    ensure_process_group()
    assert dist.group.WORLD is group


def test_without_a_launcher_the_world_size_is_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not dist.is_initialized()
    try:
        assert mesh_info(default_mesh()).shard_size == 1
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
        dist.destroy_process_group()
        assert default_mesh().get_group() is dist.group.WORLD, "the mesh has a process group that was destroyed"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_devices_without_an_index_are_named_by_their_type(device_type):
    assert compute_device(device_type) == torch.device(device_type)


@pytest.mark.parametrize(("available", "expected"), [(True, "cuda"), (False, "cpu")])
def test_the_default_is_an_accelerator_only_if_the_machine_has_one(monkeypatch, available, expected):
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert default_device_type() == expected


def test_mps_is_not_the_default_because_torch_has_no_collectives_for_it(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert default_device_type() == "cpu"


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator, whose devices have an index")
def test_the_device_of_an_accelerator_has_an_index():
    kind = torch.accelerator.current_accelerator().type
    assert compute_device(kind).index == torch.accelerator.current_device_index()
