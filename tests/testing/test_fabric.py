"""The fabric: the model of a link, results of collectives, the three clocks, entering and leaving."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import _mesh_resources, init_device_mesh

import composable_shard as cs
from _nets import BANDWIDTH, EXACT, LATENCY, net
from composable_shard.testing import Busy, fabric
from composable_shard.testing._links import Link, Timeline, network

steadily = settings(deadline=None, derandomize=True)
seconds = st.floats(0, 1e3)


# ---- the model of a link


@steadily
@given(st.sampled_from(["all_gather", "reduce_scatter"]), st.integers(0, 10**12), st.integers(2, 512))
def test_gathers_and_scatters_take_the_latency_and_the_transfer_of_other_ranks_parts(kind, nbytes, ranks):
    link = Link("all", LATENCY, BANDWIDTH)
    took = link.seconds(kind, nbytes, ranks)
    assert math.isclose(took, LATENCY + (ranks - 1) / ranks * nbytes / BANDWIDTH, rel_tol=1e-12)
    assert link.seconds("all_reduce", nbytes, ranks) == 2 * took
    assert took <= link.seconds("broadcast", nbytes, ranks)
    assert link.seconds(kind, nbytes, 1) == 0


@steadily
@given(st.lists(st.tuples(seconds, seconds), max_size=30))
def test_a_link_runs_one_collective_at_a_time_in_the_order_of_issue(given):
    line = Timeline()
    spans = [line.put(issue, took) for issue, took in given]
    free = -math.inf
    for (issue, took), (start, finish) in zip(given, spans, strict=True):
        assert start == max(issue, free)
        assert finish == start + took
        free = finish


@steadily
@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_a_group_that_spans_nodes_uses_the_link_between_nodes(nodes, per_node, data):
    world = nodes * per_node
    of = network(world, 1e-6, 1e11, per_node, 1e-5, 1e10)
    ranks = data.draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))
    spans = len({rank // per_node for rank in ranks}) > 1
    assert of.link_of(ranks).name == ("inter" if spans else "intra")


NODES = {"ranks_per_node": 2, "inter_latency_s": 1e-5, "inter_bandwidth_Bps": 1e9}
BAD = [
    ("world_size", {"world": 0}),
    ("world_size", {"world": -2}),
    ("world_size", {"world": 2.0}),
    ("latency_s", {"latency_s": 0}),
    ("latency_s", {"latency_s": -1e-6}),
    ("latency_s", {"latency_s": math.nan}),
    ("bandwidth_Bps", {"bandwidth_Bps": 0.0}),
    ("bandwidth_Bps", {"bandwidth_Bps": math.inf}),
    ("bandwidth_Bps", {"bandwidth_Bps": "1e9"}),
    ("ranks_per_node", NODES | {"ranks_per_node": 3}),
    ("ranks_per_node", NODES | {"ranks_per_node": 0}),
    ("inter_latency_s", NODES | {"inter_latency_s": -1.0}),
    ("inter_bandwidth_Bps", NODES | {"inter_bandwidth_Bps": math.nan}),
    ("inter_latency_s", NODES | {"inter_latency_s": None}),
    ("inter_bandwidth_Bps", {"inter_bandwidth_Bps": 1e9}),
    ("rank", {"rank": 4}),
    ("rank", {"rank": "0"}),
    ("clock", {"clock": "wall"}),
]


@pytest.mark.parametrize(("name", "given"), BAD, ids=lambda value: str(value))
def test_an_invalid_argument_raises_an_error_with_its_name(name, given):
    with pytest.raises((cs.errors.ShardConfigValueError, cs.errors.ShardConfigTypeError), match=f"^{name}: "):
        net(**given)


# ---- results of collectives


@pytest.mark.parametrize("given", EXACT, ids=str)
@pytest.mark.parametrize("rank", [0, 2])
def test_collectives_have_the_results_of_identical_ranks(rank, given):
    own, whole = torch.tensor([1.0, 2.0]), torch.arange(8.0)
    with net(rank=rank, **given):
        group = dist.group.WORLD
        gathered, part, exchanged = torch.empty(8), torch.empty(2), torch.empty(8)
        group._allgather_base(gathered, own).wait()
        assert gathered.tolist() == [1, 2] * 4
        group._reduce_scatter_base(part, whole, dist.ReduceScatterOptions()).wait()
        assert torch.equal(part, 4 * whole[2 * rank : 2 * rank + 2])
        dist.all_to_all_single(exchanged, whole)
        assert torch.equal(exchanged, whole[2 * rank : 2 * rank + 2].repeat(4))
        lists = [torch.empty(2) for _ in range(4)]
        dist.all_gather(lists, own)
        assert torch.equal(torch.stack(lists), own.repeat(4, 1))
        for op, expected in [("SUM", 12), ("AVG", 3), ("MAX", 3), ("MIN", 3), ("PRODUCT", 81)]:
            value = torch.tensor(3.0)
            dist.all_reduce(value, getattr(dist.ReduceOp, op))
            assert value.item() == expected, op
        value = own.clone()
        dist.broadcast(value, src=1)
        assert torch.equal(value, own)
        dist.send(value, 1)
        dist.recv(value, 1)
        assert value.tolist() == [0, 0]
        dist.barrier()
        objects = [None] * 4
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": rank}] * 4


def test_an_all_gather_can_write_to_the_memory_of_its_input():
    with net(rank=1, clock="virtual"):
        whole = torch.full((8,), torch.nan)
        whole[2:4] = torch.tensor([5.0, 6.0])
        dist.group.WORLD._allgather_base(whole, whole[2:4]).wait()
    assert whole.tolist() == [5, 6] * 4


def test_an_all_to_all_with_unequal_parts_pads_with_zeros():
    with net(2, clock="virtual"):
        out = torch.full((5,), torch.nan)
        dist.all_to_all_single(out, torch.arange(3.0), [4, 1], [2, 1])
    assert out.tolist() == [0, 1, 0, 0, 0]


def test_coalesced_collectives_count_as_one_collective_with_all_their_bytes():
    with net(clock="virtual") as sim:
        outs, ins = [torch.empty(8), torch.empty(4)], [torch.ones(2), torch.ones(1)]
        dist.group.WORLD.allgather_into_tensor_coalesced(outs, ins).wait()
        (event,) = sim.events
        assert (event.kind, event.nbytes) == ("all_gather", 48)
        with dist._coalescing_manager(async_ops=True) as together:
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1))
        together.wait()
        assert sim.now() == max(event.finish_s for event in sim.events)


def test_functional_collectives_work():
    ops = torch.ops._c10d_functional
    with net(clock="virtual") as sim:
        name = dist.group.WORLD.group_name
        whole = ops.wait_tensor(ops.all_gather_into_tensor(torch.ones(2), 4, name))
        part = ops.wait_tensor(ops.reduce_scatter_tensor(whole, "sum", 4, name))
        total = ops.wait_tensor(ops.all_reduce(part, "avg", name))
        kinds = [event.kind for event in sim.events]
        assert sim.now() == sim.events[-1].finish_s
    assert total.tolist() == [4, 4]
    assert kinds == ["all_gather", "reduce_scatter", "all_reduce"]


def test_wrong_sizes_and_unsupported_reductions_raise_an_error():
    with net(clock="virtual"):
        with pytest.raises(cs.errors.ShardConfigValueError, match=r"4 pieces of \(2,\) do not fit \(7,\)"):
            dist.group.WORLD._allgather_base(torch.empty(7), torch.empty(2))
        with pytest.raises(cs.errors.ShardConfigValueError, match=r"reduction .*BXOR.*: not available"):
            dist.all_reduce(torch.ones(1, dtype=torch.int64), dist.ReduceOp.BXOR)


# ---- the clocks


def test_declared_compute_hides_a_gather_on_a_virtual_clock():
    with net(clock="virtual") as sim:
        group = dist.group.WORLD
        works = [group._allgather_base(torch.empty(count), torch.empty(count // 4)) for count in (4_000, 8_000)]
        sim.compute(10e-6)
        works[0].wait()
        assert not works[1].is_completed()
        sim.compute(100e-6)
        assert works[1].is_completed()
        works[1].wait()
        dist.all_reduce(torch.empty(1_000))
        assert_expected_inline(
            sim.log(),
            """\
