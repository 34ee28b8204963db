"""Inspection of a sharded model: figures for loggers, its plan, differences from the plan, and its memory."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _models import Stack, vectors
from _pool import simulated
from _stepping import engine_of, twins
from composable_shard._engine.stopwatch import Stopwatch, use_clock
from composable_shard._plan.record import own_seconds
from composable_shard._plan.schedule import Kind
from composable_shard.testing import Busy, fabric


def step(model, at=0):
    model(*vectors(0, at)).square().mean().backward()


def trained(steps=3):
    model, _ = twins(reshard_after_forward=True)
    for at in range(steps):
        step(model, at)
    return model


# ---- stats


@simulated(world=2)
def test_stats_are_a_flat_dict_of_floats(rank, world):
    model, _ = twins(reshard_after_forward=True)
    assert cs.stats(model) == {}, "nothing has run"
    for at in range(3):
        step(model, at)
    found = cs.stats(model)
    assert all(type(name) is str and type(value) is float for name, value in found.items())
    assert_expected_inline(
        "\n".join(f"{name} {value:g}" for name, value in found.items()),
        """\
pool/live_bytes 0
pool/peak_bytes 2560
pool/held_bytes 2560
pool/arena_bytes 2560
pool/allocations 4
pool/fallbacks 0
plan/peak_bytes 2560
plan/replans 0
plan/order_drifts 0
plan/bytes_drifts 0
plan/time_drifts 0
step/unshards 8
step/reductions 4""",
    )
    record, plan, pool = cs.last_record(model), cs.make_plan(model), engine_of(model).pool
    assert found["step/unshards"] == sum(action.kind is Kind.UNSHARD for action in record.actions)
    assert found["step/reductions"] == sum(action.kind is Kind.REDUCE for action in record.actions)
    assert found["plan/peak_bytes"] == plan.peak_bytes
    assert found["pool/peak_bytes"] == pool.peak_bytes == record.peak_bytes


def busy_blocks(count=3):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), Busy(20e-6)) for _ in range(count)))
    for each in (*model, model):
        cs.fully_shard(each, mesh=init_device_mesh("cpu", (4,)))
    return model


def test_times_are_measured_while_the_model_is_watched():
    with fabric(4, latency_s=12e-6, bandwidth_Bps=64e6, clock="virtual") as net:
        model = busy_blocks()
        names = {"step/exposed_ms", "step/compute_ms", "step/communication_share"}

        def run():
            net.reset()
            model(torch.ones(2, 16)).sum().backward()
            return cs.stats(model)

        for _ in range(2):
            assert not names & set(run())
        cs.watch(model)
        found = run()
        assert found["step/exposed_ms"] == pytest.approx(1e3 * net.exposed_s)
        assert found["step/compute_ms"] == pytest.approx(1e3 * 3 * 60e-6)
        assert found["step/communication_share"] == pytest.approx(net.exposed_s / net.now())
        assert run() == pytest.approx(found)
        cs.watch(model, False)
        run()
        assert not names & set(run())


def test_stats_of_several_roots_are_summed():
    with fabric(2, latency_s=1e-6, bandwidth_Bps=1e9, clock="virtual"):
        mesh = init_device_mesh("cpu", (2,))
        model = nn.ModuleList(cs.fully_shard(nn.Linear(16, 16), mesh=mesh) for _ in range(2))
        for each in model:
            each(torch.ones(2, 16)).sum().backward()
        assert cs.stats(model)["step/reductions"] == 2
        one, two = (cs.stats(each) for each in model)
        assert cs.stats(model) == {name: one[name] + two[name] for name in one}


# ---- watch


@simulated(world=2)
def test_a_model_can_be_watched_before_its_first_forward(rank, world):
    model, _ = twins(reshard_after_forward=True)
    cs.watch(model)
    step(model)
    record = cs.last_record(model)
    seen = [(span.kind, span.fqn) for span in record.spans]
    assert sorted(seen) == sorted(
        [(action.kind, action.fqn) for action in record.actions]
        + [(kind, fqn) for fqn in record.order for kind in (Kind.FORWARD, Kind.BACKWARD)]
    )
    assert all(0 <= span.begin <= span.end for span in record.spans)
    assert list(record.spans) == sorted(record.spans, key=lambda span: (span.begin, -span.end))


@simulated(world=2)
def test_watching_a_model_that_is_not_sharded_is_an_error(rank, world):
    with pytest.raises(
        cs.errors.ShardConfigValueError, match="Stack contains no sharded module; call fully_shard first"
    ):
        cs.watch(Stack())


def test_prefetch_measurements_keep_a_model_watched():
    with fabric(4, latency_s=12e-6, bandwidth_Bps=64e6, clock="virtual") as net:
        model = busy_blocks()
        model.set_prefetch_policy(cs.PrefetchPolicy.auto())
        cs.watch(model)
        for _ in range(5):
            net.reset()
            model(torch.ones(2, 16)).sum().backward()
        assert cs.make_plan(model).costs is not None
        assert cs.stats(model)["step/exposed_ms"] == pytest.approx(1e3 * net.exposed_s)


def test_waiting_is_not_counted_as_the_enclosing_compute():
    now = [0.0]
    before = use_clock(lambda: now[0])
    try:
        watch = Stopwatch(torch.device("cpu"))
        watch.begin(Kind.FORWARD, "a")
        watch.timed(Kind.WAIT, "b", lambda: now.__setitem__(0, 2.0))
        watch.end(Kind.FORWARD)
        assert own_seconds(watch.spans) == {(Kind.FORWARD, "a"): 0.0, (Kind.WAIT, "b"): 2.0}
    finally:
        use_clock(before)


# ---- drift, make_plan, empty_pool


@simulated(world=2)
def test_a_training_step_follows_the_plan_and_an_evaluation_does_not(rank, world):
    model = trained()
    assert cs.drift(model) == ()
    with torch.no_grad():
        model(*vectors(0, 3))
    assert cs.drift(model) == ("(root): UNSHARD (root) was planned, but not done",)
    step(model)
    assert cs.drift(model) == ()


@simulated(world=2)
def test_the_plan_has_the_order_of_the_last_forward(rank, world):
    model, _ = twins(reshard_after_forward=True)
    assert cs.drift(model) == ()
    step(model)
    assert cs.make_plan(model).order == cs.last_record(model).order


@simulated(world=2)
def test_empty_pool_frees_unused_memory(rank, world):
    model, plain = twins(reshard_after_forward=True)
    shown = [model(*vectors(0, 0)) for _ in range(2)]
    held = cs.stats(model)["pool/held_bytes"]
    assert held > 0
    assert cs.empty_pool(model) == 0, "a graph may still ask for weights"
    del shown
    assert cs.empty_pool(model) == held
    assert cs.stats(model)["pool/held_bytes"] == cs.stats(model)["pool/live_bytes"] == 0
    assert cs.empty_pool(model) == 0
    assert torch.equal(model(*vectors(0, 1)), plain(*vectors(0, 1)))
