"""Records the bytes that each stream reads and writes, and finds accesses that no event orders.

Two accesses to a byte, at least one of which writes, are a race if the vector clock of the later one's stream does not
include the earlier one. This does not depend on timing, so one run is enough. It is valid only for the operators that
ran, in the order in which they ran.

Freed memory is returned to the stream on which it was allocated, as in the caching allocator of an accelerator. The
next allocation on that stream may reuse it without a wait. So all accesses on other streams must be ordered before that
allocation. New memory may still be in use by earlier work of its stream. So all accesses on other streams must be
ordered after the allocation, which counts as a write.
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

_PAGE = 1024  # bytes; accesses are indexed by page
_MOST_RANGES = 256  # a tensor with more contiguous pieces is treated as one range, including the gaps


class Stack(NamedTuple):
    """The call stack of an operator, innermost line first, and the name of the autograd node that ran."""

    lines: tuple[tuple[CodeType, int], ...]
    node: str


class Operator:
    """An operator or collective that was launched on a stream.

    Attributes:
        name: for example ``aten.mul.Tensor``, or ``all_gather`` for a collective.
        stream: its stream.
        number: its number on the stream, from 1.
        stack: where it was launched.
    """

    __slots__ = ("name", "number", "stack", "stream")

    def __init__(self, name: str, stream: Stream, number: int, stack: Stack) -> None:
        self.name, self.stream, self.number, self.stack = name, stream, number, stack

    def precedes(self, stream: Stream) -> bool:
        """Whether work that is queued on `stream` now is ordered after this operator."""
        return self.stream is stream or stream.clock.get(self.stream, 0) >= self.number


class Tensor(NamedTuple):
    """Description of a tensor for reports."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Access:
    """A read or write of an operator of the bytes from address `low` up to `high` (exclusive)."""

    __slots__ = ("high", "low", "operator", "tensor", "writes")

    def __init__(self, low: int, high: int, writes: bool, operator: Operator, tensor: Tensor) -> None:
        self.low, self.high, self.writes = low, high, writes
        self.operator, self.tensor = operator, tensor

    def within(self, low: int, high: int) -> _Access:
        """The part of this access between two addresses."""
        if low <= self.low and self.high <= high:
            return self
        return _Access(max(low, self.low), min(high, self.high), self.writes, self.operator, self.tensor)


@dataclass(frozen=True)
class Clash:
    """Two accesses that no event orders.

    Attributes:
        tensor: tensor of the second access, or of the first one if its memory was freed.
        offset, nbytes: offset in the allocation, and number, of the bytes that both accesses share.
        address: address of the first of these bytes.
        first, then: the operators, in the order of the program.
        first_writes, then_writes: whether they write.
        reuses: whether `then` does not use the tensor, but may reuse its freed memory.
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
    """An allocation: the stream that it is returned to, and the streams for which the allocator waits before reuse."""

    __slots__ = ("__weakref__", "address", "nbytes", "recorded", "stream")

    def __init__(self, address: int, nbytes: int, stream: Stream) -> None:
        self.address, self.nbytes, self.stream = address, nbytes, stream
        self.recorded: set[Stream] = set()


class Memory:
    """All memory that operators use.

    Args:
        report: is called with each clash.
    """

    def __init__(self, report: Callable[[Clash], None]) -> None:
        self._report = report
        self._pages: dict[int, list[_Access]] = {}
        self._blocks: dict[int, _Block] = {}  # by address
        self._addresses: list[int] = []  # addresses of the blocks, sorted
        self._watched: dict[_Block, weakref.ref[torch.UntypedStorage]] = {}
        self._gone: deque[_Block] = deque()  # freed, not yet collected; the garbage collector may append at any time
        self._freed: dict[Stream, list[_Access]] = {}  # accesses to freed memory, by its stream

    # ---- allocations

    def allocate(self, storage: torch.UntypedStorage, operator: Operator) -> None:
        """Record new memory that an operator is about to write. It may reuse memory that was freed on its stream."""
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
        """Record memory that is used. If its allocation was not recorded, assume that `stream` allocated it."""
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
        """Implements `Tensor.record_stream`: before the memory is reused, the allocator waits for `stream`."""
        block = self._block_at(storage.data_ptr())
        if block is not None and block.stream is not stream:
            block.recorded.add(stream)

    def resized(self, before: int, storage: torch.UntypedStorage, operator: Operator) -> None:
        """Record that a storage was resized. Its memory was at address `before`, or it had none (0)."""
        if before == storage.data_ptr() and before:
            return
        block = self._blocks.get(before)
        if block is not None:
            self._gone.append(block)
        self._collect()
        if storage.nbytes():
            self.allocate(storage, operator)

    def _collect(self) -> None:
        """Process freed blocks: move their accesses to `_freed`, until the next allocation on their stream."""
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
        """Record that an operator reads or writes a tensor."""
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
        """Whether `before`, which overlaps `now`, must still be kept. Reports the two if they are a race."""
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
        """The allocation that contains an address."""
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
        """Delete all records, so that memory that is freed later has no effect."""
        self._watched.clear()
        self._blocks.clear()
        self._addresses.clear()
        self._pages.clear()


def ranges(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The contiguous byte ranges of a tensor: address of the first byte, and address after the last."""
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
