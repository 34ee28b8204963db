"""Which bytes were read and written on which stream, and which of these accesses no event orders.

Two accesses to a byte, at least one of which writes, are a race if the clock of the later one's stream does not know
the earlier one. That holds in any timing, so one run is enough; but only for what ran, in the order in which it ran.

Memory that is freed goes back to the stream on which it was allocated, as with the caching allocator of an
accelerator: whatever allocates on that stream next may be given it, without a wait. So all accesses to it on other
streams have to come before that. And new memory may be what earlier work of its stream still uses, so all accesses on
other streams have to come after the allocation, which counts as a write.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from types import CodeType
from typing import NamedTuple

import torch

from .streams import Stream

_PAGE = 1024  # bytes; accesses are looked up by page
_MOST_RANGES = 256  # a tensor in more pieces counts as one with everything between them


class Stack(NamedTuple):
    """The lines that have led to an operator, innermost first, and the name of the autograd node that ran."""

    lines: tuple[tuple[CodeType, int], ...]
    node: str


class Operator:
    """Something that was launched on a stream.

    Attributes:
        name: as ``aten.mul.Tensor``; of a collective its kind.
        stream: its stream.
        number: how many the stream had been given then, with this one.
        stack: where it was launched.
    """

    __slots__ = ("name", "number", "stack", "stream")

    def __init__(self, name: str, stream: Stream, number: int, stack: Stack) -> None:
        self.name, self.stream, self.number, self.stack = name, stream, number, stack

    def precedes(self, stream: Stream) -> bool:
        """Whether what a stream is given now surely comes after it."""
        return self.stream is stream or stream.clock.get(self.stream, 0) >= self.number


class Tensor(NamedTuple):
    """What is told of a tensor.

    Attributes:
        shape, dtype: its own.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Access:
    """What an operator did with the bytes from `low` up to `high`."""

    __slots__ = ("high", "low", "operator", "tensor", "writes")

    def __init__(self, low: int, high: int, writes: bool, operator: Operator, tensor: Tensor) -> None:
        self.low, self.high, self.writes = low, high, writes
        self.operator, self.tensor = operator, tensor

    def within(self, low: int, high: int) -> _Access:
        """The part of it between two addresses."""
        if low <= self.low and self.high <= high:
            return self
        return _Access(max(low, self.low), min(high, self.high), self.writes, self.operator, self.tensor)


@dataclass(frozen=True)
class Clash:
    """Two accesses that nothing orders.

    Attributes:
        tensor: of the second one, or of the first if its memory was freed.
        offset, nbytes: which bytes of the allocation both have in common: where they begin in it, and how many.
        address: where they begin in memory.
        first, then: the operators, in the order of the program.
        first_writes, then_writes: whether they write.
        reuses: whether the second one does not use the tensor, but may be given its memory, which was freed.
    """

    tensor: Tensor
    offset: int
    nbytes: int
    address: int
    first: Operator
    then: Operator
    first_writes: bool
    then_writes: bool
    reuses: bool = False


class _Block:
    """An allocation: whose stream it goes back to, and which streams the allocator waits for before."""

    __slots__ = ("__weakref__", "address", "nbytes", "recorded", "stream")

    def __init__(self, address: int, nbytes: int, stream: Stream) -> None:
        self.address, self.nbytes, self.stream = address, nbytes, stream
        self.recorded: set[Stream] = set()