kind        group       ranks  link   bytes    issue    start   finish     wait  exposed
all_gather  default_pg      4  all   16,000    0.000    0.000   22.000   10.000   12.000
all_gather  default_pg      4  all   32,000    0.000   22.000   56.000  122.000    0.000
all_reduce  default_pg      4  all    4,000  122.000  122.000  148.000  122.000   26.000""",
        )
        assert math.isclose(sim.exposed_s, 38e-6)
        assert math.isclose(sim.now(), 148e-6)
        sim.reset()
        assert (sim.events, sim.exposed_s, sim.now()) == ([], 0, 0)


def test_each_group_uses_its_link_and_two_links_run_concurrently():
    nodes = {"ranks_per_node": 2, "inter_latency_s": 40e-6, "inter_bandwidth_Bps": 1e8}
    with net(clock="virtual", **nodes) as sim:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        inside, across = (mesh[name].get_group() for name in ("shard", "replicate"))
        for group in (inside, across, inside):
            group._allgather_base(torch.empty(2_000), torch.empty(1_000))
        dist.all_reduce(torch.empty(1_000))
        assert_expected_inline(
            sim.log(),
            """\
kind        group           ranks  link   bytes  issue   start   finish   wait  exposed
all_gather  mesh_shard          2  intra  8,000  0.000   0.000   14.000      -    0.000
all_gather  mesh_replicate      2  inter  8,000  0.000   0.000   80.000      -    0.000
all_gather  mesh_shard          2  intra  8,000  0.000  14.000   28.000      -    0.000
all_reduce  default_pg          4  inter  4,000  0.000  80.000  220.000  0.000  220.000""",
        )


def test_with_streams_a_wait_delays_only_its_stream_and_only_waits_of_compute_are_exposed():
    with net(clock="streams") as sim:
        comms = torch.cpu.Stream()
        sim.compute(5e-6)
        comms.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(comms):
            dist.all_reduce(torch.empty(1_000))  # this stream waits
            done = comms.record_event()
        assert math.isclose(sim.now(), 5e-6)
        sim.compute(6e-6)
        torch.cpu.current_stream().wait_event(done)
        assert_expected_inline(
            sim.log(),
            """\
