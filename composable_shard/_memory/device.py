"""Memory of one device: where a pool gets it, and to whom it goes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import nullcontext, suppress

import torch

from .._comm.lanes import Lane
from .._errors import ShardConfigValueError
from .._torch.core import to_keep
from .slots import Events


class DeviceMemory:
    """Allocates memory on one device, to be written to by work on one lane.

    Attributes:
        device: where it allocates.
    """

    def __init__(self, device: torch.device, lane: Lane) -> None:
        self.device = device
        self._lane = lane
        self._streams: dict[torch.Stream, None] = {}  # on which it has allocated
        self._mem_pool: torch.cuda.MemPool | None = None

    def use_mem_pool(self, wanted: bool) -> bool:
        """Set whether memory comes from a `torch.cuda.MemPool` from now on; returns whether that is new.

        Raises:
            ShardConfigValueError: the device has none.
        """
        if wanted and self.device.type != "cuda":
            raise ShardConfigValueError(
                f"PoolPolicy(mem_pool=True): there is a MemPool on CUDA only, and this model is on {self.device.type}; "
                "leave it out"
            )
        if wanted == (self._mem_pool is not None):
            return False
        self._mem_pool = torch.cuda.MemPool() if wanted else None
        return True

    def leave_segments(self) -> None:
        """All memory has gone back, and comes again in other pieces: the device gets the segments that it lay in.

        Otherwise the allocator would keep them, and take new ones for the larger pieces.
        """
        if self._mem_pool is not None:
            self._mem_pool = torch.cuda.MemPool()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """New memory as a 1D tensor of bytes, with undefined content."""
        # `to_keep` leaves inference mode: a tensor made in it could never be used for training.
        with to_keep(), self._allocating():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """New memory for a storage that has none, with undefined content."""
        with self._allocating():
            storage.resize_(nbytes)

    def _allocating(self) -> contextlib.AbstractContextManager[None]:
        """Memory is about to be allocated: note on which stream, and choose whose segments it comes from."""
        if (stream := self._lane.current()) is not None:
            self._streams[stream] = None
        return nullcontext() if self._mem_pool is None else torch.cuda.use_mem_pool(self._mem_pool, self.device)

    def queued(self) -> Events:
        """The event behind the work that is queued on the current stream now.

        The first writer of new memory waits for it: the allocator may hand out memory that earlier work still reads.
        """
        event = self._lane.mark()
        return () if event is None else (event,)

    def give_back(self, after: Iterable[torch.Event | None]) -> None:
        """Memory goes back to the allocator: whoever gets it waits for these events.

        That may be work on the current stream, or on the streams on which the memory was allocated.
        """
        for event in filter(None, after):
            event.wait()
            for stream in self._streams:
                stream.wait_event(event)

    def leave(self, *lanes: Lane) -> None:
        """Nobody uses the memory any more: it goes back, perhaps before what these lanes were given is done."""
        with suppress(Exception):  # the device may be gone, too
            for lane in lanes:
                self.give_back(lane.queued())
