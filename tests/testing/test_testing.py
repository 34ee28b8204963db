"""Simulated worlds: collectives give the same values as gloo, and mistakes raise an error immediately."""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import composable_shard as cs
from _models import Stack, shard_blocks, vectors
from _pool import POOL
from composable_shard import errors, testing
from composable_shard.testing import _processes


@pytest.fixture(autouse=True)
def pool_of_the_suite(monkeypatch):
    """Use the workers of the other tests instead of new ones."""
    monkeypatch.setattr(_processes, "_pool", lambda around: POOL.workers)


REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


def collectives_of_all_kinds(world):
    """The results of each type of collective. Each rank has different inputs."""
    rank, size, found = world.rank, world.size, {}

    def own(*shape):
        return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape) + 100.0 * rank

    for name, op in REDUCTIONS.items():
        tensor = own(3)
        dist.all_reduce(tensor, op)
        found[f"all_reduce {name}"] = tensor
    tensor = own(2, 2)
    dist.broadcast(tensor, src=size - 1)
    found["broadcast"] = tensor
    found["all_gather"] = [torch.empty(2) for _ in range(size)]
    dist.all_gather(found["all_gather"], own(2))
    group = dist.group.WORLD
    whole = torch.empty(size * 2)
    group._allgather_base(whole, own(2)).wait()
    found["all_gather into tensor"] = whole
    piece = torch.empty(2)
    group._reduce_scatter_base(piece, own(2 * size)).wait()
    found["reduce_scatter"] = piece
    out = torch.empty(size, 2)
    dist.all_to_all_single(out, own(size, 2))
    found["all_to_all"] = out
    counts = [(rank + other) % 2 + 1 for other in range(size)]
    out = torch.empty(sum(counts))
    dist.all_to_all_single(out, own(sum(counts)), counts, counts)
    found["all_to_all of parts"] = out
    parts = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(own(2), parts, dst=0)
    found["gather"] = parts or []
    out = torch.empty(2)
    dist.scatter(out, list(own(size, 2)) if rank == 1 else None, src=1)
    found["scatter"] = out
    tensor = own(2)
    dist.reduce(tensor, dst=1)
    found["reduce"] = tensor if rank == 1 else []
    out = torch.empty(3)
    sent = dist.isend(own(3), (rank + 1) % size)
    dist.recv(out, (rank - 1) % size)
    sent.wait()
    found["message"] = out
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    dist.barrier()
    sub = dist.new_group([0, 1])
    if rank < 2:
        tensor = own(2)
        dist.all_reduce(tensor, group=sub)
        found["in a smaller group"] = tensor
    distributed = distribute_tensor(torch.arange(5.0), world.mesh, [Shard(0)])
    found["dtensor"] = [distributed.to_local(), distributed.full_tensor(), (distributed * 2).sum().full_tensor()]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_simulated_collectives_give_the_same_values_as_gloo(size):
    ours = testing.spmd(size)(collectives_of_all_kinds)
    theirs = testing.processes(size)(collectives_of_all_kinds)
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys()
        for kind in mine:
            torch.testing.assert_close(
                mine[kind], other[kind], rtol=0, atol=0, msg=lambda m, k=kind, r=rank: f"{k} on rank {r}: {m}"
            )