class Memory:
    """All memory that operators use.

    Args:
        report: is given each clash.
    """

    def __init__(self, report: Callable[[Clash], None]) -> None:
        self._report = report
        self._pages: dict[int, list[_Access]] = {}
        self._blocks: dict[int, _Block] = {}  # by address
        self._addresses: list[int] = []  # of the blocks
        self._watched: dict[_Block, weakref.ref[torch.UntypedStorage]] = {}
        self._gone: deque[_Block] = deque()  # freed, at any time, also by the garbage collector in the midst of this
        self._freed: dict[Stream, list[_Access]] = {}  # in memory that went back to that stream

    # ---- allocations

    def allocate(self, storage: torch.UntypedStorage, operator: Operator) -> None:
        """New memory, which an operator is about to write: it may be whatever was freed on its stream before."""
        self._reuse(operator)
        self._block(storage, operator.stream)
        low, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes:
            self._access(low, low + nbytes, True, operator, Tensor((nbytes,), torch.uint8))

    def _reuse(self, operator: Operator) -> None:
        self._collect()
        for access in self._freed.pop(operator.stream, ()):
            if not access.operator.precedes(operator.stream):
                block = self._block_at(access.low)
                self._clash(access, access.low, access.high, operator, True, access.tensor, block, reuses=True)

    def know(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """Memory that is used, and was allocated on that stream if nothing else is known of it."""
        self._collect()
        self._block(storage, stream)

    def _block(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes or self._block_at(address) is not None:  # perhaps as memory of another storage
            return
        block = self._blocks[address] = _Block(address, nbytes, stream)
        insort(self._addresses, address)
        self._watched[block] = weakref.ref(storage, lambda _: self._gone.append(block))

    def record(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """When it is freed, the allocator waits for what this stream was given until then (`Tensor.record_stream`)."""
        block = self._block_at(storage.data_ptr())
        if block is not None and block.stream is not stream:
            block.recorded.add(stream)

    def resized(self, before: int, storage: torch.UntypedStorage, operator: Operator) -> None:
        """A storage whose memory was at `before` (0 if it had none) has other memory now, or none."""
        if before == storage.data_ptr() and before:
            return
        block = self._blocks.get(before)
        if block is not None:
            self._gone.append(block)
        self._collect()
        if storage.nbytes():
            self.allocate(storage, operator)

    def _collect(self) -> None:
        """Memory that has gone belongs to the allocator."""
        while self._gone:
            block = self._gone.popleft()
            if self._blocks.get(block.address) is not block:
                continue
            del self._blocks[block.address], self._watched[block]
            self._addresses.remove(block.address)
            low, high = block.address, block.address + block.nbytes
            freed = self._freed.setdefault(block.stream, [])
            for page in range(low // _PAGE, (high - 1) // _PAGE + 1):
                known = self._pages.pop(page, ())
                for access in known:
                    if access.high <= low or high <= access.low:
                        self._pages.setdefault(page, []).append(access)
                    elif access.operator.stream not in block.recorded | {block.stream}:
                        freed.append(access)

    # ---- accesses

    def use(self, tensor: torch.Tensor, writes: bool, operator: Operator) -> None:
        """An operator reads or writes a tensor."""
        self._collect()
        said = Tensor(tuple(tensor.shape), tensor.dtype)
        for low, high in ranges(tensor):
            self._access(low, high, writes, operator, said)

    def _access(self, low: int, high: int, writes: bool, operator: Operator, said: Tensor) -> None:
        access = _Access(low, high, writes, operator, said)
        for page in range(low // _PAGE, (high - 1) // _PAGE + 1):
            now = access.within(page * _PAGE, (page + 1) * _PAGE)
            known, begin, end = self._pages.get(page, ()), now.low, now.high
            staying = [b for b in known if b.high <= begin or end <= b.low or self._stays(b, now)]
            self._pages[page] = [*staying, now]

    def _stays(self, before: _Access, now: _Access) -> bool:
        """Whether an access that this one overlaps still tells something; reports it if the two are a race."""
        ordered = before.operator.precedes(now.operator.stream)
        if not ordered and (now.writes or before.writes):
            low, high = max(before.low, now.low), min(before.high, now.high)
            self._clash(before, low, high, now.operator, now.writes, now.tensor, self._block_at(low))
        if not (now.low <= before.low and before.high <= now.high):
            return True
        if now.writes:
            return not ordered
        return before.writes or before.operator.stream is not now.operator.stream

    def _block_at(self, address: int) -> _Block | None:
        """The allocation in which an address lies."""
        index = bisect_right(self._addresses, address)
        block = self._blocks[self._addresses[index - 1]] if index else None
        return block if block is not None and address < block.address + block.nbytes else None

    def _clash(
        self,
        before: _Access,
        low: int,
        high: int,
        then: Operator,
        writes: bool,
        tensor: Tensor,
        block: _Block | None,
        reuses: bool = False,
    ) -> None:
        offset = 0 if block is None else low - block.address
        first = before.operator
        self._report(Clash(tensor, offset, high - low, low, first, then, before.writes, writes, reuses))

    def clear(self) -> None:
        """Forget everything, so that what is freed later is nobody's concern."""
        self._watched.clear()
        self._blocks.clear()
        self._addresses.clear()
        self._pages.clear()


def ranges(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The bytes of a tensor: where each run of them begins and ends."""
    if not tensor.numel():
        return
    run = 1
    gaps: list[tuple[int, int]] = []
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, length in sorted([(step, n) for step, n in pairs if n > 1 and step > 0]):
        if not gaps and stride == run:
            run *= length
        else:
            gaps.append((stride, length))
    if prod([length for _, length in gaps]) > _MOST_RANGES:
        run += sum([(length - 1) * stride for stride, length in gaps])
        gaps = []
    size, base = tensor.element_size(), tensor.data_ptr()
    for place in product(*_steps(gaps)):
        yield base + sum(place) * size, base + (sum(place) + run) * size


def _steps(gaps: Iterable[tuple[int, int]]) -> list[range]:
    return [range(0, stride * length, stride) for stride, length in gaps]
