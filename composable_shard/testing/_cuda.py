"""A fabric's links on a GPU: a link is a stream, and a collective on it sleeps there as long as the model says.

The stream keeps the order of issue, and waits behind what the caller's stream was given: so start and finish are the
model's, on the device's own clock. What moving the data takes comes on top. It has not been run on a device yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .._torch.core import cuda_sleep

_SAMPLE_CYCLES = 20_000_000


class CudaLinks:
    """The streams of the links, made when they are first used, and how many cycles are a second."""

    def __init__(self) -> None:
        self._streams: dict[str, torch.Stream] = {}
        self._cycles_per_s: float | None = None

    def run(self, link: str, seconds: float, tensors: Sequence[torch.Tensor], move: Callable[[], None]) -> torch.Event:
        """Queue a collective on these tensors behind the current stream; returns the event at its end."""
        device = tensors[0].device
        if self._cycles_per_s is None:
            self._cycles_per_s = _measured(device)
        stream = self._streams.get(link)
        if stream is None:
            stream = self._streams[link] = torch.Stream(device)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            cuda_sleep(int(seconds * self._cycles_per_s))
            move()
            done = stream.record_event()
        for tensor in tensors:
            tensor.record_stream(stream)  # who frees it does not know of this stream
        return done


def _measured(device: torch.device) -> float:
    """Cycles per second of `cuda_sleep`."""
    begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    cuda_sleep(_SAMPLE_CYCLES)  # wakes the device
    begin.record()
    cuda_sleep(_SAMPLE_CYCLES)
    end.record()
    end.synchronize()
    return _SAMPLE_CYCLES / (1e-3 * begin.elapsed_time(end))