def train(world):
    torch.manual_seed(5)
    model = Stack()
    shard_blocks(model, cs.fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        loss = model(*vectors(world.rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.full_tensor().detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("size", [2, 3])
def test_simulated_training_is_bitwise_identical_to_gloo(size):
    for mine, theirs in zip(testing.spmd(size)(train), testing.processes(size)(train), strict=True):
        assert mine[0] == theirs[0]
        assert all(torch.equal(mine[1][name], theirs[1][name]) for name in theirs[1])


def test_each_rank_has_its_place_in_the_mesh():
    def body(world):
        assert dist.get_rank() == world.rank
        assert dist.get_world_size() == world.size == 6
        return [world.mesh.get_local_rank(axis) for axis in ("dp", "tp")]

    assert testing.spmd(6, mesh={"dp": 2, "tp": 3})(body) == [[dp, tp] for dp in range(2) for tp in range(3)]
    assert not dist.is_initialized()


def test_the_arguments_of_a_call_are_passed_to_the_ranks():
    def body(world, number, *, factor):
        return (world.rank + number) * factor

    assert testing.spmd(2)(body, 1, factor=10) == [10, 20]


def test_each_rank_has_its_own_random_state_and_that_of_the_caller_is_restored():
    def body(world):
        found = []
        for _ in range(3):
            found.append((torch.rand(1).item(), np.random.rand(), random.random()))
            dist.barrier()  # lets the other ranks run
        if world.rank == 1:
            torch.rand(100)
        return found

    before = torch.get_rng_state(), random.getstate()
    first, second = testing.spmd(2, seed=3)(body)
    assert first == second
    assert len(set(first)) == 3
    assert testing.spmd(2, seed=3)(body) == [first, first]
    assert testing.spmd(2, seed=4)(body) != [first, first]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_an_output_that_is_read_before_its_wait_is_nan():
    def body(world):
        tensor = torch.ones(2)
        work = dist.all_reduce(tensor, async_op=True)
        early = tensor.clone()
        work.wait()
        return early.isnan().all().item(), tensor.tolist()

    assert testing.spmd(2)(body) == [(True, [2.0, 2.0])] * 2


def test_a_loop_that_polls_a_collective_ends():
    def body(world):
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            pass
        return True

    assert testing.spmd(3)(body) == [True] * 3


class NoError(Exception):
    pass


def test_an_exception_names_its_rank_and_stops_the_other_ranks():
    released = []

    def body(world):
        try:
            if world.rank == 1:
                raise NoError("this rank fails")
            dist.barrier()
        finally:
            released.append(world.rank)

    with pytest.raises(NoError, match="this rank fails") as caught:
        testing.spmd(3)(body)
    assert caught.value.__notes__ == ["raised by rank 1 of 3 in a simulated world"]
    assert caught.traceback[-1].name == "body"
    assert sorted(released) == [0, 1]  # rank 2 had not started
    assert testing.spmd(2)(lambda world: world.rank) == [0, 1]


def without_places(error):
    """The message without file names and line numbers."""
    return "\n".join(line.split(", at ")[0] for line in str(error).splitlines())


def test_a_deadlock_raises_immediately_with_the_position_of_each_rank():
    def body(world):
        if world.rank == 0:
            dist.all_reduce(torch.ones(2, 3))
        elif world.rank == 1:
            dist.recv(torch.ones(4), src=0)

    begin = time.monotonic()
    with pytest.raises(errors.DeadlockError) as caught:
        testing.spmd(3)(body)
    assert time.monotonic() - begin < 10
    assert_expected_inline(
        without_places(caught.value),
        """\
no rank can continue, because each one waits for another:
  rank 0 waits in all_reduce of float32 [2, 3] (SUM) in group 'default_pg' of ranks [0, 1, 2] (number 1 of the group)
  rank 1 waits in recv of float32 [4] from rank 0 with tag 0 in group 'default_pg' of ranks [0, 1, 2]
  rank 2 has returned""",
    )
    assert f"{__file__}:{body.__code__.co_firstlineno + 2} in body" in str(caught.value)


def test_the_error_of_a_mismatch_names_the_different_collectives():
    def body(world):
        group = world.mesh.get_group("b")
        dist.barrier()
        if world.rank == 0:
            dist.all_reduce(torch.ones(2), group=group)
        elif world.rank == 1:
            dist.broadcast(torch.ones(3), src=0, group=group)

    with pytest.raises(errors.CollectiveMismatchError) as caught:
        testing.spmd(4, mesh={"a": 2, "b": 2})(body)
    assert_expected_inline(
        str(caught.value),
        """\
collective 1 of group 'mesh_b' differs among its ranks:
  rank 0 issued all_reduce of float32 [2] (SUM) in group 'mesh_b' of ranks [0, 1]
  rank 1 issues broadcast of float32 [3] of root 0 in group 'mesh_b' of ranks [0, 1]
all ranks of a group must issue the same collectives in the same order""",
    )
    with pytest.raises(errors.CollectiveMismatchError, match=r"float32 \[2\](.|\n)*float32 \[3\]"):
        testing.spmd(2)(lambda world: dist.all_reduce(torch.ones(2 + world.rank)))


def test_a_collective_that_some_ranks_never_call_raises_even_if_no_rank_waits():
    def body(world):
        if world.rank == 0:
            dist.all_reduce(torch.ones(2), async_op=True)

    with pytest.raises(errors.CollectiveMismatchError, match=r"ranks \[0\] issued .*; ranks \[1\] have returned"):
        testing.spmd(2)(body)
    with pytest.raises(errors.CollectiveMismatchError, match="has returned without receiving send of float32"):
        testing.spmd(2)(lambda world: dist.isend(torch.ones(2), 1 - world.rank))


def test_a_rank_that_does_not_end_is_stopped_and_its_stack_is_shown():
    def spin(world):
        while world.rank == 1:
            time.sleep(0.001)

    with pytest.raises(errors.WorldTimeoutError, match=r"within 0\.3 s(.|\n)*in spin"):
        testing.spmd(2, timeout=0.3)(spin)
    assert testing.spmd(2)(lambda world: world.rank) == [0, 1]


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: testing.spmd(0), ValueError, "world_size: expected at least 1"),
        (lambda: testing.spmd(2.0), TypeError, "world_size"),
        (lambda: testing.spmd(2, device="meta"), ValueError, "device: a simulated world cannot use 'meta' here"),
        (lambda: testing.processes(-1), ValueError, "world_size"),
        (lambda: testing.spmd(4, mesh={"dp": 3}), ValueError, "product 3, but the world has 4 ranks"),
        (lambda: testing.spmd(4, mesh=(2, 2)), TypeError, "mesh"),
        (lambda: testing.spmd(2)(lambda world: testing.spmd(2)(print)), RuntimeError, "nested"),
        (lambda: testing.spmd(2)(lambda world: testing.processes(2)(print)), RuntimeError, "nested"),
        (lambda: testing.fake(2, 2).__enter__(), ValueError, "has ranks 0 to 1"),
        (lambda: testing.processes(2)(lambda world: None), ValueError, "top level of a module"),
        (lambda: testing.assert_collectives(print, gathers=1), ValueError, "gathers is not a collective"),
        (lambda: testing.trace(nn.Linear(2, 2), print), ValueError, "contains no sharded module"),
        (lambda: testing.assert_peak_bytes(nn.Linear(2, 2)), RuntimeError, "has not finished an iteration"),
    ],
)
def test_invalid_arguments_raise_an_error(call, kind, words):
    with pytest.raises(kind, match=words) as caught:
        call()
    assert isinstance(caught.value, cs.errors.ShardConfigError)


