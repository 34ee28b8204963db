"""Captured steps break no rule of CUDA graphs on the simulated streams of `testing.races`; steps of mutants do."""

from __future__ import annotations

import functools
import os
from unittest import mock

import pytest
import torch

import composable_shard as cs
from _race_plants import _nothing, instead, job_without_end
from _race_scenarios import SCENARIOS
from _race_training import Training, build, one_thread
from composable_shard import testing
from composable_shard._comm.lanes import StreamLane
from composable_shard._engine.capturing import Capturing
from composable_shard._group.reduction import GroupReduced
from composable_shard._memory.device import DeviceMemory
from composable_shard._memory.slots import Slot
from composable_shard.errors import ShardConfigStateError

IN_SHORT = ("default", "accumulate", "few-ranks", "replicas-mixed", "checkpoint", "keep-weights")
CAPTURED = (
    *("packed", "mixed", "deep-packed", "evaluate", "gradient-hooks", "all-reduce-hook", "checkpoint-reentrant"),
    *("two-backwards", "budget", "held-packed", "idle-memory", "branches", "by-hand", "replicas"),
    *("uneven", "frozen", "tensor-parallel", "two-dtypes", "two-streams", "extensions", "low-bits-gathers", "unused"),
    *("replicas-two-streams", "blocks-in-turns"),
)


def unused_parameters(model, checked):
    """The last block skips its feed-forward network, whose parameters get no gradient, unlike the others'."""
    model.blocks[-1].feed_forward.forward = lambda x: x


def with_low_bits(model, checked):
    from composable_shard import CommPolicy

    model.set_comm_policy(CommPolicy(gather="fp8", block=8))


MORE = {
    "unused": functools.partial(SCENARIOS["default"].__class__, prepare=unused_parameters),
    "low-bits-gathers": functools.partial(SCENARIOS["default"].__class__, prepare=with_low_bits),
}


class Capturer:
    """Captures parts of the training of a scenario."""

    def __init__(self, checked):
        self.checked = checked
        self.rules = checked._captures
        self.stream = checked.stream("capture")

    def capture(self, work):
        self.stream.wait_stream(self.checked.stream_of_compute)
        with self.rules.on(self.stream):
            return work()


def trained(name, program):
    """Run a program with a model. Returns the faults and the report of races."""
    scenario = MORE[name]() if name in MORE else SCENARIOS[name]
    world = functools.reduce(int.__mul__, scenario.mesh.values())
    with (
        mock.patch.dict(os.environ, COMPOSABLE_SHARD_TRANSPORT=scenario.transport),  # first: `races` sets it if unset
        one_thread(),
        scenario.around(),
        testing.races(world, mesh=scenario.mesh, check=False) as checked,
    ):
        model = build(scenario, checked)
        optimizer = scenario.optimizer([p for p in model.parameters() if p.requires_grad])
        training = Training(checked, model, optimizer)
        capturer = Capturer(checked)
        program(scenario, training, capturer)
        return capturer.rules.faults, checked.report()


def steps_and_captures(scenario, training, capturer):
    """Eager steps, captured ones, captured microbatches, a captured evaluation, and eager steps in between."""
    for training.number in range(2):
        scenario.step(training)
        capturer.capture(training.backward)
        capturer.capture(training.backward)
        training.update()
    training.model.set_requires_gradient_sync(False)
    capturer.capture(training.backward)
    training.model.set_requires_gradient_sync(True)
    capturer.capture(training.backward)
    training.update()
    scenario.step(training)
    with torch.no_grad():
        capturer.capture(training.forward)
        training.forward()
    training.model.unshard()
    capturer.capture(training.backward)
    training.forward()


def check(names):
    for name in names:
        faults, report = trained(name, steps_and_captures)
        assert (name, faults[:3], report) == (name, [], "")


def test_captured_steps_follow_the_rules_in_the_most_common_scenarios():
    check(IN_SHORT)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # a reentrant checkpoint, evaluated
