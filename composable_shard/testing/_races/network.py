"""Collectives on streams, as with NCCL.

Each process group has a stream. Synchronous collectives run on the current stream.
"""

from __future__ import annotations

from .._alike import move_alike
from .._collectives import Call, Work
from .._process_group import GroupKey
from .operators import Launches
from .streams import Stream, Streams

BACKEND = "races"


class Network:
    """Implements the collectives of a process group (see `Medium`), with identical ranks.

    Attributes:
        backend: name that its groups report, so that the library treats them like NCCL's.
    """

    backend = "nccl"

    def __init__(self, streams: Streams, launches: Launches) -> None:
        self._streams, self._launches = streams, launches
        self._of_group: dict[GroupKey, Stream] = {}

    def launch(self, key: GroupKey, group_rank: int, call: Call) -> Work:
        """Launch a collective after the work of the current stream. A wait makes the current stream wait for it."""
        current = self._streams.current()
        stream = current if call.on_current else self._of_group.get(key)
        if stream is None:
            stream = self._of_group[key] = Stream(name=self._streams.next_name("network"))
        if stream is not current:
            stream.wait_stream(current)
        reads, writes = list(call.inputs), list(call.outputs)
        move_alike(call, group_rank, len(call.issued.members))
        self._launches.launch(call.issued.kind, stream, reads, writes)
        return Work(stream.record_event().wait, lambda: True, writes)

    def send(self, key: GroupKey, group_rank: int, to: int, tag: int, call: Call) -> Work:
        """Send a message; its data is dropped."""
        return self.launch(key, group_rank, call)

    def receive(self, key: GroupKey, group_rank: int, sources: object, tag: int, call: Call) -> Work:
        """Receive a message; its data is zeros."""
        return self.launch(key, group_rank, call)
