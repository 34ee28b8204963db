"""The number of a capture comes from the CUDA driver, here a fake one."""

from __future__ import annotations

import ctypes
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
