"""Boxes of tensors on ranks, owners of matrices, and buckets of matrices."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import composable_shard as cs
from _pool import simulated
from composable_shard import testing
from composable_shard._torch.distributed import strided_shard
from composable_shard.optim._layout import layout_of
from composable_shard.planner.live import LiveBytes
from optim._single import Net, sharded

PLACEMENTS = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (strided_shard(0, 2), Shard(0)),
    (strided_shard(1, 2), Shard(1)),
]


@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (3, 9), (1, 6)], ids=str)
@simulated(world=4)
def test_the_boxes_of_a_tensor_match_the_shards_of_its_ranks(rank, world, shape):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for placements in PLACEMENTS:
        if placements[0] == strided_shard(0, 2):  # the placements of a tensor-parallel parameter after fully_shard
            cut = distribute_tensor(whole, mesh["tp"], [placements[1]]).to_local()
            local = distribute_tensor(cut.contiguous(), mesh["dp"], [Shard(0)]).to_local()
            tensor = DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
        elif placements[0] == strided_shard(1, 2):
            continue
        else:
            tensor = distribute_tensor(whole, mesh, placements)
        layout = layout_of("param", tensor)
        assert torch.equal(whole[layout.own.slices(layout.own.__class__((0, 0), shape))], tensor.to_local())
        held = sum(box.numel for box in layout.boxes)
        assert held == whole.numel()
        assert len(layout.boxes) == (4 if Replicate() not in placements else 2)


@simulated(world=2)
def test_parameters_in_separate_parts_are_refused(rank, world):
    """As Transformers splits fused projections: a rank holds rows of each of them."""
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.zeros(4, 3), mesh, [strided_shard(0, 2)], shape=(8, 3), stride=(3, 1))
    with pytest.raises(cs.errors.ShardConfigUnsupportedError, match=r"parameter fused: .*each rank holds 2 separate"):
        layout_of("fused", tensor)


def owners_of(optimizer):
    """The owner of each matrix, by name."""
    return {matrix.name: matrix.route.owner for bucket in optimizer._buckets for matrix in bucket.matrices}


@simulated(world=4)
def test_owners_are_equal_on_all_ranks_and_balance_the_cost(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(10)], nn.Linear(16, 64, bias=False))
    for layer in model:
        cs.fully_shard(layer)
    optimizer = cs.optim.owned(torch.optim.Muon, model)
    owners = owners_of(optimizer)
    everybodys = [None] * world
    dist.all_gather_object(everybodys, owners)
    assert everybodys == [owners] * world
    loads = [0] * world
    for name, owner in owners.items():
        loads[owner] += 4 if name.startswith("10.") else 1
    assert sorted(loads) == [3, 3, 4, 4]


@simulated(world=3)
def test_a_matrix_on_one_rank_is_owned_by_it(rank, world):
    torch.manual_seed(0)
    model = Net()
    sharded(model)
    experts = [(name, param) for name, param in model.named_parameters() if param.ndim == 3]
    optimizer = cs.optim.owned(torch.optim.Muon, experts)
    assert [*owners_of(optimizer).values()] == [0, 1, 2, 0, 1, 2]
    for _, param in experts:
        param.grad = param.detach().clone()
    optimizer.step()
    assert optimizer.sent_bytes == 0


def test_a_step_needs_the_memory_of_a_few_buckets_whatever_their_number():
    """Peaks are in units of one matrix. Each rank owns one matrix per bucket."""
    peaks = {}
    with testing.fake(8):
        for count in (8, 16, 24, 64):
            model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(count)])
            cs.fully_shard(model)
            optimizer = cs.optim.owned(torch.optim.SGD, model, lr=0.1, bucket_bytes=64 * 64 * 4)
            for param in model.parameters():
                param.grad = param.detach().clone()
            optimizer.step()
            with LiveBytes() as live:
                optimizer.step()
            shards = 2 * count / 8  # values and gradients, which always exist
            peaks[count] = live.peak / (64 * 64 * 4) - shards
    assert peaks[8] <= 4.1  # value and gradient, each as received and assembled
    assert peaks[16] <= 7.1
    assert peaks[24] <= 8.1
    assert peaks[64] == pytest.approx(peaks[24], abs=0.01)


def test_a_bucket_is_communicated_during_the_step_of_the_previous_one():
    with testing.fabric(4, latency_s=1e-3, bandwidth_Bps=1e9, clock="virtual") as net:

        class Slow(torch.optim.SGD):
            def step(self, closure=None):
                net.compute(10e-3)

        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(16)])
        cs.fully_shard(model)
        optimizer = cs.optim.owned(Slow, model, lr=0.1, bucket_bytes=64 * 64 * 4)
        for param in model.parameters():
            param.grad = param.detach().clone()
        net.reset()
        optimizer.step()
        events = [event for event in net.events if event.kind == "all_to_all"]
        assert len(events) == 8  # to owners and back, four buckets
        exposed = [event.exposed_s for event in events]
        assert exposed.count(0.0) == 6  # all except the first transfer to owners and the last one back
        assert net.now() < 4 * 10e-3 + 3e-3
