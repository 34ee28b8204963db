"""Captures of CUDA graphs: the number of the running one, and new ones. Tests replace both on a CPU (`simulated`)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch

from ..errors import ShardConfigStateError


class Graph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Queue the captured work on the current stream."""


class Numbers(Protocol):
    """Simulated streams that can be captured."""

    def number(self) -> int:
        """Return the number of the capture on the current stream; 0 if there is none."""


@runtime_checkable
class Captures(Numbers, Protocol):
    """Simulated captures that can also be replayed."""

    def capture(self, work: Callable[[], object], pool: Any) -> tuple[Graph, Any]:
        """Capture what `work` queues. Returns the graph, and the memory pool to pass for the next graph."""


_simulated: list[Numbers] = []


@contextmanager
def simulated(captures: Numbers) -> Iterator[None]:
    """In this context, use these captures instead of those of CUDA."""
    _simulated.append(captures)
    try:
        yield
    finally:
        _simulated.pop()


def can_capture(device: torch.device) -> bool:
    """Whether work on a device can be captured and replayed."""
    return isinstance(_simulated[-1], Captures) if _simulated else device.type == "cuda"


def capture_number(device: torch.device) -> int:
    """Return the number of the capture on the current stream of a device; 0 if there is none.

    All streams of a capture have its number, and no other capture of this process has it.
    """
    if _simulated:
        return _simulated[-1].number()
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return 0
    return _number_of(torch.cuda.current_stream(device).cuda_stream)


def capture(work: Callable[[], object], pool: Any) -> tuple[Graph, Any]:
    """Capture what `work` queues on the current stream and on streams that wait for it.

    The mode is ``thread_local``: other threads may use the device meanwhile, for example to watch collectives.

    Args:
        work: the work. It must leave no stream that waits for the current one without a wait in return.
        pool: the memory pool of an earlier graph, or None. Graphs may share a pool if they are replayed in the order of
            their captures, or if no result of one is needed after a replay of another one.

    Returns:
        the graph, and its memory pool.
    """
    if _simulated:
        made = _simulated[-1]
        assert isinstance(made, Captures)  # `can_capture`
        return made.capture(work, pool)
    graph, errors = torch.cuda.CUDAGraph(), []
    try:
        with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local"):
            try:
                work()
            except BaseException as error:
                errors.append(error)
    except Exception as error:  # the end of a capture that has failed
        errors.append(error)
    if errors:
        raise errors[0]
    return graph, graph.pool()


class SideStream:
    """A stream for work that is later captured: the default stream cannot be captured.

    It is made on the CUDA device that is current at the first use. Without CUDA, and with simulated captures, there is
    none.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def run(self, work: Callable[[], Any]) -> Any:
        """Run `work` with this stream as the current one, after earlier work of the caller's stream, which waits."""
        if _simulated or not torch.cuda.is_available():
            return work()
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                return work()
        finally:
            here.wait_stream(self._stream)

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """After `run`: let the allocator wait for the caller's stream before it gives their memory to other tensors."""
        if self._stream is not None:
            here = torch.cuda.current_stream(self._stream.device)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(here)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _number_of(stream: int) -> int:
    """Ask the driver for the number of a capture; torch only tells whether there is one."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    try:
        ask = _driver().cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError) as error:
        raise ShardConfigStateError(
            f"a sharded model can be captured in a CUDA graph only with an NVIDIA driver: {error}"
        ) from error
    failed = ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    if failed:
        raise ShardConfigStateError(f"cuStreamGetCaptureInfo returned error {failed} for a stream that is captured")
    return 1 + number.value  # 0 means that there is none
