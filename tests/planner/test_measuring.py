"""The measurements of ranks: links inside nodes and between them, compute, and memory."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from _measuring_ranks import TINY
from _pool import POOL, distributed
from composable_shard._comm.transports import VARIABLE
from composable_shard._plan.layout import Route
from composable_shard.cli.measure_links import tables
from composable_shard.errors import ShardConfigValueError
from composable_shard.planner import Machine, measuring
from composable_shard.planner.link_fit import sent
from composable_shard.planner.measuring import GATHER, INTER, INTRA, QUICK, REDUCTION, measure
from composable_shard.planner.ranks import Place, silent

JOB = "planner.test_measuring"
CPU = torch.device("cpu")
KIB = 1 << 10


def place(rank, world, local):
    return Place(rank, world, rank % local, local)


def measured(rank, world, local):
    calls = []
    measurement = measure(place(rank, world, local), CPU, TINY, "a machine", lambda *call: calls.append(call))
    assert [call for call in calls if call[1] > call[2]] == []
    for what in {call[0] for call in calls}:
        steps = [call[1] for call in calls if call[0] == what]
        assert steps == sorted(steps)
    return measurement


@pytest.fixture(scope="module")
def on_one_node():
    return POOL.run(f"{JOB}:measured", 2, {"local": 2})


@pytest.fixture(scope="module")
def on_two_nodes():
    return POOL.run(f"{JOB}:measured", 4, {"local": 2})


def test_a_machine_of_one_node(on_one_node):
    machine = on_one_node[0].machine
    assert machine == Machine.from_json(machine.to_json())
    assert machine.name == "a machine"
    assert {"float32", "bfloat16"} <= set(machine.flops)
    assert machine.devices_per_node == 2
    assert (machine.backend, machine.streams) == ("gloo", False)
    assert machine.inter_node == machine.intra_node
    assert machine.intra_node.bandwidth > 1e6
    assert 0 < machine.launch < 0.1
    assert machine.host_link.bandwidth == machine.host_memory_bandwidth == machine.memory_bandwidth > 1e6
    assert machine.memory > 1e6
    assert (
        "inter_node was not measured because all ranks are on one node; the value of intra_node is used"
        in on_one_node[0].notes
    )


@pytest.mark.matrix
def test_all_ranks_have_the_same_figures(on_one_node, on_two_nodes):
    for measurements in (on_one_node, on_two_nodes):
        assert len({each.machine.to_json() for each in measurements}) == 1
        assert len({str(each.collectives) for each in measurements}) == 1


@pytest.mark.matrix
def test_each_size_and_link_is_measured_with_the_librarys_transports(on_two_nodes):
    measurement = on_two_nodes[0]
    assert [(each.link, each.nbytes, each.name) for each in measurement.collectives] == [
        (link, size, name) for link in (INTRA, INTER) for size in TINY.sizes for name in (GATHER, REDUCTION)
    ]
    for each in measurement.collectives:
        assert each.ranks == 2
        assert each.transport == "packed"
        assert each.figure.amount == sent(each.nbytes, 2)
        link = measurement.links[each.link].link
        assert each.seconds == link.latency + each.figure.amount / link.bandwidth
    machine = measurement.machine
    assert machine.intra_node == measurement.links[INTRA].link != machine.inter_node == measurement.links[INTER].link
    assert not any("node was not measured" in note for note in measurement.notes)


@distributed(world=2)
def test_with_one_rank_per_node_only_the_link_between_nodes_is_measured(rank, world):
    measurement = measured(rank, world, 1)
    assert set(measurement.links) == {INTER}
    assert measurement.machine.intra_node == measurement.machine.inter_node
    assert measurement.machine.devices_per_node == 1
    assert "intra_node was not measured because each node has one rank; the value of inter_node is used" in (
        measurement.notes
    )


@distributed(world=2)
def test_nodes_of_different_sizes_are_refused(rank, world):
    with pytest.raises(ShardConfigValueError, match="start the same number on each node"):
        measure(replace(place(rank, world, 2), local_ranks=1 + rank), CPU, TINY, None, silent)
    with pytest.raises(ShardConfigValueError, match="numbered node by node"):
        measure(replace(place(rank, world, 2), local_rank=1 - rank), CPU, TINY, None, silent)


@distributed(world=2)
def test_the_transport_that_the_environment_names_is_measured_or_refused(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "p2p")
        assert {each.transport for each in measured(rank, world, 2).collectives} == {"p2p"}
        patch.setenv(VARIABLE, "pigeon")
        with pytest.raises(ShardConfigValueError, match="has no such transport"):
            measured(rank, world, 2)


@distributed(world=2)
def test_a_figure_is_the_median_of_the_slowest_ranks_times(rank, world):
    seconds = iter([1.0, 1.0, *([5.0, 1.0, 3.0] if rank else [1.0, 4.0, 2.0])])
    timing = measuring._Timing(CPU, TINY, silent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_seconds_of_host", lambda work, count: next(seconds) * count)
        [figure] = timing.of("work", [measuring._Case("work", 8.0, lambda: None)])
    assert figure.seconds == statistics.median([5, 4, 3])
    assert figure.rate == 2
    assert figure.spread == (4.5 - 3.5) / 4


@distributed(world=2)
def test_repetitions_alternate_and_short_work_is_repeated(rank, world):
    calls = []
    timing = measuring._Timing(CPU, replace(TINY, seconds=1.0), silent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_seconds_of_host", lambda work, count: calls.append((work(), count)) or 0.25 * count)
        timing.of("work", [measuring._Case(name, 1.0, lambda name=name: name) for name in ("a", "b")])
    assert calls == [*[("a", 1)] * 2, *[("b", 1)] * 2, *[("a", 4), ("b", 4)] * 3]


@distributed(world=2)
def test_a_slow_device_multiplies_fewer_rows(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        timing = measuring._Timing(CPU, replace(QUICK, longest=1.0), silent)
        patch.setattr(timing, "slowest", lambda case: case.amount / 6 / 256 / 1024 / 100)  # one second for 100 rows
        assert measuring._rows("float32", CPU, timing) == 64
        patch.setattr(timing, "slowest", lambda case: 0.0)
        assert measuring._rows("float32", CPU, timing) == 256


class Noting:
    """A transport that gathers parameters separately from 64 KiB per rank on, and records how many it gets."""

    route = Route("p2p", gather_from=64 * KIB)

    def __init__(self):
        self.numbers = []

    def all_gather(self, wholes, pieces):
        assert [whole.numel() for whole in wholes] == [2 * piece.numel() for piece in pieces]
        self.numbers.append(len(wholes))
        return self

    def wait(self):
        pass


def test_a_gather_sends_large_parameters_separately_if_the_transport_does():
    transport = Noting()
    for piece in (torch.zeros(32 * KIB), torch.zeros(64 * KIB)):
        measuring._gather(transport, piece.repeat(2), piece)()
    assert transport.numbers == [1, 4]


def test_unreliable_figures_cause_warnings(on_one_node):
    measurement = on_one_node[0]
    steady = replace(measurement.figures[0], name="steady work", spread=0.2)
    unsteady = replace(measurement.figures[0], name="unsteady work", spread=0.4)
    links = {INTRA: replace(measurement.links[INTRA], error=0.9)}
    words = list(measuring._warnings(Place(0, 10**6, 0, 10**6), links, [steady, unsteady]))
    assert "cores, so they slow each other down" in words[0]
    assert words[1] == (
        "1 of 2 figures vary by more than 25% between repetitions, so other work may share this machine; the most "
        "variable: unsteady work (40%)"
    )
    assert words[2].startswith(
        "inside a node: the times do not follow latency + bytes / bandwidth: errors of up to 90%"
    )
    quiet = {INTRA: replace(measurement.links[INTRA], error=0.1)}
    assert list(measuring._warnings(Place(0, 2, 0, 1), quiet, [steady])) == []


@pytest.mark.matrix
def test_the_report_has_a_row_for_each_size_of_each_link(on_two_nodes):
    _, links, collectives = tables(on_two_nodes[0])[:3]
    assert [row[0] for row in links.rows] == [INTRA, INTER]
    assert [row[:2] for row in collectives.rows] == [
        (link, size) for link in (INTRA, INTER) for size in ("8 KiB", "512 KiB")
    ]
