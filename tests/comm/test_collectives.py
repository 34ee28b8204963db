"""Every transport gives the results of torch.distributed; on gloo, sums are bitwise identical to sums in rank order."""

from __future__ import annotations

import contextlib
import functools
import math

import pytest
import torch
import torch.distributed as dist

from _pool import distributed
from composable_shard._comm import collectives
from composable_shard._comm.collectives import (
    ALONE_FROM_BYTES,
    BROADCAST_FROM_BYTES,
    All,
    Direct,
    OfFakeGroup,
    Packed,
    Plain,
    PointToPoint,
    RankOrdered,
    transports_of,
)
from composable_shard._comm.lanes import Job, Launched
from composable_shard.planner.live import LiveBytes

ORDERED = {"rank-ordered": RankOrdered, "point-to-point": PointToPoint}
TRANSPORTS = {"packed": Packed, "direct": Direct, "torch": functools.partial(Plain, averages=False), **ORDERED}
LARGE = BROADCAST_FROM_BYTES // 4  # elements per rank, so that the whole bucket exceeds the limits


def run(handle):
    handle.wait()


def make(name):
    return TRANSPORTS[name](dist.group.WORLD)


def data(rank, numel):
    """Return the input of a rank."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def rough_data(rank, numel):
    """Return numbers whose sizes differ so much that another order of summation gives other bits."""
    exponents = torch.randint(-4, 5, (numel,), generator=torch.Generator().manual_seed(100 + rank))
    return data(rank, numel) * 10.0**exponents


def gather(transport, bucket, chunk):
    run(transport.all_gather([bucket], [chunk]))


def reduce(transport, out, bucket):
    scratch = torch.full(bucket.shape, float("nan")).to(bucket.dtype) if transport.route.sums else None
    run(transport.reduce_scatter(out, bucket, scratch))


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
    gather(make(name), bucket, chunk)
    want = [torch.empty(numel) for _ in range(world)]
    dist.all_gather(want, data(rank, numel))
    assert torch.equal(bucket.view(world, numel), torch.stack(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world=2)
def test_buckets_of_any_dtype_are_gathered(rank, world, name, dtype):
    transport = make(name)
    bucket = torch.zeros(world * 5, dtype=dtype)
    chunk = bucket.view(world, 5)[rank]
    chunk.copy_(torch.arange(5) + 10 * rank)
    gather(transport, bucket, chunk)
    assert torch.equal(bucket, torch.cat([torch.arange(5) + 10 * r for r in range(world)]).to(dtype))
    out, full = torch.zeros(5, dtype=dtype), bucket.clone()
    reduce(transport, out, full)
    assert torch.equal(out, world * bucket.view(world, 5)[rank])


@pytest.mark.parametrize("numel", [1, 7, LARGE])
@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world=(2, 4))
def test_reduce_scatter_sums_each_ranks_part(rank, world, name, numel):
    transport = make(name)
    bucket, out = data(rank, world * numel), torch.full((numel,), float("nan"))
    reduce(transport, out, bucket)
    want = data(rank, world * numel)
    dist.all_reduce(want)
    torch.testing.assert_close(out, want.view(world, numel)[rank])


@pytest.mark.parametrize("numel", [1, 2, 7, 8, LARGE + 1])
@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world=(2, 4))
def test_all_reduce_sums_on_every_rank_for_any_size(rank, world, name, numel):
    tensor = data(rank, numel)
    run(make(name).all_reduce(tensor))
    want = data(rank, numel)
    dist.all_reduce(want)
    torch.testing.assert_close(tensor, want)


@pytest.mark.parametrize("numel", [1, 257, LARGE])
@pytest.mark.parametrize("name", ORDERED)
@distributed(world=(2, 4))
def test_rank_ordered_sums_are_bitwise_identical_to_sums_in_rank_order(rank, world, name, numel):
    transport = make(name)
    brought = [rough_data(r, world * numel) for r in range(world)]
    want = ordered_sum(brought)
    bucket, out = brought[rank].clone(), torch.empty(numel)
    reduce(transport, out, bucket)
    assert torch.equal(out, want.view(world, numel)[rank])
    whole = brought[rank].clone()
    run(transport.all_reduce(whole))
    assert torch.equal(whole, want)
    if world == 4 and numel > 1:
        assert not torch.equal(want, ordered_sum(brought[::-1])), "the sum of these data does not depend on the order"


@pytest.mark.parametrize("name", ORDERED)
@distributed(world=2)
def test_a_rank_ordered_all_reduce_allocates_no_more_than_it_reduces(rank, world, name):
    tensor = data(rank, LARGE + 1)
    with LiveBytes() as counter:
        counter.note([tensor])
        run(make(name).all_reduce(tensor))
    assert tensor.nbytes < counter.peak < 2.001 * tensor.nbytes


@distributed(world=2)
def test_all_reduce_of_a_matrix_keeps_its_shape(rank, world):
    for name in TRANSPORTS:
        tensor = torch.full((3, 5), float(rank + 1))
        run(make(name).all_reduce(tensor))
        assert torch.equal(tensor, torch.full((3, 5), 3.0)), name


@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world=2)
def test_several_collectives_can_be_in_flight_and_finish_in_any_order(rank, world, name):
    transport = make(name)
    jobs, buckets = [], []
    for number in range(3):
        bucket = torch.empty(world * 4)
        chunk = bucket.view(world, 4)[rank]
        chunk.copy_(data(10 * number + rank, 4))
        buckets.append(bucket)
        jobs.append(transport.all_gather([bucket], [chunk]))
    for number in (2, 0, 1):
        jobs[number].wait()
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
        gather(transport, bucket, chunk)
        first = 2 * (rank // 2)
        assert torch.equal(bucket.view(2, numel)[:, 0], torch.tensor([first, first + 1.0]))
    tensor = torch.ones(3)
    run(transport.all_reduce(tensor))
    assert torch.equal(tensor, torch.full((3,), 2.0))


@distributed(world=2)
def test_gloo_has_rank_ordered_transports_and_the_fake_backend_has_its_own(rank, world):
    made = transports_of(dist.group.WORLD, torch.device("cpu"))
    assert {name: type(each) for name, each in made.items()} == {
        "packed": RankOrdered,
        "p2p": PointToPoint,
        "torch": Plain,
    }
    assert all(each.route.sums for name, each in made.items() if name != "torch")
    fake = dist.new_group(backend="fake")
    made = transports_of(fake, torch.device("cpu"))
    assert {name: type(each) for name, each in made.items()} == {
        "direct": OfFakeGroup,
        "packed": Packed,
        "torch": Plain,
    }
    assert not any(each.route.sums for each in made.values())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", [name for name in TRANSPORTS if name not in ("packed", "torch")])
@distributed(world=(2, 4))
def test_a_gather_of_several_tensors_fills_each_of_them(rank, world, name, in_place):
    shapes = [(3, 2), (5,), (ALONE_FROM_BYTES // 4, 1), (1, 2, 2)]
    pieces = [data(rank, math.prod(shape)).view(shape) for shape in shapes]
    if name not in ORDERED:
        pieces = [piece.view(-1) for piece in pieces]  # gloo's own collectives need flat pieces
    wholes = [torch.full((world * math.prod(shape),), float("nan")) for shape in shapes]
    if in_place:
        own = [whole.view(world, -1)[rank] for whole in wholes]
        pieces = [place.copy_(piece.view(-1)) for place, piece in zip(own, pieces, strict=True)]
    run(make(name).all_gather(wholes, pieces))
    for whole, shape in zip(wholes, shapes, strict=True):
        want = torch.cat([data(r, math.prod(shape)) for r in range(world)])
        assert torch.equal(whole, want)


class Broken:
    """A handle that fails."""

    def wait(self):
        raise RuntimeError("lost")


class Waited:
    """A handle that records that it was waited for."""

    def __init__(self):
        self.done = False

    def wait(self):
        self.done = True


def test_after_a_failure_all_other_handles_are_waited_for_and_no_step_follows():
    after, rest = Waited(), []
    with pytest.raises(RuntimeError, match="lost"):
        All([None, Broken(), after], lambda: rest.append(1)).wait()
    assert after.done
    assert not rest


class Counted:
    """A handle that counts its waits, and raises the given error, if any."""

    def __init__(self, error=None):
        self.count, self.error = 0, error

    def wait(self):
        self.count += 1
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, RuntimeError("lost"), KeyboardInterrupt()], ids=repr)
def test_each_handle_is_waited_for_once_even_after_an_error(error):
    for make_job in (lambda handle: Job(iter_of(handle), None, False), lambda handle: Launched(handle, None, None)):
        first, second, third = Counted(), Counted(error), Counted()
        job = make_job(All([first, second, third]))
        for again in range(2):
            if error is None:
                job.finish()
            else:  # clean-up code gets an error again, without a wait
                with pytest.raises(type(error) if not again else RuntimeError, match=None if not again else "lost|Int"):
                    job.finish()
        assert (first.count, second.count) == (1, 1)
        assert third.count == (0 if isinstance(error, KeyboardInterrupt) else 1), "no further waits after an interrupt"


@pytest.mark.parametrize("error", [None, RuntimeError("lost"), KeyboardInterrupt()], ids=repr)
def test_memory_of_a_collective_is_released_unless_an_interrupt_left_it_running(error):
    released = []
    for job in (
        Job(iter_of(Counted(error)), None, False, released.append),
        Launched(Counted(error), None, None, released.append),
    ):
        with contextlib.suppress(BaseException):
            job.finish()
    assert len(released) == (0 if isinstance(error, KeyboardInterrupt) else 2)


def iter_of(handle):
    yield handle


@distributed(world=2)
def test_messages_of_user_code_are_not_mixed_with_ours(rank, world):
    transport = make("point-to-point")
    bucket = torch.empty(world * LARGE)
    chunk = bucket.view(world, LARGE)[rank].fill_(rank)
    theirs = torch.full((LARGE,), 7.0 + rank)
    got = torch.empty(LARGE)
    pending = [dist.isend(theirs, 1 - rank), dist.irecv(got, 1 - rank)]
    gather(transport, bucket, chunk)
    for each in pending:
        each.wait()
    assert got.unique().tolist() == [8.0 - rank]
    assert bucket.view(world, -1)[:, 0].tolist() == [0.0, 1.0]


class OnCurrentStream:
    """A process group that runs synchronous collectives on the current stream and returns no handle for them."""

    def __init__(self):
        self.asynchronous = []

    def _called(self, *arguments):
        self.asynchronous.append(arguments[-1].asyncOp)
        return Done() if arguments[-1].asyncOp else None

    _allgather_base = allgather_into_tensor_coalesced = _reduce_scatter_base = allreduce = _called


class Done:
    def wait(self):
        return True


@pytest.mark.parametrize("kind", [Direct, Packed])
@pytest.mark.parametrize("on_lane", [False, True])
def test_collectives_on_a_lanes_stream_are_synchronous_and_may_return_none(kind, on_lane):
    group = OnCurrentStream()
    transport = kind(group, averages=True, on_lane=on_lane)
    whole, piece = torch.zeros(4), torch.zeros(2)
    run(transport.all_gather([whole], [piece]))
    run(transport.reduce_scatter(piece, whole, None, mean=True))
    run(transport.all_reduce(whole))
    assert group.asynchronous == [not on_lane] * 3


@pytest.mark.parametrize(("backend", "on_lane"), [("nccl", True), ("xccl", False)])
def test_only_nccl_runs_collectives_on_the_stream_of_a_lane(monkeypatch, backend, on_lane):
    monkeypatch.setattr(collectives, "backend_name", lambda group, device: backend)
    monkeypatch.setattr(collectives, "is_native", lambda group: True)
    made = transports_of(OnCurrentStream(), torch.device("cuda"))
    for name in ("direct", "packed"):
        run(made[name].all_reduce(torch.zeros(1)))
        assert made[name]._group.asynchronous == [not on_lane]
        made[name]._group.asynchronous.clear()