kind        group       ranks  link  bytes  issue  start  finish   wait  exposed
all_reduce  default_pg      4  all   4,000  5.000  5.000  31.000  5.000   20.000""",
        )


def test_after_a_reset_all_streams_start_at_zero():
    with net(clock="streams") as sim:
        ahead = torch.cpu.Stream()
        with torch.cpu.stream(ahead):
            sim.compute(1e-3)
        sim.reset()
        assert sim.now() == 0
        with torch.cpu.stream(ahead):
            assert sim.now() == 0
        dist.all_reduce(torch.empty(1_000))
        assert math.isclose(sim.now(), 26e-6)


def test_a_wait_on_a_real_clock_takes_the_modelled_time():
    with fabric(2, latency_s=0.05, bandwidth_Bps=1e9) as sim:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert not work.is_completed()
        begin = time.monotonic()
        work.wait()
        took = time.monotonic() - begin
        (event,) = sim.events
        assert work.is_completed()
        assert event.finish_s - event.issue_s > 0.1  # an all-reduce has the latency twice
        assert event.issue_s <= event.first_wait_s < event.finish_s <= sim.now()
        assert 0 < event.exposed_s <= took  # the wait slept
        assert math.isclose(event.exposed_s, event.finish_s - event.first_wait_s, abs_tol=1e-3)


def test_a_real_clock_subtracts_the_delay_of_a_late_sleep(monkeypatch):
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds + 0.05))
    with fabric(2, latency_s=0.01, bandwidth_Bps=1e9) as sim:
        dist.broadcast(torch.ones(1), 0)
        (event,) = sim.events
        assert sim.aside_s >= 0.04
        assert event.exposed_s <= 0.011


def test_compute_on_a_real_clock_hides_a_collective():
    with fabric(2, latency_s=0.02, bandwidth_Bps=1e9) as sim:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        sim.compute(0.05)
        assert sim.now() >= 0.05
        assert work.is_completed()
        work.wait()
        assert sim.exposed_s == 0


def test_a_real_clock_is_stopped_while_the_fabric_copies():
    before = time.monotonic()
    with fabric(64, latency_s=1e-6, bandwidth_Bps=1e15) as sim:
        whole, own = torch.empty(16_000_000), torch.ones(250_000)
        begin = time.monotonic()
        dist.group.WORLD._allgather_base(whole, own)
        took = time.monotonic() - begin
        assert 0 < sim.aside_s <= took
        assert sim.now() <= time.monotonic() - before - sim.aside_s


def test_tensors_on_a_gpu_are_an_error():
    with net(), FakeTensorMode(), pytest.raises(cs.errors.ShardConfigUnsupportedError, match="must be on the CPU"):
        dist.group.WORLD.allreduce([torch.empty(4, device="cuda")])


def test_negative_compute_and_compute_outside_of_a_fabric_raise_an_error():
    with net(clock="virtual") as sim, pytest.raises(cs.errors.ShardConfigValueError, match=r"^seconds: .*got -1"):
        sim.compute(-1)
    with pytest.raises(RuntimeError, match="no fabric is active"):
        Busy(1e-6)(torch.ones(1))


# ---- entering and leaving


def test_a_fabric_restores_all_global_state_even_after_an_exception():
    @net(clock="streams")
    def fail():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh.__enter__()
        cs.fully_shard(nn.Linear(4, 4), mesh=mesh["b"])
        raise KeyError("mine")

    was = torch.cpu.Stream, torch.cpu.Event, torch.cpu.current_stream()
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            fail()
        assert not dist.is_initialized()
        assert _mesh_resources.mesh_stack == []
        assert (torch.cpu.Stream, torch.cpu.Event, torch.cpu.current_stream()) == was


def test_a_second_world_of_the_same_shape_uses_its_own_groups():
    totals = []
    for early in (0, 3):
        with net(clock="virtual"):
            for _ in range(early):
                dist.new_group([0, 1])
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            layer = cs.fully_shard(nn.Linear(4, 4), mesh=mesh)
            layer.weight.data.fill_(1.0)
            totals.append(layer.weight.full_tensor().sum().item())
            assert (layer.weight * 2).full_tensor().sum() == 32
    assert totals == [16, 16]


def test_entering_a_fabric_with_a_default_group_raises_an_error():
    with net(clock="virtual"):
        with pytest.raises(
            cs.errors.ShardConfigStateError, match=r"4 ranks \(fabric\) exists already; destroy it first"
        ):
            net().__enter__()
        assert dist.get_world_size() == 4


def test_a_fabric_can_decorate_a_function():
    @net(6, clock="virtual")
    def world():
        return dist.get_world_size()

    assert (world(), world()) == (6, 6)
    assert not dist.is_initialized()
