"""Every transport gives what torch.distributed gives; on gloo, sums run in the order of the ranks, to the bit."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import composable_shard
from _pool import distributed
from composable_shard import _transports
from composable_shard._collectives import BROADCAST_FROM_BYTES, Native, RankOrdered, transport_for
from composable_shard._streams import Lane

TRANSPORTS = {"native": functools.partial(Native, averages=False), "rank-ordered": RankOrdered}
LARGE = BROADCAST_FROM_BYTES // 4  # elements a rank: the whole bucket is then beyond the limit


def run(steps):
    return Lane().start(steps).finish()


def make(name):
    return TRANSPORTS[name](dist.group.WORLD)


def data(rank, numel):
    """What a rank brings."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def rough_data(rank, numel):
    """Sizes that differ so much that another order of summing gives other bits."""
    exponents = torch.randint(-4, 5, (numel,), generator=torch.Generator().manual_seed(100 + rank))
    return data(rank, numel) * 10.0**exponents


def scratch_for(transport, bucket):
    return torch.full_like(bucket, float("nan")) if transport.needs_scratch else None


def ordered_sum(tensors):
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


@pytest.mark.parametrize("numel", [1, 7, LARGE])
@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world=(2, 4))
def test_all_gather_fills_the_bucket_with_every_ranks_chunk(rank, world, name, numel):
    bucket = torch.full((world * numel,), float("nan"))
    chunk = bucket.view(world, numel)[rank]
    chunk.copy_(data(rank, numel))
    run(make(name).all_gather(bucket, chunk))
    want = [torch.empty(numel) for _ in range(world)]
    dist.all_gather(want, data(rank, numel))
    assert torch.equal(bucket.view(world, numel), torch.stack(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world=2)
def test_buckets_of_any_dtype_are_moved(rank, world, name, dtype):
    transport = make(name)
    bucket = torch.zeros(world * 5, dtype=dtype)
    chunk = bucket.view(world, 5)[rank]
    chunk.copy_(torch.arange(5) + 10 * rank)
    run(transport.all_gather(bucket, chunk))
    assert torch.equal(bucket, torch.cat([torch.arange(5) + 10 * r for r in range(world)]).to(dtype))
    out, full = torch.zeros(5, dtype=dtype), bucket.clone()
    run(transport.reduce_scatter(out, full, torch.zeros_like(full) if transport.needs_scratch else None))
    assert torch.equal(out, world * bucket.view(world, 5)[rank])


@pytest.mark.parametrize("numel", [1, 7, LARGE])
@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world=(2, 4))
def test_reduce_scatter_gives_each_rank_the_sum_of_its_part(rank, world, name, numel):
    transport = make(name)
    bucket, out = data(rank, world * numel), torch.full((numel,), float("nan"))
    run(transport.reduce_scatter(out, bucket, scratch_for(transport, bucket)))
    want = data(rank, world * numel)
    dist.all_reduce(want)
    torch.testing.assert_close(out, want.view(world, numel)[rank])


@pytest.mark.parametrize("numel", [1, 2, 7, 8, LARGE + 1])
@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world=(2, 4))
def test_all_reduce_gives_every_rank_the_sum_also_where_ranks_do_not_divide_it(rank, world, name, numel):
    tensor = data(rank, numel)
    run(make(name).all_reduce(tensor))
    want = data(rank, numel)
    dist.all_reduce(want)
    torch.testing.assert_close(tensor, want)


@pytest.mark.parametrize("numel", [1, 257, LARGE])
@distributed(world=(2, 4))
def test_rank_ordered_sums_run_in_the_order_of_the_ranks_to_the_bit(rank, world, numel):
    transport = make("rank-ordered")
    brought = [rough_data(r, world * numel) for r in range(world)]
    want = ordered_sum(brought)
    bucket, out = brought[rank].clone(), torch.empty(numel)
    run(transport.reduce_scatter(out, bucket, torch.empty_like(bucket)))
    assert torch.equal(out, want.view(world, numel)[rank])
    whole = brought[rank].clone()
    run(transport.all_reduce(whole))
    assert torch.equal(whole, want)
    if world == 4 and numel > 1:
        assert not torch.equal(want, ordered_sum(brought[::-1])), "these data cannot tell one order from another"


