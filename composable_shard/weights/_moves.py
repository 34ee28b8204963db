"""Move weights between ranks: pack parts into messages, send and receive them in rounds, and unpack them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set
from functools import partial

import torch

from .._comm.lanes import Awaitable
from .._comm.parts import buffer_for
from ._channel import Channel
from ._course import ROUNDS_AT_ONCE, Course, Message
from ._describe import Parts
from ._plan import Transfer

_ALONE = 1 << 20  # bytes; a copy of so many takes longer than a message of their own


class Mover:
    """Sends and receives this rank's messages.

    Args:
        channel: the channel.
        course: the messages.
        values: this rank's tensors to send; None if it only receives.
        places: this rank's memory to fill.
        unchanged: index in the plan of each part that is not sent. Equal on all ranks.

    Attributes:
        sent, received: bytes of tensors that this rank has sent to, and received from, other ranks.
        skipped: bytes of unchanged parts.
    """

    def __init__(
        self, channel: Channel, course: Course, values: Parts | None, places: Parts, unchanged: Set[int]
    ) -> None:
        self._channel, self._course = channel, course
        self._parts, self._memory, self._unchanged = values, places, unchanged
        self.sent = self.received = self.skipped = 0

    @torch.no_grad()
    def run(self) -> None:
        """Move everything.

        Raises:
            PeerLostError: another rank is lost.
        """
        for index, each in self._course.copies:
            for place in self._places(each) if index not in self._unchanged else ():
                place.copy_(self._values(each))
        flying: deque[list[tuple[Awaitable, Callable[[], None]]]] = deque()
        for messages in self._course.rounds:
            flying.append([each for message in messages for each in self._started(message)])
            if len(flying) == ROUNDS_AT_ONCE:
                self._finish(flying.popleft())
        while flying:
            self._finish(flying.popleft())

    def _finish(self, flight: list[tuple[Awaitable, Callable[[], None]]]) -> None:
        for handle, then in flight:
            self._channel.wait(handle)
            then()

    def _started(self, message: Message) -> Iterator[tuple[Awaitable, Callable[[], None]]]:
        """Start a message. Yields the handle of each package, and what to do when it has arrived.

        Nothing if no part has changed.
        """
        transfers = [each for index, each in message.parts if index not in self._unchanged]
        nbytes = sum(each.nbytes for each in transfers)
        self.skipped += sum(each.nbytes for _, each in message.parts) - nbytes
        if message.source == self._channel.rank:
            self.sent += nbytes
            for some in _packages(transfers):
                data = self._packed(some)
                # The memory must stay until it has arrived.
                yield self._channel.send(data, message.target), partial(_keep, data)
        else:
            self.received += nbytes
            for some in _packages(transfers):
                data, unpack = self._landing(some)
                yield self._channel.receive(data, message.source), unpack

    def _values(self, transfer: Transfer) -> torch.Tensor:
        assert self._parts is not None
        return next(self._parts.of(transfer.name, transfer.box))

    def _places(self, transfer: Transfer) -> list[torch.Tensor]:
        return [each for each in self._memory.of(transfer.name, transfer.box) if each.dtype == transfer.dtype]

    def _packed(self, transfers: list[Transfer]) -> torch.Tensor:
        """The bytes of parts. A part that is contiguous already is sent from its own memory."""
        wire = self._channel.wire
        if len(transfers) == 1:
            [each] = transfers
            values = self._values(each)
            if values.dtype == each.dtype and values.device == wire and values.is_contiguous():
                return values.view(-1).view(torch.uint8)
        data, views = buffer_for([(each.box.shape, each.dtype) for each in transfers], wire)
        torch._foreach_copy_(views, [self._values(each) for each in transfers])
        return data

    def _landing(self, transfers: list[Transfer]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Memory for a message, and the function that distributes it."""
        wire = self._channel.wire
        places = [self._places(each) for each in transfers]
        if len(transfers) == 1 and places[0][0].device == wire and places[0][0].is_contiguous():
            first, *others = places[0]
            return first.view(-1).view(torch.uint8), lambda: _fill([others], [first])
        data, views = buffer_for([(each.box.shape, each.dtype) for each in transfers], wire)
        return data, lambda: _fill(places, views)


def _keep(data: torch.Tensor) -> None:
    """Do nothing: a reference to this function with its argument keeps the memory until then."""


def _packages(transfers: list[Transfer]) -> list[list[Transfer]]:
    """Group the parts of a message. Those of a group are packed into one buffer.

    Large parts are alone, because a rank needs no buffer for a single part if its memory is contiguous.
    """
    small = [each for each in transfers if each.nbytes < _ALONE]
    return [*([each] for each in transfers if each.nbytes >= _ALONE), *([small] if small else [])]


def _fill(places: list[list[torch.Tensor]], values: list[torch.Tensor]) -> None:
    pairs = [(place, value) for some, value in zip(places, values, strict=True) for place in some]
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [value for _, value in pairs])
