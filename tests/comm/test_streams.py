"""Jobs on lanes: the work that runs in `start`, and the work that runs in `finish`."""

from __future__ import annotations

import weakref

import pytest
import torch

from composable_shard._comm.lanes import Lane, StreamLane, cpu_lanes, lane_for

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
needs_accelerator = pytest.mark.skipif(
    ACCELERATOR is None, reason="no accelerator: a StreamLane needs a device with streams (CUDA, XPU, ...)"
)


class Handle:
    """A collective that logs its wait."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self):
        self.log.append(f"wait {self.name}, grad {'on' if torch.is_grad_enabled() else 'off'}")


def work(log, handles=2):
    for number in range(handles):
        log.append(f"run {number}, grad {'on' if torch.is_grad_enabled() else 'off'}")
        yield Handle(log, number)
    log.append(f"end, grad {'on' if torch.is_grad_enabled() else 'off'}")
    return "result"


def test_on_a_cpu_start_runs_to_the_first_handle_and_finish_runs_the_rest():
    log = []
    job = Lane().start(work(log))
    assert log == ["run 0, grad off"]
    assert job.finish() == "result"
    assert log == [
        "run 0, grad off",
        "wait 0, grad on",
        "run 1, grad off",
        "wait 1, grad on",
        "end, grad off",
    ]


def test_work_without_a_handle_is_done_at_the_start():
    log = []
    job = Lane().start(work(log, handles=0))
    assert log == ["end, grad off"]
    assert job.finish() == "result"


def test_finishing_twice_returns_the_result_twice_and_waits_once():
    log = []
    job = Lane().start(work(log, handles=1))
    assert [job.finish(), job.finish()] == ["result", "result"]
    assert log.count("wait 0, grad on") == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_the_grad_mode_of_the_caller_is_always_restored(enabled):
    with torch.set_grad_enabled(enabled):
        job = Lane().start(work([]))
        assert torch.is_grad_enabled() is enabled
        job.finish()
        assert torch.is_grad_enabled() is enabled
    assert torch.is_grad_enabled()


def test_dropping_an_unfinished_job_does_not_change_the_grad_mode():
    job = Lane().start(work([]))
    del job
    assert torch.is_grad_enabled()


def test_two_jobs_can_be_in_flight_and_finish_in_any_order():
    first, second = [], []
    jobs = [Lane().start(work(log)) for log in (first, second)]
    assert jobs[1].finish() == "result"
    assert first == ["run 0, grad off"]
    assert jobs[0].finish() == "result"
    assert torch.is_grad_enabled()


def test_an_error_is_raised_where_the_work_fails_and_does_not_change_the_grad_mode():
    def failing(at_start):
        if not at_start:
            yield Handle([], 0)
        raise OSError("the network is down")

    with pytest.raises(OSError, match="network"):
        Lane().start(failing(True))
    job = Lane().start(failing(False))
    with pytest.raises(OSError, match="network"):
        job.finish()
    assert torch.is_grad_enabled()


def test_a_finished_job_frees_the_tensors_of_its_work():
    held = Handle([], 0)

    def steps(held):
        yield held
        del held

    job, gone = Lane().start(steps(held)), weakref.ref(held)
    del held
    assert gone() is not None
    job.finish()
    assert gone() is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lanes_of_devices_without_streams_have_no_events(device):
    lane = lane_for(torch.device(device))
    assert type(lane) is Lane
    assert lane.record_current_stream() is None


def test_a_simulation_replaces_the_lanes_of_the_cpu_while_it_is_active():
    class Simulated(Lane):
        pass

    cpu, meta = torch.device("cpu"), torch.device("meta")
    with cpu_lanes(Simulated):
        assert type(lane_for(cpu)) is Simulated
        assert type(lane_for(meta)) is Lane
    assert type(lane_for(cpu)) is Lane


def test_a_launched_collective_can_finish_behind_an_event_as_on_a_stream():
    log = []

    class Event:
        def wait(self):
            log.append("event")

    job = Lane().launch(lambda: Handle(log, "collective"), (), (), None)
    job._advance()
    job._event = Event()
    job.finish()
    assert log[-1] == "event"


@needs_accelerator
def test_the_lane_of_an_accelerator_is_a_separate_stream():
    lane = lane_for(ACCELERATOR)
    assert isinstance(lane, StreamLane)
    assert lane._stream != torch.accelerator.current_stream()


@needs_accelerator
def test_work_on_a_stream_waits_for_its_events_and_the_current_stream_waits_for_the_work():
    lane = lane_for(ACCELERATOR)
    source = torch.zeros(1 << 22, device=ACCELERATOR)
    for _ in range(50):
        source.add_(1)

    def steps():
        out = source * 2
        yield Handle([], 0)
        return out

    job = lane.start(steps(), [lane.record_current_stream(), None])
    assert torch.equal(job.finish(), torch.full_like(source, 100))
