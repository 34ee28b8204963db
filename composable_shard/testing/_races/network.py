"""Collectives on streams of their own: each process group has one, as NCCL's communicators have.

Those that are not asynchronous run on the current stream, as NCCL's do.
"""

from __future__ import annotations

import torch

from .._alike import move_alike
from .._collectives import Call, Work
from .._process_group import GroupKey
from .operators import Launches
from .streams import Stream, Streams

BACKEND = "races"


class Network:
    """What carries the collectives of a process group (see `Medium`), among ranks that all hold the same.

    Attributes:
        backend: the name that its groups go by. The library makes of NCCL's what it makes of these.
    """

    backend = "nccl"

    def __init__(self, streams: Streams, launches: Launches) -> None:
        self._streams, self._launches = streams, launches
        self._of_group: dict[GroupKey, Stream] = {}

    def launch(self, key: GroupKey, group_rank: int, call: Call) -> Work:
        """Launch a collective behind what the current stream was given; who waits for it lets its stream wait."""
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
        """A message that nobody reads."""
        return self.launch(key, group_rank, call)

    def receive(self, key: GroupKey, group_rank: int, sources: object, tag: int, call: Call) -> Work:
        """A message of which nothing is known."""
        return self.launch(key, group_rank, call)

    def misfit(self, kind: str, whole: torch.Tensor, piece: torch.Tensor, ranks: int) -> str:
        """What to say of a whole tensor that is not made of such a piece of each rank."""
        return f"races: {whole.numel()} elements are not {piece.numel()} for each of {ranks} ranks"