def test_captured_steps_follow_the_rules():
    check(CAPTURED)


def gather_then_wait(scenario, training, capturer):
    training.backward()
    capturer.capture(lambda: training.model.unshard(async_op=True)).wait()


MUTANTS = {
    "a captured stream waits for an event from outside": (
        mock.patch.object(Slot, "forget_events", _nothing),
        steps_and_captures,
        "is captured, and waits for an event from outside",
        "default",
    ),
    "the default stream becomes part of a capture": (
        mock.patch.object(DeviceMemory, "cross", _nothing),
        steps_and_captures,
        "the default stream, <stream compute>, becomes part of a capture",
        "default",
    ),
    "the host reads a captured value": (
        mock.patch.object(GroupReduced, "_assumed", GroupReduced._unused),
        steps_and_captures,
        "the host reads a captured value by Tensor.tolist",
        "unused",
    ),
    "work is not waited for when the capture ends": (
        job_without_end("reductions")(),
        steps_and_captures,
        "has work at the end of the capture that <stream capture> does not wait for",
        "default",
    ),
    "an event of a capture is used after its end": (
        instead(Capturing, "_cross", lambda real, self, now: real(self, now) if now else None)(),
        gather_then_wait,
        "waits for an event of a capture that has ended",
        "default",
    ),
    "an operator is not captured": (
        mock.patch.object(StreamLane, "_wait_for", _nothing),
        steps_and_captures,
        "which is not captured, during a capture",
        "default",
    ),
}


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_library_without_a_safeguard_breaks_the_rule(rule):
    plant, program, fault, scenario = MUTANTS[rule]
    with plant:
        faults, _ = trained(scenario, program)
    assert any(fault in each for each in faults), faults[:5]


def capture_of(program):
    with testing.races(check=False) as checked:
        capturer = Capturer(checked)
        program(checked, capturer)
        return capturer.rules.faults


def test_the_host_must_not_wait_in_a_capture_or_for_its_events():
    def program(checked, capturer):
        before = torch.Event()
        before.record()
        after = capturer.capture(lambda: (before.synchronize(), torch.cuda.synchronize(), torch.Event())[-1])
        capturer.capture(lambda: after.record())
        after.synchronize()

    faults = capture_of(program)
    assert len(faults) >= 3
    assert all("the host waits for a capture, or during one" in each for each in faults)


def test_the_host_must_not_read_values_in_a_capture():
    def program(checked, capturer):
        value = torch.ones(1)
        value.item()
        value.tolist()
        capturer.capture(lambda: (value.item(), value.tolist(), bool(value > 0)))
        value.tolist()

    assert len(capture_of(program)) == 3


def test_a_forked_and_joined_stream_is_part_of_the_capture():
    def program(checked, capturer):
        side = checked.stream("side")

        def work():
            side.wait_stream(capturer.stream)
            with side:
                torch.ones(1).add_(1)
            capturer.stream.wait_stream(side)
            assert capturer.rules.number() == 1

        capturer.capture(work)
        assert capturer.rules.number() == 0

    assert capture_of(program) == []


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("offload", "waits for copies of its offloaded parameters"),
        ("own-memory", r"set_keep_unsharded_storage\(True\) keeps unsharded parameters in memory from outside"),
    ],
)
def test_parameters_that_must_stay_in_other_memory_are_refused(name, match):
    def program(scenario, training, capturer):
        scenario.step(training)
        with pytest.raises(ShardConfigStateError, match=match):
            capturer.capture(training.backward)
        scenario.step(training)

    faults, report = trained(name, program)
    assert (faults, report) == ([], "")


def test_a_graphed_step_runs_eagerly_where_nothing_can_be_replayed():
    with testing.races() as checked:
        layer = cs.fully_shard(torch.nn.Linear(8, 8), mesh=checked.mesh)
        step = cs.make_graphed_step(lambda x: layer(x).sum().backward())
        for _ in range(4):
            step(torch.ones(2, 8))
        assert (step.captures, step.eager_calls) == (0, 4)