def test_an_existing_default_group_raises_an_error():
    with testing.fake(2):
        for what in (lambda: testing.spmd(2)(print), lambda: testing.fake(3).__enter__()):
            with pytest.raises(
                cs.errors.ShardConfigStateError, match=r"has a default process group already \(backend fake"
            ):
                what()
        assert dist.get_world_size() == 2


def test_a_fake_world_has_the_shapes_of_its_size_and_is_destroyed_at_the_end():
    hook = sys.excepthook

    def fail():
        with testing.fake(512, rank=3, mesh={"copies": 2, "shards": 256}) as world:
            layer = cs.fully_shard(nn.Linear(64, 1000), mesh=world.mesh)
            assert layer.weight.to_local().shape == (4, 64)
            layer(torch.ones(2, 64)).sum().backward()
            assert isinstance(layer.weight.grad, DTensor)
            assert testing.assert_peak_bytes(layer) >= 64 * 1000 * 4
            raise NoError

    with pytest.raises(NoError):
        fail()
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def shard_by_mesh(layer, mesh):
    shard_blocks(layer, cs.fully_shard, mesh=mesh)


def return_rank_and_fail(world, failing):
    if world.rank == failing:
        raise NoError("this rank fails")
    return world.rank, list(world.mesh.mesh_dim_names)


def hang(world):
    while True:
        time.sleep(0.01)


def test_processes_return_values_and_name_the_rank_that_fails():
    run = testing.processes(2, mesh={"a": 1, "b": 2})
    assert run(return_rank_and_fail, None) == [(0, ["a", "b"]), (1, ["a", "b"])]
    with pytest.raises(errors.RankFailedError, match=r"^rank 1 of 2 failed first(.|\n)*NoError: this rank fails"):
        run(return_rank_and_fail, failing=1)
    assert run(return_rank_and_fail, failing=None) == [(0, ["a", "b"]), (1, ["a", "b"])]


def polling_threads(world):
    """Create another group, and count the polling threads of this worker."""
    everybodys = [None] * world.size
    dist.all_gather_object(everybodys, world.rank, dist.new_group(list(range(world.size))))
    assert everybodys == list(range(world.size))
    return sum(name.read_text() == "gloo_tcp_loop\n" for name in Path("/proc/self/task").glob("*/comm"))


def test_a_worker_has_one_polling_thread_for_all_process_groups():
    for size in (2, 3, 2):
        assert max(testing.processes(size)(polling_threads)) <= 1  # in torch 2.11 the thread has no name


def crash_with_a_worker(folder):
    """Start a worker and exit without closing it. Runs in a forked process."""
    pid = _processes.Worker(0, folder).process.pid
    (folder / "pid").write_text(str(pid))
    os._exit(1)


def test_workers_end_when_their_parent_crashes(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns about forks in a process with threads
        parent = os.fork()
        if parent == 0:
            crash_with_a_worker(tmp_path)
    os.waitpid(parent, 0)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"worker {pid} is still running")
