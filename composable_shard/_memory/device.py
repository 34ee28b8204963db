"""Allocation of pool memory on one device, and its return to the allocator."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch

from .._comm.lanes import Lane
from .._torch.capturing import capture_number
from .._torch.core import to_keep
from .slots import Events


class DeviceMemory:
    """Allocates memory on one device.

    Args:
        device: the device.
        lane: finds the current stream and records events on it. The memory may be used on any stream.

    Attributes:
        device: the device.
        capture: the number of the capture in which the memory is used now; 0 outside of captures.
    """

    def __init__(self, device: torch.device, lane: Lane) -> None:
        self.device = device
        self._lane = lane
        self.capture = 0
        self._streams: dict[torch.Stream, None] = {}  # streams on which it has allocated, in this capture if any
        self._streams_outside = self._streams  # those on which it has allocated outside of captures

    def cross(self, capture: int) -> None:
        """Enter a capture, given by its number, or leave captures (0).

        A stream that waited for an event of a capture would become part of it. So only streams of the same capture wait
        before memory is freed. No other stream gets that memory: a capture has a memory pool of its own.
        """
        self.capture = capture
        self._streams = {} if capture else self._streams_outside

    def return_segments(self) -> None:
        """Return the allocator's free segments to the device. Call this when the arena is replaced by another one.

        The new arena has another size. Without this call, the allocator would keep the segments of the old one and
        reserve more. It takes long and, on CUDA, also empties the cache of user code (`torch.cuda.empty_cache`), so it
        is not called in other situations.
        """
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate a 1D uint8 tensor with undefined content."""
        # `to_keep` leaves inference mode, because inference tensors cannot be used for training later.
        with to_keep():
            self._remember_stream()
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def allocate_in(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate memory with undefined content for an empty storage."""
        self._remember_stream()
        storage.resize_(nbytes)

    def _remember_stream(self) -> None:
        if (stream := self._lane.current()) is not None:
            self._streams[stream] = None

    def current_events(self) -> Events:
        """Record an event on the current stream, after the work that is queued there; none on a CPU.

        The first writer of new memory waits for it (rule 4 in `pool.py`).
        """
        event = self._lane.record_current_stream()
        return () if event is None else (event,)

    def wait_before_free(self, after: Iterable[torch.Event | None]) -> None:
        """Make the current stream and all streams on which memory was allocated wait for these events.

        Call this before memory is freed. The allocator may reuse it for work on any of these streams, without an event.
        """
        for event in filter(None, after):
            event.wait()
            for stream in self._streams:
                stream.wait_event(event)

    def leave(self, *lanes: Lane) -> None:
        """Make the streams that may reuse the memory wait for these lanes: its owner is being deleted (rule 5).

        Not in a capture, where the garbage collector may delete owners, too. An owner from outside has no work in it,
        and the streams of an owner that was used in it have been waited for at the end of its backward.
        """
        if capture_number(self.device):
            return
        with suppress(Exception):  # the device may no longer exist, for example at exit
            for lane in lanes:
                self.wait_before_free(lane.queued())
