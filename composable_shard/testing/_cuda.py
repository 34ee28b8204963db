"""A fabric's links on a GPU: each link is a stream, on which a collective sleeps for its modelled duration.

The stream runs collectives in the order of issue, after the work that was queued on the caller's stream. So start and
finish follow the model, on the device's clock. The time to copy the data is added to the modelled time. Not tested on
a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .._torch.core import cuda_sleep

_SAMPLE_CYCLES = 20_000_000


class CudaLinks:
    """The streams of the links, created at their first use, and the measured cycles per second."""

    def __init__(self) -> None:
        self._streams: dict[str, torch.Stream] = {}
        self._cycles_per_s: float | None = None

    def run(self, link: str, seconds: float, tensors: Sequence[torch.Tensor], move: Callable[[], None]) -> torch.Event:
        """Queue a collective on these tensors after the work of the current stream. Returns the event at its end."""
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
            tensor.record_stream(stream)  # the caller may free the tensor before this stream is done with it
        return done


def _measured(device: torch.device) -> float:
    """Cycles per second of `cuda_sleep`."""
    begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    cuda_sleep(_SAMPLE_CYCLES)  # warm up: the clock of an idle device is slower
    begin.record()
    cuda_sleep(_SAMPLE_CYCLES)
    end.record()
    end.synchronize()
    return _SAMPLE_CYCLES / (1e-3 * begin.elapsed_time(end))
