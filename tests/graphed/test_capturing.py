"""Captures on CUDA, with fakes of the driver, of streams and of graphs."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from composable_shard._torch import capturing
from composable_shard.errors import ShardConfigStateError

CUDA = torch.device("cuda", 0)
STREAM = 0x1234
SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint64), *[ctypes.c_void_p] * 3
)


@pytest.fixture
def driver(monkeypatch):
    """A driver whose capture has the number 41, unless it fails."""
    answer = SimpleNamespace(error=0, captures=True)

    @SIGNATURE
    def ask(stream, status, number, graph, dependencies, count):
        assert (stream, graph, dependencies, count) == (STREAM, None, None, None)
        status[0], number[0] = 1, 41
        return answer.error

    monkeypatch.setattr(capturing, "_driver", lambda: SimpleNamespace(cuStreamGetCaptureInfo_v2=ask))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answer.captures)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    return answer


def test_the_number_is_that_of_the_driver_and_never_zero_in_a_capture(driver):
    assert capturing.capture_number(CUDA) == 42
    assert capturing.capture_number(torch.device("cpu")) == 0
    driver.captures = False
    assert capturing.capture_number(CUDA) == 0


def test_an_error_of_the_driver_is_raised(driver):
    driver.error = 400
    with pytest.raises(ShardConfigStateError, match="returned error 400"):
        capturing.capture_number(CUDA)


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_without_a_driver_captures_are_refused(driver, monkeypatch, error):
    def missing():
        raise error("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(capturing, "_driver", missing)
    with pytest.raises(ShardConfigStateError, match="only with an NVIDIA driver: libcuda"):
        capturing.capture_number(CUDA)


def test_graphs_can_be_captured_on_cuda_or_in_simulated_captures():
    assert capturing.can_capture(CUDA)
    assert not capturing.can_capture(torch.device("cpu"))


class Stream:
    """Logs what it waits for."""

    device = CUDA

    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """The log of a GPU that has a main stream, and of which one stream can be made."""
    log = []
    current, new = [Stream("main", log)], [Stream("side", log)]

    @contextmanager
    def stream(entered):
        current.append(entered)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Stream", new.pop)
    return log


def work_on_current_stream(log):
    log.append(f"work on {torch.cuda.current_stream().name}")
    return "result"


def test_a_side_stream_waits_for_its_caller_which_waits_for_the_work(log):
    side = capturing.SideStream()
    for _ in range(2):  # on the same stream
        assert side.run(lambda: work_on_current_stream(log)) == "result"
        assert log == ["side waits for main", "work on side", "main waits for side"]
        log.clear()


def test_the_caller_waits_for_a_side_stream_also_after_an_error(log):
    def work():
        work_on_current_stream(log)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capturing.SideStream().run(work)
    assert log == ["side waits for main", "work on side", "main waits for side"]


@pytest.fixture
def cuda_graph(log, monkeypatch):
    """Replaces `torch.cuda.graph` by one that logs. Its captures end with `ends_with`, if that is an error."""
    fake = SimpleNamespace(ends_with=None)

    @contextmanager
    def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
        log.append(f"capture on {stream.name} with pool {pool} in mode {capture_error_mode}")
        try:
            yield
        finally:
            if fake.ends_with is not None:
                raise fake.ends_with

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: "its pool"))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return fake


def test_a_capture_uses_the_current_stream_the_given_pool_and_the_mode_of_this_thread(cuda_graph, log):
    graph, pool = capturing.capture(lambda: work_on_current_stream(log), "earlier pool")
    assert pool == graph.pool() == "its pool"
    assert log == ["capture on main with pool earlier pool in mode thread_local", "work on main"]


@pytest.mark.parametrize("end", [None, RuntimeError("the capture was invalidated")], ids=["ends", "end fails"])
def test_the_error_of_the_work_is_raised_also_if_the_end_of_the_capture_fails(cuda_graph, end):
    def work():
        raise KeyboardInterrupt

    cuda_graph.ends_with = end
    with pytest.raises(KeyboardInterrupt):
        capturing.capture(work, None)


def test_an_error_of_the_end_of_a_capture_is_raised(cuda_graph):
    cuda_graph.ends_with = RuntimeError("unjoined work")
    with pytest.raises(RuntimeError, match="unjoined work"):
        capturing.capture(lambda: None, None)


def test_results_are_handed_over_to_the_stream_of_the_caller(log):
    """The allocator would otherwise reuse their memory, while the caller's one reads it."""
    stream, users = capturing.SideStream(), []
    result = SimpleNamespace(is_cuda=True, record_stream=users.append)
    stream.hand_over([result])
    assert users == []  # nothing has run on another stream
    stream.run(lambda: None)
    stream.hand_over([result, torch.zeros(1)])
    assert users == [torch.cuda.current_stream()]