@distributed(world=2)
def test_all_reduce_of_a_matrix_keeps_its_shape(rank, world):
    for name in TRANSPORTS:
        tensor = torch.full((3, 5), float(rank + 1))
        run(make(name).all_reduce(tensor))
        assert torch.equal(tensor, torch.full((3, 5), 3.0)), name


@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world=2)
def test_several_collectives_can_be_in_flight_and_be_finished_in_another_order(rank, world, name):
    transport = make(name)
    lane, jobs, buckets = Lane(), [], []
    for number in range(3):
        bucket = torch.empty(world * 4)
        chunk = bucket.view(world, 4)[rank]
        chunk.copy_(data(10 * number + rank, 4))
        buckets.append(bucket)
        jobs.append(lane.start(transport.all_gather(bucket, chunk)))
    for number in (2, 0, 1):
        jobs[number].finish()
        want = torch.cat([data(10 * number + r, 4) for r in range(world)])
        assert torch.equal(buckets[number], want)


@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world=4)
def test_transports_work_within_a_group_of_some_ranks(rank, world, name):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    transport = TRANSPORTS[name](halves[rank // 2])
    for numel in (3, LARGE):
        bucket = torch.empty(2 * numel)
        chunk = bucket.view(2, numel)[rank % 2]
        chunk.fill_(rank)
        run(transport.all_gather(bucket, chunk))
        first = 2 * (rank // 2)
        assert torch.equal(bucket.view(2, numel)[:, 0], torch.tensor([first, first + 1.0]))
    tensor = torch.ones(3)
    run(transport.all_reduce(tensor))
    assert torch.equal(tensor, torch.full((3,), 2.0))


@distributed(world=2)
def test_gloo_gets_rank_ordered_sums_and_says_so(rank, world):
    transport = transport_for(dist.group.WORLD, torch.device("cpu"))
    assert isinstance(transport, RankOrdered)
    assert "rank order" in transport.name
    assert transport.needs_scratch
    assert not Native.needs_scratch


@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world=(2, 4))
def test_all_gather_each_fills_every_whole_with_its_pieces(rank, world, name):
    shapes = [(3, 2), (5,), (1, 2, 2)]
    pieces = [data(rank, math.prod(shape)).view(shape) for shape in shapes]
    wholes = [torch.full((world * shape[0], *shape[1:]), float("nan")) for shape in shapes]
    run(make(name).all_gather_each(wholes, pieces))
    for whole, shape in zip(wholes, shapes, strict=True):
        want = torch.cat([data(r, math.prod(shape)).view(shape) for r in range(world)])
        assert torch.equal(whole, want)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@distributed(world=2)
def test_direct_gathers_train_to_the_same_bits_as_packed_ones(rank, world, param_dtype):
    """Even parameters that are not cast go straight into their places; the others are packed as on gloo."""
    policy = composable_shard.MixedPrecisionPolicy(param_dtype=param_dtype)
    models = {}
    for name, choose in {
        "packed": _transports.transport_for,
        "direct": lambda g, *_: Native(g, averages=False),
    }.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3))
        for child in model:
            composable_shard.fully_shard(child, mp_policy=policy)
        composable_shard.fully_shard(model, mp_policy=policy)
        kept, _transports.transport_for = _transports.transport_for, choose
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                model(data(rank + 2 * step, 20).view(5, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            _transports.transport_for = kept
        record, plan = composable_shard.last_record(model), composable_shard.make_plan(model)
        assert record.live_bytes == plan.live_bytes(), name
        models[name] = model, plan
    assert models["direct"][1].peak_bytes <= models["packed"][1].peak_bytes
    assert ("direct" in str(models["direct"][1])) == (param_dtype is None)
    for (n, p), q in zip(models["packed"][0].named_parameters(), models["direct"][0].parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor()), n
