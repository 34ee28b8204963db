"""Each shim for a private name of torch.distributed does what its docstring specifies, with the installed torch."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from _engines import mesh_of
from _pool import distributed
from composable_shard._torch import distributed as _torch_distributed


@distributed(world=2)
def test_a_dtensor_can_be_made_like_another(rank, world):
    local = torch.full((2, 3), float(rank))
    reference = nn.Parameter(DTensor.from_local(local, mesh_of(2), [Shard(0)], shape=(3, 3), stride=(3, 1)))
    assert _torch_distributed.local_tensor(reference).data_ptr() == local.data_ptr()
    assert not _torch_distributed.local_tensor(reference).requires_grad
    made = _torch_distributed.dtensor_like(reference, local + 1)
    assert isinstance(made, DTensor)
    assert not made.requires_grad
    assert (made.shape, made.placements, made.device_mesh) == ((3, 3), (Shard(0),), reference.device_mesh)
    assert torch.equal(made.to_local(), local + 1)
    reference.grad = made


def test_a_dtensor_is_made_on_the_device_of_its_local_tensor():
    mesh = DeviceMesh("cuda", torch.arange(1), _init_backend=False, _rank=0)  # needs no such device
    local = torch.arange(6.0).view(2, 3)
    made = _torch_distributed.dtensor_at(local, mesh, [Shard(0)], torch.empty(3, 3, device="meta"))
    assert (made.shape, made.stride(), made.placements) == ((3, 3), (3, 1), (Shard(0),))
    assert _torch_distributed.local_tensor(made).data_ptr() == local.data_ptr()


@distributed(world=2)
def test_the_backend_name_of_a_group_is_lower_case(rank, world):
    assert _torch_distributed.backend_name(dist.group.WORLD, torch.device("cpu")) == "gloo"


@distributed(world=2)
def test_collectives_with_our_options_are_asynchronous_and_correct(rank, world):
    group = dist.group.WORLD
    total = torch.full((2,), float(rank))
    group.allreduce([total], _torch_distributed.all_reduce_options(dist.ReduceOp.MAX)).wait()
    assert torch.equal(total, torch.ones(2))
    sent = torch.full((2,), float(rank))
    group.broadcast([sent], _torch_distributed.broadcast_options(1)).wait()
    assert torch.equal(sent, torch.ones(2))
    gathered = torch.empty(4)
    group._allgather_base(gathered, torch.full((2,), float(rank)), _torch_distributed.all_gather_options()).wait()
    assert gathered.tolist() == [0, 0, 1, 1]
    part = torch.empty(1)
    options = _torch_distributed.reduce_scatter_options(dist.ReduceOp.SUM)
    group._reduce_scatter_base(part, torch.tensor([1.0, 2.0]), options).wait()
    assert part.tolist() == [2.0 * (rank + 1)]
    swapped = torch.empty(2)
    group.alltoall_base(
        swapped, torch.tensor([0.0, 1.0]) + 10 * rank, [], [], _torch_distributed.all_to_all_options()
    ).wait()
    assert swapped.tolist() == [rank, 10.0 + rank]


def test_a_launcher_is_detected_by_all_of_its_variables(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "1")
    assert _torch_distributed.launched()
    for name in names:
        with monkeypatch.context() as without:
            without.delenv(name)
            assert not _torch_distributed.launched()
